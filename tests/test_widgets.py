"""The widgets without a browser: sliders move, pictures follow, real runs start, stop and fail."""

import contextlib
import dataclasses
import json
import re
import threading

import pytest

import paralab as pl
from paralab import view
from paralab.launch import _shared_server
from paralab.view import widget_parts, widget_picture, widgets
from paralab.view.chart import Chart
from paralab.view.widget_live import View
from refusals import refuses
from widgets import CLUSTER, LINK, MAKE, PATIENCE, TINY, ZERO, numbers, shown


@pytest.fixture
def widget(make) -> widgets.data_parallel:
    return make("data_parallel")


def said(widget: widgets.Widget) -> str:
    return widget._status.value


def running(widget: widgets.Widget) -> bool:
    """Whether its buttons say so."""
    start, stop = widget._run_button.disabled, not widget._stop_button.disabled
    assert start == stop
    return start


# ---- a figure on screen --------------------------------------------------------------------------
def test_a_figure_on_screen_becomes_any_other_chart():
    reports = [
        pl.predict(TINY, pl.Plan(dp=n, grad_sync=form), CLUSTER, steps=1)
        for n, form in ((1, "naive"), (4, "overlapped"), (2, "naive"))
    ]
    charts = [report.timeline() for report in reports]
    charts += [view.timelines(*reports), view.bytes_bars({"a": {"parameters": 3.0}}), charts[0]]
    charts += [view.algorithms({"ring": [(1, 1.0), (9, 2.0)], "tree": [(1, 0.5), (9, 3.0)]})]
    one = View(charts[0])
    for chart in [*charts, *reversed(charts)]:
        one.show(chart)
        assert shown(one.figure) == shown(View(chart).figure)
        assert chart.finding in one.head.value and chart.below in one.head.value
        assert not one.figure.layout.title.text and one.figure.layout.width is None


@pytest.mark.parametrize("first", [True, False])
def test_a_page_hears_of_a_whole_figure_then_of_what_differs_or_of_all_again(monkeypatch, first):
    """A slow page draws what it hears of at once, and never what comes later. Nor can it load
    plotly in the two seconds that a widget has to initialize: that code is not the figure's.
    """
    import comm

    told, again, sent, make = [], [], [], comm.create_comm

    def listen(*args, **settings):
        told.append((settings.get("data") or {}).get("state") or {})
        return make(*args, **settings)

    def into(heard):
        return lambda *what, **named: heard.append([*what, *named.values()][0])

    monkeypatch.setattr(comm, "create_comm", listen)
    bar = {"type": "bar", "x": ["a", "b"], "y": [3, 4], "name": "old"}
    one = View(Chart(data=[bar], layout={"height": 77}), first=first)
    (state,) = [state for state in told if "_widget_data" in state]
    assert [tuple(trace["x"]) for trace in state["_widget_data"]] == [("a", "b")]
    assert state["_widget_layout"]["height"] == 77 and state["_config"]["responsive"]
    assert len(state["_esm"]) < 5_000 and (len(state["_bundle"]) > 1_000_000) is first
    for name, heard in {"addTraces": again, "relayout": again, "update": sent}.items():
        monkeypatch.setattr(one.figure, f"_send_{name}_msg", into(heard))
    one.figure._handle_custom_msg({"listens": True}, [])
    assert not again  # nothing has changed
    changed = Chart(data=[bar | {"y": [3, 5]}], layout={"height": 88})
    for _ in range(2):
        one.show(changed)
    assert [list(values) for values in sent] == [["y"]]
    one.figure._handle_custom_msg({"listens": True}, [])  # what was said may have been lost
    traces, layout = again
    assert len(traces) == 1 and layout["height"] == one.figure.layout.height == 88
    assert shown(one.figure) == shown(View(changed).figure)

    # a page that begins while a cell shows another chart waits until that is there
    page = threading.Thread(target=one.figure._handle_custom_msg, args=({"listens": True}, []))
    waits = []

    def begins(*_: object, **__: object) -> None:
        page.start()
        page.join(0.2)
        waits.append(page.is_alive())

    monkeypatch.setattr(one.figure, "_send_update_msg", begins)
    one.show(Chart(data=[bar], layout={"height": 99}))
    page.join(PATIENCE)
    assert waits == [True] and again[-1]["height"] == 99


