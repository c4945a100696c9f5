"""Offload in compiled programs: the same training wherever its states lie, and what that moves.

Against the same plan on the device bit for bit, against the reference within its tolerance, and
against the frozen rows and bytes of the core before (tests/oracles).
"""

from __future__ import annotations

import shutil
import types
from collections import Counter
from pathlib import Path

import pytest

import oracles
import paralab as pl
from dry_offload import dry_host
from equality import assert_equal_state, references, worst
from paralab.interpret.memory import memory
from paralab.launch import launch_program
from paralab.programs.checks import check
from paralab.programs.compile import compiled
from paralab.programs.instructions import COPY, UPDATE, WORKERS
from paralab.programs.tiers import moved
from paralab.report.merge import whole_model

pytestmark = pytest.mark.filterwarnings("ignore:zero_stage=3 with pp")
STEPS, LR = 2, {"adamw": 1e-3, "sgd": 0.5}
MODEL = pl.ModelSpec(layers=3, hidden=40, heads=4, seq_len=24, vocab=260)
STATES = ("parameters", "gradients", "optimizer")
FILES = {**dict.fromkeys(STATES, "nvme"), "cached": True}
ALL = {**FILES, "activations": "nvme"}
HOST = dict.fromkeys(STATES, "cpu")
LATE = {"gradients": "cpu", "optimizer": "cpu", "delayed": True}
RELAY = {"schedule": "l2l", "recompute": "full", "zero_stage": 3, "microbatches": 3}

# name: (plan, what is other than MODEL, clip_norm)
PLANS = {
    "optimizer on the host": ({"zero_stage": 1, "offload": "cpu", "microbatches": 2}, {}, None),
    "ZeRO-Offload, a slow way down": (
        {"zero_stage": 2, "microbatches": 2,
         "offload": {"gradients": "cpu", "optimizer": "cpu", "bandwidth": {"d2h": "4MB"}}},
        {}, None),
    "ZeRO-Infinity": ({"zero_stage": 3, "offload": "nvme", "microbatches": 2}, {}, None),
    "no prefetch": ({"zero_stage": 3, "offload": FILES, "prefetch": 0}, {}, None),
    "bf16, clipped": (
        {"zero_stage": 2, "offload": "cpu", "precision": "bf16", "microbatches": 2}, {}, 0.1),
    "fp16, slow files, clipped": (
        {"zero_stage": 3, "precision": "fp16", "microbatches": 2,
         "offload": {**FILES, "bandwidth": {"disk": "8MB"}}}, {}, 0.1),
    "activations on the host": (
        {"offload": {"activations": "cpu"}, "recompute": "full", "microbatches": 2}, {}, None),
    "relay, a slow way up": (
        {**RELAY, "offload": {**HOST, "bandwidth": {"h2d": "4MB"}}, "prefetch": 0},
        {"tied": False}, None),
    "relay, everything in files": (
        {**RELAY, "offload": ALL}, {"tied": False, "dropout": 0.1}, None),
    "relay, tied": ({**RELAY, "offload": {**ALL, "activations": "cpu"}}, {}, None),
    "relay, gradients on the device": (
        {**RELAY, "offload": {"parameters": "cpu", "optimizer": "cpu"}}, {"tied": False}, None),
    "relay, fp16": ({**RELAY, "offload": FILES, "precision": "fp16"}, {"tied": False}, None),
    "two ranks, stage 1, files": (
        {"dp": 2, "zero_stage": 1, "offload": {"optimizer": "nvme", "cached": True}}, {}, 0.1),
    "two ranks, gradients in files": (
        {"dp": 2, "zero_stage": 2, "microbatches": 3,
         "offload": {"gradients": "nvme", "optimizer": "cpu", "cached": True}}, {}, None),
    "two ranks, stage 3": (
        {"dp": 2, "zero_stage": 3, "offload": "cpu", "microbatches": 2}, {}, 0.1),
    "two ranks, parameters in files, two ahead": (
        {"dp": 2, "zero_stage": 3, "prefetch": 2, "microbatches": 2,
         "offload": {"parameters": "nvme", "optimizer": "cpu", "cached": True}}, {}, None),
    "two ranks, parameters on the device": (
        {"dp": 2, "zero_stage": 3, "offload": {"optimizer": "nvme", "cached": True}}, {}, None),
    "two ranks, bf16, everything in files": (
        {"dp": 2, "zero_stage": 3, "offload": ALL, "recompute": "full", "precision": "bf16",
         "microbatches": 2}, {"dropout": 0.1}, None),
    "two ranks, bf16 into fp32, gradients in files": (
        {"dp": 2, "zero_stage": 2, "microbatches": 3, "precision": "bf16", "grad_dtype": "fp32",
         "offload": {"gradients": "nvme", "optimizer": "cpu", "cached": True}}, {}, 0.1),
    "pipeline": ({"pp": 2, "zero_stage": 2, "offload": "cpu", "microbatches": 3}, {}, None),
    "pipeline, stage 3, files": (
        {"pp": 2, "zero_stage": 3, "offload": FILES, "microbatches": 3}, {}, 0.1),
    "pipeline, activations": (
        {"pp": 2, "offload": {"activations": "nvme", "cached": True}, "recompute": "full",
         "microbatches": 4, "schedule": "interleaved", "virtual_stages": 2}, {"layers": 4}, None),
    "tensor parallel": ({"tp": 2, "zero_stage": 2, "offload": "cpu", "microbatches": 2}, {}, None),
    "tensor parallel, activations": (
        {"tp": 2, "offload": {"activations": "cpu"}, "recompute": "full",
         "sequence_parallel": True}, {}, None),
    "replicas, fp16": (
        {"dp": 2, "shard": 1, "zero_stage": 2, "offload": "cpu", "precision": "fp16",
         "microbatches": 2}, {}, None),
    "relay, two ranks": ({**RELAY, "dp": 2, "microbatches": 1, "offload": HOST}, {}, None),
    "pipeline and data parallel": (
        {"pp": 2, "dp": 2, "zero_stage": 2, "offload": "cpu", "schedule": "zb-h1",
         "microbatches": 3}, {}, None),
}  # fmt: skip


