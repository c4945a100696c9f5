"""A compiled program trains what the reference trains: losses, gradients, weights after SGD.

Against the reference (plain autograd, one process) within the tolerance of tests/equality.py;
against the program of one device bit for bit, wherever a plan leaves one chain of additions per
parameter: pipelines, accumulation, recomputation, relays. Which two settings meet in no case here
do in test_composed.py: listed here are values that the list there has not.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import paralab as pl
from equality import assert_equal_state, worst
from together import MODEL, Case, Trained, assert_same_bits, case, cases, named

PLANS = cases("""
    dp=2 bucket_bytes=1
    dp=3 grad_sync=bucketed microbatches=2
    dp=2 microbatches=2 dropout=0.2 attention=sdpa

    dp=3 zero_stage=1 microbatches=2 tied=False
    dp=3 zero_stage=2 microbatches=2 tied=False clip_norm=0.05
    dp=3 zero_stage=3 prefetch=2 microbatches=3 tied=False
    dp=8 shard=4 zero_stage=3 secondary_shard=2
    dp=4 zero_stage=3 secondary_shard=1

    pp=2 dp=2 microbatches=4 zero_stage=3 schedule=interleaved virtual_stages=2
    pp=2 tp=2 microbatches=3 microbatch_size=1 precision=bf16 partition_messages=True

    tp=4 sequence_parallel=True microbatch_size=1 attention=sdpa tied=False

    tp=4 tp_mode=2.5d tp_depth=1
    tp=2 tp_mode=2.5d tp_depth=2 dp=2 zero_stage=3 tied=False
    tp=2 tp_mode=2.5d tp_depth=2 pp=2 schedule=zb-h1 microbatches=3 dp=2 zero_stage=1 tied=False
    tp=8 tp_mode=2.5d microbatch_size=4 dropout=0.2 clip_norm=0.05
    tp=8 tp_mode=3d microbatch_size=4 microbatches=2 tied=False attention=sdpa
    tp=8 tp_mode=3d microbatch_size=4 recompute=full
""")
# Of each parameter one chain of additions. Untied: a tied embedding's gradient is the sum of two
# chains, one per end of a pipeline.
CHAINS = cases("""
    pp=3 microbatches=5 schedule=naive layers=5 dropout=0.1
    pp=3 microbatches=2 schedule=gpipe layers=5 attention=sdpa
    pp=4 microbatches=6 schedule=1f1b dropout=0.1
    pp=2 microbatches=4 schedule=interleaved virtual_stages=3 dropout=0.1
    pp=3 microbatches=2 schedule=zb-h1 dropout=0.1
    pp=4 microbatches=6 schedule=zb-h2 dropout=0.1
    recompute=full microbatches=2 dropout=0.1
    recompute=selective microbatches=2 dropout=0.1 attention=sdpa
    pp=2 microbatches=4 schedule=zb-h1 recompute=full dropout=0.1
    pp=3 microbatches=4 precision=bf16
    pp=2 microbatches=4 schedule=zb-h1 precision=fp16 layers=5

    schedule=l2l zero_stage=3 recompute=full microbatches=4 offload=nvme precision=bf16
    schedule=l2l zero_stage=3 recompute=full offload={'optimizer':'cpu','parameters':'cpu'}
""", tied=False)  # fmt: skip


class Mixer(nn.Module):
    """No attention: a gated mean over the tokens so far. Draws in forward, and has a buffer."""

    def __init__(self, spec: pl.ModelSpec) -> None:
        super().__init__()
        h, s = spec.hidden, spec.seq_len
        self.ln = nn.LayerNorm(h)
        self.gate, self.value = nn.Linear(h, h), nn.Linear(h, h)
        self.proj = nn.Linear(h, h, bias=False)
        self.drop = nn.Dropout(spec.dropout)
        self.scale = nn.Parameter(torch.ones(h))
        self.register_buffer("mean", torch.ones(s, s).tril() / torch.arange(1, s + 1)[:, None])
        self.register_buffer("noise", torch.randn(s, 1))

    def forward(self, x):
        y = self.ln(x)
        y = torch.sigmoid(self.gate(y)) * (self.mean @ self.value(y) + self.noise)
        return x + self.drop(self.proj(y)) * self.scale


class Sliced(nn.Module):
    """Its result and its input's gradient are parts of larger tensors."""

    def __init__(self, spec: pl.ModelSpec) -> None:
        super().__init__()
        self.mix = nn.Linear(2 * spec.hidden, 2 * spec.hidden)

    def forward(self, x):
        return self.mix(torch.cat([x, torch.ones_like(x)], -1))[..., : x.shape[-1]]


class Recurrent(nn.LSTM):
    def __init__(self, spec: pl.ModelSpec) -> None:
        super().__init__(spec.hidden, spec.hidden, batch_first=True)

    def forward(self, x):
        return x + super().forward(x)[0]


