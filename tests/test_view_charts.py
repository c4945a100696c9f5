"""Promises of the charts: numbers behind each, one line of text, light and dark, the finding."""

import copy
import dataclasses
import inspect
import json
import math
import pickle
import re
import webbrowser
from itertools import combinations

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import plotly.io as pio
import pytest

import synthetic
from paralab import view
from paralab.interpret.predict import predict
from paralab.observing import _Seen
from paralab.report.report import Report
from paralab.spec import Cluster, Link, ModelSpec, Plan
from paralab.theory.traffic import wire_bytes
from paralab.view import naming, theme
from paralab.view.chart import Chart
from paralab.view.page import page
from refusals import refuses
from test_view_offload import made as offloaded

LINK = Link(alpha=100e-6, bandwidth=1e9)
NASTY = "<a href='x'>b</a>"


def ring(n: float) -> float:
    return 6 * LINK.seconds(n / 4)


def tree(n: float) -> float:
    return 4 * LINK.seconds(n)


SIZES = [1000 * 2**i for i in range(14)]
CURVES = {"ring": {n: ring(n) for n in SIZES}, "tree": {n: tree(n) for n in SIZES}}
STATES = {"parameters": 15e9, "gradients": 15e9, "master": 30e9, "moments": 60e9}


def scaled(form: str, ranks: int, seconds: float, samples: int) -> dict:
    return {"form": form, "ranks": ranks, "clock": "replayed", "step_time": seconds,
            "samples": samples}  # fmt: skip


ROWS = [
    scaled(form, n, 0.01 / kept ** (n > 1), n)
    for form, kept in (("overlapped", 0.9), ("naive", 0.5))
    for n in (1, 2, 4)
]


def points(alpha: float = 1e-4, bandwidth: float = 1e9) -> list[dict]:
    return [{"op": "all_reduce", "ranks": 2, "payload_bytes": n, "wire_bytes": n,
             "seconds": alpha + n / bandwidth} for n in SIZES]  # fmt: skip


def traced(factor: float = 1.0) -> Report:
    """Two ranks on two nodes exchange 1000 bytes: what `pl.trace` leaves behind."""
    spans, calls = [], []
    for rank in (0, 1):
        for id_, lane, kind, start, end, after in (
            (rank, "compute", "compute", 0.0, 1.0, ()),
            (rank + 2, "comm:world", "comm", 1.0, 4.0, (rank,)),
            (rank + 4, "compute", "wait", 1.0, 4.0, (rank + 2,)),
        ):
            spans.append((id_, rank, 0, lane, kind, 0, 0, -1, start * factor, end * factor,
                          0.0, after))  # fmt: skip
        for op in ("send", "recv"):
            calls.append((0, rank, 0, op, "world", (0, 1), 1 - rank, "inter", "data", 1000,
                          wire_bytes(op, 1000, 2), factor, 4 * factor, rank + 2))  # fmt: skip
    steps = [(rank, 0, 0.0, 4.0 * factor, 0.0) for rank in (0, 1)]
    made = synthetic.tables(spans=spans, collectives=calls, steps=steps)
    return Report(clock="replayed", model=None, plan=Plan(dp=2),
                  meta={"function": "swap", "nodes": [0, 1]}, **made)  # fmt: skip


def stretched(report: Report, factor: float) -> Report:
    changed = {}
    for name in ("spans", "collectives", "steps"):
        frame = getattr(report, name).copy()
        frame[["start", "end"]] *= factor
        changed[name] = frame
    return dataclasses.replace(report, **changed)


def forms() -> dict[str, Report]:
    return {form: synthetic.report(2, grad_sync=form) for form in ("bucketed", "overlapped")}


def charts() -> dict[str, Chart]:
    two = forms()
    report, with_memory = two["overlapped"], synthetic.with_memory(synthetic.report(2))
    return {
        "timeline": report.timeline(),
        "traced": traced().timeline(),
        "timelines": view.timelines(*two.values()),
        "traffic": report.traffic_chart(),
        "loss": report.loss_chart(),
        "losses": view.losses(two),
        "link": view.link_fit(points()),
        "algorithms": view.algorithms(CURVES, CURVES),
        "bytes": view.bytes_bars({"7.5 B": STATES}, {"A100": 80e9}),
        "seconds": view.seconds_bars({"a": {"compute": 2.0, "tp": 0.5}}, title="tp is a fifth"),
        "scaling": view.scaling(ROWS),
        "memory": with_memory.memory_chart(),
        "memories": view.memory_charts({"a": with_memory, "b": with_memory}),
        "peaks": view.memory_bars({"a": with_memory}),
        "offloaded": offloaded().timeline(),
        "links": offloaded().traffic_chart(),
        "tiers": offloaded().memory_chart(),
    }


@pytest.fixture(scope="module")
def light() -> dict[str, Chart]:
    return charts()


# ---- every chart ---------------------------------------------------------------------------------
def test_every_chart_has_numbers_behind_it_and_says_its_finding_in_a_line(light):
    for name, chart in light.items():
        assert len(chart.table) > 0, name
        assert repr(chart).startswith(f"Chart({chart.finding[:100]}"), name
    long = repr(Chart().retitled("x" * 300, ""))
    assert len(long) == 110 and long.endswith("…)")


