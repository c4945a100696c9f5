"""Promises of a pipeline's pictures: every action drawn, every bubble seen as one, one scale."""

import dataclasses
import re
from collections import Counter
from functools import cache, partial

import pytest

import paralab as pl
from paralab import view
from paralab.parallel import schedules
from paralab.theory.ideal import ideal
from paralab.theory.pipeline import simulate
from paralab.theory.schedule_check import peak_live
from paralab.view import theme, timeline_rows
from paralab.view.page import page
from refusals import refuses
from stated import MODEL as SMALL
from stated import SCHEDULES, cluster, plan_of

MODEL = SMALL.replace(layers=5)

COMPUTED = {"forward", "backward", "backward, or its input half", "backward, weight half"}


@cache
def predicted(name="1f1b", pp=4, microbatches=8, tied=True, **settings):
    model = MODEL.replace(layers=8, tied=tied)
    return pl.predict(model, plan_of(name, pp, microbatches, **settings), cluster(), steps=2)


# ---- timeline -----------------------------------------------------------------------------------
@pytest.mark.parametrize("name", SCHEDULES)
def test_ideal_and_real_show_every_action_once_with_its_micro_batch(name):
    report = predicted(name)
    figure = report.timeline()
    actions = [str(a.microbatch) for rank in report.plan.actions() for a in rank]
    drawn = [bar for bar in figure.data if bar.name in COMPUTED]
    assert sum(len(bar.x) for bar in drawn) == 2 * len(actions)
    labels = Counter(t for bar in drawn for t in bar.text if t)
    assert set(labels) == set(actions)
    assert set(figure.table["report"]) == {"ideal", "predicted"}


def test_a_sentence_rounds_no_share_to_nothing_or_to_all():
    assert theme.percent(-1e-12) == "0 %"
    read = {0.0: "0 %", 1e-3: "less than 1 %", 0.01: "1 %", 0.224: "22 %", 0.99: "99 %",
            0.998: "more than 99 %", 1 - 1e-15: "100 %", 1.0: "100 %", 1.25: "125 %"}  # fmt: skip
    assert [theme.share(part) for part in read] == list(read.values())


def test_the_real_one_is_below_the_ideal_on_one_scale_each_with_its_bubble():
    report = predicted()
    figure = report.timeline()
    top = figure.table[figure.table["report"] == "ideal"]
    below = figure.table[figure.table["report"] == "predicted"]
    assert top["end"].max() == pytest.approx(ideal(report).makespan)
    assert below[below["kind"] == "backward"]["end"].max() > top["end"].max()  # links cost time
    said = " ".join(a.text for a in figure.layout.annotations)
    for part in (top, below[below["kind"] == "backward"]):  # each line's time is where it stands
        assert f"<b>{1e3 * part['end'].max():.1f} ms</b>" in said
    for share in (ideal(report).bubble_rate, report.bubble):
        assert f"bubble {100 * share:.0f} %" in said
    assert f"the bubble is {100 * report.bubble:.0f} % of device time" in figure.finding
    assert "predicted" in figure.below and "links take no time" in figure.below
    for device, alone in (("cpu", True), ("cuda:0", False)):  # on CPUs ranks may share cores
        run = dataclasses.replace(report, clock="measured", meta={"device": device}).timeline()
        assert ("if every rank had a device of its own and links" in run.finding) == alone
        assert ("every rank has a device of its own and links" in run.below) == alone


@pytest.mark.parametrize("name", SCHEDULES)
def test_work_and_bubble_fill_every_rank_and_never_overlap(name):
    simulation = ideal(predicted(name))
    table = view.simulated_timeline(simulation, "mine").table
    for rank, own in table.sort_values("start").groupby("rank"):
        assert own["start"].iloc[0] == pytest.approx(0.0, abs=1e-12)
        assert own["end"].iloc[-1] == pytest.approx(simulation.makespan)
        assert own["end"].to_numpy()[:-1] == pytest.approx(own["start"].to_numpy()[1:])
        work = own[own["kind"] != "wait"]
        assert (work["end"] - work["start"]).sum() == pytest.approx(simulation.busy[rank])


