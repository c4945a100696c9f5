"""Promises of the pictures of offload: every copy drawn and counted, by what it moves and where."""

import dataclasses
import json
from itertools import product

import pytest

import paralab as pl
import synthetic
from paralab.report import amounts, metrics, tables
from paralab.report.report import Report
from paralab.spec import Plan
from paralab.theory.traffic import wire_bytes
from paralab.view import naming, theme, timelines
from paralab.view.page import page
from refusals import refuses
from stated import TIERS

ROWS = ["host to device", "device to host", "host's CPU", "disk read", "disk write"]
# One step of a rank, seconds: what it does, and what its links do meanwhile.
WORK = [("compute", "forward", 0.0, 0.3), ("compute", "wait", 0.3, 0.4),
        ("compute", "backward", 0.4, 0.8), ("compute", "optimizer", 0.8, 0.82),
        ("compute", "wait", 0.82, 1.0), ("host", "compute", 0.6, 0.65),
        ("host", "optimizer", 0.88, 0.9)]  # fmt: skip
COPIES = [("disk", "read", "parameters", 1000, 0.05, 0.15),
          ("h2d", "copy", "parameters", 1000, 0.15, 0.35),
          ("d2h", "copy", "gradients", 500, 0.5, 0.6),
          ("disk", "read", "optimizer", 2000, 0.82, 0.88),
          ("disk", "write", "optimizer", 2000, 0.9, 0.9001)]  # fmt: skip
HELD = [("device", "parameters", 3e6), ("device", "activations", 5e6), ("host", "gradients", 2e6),
        ("host", "buffers", 1e6), ("file", "optimizer", 16e6)]  # fmt: skip
HIDDEN, UNDER_WAY = 0.25 + 0.1, 0.3 + 0.1 + 0.06 + 0.0001  # of COPIES, beside WORK and at all


def made(dp=1, *, copies=COPIES, held=HELD, factor=1.0, **settings) -> Report:
    """Every step like every other; ranks alike, with an all-reduce of 800 bytes if dp > 1."""
    plan = Plan(**{"zero_stage": 3, "offload": "nvme", "dp": dp} | settings)
    rows = {name: [] for name in tables.COLUMNS}
    for step, rank in product(range(3), range(plan.world_size)):

        def at(time, step=step):
            return (step + time) * factor

        def span(lane, kind, start, end, step=step, rank=rank, at=at):
            id_ = len(rows["spans"])
            times = at(start), at(end)
            rows["spans"].append((id_, rank, step, lane, kind, 0, 0, -1, *times, 0.0, ()))
            return id_

        for work in WORK:
            span(*work)
        for lane, *what, start, end in copies:
            id_ = span(lane, "copy", start, end)
            rows["copies"].append((rank, step, lane, *what, at(start), at(end), id_))
        if dp > 1:
            id_ = span("comm:dp", "comm", 0.5, 0.7)
            sent = wire_bytes("all_reduce", 800, dp, rank)
            rows["collectives"].append((step, rank, step, "all_reduce", "dp", tuple(range(dp)), -1,
                                        "intra", "grad_sync", 800, sent, step, step,
                                        id_))  # fmt: skip
        rows["steps"].append((rank, step, at(0.0), at(1.0), 0.0))
        for part, time in ((0.5, 0.1), (1.0, 0.5), (0.25, 0.9)):  # fullest in the middle
            rows["memory"] += [(rank, step, at(time), tier, category, int(part * size) + rank)
                               for tier, category, size in held if step == 0]  # fmt: skip
    meta = {"run_id": "made", "nodes": [0] * plan.world_size}
    return Report(clock="measured", model=synthetic.MODEL, plan=plan, meta=meta,
                  losses=[5.0, 4.0, 3.5], **synthetic.tables(**rows))  # fmt: skip


@pytest.fixture(scope="module")
def one() -> Report:
    return made()


@pytest.fixture(scope="module")
def two() -> Report:
    return made(2)


