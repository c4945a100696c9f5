"""Predicted memory is the ledger's: to the byte between instructions, and the peak inside them.

The witness runs the program and counts storages (witness_memory.py); the prediction counts names.
`make memory` draws 200 plans where `make test` draws thirty.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import drawn
import paralab as pl
from paralab.interpret.memory import Kind, Memory, memory, moments
from paralab.programs.compile import compiled
from paralab.programs.program import Program
from witness_memory import Witness, on_ranks, witness

COUNT = os.environ.get("PARALAB_MEMORY_PLANS")
# Thirty, which have every value of every setting that any of the first 200 draws has.
SEEDS = range(int(COUNT)) if COUNT else (*range(26), 52, 77, 79, 160)
MODEL = pl.ModelSpec(**drawn.SMALL)
Held = list[dict[Kind, int]]


def own(spec: pl.ModelSpec) -> Any:
    """A block of one's own, whose last layer keeps its result."""
    h = spec.hidden
    return nn.Sequential(nn.LayerNorm(h), nn.Linear(h, h), nn.Sigmoid())


def turned(spec: pl.ModelSpec) -> Any:
    """A block whose result lies in memory in another order, so what is handed on is a copy."""

    class Turned(nn.Module):
        def forward(self, x):
            return x.transpose(1, 2).contiguous().transpose(1, 2)

    return Turned()


def longer(spec: pl.ModelSpec) -> Any:
    """A block whose result and input's gradient are the first half of longer tensors."""

    class Longer(nn.Module):
        def forward(self, x):
            return torch.cat([x, torch.ones_like(x)], 1).tanh()[:, : x.shape[1]]

    return Longer()


class OfTwo(nn.Module):
    """A block that multiplies with one matrix, the sum of two weights, and has a buffer."""

    def __init__(self, spec: pl.ModelSpec) -> None:
        super().__init__()
        shape = 2 * spec.hidden, spec.hidden
        self.a, self.b = (nn.Parameter(torch.ones(shape)) for _ in range(2))
        self.register_buffer("noise", torch.ones(100))

    def forward(self, x):
        w = self.a + self.b
        return F.linear(F.linear(x, w), w.t())


CASES = {
    "zero-1 in copies, fp16": ({"dropout": 0.1}, {"dp": 4, "shard": 2, "zero_stage": 1,
                                                  "precision": "fp16"}, {"clip_norm": 1.0}),
    "zero-3 from a second copy, recomputed": ({}, {"dp": 4, "zero_stage": 3, "secondary_shard": 2,
                                                   "recompute": "full", "prefetch": 2}, {}),
    "1f1b, fused attention and dropout": ({"attention": "sdpa", "dropout": 0.1},
                                          {"pp": 2, "microbatches": 4, "recompute": "selective"},
                                          {}),
    "zero-bubble, tp with sequences": ({"dropout": 0.1}, {"pp": 2, "tp": 2, "schedule": "zb-h2",
                                       "microbatches": 4, "sequence_parallel": True}, {}),
    "messages in parts": ({}, {"pp": 2, "tp": 2, "microbatches": 3,
                               "partition_messages": True}, {}),
    "tp in 3D": ({"vocab": 264}, {"tp": 8, "tp_mode": "3d", "microbatch_size": 4}, {}),
    "a block of one's own, zero-bubble": ({"block": own}, {"pp": 2, "schedule": "zb-h1",
                                                           "microbatches": 3}, {}),
    "zero-1 over a pipeline, tp, bf16 into fp32": ({}, {
        "dp": 2, "tp": 2, "pp": 2, "zero_stage": 1, "microbatches": 3, "precision": "bf16",
        "grad_dtype": "fp32", "bucket_bytes": 20_000}, {"clip_norm": 1.0}),
}  # fmt: skip
REAL = ["zero-3 from a second copy, recomputed", "zero-bubble, tp with sequences"]


def case(name: str) -> tuple[pl.ModelSpec, pl.Plan, dict]:
    model, plan, settings = CASES[name]
    return MODEL.replace(**model), pl.Plan(**plan), settings


def predicted(
    model: pl.ModelSpec, plan: pl.Plan, rank: int, *, clip_norm: Any = None, **settings: Any
) -> tuple[Memory, Held]:
    """Of a global rank; and what it holds before the step and behind each instruction."""
    at, clips = plan.place(rank), clip_norm is not None
    program = compiled(model, plan, clips=clips, only=at.pp, **settings)
    index = at.dp % program.shards
    return memory(program, at.pp, index=index), held_behind(program, at.pp, index=index)


def held_behind(program: Program, pp: int = 0, **how: Any) -> Held:
    return [behind for *_, behind in moments(program, pp, **how)]


def on_device(held: dict[tuple[str, str], int]) -> dict[str, int]:
    return {category: n for (tier, category), n in held.items() if tier == "device" and n}


def assert_exact(said: Memory, expected: Held, seen: Witness) -> None:
    """Every category, behind every instruction."""
    for position, (here, there) in enumerate(
        zip(expected, [seen.before, *seen.between], strict=True)
    ):
        assert on_device(here) == {c: n for c, n in there.items() if n}, f"behind {position - 1}"
    assert sum(on_device(said.held).values()) == said.peak
    assert all(said.most[kind] >= size for here in expected for kind, size in here.items() if size)


@pytest.mark.parametrize("name", CASES)
def test_between_two_instructions_memory_is_the_ledgers_to_the_byte(name):
    model, plan, settings = case(name)
    for rank in range(plan.world_size):
        seen = witness(model, plan, rank, **settings)
        said, behind = predicted(model, plan, rank, **settings)
        assert_exact(said, behind, seen)
        if said.peak == seen.peak and plan.tp_mode == "1d":  # a grid's blocks that come in are work
            there = seen.tops[seen.where][1]
            assert on_device(said.held) == {c: n for c, n in there.items() if n}, rank


