"""`view.stage_time`: what every stage does with its step, and that no second of it is lost."""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import product

import numpy as np
import pytest

import paralab as pl
from paralab.report.report import Report
from paralab.view import stage_stretches, stage_time
from refusals import refuses

LINK = pl.Link(alpha=1e-5, bandwidth=1e10)
CLUSTER = pl.Cluster(flops=5e10, memory_bandwidth=2e10, intra=LINK, devices_per_node=64)
MODEL = pl.ModelSpec(layers=8, hidden=32, heads=4, seq_len=16)
P, M = 4, 48


@cache
def predicted(detail="actions", **settings):
    plan = pl.Plan(pp=P, microbatches=M, microbatch_size=1, **settings)
    return pl.predict(MODEL, plan, CLUSTER, steps=1, detail=detail)


CHUNKS = {"schedule": "interleaved", "virtual_stages": 2}
IN_FULL = [{"dp": 2}, {"tp": 2}, CHUNKS, {"recompute": "full"}]


@pytest.mark.parametrize(("detail", "settings"), [
    *product(["actions"], [*IN_FULL, {}, {"schedule": "gpipe"}, {"schedule": "zb-h1"}]),
    *product(["calls"], IN_FULL),
], ids=str)  # fmt: skip
def test_no_second_of_a_rank_is_lost_and_none_counted_twice(detail, settings):
    report = predicted(detail, **settings)
    table, spans = stage_time(report).table, report.spans
    steps = report.steps.set_index("rank")["end"]
    assert list(table["rank"].unique()) == [r for r in steps.index
                                            if not any(report.plan.place(r)[1:])]  # fmt: skip
    kinds = [name for name in table.columns if name not in ("rank", "phase", "start", "end")]
    lengths = table["end"] - table["start"]
    assert np.allclose(table[kinds].sum(axis=1), lengths, rtol=1e-9, atol=1e-12)
    assert (lengths > 0).all()
    for rank, mine in table.groupby("rank"):
        assert mine["start"].iloc[0] == 0.0 and mine["end"].iloc[-1] == pytest.approx(steps.max())
        assert np.allclose(mine["start"].iloc[1:], mine["end"].iloc[:-1], atol=1e-12)
        here = spans[(spans["rank"] == rank) & (spans["lane"] == "compute")]
        for kind in ("forward", "backward", "weight_grad", "optimizer"):
            told = float(mine[kind].sum()) if kind in mine else 0.0
            assert told == pytest.approx(here["cost"][here["kind"] == kind].sum(), rel=1e-9)
    # In full, calls have boxes of their own; what is computed again waits for its gradient inside.
    inside = detail == "actions" and ("tp" in settings or "recompute" in settings)
    assert (table["within"].sum() > 0.01 * steps.max()) == inside


@pytest.mark.parametrize(("settings", "causes"), [
    ({"tp": 2}, "messages of tp"), ({"recompute": "full"}, "gradients"),
    ({"recompute": "full", "tp": 2}, "messages of tp and gradients"),
])  # fmt: skip
def test_all_that_a_rank_waits_for_inside_actions_is_named(settings, causes):
    """A backward that computes everything again waits for its gradient inside."""
    chart = stage_time(predicted(**settings))
    inside = "waiting inside actions" + ": messages of tp" * (causes == "messages of tp")
    assert inside in {trace.name for trace in chart.data}
    assert f"inside actions ranks wait for {causes}" in chart.below
    plain = stage_time(predicted())
    assert "waiting" in {trace.name for trace in plain.data}
    assert "inside actions" not in plain.below