def test_what_is_idle_before_and_after_a_ranks_work_is_hatched_too():
    report = predicted("gpipe", tied=False)  # nobody waits for a sum at the end
    figure = report.timeline(ideal=False)
    last = figure.table[figure.table["rank"] == 3].groupby("kind")
    assert last["start"].min()["wait"] == pytest.approx(0.0, abs=1e-12)
    assert last["start"].min()["forward"] > 0
    work = report.spans[(report.spans["step"] == 1) & (report.spans["kind"] == "backward")]
    zero = report.steps[report.steps["step"] == 1]["start"].min()
    assert last["end"].max()["wait"] == pytest.approx(work["end"].max() - zero)  # till all are done
    hatched = next(bar for bar in figure.data if bar.name == "waiting")
    assert hatched.marker.pattern.shape == "/"


def test_a_schedule_of_ones_own_has_one_name_before_and_after_a_report_was_saved(tmp_path):
    def slow_start(pp, microbatches, *, warm_up):
        return schedules.gpipe(pp, microbatches)

    own = partial(slow_start, warm_up=2)
    report = predicted(own, 2, 4)
    assert report.plan.schedule_name == "own: slow_start"
    report.save(tmp_path / "report.json")
    loaded = pl.load(tmp_path / "report.json")
    assert report.timeline().finding == loaded.timeline().finding
    assert report.timeline().finding.startswith("slow_start, p=2, m=4: the bubble is ")
    refuses("own: slow_start'.*only the function's name; legal: plan.replace", loaded.plan.actions)
    own.__name__ = "two_first"  # a name that its maker gave to the partial itself
    assert report.plan.schedule_name == "own: two_first"


def test_the_margin_has_every_ranks_idle_share():
    uneven = simulate(schedules.gpipe(2, 4), forward=[1.0, 3.0], backward=[1.0, 3.0])
    said = [a.text for a in view.simulated_timeline(uneven).layout.annotations]
    shares = [f"{100 * (1 - busy / uneven.cost):.0f} %" for busy in uneven.busy]
    assert shares[0] != shares[1] and {*shares, "idle"} <= set(said)
    without = pl.predict(MODEL, pl.Plan(dp=2), cluster(), steps=2)
    both = [a.text for a in view.timelines(predicted(pp=2), without).layout.annotations]
    assert both.count("idle") == 1  # no heading where nothing is beneath
    for dp, share in ((1, "idle: share of T, "), (2, "idle: share of its pipeline's T, ")):
        assert share in predicted(pp=2, dp=dp).timeline(ideal=False).below  # each has its own T


def test_forward_backward_and_its_halves_have_the_kits_colours_and_later_chunks_paler_ones():
    fill = {bar.name: bar.marker.color for bar in predicted("zb-h1").timeline().data}
    assert fill["forward"] == theme.KIND_COLOUR["forward"]
    assert fill["backward, or its input half"] == theme.KIND_COLOUR["backward"]
    assert fill["backward, weight half"] == theme.KIND_COLOUR["weight_grad"]
    chunks = [bar for bar in predicted("interleaved").timeline().data if bar.name == "forward"]
    kind = theme.KIND_COLOUR["forward"]
    assert [bar.marker.color for bar in chunks] == [kind, theme.shade(kind, 1, 2)]
    # One entry in the legend, and a click hides both.
    assert [bar.showlegend for bar in chunks] == [True, False]
    assert {bar.legendgroup for bar in chunks} == {"forward"}
    for chunk, bar in enumerate(chunks):
        assert bar.textfont.color == theme.on(bar.marker.color)
        stages = {int(at) for said in bar.hovertext for at in re.findall(r"stage (\d+)", said)}
        assert stages - {0} == {*range(4 * chunk, 4 * chunk + 4)} - {0}  # of 8, dealt in turn