def labels(chart) -> list[str]:
    return list(chart.layout.yaxis.ticktext)


# ---- numbers -------------------------------------------------------------------------------------
def test_copied_counts_every_byte_once_per_step_by_rank_link_and_category(two):
    found = amounts.copied(two)
    assert list(found.columns) == ["rank", "link", "category", "bytes"]
    assert found.values.tolist() == [
        row for rank in (0, 1) for row in (
            [rank, "h2d", "parameters", 1000], [rank, "d2h", "gradients", 500],
            [rank, "disk read", "optimizer", 2000], [rank, "disk read", "parameters", 1000],
            [rank, "disk write", "optimizer", 2000])
    ]  # fmt: skip
    assert found["bytes"].dtype == "int64" and found["rank"].dtype == "int64"
    assert amounts.copied(two, "rank").values.tolist() == [[0, 6500], [1, 6500]]
    by_link = amounts.copied(two, by="link")
    assert by_link["link"].tolist() == list(amounts.WAYS)  # from the device outwards
    assert by_link["bytes"].tolist() == [2000, 1000, 6000, 4000]
    refuses("by='lane'.*rank.*link.*category", amounts.copied, two, by="lane")
    refuses("nothing to split by", amounts.copied, two, by=[])
    none = made(copies=[])
    assert amounts.copied(none, "rank").values.tolist() == [[0, 0]] and amounts.copied(none).empty


def test_copied_leaves_warm_up_out_and_keeps_halves(one):
    inward = one.copies["lane"] == "h2d"
    rows = one.copies.copy()
    rows.loc[(rows["step"] == 0) & inward, "bytes"] = 7000
    report = dataclasses.replace(one, copies=rows)
    assert amounts.copied(report, "link")["bytes"].tolist() == [1000, 500, 3000, 2000]
    rows.loc[(rows["step"] == 2) & inward, "bytes"] = 1001
    halves = amounts.copied(dataclasses.replace(one, copies=rows), "link")["bytes"]
    assert halves.dtype == "float64" and halves.tolist() == [1000.5, 500, 3000, 2000]


def test_copies_are_hidden_by_work_of_any_kind_and_not_by_waiting(two):
    part = metrics.shares(two, 1)
    assert (part["copies"], part["copies hidden"]) == pytest.approx((UNDER_WAY, HIDDEN))
    late = made(copies=[("h2d", "copy", "parameters", 10, 0.9, 1.1)])  # into the next step's work
    part = metrics.shares(late, 1)
    assert (part["copies"], part["copies hidden"]) == pytest.approx((0.2, 0.1))


def test_the_summary_has_what_there_is_of_each_link_and_how_much_is_hidden(one, two):
    names = ["host to device per step", "device to host per step",
             "disk, read and written per step"]  # fmt: skip
    found = one.summary()
    assert found.loc[names].values.tolist() == [[0.001, "MB"], [0.0005, "MB"], [0.005, "MB"]]
    value = found["value"]
    hidden = pytest.approx(100 * HIDDEN / UNDER_WAY, abs=1e-3)
    assert value["of the copies hidden behind compute"] == hidden
    assert value["optimizer"] == pytest.approx(20)  # the rank's own; what its host does is beside
    assert value["host's processor at work"] == pytest.approx(70)
    assert two.summary().loc["host's processor at work", "value"] == pytest.approx(70)
    assert two.summary().loc[names[0]].tolist() == [0.001, "MB per rank"]  # not of both together
    some = made(copies=COPIES[1:2]).summary().index
    assert names[0] in some and names[1] not in some and names[2] not in some


# ---- timeline ------------------------------------------------------------------------------------
def test_links_stand_below_compute_and_messages_in_words_and_only_where_there_is_something(two):
    rows = labels(two.timeline())
    assert rows == ["<b>rank 0</b>", "dp", *ROWS, "<b>rank 1</b>", "dp", *ROWS]
    assert labels(made(copies=COPIES[2:3]).timeline())[1:] == ROWS[1:3]
    assert labels(made(copies=COPIES[:2]).timeline())[1:] == [ROWS[0], *ROWS[2:4]]


