"""What every stage needs, and what it does with its step; what every link carries. The bars are the
report's own numbers, and no second is lost.
"""

import dataclasses
from collections import Counter
from functools import cache
from itertools import product

import numpy as np
import pytest

import paralab as pl
from paralab.view import stage_memory, stage_stretches, stage_time, theme
from paralab.view.memory_chart import fits
from refusals import refuses
from widgets import DEEP, LINK, TINY, bars

CLUSTER = pl.Cluster(
    name="small", nodes=4, devices_per_node=2, flops=5e10, memory_bandwidth=2e10, op_overhead=1e-5,
    memory=10**6, intra=LINK, inter=LINK.replace(bandwidth=1e8), host=LINK.replace(bandwidth=5e8),
    disk=LINK.replace(bandwidth=2e8), host_bandwidth=1e9,
)  # fmt: skip


def predicted(layers=4, **plan) -> pl.Report:
    return pl.predict(TINY.replace(layers=layers), pl.Plan(**plan), CLUSTER, steps=1)


def test_a_stages_bar_is_the_peak_of_its_fullest_rank():
    report = predicted(pp=4, dp=2, microbatches=4)
    chart, found = stage_memory(report), report.memory
    sums = found.groupby(["rank", "time"])["bytes"].sum().groupby("rank").max()
    by_stage = {f"stage {s}": max(sums[r] for r in (2 * s, 2 * s + 1)) for s in range(4)}
    assert bars(chart) == by_stage
    assert max(bars(chart).values()) == report.peak_memory
    assert chart.finding.startswith(f"Stage 0 needs {theme.scaled(report.peak_memory, 'B')}, ")
    assert "a device of cluster small" in chart.layout.annotations[-1].text


def test_what_was_offloaded_has_its_links():
    places = {"parameters": "nvme", "gradients": "cpu", "optimizer": "nvme"}
    report = predicted(dp=2, zero_stage=3, offload={**places, "bandwidth": {"disk": "50MB"}})
    copied = report.copied("link").set_index("link")["bytes"] / 2
    found = sums(report)
    assert list(found) == ["inside a node", "host to device", "device to host", "disk read",
                           "disk write"]  # fmt: skip
    assert found["disk read"] == said(copied["disk read"], 5e7)  # the cluster's disk has 2e8
    assert report.traffic_chart().below.endswith(" · disk limited to 50 MB/s")
    assert found["host to device"] == said(copied["h2d"], 5e8)


def sums(report: pl.Report) -> dict[str, str]:
    """{link: what stands behind its bar}."""
    chart = report.traffic_chart(matrix=False)
    assert {trace.type for trace in chart.data} == {"bar"}  # and nothing else
    return {note.y: note.text.strip() for note in chart.layout.annotations}


def said(size: float, bandwidth: float) -> str:
    return f"{theme.scaled(float(size), 'B')}, {theme.scaled(float(size) / bandwidth, 's')}"


def test_links_carry_what_ranks_send_and_take_bytes_over_bandwidth():
    report = predicted(dp=2, tp=2, pp=2, microbatches=2)
    sent = report.traffic(by="level").set_index("level")["bytes"] / 8
    near, far = said(sent["intra"], 1e9), said(sent["inter"], 1e8)
    assert sums(report) == {"inside a node": near, "between nodes": far}
    one = pl.predict(
        report.model, report.plan, CLUSTER.replace(ports=1), steps=1
    )  # two ranks share it
    assert sums(one)["between nodes"] == said(sent["inter"], 0.5e8)
    chart = report.traffic_chart(matrix=False)
    colours = {trace.name: trace.marker.color for trace in chart.data}
    names = ["tp, all_gather", "tp, all_reduce", "dp, all_reduce", "pp, all_reduce", "pp, send"]
    assert colours == {name: theme.axis_colour(name[:2]) for name in names}
    # Else a bar with a pattern has the colour of paper.
    assert {trace.marker.pattern.fillmode for trace in chart.data} == {"overlay"}
    assert sum(sum(bar.x) for bar in chart.data) * 1e3 == pytest.approx(sent.sum())


def test_no_link_is_said_to_take_seconds_where_no_cluster_states_it():
    report = predicted(dp=2)
    bare = dataclasses.replace(report, cluster=None)
    assert sums(bare) == {link: text.split(",")[0] for link, text in sums(report).items()}
    assert "seconds" in report.traffic_chart().below and "seconds" not in bare.traffic_chart().below
    assert "nothing is sent" in predicted().traffic_chart(matrix=False).finding


