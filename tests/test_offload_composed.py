"""Offload beside pipelines, tensor parallelism and replicas: one training, wherever states lie.

What other ranks have a part of too waits on the device until it is summed: a tied embedding at a
pipeline's ends, norms that tp ranks share, with replicas everything. Rows and memory of such plans
are in test_composed.py.
"""

from __future__ import annotations

import types

import pytest

import paralab as pl
from equality import assert_equal_state, reference, worst
from paralab.launch import launch_program
from paralab.programs.compile import compiled
from paralab.report.merge import whole_model
from test_offload import ALL, TIERS, _one_late, assert_near, assert_same_bits, said

STEPS = 3
# Five blocks: no number of stages divides them.
MODEL = pl.ModelSpec(layers=5, hidden=40, heads=4, seq_len=24, vocab=258)
STATES = {k: v for k, v in ALL.items() if k != "activations"}
CPU = {"parameters": "cpu", "gradients": "cpu", "optimizer": "cpu"}
LATE = {"gradients": "cpu", "optimizer": "cpu", "delayed": True}
BUCKET = {"bucket_bytes": 60_000}
AXES = [
    {"pp": 2},
    {"tp": 2, "sequence_parallel": True},
    {"dp": 2, "shard": 1},
]


# ---- equality ---------------------------------------------------------------------------------
def several(context, model, plans, settings, folder):
    """Several trainings, one after the other, in the same processes."""
    from paralab.interpret.train import train

    return [
        train(context, model, plan, offload_folder=f"{folder}/{at}", **settings)
        for at, plan in enumerate(plans)
    ]


