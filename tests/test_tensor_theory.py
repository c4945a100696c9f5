"""Tensor parallelism in theory: layouts, bytes of every layer, memory; the rows of a run."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

import paralab as pl
from paralab.parallel import layouts
from paralab.theory import memory, tensor
from paralab.theory.activations import (
    block_activation_bytes,
    part_activation_bytes,
    recomputed_bytes,
)
from paralab.theory.predict import predict
from test_predict import cluster
from test_tensor_parallel import ALL, MODEL, ONE_D, modes

HUGE = pl.ModelSpec.preset("gpt3-175b")


def plan_of(mode, **more):
    return pl.Plan(**{"microbatch_size": 4, **ALL[mode], **more})


# ---- layouts --------------------------------------------------------------------------------
@modes
def test_every_element_of_every_parameter_is_held_once_or_by_copies(mode):
    plan = plan_of(mode)
    for name in MODEL.parameter_shapes():
        held = [layouts.holding(MODEL, plan, name, index) for index in range(plan.tp)]
        count = np.zeros(held[0].whole, dtype=int)
        for one in held:
            count[one.box] += 1
            assert math.prod(one.shape) == count[one.box].size
        copies = len(layouts.groups(plan, held[0].copies)[0]) if held[0].copies else 1
        assert (count == copies).all(), name
        for group in layouts.groups(plan, held[0].copies) if copies > 1 else ():
            assert len({str(held[index].box) for index in group}) == 1


@modes
def test_groups_of_an_axis_deal_out_the_ranks(mode):
    plan = plan_of(mode, dp=2)
    for axis in layouts.mode_of(plan).axes:
        found = Counter(r for group in layouts.groups(plan, axis) for r in group)
        assert found == Counter(range(plan.tp))
        for rank in range(plan.world_size):
            assert rank in plan.ranks(axis, rank)


def test_ranks_are_dealt_out_tp_innermost():
    plan = pl.Plan(pp=2, dp=3, tp=4)
    grid = np.arange(24).reshape(2, 3, 4)
    for rank in range(24):
        at = plan.place(rank)
        assert grid[at] == rank
        assert plan.ranks("tp", rank) == tuple(grid[at.pp, at.dp])
        assert plan.ranks("dp", rank) == tuple(grid[at.pp, :, at.tp])
        assert plan.ranks("pp", rank) == tuple(grid[:, at.dp, at.tp])


# ---- FACTS ----------------------------------------------------------------------------------
def mlp(batch, **mode):
    """Million elements that a rank receives for both layers of GPT-3's MLP, forward and back."""
    plan = pl.Plan(microbatch_size=batch, **mode)
    both = [sum(tensor.linear_elements(HUGE, plan, role)) for role in ("up", "down")]
    depth = sum(tensor.depth_elements(HUGE, plan, role) for role in ("up", "down"))
    return round(float(sum(both) + depth) / 1e6)


@pytest.mark.parametrize(
    ("batch", "numbers"), [(1, (99, 438, 810, 137)), (64, (6342, 3039, 1925, 1623))]
)
def test_the_crossover_at_gpt3_sizes(batch, numbers):
    grids = ({}, {"tp_mode": "2d"}, {"tp_mode": "2.5d"}, {"tp_mode": "3d"})
    assert tuple(mlp(batch, tp=64, **grid) for grid in grids) == numbers


@pytest.mark.parametrize("role", ["qkv", "proj", "up", "down", "output"])
@modes
def test_a_layers_calls_add_up_to_its_formula(mode, role):
    plan = plan_of(mode)
    forward, backward = tensor.linear_elements(MODEL, plan, role)
    calls = tensor.linear_calls(MODEL, plan, role)
    n = {axis: len(layouts.groups(plan, axis)[0]) for axis in layouts.mode_of(plan).axes}

    def sent(some):
        """By one rank on average."""
        share = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
        return sum(c.elements * (n[c.axis] - 1) * share.get(c.op, 1) / n[c.axis] for c in some)

    assert math.isclose(sent(calls.before + calls.after), forward)
    assert math.isclose(sent(calls.backward + calls.beside + calls.weight), backward)


# ---- a run's own rows -----------------------------------------------------------------------
def rows(report, step=0):
    calls = report.collectives[report.collectives["step"] == step]
    calls = calls[~calls["phase"].isin(["control", "setup"])]
    columns = ["rank", "op", "axis", "ranks", "phase", "payload_bytes", "wire_bytes"]
    return Counter(zip(*(calls[c] for c in columns), strict=True))


