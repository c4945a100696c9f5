"""A widget by keyboard and mouse: the picture follows, a run leaves the page alive and stops."""

from __future__ import annotations

import pytest

from browser.bench import ANSWER_S, Bench, displayed

# One that has somewhere to go, and whose first run can be stopped. All widgets are of one kind
# (view/widget.py), and each is driven where it stands, in its lab.
MADE = "pl.view.widgets.pipeline(pl.ModelSpec(layers=8, hidden=64, heads=4, seq_len=64))"
SHOW, TWIN, STATE, CHART = range(4)  # the cells
# Over before anything else happens on the page: a timer of 0 ms is late for a figure on a fast one.
OVER = """() => {
    const over = new AbortController();
    queueMicrotask(() => over.abort());
    return over.signal;
}"""


def test_a_widget_follows_its_knobs_and_runs_and_stops(open_notebook):
    notebook = open_notebook(
        cells=[
            f"import paralab as pl\nbench = {MADE}\nbench",
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

    # a run leaves the page alive: another cell runs meanwhile; Stop ends it, nothing was measured
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
    assert [notebook.crowded(SHOW, width) for width in (1000, 1500)] == [[], []]
    assert notebook.complaints() == []


@pytest.mark.parametrize("busy", [False, True])
def test_a_figure_follows_from_the_first_moment_on_and_on_a_busy_page(open_notebook, busy):
    """Also what is said to it before it is drawn, as when all cells are run at once. A busy page is
    one that did not begin within anywidget's two seconds: here they are over at once.
    """
    later = "None" if busy else "bench.set(pp=2);"
    notebook = open_notebook(
        cells=[f"import paralab as pl\nbench = {MADE}\nbench", later, "bench.chart"]
    )
    if busy:
        notebook.page.evaluate(f"() => (AbortSignal.timeout = {OVER})")
    notebook.run_all()
    bench = Bench(notebook, SHOW)
    for move in (None, *bench.sliders):
        if move is not None:
            bench.move(move)
        wanted = displayed(notebook, 2)
        notebook.wait(
            lambda w=wanted: bench.figure["data"] == w, ANSWER_S,
            lambda w=wanted: f"on the page:\n{bench.figure['data']}\nin the kernel:\n{w}",
        )  # fmt: skip
    assert notebook.complaints() == [] and notebook.late >= busy
