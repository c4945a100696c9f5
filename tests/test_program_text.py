"""`pl.program` promises a step to read, folded without loss, and what two of them differ in."""

from __future__ import annotations

import html
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import paralab as pl
from paralab import cli
from paralab.interpret.folding import NUMBER, Fold, Line, fold
from paralab.programs import insert, wait
from paralab.programs.compile import compiled
from paralab.programs.instructions import BACKWARD, COLLECTIVES, COMPUTE, FORWARD, WAIT
from refusals import refuses, shell_refuses

LAPTOP = pl.ModelSpec.preset("laptop")
SPEC = pl.ModelSpec(layers=6, hidden=48, heads=4, seq_len=24, vocab=260)
PLANS = [
    {},
    {"dp": 4, "zero_stage": 2, "microbatches": 3, "bucket_bytes": 40_000},
    {"dp": 4, "zero_stage": 3, "microbatches": 3, "recompute": "full"},
    {"dp": 4, "zero_stage": 3, "secondary_shard": 2},
    {"pp": 2, "microbatches": 8, "dp": 2},
    {"pp": 3, "microbatches": 6, "schedule": "interleaved", "virtual_stages": 2},
    {"pp": 2, "tp": 2, "microbatches": 4, "schedule": "zb-h1", "sequence_parallel": True},
    {"tp": 4, "tp_mode": "2d"},
]


def lines_of(text: str) -> list[str]:
    """The printed lines, without the title and without spaces."""
    return [" ".join(line.split()) for line in text.splitlines()[1:]]


def unfolded(items) -> list[tuple[str, int]]:
    """The lines that folded ones stand for; a position is told of first stretches alone."""
    found = []
    for item in items:
        if isinstance(item, Fold):
            for times in range(item.count):
                found += unfolded([moved(line, item.moves, times) for line in item.body])
        else:
            found.append(item.text)
    return found


def moved(item, moves, times):
    """The counterpart of a line or a fold, ``times`` repetitions later."""
    if isinstance(item, Fold):
        first, last = ([moved(one, moves, times) for one in of] for of in (item.body, item.last))
        return Fold(first, last, item.count, item.moves)
    return Line(NUMBER.sub(lambda n: n[1] + str(int(n[2]) + times * moves.get(n[1], 0)), item.text))


# ---- a program to read ---------------------------------------------------------------------------
def test_zero_3_reads_gather_wait_compute_free():
    shown = lines_of(repr(pl.program(LAPTOP, pl.Plan(dp=4, zero_stage=3))))
    begin = shown.index("4 × 3 blocks, i = 0 … 2")
    assert shown[begin + 1 : begin + 4] == [
        "4 ALL_GATHER w blocks.i+1 mb 0 over dp, 793 kB",
        "5 WAIT w blocks.i mb 0",
        "6 FORWARD blocks.i mb 0 frees w, x",
    ]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_every_instruction_is_a_line_and_folded_lines_stand_for_all(plan):
    plan = pl.Plan(**plan)
    for rank in {0, plan.world_size - 1}:
        shown = pl.program(SPEC, plan, rank=rank)
        code = compiled(SPEC, plan).codes[plan.place(rank).pp]
        assert shown.lines == code and len(shown) == len(code)
        flat = list(shown.rows(folded=False))
        assert [row.position for row in flat] == list(range(len(code)))
        assert [row.ins.op for row in flat] == [ins.op for ins in code]
        computed = [(row.ins.op, row.what) for row in flat if row.ins.op in COMPUTE]
        assert len(set(computed)) == len(computed)  # no two ranges of ops have one name
        texts = [f"{row.ins.op}\t{row.what}\t{row.frees}" for row in flat]
        folded = fold([Line(text, at) for at, text in enumerate(texts)])
        assert unfolded(folded) == texts
        assert len(list(shown.rows())) == sum(item.length for item in folded) <= len(texts)
        assert not shown.refusal


LINES = st.builds(
    "{} blocks.{} mb {}".format, st.sampled_from("AB"), st.integers(0, 3), st.integers(0, 2)
)


@given(st.lists(LINES, max_size=24))
def test_folding_any_lines_loses_none(texts):
    items = fold([Line(text, at) for at, text in enumerate(texts)], worth=0)
    assert unfolded(items) == texts

    def in_words(items, letters) -> list[str]:
        said = []
        for item in items:
            if isinstance(item, Fold):
                assert set(item.letters).isdisjoint(letters)  # a letter means one thing
                said += in_words(item.body, {**letters, **item.letters})
            else:
                said.append(item.lettered(letters))
        return said

    assert all("blocks." in said for said in in_words(items, {}))