# ---- sliders -------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", sorted(MAKE.keys() - {"explore"}))  # see test_widget_explore.py
def test_the_picture_follows_each_knob_and_is_that_of_the_plain_call(make, name):
    """The plain call itself moves no slider."""
    widget = make(name)
    if name == "pipeline":
        widget.set(schedule="interleaved")  # else chunks cannot be moved
    for knob, control in widget.knobs.items():
        before, start = [chart.to_json() for chart in widget.charts], dict(widget.values)
        table = widget.chart.table
        for _, value in widget._declared[knob].options:
            control.value = value
            if value != start[knob] and widget.error is None:
                break
        else:
            assert control.disabled, knob
            value = start[knob]
        moved, shown_now = widget.chart, [chart.to_json() for chart in widget.charts]
        assert shown_now != before or knob == "algorithm" or value == start[knob], knob
        control.value = start[knob]
        assert widget.chart.table.equals(table), knob
        twin = widget.predict(**{knob: value})
        assert twin.table.equals(moved.table) and repr(twin) == repr(moved), knob
        assert dict(widget.values) == start, knob


def test_the_picture_of_a_plan_is_its_predicted_timeline(widget):
    widget.set(ranks=3, grad_sync="naive", bandwidth=10**8)
    at = widget.values
    assert (at.plan.dp, at.plan.grad_sync, at.cluster.intra.bandwidth) == (3, "naive", 10**8)
    expect = pl.predict(TINY, at.plan, at.cluster, steps=1)
    assert widget.chart.table.equals(expect.timeline(ranks=range(3)).table)
    samples = f"{at.plan.global_batch / expect.step_time:,.0f}"
    assert numbers(widget)[0]["samples per second"] == samples


@pytest.mark.parametrize(("knob", "why"), [
    ({"rank": 2}, "no such knob; legal: ranks, grad_sync"),
    ({"ranks": 5}, "the knob does not offer this value"),
    ({"grad_sync": "fast"}, "legal: naive, bucketed"),
])  # fmt: skip
def test_a_setting_that_no_slider_has_is_refused_by_name(widget, knob, why):
    for call in (widget.predict, widget.set, widget.run):
        refuses(why, call, **knob)
    assert widget.state == "idle"


def test_the_repr_says_the_settings_and_nothing_of_the_machine():
    own = LINK.replace(bandwidth=1234567)
    other = CLUSTER.replace(intra=own, host=own, disk=own)
    for said in (
        "data_parallel(4 ranks, overlapped, 200 kB, own link, 2 samples)",
        "tensor1d(4 ranks, replicated, 4 samples, own link)",
        "offload(own disk, own link, 8 samples, 1 micro-batch, files, files, 1 device)",
    ):
        for cluster in (CLUSTER, other):
            assert repr(getattr(widgets, said.partition("(")[0])(cluster=cluster)) == said


NO_HOST = CLUSTER.replace(host_bandwidth=None)
OWN = pl.Plan(pp=2, microbatches=2, schedule=lambda pp, microbatches, virtual_stages: [])
WRONG = [
    ("memory", {"model": "gpt"}, "model='gpt': not a model description; legal: a pl.ModelSpec"),
    ("zero", {"plan": 3}, "plan=3: not a plan"),
    ("explore", {"plan": pl.Plan(tp=3)}, "heads=8: tp=3"),
    ("data_parallel", {"cluster": "mine"}, "cluster='mine': not a cluster"),
    ("pipeline", {"plan": OWN}, "schedule='own: .*the widget has no button for it; legal: "),
    ("tensor", {"plan": pl.Plan(dp=2, tp=2)}, "tensor parallelism alone.*tp of at least 2"),
    ("tensor1d", {"plan": pl.Plan(tp=4, tp_mode="2d")}, "tensor parallelism in 1D alone"),
    ("tensor1d", {"plan": pl.Plan(dp=2, tp=2)}, "tensor parallelism in 1D alone"),
    ("tensor1d", {"plan": pl.Plan(pp=2)}, "tensor parallelism in 1D alone"),
    ("offload", {"cluster": NO_HOST}, "host_bandwidth=None: the plan offloads"),
]


@pytest.mark.parametrize(("name", "given", "why"), WRONG)
def test_wrong_arguments_are_refused(name, given, why):
    refuses(why, getattr(widgets, name), **given)