def test_1f1b_fills_goes_on_and_drains_stage_by_stage():
    report = predicted()
    table, spans = stage_time(report).table, report.spans
    each = spans[spans["kind"] == "forward"].groupby("rank")["cost"].median()
    filling, _, draining = phases = stage_stretches.PHASE[:3]
    for rank in range(P):
        mine = table[table["rank"] == rank]
        done = mine.groupby("phase")[["forward", "backward"]].sum()
        # p - r forwards before a backward
        assert done["forward"][filling] == pytest.approx((P - rank) * each[rank], rel=0.02)
        assert done["backward"][filling] == done["forward"].get(draining, 0.0) == 0.0
        order = [name for name in mine["phase"] if name in phases]
        assert order == sorted(order, key=phases.index)
    starts = table[table["phase"] == filling].groupby("rank")["start"].min()
    assert starts.is_monotonic_increasing and starts[0] == 0.0


def test_a_stretch_is_as_high_as_its_row_and_shared_out_as_its_time():
    report = predicted(dp=2, tp=2)
    chart = stage_time(report)
    named = {trace.name: trace for trace in chart.data}
    inside, between = "waiting inside actions: messages of tp", "waiting between actions"
    assert {"forward", "backward", inside, between, "communication, dp"} <= set(named)
    messages, forward = named.pop("communication, dp"), named["forward"]
    high = stage_stretches.HEIGHT - stage_stretches.MESSAGES
    heights = Counter()
    for trace in named.values():
        for base, y, width in zip(trace.base, trace.y, trace.width, strict=True):
            heights[base, int(y)] += width
    assert heights and all(high * 0.98 < found <= high * 1.001 for found in heights.values())
    steady = chart.table[chart.table["phase"] == stage_stretches.PHASE[1]].iloc[0]
    share = steady["forward"] / (steady["end"] - steady["start"])
    at = list(forward.base).index(round(steady["start"] * 1e3, 6))
    assert forward.width[at] == pytest.approx(high * share)
    lanes = report.spans[(report.spans["lane"] == "comm:dp") & (report.spans["rank"] == 0)]
    first = min(b for b, y in zip(messages.base, messages.y, strict=True) if y < 1)
    assert first == pytest.approx(lanes["start"].min() * 1e3, rel=1e-6)
    idle = [note.text for note in chart.layout.annotations]
    assert f"{100 * report.bubble:.0f} % of device time" in chart.finding
    assert "idle" in idle and len(idle) == P + 1


def test_long_steps_are_in_seconds_and_deep_pipelines_show_some_stages():
    plan, slow = pl.Plan(pp=8, microbatches=16), CLUSTER.replace(flops=1e6)
    chart = stage_time(pl.predict(MODEL, plan, slow, steps=1, detail="actions"))
    assert chart.layout.xaxis.title.text.endswith("(s)")
    assert len(chart.layout.yaxis.ticktext) == 8
    assert stage_stretches.spread(range(64), 8) == [0, 9, 18, 27, 36, 45, 54, 63]
    assert stage_stretches.spread([3, 4], 8) == [3, 4] and stage_stretches.spread([3, 4], 1) == [3]
    few = stage_time(predicted(), ranks=[2])
    assert few.table["rank"].unique().tolist() == [2] and "1 of 4 ranks" in few.below
    assert "(ms)" in few.layout.xaxis.title.text


def test_one_stage_has_a_picture_too():
    plan = pl.Plan(dp=2, microbatches=32, microbatch_size=1)
    chart = stage_time(pl.predict(MODEL, plan, CLUSTER, steps=1, detail="actions"))
    assert "forward and backward take" in chart.finding
    assert "bubble" not in "".join(trace.name for trace in chart.data)
    (waiting,) = [trace for trace in chart.data if trace.name == "waiting"]
    assert any(text.startswith("<b>rank 0</b>, idle<br>") for text in waiting.hovertext)


def test_what_is_not_there_is_refused():
    report = predicted()
    refuses("step=7: .*legal: 0", stage_time, report, step=7)
    refuses("ranks=9: .*legal: 0 . 1 . 2 . 3", stage_time, report, ranks=[9])
    refuses("ranks=.*: not a list of ranks; legal: 0, 1, 2, 3", stage_time, report, ranks=[])
    bare = Report(clock="predicted", model=MODEL, plan=report.plan)
    refuses("no steps", stage_time, bare)