OWN = cases("""
    dp=3 microbatches=2
    dp=3 zero_stage=2 microbatches=2
    dp=2 zero_stage=3 recompute=full microbatches=2
    pp=2 dp=2 microbatches=2 zero_stage=3
    dp=2 precision=bf16
    pp=2 microbatches=2 precision=fp16
""", block=Mixer, dropout=0.1) + cases("""
    pp=2 microbatches=2
    pp=2 microbatches=2 recompute=full
""", block=Sliced) + cases("""
    dp=2 zero_stage=3 recompute=full
""", block=Recurrent)  # fmt: skip
OWN_CHAINS = cases("""
    pp=4 microbatches=5 schedule=zb-h1
    recompute=full microbatches=2
    pp=2 microbatches=4 schedule=zb-h1 recompute=full
""", block=Mixer, dropout=0.1, tied=False)  # fmt: skip


def mixed(pp: int, microbatches: int, virtual_stages: int) -> list[list[tuple]]:
    """Whole and split backwards next to each other."""
    even, odd, lists = range(0, microbatches, 2), range(1, microbatches, 2), []
    for rank in range(pp):
        stages = range(rank, pp * virtual_stages, pp)
        row: list[tuple] = [(s, "F", k) for s in stages for k in range(microbatches)]
        for s in reversed(stages):
            row += [(s, "I", k) for k in even] + [(s, "B", k) for k in odd]
            row += [(s, "W", k) for k in even]
        lists.append(row)
    return lists


SCHEDULES = [case("pp=2 microbatches=4 virtual_stages=3 tied=False", schedule=mixed)]
# AdamW divides by the gradient's own size: where that is nearly zero its last bits count.
ADAMW = cases("""
    dp=2 microbatches=2 zero_stage=1
    pp=3 microbatches=4
    tp=4 sequence_parallel=True microbatches=2
    tp=4 tp_mode=2d microbatches=2
""", optimizer="adamw", lr=1e-3, steps=3)  # fmt: skip
BITS = [*CHAINS, *OWN_CHAINS]
EQUAL = [*PLANS, *BITS, *OWN, *SCHEDULES]


def wide(spec: pl.ModelSpec) -> nn.Module:
    """A block of one's own whose weights are most of what a rank holds."""
    h = spec.hidden
    return nn.Sequential(nn.Linear(h, 40 * h), nn.ReLU(), nn.Linear(40 * h, h))


WIDE = case("dp=2 zero_stage=3 layers=6", block=wide)
PLAIN, DROPPED, CLIPPED = cases("""
    microbatches=2
    microbatches=2 dropout=0.1
    microbatches=2 clip_norm=0.05
""")


def whole_batch(one: Case) -> Case:
    """One device with the micro-batches of all ranks."""
    plan = pl.Plan(microbatches=one.plan.dp * one.plan.microbatches)
    return Case("on one device", one.model, plan, one.more)


@pytest.fixture(scope="module")
def trained(text) -> Trained:
    alone = [one.on_one_device() for one in BITS] + [whole_batch(one) for one in ADAMW]
    return Trained([*EQUAL, *ADAMW, *alone, WIDE, PLAIN, DROPPED, CLIPPED], text)


@named(EQUAL)
def test_a_plan_trains_what_the_reference_trains(trained, one):
    trained.assert_equals_the_reference(one)


@named(BITS)
def test_one_chain_of_additions_is_bitwise_that_of_one_device(trained, one):
    assert_same_bits(trained[one.on_one_device()], trained[one])


@named(ADAMW)
def test_adamw_trains_the_same_weights_within_a_hundredth_of_an_update(trained, one):
    gap, name = worst_of(trained[whole_batch(one)], trained[one])
    assert gap < 2e-5, name


def worst_of(expected: pl.Report, found: pl.Report) -> tuple[float, str]:
    gaps = {n: float(np.abs(a - found.weights[n]).max()) for n, a in expected.weights.items()}
    return max((gap, name) for name, gap in gaps.items())


def test_dropout_drops_and_clipping_clips(trained):
    plain, dropped, clipped = map(trained.alone, (PLAIN, DROPPED, CLIPPED))
    assert plain["losses"][0] != dropped["losses"][0]
    assert plain["losses"][0] == clipped["losses"][0]
    with pytest.raises(AssertionError):
        assert_equal_state(clipped, trained[PLAIN])


# ---- a block of one's own ------------------------------------------------------------------------
def test_zero3_does_not_keep_what_it_gathered_for_a_block_of_ones_own(trained):
    """The ledger: the ranks hold a share, and what is gathered of it for one block or two."""
    each = 4 * 80 * MODEL.hidden**2  # bytes of one block's weights
    held = trained[WIDE].memory.query("category == 'buffers'").bytes.max()
    assert each < held < 4 * each


# ---- checkpoints ---------------------------------------------------------------------------------
def test_a_training_goes_on_under_other_axes(run, tmp_path):
    """From a grid to a pipeline of tensor-parallel stages."""
    adamw = {"lr": 1e-3, "keep_state": True}
    first = pl.Plan(tp=4, tp_mode="2d", microbatches=2)
    whole = run(MODEL, pl.Plan(microbatches=2), steps=2, **adamw)
    run(MODEL, first, steps=1, save=tmp_path, **adamw)
    rest = run(MODEL, first.replace(tp=2, tp_mode="1d", pp=2), steps=1, resume=tmp_path, **adamw)
    assert worst(whole.gradients, rest.gradients)[0] < 1e-4
    assert worst_of(whole, rest)[0] < 2e-5