def test_without_a_pipeline_there_is_one_bar_and_of_many_stages_the_fullest_first_and_last():
    report = predicted(dp=2, microbatches=2)
    assert bars(stage_memory(report)) == {"one rank": report.peak_memory}
    chart = stage_memory(predicted(8, pp=8, microbatches=8))
    assert len(bars(chart)) == 4 and {"stage 0", "stage 7"} <= set(bars(chart))
    assert "4 of 8 stages drawn" in chart.below
    chunks = predicted(8, pp=2, schedule="interleaved", virtual_stages=2, microbatches=4)
    assert stage_memory(chunks).finding.startswith("One rank with stages 0, 2 needs ")
    bare = pl.Report(clock="measured", model=TINY, plan=pl.Plan())
    refuses("no memory was sampled", stage_memory, bare)


def test_what_does_not_fit_says_so_with_the_numbers():
    report = predicted(dp=2, microbatch_size=8)
    peak = theme.scaled(report.peak_memory, "B")
    assert report.peak_memory > 10**6
    nameless = report.replay(CLUSTER.replace(name=pl.Cluster.name))
    for one, where in ((report, "cluster small"), (nameless, "the stated cluster")):
        found = stage_memory(one).finding
        assert found.startswith(f"One rank needs {peak}, ")
        assert found.endswith(f" times the 1 MB of a device of {where}")
    said = f"It does not fit: one rank needs {peak} on a device that has 1 MB"
    assert fits(report).startswith(said)
    assert fits(report.replay(CLUSTER.replace(memory="1GB"))) is None
    unlimited = stage_memory(report.replay(CLUSTER.replace(memory=pl.Cluster.memory)))
    assert "device" not in unlimited.finding + unlimited.below


# ---- a step of each stage ------------------------------------------------------------------------
FAST = pl.Cluster(flops=5e10, memory_bandwidth=2e10, devices_per_node=64,
                  intra=pl.Link(alpha=1e-5, bandwidth=1e10))  # fmt: skip
P, M = 4, 48


@cache
def deep(detail="actions", **settings):
    plan = pl.Plan(pp=P, microbatches=M, microbatch_size=1, **settings)
    return pl.predict(DEEP, plan, FAST, steps=1, detail=detail)


CHUNKS = {"schedule": "interleaved", "virtual_stages": 2}
IN_FULL = [{"dp": 2}, {"tp": 2}, CHUNKS, {"recompute": "full"}]


@pytest.mark.parametrize(("detail", "settings"), [
    *product(["actions"], [*IN_FULL, {}, {"schedule": "gpipe"}, {"schedule": "zb-h1"}]),
    *product(["calls"], IN_FULL),
], ids=str)  # fmt: skip
def test_no_second_of_a_rank_is_lost_and_none_counted_twice(detail, settings):
    report = deep(detail, **settings)
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
            cost = here["cost"][here["kind"] == kind].sum()
            assert mine[kind].sum() == pytest.approx(cost, rel=1e-9)
    # In full, calls have boxes of their own; what is computed again waits for its gradient inside.
    inside = detail == "actions" and ("tp" in settings or "recompute" in settings)
    assert (table["within"].sum() > 0.01 * steps.max()) == inside


@pytest.mark.parametrize(("settings", "causes"), [
    ({"tp": 2}, "messages of tp"), ({"recompute": "full"}, "gradients"),
    ({"recompute": "full", "tp": 2}, "messages of tp and gradients"),
])  # fmt: skip
def test_all_that_a_rank_waits_for_inside_actions_is_named(settings, causes):
    """A backward that computes everything again waits for its gradient inside."""
    chart = stage_time(deep(**settings))
    inside = "waiting inside actions" + ": messages of tp" * (causes == "messages of tp")
    assert inside in {trace.name for trace in chart.data}
    assert f"inside actions ranks wait for {causes}" in chart.below
    plain = stage_time(deep())
    assert "waiting" in {trace.name for trace in plain.data}
    assert "inside actions" not in plain.below


def test_1f1b_fills_goes_on_and_drains_stage_by_stage():
    report = deep()
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
    report = deep(dp=2, tp=2)
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
    plan, slow = pl.Plan(pp=8, microbatches=16), FAST.replace(flops=1e6)
    chart = stage_time(pl.predict(DEEP, plan, slow, steps=1, detail="actions"))
    assert chart.layout.xaxis.title.text.endswith("(s)")
    assert len(chart.layout.yaxis.ticktext) == 8
    assert stage_stretches.spread(range(64), 8) == [0, 9, 18, 27, 36, 45, 54, 63]
    assert stage_stretches.spread([3, 4], 8) == [3, 4] and stage_stretches.spread([3, 4], 1) == [3]
    assert "(ms)" in stage_time(deep()).layout.xaxis.title.text


def test_one_stage_has_a_picture_too():
    plan = pl.Plan(dp=2, microbatches=32, microbatch_size=1)
    chart = stage_time(pl.predict(DEEP, plan, FAST, steps=1, detail="actions"))
    assert "forward and backward take" in chart.finding
    assert "bubble" not in "".join(trace.name for trace in chart.data)
    (waiting,) = [trace for trace in chart.data if trace.name == "waiting"]
    assert any(text.startswith("<b>rank 0</b>, idle<br>") for text in waiting.hovertext)
