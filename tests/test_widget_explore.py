"""The explorer without a browser: every knob moves its views, what cannot be says why, and runs."""

import html
import re
import threading
import warnings
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pandas as pd
import pytest

import paralab as pl
from paralab import view
from paralab.view import widget_explore, widget_picture
from paralab.view.widget import STALE
from refusals import refuses
from widgets import BOTH as PLAN
from widgets import CLUSTER, PATIENCE, numbers, shown
from widgets import DEEP as MODEL

VIEWS = ("timeline", "mesh", "memory", "traffic")
NO_MESH, TIMES = ("timeline", "memory", "traffic"), ("timeline", "mesh", "traffic")


@pytest.fixture
def bench(make) -> view.widgets.explore:
    return make("explore")


def on_screen(bench: view.widgets.explore) -> list[dict]:
    """What the four figures show, as plain data."""
    return [shown(view.figure) | {"title": view.head.value} for view in bench._views.children]


# ---- sliders -------------------------------------------------------------------------------------
MOVES = [  # knob, value, the views that cannot look the same
    ("dp", 4, TIMES), ("tp", 2, VIEWS), ("microbatches", 8, NO_MESH),
    ("microbatch_size", 4, NO_MESH), ("schedule", "gpipe", ("timeline", "memory")),
    ("schedule", "interleaved", ("timeline",)), ("virtual_stages", 2, NO_MESH),
    ("zero_stage", 1, ("timeline", "mesh", "memory")),
    ("recompute", "full", ("timeline", "memory")), ("sequence_parallel", True, VIEWS),
    ("dp", 2, TIMES), ("cluster", "dgx-a100", NO_MESH),
    ("nodes", 4, ()),  # makes room for what comes now
    ("model", "ptdp-7.5b", NO_MESH), ("pp", 4, VIEWS), ("microbatches", 64, NO_MESH),
]  # fmt: skip


def test_every_knob_moves_its_views_to_what_the_plain_functions_draw(bench):
    start, moved, forms = dict(bench.values), set(), set()
    first = after = dict(zip(VIEWS, on_screen(bench), strict=True))
    for name, value, changing in MOVES:
        before = after
        bench.knobs[name].value = value
        assert bench.error is None, (name, value, bench.error)
        after = dict(zip(VIEWS, on_screen(bench), strict=True))
        for one in changing:
            assert after[one] != before[one], (name, value, one)
        moved.add(name)
        at, plan, cluster = bench.values, bench.values.plan, bench.values.cluster
        report = pl.predict(at.model, plan, cluster, steps=1, detail="actions")
        ranks = widget_explore.shown_ranks(report, widget_explore.BOXES)
        # Boxes too narrow to be seen are drawn as stretches of a stage's time.
        crowded = "height of a colour" in bench.charts[0].below
        forms.add(crowded)
        steps = view.stage_time(report) if crowded else report.timeline(ranks=ranks, ideal=False)
        twins = [steps, view.mesh(plan, cluster), view.stage_memory(report),
                 report.traffic_chart(matrix=False)]  # fmt: skip
        for mine, twin in zip(bench.charts, twins, strict=True):
            assert mine.table.equals(twin.table) and repr(mine) == repr(twin), (name, repr(twin))
    bench.set(pp=1, virtual_stages=1, tp=1, model="given", zero_stage=2, sequence_parallel=False)
    for name, value in {"offload": "cpu", "precision": "bf16"}.items():  # with no pipeline
        before = on_screen(bench)
        bench.set(**{name: value})
        assert bench.error is None and on_screen(bench) != before, name
        moved.add(name)
    assert moved == set(bench.knobs) and forms == {False, True}
    bench.set(**start)
    assert on_screen(bench) == list(first.values())  # and back again


def test_the_plain_twins_move_no_slider(bench):
    before, screen = bench.values, on_screen(bench)
    assert bench.predict(dp=4).table.equals(bench.views(dp=4)["timeline"].table)
    found = bench.views(dp=4, pp=4)
    assert list(found) == list(VIEWS) and len(found["mesh"].table) == 16
    assert bench.values == before and on_screen(bench) == screen
    bench.set(dp=4, pp=4)
    for mine, twin in zip(bench.charts, found.values(), strict=True):
        assert mine.table.equals(twin.table)
        assert mine.layout.title == twin.layout.title and repr(mine) == repr(twin)


