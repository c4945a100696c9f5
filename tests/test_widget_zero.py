"""The ZeRO widget without a browser: theory at once, measured for real, refused kindly."""

from __future__ import annotations

import re

import pytest

import paralab as pl
from paralab.theory.zero import volume
from paralab.view import theme, widget_zero
from paralab.view.widgets import zero

MODEL = pl.ModelSpec(layers=3, hidden=64, heads=2, seq_len=16)
PLAN = pl.Plan(dp=2, zero_stage=2, microbatches=2, microbatch_size=1, bucket_bytes=2**17)
STAGES = list(widget_zero.STAGES.values())
PATIENCE = 60


@pytest.fixture
def bench(monkeypatch) -> zero:
    monkeypatch.setattr(widget_zero, "STEPS", 2)
    made = zero(MODEL, PLAN)
    yield made
    made.close()


def numbers(bench: zero) -> list[list[str]]:
    """The table's rows, the head first."""
    rows = re.findall(r"<tr>(.*?)</tr>", bench._numbers.value)
    return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in rows]


def bars(bench: zero, category: str | None = None) -> dict[str, int]:
    table = bench.chart.table
    kept = table["category"] == category if category else table["category"] != "sent"
    return table[kept].groupby("bar", sort=False)["bytes"].sum().to_dict()


# ---- sliders -------------------------------------------------------------------------------------
def test_every_knob_moves_the_picture(bench):
    for name, value in {"stage": 3, "ranks": 4, "microbatches": 4, "hidden": 96,
                        "precision": "bf16", "recompute": "full"}.items():  # fmt: skip
        before = bench.chart
        bench.knobs[name].value = value
        assert bench.error is None and bench.chart.to_json() != before.to_json(), name
        assert bench.chart.table.equals(bench.predict().table)
    plan = bench.plan_of(bench.values)
    assert (plan.zero_stage, plan.dp, plan.microbatches) == (3, 4, 4)
    assert (plan.precision, plan.recompute, plan.bucket_bytes) == ("bf16", "full", 2**17)
    assert bench.model_of(bench.values).hidden == 96


@pytest.mark.parametrize("ranks", [1, 2, 3, 64])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_four_bars_are_the_predicted_peaks(bench, ranks, precision):
    bench.set(ranks=ranks, precision=precision)
    drawn = bars(bench)
    assert list(drawn) == STAGES
    for stage, label in enumerate(STAGES):
        plan = PLAN.replace(dp=ranks, precision=precision, zero_stage=stage)
        assert drawn[label] == sum(pl.program(MODEL, plan).peak().values())


@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_bytes_sent_are_those_of_a_predicted_step(bench, stage, microbatches):
    knobs = {**bench.values, "stage": stage, "ranks": 3, "microbatches": microbatches}
    cluster = pl.Cluster(flops=5e10, memory_bandwidth=2e10, op_overhead=1e-5, devices_per_node=4,
                         intra=pl.Link(alpha=1e-4, bandwidth=1e9))  # fmt: skip
    expect = pl.predict(MODEL, bench.plan_of(knobs), cluster, steps=1)
    assert bench.sent_of(knobs, stage) == expect.traffic()["bytes"].max()
    around = volume(stage, microbatches) * 4 * MODEL.num_params * 2 / 3
    assert bench.sent_of(knobs, stage) == pytest.approx(around, rel=1e-2)  # and padding


def test_the_table_has_the_states_the_peak_and_the_traffic_in_psi(bench):
    bench.set(stage=3, ranks=4, microbatches=2)
    head, plain, chosen = numbers(bench)
    assert (plain[0], chosen[0]) == ("plain DP, predicted", "ZeRO-3, predicted")
    row = dict(zip(head, chosen, strict=True))
    assert row["bytes per Ψ"] == "4.00" and plain[head.index("bytes per Ψ")] == "16.00"
    assert row["that is"] == "6 Ψ(N−1)/N" and plain[-1] == "2 Ψ(N−1)/N"
    assert row["in all"] == theme.scaled(bars(bench)["ZeRO-3"], "B")
    assert row["sent"] == theme.scaled(bars(bench, "sent")["ZeRO-3"], "B")
    bench.set(stage=0)
    assert len(numbers(bench)) == 2  # not twice the same
    bench.set(stage=1, ranks=1)
    assert numbers(bench)[2][-1] == "0" and "nobody to share with" in bench.chart.finding