def plan_of(name: str) -> tuple[pl.ModelSpec, pl.Plan, float | None]:
    settings, change, clip = PLANS[name]
    plan = pl.Plan(**{"bucket_bytes": 40_000, "microbatch_size": 1, **settings})
    return MODEL.replace(**change), plan, clip


def on_device(plan: pl.Plan) -> pl.Plan:
    """The same plan, whose states stay; in place of a relay one that adds gradients up alike."""
    if plan.relays:
        stage = 3 if plan.dp > 1 else 1
        return plan.replace(schedule="1f1b", offload=None, zero_stage=stage)
    return plan.replace(offload=None)


# ---- runs ----------------------------------------------------------------------------------------
def several(context, jobs):
    """Trainings, one after the other, in the same processes."""
    from paralab.interpret.train import train

    return [train(context, model, plan, **settings) for model, plan, settings in jobs]


def settings_of(text, folder, *, steps=STEPS, optimizer="sgd", clip_norm=None, **more):
    return {
        "steps": steps, "optimizer": optimizer, "lr": LR[optimizer], "clip_norm": clip_norm,
        "data": str(text), "seed": 0, "keep_state": True, "offload_folder": str(folder), **more,
    }  # fmt: skip


def report_of(model: pl.ModelSpec, plan: pl.Plan, parts: list) -> types.SimpleNamespace:
    state = {
        what: whole_model({p["rank"]: p[what] for p in parts if p[what]}, plan, model)
        for what in ("weights", "gradients")
    }
    return types.SimpleNamespace(**state, losses=[p["losses"] for p in parts], parts=parts)


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    """{(name, optimizer, on the device): report} of every plan; those of a size in one launch."""
    asked: dict[int, list] = {}
    folder = tmp_path_factory.mktemp("tiers")
    for name in PLANS:
        model, plan, clip = plan_of(name)
        plan.validate(model)
        for optimizer in LR:
            for here, how in enumerate((plan, on_device(plan))):
                own = folder / f"{len(asked)} {name} {optimizer}"
                settings = settings_of(text, own, optimizer=optimizer, clip_norm=clip)
                key = (name, optimizer, bool(here))
                asked.setdefault(plan.world_size, []).append((key, (model, how, settings)))
    found = {}
    for ranks, runs in asked.items():
        jobs = [job for _, job in runs]
        parts = launch_program(several, ranks, (jobs,), timeout=120, device="cpu")
        for (key, (model, plan, _)), mine in zip(runs, zip(*parts, strict=True), strict=True):
            found[key] = report_of(model, plan, list(mine))
    found["left"] = [path for path in folder.rglob("*") if path.is_file()]
    return found


