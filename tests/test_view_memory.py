"""Promises of the memory charts: every byte, the peak named, one scale, a prediction no lie."""

from __future__ import annotations

import dataclasses

import pandas as pd
import pytest

import paralab as pl
import synthetic
from paralab import view
from paralab.report.report import Report
from paralab.view import theme
from paralab.view.memory_curves import curves, thinned
from paralab.view.memory_panels import MAX_POINTS
from paralab.view.page import page
from refusals import refuses

CLUSTER = pl.Cluster(
    flops=5e10, memory_bandwidth=2e10, op_overhead=1e-5, intra=pl.Link(alpha=1e-4, bandwidth=1e9)
)


def sampled(dp: int = 2, *, stage: int = 0, within: int = 4, **settings) -> Report:
    return synthetic.with_memory(synthetic.report(dp, **settings), stage=stage, within=within)


def predicted(plan: pl.Plan) -> Report:
    return pl.predict(synthetic.MODEL, plan, CLUSTER, steps=2)


def stages() -> dict[str, Report]:
    return {f"ZeRO-{s}" if s else "plain": sampled(4, stage=s, microbatches=1) for s in range(4)}


@pytest.fixture(scope="module")
def two() -> Report:
    return sampled()


def areas(chart: view.Chart) -> dict[str, list]:
    """{axis: its categories' traces, from the bottom up}"""
    found: dict[str, list] = {}
    for trace in chart.data:
        if trace.type == "scatter" and trace.stackgroup:
            found.setdefault(trace.yaxis, []).append(trace)
    return found


def strips(chart: view.Chart) -> list:
    return [trace for trace in chart.data if trace.type == "bar" and trace.orientation == "h"]


def words(chart: view.Chart) -> list[str]:
    return [note.text for note in chart.layout.annotations]


# ---- one report ----------------------------------------------------------------------------------
def test_the_stack_of_every_rank_is_its_samples_to_the_byte(two):
    chart = two.memory_chart()
    table = two.memory
    for rank, (axis, traces) in enumerate(areas(chart).items()):
        mine = table[table["rank"] == rank]
        assert [t.name for t in traces] == [
            c for c in theme.CATEGORY_COLOUR if c in set(mine["category"])
        ]
        for trace in traces:
            assert trace.line.shape == "hv" and trace.stackgroup == axis
            assert trace.fillcolor == theme.CATEGORY_COLOUR[trace.name]
            sizes = mine[mine["category"] == trace.name]["bytes"].tolist()
            drawn = [round(y * 1e6) for y in trace.y]
            assert drawn == [*sizes, sizes[-1]]  # held until the step's end
            assert list(trace.x) == sorted(trace.x)
    assert chart.table["bytes"].sum() == table["bytes"].sum()
    assert set(chart.table.columns) == {"panel", "rank", "step", "time", "phase", "category",
                                        "bytes"}  # fmt: skip