def test_the_table_and_the_code_say_what_is_predicted(bench):
    bench.set(dp=4, zero_stage=1)
    report = pl.predict(MODEL, bench.values.plan, CLUSTER, steps=1)
    (row,) = numbers(bench)
    assert row["clock"] == "predicted"
    assert row["peak memory"] == view.theme.scaled(report.peak_memory, "B")
    sent = float(report.traffic()["bytes"].mean())
    assert row["sent inside a node"] == view.theme.scaled(sent, "B")
    assert row["sent between nodes"] == "0 B"
    tokens = report.plan.global_batch * MODEL.seq_len / bench.values.predicted.step_time
    assert row["tokens per second"] == f"{tokens:,.0f}"
    said = re.search("plan = (.*?)</div>", bench._code.value)[1]
    assert eval(said, {"pl": pl}) == bench.values.plan


def test_no_table_of_a_view_is_made_while_sliders_move(bench):
    bench.set(microbatches=8)
    assert not any(isinstance(chart._table, pd.DataFrame) for chart in bench.charts)


def test_ranks_by_the_thousand_are_drawn_in_part_and_deep_pipelines_as_stretches():
    plan = pl.Plan(pp=8, microbatches=32, microbatch_size=1)
    deep = pl.predict(MODEL, plan, CLUSTER, steps=1, detail="actions")
    assert widget_explore._boxes_per_rank(deep) < widget_explore.BOXES  # those of two stages fit
    assert "height of a colour" in widget_explore.step_chart(deep).below
    cluster = pl.Cluster.preset("dgx-a100", nodes=384)
    plan = pl.Plan(dp=6, tp=8, pp=64, microbatches=4, microbatch_size=1, recompute="full")
    bench = pl.explore(pl.ModelSpec.preset("ptdp-1t"), plan, cluster)
    assert bench.values["nodes"] == 384 and bench.error is None
    timeline, mesh, memory, _ = bench.charts
    assert "height of a" not in timeline.below and repr(bench.chart) == repr(timeline)
    assert "8 of 3072 ranks drawn" in timeline.below and timeline.table["rank"].nunique() == 8
    assert " stages drawn" in mesh.below and "4 of 64 stages drawn" in memory.below
    assert "this is a prediction for cluster dgx-a100" in bench._status.value
    assert "boxes include their waits for tp" in timeline.below and bench._run_button.disabled


# ---- what cannot be ------------------------------------------------------------------------------
IMPOSSIBLE = [
    ({"tp": 8}, "<b>heads=4</b> is impossible: tp=8 partitions it into 8 equal", "a multiple of 8"),
    ({"virtual_stages": 2}, "<b>virtual_stages=2</b> is impossible: schedule=&#x27;1f1b&#x27; has",
     "1, or schedule="),
    ({"offload": "cpu"}, "<b>zero_stage=0</b> is impossible: offload=&#x27;cpu&#x27; moves the",
     "1 (optimizer), 2"),
    ({"dp": 512}, "<b>dp=512</b> is impossible: the plan needs 1024 devices, and cluster "
     "&#x27;stated&#x27; has 64", "fewer ranks"),
    ({"sequence_parallel": True}, "<b>sequence_parallel=True</b> is impossible: it shards",
     "False"),
]  # fmt: skip


@pytest.mark.parametrize(("knobs", "why", "legal"), IMPOSSIBLE, ids=lambda value: str(value)[:20])
def test_an_impossible_combination_says_why_in_place_of_its_views(bench, knobs, why, legal):
    before = on_screen(bench)
    for name, value in knobs.items():
        bench.knobs[name].value = value
    said = bench._trouble.value
    assert bench.state == "error" and why in said
    assert legal in said.partition("What would work: ")[2]
    assert bench._run_button.disabled and STALE in bench._views._dom_classes
    assert on_screen(bench) == before and not bench._numbers.value
    assert f".{STALE} {{ opacity: 0.2" in said
    for call in (bench.predict, bench.views, lambda: bench.run().wait(PATIENCE)):
        refuses("legal: ", call)
    for name in knobs:  # and back again
        bench.knobs[name].value = getattr(PLAN, name) if name != "offload" else "none"
    assert bench.state == "idle" and bench.error is None and not bench._trouble.value
    assert not bench._run_button.disabled and STALE not in bench._views._dom_classes
    assert on_screen(bench) == before and numbers(bench)


