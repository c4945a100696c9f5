"""Promises of the pictures: every span drawn, every byte shown, one theme, no host asked."""

import dataclasses
import gzip
import json
import re
from collections import Counter, defaultdict
from html.parser import HTMLParser
from itertools import combinations

import pytest

import paralab as pl
import synthetic
from paralab.report import tables
from paralab.report.report import Report
from paralab.spec import Plan
from paralab.view import theme, timeline_rows
from paralab.view.page import _for_script, page
from paralab.view.perfetto import events
from refusals import refuses

OKABE_ITO = {"#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00",
             "#CC79A7"}  # fmt: skip


def title(figure) -> str:
    return figure.finding + " | " + figure.below


@pytest.fixture(scope="module")
def four() -> Report:
    return synthetic.report(4, nodes=[0, 0, 1, 1])


# ---- every figure -------------------------------------------------------------------------------
def test_a_colour_means_one_thing_and_the_colour_blind_can_tell_them_apart():
    greys = {theme.KIND_COLOUR["wait"], theme.OTHER_COLOUR}
    neutral = ("wait", "compute")  # standing still, and work of no kind that training has
    used = [c for k, c in theme.KIND_COLOUR.items() if k not in neutral] + list(
        theme.AXIS_COLOUR.values()
    )
    assert set(used) == OKABE_ITO
    assert len(set(used)) == len(used)
    assert all(len({g[1:3], g[3:5], g[5:7]}) <= 3 for g in greys)
    assert set(theme.KIND_COLOUR) | {"comm"} == set(tables.KINDS)


@pytest.mark.parametrize("clock", ["measured", "replayed", "predicted"])
def test_every_figure_states_its_units_its_finding_and_where_time_is_drawn_its_clock(four, clock):
    report = dataclasses.replace(four, clock=clock)
    timeline, traffic, loss = report.timeline(), report.traffic_chart(), report.loss_chart()
    assert f"{clock} clock" in title(timeline)
    assert "clock" not in title(traffic) + title(loss)
    for figure in (timeline, traffic, loss):
        assert figure.layout.title.text.startswith("<b>dp=4, overlapped: ")
    assert "(ms)" in timeline.layout.xaxis.title.text
    assert "kB per step" in traffic.layout.xaxis.title.text
    assert "(kB)" in traffic.layout.xaxis2.title.text
    assert "nats" in loss.layout.yaxis.title.text


# ---- timeline -----------------------------------------------------------------------------------
def test_boxes_never_cover_one_another(four):
    for report in (four, synthetic.report(3, grad_sync="bucketed")):
        for a, b in combinations(synthetic.boxes(report.timeline()), 2):
            in_time = a["end"] <= b["start"] + 1e-9 or b["end"] <= a["start"] + 1e-9
            below = a["bottom"] <= b["top"] + 1e-9 or b["bottom"] <= a["top"] + 1e-9
            assert in_time or below


def test_the_default_step_is_the_measured_one_nearest_the_median():
    report = synthetic.report(2, steps=5)
    for seconds, chosen in (
        ((4.0, 9.0, 1.0, 4.0, 4.1), 3),
        # Of an even number, the two middle ones are as near: the earlier is shown.
        ((3.9, 1.0, 5.0, 3.0, 9.0), 2),
    ):
        steps = report.steps.assign(end=report.steps["start"] + report.steps["step"].map(
            dict(enumerate(seconds))))  # fmt: skip
        lasting = dataclasses.replace(report, steps=steps)
        assert f"step {chosen} " in title(lasting.timeline())  # step 0 never counts,
    assert "step 0 " in title(synthetic.report(2, steps=1).timeline())  # unless it is the only one


def test_micro_batch_numbers_stand_on_boxes_that_can_hold_them_and_hovers_say_times_and_bytes(four):
    for bar in four.timeline().data:
        assert all(" ms" in text for text in bar.hovertext)
        if bar.name in ("forward", "backward"):
            # Once per micro-batch and rank, although the last backward is cut into three.
            assert Counter(t for t in bar.text if t) == {"0": 4, "1": 4}
        else:
            assert not any(bar.text)
        if bar.name == "communication, dp":
            sent = four.collectives["wire_bytes"].max()
            assert any(f"{sent:,} sent" in text for text in bar.hovertext)
    crowded = synthetic.report(2, microbatches=80)
    assert not any(t for bar in crowded.timeline().data for t in bar.text)