def test_what_a_notebook_compares_of_a_chart_holds_no_time():
    """Trace names and types, for any times: also where a fit has no latency."""
    two, one = forms(), synthetic.with_memory(synthetic.report(2))
    later = one.memory.assign(time=one.memory["time"] * 3.7)
    late = dataclasses.replace(stretched(one, 3.7), memory=later)
    slow = {"bucketed": stretched(two["bucketed"], 3.7), "overlapped": two["overlapped"]}
    apart, cross = (
        view.algorithms({"ring": {1: 1.0, 10: at}, "tree": {1: 2.0, 10: 2.0}}) for at in (1.0, 3.0)
    )
    assert [t.name for t in apart.data] == [t.name for t in cross.data]
    pairs = [
        (traced().timeline(), traced(3.7).timeline()),
        (view.timelines(*two.values()), view.timelines(*slow.values())),
        (view.link_fit(points()), view.link_fit(points(alpha=0.0))),
        (view.link_fit(points()), view.link_fit(points(alpha=10.0))),
        (view.scaling(ROWS), view.scaling([{**r, "step_time": 7.0} for r in ROWS])),
        (view.memory_charts({"a": one}), view.memory_charts({"a": late})),
        *((getattr(a, name)(), getattr(b, name)())
          for a, b in ((one, late), (offloaded(), offloaded(factor=3.7)))
          for name in ("timeline", "traffic_chart", "memory_chart")),
    ]  # fmt: skip
    for a, b in pairs:
        assert [(t.name, t.type) for t in a.data] == [(t.name, t.type) for t in b.data]


def test_a_chart_is_shown_checked_copied_and_saved_as_plotlys_figures_are(light, monkeypatch):
    import plotly.io as pio

    monkeypatch.setattr(pio.renderers, "default", "plotly_mimetype")
    for chart in light.values():
        bundle = chart._repr_mimebundle_()
        assert bundle == go.Figure(chart)._repr_mimebundle_()
        assert set(bundle) == {"application/vnd.plotly.v1+json"}
        with pytest.raises(ValueError, match="opacity"):
            chart.update_traces(opacity=7)
        for twin in (copy.deepcopy(chart), pickle.loads(pickle.dumps(chart))):
            assert type(twin) is Chart and twin == chart
            assert twin.table.equals(chart.table) and repr(twin) == repr(chart)
        json.loads(chart.to_json(), parse_constant=pytest.fail)
        assert "bdata" not in chart.to_json()  # lists, and no binary blobs


@pytest.mark.parametrize("made", ["write_image", "to_image"])
def test_a_picture_is_as_wide_as_the_lines_of_its_title(light, monkeypatch, made):
    asked = []
    how = inspect.signature(getattr(pio, made))
    monkeypatch.setattr(
        pio, made, lambda *a, **named: asked.append(how.bind(*a, **named).arguments["width"])
    )
    for given in ({}, {"width": 900}):
        getattr(light["timelines"], made)("png", **given)
    assert asked == [theme.ALONE.width, 900]


def test_a_console_without_a_browser_says_how_to_save_a_chart(light, monkeypatch, capsys):
    monkeypatch.setattr(pio.renderers, "default", "browser")
    monkeypatch.setattr(webbrowser, "_tryorder", [])
    chart = next(iter(light.values()))
    chart._ipython_display_()
    said = f"{chart!r}: no browser here; .write_html('chart.html') saves the picture\n"
    assert capsys.readouterr() == (said, "")


def test_labels_cannot_be_markup():
    two, odd = forms(), synthetic.with_memory(synthetic.report(2))
    rows = odd.memory.assign(category=odd.memory["category"].replace("other", NASTY))
    spans = odd.spans.assign(lane=odd.spans["lane"].replace("comm:dp", "comm:<b onclick=1>"))
    named = dataclasses.replace(odd, collectives=odd.collectives.assign(axis=NASTY), spans=spans)
    own = dataclasses.replace(traced(), meta={"function": NASTY})
    for chart in (
        view.timelines(*two.values(), labels=[NASTY, "b"]),
        view.losses({NASTY: two["bucketed"], "b": [1.0, 2.0]}),
        view.algorithms({NASTY: CURVES["ring"], "b": CURVES["tree"]}),
        view.bytes_bars({NASTY: STATES}, {NASTY: 80e9}),
        view.scaling([{**ROWS[0], "form": NASTY}]),
        own.timeline(), own.traffic_chart(), named.timeline(), named.traffic_chart(),
        dataclasses.replace(odd, memory=rows).memory_chart(),
        view.memory_charts({NASTY: odd}), view.memory_bars({NASTY: odd}),
    ):  # fmt: skip
        tags = set(re.findall(r"<(/?\w+)", chart.to_json().replace("\\u003c", "<")))
        assert tags <= {"b", "/b", "br", "sup", "/sup", "span", "/span", "extra", "/extra"}


def test_a_chart_knows_the_two_lines_of_its_title_and_takes_more_words(light):
    chart = view.bytes_bars({"7.5 B": STATES}).said_below("more")
    assert chart.finding == "7.5 B needs 120 GB"
    assert chart.below == "1 GB = 10<sup>9</sup> bytes · more"
    # plotly's own subtitle falls on the title in a live figure.
    assert all(c.layout.title.subtitle.text is None for c in light.values())
    assert (Chart().finding, Chart().below) == ("", "")


# ---- light and dark ------------------------------------------------------------------------------
def colours(value: object) -> set[str]:
    return set(re.findall(r"#[0-9A-Fa-f]{6}", json.dumps(value)))


