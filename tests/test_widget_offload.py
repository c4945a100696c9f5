"""The widget of offload and its plain twin: predicted at once, then run for real on a slow disk."""

from __future__ import annotations

import re

import pytest

import paralab as pl
import widgets
from paralab import view
from paralab.report import metrics
from paralab.theory.offload import link_bytes
from paralab.theory.work import on_processor
from paralab.view import theme, widget_offload
from paralab.view.disk_bandwidth import FASTEST, SLOWEST
from paralab.view.widgets import offload
from widgets import PATIENCE, numbers

MODEL = pl.ModelSpec(layers=2, hidden=64, heads=2, seq_len=32)
CLUSTER = widgets.CLUSTER.replace(devices_per_node=4)
FILES = {"parameters": "nvme", "gradients": "cpu", "optimizer": "nvme"}
PLAN = pl.Plan(zero_stage=3, microbatch_size=8, offload=FILES)


@pytest.fixture
def widget() -> offload:
    made = offload(MODEL, CLUSTER)
    yield made
    made.close()


def curve(chart: view.Chart, name: str) -> dict[float, float]:
    """{bandwidth: share} of one curve, or of one clock's points."""
    mine = chart.table[chart.table["curve"] == name]
    return dict(zip(mine["bandwidth"], mine["share"], strict=True))


def with_disk(bandwidth: float, cluster: pl.Cluster = CLUSTER) -> pl.Cluster:
    return cluster.replace(disk=cluster.disk.replace(bandwidth=bandwidth))


def busy(report: pl.Report) -> float:
    return metrics.shares(report, metrics.typical_step(report))["work"] / report.step_time


# ---- the picture ---------------------------------------------------------------------------------
@pytest.mark.parametrize("change", [
    {}, {"microbatches": 3}, {"dp": 2, "microbatches": 2}, {"dp": 4}, {"precision": "bf16"},
    {"offload": {**FILES, "parameters": "cpu"}}, {"offload": {**FILES, "optimizer": "cpu"}},
    {"offload": {"gradients": "cpu", "optimizer": "nvme"}}, {"zero_stage": 1, "offload": "nvme"},
    {"recompute": "full", "offload": {**FILES, "activations": "nvme"}},
    {"recompute": "full", "offload": {"activations": "nvme"}, "dp": 2, "zero_stage": 0},
], ids=str)  # fmt: skip
def test_the_predicted_curve_is_the_very_prediction_at_every_bandwidth(change):
    plan = PLAN.replace(**change)
    shares = curve(view.disk_needed(MODEL, plan, CLUSTER), "predicted")
    assert len(shares) == 8 and min(shares) == SLOWEST and max(shares) == FASTEST
    for bandwidth, share in shares.items():
        expect = pl.predict(MODEL, plan, with_disk(bandwidth), steps=1)
        assert share == pytest.approx(busy(expect), rel=1e-9), bandwidth


def test_on_gpus_the_curve_is_of_the_attention_that_runs_there():
    cluster = pl.Cluster.preset("dgx-v100").replace(disk=CLUSTER.disk)
    for bandwidth, share in curve(view.disk_needed(MODEL, PLAN, cluster), "predicted").items():
        expect = pl.predict(MODEL, PLAN, with_disk(bandwidth, cluster), steps=1)
        assert expect.model.attention == "sdpa"
        assert share == pytest.approx(busy(expect), rel=1e-9), bandwidth


def test_the_formulas_divide_what_is_computed_by_what_files_are_read_and_written():
    chart = view.disk_needed(MODEL, PLAN, CLUSTER)
    expect = pl.predict(MODEL, PLAN, CLUSTER, steps=1)
    compute = metrics.shares(expect, 0)["work"]
    moved = link_bytes(MODEL, PLAN)
    files = sum(moved["disk read"].values()) + sum(moved["disk write"].values())
    hidden = curve(chart, "perfect overlap")
    for bandwidth, share in curve(chart, "no overlap").items():
        seconds = files / bandwidth
        assert share == pytest.approx(compute / (compute + seconds))
        assert hidden[bandwidth] == pytest.approx(compute / max(compute, seconds))
    assert f"{chart.table['bytes'].sum():,}" == f"{sum(sum(p.values()) for p in moved.values()):,}"
    bars = chart.table.dropna(subset="bytes")
    for link, category, size in zip(bars["link"], bars["category"], bars["bytes"], strict=True):
        assert size == moved[link][category]
    drawn = {trace.name: list(trace.x) for trace in chart.data if trace.type == "bar"}
    assert drawn["optimizer"] == [m["optimizer"] / 1e6 for m in moved.values() if "optimizer" in m]


