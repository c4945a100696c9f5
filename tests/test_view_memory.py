"""Promises of the memory charts: every byte, the peak named, one scale, a prediction no lie."""

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
from widgets import CLUSTER, bars


def sampled(dp: int = 2, *, stage: int = 0, within: int = 4, **settings) -> Report:
    return synthetic.with_memory(synthetic.report(dp, **settings), stage=stage, within=within)


def stages() -> dict[str, Report]:
    return {f"ZeRO-{s}" if s else "plain": sampled(4, stage=s, microbatches=1) for s in range(4)}


def predicted(plan: pl.Plan) -> Report:
    return pl.predict(synthetic.MODEL, plan, CLUSTER, steps=2)


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


def words(chart: view.Chart) -> list[str]:
    return [note.text for note in chart.layout.annotations]


# ---- one report ----------------------------------------------------------------------------------
def test_the_stack_of_every_rank_is_its_samples_to_the_byte(two):
    chart, table = two.memory_chart(), two.memory
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
    layout = chart.layout  # one scale, one time axis
    assert layout.yaxis.range == layout.yaxis3.range
    assert layout.yaxis.domain[0] >= layout.yaxis3.domain[1] > layout.yaxis3.domain[0] >= 0
    assert "(MB)" in layout.yaxis.title.text and "(ms)" in layout.xaxis.title.text


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
    tops = [int(sums[rank].max()) for rank in (0, 1)]
    assert [round(t.y[0] * 1e6) for t in chart.data if t.name == "peak"] == tops
    assert {f"<b>peak {theme.scaled(top, 'B')}</b>" for top in tops} <= set(words(chart))
    assert tops[1] == two.peak_memory > tops[0]
    at = two.memory[(two.memory["rank"] == 1) & (two.memory["time"] == sums[1].idxmax())]
    sizes = at.set_index("category")["bytes"]
    share = f"{sizes.idxmax()} take {100 * sizes.max() / sizes.sum():.0f} %"
    assert chart.finding == (
        f"dp=2, overlapped: memory peaks at {theme.scaled(tops[1], 'B')} in backward on rank 1; "
        f"{share}"
    )
    assert "measured clock" in chart.below and "step 0" in chart.below


def test_the_edges_of_a_strips_many_boxes_do_not_hide_them():
    for m, edge in ((2, 1), (64, 0)):
        chart = predicted(pl.Plan(pp=2, microbatches=m)).memory_chart(rank=1)
        assert {bar.marker.line.width for bar in chart.data if bar.name == "forward"} == {edge}


def test_the_strip_has_the_phases_where_they_were(two):
    chart = two.memory_chart(rank=two.memory["rank"].min())  # a number of NumPy's
    drawn = {t.name: t for t in chart.data if t.type == "bar" and t.orientation == "h"}
    assert list(drawn) == ["forward", "backward", "optimizer"]
    spans = two.spans[(two.spans["rank"] == 0) & (two.spans["step"] == 0)]
    zero = two.steps[two.steps["rank"] == 0]["start"].min()
    for kind, trace in drawn.items():
        mine = spans[spans["kind"] == kind]
        assert min(trace.base) == pytest.approx(1e3 * (mine["start"].min() - zero), abs=1e-3)
        ends = [b + x for b, x in zip(trace.base, trace.x, strict=True)]
        assert max(ends) == pytest.approx(1e3 * (mine["end"].max() - zero), abs=1e-3)
        assert trace.marker.color == theme.KIND_COLOUR[kind]
        assert len(trace.x) == (1 if kind == "optimizer" else 2)  # pieces of one backward are one


def test_phases_are_named_at_borders_between_and_before(two):
    (curve,) = curves(two, 0)
    said = [curve.phase(i) for i in range(len(curve.times))]
    assert said[0] == "before forward" and said[-1] == "in the optimizer"
    found = curve.phases
    assert [kind for kind, *_ in found] == \
        ["forward", "backward", "forward", "backward", "optimizer"]  # fmt: skip
    for time, name in ((found[3][2] + 1e-9, "after backward"), (found[0][2], "in forward")):
        then = dataclasses.replace(curve, times=[time], samples=curve.samples[:1])
        assert then.phase(0) == name