@pytest.mark.parametrize(("name", "devices", "ranks"), [
    ("data_parallel", 2, [1, 2]), ("tensor1d", 64, [1, 2, 4]), ("tensor1d", 2, [1, 2]),
    ("offload", 2, [1, 2]),
])  # fmt: skip
def test_ranks_that_model_or_cluster_have_no_room_for_are_not_on_the_slider(name, devices, ranks):
    cluster = CLUSTER.replace(devices_per_node=devices)
    model = pl.ModelSpec(layers=2, hidden=64, heads=4, seq_len=16)
    plan = {"data_parallel": {"plan": pl.Plan(dp=2)}, "tensor1d": {"plan": pl.Plan(tp=2)}}
    made = getattr(widgets, name)(model, cluster=cluster, **plan.get(name, {}))
    assert [value for _, value in made._declared["ranks"].options] == ranks


def test_what_cannot_be_is_a_sentence_in_the_widget_and_the_sliders_live_on(make, capfd):
    pipeline, tensor = make("pipeline"), make("tensor")
    pipeline.set(schedule="interleaved")
    pipeline.knobs["microbatches"].value = 6
    assert pipeline.state == "error"
    assert "a multiple of 4, such as 4 or 8" in pipeline._trouble.value
    refuses("a multiple of 4", pipeline.predict)
    pipeline.knobs["microbatches"].value = 12
    assert pipeline.state == "idle" and not pipeline._trouble.value
    tensor.set(ranks=64)
    assert "no mode can shard 8 heads and 128 tokens over so many" in tensor._trouble.value
    assert "work: fewer ranks, more tokens or a larger hidden size" in tensor._trouble.value
    assert tensor._run_button.disabled
    assert tensor.set(ranks=4).error is None and not tensor._run_button.disabled
    tensor.set(mode="3d")  # the other modes are there: it is a note, and the picture stays
    first, second = re.findall(r"[^<>]+(?=<br>|</div>)", tensor._trouble.value)
    assert first.startswith("3D is not drawn, as tp=4 is impossible: ") and "q x q x q" in first
    assert re.fullmatch("What would work: 1, 8, 27, .* and so on.", second)
    assert not tensor.set(mode="1d")._trouble.value
    assert capfd.readouterr() == ("", "")


def test_the_time_axis_stays_and_the_times_of_a_run_are_placed_on_it(make):
    pipeline = make("pipeline")
    run = pl.predict(pipeline.model, pipeline.values.plan, CLUSTER, steps=2)
    pipeline._results[pipeline._key(pipeline.values)] = dataclasses.replace(run, clock="measured")
    charts = [pipeline.set(imbalance=times).chart for times in (3.0, 2.0, 1.5)]
    ends = [chart.layout.xaxis.range[1] for chart in charts]
    at_lines = [sum(note.xref == "x" for note in chart.layout.annotations) for chart in charts]
    assert ends == pytest.approx(ends[:1] * 3) and at_lines == [2, 2, 1]  # a long heading crosses


# ---- the real run --------------------------------------------------------------------------------
def test_run_it_returns_at_once_and_shows_the_run_below_its_prediction(widget):
    seen = []
    widget._progress.observe(lambda change: seen.append(change["new"]), names="value")
    widget._run_button.click()
    assert widget.state == "running" and running(widget)
    assert all(knob.disabled for knob in widget.knobs.values())
    with pytest.raises(RuntimeError, match="in progress"):
        widget.run()
    chart = widget.wait(PATIENCE)
    assert widget.state == "done" and not running(widget)
    assert not any(knob.disabled for knob in widget.knobs.values())
    assert set(chart.table["clock"]) == {"predicted", "replayed"}
    assert widget.result.clock == "measured" and widget.result.plan.dp == 2
    assert seen and seen[-1] == 3 and "2 real processes" in said(widget)
    clocks = [row["clock"].split(" (")[0] for row in numbers(widget)]
    assert clocks == ["predicted", "replayed", "measured"]

    # it is found again, and a new link needs no new run
    ran = widget.result
    widget.set(ranks=1)
    assert widget.state == "idle" and widget.result is None
    widget.set(ranks=2, bandwidth=10**7)
    assert widget.state == "done" and widget.result is ran
    slow = ran.replay(widget.values.cluster)
    assert numbers(widget)[1]["time per step"] == f"{slow.step_time * 1e3:.1f} ms"


