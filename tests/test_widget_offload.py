"""The widget of offload: predicted at once for any disk, then run for real on a slow one."""

import pytest

import paralab as pl
import widgets
from paralab.report import metrics
from paralab.theory.offload import link_bytes
from paralab.view import theme, widget_offload
from paralab.view.widgets import offload
from widgets import PATIENCE, numbers

MODEL = pl.ModelSpec(layers=2, hidden=64, heads=2, seq_len=32)
CLUSTER = widgets.CLUSTER.replace(devices_per_node=4)
SLOWEST = widget_offload.DISKS[0]


@pytest.fixture
def widget() -> offload:
    made = offload(MODEL, CLUSTER)
    yield made
    made.close()


def curve(widget: offload, name: str, clock: str = "predicted") -> dict[float, float]:
    """{bandwidth: seconds} of one curve, or of one clock's points."""
    table = widget.charts[1].table.query("algorithm == @name and clock == @clock")
    return dict(zip(table["bytes"], table["seconds"], strict=True))


def with_disk(bandwidth: float, cluster: pl.Cluster = CLUSTER) -> pl.Cluster:
    return cluster.replace(disk=cluster.disk.replace(bandwidth=bandwidth))


def working(report: pl.Report) -> float:
    return metrics.shares(report, metrics.typical_step(report))["work"]


def named(widget: offload) -> dict[str, dict[str, str]]:
    """{clock: row} of the table."""
    return {row["clock"]: row for row in numbers(widget)}


# ---- the pictures --------------------------------------------------------------------------------
@pytest.mark.parametrize("knobs", [
    {}, {"ranks": 2, "microbatches": 2}, {"parameters": "cpu", "host": 3e8},
], ids=str)  # fmt: skip
def test_the_predicted_curve_is_the_very_prediction_at_every_bandwidth(widget, knobs):
    at = widget.set(**knobs).values
    seconds = curve(widget, "predicted")
    assert list(seconds) == list(widget_offload.DISKS)
    for bandwidth, found in seconds.items():
        expect = pl.predict(MODEL, at.plan, with_disk(bandwidth, at.cluster), steps=1)
        assert found == pytest.approx(expect.step_time, rel=1e-9), bandwidth


def test_the_formulas_are_of_what_is_computed_and_what_files_are_read_and_written(widget):
    at = widget.values
    compute, moved = working(at.predicted), link_bytes(MODEL, at.plan)
    files = sum(moved["disk read"].values()) + sum(moved["disk write"].values())
    hidden, nothing = curve(widget, "full overlap"), curve(widget, "no overlap")
    for bandwidth in nothing:
        seconds = files / bandwidth
        assert nothing[bandwidth] == pytest.approx(compute + seconds)
        assert hidden[bandwidth] == pytest.approx(max(compute, seconds))
    assert all(took >= hidden[b] for b, took in curve(widget, "predicted").items())
    assert files / compute in hidden  # the corner
    assert "full and no overlap: ZeRO-Infinity, eq. 6" in widget.charts[1].below
    needed = 9 * files / compute  # there compute is nine tenths of compute + files / bandwidth
    assert widget.charts[1].finding.endswith(
        f"; by the formula, 90 % needs {theme.scaled(needed, 'B/s')}"
    )


def test_the_slider_is_marked_on_the_curve_and_the_step_is_the_timeline(widget):
    step, over = widget.set(bandwidth=2e8).charts
    ring = over.data[-1]
    assert (ring.name, ring.x, ring.y) == ("chosen", (2e8,), (curve(widget, "predicted")[2e8],))
    twin = pl.predict(MODEL, widget.values.plan, with_disk(2e8), steps=1)
    assert step.table.equals(twin.timeline(ranks=[0]).table)
    said = theme.percent(working(twin) / twin.step_time)
    assert over.finding.startswith(f"With a 200 MB/s disk the device computes for {said} of a")


