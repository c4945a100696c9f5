"""The widgets without a browser: sliders move, pictures follow, real runs start, stop and fail."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import plotly.graph_objects as go
import pytest

import paralab as pl
from paralab import view
from paralab.launch import _house
from paralab.view.widget_live import live, show

LINK = pl.Link(alpha=1e-4, bandwidth=1e9)
CLUSTER = pl.Cluster(
    flops=5e10, memory_bandwidth=2e10, op_overhead=1e-5, intra=LINK, cores=2, memory=10**10
)
MODEL = pl.ModelSpec(layers=1, hidden=32, heads=2, seq_len=16)
PATIENCE = 30


@pytest.fixture
def bench() -> view.widgets.data_parallel:
    bench = view.widgets.data_parallel(MODEL, pl.Plan(dp=2, bucket_bytes=20_000), CLUSTER)
    yield bench
    bench.close()


def memory() -> view.widgets.memory:
    return view.widgets.memory(MODEL, cluster=CLUSTER)


def shown(figure: go.Figure) -> dict:
    """A figure as plain data, without what a screen adds to it."""
    plain = figure.to_plotly_json()
    return {"data": [{k: v for k, v in trace.items() if k != "uid"} for trace in plain["data"]],
            "layout": {k: v for k, v in plain["layout"].items() if v != []}}  # fmt: skip


def said(bench: view.widgets.Bench) -> str:
    return bench._status.value


# ---- a figure on screen --------------------------------------------------------------------------
def test_a_figure_on_screen_becomes_any_other_chart():
    reports = [
        pl.predict(MODEL, pl.Plan(dp=n, grad_sync=form), CLUSTER, steps=1)
        for n, form in ((1, "naive"), (4, "overlapped"), (2, "naive"))
    ]
    charts = [report.timeline() for report in reports]
    charts += [view.timelines(*reports), view.bytes_bars({"a": {"parameters": 3.0}}), charts[0]]
    charts += [view.algorithms({"ring": [(1, 1.0), (9, 2.0)], "tree": [(1, 0.5), (9, 3.0)]})]
    figure = live(charts[0])
    for chart in [*charts, *reversed(charts)]:
        show(figure, chart)
        assert shown(figure) == shown(live(chart))


@pytest.mark.parametrize("first", [True, False])
def test_a_page_hears_of_a_figure_when_it_is_complete(monkeypatch, first):
    """A slow page draws what it hears of at once; data that come later it never shows. Nor can it
    load plotly in the two seconds that a widget has to initialize: that code is not the figure's.
    """
    import comm

    told, make = [], comm.create_comm

    def listen(*args, **settings):
        told.append((settings.get("data") or {}).get("state") or {})
        return make(*args, **settings)

    monkeypatch.setattr(comm, "create_comm", listen)
    chart = go.Figure(data=[{"type": "bar", "x": ["a", "b"]}], layout={"height": 77})
    figure = live(chart, first=first)
    (state,) = [state for state in told if "_widget_data" in state]
    assert [tuple(trace["x"]) for trace in state["_widget_data"]] == [("a", "b")]
    assert state["_widget_layout"]["height"] == 77 and figure.model_id
    assert len(state["_esm"]) < 5_000 and (len(state["_bundle"]) > 1_000_000) is first


def test_only_what_differs_is_sent_to_the_page(monkeypatch):
    figure = live(go.Figure(data=[{"type": "bar", "x": [1, 2], "y": [3, 4], "name": "old"}]))
    sent = []
    monkeypatch.setattr(figure, "_send_update_msg", lambda *a, **k: sent.append((a, k)))
    changed = go.Figure(data=[{"type": "bar", "x": [1, 2], "y": [3, 5], "name": "old"}])
    show(figure, changed)
    show(figure, changed)
    values = {**dict(zip(("restyle_data",), sent[0][0], strict=False)), **sent[0][1]}
    assert len(sent) == 1 and list(values["restyle_data"]) == ["y"]


# ---- sliders -------------------------------------------------------------------------------------
def test_the_prediction_follows_every_slider(bench):
    for name in bench.knobs:
        before, picture = shown(bench.figure), bench.chart
        options = [value for _, value in bench._kinds[name].options]
        bench.knobs[name].value = next(v for v in reversed(options[:4]) if v != bench.values[name])
        assert bench.error is None and bench.chart is not picture
        assert shown(bench.figure) != before, name
        plan = bench.plan_of(bench.values)
        expect = pl.predict(MODEL, plan, bench.cluster_of(bench.values), steps=1)
        ranks = range(min(4, plan.dp))
        assert bench.chart.table.equals(expect.timeline(ranks=ranks).table)


def test_set_moves_several_sliders_and_draws_once(bench):
    bench.set(ranks=3, grad_sync="naive", bandwidth=10**8)
    assert len(bench.refresh_seconds) == 1
    assert bench.values["ranks"] == 3 and "dp=3, naive" in bench.chart.layout.title.text


def test_a_figure_that_no_page_shows_yet_is_made_anew_and_the_old_one_is_not_closed(bench):
    """A page that is making itself a model of it would complain if it were closed meanwhile."""
    old = bench.figure
    bench.set(ranks=3)
    assert bench.figure is not old and old.comm is not None
    assert shown(bench.figure) == shown(live(bench.chart)) != shown(old)


def test_the_plain_twin_draws_the_same_and_moves_no_slider(bench):
    before = bench.values
    chart = bench.predict(ranks=4, grad_sync="bucketed")
    assert bench.values == before
    bench.set(ranks=4, grad_sync="bucketed")
    assert bench.chart.table.equals(chart.table) and repr(bench.chart) == repr(chart)


@pytest.mark.parametrize(
    ("knob", "why"),
    [({"rank": 2}, "no such knob; legal: ranks, grad_sync"), ({"ranks": 5}, "not on this slider"),
     ({"ranks": True}, "not on this slider"), ({"grad_sync": "fast"}, "legal: naive, bucketed")],
)  # fmt: skip
def test_a_setting_that_no_slider_has_is_refused_by_name(bench, knob, why):
    for call in (bench.predict, bench.set, bench.run):
        with pytest.raises(ValueError, match=why):
            call(**knob)
    assert bench.state == "idle"


def test_the_repr_says_the_settings_and_nothing_of_the_machine():
    own = CLUSTER.replace(intra=LINK.replace(bandwidth=1234567))
    texts = {repr(view.widgets.data_parallel(MODEL, cluster=cluster)) for cluster in (CLUSTER, own)}
    assert texts == {"data_parallel(4 ranks, overlapped, 200 kB, own link, 2 samples)"}
    assert repr(memory()) == "memory(1 layer, hidden 32, 16 tokens, 2 samples, zero-fp16)"
    assert repr(view.widgets.collective()) == "collective(ring, 4 ranks, 200 kB, 100 µs, 1 GB/s)"
    assert all(len(repr(make())) <= 110 for make in (memory, view.widgets.collective))


# ---- the real run --------------------------------------------------------------------------------
def test_run_it_returns_at_once_and_shows_the_run_beside_its_prediction(bench):
    seen = []
    bench._bar.observe(lambda change: seen.append(change["new"]), names="value")
    bench._go.click()
    assert bench.state == "running"
    assert bench._go.disabled and not bench._halt.disabled
    assert all(knob.disabled for knob in bench.knobs.values())
    with pytest.raises(RuntimeError, match="under way"):
        bench.run()
    chart = bench.wait(PATIENCE)
    assert bench.state == "done" and not bench._go.disabled and bench._halt.disabled
    assert not any(knob.disabled for knob in bench.knobs.values())
    assert set(chart.table["clock"]) == {"predicted", "replayed"}
    assert bench.result.clock == "measured" and bench.result.plan.dp == 2
    assert seen and seen[-1] == 6 and "2 real processes" in said(bench)
    assert all(clock in bench._numbers.value for clock in ("predicted", "replayed", "measured"))


def test_a_run_is_found_again_and_a_new_link_needs_no_new_run(bench):
    bench.run().wait(PATIENCE)
    ran = bench.result
    bench.set(ranks=1)
    assert bench.state == "idle" and bench.result is None
    bench.set(ranks=2, bandwidth=10**7)
    assert bench.state == "done" and bench.result is ran
    slow = ran.replay(bench.cluster_of(bench.values))
    assert f"{slow.step_time * 1e3:.1f} ms" in bench._numbers.value


def test_stop_ends_the_run_and_the_next_one_works(bench, monkeypatch):
    monkeypatch.setattr("paralab.view.widget_data_parallel.STEPS", 100_000)
    bench.run()
    give_up = time.monotonic() + PATIENCE
    while bench._bar.value < 1 and time.monotonic() < give_up:
        time.sleep(0.01)
    bench._halt.click()
    bench.wait(PATIENCE)  # being stopped is no error
    assert bench.state == "stopped" and "Stopped in the middle of its work on 2 ranks" in said(
        bench
    )
    assert not bench._go.disabled and bench._halt.disabled and bench.result is None
    bench.stop()  # nothing to stop: nothing happens
    monkeypatch.setattr("paralab.view.widget_data_parallel.STEPS", 2)
    assert bench.run().wait(PATIENCE) and bench.state == "done"


def test_an_error_is_text_in_the_widget_and_nothing_is_printed(bench, monkeypatch, capfd):
    def fail(*_: object) -> None:
        raise KeyError("<mine>")

    monkeypatch.setattr("paralab.experiment._program", fail)
    bench.run()
    with pytest.raises(pl.RankError, match="<mine>"):
        bench.wait(PATIENCE)
    assert bench.state == "error" and not bench._go.disabled
    assert "RankError" in bench._trouble.value and "&lt;mine&gt;" in bench._trouble.value
    assert "<mine>" not in bench._trouble.value and "Traceback" in bench._trouble.value
    bench.set(ranks=1)
    assert bench.state == "idle" and not bench._trouble.value
    assert capfd.readouterr() == ("", "")


def test_what_cannot_be_predicted_is_text_in_the_widget_and_the_sliders_live_on():
    small = CLUSTER.replace(devices_per_node=2)
    bench = view.widgets.data_parallel(MODEL, pl.Plan(dp=2), small)
    assert [value for _, value in bench._kinds["ranks"].options] == [1, 2]
    bench.cluster = small.replace(devices_per_node=1)
    bench.knobs["bucket_bytes"].value = 10_000
    assert bench.state == "error" and "devices" in bench._trouble.value
    bench.knobs["ranks"].value = 1
    assert bench.state == "idle" and not bench._trouble.value


def test_closing_a_widget_ends_its_run(bench, monkeypatch):
    monkeypatch.setattr("paralab.view.widget_data_parallel.STEPS", 100_000)
    bench.run()
    bench.close()
    bench._now.thread.join(PATIENCE)
    assert bench.state == "stopped" and _house.lock.acquire(timeout=PATIENCE)
    _house.lock.release()


# ---- memory and collective -----------------------------------------------------------------------
def test_the_memory_bars_are_the_recipes_bytes_and_the_activations():
    bench, psi = memory(), MODEL.num_params
    chart = bench.predict(recipe="fp32")
    parts = dict(zip(chart.table["category"], chart.table["bytes"], strict=True))
    kept = pl.predict(MODEL, cluster=CLUSTER).memory
    kept = kept[kept["category"] == "activations"]["bytes"].max()
    assert parts == {"parameters": 4 * psi, "gradients": 4 * psi, "moments": 8 * psi,
                     "activations": kept}  # fmt: skip
    half = bench.predict(recipe="megatron-fp16").table.set_index("category")["bytes"]
    assert half["gradients"] == 6 * psi and half.sum() == 20 * psi + kept // 2


def test_the_memory_bench_trains_a_small_model_and_refuses_a_large_one():
    bench = memory()
    chart = bench.run(layers=2).wait(PATIENCE)
    assert list(dict.fromkeys(chart.table["bar"])) == ["zero-fp16", "fp32, as run"]
    assert bench.result.model.layers == 2 and "one real process" in said(bench)
    bench.set(recipe="fp32")
    assert bench.state == "done"  # another recipe is another formula, not another run
    with pytest.raises(ValueError, match=r"needs 2.78 TB in fp32, and this machine has 10 GB"):
        bench.run(layers=96, hidden=12288).wait(PATIENCE)
    with pytest.raises(ValueError, match="one step would take about"):
        bench.run(layers=12, hidden=1024, seq_len=256).wait(PATIENCE)
    assert bench.state == "error" and "one step would take" in bench._trouble.value


def test_a_collective_replayed_lies_on_its_formula_for_both_algorithms():
    bench = view.widgets.collective()
    for algorithm in ("ring", "tree"):
        chart = bench.run(algorithm=algorithm, ranks=3, nbytes=10_000).wait(PATIENCE)
        assert "every rank holds the sum" in said(bench)
        assert "exactly what the formula says" in said(bench)
    marks = chart.table[chart.table["clock"] == "replayed"].set_index("algorithm")["seconds"]
    lines = chart.table[chart.table["clock"] == "predicted"]
    lines = lines[lines["bytes"] == 10_000].set_index("algorithm")["seconds"]
    assert marks.to_dict() == pytest.approx(lines.to_dict(), rel=1e-9)
    bench.set(alpha=1e-6, bandwidth=10**10)
    assert bench.state == "done" and "exactly what the formula says" in said(bench)


def test_two_benches_take_turns():
    first, second = view.widgets.collective(), view.widgets.collective()
    first.run(), second.run(ranks=2)
    first.wait(PATIENCE), second.wait(PATIENCE)
    assert first.state == second.state == "done"
    assert threading.active_count() < 50


def test_importing_paralab_brings_no_widgets_and_the_widgets_bring_no_torch():
    code = (
        "import sys, paralab as pl; "
        "assert not {'plotly', 'ipywidgets', 'pandas', 'torch'} & set(sys.modules); "
        "pl.view.widgets.collective(); assert 'torch' not in sys.modules; "
        "assert callable(pl.explore) and pl.exercises"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
