"""What a model needs, held against what the papers printed."""

from __future__ import annotations

import pytest

import paralab as pl
from paralab.interpret import quick
from paralab.theory import flops, needs

GPT3 = pl.ModelSpec.preset("gpt3-175b")
ONE_T = pl.ModelSpec.preset("ptdp-1t")
SMALL = pl.ModelSpec(layers=2, hidden=32, heads=4, seq_len=16)


def test_every_recipe_adds_up_to_what_its_source_says():
    sums = {name: needs.bytes_per_parameter(name) for name in needs.RECIPES}
    assert sums == {"fp32": 16, "zero-fp16": 16, "megatron-bf16": 18, "megatron-fp16": 20}


def test_zero_figure_1_needs_120_gb_for_7_5_billion_parameters():
    # Rajbhandari+ 2020, arXiv:1910.02054, Figure 1, baseline: (2 + 2 + 12) * 7.5 B = 120 GB
    states = needs.model_states(pl.ModelSpec.preset("ptdp-7.5b"), "zero-fp16")
    assert sum(states.values()) / 1e9 == pytest.approx(120, rel=0.005)
    assert states["master"] + states["moments"] == 3 * (states["parameters"] + states["gradients"])


# Narayanan+ 2021, arXiv:2104.04473, Table 2: 175 B parameters on 300 B tokens, without tensor or
# pipeline parallelism (ZeRO-3) and with; exact FLOPs per token give the days printed within 1.3 %.
TABLE_2 = [(384, 144, 90), (768, 88, 74), (384, 153, 84), (768, 149, 43), (1536, 141, 23)]


@pytest.mark.parametrize(("devices", "tflops", "days"), TABLE_2)
def test_days_are_those_of_ptdp_table_2(devices, tflops, days):
    found = needs.training_days(GPT3, tokens=300e9, devices=devices, flops=tflops * 1e12)
    assert found == pytest.approx(days, rel=0.013)


def test_a_trillion_parameters_take_84_days_on_3072_devices():
    # sec. 5.1's own estimate, 450 B tokens at 163 TFLOP/s each, by eq. 4, which is 1.5 to 3 % low
    found = needs.training_days(ONE_T, tokens=450e9, devices=3072, flops=163e12)
    assert 84 <= found <= 84 * 1.03


def test_recomputing_costs_the_blocks_forward_once_more_and_not_the_heads():
    b, s, layers, h, v = 3, GPT3.seq_len, GPT3.layers, GPT3.hidden, GPT3.vocab
    eq3 = 96 * b * s * layers * h * h * (1 + s / (6 * h) + v / (16 * layers * h))
    assert needs.step_flops(GPT3, b, recompute=True) == pytest.approx(eq3, rel=1e-12)
    plain = 72 * b * s * layers * h * h * (1 + s / (6 * h) + v / (12 * layers * h))
    assert needs.step_flops(GPT3, b) == pytest.approx(plain, rel=1e-12)


def test_devices_are_counted_upward():
    assert [needs.devices_for(n, 80) for n in (1, 80, 81, 160, 161)] == [1, 1, 2, 2, 3]


def test_what_is_no_model_and_an_unknown_recipe_are_refused():
    for refused in (needs.step_flops, flops.head_flops, lambda model, _: needs.model_states(model)):
        with pytest.raises(ValueError, match="model='gpt3-175b': not a model; legal: "):
            refused("gpt3-175b", 1)
    with pytest.raises(ValueError, match="batch=-4"):
        flops.forward_flops(GPT3, -4)
    with pytest.raises(ValueError, match="recipe='fp4'.*'zero-fp16'"):
        needs.model_states(GPT3, "fp4")


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