def test_light_and_dark_differ_in_paper_and_ink_and_in_no_meaning(light):
    with theme.drawn("dark"):
        dark = charts()
        # black would vanish there, and a wait would shine
        assert theme.axis_colour("pp") == theme.colour("comm", "comm:pp") == theme.DARK.ink
        assert theme.colour("wait") == theme.DARK.wait
    own = {name: colours(dataclasses.asdict(look)) for name, look in theme.LOOKS.items()}
    for name, chart in light.items():
        day, night = colours(chart.to_plotly_json()), colours(dark[name].to_plotly_json())
        plain = {"#000000", "#FFFFFF"}  # words on boxes
        assert day - own["light"] - plain == night - own["dark"] - plain, name
        assert not night & (own["light"] - own["dark"] - {"#FFFFFF"}), name
        assert dark[name].layout.template.layout.paper_bgcolor == theme.DARK.paper


def test_the_theme_is_chosen_by_call_and_by_no_other_word():
    def paper() -> str:
        return view.bytes_bars({"a": STATES}).layout.template.layout.paper_bgcolor

    with theme.drawn("dark"):
        assert paper() == theme.DARK.paper
        view.use_theme("light")
        assert paper() == theme.LIGHT.paper
    assert paper() == theme.LIGHT.paper
    refuses(r"theme='blue'.*legal: 'light' \| 'dark'", view.use_theme, "blue")


def linear(colour: str) -> np.ndarray:
    values = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def contrast(a: str, b: str) -> float:
    low, high = sorted(float(linear(c) @ [0.2126, 0.7152, 0.0722]) for c in (a, b))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("look", theme.LOOKS.values(), ids=theme.LOOKS)
def test_lines_and_words_stand_out_from_their_paper(look):
    """WCAG 2.1: 4.5 for text (1.4.3), 3 for what has to be seen of a picture (1.4.11)."""
    assert all(contrast(c, look.paper) >= 4.5 for c in (look.ink, look.faint))
    assert all(contrast(c, look.paper) >= 3 for c in look.series)
    fills = [*theme.KIND_COLOUR.values(), *theme.CATEGORY_COLOUR.values(), *look.series]
    assert all(contrast(theme.on(c), c) >= 4 for c in fills)
    # Who lacks cones for red or for green sees brightness and blue; who lacks blue ones, the rest.
    for seen in ([[0.2126, 0.7152, 0.0722], [0, 0, 1]], [[1, 0, 0], [0, 1, 0]]):
        places = [np.cbrt(seen @ linear(colour)) for colour in look.series]
        assert all(np.linalg.norm(a - b) > 0.1 for a, b in combinations(places, 2))


def test_five_curves_differ_in_colour_dash_and_marker():
    for name in ("ink", "dash", "symbol"):
        assert len({style[name] for style in theme.series("vwxyz").values()}) == 5


@pytest.mark.parametrize(("value", "unit", "said"), [
    (1.25e9, "B/s", "1.25 GB/s"), (999.96, "B", "1 kB"), (107e-6, "s", "107 µs"), (0, "B", "0 B"),
    (4096, "B", "4.1 kB"), (90, "s", "90 s"), (1.6e16, "B", "16,000 TB"), (-2e-3, "s", "-2 ms"),
])  # fmt: skip
def test_numbers_are_said_with_three_digits_and_a_decimal_prefix(value, unit, said):
    assert theme.scaled(value, unit) == said


def test_a_number_and_its_unit_are_on_one_line_of_a_title():
    for text in ("they take 45 %", "it takes 1.3 ms, twice", "1 GB/s · 2 kB", "about 5 sheep"):
        lines = theme.broken(text, 1, 1).split("<br>")  # a word per line
        assert " ".join(lines) == text
        assert not any(re.match(r"(%|ms|GB/s|kB|·)", line) for line in lines)
    assert theme.broken("about 5 sheep", 1, 1) == "about<br>5<br>sheep"


# ---- timelines -----------------------------------------------------------------------------------
def test_timelines_put_several_reports_on_one_time_scale():
    two = forms()
    chart = view.timelines(*two.values(), step=2)
    assert list(chart.table["report"].unique()) == ["bucketed", "overlapped"]
    drawn = sorted((1e3 * box["start"], 1e3 * box["end"]) for box in synthetic.boxes(chart))
    expected, lasted = [], []
    for report in two.values():
        steps, spans = (t[t["step"] == 2] for t in (report.steps, report.spans))
        zero = steps["start"].min()
        expected += [(round(1e3 * (s - zero), 6), round(1e3 * (e - zero), 6))
                     for s, e in zip(spans["start"], spans["end"], strict=True)]  # fmt: skip
        lasted.append(1e3 * (steps["end"].max() - zero))
    assert np.array(drawn) == pytest.approx(np.array(sorted(expected)), abs=1e-5)
    assert [line.x0 for line in chart.layout.shapes] == pytest.approx(lasted)
    # One under the other: no box of the second stands above the first one's last row.
    first, second = chart.layout.shapes
    rows = {y for bar in chart.data for y in bar.y}
    assert first.y1 < second.y0 and not any(first.y1 < y < second.y0 for y in rows)
    axis = chart.layout.yaxis
    assert list(axis.ticktext) == ["<b>rank 0</b>", "dp", "<b>rank 1</b>", "dp"] * 2
    assert list(axis.tickvals) == sorted(set(axis.tickvals))


def test_the_seconds_behind_a_bar_are_those_of_the_operations_own_link():
    dgx = Cluster.preset("dgx-a100")
    slow = dgx.replace(collectives={"all_reduce": Link(alpha=0.0, bandwidth=1e8)})
    for cluster, link in ((dgx, dgx.intra), (slow, slow.collectives["all_reduce"])):
        report = predict(ModelSpec.preset("laptop"), Plan(dp=2), cluster)
        size = int(report.traffic()["bytes"].max())
        said = report.traffic_chart(matrix=False).layout.annotations[0].text
        assert said.endswith(theme.scaled(size / link.bandwidth, "s"))


