"""What every stage needs and what every link carries: the bars are the report's own numbers."""

from __future__ import annotations

import dataclasses

import pytest

import paralab as pl
from paralab.view import stage_memory, theme
from paralab.view.memory_chart import fits
from refusals import refuses

LINK = pl.Link(alpha=1e-4, bandwidth=1e9)
CLUSTER = pl.Cluster(
    name="small", nodes=4, devices_per_node=2, flops=5e10, memory_bandwidth=2e10, op_overhead=1e-5,
    memory=10**6, intra=LINK, inter=LINK.replace(bandwidth=1e8), host=LINK.replace(bandwidth=5e8),
    disk=LINK.replace(bandwidth=2e8), host_bandwidth=1e9,
)  # fmt: skip
MODEL = pl.ModelSpec(layers=4, hidden=32, heads=2, seq_len=16)


def predicted(layers=4, **plan) -> pl.Report:
    return pl.predict(MODEL.replace(layers=layers), pl.Plan(**plan), CLUSTER, steps=1)


def bars(chart) -> dict[str, float]:
    return chart.table.groupby("bar", sort=False)["bytes"].sum().to_dict()


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
    report = predicted(dp=2, zero_stage=3, offload={"parameters": "nvme", "gradients": "cpu",
                                                    "optimizer": "nvme"})  # fmt: skip
    copied = report.copied("link").set_index("link")["bytes"] / 2
    found = sums(report)
    assert list(found) == ["inside a node", "host to device", "device to host", "disk read",
                           "disk write"]  # fmt: skip
    assert found["disk read"] == said(copied["disk read"], 2e8)
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
    one = pl.predict(MODEL, report.plan, CLUSTER.replace(ports=1), steps=1)  # two ranks share it
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
    bare = pl.Report(clock="measured", model=MODEL, plan=pl.Plan())
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
    assert fits(report.replay(CLUSTER.replace(memory=10**9))) is None
    unlimited = stage_memory(report.replay(CLUSTER.replace(memory=pl.Cluster.memory)))
    assert "device" not in unlimited.finding + unlimited.below
