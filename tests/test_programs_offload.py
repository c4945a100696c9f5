"""Offload in compiled programs: the same training wherever its states are, and what that moves.

Against the same plan on the device bit for bit, and against the reference within its tolerance;
test_interpret_traffic.py holds copies against frozen ones. What other ranks have a part
of too waits on the device until it is summed: a tied embedding at a pipeline's ends, norms that tp
ranks share, with replicas everything.
"""

from __future__ import annotations

import dataclasses
import itertools
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import paralab as pl
from equality import assert_equal_state, worst
from paralab.experiment import checked
from paralab.interpret.memory import memory
from paralab.interpret.state import Optimizer
from paralab.interpret.train import train
from paralab.launch import launch_program
from paralab.programs.checks import check
from paralab.programs.compile import compiled
from paralab.programs.instructions import COPY, UPDATE, WORKERS
from paralab.programs.tiers import moved
from patience import HANG_S
from together import MODEL, Case, Trained, assert_same_bits, case, cases, in_turn, named

STATES = ("parameters", "gradients", "optimizer")
FILES = {**dict.fromkeys(STATES, "nvme"), "cached": True}
HOST = dict.fromkeys(STATES, "cpu")
LATE = {"gradients": "cpu", "optimizer": "cpu", "delayed": True}
RELAY = {"schedule": "l2l", "recompute": "full", "zero_stage": 3}
SPEC = MODEL.replace(layers=3)
ADAMW = {"optimizer": "adamw", "lr": 1e-3}


def placed(text: str) -> str | dict[str, Any]:
    """Which state is where, as in "pogc": parameters, optimizer, gradients and activations, in
    capital letters in files and else on the host; or the value that this is.
    """
    names = {name[0]: name for name in (*STATES, "activations")}
    if not set(text.lower()) <= set(names):
        return text
    found = {names[c.lower()]: "nvme" if c.isupper() else "cpu" for c in text}
    return {**found, "cached": True}


def away(lines: str, **objects: Any) -> list[Case]:
    """Cases whose states are where the first word says."""
    found = []
    for where, *rest in filter(None, map(str.split, lines.splitlines())):
        one = case(" ".join(rest), offload=placed(where), **objects)
        found.append(one._replace(name=" ".join([where, *rest])))
    return found


PLANS = [
    *away("""
        cpu zero_stage=1 microbatches=2
        POG zero_stage=3 prefetch=0 tied=False
        cpu zero_stage=2 microbatches=2 precision=bf16 clip_norm=0.1
        nvme zero_stage=3 microbatches=2 dp=2 prefetch=2 attention=sdpa
        A recompute=full microbatches=2 dp=2 zero_stage=1
        oG dp=2 zero_stage=2 microbatches=3
        oP dp=2 zero_stage=3 prefetch=2 microbatches=2
        POGA dp=2 zero_stage=3 recompute=full precision=bf16 microbatches=2 dropout=0.1
        oG dp=2 zero_stage=2 microbatches=3 precision=bf16 grad_dtype=fp32 clip_norm=0.1
        cpu dp=2 zero_stage=2 microbatches=2 precision=fp16
        POG pp=2 zero_stage=3 microbatches=3 clip_norm=0.1
        POGA pp=2 zero_stage=3 recompute=full microbatches=4 schedule=interleaved virtual_stages=2
        nvme pp=2 zero_stage=1 precision=bf16 schedule=zb-h2 microbatches=2
        nvme pp=3 zero_stage=2 schedule=gpipe microbatches=2 tied=False layers=5
        cpu pp=2 dp=2 zero_stage=2 schedule=zb-h1 microbatches=3
        a tp=2 recompute=full sequence_parallel=True
        POG tp=2 dp=2 sequence_parallel=True zero_stage=3 clip_norm=0.1
        cpu tp=4 tp_mode=2d zero_stage=2
        cpu dp=2 shard=1 zero_stage=2 precision=fp16 microbatches=2
        nvme dp=4 shard=2 zero_stage=3 precision=bf16 microbatches=2
        pog tp=2 pp=2 dp=2 shard=1 sequence_parallel=True zero_stage=3 microbatches=2
    """),
    *away("""
        POGA microbatches=3 tied=False dropout=0.1
        po microbatches=3 tied=False
        POG microbatches=3 precision=fp16 tied=False
        pog dp=2 microbatches=1
        pog dp=2 microbatches=2 shard=1
        pog tp=2 microbatches=2 sequence_parallel=True
    """, **RELAY),
    case("zero_stage=2 microbatches=2", offload={**placed("og"), "bandwidth": {"d2h": "4MB"}}),
    case("zero_stage=3 precision=fp16", offload={**FILES, "bandwidth": {"disk": "8MB"}}),
    case("tied=False prefetch=0", offload={**HOST, "bandwidth": {"h2d": "4MB"}}, **RELAY),
]  # fmt: skip
# Every two states at every two places, next to one of the axes; which one, changes from one to the
# next.
AXES = [
    "dp=1 microbatches=4",
    "dp=2 microbatches=2",
    "pp=2 microbatches=4",
    "tp=2 sequence_parallel=True microbatches=2",
    "dp=2 shard=1 microbatches=2",
]
WHERE = ("device", "cpu", "nvme")
PLACES = [
    (stage, {"parameters": p, "gradients": g, "optimizer": o})
    for stage, p, g, o in itertools.product((1, 2, 3), WHERE, WHERE, WHERE[1:])
    if (p == "device" or stage == 3) and (g == "device" or stage >= 2)
    if stage < 3 or (WHERE.index(p) + WHERE.index(g) + WHERE.index(o)) % 2
]
EVERYWHERE = [
    case(f"zero_stage={stage} {AXES[number % 5]}", offload=places)
    for number, (stage, places) in enumerate(PLACES)
]