def test_the_dotted_line_stands_where_the_formula_gives_what_is_asked_for():
    for share in (0.5, 0.8):
        chart = view.disk_needed(MODEL, PLAN, CLUSTER, share=share, at=3e8)
        looked, needed = (shape.x0 for shape in chart.layout.shapes)
        there = view.disk_needed(MODEL, PLAN, CLUSTER, at=needed)
        assert looked == 3e8 and curve(there, "no overlap")[needed] == pytest.approx(share)
        assert chart.layout.shapes[1].line.dash == "dot"
        note, _ = chart.layout.annotations
        assert theme.scaled(needed, "B/s") in note.text and f"{100 * share:.0f} %" in note.text
    far = view.disk_needed(MODEL, PLAN.replace(microbatch_size=1), CLUSTER, share=0.99)
    assert len(far.layout.shapes) == len(far.layout.annotations) == 1  # beyond the axis


def test_the_title_says_what_is_needed_and_what_is_there_or_that_it_is_not_the_disk():
    many, few = PLAN.replace(microbatch_size=64), PLAN.replace(microbatch_size=1)
    busier = CLUSTER.replace(elements=on_processor(CLUSTER.flops))
    chart = view.disk_needed(MODEL, many, busier)
    _, needed = (shape.x0 for shape in chart.layout.shapes)
    asked = theme.scaled(needed, "B/s")
    assert chart.finding == f"With 64 samples the formula asks for a disk of {asked} to " \
        "keep the device 90 % busy; this one has 1 GB/s"  # fmt: skip
    reached = re.search(r"90 % from about (\d+) MB/s", chart.below)
    at = int(reached[1]) * 1e6
    reached = busy(pl.predict(MODEL, many, with_disk(at, busier), steps=1))
    assert reached == pytest.approx(0.9, abs=0.02)
    most = busy(pl.predict(MODEL, few, with_disk(1e18), steps=1))
    chart = view.disk_needed(MODEL, few, CLUSTER)
    said = r"With 1 sample the formula asks for a disk of \S+ GB/s to keep the device 90 % busy"
    assert re.fullmatch(rf"{said}; at most {100 * most:.0f} % is predicted", chart.finding)
    assert "from about" not in chart.below and "eq. 6" in chart.below
    wire = pl.Link(alpha=0.0, bandwidth=1e11)  # nothing but the disk is slow
    fast = CLUSTER.replace(flops=2e11, memory_bandwidth=1e11, op_overhead=0.0, host=wire,
                           disk=wire.replace(bandwidth=1e9), host_bandwidth=1e12)  # fmt: skip
    chart = view.disk_needed(MODEL, PLAN, fast)
    assert "to keep the device 90 % busy" in chart.finding  # by a disk that is not on the axis
    at = float(re.search(r"90 % from about (\d+) GB/s", chart.below)[1]) * 1e9
    assert at > FASTEST and curve(chart, "predicted")[FASTEST] < 0.89
    assert busy(pl.predict(MODEL, PLAN, with_disk(at, fast), steps=1)) == pytest.approx(
        0.9, abs=0.02
    )


def test_without_anything_in_files_the_disk_does_not_matter():
    chart = view.disk_needed(MODEL, PLAN.replace(offload="cpu"), CLUSTER)
    assert len(set(curve(chart, "predicted").values())) == 1
    assert set(curve(chart, "no overlap").values()) == {1.0} and len(chart.layout.shapes) == 1
    assert chart.finding.startswith("Nothing is kept in files") and "eq. 6" not in chart.below
    assert set(chart.table["link"].dropna()) == {"h2d", "d2h"}