def test_a_step_takes_as_long_as_on_the_rank_that_takes_longest():
    """Ranks that begin one after the other, as observed ones may: its picture is longer."""
    rows = [(r, r, 1, "compute", "forward", 0, 0, 0, r / 2, 1 + r / 2, 1.0, ()) for r in range(2)]
    steps = [(r, 1, r / 2, 1 + r / 2, 0.0) for r in range(2)]
    report = Report(clock="measured", model=synthetic.MODEL, plan=Plan(dp=2),
                    **synthetic.tables(spans=rows, steps=steps))  # fmt: skip
    assert report.step_time == 1.0 and "1000.0 ms" in report.timeline().below
    drawn = view.timelines(report, dataclasses.replace(report, clock="replayed"))
    assert "1000.0 ms measured" in drawn.finding and drawn.layout.shapes[0].x0 == 1500.0
    assert "<b>last rank 1500.0 ms</b>" in [note.text for note in drawn.layout.annotations]
    long = view.timelines(report, report, labels=["x" * 60, "y"])  # no room at the line for both
    assert long.layout.annotations[0].text.endswith("  <b>last rank 1500.0 ms</b>")


def test_timelines_say_who_is_faster_and_by_how_much():
    fast = synthetic.report(2)
    slow = dataclasses.replace(stretched(fast, 2.5), plan=fast.plan.replace(grad_sync="bucketed"))
    said = view.timelines(slow, fast).finding
    assert said.startswith("Overlapped takes ") and said.endswith(", 2.50 times as long")
    assert "All take the same time" in view.timelines(fast, fast).finding
    replayed = dataclasses.replace(fast, clock="replayed")
    wall = view.timelines(stretched(fast, 2.5), replayed)
    assert re.fullmatch(r"dp=2, overlapped: [\d.]+ ms measured, [\d.]+ ms replayed", wall.finding)
    assert "measured: wall clock" in wall.below and "replayed: one virtual" in wall.below
    for factor, said in ((0.9, "10 % below"), (3, "3 times that"), (1.004, "within 1 % of that")):
        expect = dataclasses.replace(stretched(fast, factor), clock="predicted")
        assert view.timelines(expect, replayed).finding.endswith(f"(the prediction is {said})")
    tall = dataclasses.replace(expect, model=fast.model.replace(layers=6))  # is no error of theory
    layers = f"layers={fast.model.layers}"
    drawn = view.timelines(tall, replayed).table["report"]
    assert list(drawn.unique()) == ["layers=6", layers]
    assert "the prediction" not in view.timelines(tall, replayed).finding
    whole = dataclasses.replace(stretched(fast, 2.5), plan=fast.plan.replace(recompute="full"))
    said = view.timelines(fast, whole).finding
    assert said.startswith("recompute=none takes") and "; recompute=full takes" in said
    moved = [{"optimizer": "cpu"}, {"optimizer": "cpu", "cached": True}]  # as one writes them
    plans = [Plan(dp=2, zero_stage=1, offload=offload) for offload in moved]
    found = naming.apart([dataclasses.replace(fast, plan=plan) for plan in plans])
    assert found == [f"offload={offload}" for offload in moved]
    plans = [Plan(dp=2), Plan(dp=2, recompute="full"), Plan(dp=4)]  # of which two have one name
    found = naming.apart([dataclasses.replace(fast, plan=plan) for plan in plans])
    assert found == ["dp=2, recompute=none", "dp=2, recompute=full", "dp=4, recompute=none"]


def test_a_duration_stands_at_the_end_of_its_run_or_behind_a_name_that_reaches_as_far():
    fast = synthetic.report(2)
    for factor, behind in ((2, False), (8, True)):
        chart = view.timelines(fast, stretched(fast, factor), labels=["torch.optim.AdamW", "b"])
        [name] = [n for n in chart.layout.annotations if n.text.startswith("<b>torch.optim.AdamW")]
        assert name.text.endswith(" ms</b>") == behind
        ends = [n.x for n in chart.layout.annotations if n.text.endswith(" ms</b>") and n != name]
        assert len(ends) == 2 - behind  # at their lines
        assert (chart.layout.shapes[0].y0 > name.y) == behind  # the line does not cross the name


def test_of_many_short_boxes_next_to_one_another_none_has_an_edge():
    one = synthetic.report(1)
    ids, at = np.arange(300), np.arange(301) / 300
    spans = pd.DataFrame([one.spans.iloc[0]] * 300).assign(
        id=ids, step=0, kind=np.where(ids % 2, "optimizer", "compute"), start=at[:-1], end=at[1:]
    )
    steps = one.steps[one.steps["step"] == 0].assign(start=0.0, end=1.0)
    many = dataclasses.replace(one, spans=spans, steps=steps, collectives=one.collectives[:0])
    widths = [set(bar.marker.line.width) for bar in view.timelines(many).data]
    assert widths == [{0}, {0}]


def test_calls_thinner_than_a_pixel_have_an_edge_of_their_colour_not_of_paper():
    cluster = Cluster.preset("dgx-a100").replace(intra=Link(alpha=1e-7, bandwidth=1e12))
    chart = predict(synthetic.MODEL, Plan(tp=2), cluster, steps=1).timeline()
    [calls] = [bar for bar in chart.data if bar.name == "communication, tp"]
    assert max(calls.x) < 0.002 * chart.layout.xaxis.range[1]
    assert set(calls.marker.line.color) == {theme.axis_colour("tp")}