def test_a_backward_counts_down_and_what_is_ahead_is_said_by_its_distance():
    texts = [t for i in (5, 4, 3, 2) for t in (f"GATHER\tblocks.{i - 1}", f"BACKWARD\tblocks.{i}")]
    (item,) = fold([Line(text, at) for at, text in enumerate(texts)])
    assert item.head == "× 4 blocks, i = 5 … 2"
    assert [line.lettered(item.letters) for line in item.body] == [
        "GATHER\tblocks.i-1",
        "BACKWARD\tblocks.i",
    ]


def test_a_line_names_the_asking_ranks_peer_and_a_workers_lane():
    plan = pl.Plan(dp=2, tp=2, pp=2, microbatches=2)
    sent = pl.program(SPEC, plan, rank=6).filter(op="send").rows(folded=False)
    assert {row.what.partition(" to ")[2] for row in sent} == {"rank 2, 9.22 kB"}
    shown = pl.program(SPEC, pl.Plan(dp=2, zero_stage=2, offload="cpu"))
    whats = {ins.lane: shown.names.what(ins) for _, ins in shown if ins.op != WAIT}
    assert whats["h2d"].endswith(" over h2d") and whats["host"].endswith(" on host")


def test_buckets_are_said_what_lies_in_them():
    shown = repr(pl.program(SPEC, pl.Plan(dp=2, bucket_bytes=40_000)))
    assert re.search(r"\nbucket 0: head\.\S+ … blocks\.5\.\S+, \d+ parameters\n", shown)


@pytest.mark.parametrize(("settings", "most"), [
    ({"microbatches": 4}, 1),
    ({"pp": 2}, 1),
    ({"pp": 2, "microbatches": 4, "offload": "cpu", "zero_stage": 2}, 1),
    ({"pp": 2, "microbatches": 4}, 14),  # all: the stage before waits for this backward
])  # fmt: skip
def test_so_many_of_zeros_sums_are_in_flight(settings, most):
    plan = pl.Plan(**{"dp": 2, "zero_stage": 1, "bucket_bytes": 2**13} | settings)
    flying, found = set(), []
    for ins in pl.program(SPEC, plan).code:
        if ins.op == "REDUCE_SCATTER":
            flying.add(ins.writes)
        elif ins.op == "WAIT":
            flying.discard(ins.reads)
        found.append(len(flying))
    assert max(found) == most


# ---- parts of it ---------------------------------------------------------------------------------
def test_filters_choose_lines_and_keep_their_positions():
    shown = pl.program(SPEC, pl.Plan(dp=4, zero_stage=3, microbatches=2))
    chosen = shown.filter(op=("all_gather", "wait"), lane="dp", microbatch=1)
    assert all(
        ins.op in ("ALL_GATHER", WAIT) and ins.lane == "dp" and ins.mb == 1 for _, ins in chosen
    )
    wanted = [at for at, ins in enumerate(shown.lines) if (at, ins) in list(chosen)]
    assert [row.position for row in chosen.rows(folded=False)] == wanted
    assert f"{len(chosen)} of {len(shown)} instructions" in repr(chosen)
    gathers = chosen.filter(op="all_gather")
    assert set(gathers.count()) == {("ALL_GATHER", "dp")}
    assert 0 < len(gathers) < len(chosen)
    forwards = shown.filter(lane="compute", op="forward")
    assert len(forwards) == shown.count()[FORWARD, "compute"] == 2 * (SPEC.layers + 2)
    assert repr(shown.filter()) == repr(shown) and not len(shown.filter(microbatch=()))
    for same in (np.int64(1), np.array([1]), iter([1])):
        assert repr(shown.filter(microbatch=same)) == repr(shown.filter(microbatch=1))


@pytest.mark.parametrize(("asked", "words"), [
    ({"op": "gather"}, "op='gather': unknown choice; legal: 'ADD'"),
    ({"microbatch": 1}, "microbatch=1: out of range"),
    ({"lane": "tp"}, "lane='tp': no instruction of this program runs there; legal: compute, dp"),
    ({"rank": 2}, "rank=2: out of range"),
    ({"clip_norm": -1}, "clip_norm=-1: out of range"),
    ({"plan": pl.Plan(pp=9)}, "pp=9"),
])  # fmt: skip
def test_what_has_no_program_and_what_no_line_has_is_refused(asked, words):
    filters = {"op", "microbatch", "lane"}.issuperset(asked)
    with pytest.raises(ValueError, match=re.escape(words)):
        shown = pl.program(**{"model": SPEC, "plan": pl.Plan(dp=2), **({} if filters else asked)})
        shown.filter(**asked)