def test_the_fullest_step_is_drawn_of_all_ranks_or_of_one():
    made = sampled(2, steps=3)
    rows = made.memory
    for factor, fullest in ((2, 2), (1, 2), (0, 0)):  # of equal steps the last
        later = rows.assign(step=2, time=rows["time"] + 1.0, bytes=rows["bytes"] * factor)
        report = dataclasses.replace(made, memory=pd.concat([rows, later]))
        assert f"step {fullest}" in report.memory_chart().below
    one = report.memory_chart(rank=1)
    assert set(one.table["rank"]) == {1}
    assert len(areas(one)) == 1


def test_of_many_ranks_four_are_drawn_the_fullest_among_them_and_said_so():
    made = sampled(8, microbatches=1)
    rows = made.memory
    rows = rows.assign(bytes=rows["bytes"].where(rows["rank"] != 3, rows["bytes"] * 3))
    chart = dataclasses.replace(made, memory=rows).memory_chart()
    assert sorted(set(chart.table["rank"])) == [0, 3, 5, 7]
    assert "4 of 8 ranks drawn" in chart.below and "on rank 3" in chart.finding


def test_a_limit_is_a_line_and_a_device_far_larger_is_not(two):
    peak = two.peak_memory
    near = dataclasses.replace(two, meta={**two.meta, "memory_limit": 2 * peak})
    chart = near.memory_chart()
    lines = [s for s in chart.layout.shapes if s.line.dash == "dash"]
    assert [s.y0 for s in lines] == [2 * peak / 1e6] * 2
    assert f"the memory limit: {theme.scaled(2 * peak, 'B')}" in words(chart)
    assert f"of {theme.scaled(2 * peak, 'B')} in backward on rank 1" in chart.finding
    assert chart.layout.yaxis.range[1] > 2 * peak / 1e6
    assert not dataclasses.replace(two, cluster=CLUSTER).memory_chart().layout.shapes
    held = dataclasses.replace(two, cluster=CLUSTER.replace(name="tiny", memory=2 * peak))
    assert any("a device of cluster tiny" in said for said in words(held.memory_chart()))
    full = dataclasses.replace(two, cluster=CLUSTER.replace(name="full", memory=peak // 2))
    said = [n for n in full.memory_chart().layout.annotations if "cluster full" in n.text]
    assert [n.bgcolor for n in said] == [theme.look().paper] * 2  # it stands on dark areas
    run = predicted(pl.Plan(pp=2, microbatches=8))
    just = CLUSTER.replace(memory=int(1.05 * run.peak_memory))
    chart = dataclasses.replace(run, cluster=just).memory_chart(rank=0)
    notes, end = chart.layout.annotations, chart.layout.xaxis.range[1]
    [limit], [peak] = ([n for n in notes if word in n.text] for word in ("a device of", "<b>peak"))
    assert limit.x == (peak.x <= end / 2), "and away from the peak, whose label it would cover"


def test_thousands_of_samples_are_thinned_and_every_peak_stays():
    report = sampled(1, within=500)
    traces = areas(report.memory_chart())["y"]
    assert sum(len(trace.x) for trace in traces) <= 1.1 * MAX_POINTS < len(report.memory)
    stacked = map(sum, zip(*(trace.y for trace in traces), strict=True))
    assert round(max(stacked) * 1e6) == report.peak_memory
    totals = [0, 9, 1, 2, 8, 0, 3, 3, 7, 1] * 30
    kept = thinned(totals, 60)
    assert len(kept) <= 61 and kept == sorted(set(kept)) and kept[-1] == 299
    for low in range(0, 300, 15):
        part = range(low, low + 15)
        assert max(totals[i] for i in part) == max(totals[i] for i in kept if i in part)


def test_two_samples_at_one_time_are_two_samples(two):
    """A replay may put them there: it gives a wait no time."""
    rows = two.memory.assign(time=two.memory["time"].min())
    (curve,) = curves(dataclasses.replace(two, memory=rows), 1)
    assert curve.peak == two.peak_memory  # not the sum of all


def test_a_prediction_and_a_replay_are_drawn_like_a_run_with_their_peaks(two):
    for report in (predicted(pl.Plan(dp=2, microbatches=2)), two.replay(CLUSTER)):
        chart = report.memory_chart()
        assert f"{report.clock} clock" in chart.below
        assert f"<b>peak {theme.scaled(report.peak_memory, 'B')}</b>" in words(chart)
    assert chart.table["bytes"].tolist() == two.memory_chart().table["bytes"].tolist()


def test_what_cannot_be_drawn_is_refused(two):
    empty = synthetic.report(2)
    refuses("no memory was sampled.*legal: what pl.run", empty.memory_chart)
    refuses(r"rank=5.*legal: 0 \| 1", two.memory_chart, rank=5)
    for draw in (view.memory_charts, view.memory_bars):
        refuses("nothing to draw.*legal: {label: report}", draw, {})
        refuses("empty: .*no memory was sampled", draw, {"full": two, "empty": empty})
        refuses(r"runs\['a'\]=3: not a report", draw, {"a": 3})


# ---- several runs --------------------------------------------------------------------------------
def test_runs_stand_on_one_scale_and_each_says_what_is_left_of_the_first():
    runs = stages()
    chart = view.memory_charts(runs)
    peaks = {label: curves(report, 0)[0].peak for label, report in runs.items()}
    assert list(peaks.values()) == sorted(peaks.values(), reverse=True)
    ranges = {chart.layout[f"yaxis{n}"].range for n in ("", 3, 5, 7)}
    assert len(ranges) == 1 and ranges.pop()[1] > peaks["plain"] / 1e6
    heads = [w for w in words(chart) if w.startswith("<b>") and "peak" not in w]
    assert heads[0] == "<b>plain</b>"
    assert heads[3] == f"<b>ZeRO-3</b>: {100 * peaks['ZeRO-3'] / peaks['plain']:.0f} % of plain"
    dots = [s for s in chart.layout.shapes if s.line.dash == "dot"]
    assert [s.y0 for s in dots] == [peaks["plain"] / 1e6] * 3
    named = [note.x for note in chart.layout.annotations if note.text == "peak of plain"]
    assert named == [1] * 3  # away from the runs' own peaks
    near = CLUSTER.replace(memory=int(1.03 * peaks["plain"]))  # its word is there too, above
    held = {label: dataclasses.replace(report, cluster=near) for label, report in runs.items()}
    notes = view.memory_charts(held).layout.annotations
    assert {note.yanchor for note in notes if note.text == "peak of plain"} == {"top"}
    need = f"“ZeRO-3” needs {theme.scaled(peaks['ZeRO-3'], 'B')} at its peak on rank 0, "
    assert chart.finding.startswith(need)
    assert chart.layout.xaxis.title.text == "share of the step (%)"
    assert {round(t.x[-1]) for traces in areas(chart).values() for t in traces} == {100}
    assert list(dict.fromkeys(chart.table["panel"])) == list(runs)


def test_runs_with_limits_of_their_own_are_drawn_with_these(two):
    low, high = (1.5 * two.peak_memory // 1, 2 * two.peak_memory)
    runs = {
        name: dataclasses.replace(two, meta={**two.meta, "memory_limit": int(limit)})
        for name, limit in (("low", low), ("high", high))
    }
    lines = [s for s in view.memory_charts(runs).layout.shapes if s.line.dash == "dash"]
    assert {s.yref: s.y0 for s in lines} == {"y": low / 1e6, "y3": high / 1e6}


def test_a_prediction_may_stand_beside_a_run_and_both_say_their_clock(two):
    chart = view.memory_charts({"theory": predicted(pl.Plan(dp=2)), "run": two})
    assert "rank 0" in chart.below and "clock" not in chart.below
    assert any("(predicted)" in w for w in words(chart))


def test_the_page_has_the_memory_where_there_is_some(two):
    for report, there in ((two, True), (synthetic.report(2), False)):
        assert ('<div id="memory"' in page(report)) == there


def test_bars_are_each_runs_peak_of_its_fullest_rank():
    runs = stages()
    chart, peaks = view.memory_bars(runs), {name: run.peak_memory for name, run in runs.items()}
    assert bars(chart) == peaks
    assert "clock" not in chart.below and "highest peak" in chart.below
    share, most = theme.percent(peaks["ZeRO-3"] / peaks["plain"]), theme.scaled(peaks["plain"], "B")
    assert chart.finding.endswith(f", {share} of the {most} of “plain”")
    alike = view.memory_bars({"a": runs["plain"], "b": runs["plain"]})
    assert alike.finding == f"Memory peaks at {most}"
    assert view.memory_bars(runs, title="mine").finding == "mine"