def test_every_copy_is_one_box_at_its_time_in_the_colour_of_what_it_moves(one):
    chart = one.timeline(step=1)
    drawn = synthetic.boxes(chart)
    assert len(drawn) == len(WORK) + len(COPIES)
    legend = [trace.name for trace in chart.data if trace.showlegend]
    assert sorted(legend) == sorted({trace.name for trace in chart.data})
    for lane, op, category, size, start, end in COPIES:
        row = {"h2d": ROWS[0], "d2h": ROWS[1]}.get(lane) or f"disk {op}"
        (box,) = [b for b in drawn if b["row"] == row and b["start"] == pytest.approx(start)]
        assert box["end"] == pytest.approx(end)
        assert box["colour"] == theme.CATEGORY_COLOUR[category]
        moved = {"optimizer": "optimizer states"}.get(category, category)
        assert box["name"] == f"copying {moved}"
        assert f"{size:,} bytes at {theme.scaled(size / (end - start), 'B/s')}" in box["said"]
        assert "device time" not in box["said"]
    assert chart.table["bytes"].sum() == sum(copy[3] for copy in COPIES)
    for words in ("parameters, read from disk", "parameters, host to device",
                  "gradients, device to host", "optimizer states, written to disk"):  # fmt: skip
        assert words in " ".join(b["said"] for b in drawn)
    found = chart.table[chart.table["bytes"] > 0]
    assert sorted(zip(found["lane"], found["op"], found["category"], strict=True)) == sorted(
        copy[:3] for copy in COPIES
    )


def test_the_hosts_processor_adds_and_updates_on_its_own_row(one):
    mine = [b for b in synthetic.boxes(one.timeline()) if b["row"] == "host's CPU"]
    assert {b["name"]: pytest.approx(b["start"]) for b in mine} == {
        "optimizer": 0.88, "adding, rounding": 0.6
    }  # fmt: skip
    assert all("CPU time" in b["said"] for b in mine)


def test_without_categories_boxes_on_links_are_told_apart_by_their_rows(one):
    outline = dataclasses.replace(one, copies=one.copies[:0])
    names = [trace.name for trace in outline.timeline().data]
    assert {"copy, h2d", "copy, d2h", "copy, disk", "optimizer, host"} < set(names)
    assert len(set(names)) == len(names)


def test_a_box_too_short_to_see_has_an_edge_of_its_own_colour(one):
    states = [t for t in one.timeline().data if t.name == "copying optimizer states"]
    (write,), (read,) = [t for t in states if t.x[0] < 1], [t for t in states if t.x[0] > 1]
    assert write.marker.line.color == (theme.CATEGORY_COLOUR["optimizer"],)
    assert read.marker.line.color == (theme.look().paper,)


def test_the_title_says_how_much_of_the_copies_is_hidden(one, two):
    share = f"{100 * HIDDEN / UNDER_WAY:.0f} % of copies are hidden"
    assert one.timeline().finding == f"One device, ZeRO-3, offload to nvme: {share}"
    both = f"100 % of communication and {share}"
    assert two.timeline().finding == f"dp=2, ZeRO-3, offload to nvme: {both}"
    assert one.timeline().below.endswith("1000.0 ms · waiting: 28 % of the step")
    slow = {"gradients": "cpu", "optimizer": "cpu", "bandwidth": {"disk": 1, "h2d": "2GB"}}
    slowed = made(copies=COPIES[1:3], zero_stage=2, offload=slow)  # no file is used
    assert slowed.timeline().below.endswith(" of the step · host to device limited to 2 GB/s")
    assert "limited" not in timelines(slowed, made()).below  # their names say which of the two is