def test_stop_ends_the_run_and_the_next_one_works(widget, monkeypatch):
    monkeypatch.setattr(type(widget), "steps", 100_000)
    began, states, enter = threading.Event(), [], widget._enter
    widget._progress.observe(lambda change: change["new"] and began.set(), names="value")

    def entered(state: str, *more: object, **how: object) -> None:
        states.append((widget.state, state))
        enter(state, *more, **how)

    monkeypatch.setattr(widget, "_enter", entered)
    widget.run()
    assert began.wait(PATIENCE)
    widget._stop_button.click()
    widget.wait(PATIENCE)  # being stopped is no error
    assert widget.state == "stopped" and "Stopped while 2 ranks worked" in said(widget)
    assert not running(widget) and widget.result is None
    assert states == [("idle", "running"), ("running", "stopped")]  # and no other in between
    widget.stop()  # nothing to stop: nothing happens
    monkeypatch.setattr(type(widget), "steps", 2)
    assert widget.run().wait(PATIENCE) and widget.state == "done"


@pytest.mark.parametrize(("where", "error", "raised", "words"), [
    ("paralab.experiment._program", KeyError("<mine>"), pl.RankError,  # on the ranks
     ("RankError", "Traceback", "&lt;mine&gt;")),
    ("_measure", SystemExit(3), SystemExit, ()),  # what would end the thread ends the run
    ("_outcome", KeyError("<mine>"), None, ("<b>KeyError</b>: &#x27;&lt;mine&gt;&#x27;",)),
])  # fmt: skip
def test_an_error_is_text_in_the_widget_and_nothing_is_printed(
    widget, monkeypatch, capfd, where, error, raised, words
):
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(*((where, fail) if "." in where else (widget, where, fail)))
    with pytest.raises(raised, match="<mine>|3") if raised else contextlib.nullcontext():
        widget.run().wait(PATIENCE)
    trouble = widget._trouble.value
    assert widget.state == "error" and not widget.knobs["ranks"].disabled
    assert not raised or not running(widget)
    assert all(word in trouble for word in words) and "<mine>" not in trouble
    assert widget.set(ranks=1).state == "idle" and not widget._trouble.value
    assert capfd.readouterr() == ("", "")


def test_widgets_take_of_a_plan_what_they_are_about():
    assert widgets.zero(plan=ZERO.replace(offload="cpu")).plan == ZERO
    assert widgets.data_parallel(TINY, pl.Plan(dp=2, pp=2), CLUSTER).plan == pl.Plan(dp=2)
    chunks = pl.Plan(pp=4, microbatches=8, virtual_stages=3, schedule="interleaved")
    assert widgets.pipeline(plan=chunks).values.plan.virtual_stages == 3


def test_closing_a_widget_ends_its_run(widget, monkeypatch):
    monkeypatch.setattr(type(widget), "steps", 100_000)
    widget.run()
    widget.close()
    widget._current_run.thread.join(PATIENCE)
    assert widget.state == "stopped" and _shared_server.lock.acquire(timeout=PATIENCE)
    _shared_server.lock.release()


def test_two_widgets_take_turns():
    first, second = widgets.collective(), widgets.collective()
    first.run(), second.run(ranks=2)
    first.wait(PATIENCE), second.wait(PATIENCE)
    assert first.state == second.state == "done"
    assert threading.active_count() < 50


MUCH = CLUSTER.replace(memory=2**20)
REFUSED = [  # widget, settings, the machine, why it is not run, and whether the button says so
    ("zero", {"ranks": 64}, None, "“Run it” takes up to 8 ranks, not 64", True),
    ("tensor", {"ranks": 64, "tokens": 2048, "hidden": 512}, None, "takes up to 8 ranks", True),
    ("tensor", {"ranks": 8}, None, "“Run it” cannot train with 2D, as tp=8 is impossible: ", True),
    ("tensor", {}, MUCH, "would need .* this machine's 1.05 MB: a smaller model", False),
    ("zero", {}, MUCH, "would need .* a smaller model or batch would fit", False),
    ("offload", {"ranks": 2}, MUCH,  # 2.12 MB on a device and 1.03 MB on the host, twice
     "would need 6.32 MB, .* this machine's 1.05 MB", False),
    ("pipeline", {"pp": 6}, None, "has 4 layers for 6 stages: choose fewer ranks", True),
    ("memory", {"layers": 96, "hidden": 12288}, None,
     "2.78 TB, and may take half of this machine's 10 GB", False),
    ("memory", {"layers": 12, "hidden": 1024, "seq_len": 256}, None, "would take about", False),
]  # fmt: skip


def test_a_cluster_that_states_no_memory_has_no_more_than_this_machine(monkeypatch):
    monkeypatch.setattr(widget_parts, "memory_bytes", lambda: 2**20)
    run = widgets.zero(cluster=CLUSTER.replace(memory=2**62)).run()
    refuses("this machine's 1.05 MB: a smaller model", run.wait, PATIENCE)