def test_a_cluster_without_a_disk_is_drawn_without_its_mark():
    chart = view.disk_needed(MODEL, PLAN, pl.Cluster.preset("dgx-a100"))
    assert not any("disk" in (trace.name or "") for trace in chart.data)
    assert "yours" not in chart.finding
    own = view.disk_needed(MODEL, PLAN, CLUSTER)
    (mark,) = [trace for trace in own.data if "disk" in (trace.name or "")]
    assert mark.name == "the cluster's disk, 1 GB/s" and mark.x == (1e9,)
    widget = offload(MODEL, pl.Cluster.preset("dgx-a100"))
    assert widget.values["bandwidth"] == 10**9 and "own disk" not in repr(widget)


@pytest.mark.parametrize(("settings", "why"), [
    ({"model": "gpt"}, "model='gpt': not a description"),
    ({"plan": None}, "plan=None: not a description"),
    ({"cluster": 3}, "cluster=3: not a description"),
    ({"plan": pl.Plan(zero_stage=3)}, "data-parallel training that offloads"),
    ({"plan": pl.Plan(pp=2, recompute="full", offload={"activations": "nvme"})}, "tp=1, pp=1"),
    ({"plan": PLAN.replace(dp=8)}, "dp=8: the plan needs 8 devices, 'stated' has 4"),
    ({"cluster": CLUSTER.replace(host=None)}, "host=None: the plan offloads"),
    ({"share": 1}, "share=1: every transfer costs time"),
    ({"at": 0}, "at=0: out of range"),
])  # fmt: skip
def test_what_cannot_be_drawn_is_refused_in_words(settings, why):
    asked = {"model": MODEL, "plan": PLAN, "cluster": CLUSTER, **settings}
    with pytest.raises(ValueError, match=re.escape(why)):
        view.disk_needed(asked.pop("model"), asked.pop("plan"), asked.pop("cluster"), **asked)


# ---- the widget ----------------------------------------------------------------------------------
def named(widget: offload) -> dict[str, dict[str, str]]:
    """{row: {column: text}} of the table."""
    return {next(iter(row.values())): row for row in numbers(widget)}


def test_the_picture_and_the_table_are_those_of_the_plain_call(widget):
    widget.set(bandwidth=2e8, microbatches=2, optimizer="cpu", host=3e8)
    at, tiers = widget.values, widget.values.plan.tiers
    assert (tiers.parameters, tiers.gradients, tiers.optimizer) == ("nvme", "cpu", "cpu")
    assert at.plan.microbatches == 2 and at.cluster.host.bandwidth == 3e8
    chart = view.disk_needed(MODEL, at.plan, at.cluster, at=2e8)
    assert chart.to_json() == widget.chart.to_json() and repr(chart) == repr(widget.chart)
    expect = pl.predict(MODEL, at.plan, with_disk(2e8, at.cluster), steps=1)
    rows = named(widget)
    assert rows["device computes"]["predicted"] == f"{100 * busy(expect):.0f} %"
    assert rows["time per step"]["predicted"] == f"{1e3 * expect.step_time:.1f} ms"
    for name in ("no overlap", "perfect overlap"):
        assert rows["device computes"][name] == f"{100 * curve(chart, name)[2e8]:.0f} %"
    assert "disk of 200 MB/s" in widget._numbers.value