def test_what_a_gpus_allocator_says_is_drawn_beside_the_ledger_and_in_the_summary(two):
    peak, names = two.peak_memory, ("rank", "step", "allocated", "active", "reserved")
    rows = [(r, s, peak + r, peak + 7, 2 * peak) for r in range(2) for s in range(4)]
    table = {name: [row[i] for row in rows] for i, name in enumerate(names)}
    gpu = dataclasses.replace(two, allocator={**table, "largest_free": [peak // 2] * len(rows)})
    lines = [(line.yref, round(line.y0 * 1e6)) for line in gpu.memory_chart().layout.shapes]
    assert lines == [("y", peak), ("y", 2 * peak), ("y3", peak + 1), ("y3", 2 * peak)]
    assert gpu.memory_chart().layout.yaxis.range[1] * 1e6 > 2 * peak
    said = gpu.summary()["value"]
    found = [said[f"of the allocator: {name}"] for name in ("allocated", "reserved",
                                                            "largest free block")]  # fmt: skip
    assert found == pytest.approx([n / 1e6 for n in (peak + 1, 2 * peak, peak // 2)], abs=1e-4)
    assert said["peak memory: bytes of tensors"] == pytest.approx(peak / 1e6, abs=1e-4)
    assert not two.memory_chart().layout.shapes
    assert not [name for name in two.summary().index if "allocator" in name]


def test_the_peak_is_marked_on_every_rank_and_the_title_says_whose_where_and_of_what(two):
    chart = two.memory_chart()
    sums = two.memory.groupby(["rank", "time"])["bytes"].sum()
    tops = {rank: int(sums[rank].max()) for rank in (0, 1)}
    marks = [t for t in chart.data if t.name == "peak"]
    assert [round(mark.y[0] * 1e6) for mark in marks] == [tops[0], tops[1]]
    for rank in (0, 1):
        assert f"<b>peak {theme.scaled(tops[rank], 'B')}</b>" in words(chart)
    assert tops[1] == two.peak_memory > tops[0]
    at = two.memory[(two.memory["rank"] == 1) & (two.memory["time"] == sums[1].idxmax())]
    sizes = at.set_index("category")["bytes"]
    share = f"{sizes.idxmax()} take {100 * sizes.max() / sizes.sum():.0f} %"
    assert chart.finding == (
        f"dp=2, overlapped: memory peaks at {theme.scaled(tops[1], 'B')} in backward on rank 1; "
        f"{share}"
    )
    assert "measured clock" in chart.below and "step 0" in chart.below
    assert repr(chart) == \
        "Chart(memory of dp=2, overlapped, measured: 2 of 2 ranks, by category)"  # fmt: skip
    model = pl.ModelSpec(layers=1, hidden=16, heads=2, seq_len=8)
    alone = pl.predict(model, pl.Plan(), pl.Cluster.preset("dgx-a100"), steps=1).memory_chart()
    assert repr(alone) == "Chart(memory of one device, predicted: 1 rank, by category)"


def test_the_strip_has_the_phases_where_they_were(two):
    rank, step = 0, 0
    drawn = {trace.name: trace for trace in strips(two.memory_chart(rank=rank))}
    assert list(drawn) == ["forward", "backward", "optimizer"]
    spans = two.spans[(two.spans["rank"] == rank) & (two.spans["step"] == step)]
    zero = two.steps[two.steps["rank"] == rank]["start"].min()
    for kind, trace in drawn.items():
        mine = spans[spans["kind"] == kind]
        assert min(trace.base) == pytest.approx(1e3 * (mine["start"].min() - zero), abs=1e-3)
        ends = [b + x for b, x in zip(trace.base, trace.x, strict=True)]
        assert max(ends) == pytest.approx(1e3 * (mine["end"].max() - zero), abs=1e-3)
        assert trace.marker.color == theme.KIND_COLOUR[kind]
        assert len(trace.x) == (1 if kind == "optimizer" else 2)  # pieces of one backward are one


def test_phases_are_named_at_borders_between_and_before(two):
    found = dict(enumerate(curves(two, ranks=[0])[0].phases))
    (curve,) = curves(two, ranks=[0])
    said = [curve.phase(i) for i in range(len(curve.times))]
    assert said[0] == "before forward" and said[-1] == "in the optimizer"
    assert curve.phases is curve.phases  # looked for once, not for each of thousands of samples
    assert [phase.kind for phase in found.values()] == \
        ["forward", "backward", "forward", "backward", "optimizer"]  # fmt: skip
    after = dataclasses.replace(curve, times=[found[3].end + 1e-9], samples=curve.samples[:1])
    assert after.phase(0) == "after backward"
    border = dataclasses.replace(curve, times=[found[0].end], samples=curve.samples[:1])
    assert border.phase(0) == "in forward"


def test_ranks_share_one_scale_and_one_time_axis(two):
    layout = two.memory_chart().layout
    assert layout.yaxis.range == layout.yaxis3.range
    assert layout.yaxis.domain[0] >= layout.yaxis3.domain[1] > layout.yaxis3.domain[0] >= 0
    assert "(MB)" in layout.yaxis.title.text and "(ms)" in layout.xaxis.title.text


def test_a_step_and_a_rank_can_be_chosen_and_the_fullest_step_is_the_default():
    rows = sampled(2, steps=3).memory
    later = rows.assign(step=2, time=rows["time"] + 1.0, bytes=rows["bytes"] * 2)
    report = dataclasses.replace(sampled(2, steps=3), memory=pd.concat([rows, later]))
    assert "step 2" in report.memory_chart().below
    equal = dataclasses.replace(report, memory=pd.concat([rows, later.assign(bytes=rows["bytes"])]))
    assert "step 2" in equal.memory_chart().below
    first = report.memory_chart(rank=1, step=0)
    assert "step 0" in first.below and set(first.table["rank"]) == {1}
    assert len(areas(first)) == 1 and "rank 1" in repr(first)


def test_of_many_ranks_four_are_drawn_the_fullest_among_them_and_said_so():
    made = sampled(8, microbatches=1)
    rows = made.memory
    rows = rows.assign(bytes=rows["bytes"].where(rows["rank"] != 3, rows["bytes"] * 3))
    chart = dataclasses.replace(made, memory=rows).memory_chart()
    assert sorted(set(chart.table["rank"])) == [0, 3, 5, 7]
    assert "4 of 8 ranks drawn" in chart.below and "on rank 3" in chart.finding


def test_a_limit_is_a_line_and_a_device_far_larger_is_not():
    report = sampled(2)
    peak = report.peak_memory
    near = dataclasses.replace(report, meta={**report.meta, "memory_limit": 2 * peak})
    chart = near.memory_chart()
    lines = [s for s in chart.layout.shapes if s.line.dash == "dash"]
    assert [s.y0 for s in lines] == [2 * peak / 1e6] * 2
    assert f"the memory limit: {theme.scaled(2 * peak, 'B')}" in words(chart)
    assert f"of {theme.scaled(2 * peak, 'B')} in backward on rank 1" in chart.finding
    assert chart.layout.yaxis.range[1] > 2 * peak / 1e6
    for far in (dataclasses.replace(report, cluster=CLUSTER), report):
        assert not far.memory_chart().layout.shapes
    held = dataclasses.replace(report, cluster=CLUSTER.replace(name="tiny", memory=2 * peak))
    assert any("a device of cluster tiny" in said for said in words(held.memory_chart()))


def test_thousands_of_samples_are_thinned_and_every_peak_stays():
    report = sampled(1, within=2000)
    chart = report.memory_chart()
    points = sum(len(trace.x) for traces in areas(chart).values() for trace in traces)
    assert points <= 1.1 * MAX_POINTS < len(report.memory)
    stacked = [sum(t.y[i] for t in areas(chart)["y"]) for i in range(len(chart.data[3].x))]
    assert round(max(stacked) * 1e6) == report.peak_memory
    totals = [0, 9, 1, 2, 8, 0, 3, 3, 7, 1] * 30
    kept = thinned(totals, 60)
    assert len(kept) <= 61 and kept == sorted(set(kept)) and kept[-1] == 299
    size = -(-300 // 20)
    for low in range(0, 300, size):
        part = range(low, low + size)
        assert max(totals[i] for i in part) == max(totals[i] for i in kept if i in part)


def test_two_samples_at_one_time_are_two_samples():
    """A replay may put them there: it gives a wait no time."""
    report = sampled(1, microbatches=1)
    rows = report.memory.assign(time=report.memory["time"].min())
    (curve,) = curves(dataclasses.replace(report, memory=rows))
    assert len(curve.times) == len(rows) // rows["category"].nunique()
    assert curve.peak == report.peak_memory  # not the sum of both


def test_a_prediction_is_drawn_like_a_run_with_its_peak():
    report = predicted(pl.Plan(dp=2, microbatches=2))
    chart = report.memory_chart(rank=0)
    assert areas(chart) and "predicted clock" in chart.below
    assert f"<b>peak {theme.scaled(report.peak_memory, 'B')}</b>" in words(chart)
    mine = report.memory[(report.memory["rank"] == 0) & (report.memory["step"] == 0)]
    totals = mine.groupby("time")["bytes"].sum()
    assert totals.max() == report.peak_memory and len(totals) > 10


def test_what_a_replay_moves_in_time_it_does_not_change_in_bytes(two):
    replayed = two.replay(CLUSTER)
    chart = replayed.memory_chart()
    assert "replayed clock" in chart.below
    assert chart.table["bytes"].tolist() == two.memory_chart().table["bytes"].tolist()


def test_a_report_without_samples_says_what_would_do():
    refuses("no memory was sampled.*legal: what pl.run", synthetic.report(2).memory_chart)
    refuses("rank=5.*legal: 0, 1", sampled().memory_chart, rank=5)
    refuses("step=3.*legal: 0", sampled().memory_chart, step=3)


# ---- several runs --------------------------------------------------------------------------------
def test_runs_stand_on_one_scale_and_each_says_what_is_left_of_the_first():
    runs = stages()
    chart = view.memory_charts(runs)
    peaks = {label: curves(report, ranks=[0])[0].peak for label, report in runs.items()}
    assert list(peaks.values()) == sorted(peaks.values(), reverse=True)
    ranges = {chart.layout[f"yaxis{n}"].range for n in ("", 3, 5, 7)}
    assert len(ranges) == 1 and ranges.pop()[1] > peaks["plain"] / 1e6
    heads = [w for w in words(chart) if w.startswith("<b>") and "peak" not in w]
    assert heads[0] == "<b>plain</b>"
    assert heads[3] == f"<b>ZeRO-3</b>: {100 * peaks['ZeRO-3'] / peaks['plain']:.0f} % of plain"
    dots = [s for s in chart.layout.shapes if s.line.dash == "dot"]
    assert [s.y0 for s in dots] == [peaks["plain"] / 1e6] * 3
    assert words(chart).count("peak of plain") == 3
    assert chart.finding.startswith(f"“ZeRO-3” needs {theme.scaled(peaks['ZeRO-3'], 'B')} at its")
    assert chart.layout.xaxis.title.text == "share of the step (%)"
    ends = {round(t.x[-1]) for traces in areas(chart).values() for t in traces}
    assert ends == {100}
    assert repr(chart) == ("Chart(memory of 4 runs on rank 0, by category: plain | ZeRO-1 | ZeRO-2 "
                           "| ZeRO-3)")  # fmt: skip
    assert list(dict.fromkeys(chart.table["panel"])) == list(runs)
    rows = runs["ZeRO-3"].memory
    last = rows.groupby(["rank", "step"])["time"].transform("max")
    rows = rows.assign(bytes=rows["bytes"].where(rows["time"] < last, 10**6))
    late = view.memory_charts(runs | {"ZeRO-3": dataclasses.replace(runs["ZeRO-3"], memory=rows)})
    named = [note.x for note in late.layout.annotations if note.text == "peak of plain"]
    assert named == [1, 1, 0]  # away from the run's own peak


def test_a_prediction_may_stand_beside_a_run_and_both_say_their_clock(two):
    chart = view.memory_charts({"theory": predicted(pl.Plan(dp=2)), "run": two}, rank=1)
    assert "rank 1" in chart.below and "clock" not in chart.below
    assert any("(predicted)" in w for w in words(chart))
    assert len(areas(chart)) == 2


def test_bars_are_each_runs_peak_of_its_fullest_rank():
    runs = stages()
    chart = view.memory_bars(runs)
    found = chart.table.groupby("bar", sort=False)["bytes"].sum()
    assert found.to_dict() == {label: report.peak_memory for label, report in runs.items()}
    assert "clock" not in chart.below and "highest peak" in chart.below
    share, most = runs["ZeRO-3"].peak_memory / runs["plain"].peak_memory, runs["plain"].peak_memory
    assert chart.finding.endswith(
        f", {theme.percent(share)} of the {theme.scaled(most, 'B')} of “plain”"
    )
    alike = view.memory_bars({"a": runs["plain"], "b": runs["plain"]})
    assert alike.finding.startswith("All need the same memory")
    assert view.memory_bars(runs, title="mine").finding == "mine"


def test_runs_that_cannot_be_drawn_are_named(two):
    for draw in (view.memory_charts, view.memory_bars):
        refuses("nothing to draw.*legal: {label: report}", draw, {})
        refuses("empty: .*no memory was sampled", draw, {"full": two, "empty": synthetic.report(2)})
        refuses(r"runs\['a'\]=3: not a report", draw, {"a": 3})


def test_the_page_has_the_memory_where_there_is_some(two):
    assert '<div id="memory"' in page(two)
    assert '<div id="memory"' not in page(synthetic.report(2))
