"""Promises of the schematics: they show what the objects do that they are drawn from."""

import pytest

import paralab as pl
from paralab import view
from paralab.parallel import schedules
from paralab.programs.compile import compiled
from paralab.spec.tiers import Offload
from paralab.theory.offload import link_bytes
from paralab.theory.pipeline import simulate
from paralab.view import theme
from refusals import refuses

MODEL = pl.ModelSpec(layers=2, hidden=32, heads=2, seq_len=16, vocab=64)
DP = 4


def test_each_zero_stage_shards_one_state_more_and_shards_are_a_rankth():
    table = view.zero_shards(MODEL, DP).table
    kept = table[table["rank"] == 0].set_index(["stage", "category"])["bytes"]
    psi = 4 * MODEL.num_params
    assert kept[0, "parameters"] == kept[0, "gradients"] == psi
    for stage, category in ((1, "optimizer"), (2, "gradients"), (3, "parameters")):
        assert kept[stage - 1, category] == pytest.approx(kept[0, category], rel=1e-3)
        assert kept[stage, category] == pytest.approx(kept[0, category] / DP, rel=0.05)
    assert (table.groupby(["stage", "category"])["bytes"].nunique() == 1).all()
    refuses("dp=1", view.zero_shards, MODEL, 1)
    refuses("model=None: not a model description", view.zero_shards, None)
    for dp, name in ((DP, "rank 3"), (16, "15")):  # the words in the margin have the same room
        chart = view.zero_shards(MODEL, dp)
        low, high = chart.layout.xaxis.range
        assert -low / (high - low) == pytest.approx(1.35 / 6.1)
        assert name in [note.text for note in chart.layout.annotations]


def test_the_area_of_a_state_is_its_bytes():
    chart, grey = view.zero_shards(MODEL, DP), theme.look().wait
    cells = [cell for cell in chart.layout.shapes if cell.fillcolor != grey]
    areas = [(cell.x1 - cell.x0) * (cell.y1 - cell.y0) for cell in cells]
    sizes = chart.table["bytes"].tolist()
    shares = [size / sum(sizes) for size in sizes]
    assert [area / sum(areas) for area in areas] == pytest.approx(shares, rel=0.01)


def test_a_units_parameters_are_gathered_whenever_it_computes_and_then_freed():
    plan, unit = pl.Plan(dp=DP, zero_stage=3), 1
    chart, code = view.zero_unit(MODEL, plan, unit), compiled(MODEL, plan).codes[0]
    assert chart.finding.startswith("A rank holds all of blocks.0 during ")
    table = chart.table
    gathers = [at for at, ins in enumerate(code) if ins.op == "ALL_GATHER" and ins.unit == unit]
    whole = table[table["value"] == "gathered parameters"]
    assert whole["from"].tolist() == gathers and len(gathers) == 2
    uses = [
        at for at, ins in enumerate(code)
        if ins.op in ("FORWARD", "BACKWARD") and any(v[:2] == ("w", unit) for v in ins.reads)
    ]  # fmt: skip
    for start, use, end in zip(whole["from"], uses, whole["until"], strict=True):
        assert start < use < end <= use + 3
    shard = table[table["value"] == "own shard of the parameters"]
    assert shard["bytes"].item() * DP == whole["bytes"].iloc[0]
    assert (shard["from"].item(), shard["until"].item()) == (0, len(code))
    said = [text for trace in chart.data for text in trace.hovertext]
    assert any(text.endswith(f"instructions 0 to {len(code) - 1}") for text in said)
    hpz = view.zero_unit(MODEL, plan.replace(secondary_shard=2), unit).table.set_index("value")
    assert 2 * hpz["bytes"]["second shard of the parameters"] == whole["bytes"].iloc[0]
    assert view.zero_unit(MODEL, plan.replace(offload="cpu"), unit).finding.endswith("instructions")
    for wrong in (pl.Plan(dp=DP, zero_stage=2), pl.Plan(dp=2, pp=2, zero_stage=1, microbatches=2)):
        refuses("units are gathered under ZeRO-3", view.zero_unit, MODEL, wrong)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_the_ring_sends_the_chunks_of_the_note_and_ends_with_every_sum(n):
    table = view.ring(n).table
    assert (table[table["step"] == 2 * (n - 1)]["terms"] == n).all()
    sent = table[table["sent"]].set_index(["rank", "step"])["chunk"]
    for rank in range(n):  # parallel/collectives.py, [Note: chunks]
        down = [(rank - s) % n for s in range(n - 1)]
        assert sent[rank].tolist() == down + [(rank + 1 - s) % n for s in range(n - 1)]
    done = table[(table["step"] == n - 1) & (table["terms"] == n)].sort_values("rank")
    assert done["chunk"].tolist() == [(rank + 1) % n for rank in range(n)]