def test_reports_that_look_alike_are_numbered_and_many_ranks_are_cut_and_said_so():
    one = synthetic.report(4)
    many = view.timelines(one, one, one, one)
    names = [f"{n}: dp=4, overlapped, measured" for n in range(1, 5)]
    assert list(many.table["report"].unique()) == names
    assert set(many.table["rank"]) == {0, 1, 2}
    assert "the first 3 ranks of each" in many.below
    assert set(view.timelines(one, one, ranks=[3]).table["rank"]) == {3}


# ---- a traced function ---------------------------------------------------------------------------
def test_a_traced_function_is_named_and_its_sends_say_to_whom():
    timeline = traced().timeline()
    assert timeline.finding == "Swap on 2 ranks: each rank sends 1 kB in 1 call"
    comm = next(bar for bar in timeline.data if bar.name == "communication, world")
    assert list(comm.text) == ["→1 ←1", "→0 ←0"]
    assert comm.marker.color == theme.AXIS_COLOUR["dp"]
    assert any("send to rank 1 (data): 1,000 bytes" in text for text in comm.hovertext)
    assert "of the function (ms)" in timeline.layout.xaxis.title.text


def test_a_legend_has_a_colour_once_and_its_entry_hides_all_of_that_colour():
    both = view.timelines(traced(), forms()["overlapped"]).data
    shown = [(bar.marker.color, bar.name) for bar in both if bar.showlegend is not False]
    assert len({colour for colour, _ in shown}) == len(shown)
    assert "communication, dp and world" in {name for _, name in shown}
    sends = [bar for bar in both if bar.marker.color == theme.AXIS_COLOUR["dp"]]
    assert len(sends) == 2 and len({bar.legendgroup for bar in sends}) == 1
    four = synthetic.report(4)
    sent = four.spans["lane"].str.startswith("comm:")
    for groups, said in ((3, "g0 and g1 and g2"), (4, "g0 and 3 other groups")):
        lane = four.spans["lane"].copy()
        lane[sent] = [f"comm:g{i % groups}" for i in range(sent.sum())]
        bars = dataclasses.replace(four, spans=four.spans.assign(lane=lane)).timeline().data
        assert f"communication, {said}" in {bar.name for bar in bars}


def test_the_title_of_an_observed_step_counts_that_step_alone_and_the_rank_that_sends_most():
    report = traced()
    more = report.collectives.copy()
    more.loc[more["rank"] == 1, "wire_bytes"] *= 2
    steps = pd.concat([report.steps, report.steps.assign(step=1)])
    calls = pd.concat([report.collectives, more.assign(step=1, span=-1)])
    for tables, said in (
        ({"collectives": more}, "rank 1 sends 2 kB in 1 call, and no rank sends more"),
        ({"steps": steps, "collectives": calls}, "each rank sends 1 kB in 1 call"),
        ({"collectives": more.iloc[:0]}, "no rank sends anything"),
        ({"collectives": more.assign(step=1)}, "no rank sends anything in step 0"),
    ):
        chart = dataclasses.replace(report, **tables).timeline(step=0)
        assert chart.finding == f"Swap on 2 ranks: {said}"
        assert ("of step 0 (ms)" in chart.layout.xaxis.title.text) == ("steps" in tables)


def test_messages_between_nodes_are_framed_where_others_stay_inside():
    report = traced()
    assert "framed" not in report.timeline().below  # all of them cross: nothing to tell apart
    inside = report.collectives["rank"] == 0
    calls = report.collectives.assign(level=report.collectives["level"].mask(inside, "intra"))
    chart = dataclasses.replace(report, collectives=calls).timeline()
    assert "framed: between nodes" in chart.below
    comm = next(bar for bar in chart.data if bar.name == "communication, world")
    assert list(comm.marker.line.color) == [theme.LIGHT.paper, theme.LIGHT.ink]


def test_traffic_of_a_traced_function_has_its_level_and_no_gradient_optimum():
    chart = traced().traffic_chart()
    assert chart.finding == "Swap on 2 ranks: a rank sends 1 kB"
    assert (*chart.data[1].y, chart.data[1].name) == ("between nodes", "world, send")
    borders = {shape.xref for shape in chart.layout.shapes}  # of nodes, on the matrix alone
    assert "x2" not in borders and "Ψ" not in chart.to_json()
    assert chart.table["bytes"].sum() == 2000


def test_the_page_of_a_traced_function_holds_every_figure_by_day_and_by_night():
    text = page(traced())
    assert "paralab: swap on 2 ranks" in text
    figures = json.loads(re.search(r"const FIGURES = (\{.*?\});\n", text).group(1))
    assert set(figures) == {"light", "dark"}
    for name, found in figures.items():
        assert set(found) == {"timeline", "traffic"}  # and no loss
        font = found["timeline"]["layout"]["template"]["layout"]["font"]
        assert font["color"] == theme.LOOKS[name].ink


# ---- losses --------------------------------------------------------------------------------------
def test_losses_that_coincide_are_drawn_from_wide_to_narrow():
    chart = view.losses({"one": [3.0, 2.0, 1.0], "two": [3.0, 2.0, 1.00003], "three": [3, 2, 1]})
    assert chart.finding == "All curves coincide: their losses differ by at most 0.0001"
    assert not chart.layout.yaxis.tickformat  # which would write 5.55 at several ticks
    one, two, three = (trace.line.width for trace in chart.data)
    assert one > two > three
    assert chart.table["loss"].tolist() == [3, 2, 1, 3, 2, 1.00003, 3, 2, 1]


