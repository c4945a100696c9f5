"""The bubble: one definition on every clock, next to its formula and its simulation."""

import dataclasses
import math

import pytest

import paralab as pl
import synthetic
from paralab.report.report import Report
from paralab.theory.ideal import bubbles, ideal, schedule_of, stage_costs
from paralab.theory.pipeline import bubble_formula, simulate
from stated import FREE, SCHEDULES, as_measured, cluster, mixed, plan_of
from stated import MODEL as SMALL

MODEL = SMALL.replace(layers=5)


def made(rows, plan):
    """A report of (rank, kind, start, end) spans in step 0."""
    spans = [
        [i, rank, 0, "compute", kind, rank // plan.dp, 0, 0, start, end, end - start, ()]
        for i, (rank, kind, start, end) in enumerate(rows)
    ]
    last = max(end for *_, end in rows)
    steps = [(rank, 0, 0.0, last, 0.0) for rank in range(plan.world_size)]
    made = synthetic.tables(spans=spans, steps=steps)
    return Report(clock="replayed", model=MODEL, plan=plan, **made)


def test_pipelines_beside_each_other_are_each_held_against_their_own_length():
    rows = [(0, "forward", 0.0, 4.0), (2, "forward", 4.0, 8.0),  # the first: half of it idle
            (1, "forward", 0.0, 1.0), (3, "forward", 1.0, 2.0)]  # fmt: skip
    report = made(rows, pl.Plan(pp=2, dp=2))
    # Each rank's own (end - start), and of a pipeline the longest: 4 + 4 and 1 + 1.
    assert report.bubble == pytest.approx(0.0)
    late = made([*rows, (0, "backward", 9.0, 10.0)], pl.Plan(pp=2, dp=2))
    assert late.bubble == pytest.approx(1 - 11 / (2 * 10 + 2 * 1))


def test_packing_gradients_between_two_backwards_is_no_bubble():
    rows = [(0, "forward", 0.0, 2.0), (0, "backward", 2.0, 4.0), (0, "copy", 4.0, 5.0),
            (0, "backward", 5.0, 7.0), (0, "copy", 7.0, 9.0), (0, "optimizer", 9.0, 12.0),
            (1, "forward", 2.0, 7.0)]  # fmt: skip
    report = made(rows, pl.Plan(pp=2))
    assert report.bubble == pytest.approx(1 - (7 + 5) / (2 * 7))


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


@pytest.mark.parametrize("asked", [pl.Report.pipeline_times, schedule_of, ideal])
def test_a_step_that_the_report_does_not_have_is_refused(asked):
    report = pl.predict(MODEL, plan_of("1f1b", pp=2, microbatches=2), cluster(), steps=2)
    for step, words in ((9, r"step=9: .*legal: 0 \| 1"), (-1, "step=-1"), (0.5, "not a whole")):
        with pytest.raises(ValueError, match=words):
            asked(report, step=step)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_table_has_formula_simulation_and_the_reports_own_bubble(name):
    plan = plan_of(name, pp=4, microbatches=8)
    report = pl.predict(MODEL.replace(layers=8), plan, cluster())
    table = report.bubbles()
    assert list(table.index) == ["bubble", "bubble over ideal"]
    assert list(table.columns) == ["formula", "simulated", "predicted"]
    assert table.loc["bubble", "predicted"] == report.bubble
    assert table.loc["bubble", "simulated"] == ideal(report).bubble_rate
    share = table.loc["bubble"]
    assert (share / (1 - share)).tolist() == pytest.approx(table.loc["bubble over ideal"].tolist())
    if name in ("gpipe", "1f1b"):
        assert table.loc["bubble", "formula"] == pytest.approx(3 / 11)
        assert table.loc["bubble over ideal", "formula"] == pytest.approx(3 / 8)  # (p-1)/m
    if name == "interleaved":
        assert table.loc["bubble over ideal", "formula"] == pytest.approx(3 / 16)  # (p-1)/(v m)


def test_the_formula_takes_what_a_rank_computes_not_one_of_its_stages():
    plan = plan_of("zb-h1", pp=4, microbatches=8)
    report = pl.predict(MODEL.replace(layers=8), plan, cluster())
    costs = {kind: sum(seconds) / 4 for kind, seconds in stage_costs(report).items()}
    expected = bubble_formula("zb-h1", 4, 8, 1, costs["forward"], costs["backward"],
                              costs["weight_grad"])  # fmt: skip
    assert report.bubbles().loc["bubble", "formula"] == pytest.approx(expected)


def test_a_schedule_of_ones_own_has_no_formula():
    def mine(pp, microbatches):
        return plan_of("gpipe", pp, microbatches).actions()

    table = pl.predict(MODEL, plan_of(mine), cluster()).bubbles()
    assert math.isnan(table.loc["bubble", "formula"])
    assert table.loc["bubble", "simulated"] > 0


def test_a_measured_report_shows_its_replay_before_the_wall_clock():
    report = pl.predict(MODEL, plan_of("1f1b"), cluster())
    table = bubbles(as_measured(report), cluster(intra=FREE))
    assert list(table.columns) == ["formula", "simulated", "replayed", "measured"]
    assert table.loc["bubble", "replayed"] < table.loc["bubble", "measured"]


def test_a_replay_of_a_prediction_has_its_bubble():
    for name in (*SCHEDULES, mixed):
        report = pl.predict(MODEL, plan_of(name), cluster())
        # Costs become medians; the first micro-batch's differ a little.
        assert as_measured(report).replay(cluster()).bubble == pytest.approx(
            report.bubble, abs=0.01
        )


def test_optimizers_of_unequal_stages_keep_their_own_costs_in_the_replay():
    model = MODEL.replace(vocab=5000, layers=16)
    report = pl.predict(model, plan_of("1f1b", pp=14), cluster())
    replayed = as_measured(report).replay(cluster())
    spans = (report.spans, replayed.spans)
    before, after = (s[s["kind"] == "optimizer"].groupby("rank")["cost"].median() for s in spans)
    assert before.nunique() > 1
    assert after.tolist() == pytest.approx(before.tolist())


def test_copies_of_a_stage_share_their_costs_in_the_replay():
    report = pl.predict(MODEL, plan_of("1f1b", dp=2), cluster(), steps=5)
    spans = report.spans
    slow = spans["cost"] * (1 + (spans["rank"] == 1))  # one rank of two that hold stage 0
    uneven = dataclasses.replace(as_measured(report), spans=spans.assign(cost=slow))
    after = uneven.replay(cluster()).spans
    forward = after[after["kind"] == "forward"].groupby("rank")["cost"].first()
    assert forward[0] == forward[1] == pytest.approx(1.5 * forward[2] * _ratio(spans))


def _ratio(spans):
    first, _, last, _ = spans[spans["kind"] == "forward"].groupby("rank")["cost"].first()
    return first / last


def test_compare_says_what_the_bubble_of_a_pipeline_is_made_of():
    report = pl.predict(MODEL, plan_of("zb-h1"), cluster())
    found = pl.compare(report, as_measured(report))
    assert found.bytes_agree
    assert {"bubble", "weight halves"} <= set(found.table.index)
    assert found.table.loc["bubble", "predicted"] == report.bubble
    assert "If links took no time" in found.notes["bubble"]
    assert "the bubble" in found.notes["exposed communication"]
    flat = pl.predict(MODEL, pl.Plan(dp=2), cluster())
    assert "bubble" not in pl.compare(flat, as_measured(flat)).table.index


# ---- real runs --------------------------------------------------------------------------------
BALANCED = pl.ModelSpec(layers=8, hidden=128, heads=4, seq_len=64, vocab=256)


def test_a_replayed_bubble_is_that_of_its_own_costs_simulated(run):
    """Both by the same medians: what else the machine does makes no difference."""
    report = run(BALANCED, plan_of("interleaved", 4, 8), steps=4, optimizer="sgd")
    same = simulate(schedule_of(report), **stage_costs(report)).bubble_rate
    assert report.replay(cluster(intra=FREE)).bubble == pytest.approx(same, abs=1e-6)


def test_a_bubble_of_the_links_is_not_said_to_be_the_schedules():
    said = []
    for links in (FREE, pl.Link(alpha=1e-3, bandwidth=1e9)):
        report = pl.predict(MODEL, plan_of("1f1b"), cluster(intra=links))
        run = as_measured(report)
        found, alone = pl.compare(report, run), ideal(run).bubble_rate
        assert f"would leave {100 * alone:.1f} % idle" in found.notes["bubble"]
        said.append(found.notes["bubble"])
    assert said[0].endswith("in the replay the links add nothing.")
    beyond = found.table.loc["bubble", "replayed"] - alone
    assert beyond > 0.1 and said[1].endswith(f"the links add {100 * beyond:.1f} %.")
