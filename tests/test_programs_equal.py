"""A compiled program trains what the reference trains: losses, gradients, weights after SGD.

Against the reference (plain autograd, one process) within the tolerance of tests/equality.py;
against the program of one device bit for bit, wherever a plan leaves one chain of additions per
parameter: pipelines, accumulation, recomputation.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import paralab as pl
from equality import TOLERANCE, assert_equal_state, reference

STEPS, LR = 2, 0.5
SPEC = pl.ModelSpec(layers=4, hidden=48, heads=4, seq_len=24, vocab=260)
SMALL = 40_000  # bytes of a bucket: so there are several

PLANS = {
    "one device": {},
    "accumulation": {"microbatches": 3},
    "data parallel": {"dp": 2},
    "data parallel, naive": {"dp": 4, "grad_sync": "naive"},
    "data parallel, bucketed": {
        "dp": 2,
        "grad_sync": "bucketed",
        "microbatches": 2,
        "bucket_bytes": SMALL,
    },
    "data parallel, overlapped": {"dp": 3, "microbatches": 2, "bucket_bytes": SMALL},
    "ZeRO-1": {"dp": 2, "zero_stage": 1, "bucket_bytes": SMALL},
    "ZeRO-2": {"dp": 3, "zero_stage": 2, "microbatches": 2, "bucket_bytes": SMALL},
    "ZeRO-3": {"dp": 2, "zero_stage": 3, "microbatches": 2},
    "ZeRO-3, no prefetch": {"dp": 4, "zero_stage": 3, "prefetch": 0},
    "ZeRO-3, two ahead": {"dp": 3, "zero_stage": 3, "prefetch": 2},
    "HSDP": {"dp": 4, "shard": 2, "zero_stage": 3},
    "HSDP, ZeRO-1": {"dp": 4, "shard": 2, "zero_stage": 1, "bucket_bytes": SMALL},
    "1F1B": {"pp": 4, "microbatches": 8},
    "naive pipeline": {"pp": 2, "microbatches": 3, "schedule": "naive"},
    "GPipe": {"pp": 2, "microbatches": 3, "schedule": "gpipe"},
    "interleaved": {"pp": 2, "microbatches": 4, "schedule": "interleaved", "virtual_stages": 2},
    "ZB-H1": {"pp": 4, "microbatches": 8, "schedule": "zb-h1"},
    "ZB-H2": {"pp": 2, "microbatches": 4, "schedule": "zb-h2"},
    "pipeline, data parallel": {"pp": 2, "dp": 2, "microbatches": 3, "bucket_bytes": SMALL},
    "pipeline, ZeRO-1": {"pp": 2, "dp": 2, "microbatches": 3, "zero_stage": 1},
    "pipeline, ZeRO-2": {"pp": 2, "dp": 2, "microbatches": 3, "zero_stage": 2},
    "pipeline, ZeRO-3": {"pp": 2, "dp": 2, "microbatches": 2, "zero_stage": 3},
    "recomputed": {"recompute": "full", "microbatches": 2},
    "recomputed core": {"recompute": "selective", "microbatches": 2},
    "recomputed, ZeRO-3": {"dp": 2, "zero_stage": 3, "recompute": "full"},
    "recomputed, 1F1B": {"pp": 2, "microbatches": 4, "recompute": "full"},
    "tensor parallel": {"tp": 2, "microbatches": 2},
    "tensor parallel, data parallel": {"tp": 2, "dp": 2, "bucket_bytes": SMALL},
    "tensor parallel, pipeline": {"tp": 2, "pp": 2, "microbatches": 4},
    "tensor parallel, ZB-H1": {"tp": 2, "pp": 2, "microbatches": 4, "schedule": "zb-h1"},
    "tensor parallel, ZeRO-3": {"tp": 2, "dp": 2, "zero_stage": 3},
    "tensor parallel, recomputed": {"tp": 2, "recompute": "full"},
    "tensor parallel, parts": {"tp": 2, "recompute": "full", "partition_activations": True},
    "sequence parallel": {"tp": 4, "sequence_parallel": True, "microbatches": 2},
    "sequence parallel, ZeRO-2": {
        "tp": 2,
        "dp": 2,
        "sequence_parallel": True,
        "zero_stage": 2,
        "bucket_bytes": SMALL,
    },
    "sequence parallel, recomputed": {"tp": 2, "sequence_parallel": True, "recompute": "full"},
    "sequence parallel, core": {"tp": 2, "sequence_parallel": True, "recompute": "selective"},
    "sequence parallel, ZB-H2": {
        "tp": 2,
        "pp": 2,
        "microbatches": 4,
        "schedule": "zb-h2",
        "sequence_parallel": True,
    },
    "ZB-H1, recomputed": {"pp": 2, "microbatches": 4, "schedule": "zb-h1", "recompute": "full"},
    "ZB-H1, ZeRO-3": {"pp": 2, "dp": 2, "microbatches": 4, "schedule": "zb-h1", "zero_stage": 3},
    "bf16": {"dp": 2, "precision": "bf16"},
    "bf16, tensor parallel, pipeline": {"tp": 2, "pp": 2, "microbatches": 2, "precision": "bf16"},
    "fp16, ZeRO-3": {"dp": 2, "precision": "fp16", "zero_stage": 3},
    "bf16 into fp32, tensor parallel, pipeline": {
        **{"tp": 2, "pp": 2, "dp": 2, "microbatches": 2, "zero_stage": 1, "bucket_bytes": SMALL},
        **{"precision": "bf16", "grad_dtype": "fp32"},
    },
    "fp16, pipeline": {"pp": 2, "microbatches": 2, "precision": "fp16"},
}


@pytest.fixture(scope="module")
def trained(run):
    """`pl.run` with its state; equal runs are made once."""
    known: dict[str, pl.Report] = {}

    def train(model: pl.ModelSpec, plan: pl.Plan, **more) -> pl.Report:
        key = repr((model, model.block, plan, more))
        if key not in known:
            given = {"steps": STEPS, "optimizer": "sgd", "lr": LR, **more}
            known[key] = run(model, plan, keep_state=True, **given)
        return known[key]

    return train


@pytest.fixture(scope="module")
def alone(text):
    """The reference with as many micro-batches as all ranks together have."""

    def train(model: pl.ModelSpec, plan: pl.Plan, **more):
        return reference(
            model,
            microbatches=plan.dp * plan.microbatches,
            microbatch_size=plan.microbatch_size,
            steps=STEPS,
            lr=LR,
            precision=plan.precision,
            data=text,
            **more,
        )

    return train


@pytest.fixture(scope="module")
def check(trained, alone):
    def check(model: pl.ModelSpec, plan: pl.Plan, **more) -> None:
        expected, report = alone(model, plan, **more), trained(model, plan, **more)
        assert_equal_state(expected, report, precision=plan.precision)
        np.testing.assert_allclose(
            report.losses, expected["losses"], rtol=TOLERANCE[plan.precision]
        )

    return check


@pytest.mark.parametrize("name", PLANS)
def test_plan_equals_the_reference(check, name):
    check(SPEC, pl.Plan(**PLANS[name]))


@pytest.mark.parametrize(
    "name", ["pipeline, ZeRO-3", "tensor parallel, pipeline", "sequence parallel", "ZB-H1"]
)
def test_plan_of_an_untied_model_equals_the_reference(check, name):
    check(SPEC.replace(tied=False), pl.Plan(**PLANS[name]))


@pytest.mark.parametrize(
    "name",
    [
        "ZeRO-2",
        "HSDP",
        "pipeline, ZeRO-1",
        "tensor parallel, pipeline",
        "sequence parallel, ZeRO-2",
        "ZB-H1",
        "fp16, pipeline",
        "bf16",
    ],
)
def test_clipped_plan_equals_the_reference(check, alone, name):
    plan = pl.Plan(**PLANS[name])
    free, clipped = alone(SPEC, plan), alone(SPEC, plan, clip_norm=0.5)
    assert not np.array_equal(  # it does clip
        free["weights"]["head.norm.weight"], clipped["weights"]["head.norm.weight"]
    )
    check(SPEC, plan, clip_norm=0.5)


# ---- dropout: the same masks in every split ------------------------------------------------------
DROPPED = [
    "one device",
    "accumulation",
    "data parallel",
    "ZeRO-3",
    "GPipe",
    "1F1B",
    "interleaved",
    "ZB-H1",
    "recomputed",
    "recomputed core",
    "recomputed, ZeRO-3",
    "tensor parallel",
    "tensor parallel, pipeline",
    "tensor parallel, parts",
    "sequence parallel",
    "sequence parallel, recomputed",
    "sequence parallel, core",
    "bf16",
]


@pytest.mark.parametrize("name", DROPPED)
def test_plan_with_dropout_equals_the_reference(check, name):
    check(SPEC.replace(dropout=0.1), pl.Plan(**PLANS[name]))


@pytest.mark.parametrize("name", [n for n in DROPPED if "tp" not in PLANS[n]])
def test_plan_with_fused_attention_and_dropout_equals_the_reference(check, name):
    check(SPEC.replace(dropout=0.1, attention="sdpa"), pl.Plan(**PLANS[name]))


@pytest.mark.parametrize("name", ["accumulation", "1F1B", "tensor parallel", "sequence parallel"])
def test_plan_with_fused_attention_equals_the_reference(check, name):
    check(SPEC.replace(attention="sdpa"), pl.Plan(**PLANS[name]))


def test_dropout_drops(alone):
    plan = pl.Plan()
    losses = [alone(SPEC.replace(dropout=p), plan)["losses"] for p in (0.0, 0.1, 0.2)]
    assert len({loss[0] for loss in losses}) == 3


# ---- bit for bit ---------------------------------------------------------------------------------
CHAINS = [
    "1F1B",
    "naive pipeline",
    "GPipe",
    "interleaved",
    "ZB-H1",
    "ZB-H2",
    "recomputed",
    "recomputed core",
    "recomputed, 1F1B",
    "ZB-H1, recomputed",
    "fp16, pipeline",
]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("name", CHAINS)
def test_pipeline_and_recomputation_are_bitwise_the_program_of_one_device(trained, name, dropout):
    """Untied: a tied embedding's gradient is the sum of two chains, one per end of a pipeline."""
    spec, plan = SPEC.replace(tied=False, dropout=dropout), pl.Plan(**PLANS[name])
    device = pl.Plan(microbatches=plan.microbatches, precision=plan.precision)
    expected, found = trained(spec, device), trained(spec, plan)
    assert found.losses == expected.losses
    for what in ("gradients", "weights"):
        a, b = getattr(expected, what), getattr(found, what)
        assert list(a) == list(b)
        wrong = [name for name in a if not np.array_equal(a[name], b[name])]
        assert not wrong, f"{what} of {wrong[:3]}"


