"""The widget of offload and its plain twin: predicted at once, then run for real on a slow disk."""

from __future__ import annotations

import re

import pytest

import paralab as pl
from paralab import view
from paralab.report import metrics
from paralab.theory.offload import link_bytes
from paralab.view import theme, widget_offload
from paralab.view.disk_bandwidth import FASTEST, SLOWEST
from paralab.view.widgets import offload

MODEL = pl.ModelSpec(layers=2, hidden=64, heads=2, seq_len=32)
LINK = pl.Link(alpha=1e-5, bandwidth=1e9)
CLUSTER = pl.Cluster(flops=5e10, memory_bandwidth=2e10, op_overhead=1e-5, devices_per_node=4,
                     intra=pl.Link(alpha=1e-4, bandwidth=1e9), host=LINK.replace(bandwidth=4e9),
                     disk=LINK, host_bandwidth=1e10)  # fmt: skip
FILES = {"parameters": "nvme", "gradients": "cpu", "optimizer": "nvme"}
PLAN = pl.Plan(zero_stage=3, microbatch_size=8, offload=FILES)
PATIENCE = 60


@pytest.fixture
def bench() -> offload:
    made = offload(MODEL, CLUSTER)
    yield made
    made.close()


def curve(chart: view.Chart, name: str) -> dict[float, float]:
    """{bandwidth: share} of one curve, or of one clock's points."""
    mine = chart.table[chart.table["curve"] == name]
    return dict(zip(mine["bandwidth"], mine["share"], strict=True))


def numbers(bench: offload) -> dict[str, dict[str, str]]:
    """{row: {column: text}} of the table."""
    rows = re.findall(r"<tr>(.*?)</tr>", bench._numbers.value)
    head, *rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in rows]
    return {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows}


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
    assert drawn["optimizer"] == [m.get("optimizer", 0) / 1e6 for m in moved.values()]


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
    chart = view.disk_needed(MODEL, many, CLUSTER)
    _, needed = (shape.x0 for shape in chart.layout.shapes)
    asked = theme.scaled(needed, "B/s")
    assert chart.finding == f"With 64 samples a disk of {asked} keeps the device 90 % busy; " \
        "yours has 1 GB/s"  # fmt: skip
    reached = re.search(r"90 % from about (\d+) MB/s", chart.below)
    at = int(reached[1]) * 1e6
    assert busy(pl.predict(MODEL, many, with_disk(at), steps=1)) == pytest.approx(0.9, abs=0.02)
    most = busy(pl.predict(MODEL, few, with_disk(1e18), steps=1))
    chart = view.disk_needed(MODEL, few, CLUSTER)
    assert re.fullmatch(rf"With 1 sample 90 % busy takes \S+ GB/s by the formula; predicted: "
                        rf"{100 * most:.0f} % at most", chart.finding)  # fmt: skip
    assert "from about" not in chart.below and "eq. 6" in chart.below
    wire = pl.Link(alpha=0.0, bandwidth=1e11)  # nothing but the disk is slow
    fast = CLUSTER.replace(flops=2e11, memory_bandwidth=1e11, op_overhead=0.0, host=wire,
                           disk=wire.replace(bandwidth=1e9), host_bandwidth=1e12)  # fmt: skip
    chart = view.disk_needed(MODEL, PLAN, fast)
    assert "keeps the device 90 % busy" in chart.finding  # by a disk that is not on the axis
    at = float(re.search(r"90 % from about (\d+) GB/s", chart.below)[1]) * 1e9
    assert at > FASTEST and curve(chart, "predicted")[FASTEST] < 0.89
    assert busy(pl.predict(MODEL, PLAN, with_disk(at, fast), steps=1)) == pytest.approx(
        0.9, abs=0.02
    )


def test_without_anything_in_files_the_disk_does_not_matter():
    chart = view.disk_needed(MODEL, PLAN.replace(offload="cpu"), CLUSTER)
    assert len(set(curve(chart, "predicted").values())) == 1
    assert set(curve(chart, "no overlap").values()) == {1.0} and len(chart.layout.shapes) == 1
    assert chart.finding.startswith("Nothing lies in files") and "eq. 6" not in chart.below
    assert set(chart.table["link"].dropna()) == {"h2d", "d2h"}


