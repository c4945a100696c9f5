"""Tensor parallelism in theory: layouts, and the bytes of every layer, next to a run's."""

import math
from collections import Counter

import numpy as np
import pytest

import oracles
import paralab as pl
from paralab.interpret.predict import predict
from paralab.parallel import layouts
from paralab.theory import tensor

MODEL = pl.ModelSpec(layers=2, hidden=48, heads=4, seq_len=24, vocab=260)
GRIDS = {
    "2d, 4": {"tp": 4, "tp_mode": "2d"},
    "2.5d, 8": {"tp": 8, "tp_mode": "2.5d"},
    "3d, 8": {"tp": 8, "tp_mode": "3d"},
}
ALL = {
    "1d, 2": {"tp": 2},
    "1d, 4": {"tp": 4},
    "1d sequence, 2": {"tp": 2, "sequence_parallel": True},
    "1d sequence, 4": {"tp": 4, "sequence_parallel": True},
    **GRIDS,
}
modes = pytest.mark.parametrize("mode", ALL)
MACHINE = oracles.MACHINE.replace(nodes=1, devices_per_node=16)


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
def test_groups_of_an_axis_have_every_rank_once(mode):
    plan = plan_of(mode, dp=2)
    for axis in layouts.mode_of(plan).axes:
        found = Counter(r for group in layouts.groups(plan, axis) for r in group)
        assert found == Counter(range(plan.tp))
        for rank in range(plan.world_size):
            assert rank in plan.ranks(axis, rank)


def test_ranks_are_numbered_tp_innermost():
    plan = pl.Plan(pp=2, dp=3, tp=4)
    grid = np.arange(24).reshape(2, 3, 4)
    for rank in range(24):
        at = plan.place(rank)
        assert grid[at] == rank
        assert plan.ranks("tp", rank) == tuple(grid[at.pp, at.dp])
        assert plan.ranks("dp", rank) == tuple(grid[at.pp, :, at.tp])
        assert plan.ranks("pp", rank) == tuple(grid[:, at.dp, at.tp])


# ---- rows ------------------------------------------------------------------------------------
@modes
def test_linear_layers_rows_equal_the_formulas_forward_and_backward_apart(mode):
    plan = plan_of(mode, microbatches=2)
    calls = predict(MODEL, plan, MACHINE, steps=1).collectives
    sent = calls.groupby("phase")["wire_bytes"].sum()
    for what, roles, layers in (("linear", tensor.ROLES, MODEL.layers), ("head", ["output"], 1)):
        both = [tensor.linear_elements(MODEL, plan, role) for role in roles]
        depth = [tensor.depth_elements(MODEL, plan, role) for role in roles]
        depth = sum(depth) * (what == "linear")  # of the head it is a sum of phase "shared"
        item = layers * plan.tp * 4  # bytes of an element, in all these layers and ranks
        forward, backward = (2 * item * sum(some) for some in zip(*both, strict=True))
        assert sent.get(f"{what}_forward", 0) == forward
        assert sent.get(f"{what}_backward", 0) == backward + item * depth


@pytest.mark.parametrize(("tp", "grid"), [(4, (2, 1)), (8, (2, 2)), (64, (4, 4)), (32, (4, 2))])
def test_2_5d_takes_the_deepest_grid(tp, grid):
    assert pl.Plan(tp=tp, tp_mode="2.5d").tp_grid == grid