def test_what_a_link_does_for_the_step_before_is_drawn_and_not_counted():
    late = made(copies=[("h2d", "copy", "parameters", 10, 0.9, 1.1)])
    chart = late.timeline(step=1)
    starts = [b["start"] for b in synthetic.boxes(chart) if b["row"] == "host to device"]
    assert starts == pytest.approx([-0.1, 0.9])
    assert sum(", of step 0" in b["said"] for b in synthetic.boxes(chart)) == 1


def test_a_pipeline_that_offloads_activations_stands_below_its_ideal():
    plan = Plan(pp=2, microbatches=2, recompute="full", offload={"activations": "cpu"})
    report = pl.predict(synthetic.MODEL, plan, TIERS, steps=1)
    assert "ideal" in report.timeline().below
    alone = report.timeline(ideal=False)
    assert "device to host" in labels(alone) and "activations to cpu" in alone.finding


@pytest.mark.parametrize(("settings", "said"), [
    ({"dp": 4, "zero_stage": 2}, "dp=4, ZeRO-2"),
    ({"dp": 4, "zero_stage": 3, "shard": 2}, "dp=4, ZeRO-3 in groups of 2"),
    ({"dp": 4, "zero_stage": 3, "secondary_shard": 2}, "dp=4, ZeRO-3 with hpZ in groups of 2"),
    ({"dp": 2, "pp": 2, "microbatches": 4, "zero_stage": 1}, "1F1B, p=2, m=4, dp=2, ZeRO-1"),
    ({"dp": 4, "zero_stage": 1, "offload": "cpu"}, "dp=4, ZeRO-1, optimizer to cpu"),
    ({"offload": {"activations": "cpu"}, "recompute": "full"}, "one device, activations to cpu"),
    ({"zero_stage": 2, "offload": {"gradients": "cpu", "optimizer": "cpu", "delayed": True}},
     "one device, ZeRO-2, offload to cpu, delayed"),
    ({"zero_stage": 2, "offload": {"gradients": "cpu", "optimizer": "nvme"}},
     "one device, ZeRO-2, offload to cpu and nvme"),
])  # fmt: skip
def test_the_plans_name_says_its_stage_and_where_what_left_the_device_is(settings, said):
    assert naming.plan_name(Plan(**settings)) == said


# ---- traffic -------------------------------------------------------------------------------------
def stacks(chart, axis: str) -> dict[tuple[str, str], float]:
    """{(bar, trace): bytes} of the bars on an axis."""
    per = theme.UNITS[chart.layout[axis.replace("x", "xaxis")].title.text[-3:-1].strip("(")]
    return {(y, t.name): x * per for t in chart.data
            if t.type == "bar" and t.xaxis == axis
            for x, y in zip(t.x, t.y, strict=True)}  # fmt: skip


LINKS = {("host to device", "parameters"): 1000, ("device to host", "gradients"): 500,
         ("disk read", "parameters"): 1000, ("disk read", "optimizer"): 2000,
         ("disk write", "optimizer"): 2000}  # fmt: skip


def test_where_nothing_is_sent_the_chart_of_traffic_is_that_of_the_links(one):
    chart = one.traffic_chart()
    assert stacks(chart, "x2") == pytest.approx(LINKS)
    assert [t.type for t in chart.data] == ["bar"] * 3  # no matrix of one rank
    assert all(t.marker.color == theme.CATEGORY_COLOUR[t.name] for t in chart.data)
    assert chart.finding == (
        "One device, ZeRO-3, offload to nvme: the rank copies 6.5 kB per step, "
        "77 % of it to and from disk"
    )
    assert chart.table["bytes"].sum() == 6500
    assert "disk" not in made(copies=COPIES[1:3]).traffic_chart().finding