def test_the_title_of_the_timeline_is_read_off_the_spans():
    work = [(0, 0, 1, "compute", "backward", 0, 0, 0, 0.0, 6.0, 6.0, ()),
            (1, 0, 1, "comm:dp", "comm", 0, 0, -1, 5.0, 10.0, 0.0, (0,)),
            (2, 0, 1, "compute", "wait", 0, 0, -1, 6.0, 9.0, 0.0, (1,)),
            (3, 0, 1, "compute", "optimizer", 0, 0, -1, 9.0, 10.0, 1.0, ())]  # fmt: skip
    report = Report(clock="replayed", model=synthetic.MODEL, plan=Plan(dp=2, grad_sync="naive"),
                    **synthetic.tables(spans=work, steps=[(0, 1, 0.0, 10.0, 0.0)]))  # fmt: skip
    assert report.timeline().finding == (
        "dp=2, naive: 40 % of communication is hidden, and ranks wait for 30 % of the step"
    )


def test_a_crowded_step_shows_a_window_and_says_so(four, monkeypatch):
    assert "boxes" not in title(four.timeline(step=1))
    monkeypatch.setattr(timeline_rows, "MAX_BOXES", 20)
    figure, spans = four.timeline(step=1), four.spans[four.spans["step"] == 1]
    assert f"the first 20 of {len(spans)} boxes" in title(figure)
    zero = four.steps["start"][four.steps["step"] == 1].min()
    first = sorted(spans["start"] - zero)[:20]
    drawn = sorted(box["start"] for box in synthetic.boxes(figure))
    assert drawn == pytest.approx(first, abs=1e-8)


def test_a_shared_processor_is_mentioned_only_on_the_wall_clock():
    shared = synthetic.report(4, meta={"cores": 2})
    assert "4 ranks shared 2 cores" in title(shared.timeline())
    assert "cores" not in title(dataclasses.replace(shared, clock="replayed").timeline())
    assert "cores" not in title(synthetic.report(2, meta={"cores": 2}).timeline())
    apart = synthetic.report(4, meta={"cores": 2, "nodes": [0, 0, 1, 1]})
    assert "cores" not in title(apart.timeline())


# ---- traffic and loss ---------------------------------------------------------------------------
@pytest.mark.parametrize("dp", [2, 3, 4])
def test_the_matrix_has_senders_in_rows_and_every_byte(dp):
    report = synthetic.report(dp)
    figure = report.traffic_chart()
    matrix, edges = figure.data[0], report.traffic(by="edge")
    assert matrix.type == "heatmap" and "sending" in figure.layout.yaxis.title.text
    unit = figure.layout.xaxis.title.text.removeprefix("receiving rank (in the cells: ")
    per = theme.UNITS[unit.removesuffix(" per step)")]
    assert 1 <= max(v or 0 for row in matrix.z for v in row) < 1000
    assert sum(v or 0 for row in matrix.z for v in row) * per == pytest.approx(edges["bytes"].sum())
    for sender, receiver, count in edges.itertuples(index=False):
        assert matrix.z[sender][receiver] == count / per
        assert float(matrix.text[sender][receiver]) == pytest.approx(count / per, rel=0.005)
    without = synthetic.report(16).traffic_chart()  # cells of so many have no numbers
    assert without.layout.xaxis.title.text == "receiving rank"


def test_the_traffic_title_compares_with_the_optimum_to_the_byte(four):
    said = "a rank sends 711 kB per step, exactly 2(N−1)/N times the gradients; 50 % of it between"
    chart, psi = four.traffic_chart(), 4 * four.model.num_params
    assert said in title(chart)
    assert chart.layout.shapes[-1].x0 == pytest.approx(1.5 * psi / 1e3)  # after nodes' borders
    assert chart.data[1].marker.color == theme.AXIS_COLOUR["dp"]
    alone = synthetic.report(1).traffic_chart()
    assert "One device: nothing is sent" in title(alone)
    assert [trace.type for trace in alone.data] == ["bar"]  # a matrix of one zero shows nothing
    many = pl.Cluster.preset("dgx-a100", nodes=17)  # their borders would cover the matrix
    three = pl.predict(pl.ModelSpec.preset("laptop"), Plan(dp=3, bucket_bytes=200_000), many)
    assert "4.45 MB per step, 0.00204 % above 2" in title(three.traffic_chart())  # padding
    cells = pl.predict(synthetic.MODEL, Plan(dp=33), many, steps=1).traffic_chart().data[0]
    assert cells.type == "heatmap" and not cells.xgap and not cells.ygap  # gaps would hide them
    large = pl.predict(synthetic.MODEL, Plan(dp=136), many, steps=1, detail="actions")
    assert {trace.type for trace in large.traffic_chart().data} == {"bar"}


