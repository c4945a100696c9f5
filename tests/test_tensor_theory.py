"""Tensor parallelism in theory: the bytes of every layer, next to a run's and a published table."""

import re
from fractions import Fraction

import pytest

import oracles
import paralab as pl
from paralab.interpret.predict import predict
from paralab.spec import BYTES_PER_ELEMENT
from paralab.theory import tensor, tensor_costs

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
    "1d, in 16 bits": {"tp": 2, "dp": 2, "precision": "bf16", "recompute": "selective"},
    "2.5d, into fp32": GRIDS["2.5d, 8"]
    | {"dp": 2, "zero_stage": 1, "precision": "bf16", "grad_dtype": "fp32"},
}
MACHINE = oracles.MACHINE.replace(nodes=1, devices_per_node=16)


@pytest.mark.parametrize("mode", ALL)
def test_linear_layers_rows_equal_the_formulas_forward_and_backward_apart(mode):
    plan = pl.Plan(microbatch_size=4, microbatches=2, **ALL[mode])
    calls = predict(MODEL, plan, MACHINE, steps=1).collectives
    sent = calls.groupby("phase")["wire_bytes"].sum()
    for what, roles, layers in (("linear", tensor.ROLES, MODEL.layers), ("head", ["output"], 1)):
        both = [tensor.linear_elements(MODEL, plan, role) for role in roles]
        depth = [tensor.depth_elements(MODEL, plan, role) for role in roles]
        depth = sum(depth) * (what == "linear")  # of the head it is a sum of phase "shared"
        times = layers * plan.tp * plan.dp
        item, wide = (BYTES_PER_ELEMENT[of] for of in (plan.precision, plan.grad_precision))
        forward, backward = (2 * times * item * sum(some) for some in zip(*both, strict=True))
        assert sent.get(f"{what}_forward", 0) == forward
        assert sent.get(f"{what}_backward", 0) == backward + times * wide * depth  # of gradients


@pytest.mark.parametrize(("tp", "grid"), [(4, (2, 1)), (8, (2, 2)), (64, (4, 4)), (32, (4, 2))])
def test_2_5d_takes_the_deepest_grid(tp, grid):
    assert pl.Plan(tp=tp, tp_mode="2.5d").tp_grid == grid


# The published table of 1D, 2D, 2.5D and 3D, as typed, and in one unit as the formulas have it.
SIZES = {"1d": (2, 8, 64), "2d": (4, 9, 64), "2.5d": (8, 32, 64), "3d": (8, 27, 64)}
CASES = [(mode, tp) for mode, some in SIZES.items() for tp in some]


@pytest.mark.parametrize(("mode", "tp"), CASES)
def test_the_number_is_the_printed_formula(mode, tp):
    q, d = pl.Plan(tp=tp, tp_mode=mode).tp_grid
    text = re.sub(r"(?<=[0-9)])\(", "*(", tensor_costs.PRINTED[mode])
    text = text.replace("d q", "d*q").replace("^", "**")
    exact = eval(text, {"P": Fraction(tp), "q": Fraction(q), "d": Fraction(d)})
    assert tensor_costs.as_printed(mode, tp) == exact


@pytest.mark.parametrize(("mode", "tp"), CASES)
def test_in_one_unit_it_is_what_the_formulas_of_a_square_layer_give(mode, tp):
    h = 64
    model = pl.ModelSpec(layers=1, hidden=h, heads=h, seq_len=h)  # M = K = N
    plan = pl.Plan(tp=tp, tp_mode=mode, microbatch_size=1)
    ours = sum(tensor.linear_elements(model, plan, "proj"))
    ours += tensor.depth_elements(model, plan, "proj")
    assert tensor_costs.in_one_unit(mode, tp) == ours / h**2
