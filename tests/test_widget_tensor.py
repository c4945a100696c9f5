"""The tensor-parallel widget without a browser: theory at once, a real run, kind refusals."""

from __future__ import annotations

import re
from fractions import Fraction

import pytest

import paralab as pl
from paralab.view import theme, widget_tensor
from paralab.view.matrix_blocks import MODE_NAME
from paralab.view.widgets import tensor

PATIENCE = 90
RUNS = [("1d", 4), ("2d", 4), ("2.5d", 8), ("3d", 8)]


@pytest.fixture
def bench() -> tensor:
    made = tensor()
    yield made
    made.close()


def numbers(bench: tensor) -> list[list[str]]:
    """The table's rows, the head first."""
    rows = re.findall(r"<tr>(.*?)</tr>", bench._numbers.value)
    return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in rows]


def bars(bench: tensor, category: str | None = None) -> dict[str, int]:
    table = bench.chart.table
    kept = table["category"] == category if category else table["category"] != "sent"
    return table[kept].groupby("bar", sort=False)["bytes"].sum().to_dict()


# ---- sliders ------------------------------------------------------------------------------------
def test_every_knob_moves_the_picture(bench):
    for name, value in {"ranks": 8, "mode": "3d", "tokens": 512, "hidden": 256}.items():
        before = bench.chart
        bench.knobs[name].value = value
        assert bench.error is None and bench.chart.to_json() != before.to_json(), name
        assert bench.chart.table.equals(bench.predict().table)
    plan, model = bench.plan_of(bench.values), bench.model_of(bench.values)
    assert (plan.tp, plan.tp_mode, plan.microbatch_size) == (8, "3d", 16)
    assert (model.hidden, model.heads, model.layers) == (256, 32, 2)


@pytest.mark.parametrize(("ranks", "modes"), [
    (4, ["1d", "2d"]), (8, ["1d", "2.5d", "3d"]), (16, ["1d", "2d"]),
    (64, ["1d", "2d", "2.5d", "3d"]),
])  # fmt: skip
def test_a_bar_for_every_mode_that_there_is_with_its_predicted_peak(bench, ranks, modes):
    bench.set(ranks=ranks, tokens=2048, hidden=512)
    drawn = bars(bench)
    assert list(drawn) == [MODE_NAME[mode] for mode in modes]
    for mode in modes:
        plan = bench.plan_of(bench.values, mode)
        peak = pl.program(bench.model_of(bench.values), plan).peak()
        assert drawn[MODE_NAME[mode]] == sum(peak.values())
    assert [row[0] for row in numbers(bench)[1:]] == [f"{MODE_NAME[m]}, predicted" for m in modes]


@pytest.mark.parametrize(("mode", "ranks"), RUNS)
@pytest.mark.parametrize("tokens", [128, 512])
def test_the_bytes_sent_are_those_of_a_predicted_step(bench, mode, ranks, tokens):
    knobs = {**bench.values, "mode": mode, "ranks": ranks, "tokens": tokens}
    cluster = pl.Cluster(flops=5e10, memory_bandwidth=2e10, op_overhead=1e-5, devices_per_node=8,
                         intra=pl.Link(alpha=1e-4, bandwidth=1e9))  # fmt: skip
    expect = pl.predict(bench.model_of(knobs), bench.plan_of(knobs), cluster, steps=1)
    sent = expect.traffic()["bytes"]
    assert bench.sent_of(knobs, mode) == Fraction(round(sent.sum()), ranks)


def test_the_title_says_who_sends_least(bench):
    bench.set(ranks=64, mode="1d", tokens=512, hidden=12288)
    assert bench.chart.finding == "64 ranks, 512 tokens: 1D sends least"
    bench.set(mode="2d")
    assert re.fullmatch("64 ranks, 512 tokens: 2D sends .* times as much as 1D",
                        bench.chart.finding)  # fmt: skip
    bench.set(ranks=8, tokens=32768, hidden=2048)
    assert bench.chart.finding == "8 ranks, 32,768 tokens: no 2D of these; 2.5D sends least"
    assert "predicted" in bench.chart.below and "10<sup>6</sup> bytes" in bench.chart.below
    sent = bench.chart.data[-1]
    assert sent.name == "sent" and sent.marker.color == theme.axis_colour("tp")


def test_what_no_mode_can_share_out_is_said_in_words(bench):
    bench.set(ranks=64)
    assert bench.state == "error"
    assert "64 ranks cannot share out 8 heads and 128 tokens" in bench._trouble.value
    assert bench.set(ranks=4).error is None
    with pytest.raises(ValueError, match="cannot share out"):
        bench.predict(ranks=64)


def test_the_repr_says_the_settings_and_wrong_ones_are_refused():
    assert repr(tensor()) == "tensor(2D, 128 tokens, hidden 64, 4 ranks)"
    with pytest.raises(ValueError, match="model='gpt'.*legal: a pl.ModelSpec"):
        tensor("gpt")
    with pytest.raises(ValueError, match="plan=3: not a plan"):
        tensor(plan=3)
    with pytest.raises(ValueError, match="tensor parallelism alone.*tp of at least 2"):
        tensor(plan=pl.Plan(dp=2, tp=2))
    with pytest.raises(ValueError, match="ranks=5: not on this slider"):
        tensor().predict(ranks=5)


# ---- the real run -------------------------------------------------------------------------------
@pytest.mark.parametrize(("mode", "ranks"), RUNS)
def test_run_it_puts_the_measured_peak_and_bytes_below_the_prediction(bench, mode, ranks):
    bench.run(mode=mode, ranks=ranks)
    assert all(knob.disabled for knob in bench.knobs.values())
    bench.wait(PATIENCE)
    assert bench.state == "done" and f"{ranks} real processes" in bench._status.value
    drawn, found, label = bars(bench), bench.result, MODE_NAME[mode]
    names = list(drawn)
    assert names[names.index(label) + 1] == "measured"
    assert drawn["measured"] == found.peak_memory
    sent = bars(bench, "sent")
    assert sent["measured"] == sent[label] == int(found.traffic()["bytes"].mean())
    assert "bytes sent are as predicted, every one" in bench._status.value
    assert numbers(bench)[-1][0] == f"{label}, measured"
    assert "predicted and measured" in bench.chart.below


def test_a_mode_that_the_ranks_cannot_make_and_too_many_ranks_are_refused(bench):
    with pytest.raises(ValueError, match="tp=8: tp_mode='2d' needs a grid of q x q ranks"):
        bench.run(ranks=8, mode="2d").wait(PATIENCE)
    assert bench.state == "error" and "Traceback" not in bench._trouble.value
    bench.set(ranks=64, tokens=2048, hidden=512)
    assert "takes up to 8 ranks" in bench._status.value
    with pytest.raises(ValueError, match="ranks=64.*up to 8; the prediction holds"):
        bench.run().wait(PATIENCE)


def test_a_run_that_would_not_fit_is_refused(bench, monkeypatch):
    small = pl.Cluster(flops=5e10, memory_bandwidth=2e10, op_overhead=1e-5, memory=2**20,
                       intra=pl.Link(alpha=1e-4, bandwidth=1e9))  # fmt: skip
    monkeypatch.setattr(pl.Cluster, "local", lambda **_: small)
    with pytest.raises(ValueError, match="4 ranks need .* fewer tokens or a smaller hidden"):
        bench.run().wait(PATIENCE)
    assert widget_tensor.MOST_RANKS == 8