def test_the_loss_chart_says_where_the_loss_went(four):
    figure = four.loss_chart()
    assert list(figure.data[0].y) == four.losses
    for losses, said in (
        (four.losses, "the loss fell from 5.516 to 4.316 in 4 steps"),
        ([5.0, float("nan")], "dp=4, overlapped diverged at step 1"),
        ([4.0, 5.0], "the loss went from 4.000 to 5.000 in 2 steps"),
    ):
        assert said in title(dataclasses.replace(four, losses=losses).loss_chart())
    assert "samples per step" in figure.below and len(figure.layout.shapes) == 1
    observed = dataclasses.replace(four, model=None).loss_chart()
    assert "samples" not in observed.below and not observed.layout.shapes
    refuses("has no losses", dataclasses.replace(four, losses=[]).loss_chart)


# ---- the page -----------------------------------------------------------------------------------
class Page(HTMLParser):
    """Checks that elements close in order; collects attributes and visible text."""

    VOID = {"meta", "link", "br", "hr", "img", "input"}

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.said: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] not in (["script"], ["style"]):
            self.said.append(data)


NASTY = "</script><script>alert(1)</script><img src=http://evil.example/x onerror=alert(1)>"


@pytest.fixture(scope="module")
def nasty_page() -> str:
    report = synthetic.report(4, meta={"data": NASTY, NASTY: [NASTY], "run": "a & b"})
    return page(report, sections=[(NASTY, "<p>compared</p>")])


def test_the_page_is_well_formed_and_escapes_what_users_wrote(nasty_page):
    parsed = Page(nasty_page)
    assert nasty_page.startswith("<!DOCTYPE html>")
    assert [t for t, _, _ in parsed.attributes if t in ("img", "iframe", "object")] == []
    assert nasty_page.count("<script") == nasty_page.count("</script>") == 2
    assert NASTY in "".join(parsed.said)  # shown as it was written, as text
    assert "compared" in "".join(parsed.said)
    written = _for_script({NASTY: [NASTY, "a & b", "\u2028"]})  # nor can data end the script
    assert not set(written) & set("<>&\u2028")
    assert json.loads(written) == {NASTY: [NASTY, "a & b", "\u2028"]}


def test_the_page_asks_no_host_for_anything(nasty_page):
    parsed = Page(nasty_page)
    addresses = [
        v for _, name, v in parsed.attributes if name in ("src", "href", "action", "srcset")
    ]
    assert addresses == ["data:,"]
    policy = next(v for t, n, v in parsed.attributes if n == "content" and "default-src" in v)
    assert "default-src 'none'" in policy and "http" not in policy
    own = re.sub(r"<script>.*?</script>", "", nasty_page, count=1, flags=re.S)  # without plotly.js
    own = own.replace("http://evil.example", "").replace("http:\\u002f", "")
    assert "http" not in re.sub(r"http-equiv", "", own)


def test_the_page_has_numbers_plan_pictures_and_both_colour_schemes(nasty_page):
    said = "".join(Page(nasty_page).said)
    report = synthetic.report(4)
    for words in ("Report(measured, dp=4", "measured clock: wall clock", "step time", "grad_sync",
                  f"{report.model.num_params:,}", "samples per step"):  # fmt: skip
        assert words in said.replace("\n", " "), words
    for figure in ("timeline", "traffic", "loss"):
        assert f'<div id="{figure}"' in nasty_page
    assert "@media (prefers-color-scheme: dark)" in nasty_page


def test_what_was_saved_of_a_block_of_ones_own_has_a_page_without_the_number_of_parameters():
    made = synthetic.report(2)
    again = dataclasses.replace(made, model=made.model.replace(block="own: Mine"))
    assert "parameters Ψ" in page(made) and "parameters Ψ" not in page(again)


def test_a_prediction_without_losses_has_a_page_too(tmp_path):
    report = dataclasses.replace(synthetic.report(2), clock="predicted", losses=[])
    report.to_html(tmp_path / "p.html")
    text = (tmp_path / "p.html").read_text(encoding="utf-8")
    assert '<div id="loss"' not in text and '<div id="timeline"' in text
    empty = page(Report(clock="predicted", model=synthetic.MODEL, plan=Plan()))
    Page(empty)
    assert "–" in empty