def test_the_data_flow_has_the_bytes_of_the_program_on_its_arrows():
    plan = pl.Plan(dp=2, zero_stage=3, offload="nvme")
    chart = view.data_flow(MODEL, plan)
    moved = [(link, category, n) for link, parts in link_bytes(MODEL, plan).items()
             for category, n in parts.items() if n]  # fmt: skip
    assert sorted(chart.table.itertuples(index=False, name=None)) == sorted(moved)
    assert sum(note.showarrow for note in chart.layout.annotations) == 4
    size = {link: theme.scaled(sum(n for at, _, n in moved if at == link), "B")
            for link, *_ in moved}  # fmt: skip
    (boxes,) = chart.data  # invisible, and it has something to say where it is pointed at
    device, host, files = boxes.hovertext
    assert device == f"device: {size['h2d']} come in per step, {size['d2h']} go out"
    assert host.startswith("host: ")
    assert files == f"files: {size['disk write']} come in per step, {size['disk read']} go out"
    activations = pl.Plan(recompute="full", offload=Offload(activations="cpu"))
    for which, where in ((plan, "host"), (activations, "device")):
        said = [note.text for note in view.data_flow(MODEL, which).layout.annotations]
        (box,) = [text for text in said if "optimizer's update" in text]
        assert where in box
    refuses("nothing leaves the device", view.data_flow, MODEL, pl.Plan(dp=2))


def test_schedules_stand_on_one_axis_and_end_where_their_simulation_does():
    found = {"GPipe": schedules.gpipe(4, 8), "interleaved": schedules.interleaved(4, 8, 2)}
    chart = view.schedules(found)
    ends = chart.table[chart.table["kind"] != "wait"].groupby("report")["end"].max()
    for name, share in (("GPipe", 1), ("interleaved", 2)):  # a chunk is a half of the layers
        made = simulate(found[name], forward=1e-3 / share, backward=2e-3 / share)
        assert ends[name] == pytest.approx(made.makespan)
    times = ends["GPipe"] / ends["interleaved"]
    assert chart.finding == f"GPipe takes {100 * times - 100:.0f} % longer than interleaved"
    refuses("nothing to draw", view.schedules, {})
    refuses("schedule='1f1b': not a schedule", view.schedules, {"1F1B": "1f1b"})


def test_schedules_of_equal_length_are_said_to_take_the_same_time():
    lists = {"GPipe": schedules.gpipe(2, 3), "1F1B": schedules.one_f_one_b(2, 3)}
    for named, said in (
        (lists, "GPipe and 1F1B take the same time"),
        ({"A": schedules.naive(2, 3), **lists}, "A takes 50 % longer than GPipe and 1F1B"),
        ({**lists, "Z": schedules.zb_h1(2, 3)}, "GPipe and 1F1B take "),
        ({"one": schedules.zb_h1(4, 8)}, "One: the bubble is"),
    ):
        assert view.schedules(named).finding.startswith(said)