def adds_up_alike(model: pl.ModelSpec, plan: pl.Plan) -> bool:
    """Whether every sum has the order that it has on the device. A relay adds a tied weight's
    gradient up head by head and then embedding by embedding. Under tensor parallelism what other
    ranks have a part of lies apart, in buffers that kernels round the ends of in another way.
    """
    tied = plan.relays and model.tied and plan.microbatches > 1
    apart = plan.tp > 1 and plan.tiers.gradients != "device"
    return not tied and not apart


@pytest.mark.parametrize("optimizer", LR)
@pytest.mark.parametrize("name", PLANS)
def test_no_bit_differs_from_the_same_plan_on_the_device(trained, name, optimizer):
    model, plan, _ = plan_of(name)
    away, here = (trained[name, optimizer, where] for where in (False, True))
    for what, most in (("gradients", 1e-6), ("weights", 1e-3)):
        gap, tensor = worst(getattr(here, what), getattr(away, what))
        assert gap <= (0.0 if adds_up_alike(model, plan) else most), f"{what} of {tensor}: {gap}"
    if adds_up_alike(model, plan):
        assert away.losses == here.losses


@pytest.fixture(scope="module")
def alone(text):
    """What the reference trains, for all plans by one process."""
    asked = []
    for name in PLANS:
        model, plan, clip = plan_of(name)
        asked.append({
            "model": model, "microbatches": plan.dp * plan.microbatches, "data": text,
            "microbatch_size": plan.microbatch_size, "steps": STEPS, "lr": LR["sgd"],
            "precision": plan.precision, "clip_norm": clip,
        })  # fmt: skip
    return dict(zip(PLANS, references(asked), strict=True))


@pytest.mark.parametrize("name", PLANS)
def test_it_trains_what_the_reference_trains(trained, alone, name):
    _, plan, _ = plan_of(name)
    assert_equal_state(alone[name], trained[name, "sgd", False], precision=plan.precision)


def test_nothing_is_left_in_a_folder_when_a_run_is_over(trained):
    assert trained["left"] == []


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


@pytest.mark.parametrize("name", PLANS)
def test_a_run_copies_what_the_program_says_in_its_order_and_holds_as_much(trained, name):
    model, plan, clip = plan_of(name)
    program = compiled(model, plan, optimizer="adamw", clips=clip is not None)
    check(program)
    for part in trained[name, "adamw", False].parts:
        pp, table = plan.place(part["rank"]).pp, part["copies"]
        for step in range(STEPS):
            columns = (table[c] for c in ("step", "lane", "op", "category", "bytes"))
            rows = [row[1:] for row in zip(*columns, strict=True) if row[0] == step]
            assert rows == copies_of(program, pp)
        away: dict[tuple[str, str], int] = {}
        columns = (part["memory"][c] for c in ("tier", "category", "bytes"))
        for tier, category, size in zip(*columns, strict=True):
            if tier != "device" and size:
                away[tier, category] = max(away.get((tier, category), 0), size)
        assert away == held_by(program, pp)


@pytest.fixture(scope="module")
def frozen():
    return [one for one in oracles.load() if one.plan.tiers is not None]


def compiled_of(one):
    return compiled(one.model, one.plan, optimizer=one.optimizer, clips=one.clip_norm is not None)


def in_one_order(program) -> bool:
    """Whether nothing can be done in another order than before: not where a part of the model needs
    several units, a tied head's among them, which now come up as they are used; and not where units
    are less than a layer's parameters, or halves of backward apart, so that gradients are complete
    in another order.
    """
    plan, parts = program.plan, [[unit.part for unit in units] for units in program.units]
    if plan.zero_stage == 3:
        one_each = all(len(set(of)) == len(of) for of in parts)
        return one_each and not (program.spec.tied and plan.tiers.parameters != "device")
    return plan.bucket_bytes > 2**10 and not plan.schedule_name.startswith("zb")


