"""The bubble: one definition on every clock, next to its formula and its simulation."""

import dataclasses

import pytest

import paralab as pl
import synthetic
from paralab.report.report import Report
from paralab.theory.ideal import bubbles, ideal, schedule_of, stage_costs
from paralab.theory.pipeline import bubble_formula, simulate
from refusals import refuses
from stated import FREE, SCHEDULES, as_measured, cluster, mixed, plan_of
from stated import MODEL as SMALL

MODEL = SMALL.replace(layers=5)
# (rank, kind, start, end)
BESIDE = [(0, "forward", 0.0, 4.0), (2, "forward", 4.0, 8.0),  # the first: half of it idle
          (1, "forward", 0.0, 1.0), (3, "forward", 1.0, 2.0)]  # fmt: skip
PACKING = [(0, "forward", 0.0, 2.0), (0, "backward", 2.0, 4.0), (0, "copy", 4.0, 5.0),
           (0, "backward", 5.0, 7.0), (0, "wait", 7.0, 9.0), (0, "copy", 7.0, 9.0),
           (0, "comm", 8.0, 99.0), (0, "optimizer", 9.0, 12.0),
           (1, "forward", 2.0, 7.0)]  # fmt: skip
ALONE = [(0, "forward", 0.0, 4.0), (0, "backward", 5.0, 10.0), (1, "forward", 0.0, 2.0),
         (1, "backward", 2.0, 5.0)]  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "plan", "bubble"),
    [
        # Each rank's own (end - start), and of a pipeline the longest: 4 + 4 and 1 + 1.
        (BESIDE, pl.Plan(pp=2, dp=2), 0.0),
        ([*BESIDE, (0, "backward", 9.0, 10.0)], pl.Plan(pp=2, dp=2), 1 - 11 / (2 * 10 + 2 * 1)),
        (PACKING, pl.Plan(pp=2), 1 - (7 + 5) / (2 * 7)),
        (ALONE, pl.Plan(dp=2), 1 / 15),
    ],
    ids=["pipelines beside each other", "one is late", "packing is no idle time", "no pipeline"],
)
def test_the_bubble_is_the_idle_share_between_first_and_last_compute(rows, plan, bubble):
    spans = [
        [i, rank, 0, "comm:pp" if kind == "comm" else "compute", kind, rank // plan.dp, 0, 0,
         start, end, end - start, ()]
        for i, (rank, kind, start, end) in enumerate(rows)
    ]  # fmt: skip
    steps = [(rank, 0, 0.0, 12.0, 0.0) for rank in range(plan.world_size)]
    tables = synthetic.tables(spans=spans, steps=steps)
    report = Report(clock="replayed", model=MODEL, plan=plan, **tables)
    assert report.bubble == pytest.approx(bubble)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_four_parts_of_a_rank_s_time_add_up_and_are_the_bubble(name):
    """On links that take time, p2p is what free links do not have."""
    plan = plan_of(name, pp=4, microbatches=8)
    slow, free = (
        pl.predict(MODEL.replace(layers=8), plan, at).replay(at)
        for at in (cluster(intra=pl.Link(alpha=1e-4, bandwidth=1e9)), cluster(intra=FREE))
    )
    for report in (slow, free):
        times = report.pipeline_times()
        assert list(times.index) == [0, 1, 2, 3] and (times >= -1e-12).all().all()
        parts = times[["forward", "backward", "p2p", "idle"]].sum(axis=1)
        assert parts.tolist() == pytest.approx(times["T"].tolist())
        share = (times["p2p"] + times["idle"]).mean() / times["T"].max()
        assert share == pytest.approx(report.bubble, abs=1e-9)
    assert slow.pipeline_times()["p2p"].max() > 0
    assert free.pipeline_times()["p2p"].max() == pytest.approx(0, abs=1e-9)


def test_an_outline_does_not_tell_messages_from_idle_time():
    found = pl.predict(MODEL, plan_of("1f1b"), cluster(), steps=1, detail="actions")
    times = found.pipeline_times()
    assert times["p2p"].isna().all() and (times["idle"] > 0).any()
    for step, words in ((9, "step=9: .*legal: 0"), (-1, "step=-1"), (0.5, "not a whole")):
        refuses(words, found.pipeline_times, step=step)
        refuses(words, ideal, found, step=step)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_table_has_formula_simulation_and_the_reports_own_bubble(name):
    """The formula takes what a rank computes, not one of its stages."""
    plan = plan_of(name, pp=4, microbatches=8)
    report = pl.predict(MODEL.replace(layers=8), plan, cluster())
    table = report.bubbles()
    assert list(table.index) == ["bubble", "bubble over ideal"]
    assert list(table.columns) == ["formula", "simulated", "predicted"]
    share, over = table.loc["bubble"], table.loc["bubble over ideal"]
    assert share["predicted"] == report.bubble
    assert share["simulated"] == ideal(report).bubble_rate
    costs = (sum(stage_costs(report)[kind]) / 4 for kind in ("forward", "backward", "weight_grad"))
    expected = bubble_formula(name, 4, 8, plan.virtual_stages, *costs)
    assert share["formula"] == pytest.approx(expected)
    assert (share / (1 - share)).tolist() == pytest.approx(over.tolist())


