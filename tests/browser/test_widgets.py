"""The widgets by keyboard and mouse: the picture follows, a run leaves the page alive and stops."""

from __future__ import annotations

import pytest

from browser.bench import ANSWER_S, Bench, displayed

# {widget: how to make one that has somewhere to go, and whose first run can be stopped}. All are
# of one kind (view/widget_bench.py), and all others are driven where they stand, in their labs.
WIDGETS = {
    "data_parallel": "pl.view.widgets.data_parallel("
    "plan=pl.Plan(dp=2, microbatch_size=4, bucket_bytes=2**18))",
    "pipeline": "pl.view.widgets.pipeline(pl.ModelSpec(layers=8, hidden=64, heads=4, seq_len=64))",
}
SHOW, TWIN, STATE, CHART = range(4)  # the cells


@pytest.mark.parametrize("widget", WIDGETS)
def test_a_widget_follows_its_knobs_and_runs_and_stops(open_notebook, widget):
    notebook = open_notebook(
        cells=[
            f"import paralab as pl\nbench = {WIDGETS[widget]}\nbench",
            "bench.predict()",
            "print(bench.state)",
            "bench.chart",
        ]
    )
    notebook.run_cell(SHOW)
    notebook.wait(notebook.settled, ANSWER_S, lambda: notebook.ask("missing"))
    bench = Bench(notebook, SHOW)

    # every knob moves the picture, to what the plain call says
    assert len(bench.sliders) + len(bench.choices) == 5
    for slider in bench.sliders:
        bench.move(slider)
    for row in bench.choices:
        bench.choose(row)
    twin = displayed(notebook, TWIN)
    notebook.wait(
        lambda: bench.figure["data"] == twin, ANSWER_S,
        lambda: f"on the page:\n{bench.figure['data']}\n.predict() at these settings:\n{twin}",
    )  # fmt: skip

    # a run leaves the page alive: another cell runs beside it; Stop ends it, nothing was measured
    bench.start()
    notebook.run_cell(STATE, timeout=ANSWER_S)
    assert notebook.text(STATE) == "running\n", bench.words()
    bench.stop()
    notebook.run_cell(STATE)
    assert notebook.text(STATE) == "stopped\n", bench.words()
    assert bench.figure["data"] == twin

    # the next one ends, and the picture then has what was measured in it
    bench.start()
    bench.finish()
    assert bench.figure["data"] == displayed(notebook, CHART) != twin
    assert notebook.complaints() == []
