"""What a model needs, held against what the papers printed."""

import pytest

import paralab as pl
from paralab.interpret import quick
from paralab.theory import flops, needs
from refusals import refuses

GPT3 = pl.ModelSpec.preset("gpt3-175b")
SMALL = pl.ModelSpec(layers=2, hidden=32, heads=4, seq_len=16)


def test_devices_are_counted_upward():
    assert [needs.devices_for(n, 80) for n in (1, 80, 81, 160, 161)] == [1, 1, 2, 2, 3]


def test_what_is_no_model_and_an_unknown_recipe_are_refused():
    for refused in (needs.step_flops, flops.head_flops, lambda model, _: needs.model_states(model)):
        refuses("model='gpt3-175b': not a model; legal: ", refused, "gpt3-175b", 1)
    refuses("batch=-4", flops.forward_flops, GPT3, -4)
    refuses("recipe='fp4'.*'zero-fp16'", needs.model_states, GPT3, "fp4")


# ---- the same, of a program ----------------------------------------------------------------------
@pytest.mark.parametrize("precision, recipe", [("fp32", "fp32"), ("bf16", "zero-fp16")])
@pytest.mark.parametrize("tied", [True, False])
def test_the_states_of_a_program_are_the_recipes(precision, recipe, tied):
    model = SMALL.replace(tied=tied)
    held = quick.states(quick.program_of(model, pl.Plan(precision=precision), "adamw", 0), 0)
    held["optimizer"] -= 4 * len(model.parameter_shapes())  # AdamW's count of steps, per tensor
    states = needs.model_states(model, recipe)
    optimizer = states["moments"] + states.get("master", 0)
    assert held == {"parameters": states["parameters"], "gradients": states["gradients"],
                    "optimizer": optimizer}  # fmt: skip