def with_adamw(one: Case) -> Case:
    return one._replace(more=(*one.more, *ADAMW.items()))


def on_device(one: Case) -> Case:
    """The same plan, whose states stay; in place of a relay one that adds gradients up alike."""
    changes: dict[str, Any] = {"offload": None}
    if one.plan.relays:
        changes |= {"schedule": "1f1b", "zero_stage": 3 if one.plan.dp > 1 else 1}
    return Case("on the device", one.model, one.plan.replace(**changes), with_adamw(one).more)


# ---- runs ----------------------------------------------------------------------------------------
def adds_up_alike(one: Case) -> bool:
    """Whether every sum has the order that it has on the device. A relay adds a tied weight's
    gradient up head by head and then embedding by embedding. Under tensor parallelism what other
    ranks have a part of is apart, in buffers that kernels round the ends of in another way.
    """
    plan = one.plan
    tied = plan.relays and one.model.tied and plan.microbatches > 1
    apart = plan.tp > 1 and plan.tiers.gradients != "device"
    replicas = plan.relays and plan.dp > 1 and plan.microbatches > 1  # each adds its own up first
    return not tied and not apart and not replicas


OTHER_SUMS = [one for one in PLANS if not adds_up_alike(one)]


@pytest.fixture(scope="module")
def trained(text) -> Trained:
    here = [on_device(one) for one in [*PLANS, *EVERYWHERE]]
    return Trained([*OTHER_SUMS, *map(with_adamw, [*PLANS, *EVERYWHERE]), *here], text)


@named([*PLANS, *EVERYWHERE])
def test_no_bit_differs_from_the_same_plan_on_the_device(trained, one):
    moved_away, here = trained[with_adamw(one)], trained[on_device(one)]
    if adds_up_alike(one):
        assert_same_bits(here, moved_away)
    for what, most in (("gradients", 1e-5), ("weights", 1e-3)):
        gap, tensor = worst(getattr(here, what), getattr(moved_away, what))
        assert gap <= most, f"{what} of {tensor}: {gap}"


@named(OTHER_SUMS)
def test_what_adds_up_otherwise_trains_what_the_reference_trains(trained, one):
    """All others have the bits of a plan on the device, and so what test_composed.py says of it."""
    trained.assert_equals_the_reference(one)


# ---- rows and bytes ------------------------------------------------------------------------------
def copies_of(program, pp: int) -> list[tuple]:
    """The copies of a program as a report has them."""
    rows = [
        (ins.lane, *moved(program, ins, pp))
        for ins in program.codes[pp]
        if ins.lane in WORKERS and ins.op == COPY
    ]
    return [row for row in rows if row[1] in ("copy", "read", "write")]