@pytest.mark.parametrize("name", REAL)
def test_a_run_on_real_ranks_holds_it_to_the_byte_and_has_this_peak(name):
    model, plan, settings = case(name)
    for rank, seen in enumerate(on_ranks(model, plan, **settings)):
        said, behind = predicted(model, plan, rank, **settings)
        assert_exact(said, behind, seen)
        assert said.peak == pytest.approx(seen.peak, rel=0.001)


# ---- peaks of drawn plans ------------------------------------------------------------------------
OF_PLAN = {name: some for name, some in drawn.PLAN.items() if name != "tp_depth"} | {
    "tp": (1, 2, 3, 4, 8),
    "pp": (1, 2, 3, 4),
    "schedule": ("naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2"),
    "microbatches": (1, 2, 3, 4, 6),
    "offload": (None, None, "cpu", "nvme", {"activations": "cpu"}, {"optimizer": "cpu"}),
    "grad_dtype": (None, None, "fp32"),
}
OF_MODEL = drawn.MODEL | {
    "layers": (1, 2, 4, 6),
    "hidden": (24, 48, 96),
    "seq_len": (8, 16, 48),
    "vocab": (256, 264, 1024, 8192),
}


@pytest.mark.parametrize("seed", SEEDS)
def test_the_peak_of_a_drawn_plan_is_the_witnesss(seed):
    """Of the first and the last of the ranks that share a stage: a grid's ranks take turns, and a
    prediction is that of the fullest.
    """
    chance = random.Random(seed)
    model, plan = drawn.legal(chance, 8, OF_PLAN, OF_MODEL)
    settings = {"optimizer": chance.choice(("adamw", "sgd"))}
    settings["clip_norm"] = chance.choice((None, 1.0))
    for pp in range(plan.pp):
        alike = [rank for rank in range(plan.world_size) if plan.place(rank).pp == pp]
        peaks = []
        for rank in dict.fromkeys((alike[0], alike[-1])):
            seen = witness(model, plan, rank, **settings)
            said, behind = predicted(model, plan, rank, **settings)
            assert_exact(said, behind, seen)
            assert said.peak >= 0.99 * seen.peak, rank
            assert seen.tops[seen.where][1]["other"] <= 0.02 * seen.peak
            peaks.append(seen.peak)
        assert said.peak <= 1.03 * max(peaks), pp
        if plan.tp_mode == "1d":
            assert said.peak == max(peaks), pp


@pytest.mark.parametrize("plan", [
    {"pp": 2}, {"tp": 2, "sequence_parallel": True}, {"tp": 4, "tp_mode": "2d"},
], ids=str)  # fmt: skip
def test_a_peak_where_the_norm_is_taken_is_the_fullest_ranks_to_the_byte(plan):
    """A norm of each slice of the gradients, and these together, are a few bytes more."""
    plan = pl.Plan(**plan, precision="fp16")
    for pp in range(plan.pp):
        alike = [rank for rank in range(plan.world_size) if plan.place(rank).pp == pp]
        peaks = [witness(MODEL, plan, rank, clip_norm=1.0).peak for rank in alike]
        assert predicted(MODEL, plan, alike[0], clip_norm=1.0)[0].peak == max(peaks), pp


@pytest.mark.parametrize(("model", "plan"), [
    ({"vocab": 2048}, {"dp": 2, "tp": 2, "tp_mode": "2.5d", "tp_depth": 2, "zero_stage": 3,
                       "microbatch_size": 2}),  # grids of one rank each, which receives no block
    ({"layers": 1, "seq_len": 384, "heads": 24, "attention": "sdpa"}, {
        "schedule": "zb-h1", "recompute": "selective", "microbatch_size": 4}),
    ({"layers": 1, "seq_len": 48}, {"tp": 8, "tp_mode": "3d", "microbatch_size": 4}),  # targets
    ({"block": turned, "seq_len": 64}, {"pp": 2, "microbatches": 3}),  # the copy in order
    ({"block": own, "layers": 3, "seq_len": 64}, {"pp": 3, "microbatches": 4}),  # its result
    ({"block": longer, "seq_len": 128}, {"pp": 2, "microbatches": 3, "microbatch_size": 1}),
    ({"block": OfTwo}, {"pp": 2, "microbatches": 3, "schedule": "zb-h1"}),
], ids=["2.5d in grids of one rank", "fused attention in halves", "3d", "turned",
        "a result kept", "longer", "one gradient for two"])  # fmt: skip
def test_the_peak_holds_what_is_there_at_that_moment_and_no_more(model, plan):
    """No blocks that nobody sends; no result that autograd has freed; the targets, which are there
    before the loss; of what shares a storage, this storage once.
    """
    model, plan = MODEL.replace(**{"vocab": 264, **model}), pl.Plan(**plan)
    for rank in range(plan.tp * plan.pp):
        seen = witness(model, plan, rank)
        assert predicted(model, plan, rank)[0].peak == seen.peak, rank


def test_gloo_receives_a_reduce_scatter_into_a_buffer_of_its_own_and_nccl_does_not():
    plan = pl.Plan(dp=4, zero_stage=1, bucket_bytes=10**9)
    program = compiled(MODEL, plan)
    (unit,) = program.units[0]
    gloo, nccl = memory(program), memory(program, gloo=False)
    buffers = ("device", "buffers")
    assert gloo.most[buffers] - nccl.most[buffers] == 4 * unit.numel
    assert held_behind(program)[-1] == held_behind(program, gloo=False)[-1]
