"""What every stage needs and what every link carries: the bars are the report's own numbers."""

from __future__ import annotations

import pytest

import paralab as pl
from paralab.report import metrics
from paralab.view import link_traffic, stage_bars, stage_memory, theme

LINK = pl.Link(alpha=1e-4, bandwidth=1e9)
CLUSTER = pl.Cluster(
    name="small", nodes=4, devices_per_node=2, flops=5e10, memory_bandwidth=2e10, op_overhead=1e-5,
    memory=10**6, intra=LINK, inter=LINK.replace(bandwidth=1e8), host=LINK.replace(bandwidth=5e8),
    disk=LINK.replace(bandwidth=2e8), host_bandwidth=1e9,
)  # fmt: skip
MODEL = pl.ModelSpec(layers=4, hidden=32, heads=2, seq_len=16)


def predicted(**plan) -> pl.Report:
    return pl.predict(MODEL, pl.Plan(**plan), CLUSTER, steps=1)


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
    assert "memory of small" in chart.layout.annotations[-1].text


def test_in_outline_the_bars_are_the_same():
    plan = pl.Plan(pp=4, dp=2, microbatches=4)
    whole = pl.predict(MODEL, plan, CLUSTER, steps=1, detail="calls")
    brief = pl.predict(MODEL, plan, CLUSTER, steps=1, detail="actions")
    assert bars(stage_memory(whole)) == bars(stage_memory(brief))
    totals = [one.table.groupby(["link", "what"])["bytes"].sum() for one in
              (link_traffic(whole), link_traffic(brief))]  # fmt: skip
    assert totals[0].index.tolist() == totals[1].index.tolist()
    assert totals[0].tolist() == pytest.approx(totals[1].tolist(), rel=1e-2)


def test_what_was_offloaded_has_bars_of_its_own_and_its_links():
    report = predicted(dp=2, zero_stage=3, offload={"parameters": "nvme", "gradients": "cpu",
                                                    "optimizer": "nvme"})  # fmt: skip
    assert list(bars(stage_memory(report))) == ["device", "host", "files"]
    table = link_traffic(report).table
    copied = report.copied(("link", "category")).set_index(["link", "category"])["bytes"] / 2
    drawn = table[table["link"] != "intra"].set_index(["link", "what"])["bytes"]
    assert drawn.to_dict() == copied.to_dict() and len(drawn) >= 4
    reads = table[table["link"] == "disk read"]
    assert reads["seconds"].sum() == pytest.approx(reads["bytes"].sum() / 2e8)


def test_links_carry_what_ranks_send_and_take_bytes_over_bandwidth():
    report = predicted(dp=2, tp=2, pp=2, microbatches=2)
    chart = link_traffic(report)
    sent = report.traffic()["bytes"].sum() / 8
    assert chart.table["bytes"].sum() == pytest.approx(sent)
    near, far = (chart.table[chart.table["link"] == level] for level in ("intra", "inter"))
    assert set(near["what"]) == {"tp"} and set(far["what"]) == {"dp", "pp"}
    assert far["seconds"].sum() == pytest.approx(far["bytes"].sum() / 1e8)
    assert near["seconds"].sum() == pytest.approx(near["bytes"].sum() / 1e9)
    worst = max((near, far), key=lambda part: part["seconds"].sum())
    place = "between nodes" if worst is far else "inside a node"
    assert chart.finding == (f"Bytes take longest {place}: "
                             f"{theme.scaled(float(worst['seconds'].sum()), 's')} for "
                             f"{theme.scaled(float(worst['bytes'].sum()), 'B')}")  # fmt: skip
    colours = {trace.name: trace.marker.color for trace in chart.data}
    assert colours == {axis: theme.axis_colour(axis) for axis in ("tp", "dp", "pp")}


def test_several_reports_stand_beside_one_another():
    expect = predicted(dp=2, microbatches=2)
    again = expect.replay(CLUSTER)
    chart = stage_memory(expect, again)
    assert list(bars(chart)) == ["device, predicted", "device, replayed"]
    assert ", replayed " in chart.finding and "predicted and replayed" in chart.summary
    links = link_traffic(expect, again)
    assert [a.y for a in links.layout.annotations] == [
        "inside a node, predicted", "inside a node, replayed"]  # fmt: skip
    assert set(links.table["clock"]) == {"predicted", "replayed"}
    assert theme.scaled(float(metrics.traffic(expect)["bytes"].mean()), "B") in links.finding


def test_reports_on_one_clock_are_told_apart_by_their_plans():
    one, other = (predicted(dp=2, zero_stage=stage) for stage in (0, 1))
    peaks = [bars(stage_memory(report))["device"] for report in (one, other)]
    both = bars(stage_memory(one, other))
    assert list(both.values()) == peaks and len(both) == 2
    sent = [a.y for a in link_traffic(one, other).layout.annotations]
    assert len(sent) == len(set(sent)) == 2


def test_of_many_stages_the_fullest_first_and_last_are_drawn():
    report = pl.predict(MODEL.replace(layers=8), pl.Plan(pp=8, microbatches=8), CLUSTER, steps=1)
    chart = stage_memory(report)
    assert len(bars(chart)) == 4 and {"stage 0", "stage 7"} <= set(bars(chart))
    assert "4 of 8 stages drawn" in chart.below


def test_what_does_not_fit_says_so_with_the_numbers():
    report = predicted(dp=2, microbatch_size=8)
    peak = theme.scaled(report.peak_memory, "B")
    assert report.peak_memory > 10**6
    assert f"needs {peak} of 1 MB: " in stage_memory(report).finding
    assert stage_memory(report).finding.endswith("it does not fit")
    said = stage_bars.fits(report)
    assert said.startswith(f"It does not fit: a device of stage 0 needs {peak} and has 1 MB")
    roomy = pl.predict(MODEL, pl.Plan(dp=2), CLUSTER.replace(memory=10**9), steps=1)
    assert stage_bars.fits(roomy) is None


def test_nothing_to_draw_is_refused():
    for draw in (stage_memory, link_traffic):
        with pytest.raises(ValueError, match=r"reports=\(\): nothing to draw"):
            draw()
    bare = pl.Report(clock="measured", model=MODEL, plan=pl.Plan())
    with pytest.raises(ValueError, match="no memory was sampled"):
        stage_memory(bare)
    assert link_traffic(predicted()).finding == "Nothing is sent"