def held_by(program, pp: int) -> dict[tuple[str, str], int]:
    """Most bytes of each category on the host and in files."""
    found = memory(program, pp).most
    return {key: size for key, size in found.items() if key[0] != "device" and size}


@named(PLANS)
def test_a_run_copies_what_the_program_says_in_its_order_and_holds_as_much(trained, one):
    report, clips = trained[with_adamw(one)], "clip_norm" in one.settings
    program = compiled(one.model, one.plan, optimizer="adamw", clips=clips)
    check(program)
    for rank in range(one.plan.world_size):
        pp, table = one.plan.place(rank).pp, report.copies[report.copies["rank"] == rank]
        for _, step in table.groupby("step"):
            found = step[["lane", "op", "category", "bytes"]].itertuples(index=False)
            assert [tuple(row) for row in found] == copies_of(program, pp)
        held = report.memory[(report.memory["rank"] == rank) & (report.memory["tier"] != "device")]
        most = held.groupby(["tier", "category"])["bytes"].max()
        assert most[most > 0].to_dict() == held_by(program, pp)


# ---- the relay -----------------------------------------------------------------------------------
@pytest.mark.parametrize("tied", [True, False])
def test_a_relay_brings_each_part_up_once_for_all_micro_batches_of_a_way(tied):
    """The head turns round, so it comes once; a tied embedding stays for it, from its forward to
    its backward. A part's gradient leaves once, behind its last micro-batch.
    """
    for m, dp in ((1, 1), (4, 1), (4, 2)):
        plan = pl.Plan(**RELAY, dp=dp, microbatches=m, offload="cpu")
        program = compiled(SPEC.replace(tied=tied), plan)
        code, units = program.codes[0], program.units[0]
        ups = Counter(ins.unit for ins in code if ins.op == COPY and ins.lane == "h2d")
        once = {u for u, unit in enumerate(units) if unit.part in ("head", *["embedding"] * tied)}
        assert ups == {u: 1 if u in once else 2 for u in range(len(units))}
        downs = [ins.unit for ins in code if ins.op == COPY and ins.lane == "d2h"]
        assert sorted(downs) == list(range(len(units)))


def test_the_next_part_of_a_relay_comes_up_while_this_one_is_at_work():
    def forwards_before_it(prefetch: int) -> int:
        plan = pl.Plan(**RELAY, microbatches=3, offload="cpu", prefetch=prefetch)
        code = compiled(SPEC.replace(tied=False), plan).codes[0]
        ups = [at for at, ins in enumerate(code) if ins.op == COPY and ins.lane == "h2d"]
        return sum(ins.op == "FORWARD" for ins in code[: ups[2]])

    assert [forwards_before_it(prefetch) for prefetch in (0, 1, 2)] == [6, 3, 0]


# ---- delayed updates -----------------------------------------------------------------------------
DELAYED = cases("""
    zero_stage=2
    zero_stage=3 dp=2
    zero_stage=2 pp=2 microbatches=2
    zero_stage=2 tp=2 sequence_parallel=True
    zero_stage=2 dp=2 shard=1
""", offload=LATE, steps=4)  # fmt: skip


def one_late(spec, samples, steps, lr, data):
    """w(t+1) = w(t) - lr * gradient at w(t-1), with w(-1) = w(0)."""
    gpt, losses = pl.reference.GPT(spec), []
    newest = {name: p.detach().clone() for name, p in gpt.named_parameters()}
    for step in range(steps):
        updated = {name: p.clone() for name, p in newest.items()}  # without this step's gradient
        gpt.zero_grad()
        ((tokens, targets),) = pl.reference.batches(
            spec, step=step, microbatch_size=samples, data=data
        )
        loss = gpt(tokens, targets)
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for name, p in gpt.named_parameters():
                newest[name] -= lr * p.grad
                p.copy_(updated[name])
    return {
        "losses": losses,
        "weights": {name: p.numpy() for name, p in newest.items()},
        "gradients": {name: p.grad.numpy() for name, p in gpt.named_parameters()},
    }


def slow_updates(context, jobs):
    """`in_turn`, on a host whose processor is slow: what does not wait for it comes too early."""
    step = Optimizer.step

    def slow(self, *args, **more):
        time.sleep(0.02)
        step(self, *args, **more)

    Optimizer.step = slow
    return in_turn(context, jobs)