def test_a_cluster_without_a_disk_is_drawn_without_its_mark():
    chart = view.disk_needed(MODEL, PLAN, pl.Cluster.preset("dgx-a100"))
    assert not any("disk" in (trace.name or "") for trace in chart.data)
    assert "yours" not in chart.finding
    own = view.disk_needed(MODEL, PLAN, CLUSTER)
    (mark,) = [trace for trace in own.data if "disk" in (trace.name or "")]
    assert mark.name == "the cluster's disk, 1 GB/s" and mark.x == (1e9,)
    bench = offload(MODEL, pl.Cluster.preset("dgx-a100"))
    assert bench.values["bandwidth"] == 10**9 and "own disk" not in repr(bench)


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


# ---- sliders -------------------------------------------------------------------------------------
def test_every_knob_moves_the_picture(bench):
    for name, value in {"bandwidth": 2e8, "host": 3e8, "microbatch_size": 4, "microbatches": 2,
                        "parameters": "cpu", "optimizer": "cpu",
                        "ranks": 2}.items():  # fmt: skip
        before = bench.chart
        bench.knobs[name].value = value
        assert bench.error is None and bench.chart.to_json() != before.to_json(), name
        assert bench.chart.table.equals(bench.predict().table)
    plan, tiers = bench.plan_of(bench.values), bench.plan_of(bench.values).tiers
    assert (plan.dp, plan.microbatches, plan.microbatch_size, plan.zero_stage) == (2, 2, 4, 3)
    assert (tiers.parameters, tiers.gradients, tiers.optimizer) == ("cpu", "cpu", "cpu")
    assert bench.cluster_of(bench.values).host.bandwidth == 3e8


def test_the_picture_and_the_table_are_those_of_the_plain_call(bench):
    bench.set(bandwidth=2e8, microbatches=2, optimizer="cpu")
    plan, cluster = bench.plan_of(bench.values), bench.cluster_of(bench.values)
    chart = view.disk_needed(MODEL, plan, cluster, at=2e8)
    assert chart.to_json() == bench.chart.to_json() and repr(chart) == repr(bench.chart)
    expect = pl.predict(MODEL, plan, with_disk(2e8), steps=1)
    rows = numbers(bench)
    assert rows["device computes"]["predicted"] == f"{100 * busy(expect):.0f} %"
    assert rows["time per step"]["predicted"] == f"{1e3 * expect.step_time:.1f} ms"
    for name in ("no overlap", "perfect overlap"):
        assert rows["device computes"][name] == f"{100 * curve(chart, name)[2e8]:.0f} %"
    assert "disk of 200 MB/s" in bench._numbers.value
    named = [trace.name for trace in chart.data if trace.showlegend and trace.type == "scatter"]
    assert named == ["predicted", "no overlap", "perfect overlap", "the cluster's disk, 1 GB/s"]


def test_the_repr_says_the_settings_and_wrong_ones_are_refused():
    assert (
        repr(offload(MODEL, CLUSTER))
        == "offload(own disk, own link, 8 samples, 1 micro-batch, files, files, 1 device)"
    )
    # fmt: skip
    with pytest.raises(ValueError, match="model='gpt'.*legal: a pl.ModelSpec"):
        offload("gpt")
    with pytest.raises(ValueError, match="cluster='mine': not a cluster"):
        offload(cluster="mine")
    with pytest.raises(ValueError, match="host_bandwidth=None: the plan offloads"):
        offload(MODEL, CLUSTER.replace(host_bandwidth=None))
    with pytest.raises(ValueError, match="bandwidth=1: not on this slider"):
        offload(MODEL, CLUSTER).predict(bandwidth=1)
    small = offload(MODEL, CLUSTER.replace(devices_per_node=2))
    assert [value for _, value in small._kinds["ranks"].options] == [1, 2]


# ---- the real run --------------------------------------------------------------------------------
@pytest.mark.parametrize("ranks", [1, 2])
def test_run_it_holds_the_disk_down_and_puts_its_points_into_the_picture(bench, ranks):
    bench.run(bandwidth=SLOWEST, ranks=ranks)
    assert all(knob.disabled for knob in bench.knobs.values())
    bench.wait(PATIENCE)
    assert bench.state == "done" and f"{ranks} real process" in bench._status.value
    found, replayed = bench.result, bench.result.replay(with_disk(SLOWEST))
    assert found.plan.tiers.limits == {"disk": SLOWEST} and len(found.losses) == 3
    moved = found.copies[(found.copies["lane"] == "disk") & (found.copies["rank"] == 0)]
    assert found.step_time >= moved[moved["step"] == 1]["bytes"].sum() / SLOWEST
    assert curve(bench.chart, "replayed") == {SLOWEST: pytest.approx(busy(replayed))}
    assert curve(bench.chart, "measured") == {SLOWEST: pytest.approx(busy(found))}
    rows = numbers(bench)
    assert rows["time per step"]["replayed"] == f"{1e3 * replayed.step_time:.1f} ms"
    assert rows["time per step"]["measured"] == f"{1e3 * found.step_time:.1f} ms"
    assert f"the device computes {100 * busy(replayed):.0f} % of a step" in bench._status.value