# ---- Perfetto -----------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def trace(four, tmp_path_factory) -> list[dict]:
    path = tmp_path_factory.mktemp("trace") / "t.json"
    four.to_perfetto(path)
    whole = json.loads(path.read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert whole["otherData"]["clock"] == "measured"
    packed = path.with_suffix(".json.gz")
    four.to_perfetto(packed)
    assert gzip.decompress(packed.read_bytes()) == path.read_bytes()
    return whole["traceEvents"]


def test_the_trace_has_the_fields_that_the_format_requires(trace, four):
    required = {"X": {"name", "cat", "ts", "dur"}, "M": {"name", "args"},
                "s": {"name", "cat", "id", "ts"},
                "f": {"name", "cat", "id", "ts", "bp"}}  # fmt: skip
    for event in trace:
        assert required[event["ph"]] <= set(event), event
        assert type(event["pid"]) is int and type(event["tid"]) is int
        assert event.get("ts", 0) >= 0 and event.get("dur", 0) >= 0
    names = {e["name"] for e in trace if e["ph"] == "M"}
    assert names == {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}


def test_the_trace_has_a_process_per_rank_and_a_thread_per_lane_whose_slices_do_not_overlap(trace):
    ranks = {e["pid"]: e["args"]["name"] for e in trace if e["name"] == "process_name"}
    assert ranks == {r: f"rank {r}" for r in range(4)}
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace if e["name"] == "thread_name"}
    assert [lanes[2, t] for t in range(3)] == ["compute", "comm:dp", "comm:dp 2"]
    threads = defaultdict(list)
    for event in trace:
        if event["ph"] == "X":
            thread = event["pid"], event["tid"]
            assert lanes[thread].startswith("comm:dp" if event["cat"] == "comm" else "compute")
            threads[thread].append((event["ts"], event["ts"] + event["dur"]))
    for slices in threads.values():
        slices.sort()
        assert all(end <= start for (_, end), (start, _) in zip(slices, slices[1:], strict=False))
        # Whole nanoseconds, exactly: no viewer's rounding can make neighbours overlap.
        assert all((8 * time).is_integer() for pair in slices for time in pair)


@pytest.mark.parametrize("report", ["four", "late"])
def test_arrows_of_the_trace_join_what_waits_to_what_it_waited_for(report, four):
    if report == "late":  # a rank waits for messages that are not in flight yet
        cluster = pl.Cluster.preset("dgx-a100")
        four = pl.predict(synthetic.MODEL, Plan(pp=2, microbatches=3), cluster, steps=1)
    trace, by_id = events(four), four.spans.set_index("id")
    starts = {e["id"]: e for e in trace if e["ph"] == "s"}
    ends = {e["id"]: e for e in trace if e["ph"] == "f"}
    pairs = [(cause, i) for i, after in by_id["after"].items() for cause in after]
    assert starts.keys() == ends.keys() == set(range(len(pairs)))
    slices = {e["args"]["id"]: e for e in trace if e["ph"] == "X"}
    for i, (cause, effect) in enumerate(pairs):
        assert starts[i]["ts"] <= ends[i]["ts"], "viewers drop an arrow that ends before it starts"
        for end, span in ((starts[i], slices[cause]), (ends[i], slices[effect])):
            assert all(end[name] == span[name] for name in ("pid", "tid"))
            assert span["ts"] <= end["ts"] <= span["ts"] + span["dur"]


def test_slices_carry_times_micro_batch_and_bytes(trace, four):
    slices = [e for e in trace if e["ph"] == "X"]
    assert len(slices) == len(four.spans)
    total = (four.spans["end"] - four.spans["start"]).sum() * 1e6
    assert sum(e["dur"] for e in slices) == pytest.approx(total, abs=len(slices))
    comm = [e for e in slices if e["cat"] == "comm"]
    assert {e["name"] for e in comm} == {"all_reduce"}
    assert sum(e["args"]["wire_bytes"] for e in comm) == four.collectives["wire_bytes"].sum()
    assert [e["args"]["after"] for e in slices] == four.spans["after"].map(list).tolist()
    assert {e["name"] for e in slices if e["cat"] == "forward"} == {"forward 0", "forward 1"}