def test_links_stand_beside_what_is_sent_per_rank_and_on_one_scale(two):
    chart = two.traffic_chart()
    assert [t.type for t in chart.data] == ["heatmap", *["bar"] * 4]
    sent = {("inside a node", "dp, all_reduce"): 800}
    assert stacks(chart, "x2") == pytest.approx({**sent, **LINKS})
    order = list(chart.layout.yaxis2.categoryarray)
    assert order == ["inside a node", ROWS[0], ROWS[1], *ROWS[3:]]
    assert chart.layout.xaxis2.range[1] > 3000 / 1e3  # the longest bar is a link's
    tops = [note.text for note in chart.layout.annotations]
    assert tops == [" 800 B", " 1 kB", " 500 B", " 3 kB", " 2 kB"]
    assert "sends 800 B and copies 6.5 kB per step" in chart.finding
    own = chart.table[chart.table["sender"] == chart.table["receiver"]]
    assert own["bytes"].sum() == 2 * 6500 and chart.table["bytes"].sum() == 2 * (6500 + 800)


def test_what_messages_pass_through_is_no_offload_and_leaves_the_chart_of_traffic_alone():
    """Ranks that share a GPU send through the host: copies, and a plan that offloads nothing."""
    staged = [("d2h", "copy", "buffers", 800, 0.5, 0.55), ("h2d", "copy", "buffers", 800, 0.6, 0.7)]
    with_, without = (made(2, copies=copies, zero_stage=0, offload=None) for copies in (staged, []))
    charts = [report.traffic_chart() for report in (with_, without)]
    assert charts[0].to_json() == charts[1].to_json()
    assert list(charts[0].table) == list(charts[1].table)
    assert "host to device" in labels(with_.timeline())
    assert "copies" not in with_.timeline().finding


# ---- memory --------------------------------------------------------------------------------------
def test_what_is_elsewhere_stands_in_the_second_line_at_each_tiers_fullest(one):
    chart = one.memory_chart()
    assert "peaks at 8 MB" in chart.finding
    assert chart.below.endswith("at most 3 MB on the host · at most 16 MB in files")
    above = [t for t in chart.data if t.type == "scatter" and t.stackgroup]
    assert {t.name for t in above} == {"parameters", "activations"}  # panels: the device alone
    assert "at most" not in made(held=HELD[:2]).memory_chart().below


# ---- files ---------------------------------------------------------------------------------------
def test_the_page_draws_the_links_and_says_what_was_offloaded(one):
    text = page(made(zero_stage=2, offload={"gradients": "cpu", "optimizer": "nvme",
                                            "bandwidth": {"disk": "1GB"}}))  # fmt: skip
    assert "host to device per step" in text and "of the copies hidden behind compute" in text
    assert '"optimizer": "nvme"' in text and "Offload(" not in text
    assert "1000000000" in text and '"delayed"' not in text  # what was set, no more
    assert "host to device" in page(one) and "sent per rank and step" in page(made(2))


def test_perfetto_has_a_track_per_lane_and_the_bytes_of_every_copy(two, tmp_path):
    two.to_perfetto(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events
               if e["name"] == "thread_name"}  # fmt: skip
    for rank in (0, 1):
        own = [name for (pid, _), name in sorted(threads.items()) if pid == rank]
        assert own == ["compute", "comm:dp", *ROWS[:3], "disk"]
    copies = {e["name"]: e for e in events if e["ph"] == "X" and "bytes" in e["args"]}
    moved = sum(e["args"].get("bytes", 0) for e in events if e["ph"] == "X")
    assert moved == two.copies["bytes"].sum()
    write = copies["write optimizer"]
    assert threads[write["pid"], write["tid"]] == "disk"


def test_a_real_run_is_drawn_on_both_clocks():
    """Small, through files and back: every picture, and no byte more or less than it recorded."""
    plan = Plan(zero_stage=3, offload="nvme", microbatches=2)
    report = pl.run(synthetic.MODEL, plan, steps=2, progress=False)
    for found in (report, report.replay()):
        moved = found.copies["bytes"][found.copies["step"] == 1].sum()
        timeline = found.timeline(step=1)
        assert timeline.table["bytes"].sum() == found.traffic_chart().table["bytes"].sum() == moved
        assert labels(timeline)[1:] == ROWS and moved > 0
        assert "on the host · at most" in found.memory_chart().below