def test_run_it_holds_the_disk_down_and_its_points_stay_while_only_the_disk_changes(widget):
    widget.run(bandwidth=SLOWEST, ranks=2).wait(PATIENCE)
    assert widget.state == "done" and "2 real processes" in widget._status.value
    found, replayed = widget.result, widget.result.replay(with_disk(SLOWEST))
    assert found.plan.tiers.limits == {"disk": SLOWEST} and len(found.losses) == 3
    moved = found.copies[(found.copies["lane"] == "disk") & (found.copies["rank"] == 0)]
    assert found.step_time >= moved[moved["step"] == 1]["bytes"].sum() / SLOWEST
    assert curve(widget.chart, "replayed") == {SLOWEST: pytest.approx(busy(replayed))}
    assert curve(widget.chart, "measured") == {SLOWEST: pytest.approx(busy(found))}
    row = named(widget)["time per step"]
    assert row["replayed"] == f"{1e3 * replayed.step_time:.1f} ms"
    assert row["measured"] == f"{1e3 * found.step_time:.1f} ms"
    assert f"the device computes {100 * busy(replayed):.0f} % of a step" in widget._status.value

    widget.set(bandwidth=2e8)
    assert widget.result is None and widget.state == "idle"
    assert list(curve(widget.chart, "replayed")) == [SLOWEST]
    assert list(named(widget)["time per step"])[1:] == [
        "no overlap",
        "perfect overlap",
        "predicted",
    ]
    widget.run().wait(PATIENCE)
    assert sorted(curve(widget.chart, "replayed")) == [SLOWEST, 2e8]
    assert widget.set(bandwidth=SLOWEST).result is found and widget.state == "done"
    for knob in ({"microbatches": 2}, {"parameters": "cpu"}, {"host": 3e8}, {"ranks": 1}):
        old = {name: widget.values[name] for name in knob}
        assert widget.set(**knob).result is None and not curve(widget.chart, "replayed")
        assert widget.set(**old).result is found


def test_the_wall_clock_shows_no_link_that_is_not_there(widget):
    widget.run(bandwidth=5e9).wait(PATIENCE)
    assert list(curve(widget.chart, "replayed")) == [5e9]
    assert list(curve(widget.chart, "measured")) == [1e9]  # the disk that there is
    widget.run(bandwidth=1e9, host=1e10).wait(PATIENCE)
    assert curve(widget.chart, "replayed") and not curve(widget.chart, "measured")
    widget.run(host=3e8).wait(PATIENCE)
    limits = {"disk": 10**9, "h2d": 3 * 10**8, "d2h": 3 * 10**8}
    assert widget.result.plan.tiers.limits == limits and curve(widget.chart, "measured")


def test_runs_of_ones_own_are_points_of_the_plain_call(run):
    plan = PLAN.replace(offload={**FILES, "bandwidth": {"disk": "100MB"}})
    reports = [run(MODEL, p, steps=2) for p in (plan, PLAN)]
    chart = view.disk_needed(MODEL, plan, CLUSTER, runs=reports)
    assert sorted(curve(chart, "replayed")) == [1e8, 1e9]
    assert curve(chart, "measured")[1e8] == pytest.approx(busy(reports[0]))
    assert curve(chart, "predicted") == curve(view.disk_needed(MODEL, PLAN, CLUSTER), "predicted")
    with pytest.raises(ValueError, match="neither the run's plan nor the cluster says"):
        view.disk_needed(MODEL, PLAN, CLUSTER.replace(disk=None), runs=reports)


def test_what_would_take_too_long_or_too_much_is_not_run(widget, monkeypatch):
    monkeypatch.setattr(widget_offload, "LONGEST", 1e-3)
    with pytest.raises(ValueError, match="would take about .* here: a smaller model or batch"):
        widget.run(bandwidth=SLOWEST).wait(PATIENCE)
    assert widget.state == "error" and "Traceback" not in widget._trouble.value
    small = CLUSTER.replace(memory=2**20)
    monkeypatch.setattr(pl.Cluster, "local", lambda **_: small)
    with pytest.raises(ValueError, match="would need .* this machine has 1.05 MB"):
        widget.run(ranks=2).wait(PATIENCE)
    assert widget.set(microbatches=2).state == "idle"


def test_the_hint_says_what_run_it_does_to_the_disk(widget):
    said = {b: widget.set(bandwidth=b)._status.value for b in (2e8, 5e9)}
    assert "1 real process, with a disk held down to 200 MB/s" in said[2e8]
    assert "the disk stays as slow as it is" in said[5e9]
    widget.set(parameters="cpu", optimizer="cpu", ranks=4)
    assert "3 steps on 4 real processes, without the disk" in widget._status.value
