"""A widget by keyboard and mouse: the picture follows, a run leaves the page alive and stops.

The page is a busy one, where no figure begins within anywidget's two seconds: here they are over at
once. On pages that are not busy figures are in test_explore.py and test_labs.py.
"""

from __future__ import annotations

from browser.bench import ANSWER_S, Bench, displayed
from browser.notebook import FIT_S, HEIGHT

# One that has somewhere to go, and whose first run can be stopped. All widgets are of one kind
# (view/widget.py), and each is driven where it stands, in its lab.
MADE = "pl.view.widgets.pipeline(pl.ModelSpec(layers=8, hidden=64, heads=4, seq_len=64))"
SHOW, TWIN, STATE, CHART = range(4)  # the cells
# Over before anything else happens on the page: a timer of 0 ms is late for a figure on a fast one.
OVER = """() => {
    const over = new AbortController();
    queueMicrotask(() => over.abort());
    window.over = (window.over ?? 0) + 1;
    return over.signal;
}"""


def test_a_widget_follows_its_knobs_and_runs_and_stops(open_notebook):
    """Also what is said to it before it is drawn, as when all cells are run at once."""
    notebook = open_notebook(
        cells=[
            f"import paralab as pl\nbench = {MADE}\nbench",
            "bench.set(pp=2)\nbench.predict()",
            "print(bench.state)",
            "bench.chart",
        ],
        alone=True,
    )
    notebook.page.evaluate(f"() => (AbortSignal.timeout = {OVER})")
    notebook.run_all()
    bench = Bench(notebook, SHOW)

    def follows() -> None:
        twin = displayed(notebook, TWIN)
        notebook.wait(
            lambda: bench.figure["data"] == twin, ANSWER_S,
            lambda: f"on the page:\n{bench.figure['data']}\n.predict() says:\n{twin}",
        )  # fmt: skip

    # every knob moves the picture, to what the plain call says
    follows()
    notebook.write(TWIN, "bench.predict()")
    assert len(bench.sliders) + len(bench.choices) == 5
    for slider in bench.sliders:
        bench.move(slider)
    for row in bench.choices:
        bench.choose(row)
    follows()
    twin = bench.figure["data"]

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
    assert notebook.complaints() == [] and notebook.page.evaluate("() => window.over") > 0


def test_what_a_question_says_can_be_read_on_a_narrow_page(open_notebook):
    """Also where it was not answered: then it says that the answer is out."""
    asks = 'guess("bytes per parameter", low=4, high=40, unit="bytes", decimals=0)'
    notebook = open_notebook(
        cells=[
            "import paralab as pl",
            f"fresh = pl.exercises.{asks}\nfresh",
            f"out = pl.exercises.{asks}\nout",
            f"said = pl.exercises.{asks}\nsaid",
            "out.reveal(16), said.commit(12)",
        ]
    )
    notebook.run_all()
    out = notebook.cell(2).get_by_text("the answer is out: run the question's cell again to guess")
    notebook.wait(out.count, ANSWER_S, "the question does not say that the answer is out")

    def cut() -> list[str]:
        found = [one for cell in (1, 2, 3) for one in notebook.ask("crowded", cell)]
        return [one for one in found if "unused" not in one]  # it is no figure

    for width in (1000, 1280):
        notebook.page.set_viewport_size({"width": width, "height": HEIGHT})
        notebook.wait(lambda: not cut(), FIT_S / 6, cut)