def test_the_chosen_stage_stands_out_and_the_title_says_what_it_gives_and_takes(bench):
    bench.set(stage=3, ranks=4, microbatches=1)
    for trace in bench.chart.data:
        assert list(trace.marker.opacity) == [0.45, 0.45, 0.45, 1.0], trace.name
    share = 100 * bars(bench)["ZeRO-3"] / bars(bench)["plain DP"]
    assert bench.chart.finding == (f"ZeRO-3 on 4 devices: {share:.0f} % of the memory of plain DP "
                                   "for 1.5 times the traffic")  # fmt: skip
    assert "for the same traffic" in bench.set(stage=2).chart.finding  # one micro-batch: m + 1 = 2
    assert "everything on every one" in bench.set(stage=0).chart.finding
    assert "predicted" in bench.chart.below and "10<sup>6</sup> bytes" in bench.chart.below


def test_the_repr_says_the_settings_and_wrong_ones_are_refused():
    assert repr(zero()) == \
        "zero(ZeRO-2, 4 devices, 2 micro-batches, hidden 128, fp32, all kept)"  # fmt: skip
    with pytest.raises(ValueError, match="model='gpt'.*legal: a pl.ModelSpec"):
        zero("gpt")
    with pytest.raises(ValueError, match="plan=3: not a plan"):
        zero(plan=3)
    with pytest.raises(ValueError, match="pp=2.*legal: 1"):
        zero(plan=pl.Plan(pp=2))
    with pytest.raises(ValueError, match="ranks=5: not on this slider"):
        zero().predict(ranks=5)


# ---- the real run --------------------------------------------------------------------------------
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_run_it_puts_the_measured_peak_and_bytes_below_the_prediction(bench, stage):
    bench.run(stage=stage)
    assert all(knob.disabled for knob in bench.knobs.values())
    bench.wait(PATIENCE)
    assert bench.state == "done" and "2 real processes" in bench._status.value
    drawn, found = bars(bench), bench.result
    assert list(drawn) == [*STAGES[: stage + 1], "measured", *STAGES[stage + 1 :]]
    assert drawn["measured"] == found.peak_memory == found.peaks()["measured"]["total"]
    parts = bench.chart.table[bench.chart.table["bar"] == "measured"]
    parts = parts.set_index("category")["bytes"].drop("sent")
    assert parts.to_dict() == found.peaks()["measured"].drop("total").to_dict()
    sent = bars(bench, "sent")
    assert sent["measured"] == sent[STAGES[stage]] == found.traffic()["bytes"].max()
    assert "as predicted, every one" in bench._status.value
    assert numbers(bench)[-1][0] == f"{STAGES[stage]}, measured"
    assert "predicted and measured" in bench.chart.below


def test_every_knob_needs_a_run_of_its_own_and_finds_an_old_one_again(bench):
    bench.run(stage=1).wait(PATIENCE)
    ran = bench.result
    for knob in ({"stage": 2}, {"microbatches": 1}, {"precision": "bf16"}, {"recompute": "full"}):
        old = {name: bench.values[name] for name in knob}
        assert bench.set(**knob).result is None and bench.state == "idle"
        assert bench.set(**old).result is ran and bench.state == "done"


def test_more_devices_than_a_machine_has_are_for_theory_alone(bench, monkeypatch):
    bench.set(ranks=64)
    assert "takes up to 8 devices" in bench._status.value
    with pytest.raises(ValueError, match="ranks=64.*up to 8; the prediction holds"):
        bench.run().wait(PATIENCE)
    assert bench.state == "error" and "Traceback" not in bench._trouble.value
    small = pl.Cluster(flops=5e10, memory_bandwidth=2e10, op_overhead=1e-5, memory=2**20,
                       intra=pl.Link(alpha=1e-4, bandwidth=1e9))  # fmt: skip
    monkeypatch.setattr(pl.Cluster, "local", lambda **_: small)
    with pytest.raises(ValueError, match="2 ranks need .* fewer devices or a smaller hidden"):
        bench.run(ranks=2).wait(PATIENCE)
    assert bench.set(ranks=4).state == "idle"