@pytest.mark.parametrize(
    ("mode", "more"),
    [*((mode, {"microbatches": 2}) for mode in ALL),
     *((mode, {"dp": 2, "zero_stage": 1}) for mode in ("1d, 2", "1d sequence, 2", "2d, 4")),
     ("1d, 2", {"dp": 2, "zero_stage": 3}), ("2d, 4", {"dp": 2, "zero_stage": 2}),
     *((mode, {"recompute": "full"}) for mode in ("1d sequence, 2", "2d, 4", "3d, 8")),
     ("1d, 4", {"recompute": "full", "partition_activations": True}),
     *((mode, {"recompute": "selective", "precision": "bf16"}) for mode in ("1d, 2", "2.5d, 8"))],
    ids=str,
)  # fmt: skip
def test_prediction_has_the_calls_of_a_run(run, mode, more):
    plan = plan_of(mode, **more)
    expect = predict(MODEL, plan, cluster(devices_per_node=16), steps=1)
    assert rows(expect) == rows(run(MODEL, plan, steps=2), step=1)


@pytest.mark.parametrize(
    ("mode", "schedule"),
    [("1d, 2", "1f1b"), ("1d, 2", "zb-h1"), ("1d sequence, 2", "1f1b"),
     ("1d sequence, 2", "zb-h1"), ("2d, 4", "1f1b")],
)  # fmt: skip
def test_and_with_a_pipeline(run, mode, schedule):
    plan = plan_of(mode, pp=2, microbatches=3, schedule=schedule)
    expect = predict(MODEL, plan, cluster(devices_per_node=8), steps=1)
    assert rows(expect) == rows(run(MODEL, plan, steps=2), step=1)


@modes
def test_linear_layers_rows_equal_the_formulas_forward_and_backward_apart(run, mode):
    plan = plan_of(mode, microbatches=2)
    report = run(MODEL, plan, steps=2)
    calls = report.collectives[report.collectives["step"] == 1]
    sent = calls.groupby("phase")["wire_bytes"].sum()
    roles = ("qkv", "proj", "up", "down")
    both = [tensor.linear_elements(MODEL, plan, role) for role in roles]
    depth = sum(tensor.depth_elements(MODEL, plan, role) for role in roles)
    times = 2 * MODEL.layers * plan.tp * 4  # micro-batches, blocks, ranks, bytes
    assert sent.get("linear_forward", 0) == times * sum(f for f, _ in both)
    backward = times * sum(b for _, b in both) + MODEL.layers * plan.tp * 4 * depth
    assert sent.get("linear_backward", 0) == backward


# ---- memory ---------------------------------------------------------------------------------
@pytest.mark.parametrize("t", [1, 2, 8])
def test_a_block_keeps_what_korthikanti_says(t):
    """Table 2, in the paper's bytes: 2 per element and 1 per mask, without the norms' statistics,
    which it leaves out, and without the dropped scores' own copy and mask when recomputed.
    """
    model = HUGE.replace(dropout=0.1)
    b, s, h, a = 4, model.seq_len, model.hidden, model.heads
    x = s * b * h

    def kept(**more):
        plan = pl.Plan(tp=t, microbatch_size=b, **more)
        found = block_activation_bytes(
            model,
            b,
            mask_bytes=1,
            precision="bf16",
            recompute=plan.recompute,
            shares=tensor.shares(plan),
        )
        if plan.recompute == "full":
            return found - 5056
        statistics = 2 * 4 * b * s // tensor.shares(plan).tokens
        return found - statistics - (plan.recompute != "none") * 5056

    assert kept() == x * (10 + 24 / t + 5 * a * s / (h * t))
    assert kept(recompute="selective") == x * (10 + 24 / t)
    assert kept(recompute="full") == 2 * x
    if t > 1:
        sequence = {"sequence_parallel": True}
        assert kept(**sequence) == x * (34 / t + 5 * a * s / (h * t))
        assert kept(recompute="selective", **sequence) == x * 34 / t
    else:
        assert kept() == x * (34 + 5 * a * s / h)