def test_without_anything_in_files_the_disk_does_not_matter(widget):
    widget.set(parameters="cpu", optimizer="cpu")
    assert len(set(curve(widget, "predicted").values())) == 1
    assert "formula" not in widget.charts[1].finding and "eq. 6" not in widget.charts[1].below
    rows = named(widget)
    assert rows["formula, no overlap"]["device computes"] == "100 %"


def test_a_cluster_without_a_disk_begins_with_one():
    widget = offload(MODEL, pl.Cluster.preset("dgx-a100"))
    assert widget.values.cluster.disk == pl.Link(alpha=1e-4, bandwidth=1e9)
    assert "own disk" not in repr(widget)


def test_the_table_has_both_formulas_and_the_prediction(widget):
    widget.set(bandwidth=2e8, microbatches=2, optimizer="cpu", host=3e8)
    at, tiers = widget.values, widget.values.plan.tiers
    assert (tiers.parameters, tiers.gradients, tiers.optimizer) == ("nvme", "cpu", "cpu")
    assert at.plan.microbatches == 2 and at.cluster.host.bandwidth == 3e8
    expect = pl.predict(MODEL, at.plan, with_disk(2e8, at.cluster), steps=1)
    formulas = {f"formula, {n}": curve(widget, n)[2e8] for n in ("no overlap", "full overlap")}
    rows, seconds = named(widget), {"predicted": expect.step_time} | formulas
    assert rows.keys() == seconds.keys()
    for name, took in seconds.items():
        assert rows[name]["time per step"] == f"{1e3 * took:.1f} ms"
        assert rows[name]["device computes"] == f"{100 * working(expect) / took:.0f} %"


# ---- the run -------------------------------------------------------------------------------------
def test_run_it_holds_the_disk_down_and_draws_the_replay(widget):
    chart = widget.run(bandwidth=SLOWEST, ranks=2).wait(PATIENCE)
    assert widget.state == "done" and "2 real processes" in widget._status.value
    found, replayed = widget.result, widget.result.replay(with_disk(SLOWEST))
    assert found.plan.tiers.limits == {"disk": SLOWEST} and len(found.losses) == 3
    moved = found.copies[(found.copies["lane"] == "disk") & (found.copies["rank"] == 0)]
    assert found.step_time >= moved[moved["step"] == 1]["bytes"].sum() / SLOWEST
    assert list(dict.fromkeys(chart.table["clock"])) == ["predicted", "replayed"]
    assert " ms predicted, " in chart.finding and "disk limited to 50 MB/s" in chart.below
    assert curve(widget, "this run", "replayed") == {SLOWEST: pytest.approx(replayed.step_time)}
    rows = {clock.split(" (")[0]: row for clock, row in named(widget).items()}
    for clock, report in (("replayed", replayed), ("measured", found)):
        assert rows[clock]["time per step"] == f"{1e3 * report.step_time:.1f} ms"
        busy = working(report) / metrics.step_durations(report)[metrics.typical_step(report)]
        assert rows[clock]["device computes"] == f"{100 * busy:.0f} %"
    assert " the replayed one" in widget._status.value

    for knob in ({"bandwidth": 2e8}, {"microbatches": 2}, {"parameters": "cpu"}, {"host": 3e8}):
        old = {name: widget.values[name] for name in knob}
        assert widget.set(**knob).result is None and widget.state == "idle"
        assert not curve(widget, "this run", "replayed")
        assert widget.set(**old).result is found and widget.state == "done"


def test_a_slow_link_to_the_host_is_held_down_too_and_the_hint_says_so(widget, monkeypatch):
    monkeypatch.setattr("paralab.experiment.run", lambda model, plan, **how: plan)
    plan = widget._measure(widget.set(host=3e8, ranks=4).values)
    assert plan.tiers.limits == {"disk": 10**9, "h2d": 3 * 10**8, "d2h": 3 * 10**8}
    said = "3 steps on 4 real processes, with a disk and a host link no faster than the"
    assert said in widget._status.value