# ---- a block of one's own ------------------------------------------------------------------------
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


OWN = [
    "one device",
    "accumulation",
    "data parallel, overlapped",
    "ZeRO-2",
    "ZeRO-3",
    "HSDP",
    "GPipe",
    "interleaved",
    "ZB-H1",
    "recomputed",
    "recomputed, ZeRO-3",
    "ZB-H1, recomputed",
    "pipeline, ZeRO-3",
    "bf16",
    "fp16, pipeline",
]


@pytest.mark.parametrize("name", OWN)
def test_plan_of_a_block_of_ones_own_equals_the_reference(check, name):
    check(SPEC.replace(block=Mixer, dropout=0.1), pl.Plan(**PLANS[name]))


@pytest.mark.parametrize("name", ["GPipe", "ZB-H1", "recomputed"])
def test_a_block_of_ones_own_is_bitwise_that_of_one_device(trained, name):
    spec, plan = SPEC.replace(block=Mixer, dropout=0.1, tied=False), pl.Plan(**PLANS[name])
    expected, found = trained(spec, pl.Plan(microbatches=plan.microbatches)), trained(spec, plan)
    assert found.losses == expected.losses
    assert all(np.array_equal(expected.weights[n], w) for n, w in found.weights.items())


def test_zero3_does_not_keep_what_it_gathered_for_a_block_of_ones_own(trained):
    """The ledger: the ranks hold a share, and what is gathered of it for one block or two."""

    def block(spec: pl.ModelSpec) -> nn.Module:
        return nn.Sequential(
            nn.Linear(spec.hidden, 40 * spec.hidden),
            nn.ReLU(),
            nn.Linear(40 * spec.hidden, spec.hidden),
        )

    spec = SPEC.replace(block=block, layers=6)
    each = 4 * 80 * spec.hidden**2  # bytes of one block's weights
    report = trained(spec, pl.Plan(dp=2, zero_stage=3))
    held = report.memory[report.memory.category == "buffers"].bytes.max()
    assert each < held < 4 * each


@pytest.mark.parametrize("name", ["one device", "ZeRO-3", "recomputed", "ZB-H1, recomputed"])
def test_the_memory_of_a_block_of_ones_own_is_predicted(trained, name):
    """By one run on fake tensors: a step's peak is at most 1 % more than that, and 3 % less."""
    from paralab.interpret.memory import memory
    from paralab.programs.compile import compiled

    spec = SPEC.replace(block=Mixer, dropout=0.1, hidden=128, seq_len=64)
    plan = pl.Plan(**PLANS[name])
    program = compiled(spec, plan, optimizer="sgd")
    expected = max(memory(program, rank).peak for rank in range(plan.pp))
    assert 0.99 < expected / trained(spec, plan).peak_memory < 1.03