def test_points_stay_while_only_the_disk_is_another(bench):
    bench.run(bandwidth=SLOWEST).wait(PATIENCE)
    ran = bench.result
    bench.set(bandwidth=2e8)
    assert bench.result is None and bench.state == "idle"
    assert list(curve(bench.chart, "replayed")) == [SLOWEST]
    assert set(numbers(bench)["time per step"]) == {"no overlap", "perfect overlap", "predicted"}
    bench.run().wait(PATIENCE)
    assert sorted(curve(bench.chart, "replayed")) == [SLOWEST, 2e8]
    assert bench.set(bandwidth=SLOWEST).result is ran and bench.state == "done"
    for knob in ({"microbatches": 2}, {"parameters": "cpu"}, {"host": 3e8}, {"ranks": 2}):
        old = {name: bench.values[name] for name in knob}
        assert bench.set(**knob).result is None and not curve(bench.chart, "replayed")
        assert bench.set(**old).result is ran


def test_no_clock_on_the_wall_shows_a_link_that_is_not_there(bench):
    bench.run(bandwidth=5e9).wait(PATIENCE)
    assert list(curve(bench.chart, "replayed")) == [5e9]
    assert list(curve(bench.chart, "measured")) == [1e9]  # the disk that there is
    bench.run(bandwidth=1e9, host=1e10).wait(PATIENCE)
    assert curve(bench.chart, "replayed") and not curve(bench.chart, "measured")
    bench.run(host=3e8).wait(PATIENCE)
    assert bench.result.plan.tiers.limits == {"disk": 10**9, "h2d": 3 * 10**8, "d2h": 3 * 10**8}
    assert curve(bench.chart, "measured")


def test_runs_of_ones_own_are_points_of_the_plain_call(run):
    plan = PLAN.replace(offload={**FILES, "bandwidth": {"disk": "100MB"}})
    reports = [run(MODEL, p, steps=2) for p in (plan, PLAN)]
    chart = view.disk_needed(MODEL, plan, CLUSTER, runs=reports)
    assert sorted(curve(chart, "replayed")) == [1e8, 1e9]
    assert curve(chart, "measured")[1e8] == pytest.approx(busy(reports[0]))
    assert curve(chart, "predicted") == curve(view.disk_needed(MODEL, PLAN, CLUSTER), "predicted")
    with pytest.raises(ValueError, match="neither the run's plan nor the cluster says"):
        view.disk_needed(MODEL, PLAN, CLUSTER.replace(disk=None), runs=reports)


def test_what_would_take_too_long_or_too_much_is_not_run(bench, monkeypatch):
    monkeypatch.setattr(widget_offload, "LONGEST", 1e-3)
    with pytest.raises(ValueError, match="with a disk of 50 MB/s: a faster disk, fewer samples"):
        bench.run(bandwidth=SLOWEST).wait(PATIENCE)
    assert bench.state == "error" and "Traceback" not in bench._trouble.value
    small = CLUSTER.replace(memory=2**20)
    monkeypatch.setattr(pl.Cluster, "local", lambda **_: small)
    with pytest.raises(ValueError, match="2 ranks need .* fewer devices or a smaller hidden"):
        bench.run(ranks=2).wait(PATIENCE)
    assert bench.set(microbatches=2).state == "idle"


def test_the_hint_says_what_run_it_does_to_the_disk(bench):
    said = {b: bench.set(bandwidth=b)._status.value for b in (2e8, 5e9)}
    assert "1 real process, with a disk held down to 200 MB/s" in said[2e8]
    assert "the disk stays as slow as it is" in said[5e9]
    bench.set(parameters="cpu", optimizer="cpu", ranks=4)
    assert "3 steps on 4 real processes, without the disk" in bench._status.value
