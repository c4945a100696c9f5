"""Counted bytes are recorded bytes: rows, boxes and copies of real ranks, and the frozen rows."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import oracles
import paralab as pl
from paralab.interpret.memory import moments
from paralab.interpret.predict import predict
from paralab.interpret.time import time
from paralab.interpret.traffic import Calls, Member
from paralab.parallel.layouts import kind_of
from paralab.programs.checks import check
from paralab.programs.compile import compiled
from paralab.programs.instructions import WAIT
from paralab.programs.program import Program
from paralab.programs.skeleton import stage_parts
from paralab.spec import links
from test_programs_offload import copies_of, held_by
from together import Case, Trained, named

MODEL = pl.ModelSpec(layers=4, hidden=48, heads=4, seq_len=24, vocab=260)
ONE_NODE = oracles.MACHINE.replace(nodes=1, devices_per_node=8, cores=8)  # gloo adds up itself
SMALL = 40_000  # bytes of a bucket: so there are several
PLANS: dict[str, dict[str, Any]] = {
    "data parallel": {"dp": 4, "microbatches": 2, "bucket_bytes": SMALL},
    "naive": {"dp": 2, "grad_sync": "naive"},
    "HSDP, ZeRO-2": {
        "dp": 4, "shard": 2, "zero_stage": 2, "microbatches": 2, "bucket_bytes": SMALL},
    "ZeRO-3": {"dp": 2, "zero_stage": 3, "microbatches": 2},
    "second shard": {"dp": 4, "zero_stage": 3, "secondary_shard": 2},
    "1F1B, copy of the embedding": {"pp": 4, "microbatches": 5},
    "interleaved, ZeRO-1, fp16": {
        "pp": 2, "dp": 2, "schedule": "interleaved", "virtual_stages": 2, "microbatches": 4,
        "zero_stage": 1, "precision": "fp16"},
    "ZeRO-2, tensor parallel, bf16 into fp32": {
        "dp": 2, "tp": 2, "zero_stage": 2, "microbatches": 2, "bucket_bytes": SMALL,
        "precision": "bf16", "grad_dtype": "fp32"},
    "ZeRO-Offload, fp16 into fp32": {
        "dp": 2, "zero_stage": 3, "microbatches": 2, "precision": "fp16", "grad_dtype": "fp32",
        "offload": {"gradients": "nvme", "optimizer": "nvme"}},
    "ZB-H1, tensor parallel": {"pp": 2, "tp": 2, "schedule": "zb-h1", "microbatches": 3},
    "sequence parallel": {
        "tp": 2, "dp": 2, "sequence_parallel": True, "zero_stage": 1, "bucket_bytes": SMALL},
    "inputs in parts": {"tp": 2, "recompute": "full", "partition_activations": True},
    "messages in parts": {"tp": 2, "pp": 2, "partition_messages": True, "microbatches": 3},
    "2D": {"tp": 4, "tp_mode": "2d", "microbatch_size": 4},
    "3D": {"tp": 8, "tp_mode": "3d", "microbatch_size": 4},
    "ZeRO-Infinity": {"dp": 2, "zero_stage": 3, "offload": "nvme", "microbatches": 2},
    "inputs on the host": {
        "recompute": "full", "offload": {"activations": "cpu"}, "microbatches": 2},
    "layer relay": {
        "zero_stage": 3, "offload": "cpu", "recompute": "full", "microbatches": 2,
        "schedule": "l2l"},
}  # fmt: skip
CLIPPED = ("ZeRO-3", "1F1B, copy of the embedding", "sequence parallel")  # so the norm is summed
CASES = [
    Case(name, MODEL, pl.Plan(**settings), (
        ("optimizer", "adamw"), ("lr", 1e-3), ("keep_state", False),
        ("clip_norm", 0.05 if name in CLIPPED else None)))
    for name, settings in PLANS.items()
]  # fmt: skip


@pytest.fixture(scope="module")
def ran(text) -> Trained:
    """Two steps of each plan on real ranks; without strict mode, which waits for peers too."""
    return Trained(CASES, text, strict=False)


def recorded(report: pl.Report, rank: int) -> list[tuple]:
    """The rows of the last step; in the first of a run there are handshakes too."""
    calls = report.collectives.sort_values("span", kind="stable")
    calls = calls[(calls["rank"] == rank) & (calls["step"] == report.steps["step"].max())]
    columns = ["op", "axis", "ranks", "peer", "level", "phase", "payload_bytes", "wire_bytes"]
    return [tuple(row) for row in calls[columns].itertuples(index=False)]


@named(CASES)
def test_every_rank_makes_the_calls_that_are_counted_in_their_order(ran, one):
    plan, clip = ran[one].plan, dict(one.settings)["clip_norm"]
    for rank in range(plan.world_size):
        counted = pl.dry_run(MODEL, plan, rank=rank, clip_norm=clip)
        assert recorded(counted, rank) == recorded(ran[one], rank)


def test_ranks_that_keep_other_parts_of_shared_gradients_sum_other_bytes():
    plan = pl.Plan(dp=4, tp=4, tp_mode="2.5d", zero_stage=3)
    report = predict(MODEL, plan, ONE_NODE.replace(devices_per_node=16), steps=1)
    dry = (pl.dry_run(MODEL, plan, rank=rank).collectives for rank in range(16))
    own = [list(calls["payload_bytes"]) for calls in dry]
    assert len(set(map(tuple, own))) > 1
    for rank, calls in report.collectives.sort_values("span").groupby("rank"):
        assert list(calls["payload_bytes"]) == own[rank]


def boxes(report: pl.Report, rank: int) -> list[tuple]:
    """What the boxes of the second step are, and in which order; ``after`` within the step."""
    spans = report.spans[(report.spans["rank"] == rank) & (report.spans["step"] == 1)]
    spans = spans.sort_values("id")
    number = {span: at for at, span in enumerate(spans["id"])}
    columns = [spans[name] for name in ("lane", "kind", "stage", "chunk", "microbatch")]
    waited = [[number.get(other) for other in after] for after in spans["after"]]
    return list(zip(*columns, waited, strict=True))


@named([one for one in CASES if one.name not in CLIPPED])
def test_predicted_boxes_are_the_boxes_of_a_run(ran, one):
    report = ran[one]
    expect = predict(MODEL, report.plan, ONE_NODE, steps=2, detail="calls")
    columns = ["rank", "lane", "op", "category", "bytes"]
    mine, theirs = (
        one.copies.query("step == 1").sort_values(["rank", "span"], kind="stable")[columns]
        for one in (expect, report)
    )
    assert mine.values.tolist() == theirs.values.tolist()
    assert repr(expect) == repr(report).replace("measured", "predicted")  # as many calls
    for rank in range(report.plan.world_size):
        assert boxes(expect, rank) == boxes(report, rank)
        assert recorded(expect, rank) == recorded(report, rank)


# ---- the core before this one --------------------------------------------------------------------
def rows(program: Program, rank: int) -> list:
    member, calls = Member(program, rank, oracles.MACHINE.node_of), Calls(program)
    pp, index = member.at.pp, member.index
    return [member.row(call) for ins in program.codes[pp] for call in calls.of(pp, ins, index)]


def sent(program: Program, rank: int) -> Counter:
    """What a rank of a frozen plan sends, as the oracles count it."""
    return Counter(
        (row.op, row.axis, row.phase, row.payload, row.wire, row.level, row.peer, row.ranks)
        for row in rows(program, rank)
        if row.phase != "control"
    )


def test_every_frozen_plan_holds_and_sends_copies_keeps_and_takes_what_it_did_before():
    """Ops take fewer kernels than autograd's layers did, and groups of one rank no time. Alpha was
    paid for a call, and is paid for each of its messages. Every block had a causal mask of its own
    among its parameters.
    """
    frozen, wrong = oracles.load(), []
    assert Counter(one.source for one in frozen) == {"pairwise": 51, "drawn": 200}
    assert len({(one.model, one.plan, one.clip_norm) for one in frozen}) == len(frozen)
    for one in frozen:
        clips = one.clip_norm is not None
        program = compiled(one.model, one.plan, optimizer=one.optimizer, clips=clips)
        check(program)
        calls = (row for row in rows(program, 0) if row.op != "recv" and len(row.ranks) > 1)
        more = sum(links.messages(row.op, len(row.ranks)) - 1 for row in calls)
        longest = 1.1 * one.step_time + more * oracles.MACHINE.inter.alpha
        assert 0.4 * one.step_time < time(program, oracles.MACHINE).seconds < longest, one.name
        for rank in range(one.plan.world_size):
            found = sent(program, rank)
            copies = Counter(copies_of(program, one.plan.place(rank).pp))
            if (found, copies) != (Counter(one.calls[rank]), Counter(one.copies[rank])):
                wrong.append((one.name, rank))
        for rank, held in one.memory.items():
            if "refused" in held or one.plan.tiers and one.plan.tiers.delayed:
                continue  # of a delayed update there is one step alone
            tiers = {tier: held[tier]["most"] for tier in ("host", "file") if tier in held}
            most = {(tier, c): size for tier, of in tiers.items() for c, size in of.items()}
            at, was = one.plan.place(rank), held["at_end"]
            assert held_by(program, at.pp) == most, one.name
            _, _, before = next(moments(program, at.pp, index=at.dp % program.shards))
            assert before.get(("device", "optimizer"), 0) == was.get("optimizer", 0), one.name
            stages = stage_parts(one.model, one.plan)[at.pp :: one.plan.pp]
            blocks = sum(name.startswith("blocks") for parts in stages for name in parts)
            parameters = max(0, was.get("parameters", 0) - blocks * one.model.seq_len**2)
            assert before.get(("device", "parameters"), 0) == parameters, one.name
    assert not wrong


def test_what_only_later_shards_have_of_shared_gradients_is_summed_too():
    plan = pl.Plan(dp=4, tp=2, sequence_parallel=True, zero_stage=1, bucket_bytes=20_000)
    program = compiled(MODEL, plan)
    (sums,) = (ins for ins in program.codes[0] if ins.phase == "shared" and ins.op != WAIT)
    first = {share.unit for some in program.shared(0, 0).values() for share in some}
    assert first < {v[1] for v in sums.reads} == {
        number for number, unit in enumerate(program.units[0])
        if any(kind_of(name) == "norm" for name in unit.names)
    }  # fmt: skip