def test_a_measured_report_shows_its_replay_before_the_wall_clock():
    report = pl.predict(MODEL, plan_of("1f1b"), cluster())
    table = bubbles(as_measured(report), cluster(intra=FREE))
    assert list(table.columns) == ["formula", "simulated", "replayed", "measured"]
    assert table.loc["bubble", "replayed"] < table.loc["bubble", "measured"]


def test_a_replay_of_a_prediction_has_its_bubble():
    for name in (*SCHEDULES, mixed):
        report = pl.predict(MODEL, plan_of(name), cluster())
        replayed = as_measured(report).replay(cluster())
        # Costs become medians; the first micro-batch's differ a little.
        assert replayed.bubble == pytest.approx(report.bubble, abs=0.01)


def test_optimizers_of_unequal_stages_keep_their_own_costs_in_the_replay():
    model = MODEL.replace(vocab=5000, layers=16)
    report = pl.predict(model, plan_of("1f1b", pp=14), cluster())
    spans = (report.spans, as_measured(report).replay(cluster()).spans)
    before, after = (s[s["kind"] == "optimizer"].groupby("rank")["cost"].median() for s in spans)
    assert before.nunique() > 1
    assert after.tolist() == pytest.approx(before.tolist())


def test_copies_of_a_stage_share_their_costs_in_the_replay():
    report = pl.predict(MODEL, plan_of("1f1b", dp=2), cluster(), steps=5)
    spans = report.spans
    slow = spans["cost"] * (1 + (spans["rank"] == 1))  # one rank of two that hold stage 0
    uneven = dataclasses.replace(as_measured(report), spans=spans.assign(cost=slow))
    before, after = (s[s["kind"] == "forward"].groupby("rank")["cost"].first()
                     for s in (spans, uneven.replay(cluster()).spans))  # fmt: skip
    assert after[0] == after[1] == pytest.approx(1.5 * after[2] * before[0] / before[2])


def test_compare_says_what_the_bubble_of_a_pipeline_is_made_of():
    said = []
    for name, links in (("1f1b", FREE), ("zb-h1", pl.Link(alpha=1e-3, bandwidth=1e9))):
        report = pl.predict(MODEL, plan_of(name), cluster(intra=links))
        run = as_measured(report)
        found, alone = pl.compare(report, run), ideal(run).bubble_rate
        assert found.bytes_agree and found.table.loc["bubble", "predicted"] == report.bubble
        assert ("weight halves" in found.table.index) == (name == "zb-h1")
        calls = report.collectives.query("step == 1 and op != 'recv'")  # counted by who sends it
        assert found.table.loc["calls and messages", "predicted"] == len(calls) / 2 > 4
        assert f"would leave {100 * alone:.1f} % idle" in found.notes["bubble"]
        said.append(found.notes["bubble"])
    assert found.notes["exposed communication"].endswith("a tied embedding's gradients too.")
    assert said[0].endswith("in the replay the links add nothing.")
    beyond = found.table.loc["bubble", "replayed"] - alone
    assert beyond > 0.1 and said[1].endswith(f"the links add {100 * beyond:.1f} %.")
    flat = pl.predict(MODEL, pl.Plan(dp=2), cluster())
    assert "bubble" not in pl.compare(flat, as_measured(flat)).table.index


BALANCED = pl.ModelSpec(layers=8, hidden=128, heads=4, seq_len=64, vocab=256)


def test_a_replayed_bubble_is_that_of_its_own_costs_simulated(run):
    """Both by the same medians: what else the machine does makes no difference."""
    report = run(BALANCED, plan_of("interleaved", 4, 8), steps=4, optimizer="sgd")
    same = simulate(schedule_of(report), **stage_costs(report)).bubble_rate
    assert report.replay(cluster(intra=FREE)).bubble == pytest.approx(same, abs=1e-6)