def test_copies_and_bytes_off_the_device_are_those_of_the_core_before(frozen):
    ordered = 0
    for one in frozen:
        program = compiled_of(one)
        check(program)
        for rank in range(one.plan.world_size):
            rows = copies_of(program, one.plan.place(rank).pp)
            assert Counter(rows) == Counter(one.copies[rank]), one.name
            if in_one_order(program):
                assert rows == one.copies[rank], one.name
                ordered += 1
        for rank, held in one.memory.items():
            if "refused" in held or one.plan.tiers.delayed:  # of which it had one step alone
                continue
            tiers = {tier: held[tier]["most"] for tier in ("host", "file") if tier in held}
            most = {(tier, c): size for tier, of in tiers.items() for c, size in of.items()}
            assert held_by(program, one.plan.place(rank).pp) == most, one.name
    assert ordered > 100


@pytest.mark.parametrize("number", range(0, 120, 12))
def test_device_memory_between_instructions_is_the_ledger_to_the_byte(frozen, number):
    from witness_memory import witness

    one = frozen[number]
    with dry_host():
        seen = witness(one.model, one.plan, 0, clip_norm=one.clip_norm)
    predicted = memory(compiled_of(one), 0)
    for expected, found in zip(predicted.between, seen.between, strict=True):
        here = {category: n for (tier, category), n in expected.items() if tier == "device" and n}
        assert here == {c: n for c, n in found.items() if n and c != "other"}


# ---- the relay -----------------------------------------------------------------------------------
@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("m", [1, 4])
@pytest.mark.parametrize("tied", [True, False])
def test_a_relay_brings_each_part_up_once_for_all_micro_batches_of_a_way(tied, m, dp):
    """The head turns round, so it comes once; a tied embedding stays for it, from its forward to
    its backward. A part's gradient leaves once, behind its last micro-batch.
    """
    plan = pl.Plan(**{**RELAY, "dp": dp, "microbatches": m, "offload": "cpu"})
    program = compiled(MODEL.replace(tied=tied), plan)
    code, units = program.codes[0], program.units[0]
    ups = Counter(ins.unit for ins in code if ins.op == COPY and ins.lane == "h2d")
    once = {u for u, unit in enumerate(units) if unit.part in ("head", *["embedding"] * tied)}
    assert ups == {u: 1 if u in once else 2 for u in range(len(units))}
    downs = [ins.unit for ins in code if ins.op == COPY and ins.lane == "d2h"]
    assert sorted(downs) == list(range(len(units)))


def test_the_next_part_of_a_relay_comes_up_while_this_one_is_at_work():
    def forwards_before_it(prefetch: int) -> int:
        plan = pl.Plan(**{**RELAY, "offload": "cpu", "prefetch": prefetch})
        code = compiled(MODEL.replace(tied=False), plan).codes[0]
        ups = [at for at, ins in enumerate(code) if ins.op == COPY and ins.lane == "h2d"]
        return sum(ins.op == "FORWARD" for ins in code[: ups[2]])

    assert [forwards_before_it(prefetch) for prefetch in (0, 1, 2)] == [6, 3, 0]


# ---- delayed updates -----------------------------------------------------------------------------
AXES = [{}, {"dp": 2}, {"dp": 2, "zero_stage": 3}, {"pp": 2, "microbatches": 2}, {"tp": 2},
        {"dp": 2, "shard": 1}]  # fmt: skip


def late_plan(axis: dict, **more) -> pl.Plan:
    return pl.Plan(**{"zero_stage": 2, "offload": LATE, "bucket_bytes": 40_000, **axis, **more})


def one_late(spec, samples, steps, lr, data):
    """w(t+1) = w(t) - lr * gradient at w(t-1), with w(-1) = w(0)."""
    import torch

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
    """`several`, on a host whose processor is slow: what does not wait for it comes too early."""
    import time

    from paralab.interpret.state import Optimizer

    step = Optimizer.step

    def slow(self, *args, **more):
        time.sleep(0.02)
        step(self, *args, **more)

    Optimizer.step = slow
    return several(context, jobs)