@pytest.mark.parametrize(("losses", "said"), [
    ({"a": [3.0, 2.0], "b": [3.0, 2.5]}, "a ends at 2.000, b at 2.500 nats"),
    ({"a": [3.0, 2.0], "b": [3.0, 2.0]}, "All curves coincide: their losses differ by at most 0"),
    ({"a": [3.0, 2.0], "b": [3.0, math.nan]}, "b diverged at step 1"),
    ({"a": [math.inf, 2.0], "b": [3.0, math.nan]}, "a diverged at step 0 and b diverged at step 1"),
])  # fmt: skip
def test_losses_say_where_each_ends_or_which_diverged(losses, said):
    assert view.losses(losses).finding == said


def test_losses_of_reports_are_held_against_guessing():
    report = synthetic.report(2)
    chart = view.losses({"a": report, "b": report}, title="<b> & co")
    assert chart.finding == "&lt;b&gt; &amp; co"
    assert f"{report.plan.global_batch} samples per step" in chart.below
    assert len(chart.layout.shapes) == 1  # guessing evenly, once
    refuses("old.*has no losses", view.losses, {"old": dataclasses.replace(report, losses=[])})


# ---- links ---------------------------------------------------------------------------------------
def test_a_link_whose_points_show_no_bandwidth_is_not_said_to_have_an_endless_one():
    chart = view.link_fit(r for _, r in pd.DataFrame(points()).assign(seconds=1e-4).iterrows())
    assert "100 µs of latency and no more for the bytes, up to " in chart.finding


def test_the_link_fit_finds_the_link_that_made_the_points():
    original = points(alpha=250e-6, bandwidth=2e9)
    chart = view.link_fit(original)
    assert chart.finding.startswith("all_reduce on 2 ranks: 250 µs of latency and 2 GB/s")
    assert "below 500 kB latency" in chart.finding
    frame, by_name = chart.table, {t.name: t for t in chart.data}
    assert frame["fitted"].tolist() == pytest.approx(frame["seconds"].tolist())
    assert list(by_name["half is latency"].x) == pytest.approx([500e3])
    assert list(by_name["measured"].y) == frame["seconds"].tolist()
    assert "measured (wall clock)" in chart.below
    assert "fitted" not in original[0]  # the caller's rows stay as they are


def test_algorithms_mark_where_the_fastest_changes():
    chart = view.algorithms(CURVES, {"ring": [(64e3, 1e-3)]})
    # 6 (alpha + n / 4 beta) = 4 (alpha + n / beta): at n = 0.8 alpha beta = 80 kB.
    by_name = {t.name: t for t in chart.data}
    assert list(by_name["crossover"].x) == pytest.approx([80e3], rel=0.02)
    assert chart.finding == "Tree is fastest below 79 kB, ring above"
    assert len(chart.table) == 2 * len(SIZES) + 1
    assert "markers: replayed" in chart.below
    assert by_name["ring, replayed"].marker.symbol == "circle-open"
    assert by_name["ring, replayed"].marker.color == by_name["ring"].line.color
    assert chart.layout.annotations[0].text == "<b>equal at 79 kB</b>"  # as the ring there is one
    assert view.algorithms(CURVES).layout.annotations[0].text == "<b>79 kB</b>"


def line(*seconds: float) -> dict[float, float]:
    """A curve at 1, 10, 100 kB and 1 MB."""
    return dict(zip((1e3, 1e4, 1e5, 1e6), seconds, strict=False))


A = line(1e-6, 1e-5, 1e-4, 1e-3)
ROUNDED = {n: s * (1 + (1e-15, -1e-15)[i % 2]) for i, (n, s) in enumerate(A.items())}
DOUBLE = {n: 2 * s for n, s in A.items()}


@pytest.mark.parametrize(("curves", "said"), [
    ({"ring": line(1e-3)}, "Ring: 1 ms at 1 kB"),
    ({"ring": CURVES["ring"]}, "Ring: 602 µs at 1 kB, "),
    ({"a": A, "b": {n: 4 * s for n, s in A.items()}},
     "a is fastest everywhere: at 1 MB b needs 4.0 times as much"),
    ({"a": A, "b": ROUNDED}, "a and b are equal everywhere"),
    ({"a": A, "b": ROUNDED, "c": DOUBLE},
     "a is fastest everywhere: at 1 MB c needs 2.0 times as much"),
    ({"a": A, "b": ROUNDED, "c": dict.fromkeys(A, 5e-5)}, "a is fastest below 50 kB, c above"),
    ({"a": A, "b": {n: 1.01 * s for n, s in A.items()}},
     "a is fastest everywhere: at 1 MB b needs 1 % more"),
    ({"a": A, "b": {n: s * s * 1e6 for n, s in A.items()}}, "a is fastest everywhere: at 1 MB "),
    ({"b": {n: s * s * 1e6 for n, s in A.items()}, "a": A}, "a is fastest everywhere: at 1 MB "),
    ({"a": A, "b": {n: max(s, 1e-5) for n, s in A.items()}}, "a is fastest everywhere: at 1 MB "),
])  # fmt: skip
def test_algorithms_say_which_is_fastest_where_and_rounding_errors_cross_nothing(curves, said):
    chart = view.algorithms(curves)
    assert chart.finding == said if said[-1] != " " else chart.finding.startswith(said)
    assert "everywhere" not in said or not chart.layout.shapes


@pytest.mark.parametrize("meet, side", [(3e4, "left"), (9.5e5, "right")])
def test_the_label_of_a_crossover_at_the_right_end_is_left_of_its_line(meet, side):
    sizes = (1e3, meet, 1e6)
    curves = {"a": {n: n for n in sizes}, "b": dict.fromkeys(sizes, meet)}
    (label,) = view.algorithms(curves, {"a": {1e3: 1e3}}).layout.annotations
    assert label.xanchor == side