@pytest.fixture(scope="module")
def late(text) -> Trained:
    return Trained(DELAYED, text, program=slow_updates)


@pytest.fixture(scope="module")
def expected_late(text) -> dict[int, dict]:
    sizes = sorted({one.plan.global_batch for one in DELAYED})

    def each(context):
        return [one_late(MODEL, samples, 4, 0.5, text) for samples in sizes]

    return dict(zip(sizes, launch_program(each, 1, (), device="cpu")[0], strict=True))


@named(DELAYED)
def test_a_delayed_update_is_one_update_late_and_nothing_else(late, expected_late, one):
    assert_equal_state(expected_late[one.plan.global_batch], late[one])
    copies = late[one].copies
    rows = Counter(copies[copies["rank"] == 0]["step"])
    assert len(set(rows.values())) == 1 and set(rows) == set(range(4))  # all steps are alike


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_no_rank_waits_in_a_step_for_an_update_that_runs_next_to_the_following_step(precision):
    program = compiled(MODEL, pl.Plan(zero_stage=2, offload=LATE, precision=precision))
    check(program)
    code = program.codes[0]
    updates = {ins.writes for ins in code if ins.op == UPDATE}
    assert updates and not [ins for ins in code if ins.op == "WAIT" and ins.reads in updates]


# ---- checkpoints ---------------------------------------------------------------------------------
def test_a_training_goes_on_on_other_tiers_and_axes(run, tmp_path):
    first = pl.Plan(zero_stage=3, microbatches=2, offload="cpu")
    folder = {"save": tmp_path / "a"}
    run(MODEL, first, steps=3, **folder)
    whole = run(MODEL, pl.Plan(zero_stage=3, microbatches=2), steps=5, keep_state=True)
    files = first.replace(offload=FILES)
    cut = first.replace(dp=2, microbatches=1, shard=1, tp=2, sequence_parallel=True)
    for plan, most in ((files, 0.0), (cut, 2e-4)):
        more = run(MODEL, plan, steps=2, resume=tmp_path / "a", keep_state=True)
        assert worst(whole.weights, more.weights)[0] <= most


def test_a_save_ends_a_delay_and_the_run_that_saves_goes_on_as_the_resumed_one(run, tmp_path):
    plan = pl.Plan(zero_stage=2, offload=LATE)
    whole = run(MODEL, plan, steps=5, save=tmp_path / "a", save_every=3, keep_state=True)
    run(MODEL, plan, steps=3, save=tmp_path / "b")
    more = run(MODEL, plan, steps=2, resume=tmp_path / "b", keep_state=True)
    assert worst(whole.weights, more.weights)[0] == 0.0
    assert set(whole.copies["step"]) == set(range(5))


# ---- errors --------------------------------------------------------------------------------------
def cut(folder: Path) -> None:
    for path in folder.glob("states-*"):
        with open(path, "r+b") as file:
            file.truncate(path.stat().st_size // 2)


def fill(folder: Path) -> None:
    for path in folder.glob("parameters-*"):
        path.unlink()
        path.symlink_to("/dev/full")


@pytest.mark.parametrize(("spoil", "words"), [
    (shutil.rmtree, ["offload cannot", "No such file or directory"]),
    (cut, ["offload cannot read", "it has been cut short"]),
    (fill, ["offload cannot"]),
])  # fmt: skip
def test_an_error_of_a_lane_reaches_the_rank_where_it_waits(text, tmp_path, spoil, words):
    """A training whose files are spoiled behind its back after the first step."""
    plan = pl.Plan(zero_stage=3, offload=FILES)
    settings = {**checked(MODEL, plan, steps=3, data=text), "offload_folder": str(tmp_path)}

    def spoiled(context):
        def progress(done, total):
            if done == 1:
                spoil(tmp_path / "rank-0")

        return train(dataclasses.replace(context, progress=progress), MODEL, plan, **settings)

    with pytest.raises(pl.RankError) as failed:
        launch_program(spoiled, 1, (), timeout=HANG_S, device="cpu")
    for said in (*words, "TMPDIR", "resume from the last one"):
        assert said in str(failed.value)
