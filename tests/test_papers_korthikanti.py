"""Korthikanti+ 2022 (arXiv:2205.05198): the activation formulas of table 2, and table 5."""

import pytest

import paralab as pl
from benchmarks.bench_published import SETTINGS
from paralab.interpret import quick
from paralab.theory import activation_costs as costs
from paralab.theory import needs
from paralab.theory.papers import korthikanti_table5
from refusals import refuses

# Table 2: bytes per block, as printed.
FORMULAS = {
    (1, False, "none"): lambda s, b, h, a, t: s * b * h * (34 + 5 * a * s / h),
    (8, False, "none"): lambda s, b, h, a, t: s * b * h * (10 + 24 / t + 5 * a * s / (h * t)),
    (8, True, "none"): lambda s, b, h, a, t: s * b * h * (34 / t + 5 * a * s / (h * t)),
    (8, False, "selective"): lambda s, b, h, a, t: s * b * h * (10 + 24 / t),
    (8, True, "selective"): lambda s, b, h, a, t: s * b * h * (34 / t),
    (8, False, "full"): lambda s, b, h, a, t: s * b * h * 2,
    (8, True, "full"): lambda s, b, h, a, t: s * b * h * 2 / t,  # sec. 5: in parts
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("how", FORMULAS)
def test_table_2_as_printed(name, how):
    model, (t, sp, recompute) = SETTINGS[name].model, how
    found = costs.layer_bytes(model, 2, tp=t, sequence_parallel=sp, recompute=recompute)
    s, h, a = model.seq_len, model.hidden, model.heads
    assert float(found) == pytest.approx(FORMULAS[how](s, 2, h, a, t), rel=1e-12)


@pytest.mark.parametrize("how", [*FORMULAS, (1, False, "selective")])
def test_what_a_block_of_the_program_keeps_in_16_bits_is_table_2_and_the_norms_own_numbers(how):
    model, (t, sp, recompute) = SETTINGS["175B"].model, how
    cut = {"tp": t, "sequence_parallel": sp, "recompute": recompute}
    plan = pl.Plan(**cut, microbatch_size=2, precision="bf16")
    two, three = (quick.most(model.replace(layers=n), plan)["activations"] for n in (2, 3))
    numbers = 2 * 2 * 2 * 2 * model.seq_len // (t if sp else 1)  # which the paper neglects
    norms = 0 if recompute == "full" else numbers
    assert three - two - norms == costs.layer_bytes(model, 2, **cut)


def test_table_5_utilisations_within_three_tenths_of_a_point():
    table = korthikanti_table5()
    for name, most in (("MFU", 0.3), ("throughput", 0.1)):
        off = (table[f"{name} (%), recomputed"] - table[f"{name} (%), printed"]).abs()
        assert off.max() <= most
        assert name == "MFU" or off[table["devices"] != 2240].notna().all()  # is all that it prints
    assert table["MFU (%), recomputed"].round(2).tolist()[0] == 41.65  # printed 41.5: 1.10 s


def test_table_5_hfu_follows_equation_8_which_counts_the_attention_core_three_times_over():
    model = SETTINGS["22B"].model
    s, h, layers, v, b = model.seq_len, model.hidden, model.layers, model.vocab, 4
    unit = 72 * b * s * layers * h * h
    printed = unit * (1 + s / (3 * h) + v / (12 * layers * h))
    once = needs.step_flops(model, b, recompute="selective")
    assert once == pytest.approx(unit * (1 + 2 * s / (9 * h) + v / (12 * layers * h)), rel=1e-12)
    row = korthikanti_table5().iloc[0]
    assert row["HFU (%), printed"] - row["HFU (%), counted once"] > 1.2
    assert printed / once * row["HFU (%), counted once"] == pytest.approx(43.81, abs=0.005)


def test_what_cannot_be_is_refused():
    for wrong in ({"recompute": "some"}, {"tp": 0}):
        ((name, value),) = wrong.items()
        refuses(f"{name}={value!r}", costs.layer_bytes, SETTINGS["22B"].model, 1, **wrong)
    own = SETTINGS["22B"].model.replace(block=lambda model, index: None)
    refuses("the formula counts the standard block only", costs.layer_bytes, own, 1)
    refuses("model=.22B.", costs.layer_bytes, "22B", 1)