# ---- memory --------------------------------------------------------------------------------------
def test_bytes_are_stacked_by_category_in_fixed_order_and_colours():
    chart = view.bytes_bars({"a": {"other": 1e9, **STATES}, "b": {"parameters": 2e9}})
    assert [t.name for t in chart.data] == [
        "parameters", "gradients", "master weights", "moments", "other",
    ]  # fmt: skip
    assert [t.marker.color for t in chart.data][:2] == list(theme.CATEGORY_COLOUR.values())[:2]
    sizes = [pair for t in chart.data for pair in zip(t.y, t.x, strict=True)]
    assert [sum(x for y, x in sizes if y == label) for label in "ab"] == [121.0, 2.0]
    assert "(GB)" in chart.layout.xaxis.title.text and "10<sup>9</sup>" in chart.below
    assert {a.text.strip() for a in chart.layout.annotations} == {"121 GB", "2 GB"}
    assert chart.table["bytes"].sum() == 123e9
    assert chart.finding == "a needs 121 GB"
    equal = view.bytes_bars({"a": STATES, "b": STATES, "c": {"other": 1.0}})
    assert equal.finding == "a and b each need 120 GB"
    numbers = view.bytes_bars({"46": {"other": 3e9}, "1": STATES}).layout.annotations
    assert [note.y for note in numbers[:2]] == [0, 1]  # a place: the labels read like places


@pytest.mark.parametrize(("bars", "said"), [
    ({"7.5 B": STATES}, "7.5 B needs 120 GB, 1.5 times the 80 GB of A100"),
    ({"a": {"other": 81e9}}, "a needs 81 GB, 1 % more than the 80 GB of A100"),
    ({"a": {"other": 79.9e9}}, "a needs 79.9 GB, more than 99 % of the 80 GB of A100"),
    ({"small": {"other": 20e9}}, "Small needs 20 GB, 25 % of the 80 GB of A100"),
])  # fmt: skip
def test_the_title_says_whether_it_fits(bars, said):
    assert view.bytes_bars(bars, {"A100": 80e9}).finding == said


def test_a_bar_may_be_a_series_of_a_table():
    parts = pd.Series({"parameters": 40e9, "gradients": 10e9})
    of_peaks = pd.concat([parts, pd.Series({"total": 50e9})])  # as a column of report.peaks()
    for column in (parts, of_peaks, {"total": 50e9}):
        assert view.bytes_bars({"a": column}).finding == "a needs 50 GB"
    assert "50 s" in view.seconds_bars({"a": parts / 1e9}, title="").to_json()


def test_capacities_are_lines_through_no_number():
    chart = view.bytes_bars({"7.5 B": STATES}, {"A100": 80e9, "cluster": 64e12})
    edged = [(80.0, "solid"), (80.0, "dash")]  # paper behind the dashes: seen on a dark bar
    assert [(line.x0, line.line.dash) for line in chart.layout.shapes] == edged
    assert "cluster: 64 TB, far beyond this axis" in chart.below
    assert "<b>A100</b>: 80 GB" in {a.text for a in chart.layout.annotations}
    assert {trace.insidetextanchor for trace in chart.data} == {"middle"}
    crossed = view.bytes_bars({"a": {"parameters": 40e9, "activations": 60e9}}, {"A100": 70e9})
    assert [trace.insidetextanchor for trace in crossed.data] == ["middle", "start"]
    single = view.bytes_bars({"small": {"other": 20e9}}, {"A100": 80e9})
    assert single.data[0].text == ("",)  # its number is behind it, once
    close = view.bytes_bars({"a": STATES}, {"first": 80e9, "second": 81e9, "third": 10e9})
    rows = {a.text: a.y for a in close.layout.annotations}
    assert rows["<b>first</b>: 80 GB"] != rows["<b>second</b>: 81 GB"]


def test_seconds_are_stacked_by_part_in_the_colours_of_timelines():
    parts = {"compute": 2.0, "bubble": 0.25, "tp": 0.5, "rounding": 0.0}
    chart = view.seconds_bars({"a": parts, "b": {"tp": 0.1}}, title="tp is a fifth")
    colours = {t.name: t.marker.color for t in chart.data}
    assert colours.pop("rounding") in theme.look().series
    assert colours == {"compute": theme.KIND_COLOUR["compute"], "tp": theme.axis_colour("tp"),
                       "bubble": theme.look().wait}  # fmt: skip
    assert {a.text.strip() for a in chart.layout.annotations} == {"2.75 s", "100 ms"}
    assert chart.finding == "tp is a fifth" and chart.table["seconds"].sum() == 2.85
    assert "(s)" in chart.layout.xaxis.title.text
    short = view.seconds_bars({"a": {"tp": 2e-3}}, title="short", clock="predicted")
    assert (chart.below, short.below) == ("", "predicted: theory alone")
    refuses("clock='guessed'", view.seconds_bars, {"a": {"tp": 1}}, title="", clock="guessed")
    assert "(ms)" in short.layout.xaxis.title.text and short.data[0].x == (2.0,)