def test_code_that_fails_leaves_no_picture_of_other_settings(monkeypatch):
    """An own schedule may raise what it likes, or say no in its own words."""

    def mine(pp, microbatches, virtual_stages):
        if microbatches == 8:
            raise ValueError("eight: is too many")
        return {2: pl.parallel.schedules.gpipe(pp, microbatches)}[microbatches]

    monkeypatch.setenv("PARALAB_PICTURES", "1")
    bench = pl.explore(MODEL, PLAN.replace(schedule=mine), CLUSTER)
    assert widget_picture.FIGURES in bench._repr_mimebundle_()
    for microbatches, why in ((4, "<b>KeyError</b>: 4"), (8, "<b>ValueError</b>: eight: is too")):
        bench.set(microbatches=microbatches)
        assert bench.state == "error" and STALE in bench._views._dom_classes
        assert why in bench._trouble.value and "is impossible: " not in bench._trouble.value
        assert bench._run_button.disabled and not bench._numbers.value and not bench._code.value
        assert widget_picture.FIGURES not in bench._repr_mimebundle_()
        with pytest.raises((KeyError, ValueError)):
            bench.run()
        assert STALE in bench._views._dom_classes
    bench.set(microbatches=2)
    assert bench.state == "idle" and STALE not in bench._views._dom_classes and numbers(bench)


def test_settings_that_became_impossible_during_a_run_stay_grey_behind_it(bench, monkeypatch):
    def measured(at, stop, progress):
        bench.set(tp=8)
        raise RuntimeError("the run's own trouble")

    monkeypatch.setattr(bench, "_measure", measured)
    with pytest.raises(RuntimeError, match="own trouble"):
        bench.run().wait(PATIENCE)
    assert STALE in bench._views._dom_classes and bench._run_button.disabled
    assert "tp=8 partitions" in bench._trouble.value


def test_code_of_ones_own_need_not_be_hashable_nor_copyable():
    @dataclass
    class Nothing:
        lock: Any = field(default_factory=threading.Lock)

        def __call__(self, program):
            return program

    bench = pl.explore(MODEL, PLAN.replace(passes=(Nothing(),)), CLUSTER)
    assert bench.state == "idle" and bench.result is None and numbers(bench)
    assert "passes=(your_own,)" in bench._code.value


def test_the_code_line_makes_this_plan():
    def my_pass(program):
        return program

    def my_schedule(pp, microbatches, virtual_stages):
        return pl.parallel.schedules.gpipe(pp, microbatches)

    given = {"zero_stage": 1, "offload": {"optimizer": "nvme", "bandwidth": {"disk": "1GB"}}}
    names = {"pl": pl, "my_pass": my_pass, "my_schedule": my_schedule}
    for plan in (
        pl.Plan(dp=2, passes=(my_pass,)), pl.Plan(pp=2, microbatches=2, schedule=my_schedule),
        pl.Plan(dp=2, **given),
    ):  # fmt: skip
        exec(re.sub("<[^>]*>", "", html.unescape(widget_explore.as_code(plan))), names)
        assert names["plan"] == plan
    nameless = pl.Plan(pp=2, microbatches=2, schedule=partial(my_schedule))
    assert "schedule=your_own, " in widget_explore.as_code(nameless)


def test_what_can_be_and_should_not_is_said_in_the_widget_and_not_printed(bench, capfd):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bench.set(zero_stage=3)
    assert bench.state == "idle"
    assert "with zero_stage=1 they are gathered once" in bench._trouble.value
    bench.set(zero_stage=1)
    assert not bench._trouble.value and capfd.readouterr() == ("", "")
    for ask in (bench.predict, bench.views):  # aside: that leaves no note
        ask(zero_stage=3)
        bench._enter("running")  # says again what there is to say
        assert not bench._notes and not bench._trouble.value
        bench._refresh()