@pytest.mark.parametrize(
    ("mode", "more", "dropout"),
    [*((mode, {}, 0.1) for mode in ALL),
     *((mode, {}, 0.0) for mode in ("1d, 4", "1d sequence, 2", "2d, 4", "3d, 8")),
     *((mode, {"recompute": "full"}, 0.0) for mode in ALL),
     ("1d, 2", {"recompute": "full"}, 0.1), ("2.5d, 8", {"recompute": "full"}, 0.1),
     ("1d, 2", {"recompute": "selective"}, 0.1), ("2d, 4", {"recompute": "selective"}, 0.0),
     ("1d, 2", {"zero_stage": 1, "dp": 2}, 0.0), ("2d, 4", {"zero_stage": 1, "dp": 2}, 0.0)],
    ids=str,
)  # fmt: skip
def test_states_and_activations_are_the_formulas_to_the_byte(run, mode, more, dropout):
    model = pl.ModelSpec(layers=2, hidden=128, heads=4, seq_len=64, dropout=dropout)
    plan = plan_of(mode, **more)
    report = run(model, plan, steps=1)
    for rank in (0, plan.world_size - 1):
        states = memory.state_bytes(model, plan, rank=rank)
        assert states["optimizer"] == report.peaks(rank=rank).loc["optimizer"].iloc[-1]
        kept = sum(memory.kept_bytes(model, plan, ("embedding", "blocks.0", "blocks.1",
                                                   "head")).values())  # fmt: skip
        if plan.recompute == "full":  # one block is there once more, the head no longer
            asked = memory.asked(plan)
            kept += recomputed_bytes(model, 4, **asked)
            kept -= part_activation_bytes(model, "head", 4, **asked)
        if plan.recompute == "full" and dropout:  # of the two blocks' masks one may be gone
            assert 0 <= kept - found_activations(report, rank) <= 4 * 4 * 64 * 128
        else:
            assert found_activations(report, rank) == kept


def found_activations(report, rank):
    table = report.memory
    return table[(table["rank"] == rank) & (table["category"] == "activations")]["bytes"].max()


def test_sequence_parallel_keeps_less_than_1d_as_the_formula_says(run):
    model = pl.ModelSpec(layers=4, hidden=128, heads=4, seq_len=64)
    kept = {}
    for sequence in (False, True):
        plan = pl.Plan(tp=4, microbatch_size=4, sequence_parallel=sequence)
        kept[sequence] = found_activations(run(model, plan, steps=1), 0)
        assert kept[sequence] == memory.moments(model, plan)["forward"]["activations"]
    assert kept[True] < kept[False]


# ---- refusals -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("plan", "change", "words"),
    [
        ({"tp": 3, "tp_mode": "2d"}, {}, ("tp=3", "1, 4, 9")),
        ({"tp": 4, "tp_mode": "3d"}, {}, ("tp=4", "1, 8, 27")),
        ({"tp": 6, "tp_mode": "2.5d"}, {}, ("tp=6", "1, 4, 8")),
        ({"tp": 8, "tp_mode": "2.5d", "tp_depth": 4}, {}, ("tp=8", "4, 16")),
        ({"tp": 4, "tp_depth": 2}, {}, ("tp_depth", "2.5d")),
        ({"tp": 3}, {}, ("heads", "3", "6")),
        ({"tp": 4}, {"vocab": 257}, ("vocab=257", "260")),
        ({"tp": 8, "tp_mode": "3d"}, {"hidden": 50, "heads": 2}, ("hidden=50", "52")),
        ({"tp": 8, "tp_mode": "3d", "microbatch_size": 2}, {}, ("microbatch_size=2", "4")),
        ({"tp": 8, "tp_mode": "2.5d", "microbatch_size": 2}, {}, ("microbatch_size=2", "4")),
        ({"tp": 2, "sequence_parallel": True}, {"seq_len": 25}, ("seq_len=25", "26")),
        ({"sequence_parallel": True}, {}, ("sequence_parallel", "tp of at least 2")),
        ({"tp": 4, "tp_mode": "2d", "sequence_parallel": True}, {}, ("sequence_parallel", "1d")),
        ({"tp": 2, "partition_activations": True}, {}, ("partition_activations", "full")),
        (
            {
                "tp": 2,
                "partition_activations": True,
                "recompute": "full",
                "sequence_parallel": True,
            },
            {},
            ("partition_activations", "sequence_parallel=False"),
        ),
        ({"tp": 2}, {"attention": "sdpa", "dropout": 0.1}, ("attention", "explicit")),
        (
            {"tp": 4, "tp_mode": "2d", "pp": 2, "microbatches": 2, "schedule": "zb-h1"},
            {},
            ("tp_mode", "1d", "schedule"),
        ),
    ],
    ids=str,
)
def test_wrong_grids_are_refused_with_legal_values(plan, change, words):
    whole = pl.Plan(**{"microbatch_size": 4, **plan})
    for ask in (whole.validate, lambda model: predict(model, whole, cluster())):
        with pytest.raises(ValueError) as caught:
            ask(MODEL.replace(**change))
        for word in words:
            assert word in str(caught.value), caught.value


@pytest.mark.parametrize(("tp", "grid"), [(4, (2, 1)), (8, (2, 2)), (64, (4, 4)), (32, (4, 2))])
def test_2_5d_takes_the_deepest_grid(tp, grid):
    assert pl.Plan(tp=tp, tp_mode="2.5d").tp_grid == grid


assert set(ONE_D) < set(ALL)