# ---- what two differ in --------------------------------------------------------------------------
def test_from_zero_2_to_zero_3_on_one_screen():
    before, after = (pl.program(LAPTOP, pl.Plan(dp=4, zero_stage=stage)) for stage in (2, 3))
    difference = before.diff(after)
    shown = repr(difference).splitlines()
    assert len(shown) <= 15
    lines = [" ".join(line.split()) for line in shown]
    parts = "embedding, blocks.0 … blocks.3 (× 4 blocks), head"
    back = "head, blocks.3 … blocks.0 (× 4 blocks), embedding"
    assert f"+ ALL_GATHER shard → w over dp, before FORWARD 6 times, 3.34 MB {parts}" in lines
    assert "~ FORWARD also frees w 5 times blocks.0 … blocks.3 (× 4 blocks), head" in lines
    assert f"+ REDUCE_SCATTER grad → part over dp, after BACKWARD 6 times, 3.34 MB {back}" in lines
    assert "- ALL_GATHER shard → w over dp once, 3.34 MB bucket 0" in lines
    assert sum(line.startswith("+ ALL_GATHER") for line in lines) == 2


def test_a_difference_counts_every_instruction():
    before, after = (pl.program(SPEC, pl.Plan(**plan)) for plan in PLANS[1:3])
    difference = before.diff(after)
    for sign, shown in (("+", after), ("-", before)):
        changed = sum(change.count for change in difference.changes if change.sign == sign)
        assert difference.same + changed == sum(ins.op != WAIT for _, ins in shown)


def test_what_sums_several_gradients_in_one_message_says_how_many():
    before = pl.program(SPEC, pl.Plan(tp=2))
    after = pl.program(SPEC, pl.Plan(tp=2, sequence_parallel=True), clip_norm=1.0)
    of = {change.op: change.of for change in before.diff(after).changes if "grad" in change.does}
    assert (of["ALL_REDUCE"], of["NORM"]) == ("blocks.0 and 6 more", "head and 7 more")


def test_equal_programs_do_not_differ():
    shown, again = (pl.program(SPEC, pl.Plan(dp=2, bucket_bytes=40_000)) for _ in range(2))
    assert repr(shown.diff(again)).endswith("\nno difference")
    refuses("other=3: not a program to read", shown.diff, 3)
    calls = {at: [wait(i)] for at, i in enumerate(shown.code) if i.op in COLLECTIVES}
    moved = shown.diff(shown.replace(insert(shown.code, calls)))
    assert all("but where ranks wait" in f() for f in (moved.__repr__, moved._repr_html_))


def test_another_schedule_moves_what_is_the_same():
    plans = [pl.Plan(pp=2, microbatches=4, schedule=name) for name in ("gpipe", "1f1b")]
    difference = pl.program(SPEC, plans[0]).diff(pl.program(SPEC, plans[1]))
    assert {change.sign for change in difference.changes} == {"↕"}
    assert any(change.op == BACKWARD for change in difference.changes)


# ---- in a notebook and in a shell ----------------------------------------------------------------
def test_a_notebook_shows_the_same_lines_in_colours_of_one_meaning():
    before, after = (pl.program(LAPTOP, pl.Plan(dp=4, zero_stage=stage)) for stage in (2, 3))
    for shown in (after, before.diff(after)):
        page = shown._repr_html_()
        assert "<script" not in page and page.count("<table>") == 1
        legend = re.findall(r'<span><i style="background:(#\w+)"></i>([^<]+)</span>', page)
        assert len(dict(legend)) == len(legend) == len({said for _, said in legend}) > 3
        used = set(re.findall(r"background:(#\w+)\"></i><code>", page))
        assert used == {fill for fill, _ in legend}
    cells = [html.unescape(cell) for cell in re.findall(r"<td>([^<]*)</td>", after._repr_html_())]
    assert [row.what for row in after.rows() if row.ins is not None] == list(filter(None, cells))


def test_the_shell_prints_what_a_notebook_shows(capsys):
    plan = pl.Plan(dp=4, zero_stage=2)
    settings = ["--dp", "4", "--zero-stage", "2"]
    assert cli.main(["program", *settings, "--rank", "3"]) == 0
    assert capsys.readouterr().out.rstrip() == repr(pl.program(LAPTOP, plan, rank=3))
    assert cli.main(["program", *settings, "--all", "--op", "forward,backward"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 2 * 6 + 1 and all("WARD" in line for line in lines[1:-1])


def test_a_shell_refuses_in_the_same_words(capsys):
    said = shell_refuses(capsys, "program", "--lane", "tp")
    assert "lane='tp': no instruction of this program runs there" in said


def test_the_shell_prints_a_prediction(capsys):
    asked = ["predict", "--dp", "8", "--tp", "4", "--pp", "2", "--microbatches", "8"]
    assert cli.main([*asked, "--cluster", "dgx-a100"]) == 0
    out = capsys.readouterr().out
    assert "Report(predicted" in out
    for line in ("step time", "bubble", "tp, inside a node", "dp, across nodes", "activations"):
        assert line in out
