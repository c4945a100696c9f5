"""The published table of 1D, 2D, 2.5D and 3D, as typed, and in one unit as the formulas have it."""

from fractions import Fraction

import pytest

import paralab as pl
from paralab.spec.rules import tensor_grid
from paralab.theory import tensor, tensor_costs

SIZES = {"1d": (2, 8, 64), "2d": (4, 9, 64), "2.5d": (8, 32, 64), "3d": (8, 27, 64)}
CASES = [(mode, tp) for mode, some in SIZES.items() for tp in some]


@pytest.mark.parametrize(("mode", "tp"), CASES)
def test_the_number_is_the_printed_formula(mode, tp):
    q, d = tensor_grid(tp, mode, None)
    text = tensor_costs.PRINTED[mode].bandwidth
    for a, b in (("(q-1)(", "*(q-1)*("), ("(q-1)/", "*(q-1)/"), ("2(P", "2*(P"), ("d q", "d*q"),
                 ("^", "**"), ("3*(", "3*("), ("**(q", "*(q")):  # fmt: skip
        text = text.replace(a, b)
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


def test_as_printed_the_grids_look_dearer_than_they_are():
    printed = {mode: tensor_costs.as_printed(mode, 64) for mode in tensor_costs.PRINTED}
    true = {mode: tensor_costs.in_one_unit(mode, 64) for mode in tensor_costs.PRINTED}
    assert sorted(printed, key=printed.get) == ["3d", "1d", "2.5d", "2d"]
    assert sorted(true, key=true.get) == ["3d", "2d", "2.5d", "1d"]


def test_ranks_that_make_no_grid_are_refused():
    with pytest.raises(ValueError, match="tp=6.*legal: 1, 8, 27"):
        tensor_costs.as_printed("3d", 6)
