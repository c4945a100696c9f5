"""Dry runs: what a rank of any plan holds and sends, against real runs and against formulas."""

from __future__ import annotations

from collections import Counter

import pytest

import paralab as pl
from paralab.dry_run import _program
from paralab.launch import launch_program
from paralab.records.dry import tables_of
from paralab.theory.memory import rank_sizes

MODEL = pl.ModelSpec(layers=4, hidden=64, heads=4, seq_len=32)
PLAN = pl.Plan(microbatches=2, microbatch_size=2, bucket_bytes=2**16)
HOST = {"activations": "cpu", "parameters": "cpu", "gradients": "cpu", "optimizer": "cpu"}
NVME = dict.fromkeys(HOST, "nvme")


def case(name: str, *, model: pl.ModelSpec = MODEL, run: dict | None = None, **plan) -> object:
    return pytest.param((model, PLAN.replace(**plan), run or {}), id=name)


CASES = [
    case("dp, dropout, clipped", model=MODEL.replace(dropout=0.1), dp=3, recompute="full",
         run={"clip_norm": 1.0}),
    case("dp naive, untied, fused attention", dp=2, grad_sync="naive", recompute="selective",
         model=MODEL.replace(tied=False, attention="sdpa")),
    case("tp, bf16", tp=2, dp=2, precision="bf16"),
    case("tp with sequence parallelism, fp16", tp=2, sequence_parallel=True, precision="fp16",
         recompute="selective"),
    case("tp in 2D", tp=4, tp_mode="2d"),
    case("pipeline, all axes", pp=2, tp=2, dp=2, microbatches=4, recompute="full",
         partition_activations=True),
    case("pipeline of three, sgd", pp=3, microbatches=5, run={"optimizer": "sgd"}),
    case("interleaved, zero-1", pp=2, virtual_stages=2, schedule="interleaved", dp=2, zero_stage=1,
         microbatches=4),
    case("zero-bubble", pp=2, schedule="zb-h1", microbatches=4),
    case("zero-2 in copies, bf16", dp=4, shard=2, zero_stage=2, precision="bf16"),
    case("zero-3, frozen", dp=3, zero_stage=3, model=MODEL.replace(frozen=("blocks.0",))),
    case("offload to the host, fp16", dp=2, zero_stage=2, offload="cpu", precision="fp16",
         recompute="full"),
    case("offload to files, clipped", dp=2, zero_stage=3, offload=NVME, recompute="full",
         run={"clip_norm": 1.0}),
    case("relay", zero_stage=3, schedule="l2l", offload=HOST, recompute="full", microbatches=3,
         precision="bf16"),
]  # fmt: skip


def _every_rank(context, cases):
    """Dry runs of all ranks of all cases, one after the other in one process."""
    found = []
    for model, plan, settings in cases:
        asked = {"optimizer": "adamw", "steps": 1, "clip_norm": None, **settings}
        nodes, parts = (0,) * plan.world_size, []
        for rank in range(plan.world_size):
            part = _program(context, model, plan, nodes, {"rank": rank, **asked})
            parts.append({**tables_of(part), "num_params": part["num_params"]})
        found.append(parts)
    return found


@pytest.fixture(scope="module")
def dry():
    """[parts of all ranks] of every case."""
    return launch_program(_every_rank, 1, ([case.values[0] for case in CASES],), device="cpu")[0]


@pytest.fixture(scope="module", params=range(len(CASES)), ids=[case.id for case in CASES])
def both(request, text, dry):
    """(model, plan, what `pl.run` measured, what dry runs of all its ranks found)"""
    model, plan, settings = CASES[request.param].values[0]
    real = pl.run(model, plan, steps=1, data=text, strict=True, progress=False, **settings)
    return model, plan, real, dry[request.param]


def rows(table, *columns):
    return list(zip(*(table[column] for column in columns), strict=True))


def peak(table) -> dict[str, int]:
    """{category: bytes} on the device at the fullest sample."""
    found: dict[tuple, Counter] = {}
    for step, time, tier, category, size in rows(table, "step", "time", "tier", "category",
                                                 "bytes"):  # fmt: skip
        if tier == "device":
            found.setdefault((step, time), Counter())[category] += size
    return dict(max(found.values(), key=lambda held: held.total()))


def away(table) -> dict[tuple[str, str], int]:
    found: Counter = Counter()
    for tier, category, size in rows(table, "tier", "category", "bytes"):
        if tier != "device":
            found[tier, category] = max(found[tier, category], size)
    return dict(found)


def test_every_message_is_that_of_a_run(both):
    _, plan, real, parts = both
    columns = ("op", "axis", "ranks", "peer", "level", "phase", "payload_bytes", "wire_bytes")
    calls = real.collectives[real.collectives["phase"] != "setup"]
    for rank, part in enumerate(parts):
        mine = calls[calls["rank"] == rank]
        dry = [(*row[:2], tuple(row[2]), *row[3:]) for row in rows(part["collectives"], *columns)]
        assert dry == rows(mine, *columns)
    assert len(calls) or plan.world_size == 1


def test_memory_is_that_of_a_run(both):
    _, _, real, parts = both
    for rank, part in enumerate(parts):
        mine = real.memory[real.memory["rank"] == rank]
        dry, measured = peak(part["memory"]), peak(mine)
        print(rank, {k: (dry.get(k, 0), v) for k, v in measured.items() if dry.get(k, 0) != v})
        assert sum(dry.values()) == pytest.approx(sum(measured.values()), rel=0.02)
        assert away(part["memory"]) == away(mine)


def test_copies_and_parameters_are_those_of_a_run(both):
    model, plan, real, parts = both
    for rank, part in enumerate(parts):
        columns = ("lane", "op", "category", "bytes")
        mine = real.copies[real.copies["rank"] == rank]
        assert rows(part["copies"], *columns) == rows(mine, *columns)
        assert part["num_params"] == sum(rank_sizes(model, plan, rank).values())
