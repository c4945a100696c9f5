"""States, utilisation, days and energy: the formulas by hand. Papers' numbers: test_papers_*.py."""

import pytest

import paralab as pl
from paralab.theory import flops, needs, training
from refusals import refuses

MODEL = pl.ModelSpec(layers=3, hidden=8, heads=2, seq_len=5, vocab=7)


def test_utilisation_is_flops_over_what_all_devices_could_do():
    flops = needs.step_flops(MODEL, 4)
    found = training.utilisation(MODEL, 4, seconds=2.0, devices=5, peak=1e6)
    assert found == (flops / 1e7, flops / 1e7)
    again = training.utilisation(MODEL, 4, seconds=2.0, devices=5, peak=1e6, recompute="full")
    assert again.model == found.model and again.hardware > 1.2 * found.hardware


def test_what_would_my_model_cost():
    cost = training.training_cost(MODEL, tokens=1e9, devices=4, flops=1e9, watts=500)
    per_token = needs.step_flops(MODEL, 1, recompute=True) / 5
    seconds = 1e9 * per_token / 4e9
    assert cost.params == MODEL.num_params
    assert cost.state_bytes == 18 * MODEL.num_params
    assert cost.saved_bytes == 14 * MODEL.num_params
    gpt3 = pl.ModelSpec.preset("gpt3-175b")  # 18 bytes of each parameter, on devices of 80 GB
    assert training.training_cost(gpt3, tokens=1, devices=1, flops=1.0).fewest_devices == 40
    assert [needs.devices_for(n, 80) for n in (1, 80, 81, 160, 16e9)] == [1, 1, 2, 2, 2 * 10**8]
    assert cost.days == pytest.approx(seconds / 86_400)
    assert cost.device_hours == pytest.approx(4 * seconds / 3600)
    assert cost.energy == pytest.approx(4 * seconds * 500)
    silent = training.training_cost(MODEL, tokens=1e9, devices=4, flops=1e9)
    assert silent.energy is None


def test_what_cannot_be_is_refused():
    cost, share = training.training_cost, training.utilisation
    for words, call, *given in [
        ("seconds=", share, MODEL, 1, dict(seconds=0, devices=1, peak=1.0)),
        ("peak=", share, MODEL, 1, dict(seconds=1, devices=1, peak=-1.0)),
        ("devices=", share, MODEL, 1, dict(seconds=1, devices=0, peak=1.0)),
        ("tokens=", training.days_by_parameters, 1, dict(tokens=0, devices=1, flops=1.0)),
        ("watts=", cost, MODEL, dict(tokens=1, devices=1, flops=1.0, watts=0)),
        ("recipe='x'.*'zero-fp16'", needs.bytes_per_parameter, "x", {}),
        ("recompute='some'.*'selective'", needs.step_flops, MODEL, 1, dict(recompute="some")),
        ("model='gpt3-175b': not a model; legal: ", needs.step_flops, "gpt3-175b", 1, {}),
        ("model='gpt3-175b': not a model; legal: ", flops.head_flops, "gpt3-175b", 1, {}),
        ("model='gpt3-175b': not a model; legal: ", needs.model_states, "gpt3-175b", {}),
        ("batch=-4", flops.forward_flops, MODEL, -4, {}),
    ]:
        refuses(words, call, *given[:-1], **given[-1])