def test_many_boxes_become_a_window_and_every_ranks_total(monkeypatch):
    monkeypatch.setattr(timeline_rows, "MAX_BOXES", 60)
    simulation = simulate(schedules.interleaved(4, 16, 4), forward=1e-3, backward=2e-3)
    drawn, of_report = view.simulated_timeline(simulation, "large"), predicted().timeline()
    for figure in (drawn, of_report):
        assert sum(len(bar.x) for bar in figure.data) <= 60
        assert "the first " in figure.below
    said = [a.text for a in drawn.layout.annotations]
    assert sum(text.endswith(" %") for text in said) == 4
    assert drawn.layout.xaxis.range[1] < 1e3 * simulation.makespan
    both = view.schedules({"a": schedules.interleaved(4, 16, 4), "b": schedules.gpipe(4, 16)})
    drawn = [box for bar in both.data for box in zip(bar.base, bar.x, bar.y, strict=True)]
    reach = [max(at + long for at, long, row in drawn if row == y) for *_, y in drawn]
    assert min(reach) >= both.layout.xaxis.range[1] / 1.01
    assert "ranks=" in of_report.below and "ranks=" not in both.below


def test_several_pipelines_stand_under_one_another_and_say_what_they_share():
    one, two = predicted("gpipe"), predicted("interleaved")
    figure = view.timelines(one, two)
    said = [a.text for a in figure.layout.annotations]
    assert any(text.startswith("<b>GPipe</b> · bubble") for text in said)
    assert any(text.startswith("<b>interleaved 1F1B, v=2</b> · bubble") for text in said)
    assert "p=4, m=8" in figure.below
    assert figure.finding.startswith("GPipe takes ")  # these links make messages expensive


def test_there_is_room_for_an_ideal_up_to_sixteen_ranks_and_by_choice():
    assert "ideal" in predicted("gpipe", pp=8, dp=2).timeline().below
    assert "ideal" not in predicted("gpipe", pp=8, dp=3).timeline().below
    figure = predicted("gpipe", dp=2).timeline(ranks=[2, 3])  # pipeline rank 1, both copies
    assert "the first" not in figure.below  # all of their boxes are drawn
    ranks = figure.table.groupby("report")["rank"].unique().map(set)
    assert ranks.to_dict() == {"ideal": {2}, "predicted": {2, 3}}
    assert {int(n[8:-4]) for n in figure.layout.yaxis.ticktext} == {2, 3}  # "<b>rank 2</b>"


def test_the_page_and_the_summary_of_a_pipeline_have_its_bubble():
    report = predicted("gpipe")
    assert report.summary().loc["bubble", "value"] == pytest.approx(100 * report.bubble, abs=1e-3)
    text = page(report)
    assert "of device time" in text and "GPipe, p=4, m=8" in text
    assert "bubble" not in pl.predict(MODEL, pl.Plan(dp=2), cluster()).summary().index


# ---- live activations ---------------------------------------------------------------------------
@pytest.mark.parametrize("name", SCHEDULES)
def test_live_activations_peak_where_the_schedule_says_and_end_at_none(name):
    report = predicted(name)
    lists = report.plan.actions()
    for source in (report, lists):
        live = view.live_activations(source).table.groupby("rank")["live"]
        assert (report.plan.virtual_stages * live.max()).tolist() == peak_live(lists)
        assert (live.last() == 0).all() and (live.min() >= 0).all()


def test_the_finding_compares_what_first_ranks_keep():
    said = "On the first rank at most 8 micro-batches are alive under GPipe, 4 under 1F1B"
    assert view.live_activations(predicted("gpipe"), predicted("1f1b")).finding == said


def test_chunks_count_and_take_their_share():
    for name, until in (("gpipe", 33), ("zb-h1", 27), ("interleaved", 28.5)):
        alone = view.live_activations(predicted(name).plan.actions())
        assert alone.table["time"].max() == until
        assert ("I and W" in alone.below) == (name == "zb-h1")
        assert ("share of the rank's layers" in alone.below) == (name == "interleaved")


def test_live_activations_refuse_what_has_none():
    refuses("sources", view.live_activations)
    two, three = schedules.gpipe(2, 2), schedules.gpipe(3, 3)
    refuses("differ in their numbers of ranks", view.live_activations, two, three)
    refuses("seconds.*units", view.live_activations, predicted("gpipe"), schedules.gpipe(4, 8))
    refuses("labels", view.live_activations, two, labels=["a", "b"])