@pytest.mark.filterwarnings("ignore:zero_stage=3 with pp")
@pytest.mark.parametrize("axis", AXES, ids=said)
def test_adamw_is_that_of_the_same_plan_wherever_its_states_lie(kept, text, tmp_path, axis):
    """Every combination of places, beside every axis: three steps, bit for bit."""
    # Tensor parallelism's layers and micro-batches are alike, and say much to each other.
    model, count = (MODEL.replace(layers=2), 2) if "tp" in axis else (MODEL, 4)
    of = {"microbatches": count // axis.get("dp", 1), **BUCKET, **axis}
    plans = [pl.Plan(zero_stage=stage, **of) for stage in (1, 2, 3)]
    plans += [pl.Plan(zero_stage=stage, offload=tiers, **of) for stage, tiers in TIERS]
    for plan in plans:
        plan.validate(model)
    settings = {"steps": STEPS, "keep_state": True, "data": str(text), "seed": 0, "lr": 1e-3,
                "optimizer": "adamw", "clip_norm": None}  # fmt: skip
    args = (model, plans, settings, str(tmp_path))
    ranks = launch_program(several, 2, args, timeout=300, device="cpu")
    alone = kept(model, pl.Plan(microbatches=count))
    states = [
        types.SimpleNamespace(**{
            what: whole_model({p["rank"]: p[what] for p in parts if p[what]}, plan, model)
            for what in ("weights", "gradients")
        }, losses=[p["losses"] for p in parts])
        for plan, parts in zip(plans, zip(*ranks, strict=True), strict=True)
    ]  # fmt: skip
    for plan, state in zip(plans, states, strict=True):
        assert_near(alone, state)
        assert_same(plan, state, states[plan.zero_stage - 1], model)


def assert_same(plan, state, plain, model=MODEL):
    """Bit for bit, where the buffers are cut alike: kernels round the end of one in another way,
    and a norm of norms.
    """
    layouts = [
        [[unit.names for unit in units] for units in compiled(model, how).units]
        for how in (plan, plan.replace(offload=None))
    ]
    if layouts[0] == layouts[1]:
        assert_same_bits(state, plain)
        return
    assert not plan.relays and plan.tp > 1
    for what, most in (("gradients", 1e-6), ("weights", 1e-4)):
        gap, name = worst(getattr(plain, what), getattr(state, what))
        assert gap < most, f"{what} of {name}: {gap:.1e}"


@pytest.mark.parametrize(
    "change, settings, more",
    [
        # fewer micro-batches than stages; untied; stages of 1, 2 and 2 blocks
        ({"tied": False}, {}, {"pp": 3, "zero_stage": 2, "offload": "nvme", "schedule": "gpipe"}),
        ({}, {"clip_norm": 0.1}, {"pp": 3, "zero_stage": 3, "offload": STATES, "microbatches": 5}),
        ({}, {}, {"pp": 2, "zero_stage": 3, "offload": ALL, "recompute": "full", "microbatches": 4,
                  "schedule": "interleaved", "virtual_stages": 2}),
        ({}, {}, {"pp": 2, "dp": 2, "zero_stage": 2, "offload": "cpu", "schedule": "zb-h1",
                  "microbatches": 4}),
        ({}, {}, {"pp": 2, "zero_stage": 1, "offload": "nvme", "precision": "bf16",
                  "schedule": "zb-h2"}),
        ({}, {"clip_norm": 0.1}, {"tp": 2, "zero_stage": 2, "offload": "cpu"}),
        ({}, {"clip_norm": 0.1}, {"tp": 2, "sequence_parallel": True, "dp": 2, "zero_stage": 3,
                                  "offload": STATES}),
        ({"dropout": 0.1}, {}, {"tp": 2, "zero_stage": 3, "offload": ALL, "recompute": "full"}),
        ({}, {}, {"tp": 4, "tp_mode": "2d", "microbatch_size": 4, "zero_stage": 2,
                  "offload": "cpu"}),
        ({}, {}, {"dp": 4, "shard": 2, "zero_stage": 3, "offload": "nvme", "precision": "bf16"}),
        ({}, {}, {"dp": 2, "shard": 1, "zero_stage": 2, "offload": "cpu", "precision": "fp16"}),
        ({}, {}, {"tp": 2, "pp": 2, "dp": 2, "shard": 1, "sequence_parallel": True,
                  "zero_stage": 3, "offload": CPU}),
    ],
    ids=said,
)  # fmt: skip
def test_everything_else_goes_with_it_bit_for_bit(kept, change, settings, more):
    model = MODEL.replace(**change)
    plan = pl.Plan(**{"microbatches": 2, **BUCKET, **more})
    report = kept(model, plan, **settings)
    assert_same(plan, report, kept(model, plan.replace(offload=None), **settings), model)


@pytest.mark.parametrize(
    "axis, place",
    [({"pp": 3, "microbatches": 4}, "nvme"),
     ({"pp": 2, "microbatches": 4, "schedule": "zb-h1"}, "cpu"),
     ({"tp": 2, "sequence_parallel": True, "microbatches": 4}, "nvme"),
     ({"dp": 4, "shard": 2, "microbatches": 1}, "cpu")],
    ids=said,
)  # fmt: skip
def test_gradients_and_sgd_weights_are_those_of_a_plain_loop(run, text, axis, place):
    plan = pl.Plan(zero_stage=2, offload=place, **BUCKET, **axis)
    report = run(MODEL, plan, steps=3, optimizer="sgd", lr=0.5, keep_state=True)
    assert_equal_state(alone_of(text), report)


def alone_of(text):
    return reference(MODEL, microbatches=4, microbatch_size=2, steps=3, lr=0.5, data=text)


@pytest.mark.parametrize("axis", [{"tp": 2, "sequence_parallel": True}, {"dp": 2, "shard": 1}],
                         ids=said)  # fmt: skip
def test_a_layer_relay_goes_with_replicas_and_tensor_parallelism(run, text, axis):
    plan = pl.Plan(zero_stage=3, offload="cpu", recompute="full", schedule="l2l",
                   microbatches=4 // axis.get("dp", 1), **axis)  # fmt: skip
    report = run(MODEL, plan, steps=3, optimizer="sgd", lr=0.5, keep_state=True)
    assert_equal_state(alone_of(text), report)


@pytest.mark.parametrize("axis", AXES, ids=said)
def test_a_delayed_update_is_one_update_late_beside_every_axis(run, text, axis):
    plan = pl.Plan(zero_stage=2, offload=LATE, **BUCKET, **axis)
    report = run(MODEL, plan, steps=4, optimizer="sgd", lr=0.5, keep_state=True)
    args = (MODEL, 2 * plan.dp, 4, 0.5, str(text))
    expected = pl.launch(_one_late, ranks=1, args=args)[0]
    assert_equal_state(expected, report)


def test_a_training_goes_on_on_other_tiers_and_axes(run, text, tmp_path):
    plan = pl.Plan(pp=2, zero_stage=3, offload=STATES, microbatches=4)
    run(MODEL, plan, steps=3, save=tmp_path / "saved")
    more = pl.Plan(tp=2, dp=2, shard=1, zero_stage=2, offload="cpu", microbatches=2,
                   sequence_parallel=True)  # fmt: skip
    report = run(MODEL, more, steps=2, resume=tmp_path / "saved", keep_state=True)
    assert_near(run(MODEL, pl.Plan(microbatches=4), steps=5, keep_state=True), report)