def test_a_plan_that_does_not_fit_says_so_with_the_numbers():
    bench = pl.explore(MODEL, PLAN, CLUSTER.replace(memory=300_000))
    peak = bench.values.predicted.peak_memory
    assert peak > 300_000
    said = f"stage 0 needs {view.theme.scaled(peak, 'B')} on a device that has 300 kB"
    assert f"It does not fit: {said}" in bench._trouble.value
    assert bench._run_button.disabled and "“Run it” would need" in bench._status.value


@pytest.mark.parametrize(("knobs", "why"), [
    ({"dp": 8}, "takes up to 8 ranks, not 16"),
    ({"cluster": "dgx-h100"}, "this is a prediction for cluster dgx-h100"),
    ({"dp": 1, "pp": 1, "model": "gpt2"}, "would take about"),
])  # fmt: skip
def test_what_cannot_run_here_says_why_and_is_predicted_all_the_same(bench, knobs, why):
    bench.set(**knobs)
    assert bench.state == "idle" and why in bench._status.value and bench._run_button.disabled
    assert numbers(bench) and STALE not in bench._views._dom_classes
    refuses(why, bench.run().wait, PATIENCE)


def test_what_has_no_slider_stays_as_given(bench):
    def mine(pp, microbatches):
        return pl.parallel.schedules.gpipe(pp, microbatches)

    plan = PLAN.replace(schedule=mine, bucket_bytes=12345, dp=5, offload=None)
    own = pl.explore(MODEL, plan, CLUSTER)
    assert own.values.plan == plan and "mine" in repr(own) and "dp=5" in repr(own)
    assert repr(bench).startswith("explore(dp=2, tp=1, pp=2, m=2, b=1, v=1, 1F1B, ")
    assert len(repr(bench)) <= 110


# ---- the real run --------------------------------------------------------------------------------
def test_run_it_draws_the_replay_below_the_prediction_and_what_was_measured(bench, capfd):
    chart = bench.run().wait(PATIENCE)
    assert bench.state == "done" and "4 real processes" in bench._status.value
    assert list(dict.fromkeys(chart.table["clock"])) == ["predicted", "replayed"]
    found, replayed = bench.result, bench.values.replayed
    assert chart.table[chart.table["clock"] == "replayed"]["rank"].nunique() == 2
    rows = numbers(bench)
    assert [row["clock"].split(" (")[0] for row in rows] == ["predicted", "replayed", "measured"]
    for row, report in zip(rows[1:], (replayed, found), strict=True):
        assert row["step time"] == view.theme.scaled(report.step_time, "s")
        assert row["bubble"] == f"{100 * report.bubble:.1f} %"
        assert row["peak memory"] == view.theme.scaled(found.peak_memory, "B")
        assert row["sent inside a node"] == rows[0]["sent inside a node"]  # bytes are exact
    memory, traffic = bench.charts[2:]
    peaks = memory.table.groupby("bar")["bytes"].sum()
    assert peaks.max() == found.peak_memory
    assert repr(traffic) == repr(replayed.traffic_chart(matrix=False))
    assert traffic.table["bytes"].sum() == found.traffic()["bytes"].sum()
    assert capfd.readouterr() == ("", "")

    # another setting has no result; the old one, and what says the same, finds it again
    bench.set(microbatches=3)
    assert bench.state == "idle" and bench.result is None
    bench.set(microbatches=2, nodes=4)
    assert bench.state == "done" and bench.result is found and bench.knobs["nodes"].disabled
    bench.set(cluster="dgx-a100")
    assert bench.result is None and not bench.knobs["nodes"].disabled


def test_without_a_plan_it_begins_with_one_that_can_be():
    for model, devices in ((MODEL.replace(layers=1), 64), (MODEL, 2)):
        bench = pl.explore(model, cluster=CLUSTER.replace(devices_per_node=devices))
        assert bench.plan == pl.Plan(microbatches=4) and bench.state != "error"