# ---- scaling -------------------------------------------------------------------------------------
def test_scaling_holds_every_point_against_what_one_rank_does_alone():
    chart = view.scaling(list(map(pd.Series, reversed(ROWS))))  # rows of a table, in any order
    frame, by_name = chart.table.set_index(["form", "ranks"]), {t.name: t for t in chart.data}
    assert frame.loc[("naive", 4), "efficiency"] == pytest.approx(0.5)
    assert frame.loc[("naive", 4), "throughput"] == pytest.approx(200.0)
    assert chart.finding == "On 4 ranks overlapped keeps 90 % of the ideal throughput, naive 50 %"
    assert list(by_name["ideal"].y) == pytest.approx([100 * n for n in by_name["ideal"].x])
    assert [a.text for a in chart.layout.annotations] == [
        "<b>naive 50 %</b>", "<b>overlapped 90 %</b>", "<b>ideal</b>"]  # fmt: skip


def test_a_form_is_held_against_its_own_fewest_ranks():
    strong = [scaled("strong", n, n**0.1, 140 * n) for n in (1, 8)]
    chart = view.scaling([*strong, *(scaled("weak", n, n**0.1, 100 * n) for n in (2, 8))])
    share = chart.table.set_index(["form", "ranks"])["efficiency"]
    assert share["strong", 8] == pytest.approx(8**-0.1)
    assert share["weak", 8] == pytest.approx(4**-0.1)
    ideals = [t.y[-1] for t in chart.data if t.name == "ideal"]
    assert ideals == pytest.approx([8 * 140, 8 * 100 * 2**-0.1])
    named = [a.y for a in chart.layout.annotations if a.text == "<b>ideal</b>"]
    assert named == pytest.approx(sorted(ideals))


ONE = synthetic.report(2)


@pytest.mark.parametrize(("says", "draw"), [
    ("nothing to draw", lambda: view.timelines()),
    ("reports=3: not a report; legal: what pl.run", lambda: view.timelines(ONE, 3)),
    ("the number of reports is 2", lambda: view.timelines(ONE, ONE, labels=["a"])),
    ("labels='ab': not a list", lambda: view.timelines(ONE, ONE, labels="ab")),
    (r"step=9.*legal: 0 \| 1 \| 2 \| 3", lambda: view.timelines(ONE, step=9)),
    (r"ranks=5.*legal: 0 \| 1", lambda: view.timelines(ONE, ranks=np.array([1, 5]))),
    ("no steps", lambda: Report(clock="predicted", model=ONE.model, plan=Plan()).timeline()),
    ("ranks=0: not a list of ranks; legal: 0, 1", lambda: view.timelines(ONE, ranks=0)),
    (r"ranks=\[\]: not a list of ranks", lambda: view.timelines(ONE, ranks=[])),
    ("report=None: not a report; legal: what pl.run", lambda: view.stage_time(None)),
    ("model='gpt3': not a model desc.*legal: a pl.Model", lambda: view.crossover("gpt3", 64)),
    (r"plan='2d': .*legal: a pl\.Plan\(tp=", lambda: view.blocks("2d")),
    ("op='bcast'.*legal: 'all_reduce'", lambda: view.link_fit(points(), op="bcast")),
    ("a line needs two", lambda: view.link_fit(points()[:1])),
    (r"points\[0\]=.*legal: a row with op, ", lambda: view.link_fit([{"bytes": 1}, *points()])),
    (r"points\[0\]=3: not a point", lambda: view.link_fit([3])),
    ("ranks=1: out of range", lambda: view.link_fit([r | {"ranks": 1} for r in points()])),
    ("wire_bytes=0: out", lambda: view.link_fit([points()[0] | {"wire_bytes": 0}, *points()])),
    (r"ranks=\[2, 4\]: ", lambda: view.link_fit([points()[0] | {"ranks": 4}, *points()])),
    ("seconds=0: out of range", lambda: view.link_fit([r | {"seconds": 0} for r in points()])),
    ("seconds of a=0", lambda: view.algorithms({"a": {1.0: 0}})),
    (r"curves=\[3\]: not a mapping; legal: {algorithm", lambda: view.algorithms([3])),
    (r"bars\['a'\]=3: not a mapping; legal: {kind: v", lambda: view.bytes_bars({"a": 3})),
    ("expected=3: nothing to draw; legal: {name of a plan", lambda: view.contest(3, {"a": ONE})),
    (r"runs\['a'\]=3: not a run; legal: a report or a list of losses",
     lambda: view.losses({"a": 3})),
    ("finite number of at least 0", lambda: view.bytes_bars({"a": {"other": -1}})),
    (r"rows\[0\]\['step_time'\]=None", lambda: view.scaling([{"ranks": 1, "clock": "measured"}])),
    (r"\['clock'\]='wall'.*'measured'", lambda: view.scaling([ROWS[0] | {"clock": "wall"}])),
    (r"rows\[1\]\['clock'\]='measured'.*legal: 'replayed'",
     lambda: view.scaling([ROWS[0], ROWS[1] | {"clock": "measured"}])),
    (r"rows\[1\]\['ranks'\]=0", lambda: view.scaling([ROWS[0], ROWS[0] | {"ranks": 0}])),
    (r"rows\[0\]\['form'\]=None: not a name", lambda: view.scaling([ROWS[0] | {"form": None}])),
    (r"rows=\[\]: not a list of rows; legal: one row per run", lambda: view.scaling([])),
    ("not a list of rows", lambda: view.scaling(pd.DataFrame(ROWS))),
    (r"rows\[0\]=.*: not a mapping; legal: form, ranks", lambda: view.scaling([ONE])),
])  # fmt: skip
def test_what_cannot_be_drawn_is_refused(says, draw):
    refuses(says, draw)


def test_what_an_observation_yields_is_drawn_as_its_report():
    seen = _Seen()
    seen.report = synthetic.with_memory(synthetic.report(2))
    for draw in (view.stage_time, view.stage_memory):
        assert draw(seen) == draw(seen.report)