@pytest.mark.parametrize("make", [widgets.zero, widgets.tensor, widgets.pipeline])
def test_a_run_needs_no_device_of_the_cluster_for_each_rank(make):
    widget = make(cluster=CLUSTER.replace(devices_per_node=2))
    assert widget.values.plan.world_size == 4 and widget._refused(widget.values) == ""


@pytest.mark.parametrize(("name", "knobs", "machine", "why", "blocked"), REFUSED)
def test_what_cannot_run_here_is_refused_in_words(
    make, monkeypatch, name, knobs, machine, why, blocked
):
    if machine is not None:
        monkeypatch.setattr(pl.Cluster, "local", lambda **_: machine)
    widget = make(name).set(**knobs)
    assert widget.state == "idle" and widget._run_button.disabled is blocked
    assert not blocked or why in said(widget)
    refuses(why, widget.run().wait, PATIENCE)
    assert widget.state == "error" and "Traceback" not in widget._trouble.value


@pytest.mark.parametrize(("name", "knobs", "waits"), [
    ("memory", {}, 1), ("offload", {"ranks": 4, "bandwidth": 5e7}, 2),
])  # fmt: skip
def test_what_a_run_would_take_is_the_time_of_all_its_steps(make, monkeypatch, name, knobs, waits):
    """Four ranks on two cores take twice as long; a disk takes as long as the slider says."""
    widget = make(name).set(**knobs)
    monkeypatch.setattr(type(widget), "longest", 0.0)
    monkeypatch.setattr(pl.Cluster, "local", lambda **_: CLUSTER)
    took = widget_parts.duration(widget.steps * widget.values.predicted.step_time * waits)
    assert f"would take about {took} here" in widget._refused(widget.values)


def test_a_machine_that_is_measured_again_does_not_move_an_explorer(make, monkeypatch):
    """One that was measured next to busy programs is, once they are done."""
    again = CLUSTER.replace(flops=2 * CLUSTER.flops)
    monkeypatch.setattr(pl.Cluster, "local", lambda **_: CLUSTER)
    widget = pl.explore()
    monkeypatch.setattr(pl.Cluster, "local", lambda **_: again)
    assert widget._cluster(widget.set(microbatches=8).at()) == CLUSTER


def test_the_machine_is_the_one_that_a_run_would_take(monkeypatch):
    """GPUs where there are enough of them for the ranks, and processors for more ranks."""
    gpus = CLUSTER.replace(name="local GPUs", cores=None, devices_per_node=2, flops=1e14)
    asked = []

    def local(device: str) -> pl.Cluster:
        asked.append(device)
        return gpus if device == "cuda" else CLUSTER

    monkeypatch.setattr(pl.Cluster, "local", local)
    found = lambda ranks: "cuda" if ranks <= 2 else "cpu"  # noqa: E731
    monkeypatch.setattr(widget_parts, "device_of_run", found)
    few, many = {"ranks": 2}, {"ranks": 4}
    for name in ("data_parallel", "tensor1d", "offload", "explore"):
        if name == "explore":
            few, many = {"pp": 1}, {"pp": 2}
        widget = getattr(widgets, name)()
        assert widget.at(**few).cluster.flops == gpus.flops, name
        assert widget.at(**many).cluster.flops == CLUSTER.flops, name
        assert widget.set(**few).state == "idle" and not widget._run_button.disabled, name
    assert widgets.memory().values.cluster == gpus and set(asked) == {"cuda", "cpu"}
    asked.clear()
    assert widgets.zero(plan=ZERO).state == widgets.pipeline().state == "idle" and not asked


def test_a_widget_adds_its_picture_where_notebooks_are_built_and_only_there(make, monkeypatch):
    widget = make("explore")
    usual = {"text/plain", "application/vnd.jupyter.widget-view+json"}
    assert set(widget._repr_mimebundle_()) == usual
    monkeypatch.setenv(widget_picture.VARIABLE, "1")
    bundle = widget._repr_mimebundle_()
    data = bundle.pop(widget_picture.FIGURES)
    assert set(bundle) == usual and data["said"] == repr(widget)
    figures = json.loads(json.dumps(data["figures"]))
    for figure, chart in zip(figures, widget.charts, strict=True):
        title = re.sub(r"<br>|\s", "", figure["layout"]["title"]["text"])
        assert re.sub(r"\s", "", chart.finding) in title
    assert [len(figure["data"]) for figure in figures] == [len(c.data) for c in widget.charts]