@pytest.fixture(scope="module")
def late(text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("late")
    found = {}
    for ranks in (1, 2):
        plans = [late_plan(axis) for axis in AXES]
        plans = [plan for plan in plans if plan.world_size == ranks]
        jobs = [(MODEL, plan, settings_of(text, folder, steps=4)) for plan in plans]
        parts = launch_program(slow_updates, ranks, (jobs,), timeout=120, device="cpu")
        for plan, mine in zip(plans, zip(*parts, strict=True), strict=True):
            found[plan] = report_of(MODEL, plan, list(mine))
    return found


@pytest.mark.parametrize("axis", AXES, ids=str)
def test_a_delayed_update_is_one_update_late_and_nothing_else(late, text, axis):
    plan = late_plan(axis)
    expected = known_late(plan.global_batch, str(text))
    assert_equal_state(expected, late[plan])
    rows = Counter(late[plan].parts[0]["copies"]["step"])
    assert len(set(rows.values())) == 1 and set(rows) == set(range(4))  # all steps are alike


def known_late(samples: int, data: str, known={}):  # noqa: B006
    if samples not in known:
        known[samples] = pl.launch(one_late, ranks=1, args=(MODEL, samples, 4, LR["sgd"], data))[0]
    return known[samples]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_nobody_waits_in_a_step_for_an_update_that_goes_on_beside_the_next(precision):
    program = compiled(MODEL, late_plan({}, precision=precision))
    check(program)
    code = program.codes[0]
    updates = {ins.writes for ins in code if ins.op == UPDATE}
    assert updates and not [ins for ins in code if ins.op == "WAIT" and ins.reads in updates]


def settled_between(context, jobs):
    """Trainings of which somebody looks at the state after every step, or not."""
    from paralab.interpret.train import Trainer

    found = []
    for plan, settings, looks in jobs:
        trainer, losses = Trainer(context, MODEL, plan, **settings), []
        for step in range(3):
            losses += trainer.step(step)
            for _ in range(2 * looks):  # twice is harmless
                trainer.settle()
        trainer.settle()
        found.append((losses, trainer.whole(), trainer.recorder.tables()["copies"]["step"]))
        trainer.host.close()
    return found


def test_settling_ends_a_delay_and_leaves_no_row(text, tmp_path):
    """A training that is settled after every step is one without a delay."""
    settings = settings_of(text, tmp_path, optimizer="adamw")
    settings = {k: v for k, v in settings.items() if k not in ("steps", "keep_state")}
    delayed = late_plan({}, precision="bf16")
    at_once = delayed.replace(offload=dict(LATE, delayed=False))
    jobs = [(delayed, settings, True), (at_once, settings, False), (delayed, settings, False)]
    looked, plain, late = launch_program(settled_between, 1, (jobs,), device="cpu")[0]
    assert looked[0] == plain[0] != late[0]
    assert worst(plain[1], looked[1])[0] == 0.0
    assert looked[2] == late[2]


# ---- checkpoints ---------------------------------------------------------------------------------
def trained_in_turn(text, tmp_path, *jobs) -> list[types.SimpleNamespace]:
    """Trainings by one process with AdamW: (plan, steps, more settings)."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    jobs = [
        (MODEL, plan, settings_of(text, tmp_path / str(n), steps=m, optimizer="adamw", **more))
        for n, (plan, m, more) in enumerate(jobs)
    ]
    parts = launch_program(several, 1, (jobs,), device="cpu")[0]
    return [report_of(MODEL, plan, [part]) for (_, plan, _), part in zip(jobs, parts, strict=True)]


def test_a_training_goes_on_on_other_tiers(text, tmp_path):
    first = pl.Plan(zero_stage=3, microbatches=2, offload="cpu")
    other = first.replace(offload=FILES)
    folder = str(tmp_path / "a")
    _, more, whole = trained_in_turn(
        text, tmp_path,
        (first, 3, {"save": folder}),
        (other, 2, {"resume": f"{folder}/step-00000003"}),
        (first.replace(offload=None), 5, {}),
    )  # fmt: skip
    assert worst(whole.weights, more.weights)[0] == 0.0


def test_a_save_ends_a_delay_and_the_run_that_saves_goes_on_as_the_resumed_one(text, tmp_path):
    plan, (a, b) = late_plan({}), (str(tmp_path / name) for name in "ab")
    whole, _, more = trained_in_turn(
        text, tmp_path,
        (plan, 5, {"save": a, "save_every": 3}),
        (plan, 3, {"save": b}),
        (plan, 2, {"resume": f"{b}/step-00000003"}),
    )  # fmt: skip
    assert worst(whole.weights, more.weights)[0] == 0.0
    assert set(whole.parts[0]["copies"]["step"]) == set(range(5))


# ---- errors --------------------------------------------------------------------------------------
def spoiled(context, model, plan, settings, spoil):
    """A training whose files are spoiled behind its back after the first step."""
    from paralab.interpret.train import train

    def progress(done, total):
        if done == 1:
            spoil(Path(settings["offload_folder"]) / "rank-0")

    return train(_with(context, progress), model, plan, **settings)


def _with(context, progress):
    import dataclasses

    return dataclasses.replace(context, progress=progress)


def cut(folder):
    for path in folder.glob("states-*"):
        with open(path, "r+b") as file:
            file.truncate(path.stat().st_size // 2)


def fill(folder):
    for path in folder.glob("parameters-*"):
        path.unlink()
        path.symlink_to("/dev/full")


@pytest.mark.parametrize(
    "spoil, words",
    [
        (shutil.rmtree, ["offload cannot", "No such file or directory"]),
        (cut, ["offload cannot read", "somebody has cut it short"]),
        (fill, ["offload cannot"]),
    ],
)
def test_an_error_of_a_lane_reaches_the_rank_where_it_waits(text, tmp_path, spoil, words):
    plan = pl.Plan(zero_stage=3, offload=FILES)
    settings = settings_of(text, tmp_path, steps=3, optimizer="adamw")
    with pytest.raises(pl.RankError) as failed:
        launch_program(spoiled, 1, (MODEL, plan, settings, spoil), timeout=30, device="cpu")
    for said in (*words, "resume from the last one"):
        assert said in str(failed.value)


# ---- lanes ---------------------------------------------------------------------------------------
@pytest.fixture
def recorder():
    from paralab.instruments.recorder import Recorder

    made = Recorder(rank=0, world_size=1)
    made.begin_step(0)
    return made


def test_whoever_has_waited_for_the_last_of_a_chain_has_waited_for_all_of_it(recorder):
    from paralab.interpret.lanes import Lane

    lanes, done = [Lane(name, recorder) for name in ("disk", "host", "d2h")], []
    jobs = []
    for number in range(60):
        after = jobs[-1:] + jobs[-7:-6]

        def work(number=number, after=tuple(after)):
            assert all(other.done.is_set() for other in after)
            done.append(number)

        jobs.append(lanes[number % 3].submit(work, after=after))
    jobs[-1].wait()
    assert done == list(range(60)) and all(job.over for job in jobs)
    recorder.end_step()
    waits = recorder.tables()["spans"]["kind"].count("wait")
    for job in jobs:
        job.wait()  # nothing to wait for, and nothing in the picture
    assert waits == 1 == recorder.tables()["spans"]["kind"].count("wait")
    for lane in lanes:
        lane.close()


def test_a_job_lets_go_of_what_it_worked_on_before_anybody_hears_that_it_is_done(recorder):
    import weakref

    import torch

    from paralab.interpret.lanes import Lane

    lane, alive = Lane("d2h", recorder), []
    into = torch.empty(1000)
    for _ in range(50):
        source = torch.ones(1000)
        alive.append(weakref.ref(source))
        job = lane.submit(lambda source=source: into.copy_(source))
        job.wait()
        del source
        assert alive[-1]() is None
    lane.close()


def test_a_limited_link_takes_the_time_that_its_bytes_would(recorder, monkeypatch):
    from paralab.interpret import lanes

    slept = []
    monkeypatch.setattr(lanes.time, "sleep", slept.append)
    lane = lanes.Lane("disk", recorder, bandwidth=1e3)
    lane.submit(lambda: None, size=5000).wait()
    assert len(slept) == 1 and 4.0 < slept[0] <= 5.0
    lane.close()
