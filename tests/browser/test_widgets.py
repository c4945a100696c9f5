"""A widget by keyboard and mouse: the picture follows, a run leaves the page alive and stops.

The page of that test is a busy one, where no figure begins within anywidget's two seconds: here
they are over at once. It comes last, as JupyterLab is loaded for it. On pages that are not busy
figures are in test_explore.py and test_labs.py.
"""

from __future__ import annotations

from browser.bench import ANSWER_S, Bench, displayed
from browser.notebook import FIT_S, HEIGHT

# One that has somewhere to go, and whose first run can be stopped. All widgets are of one kind
# (view/widget.py), and each is driven where it stands, in its lab.
MADE = "pl.view.widgets.pipeline(pl.ModelSpec(layers=8, hidden=64, heads=4, seq_len=64))"
OFFLOAD = """\
link = pl.Link(alpha=1e-4, bandwidth=1e9)
rates = {"flops": 5e10, "memory_bandwidth": 2e10, "host_bandwidth": 1e10, "memory": 10**10}
cluster = pl.Cluster(intra=link, host=link, disk=link, devices_per_node=4, cores=2, **rates)
pl.view.widgets.offload(cluster=cluster)"""
SHOW, TWIN, STATE, CHART, AGAIN, ASKS = range(6)  # the cells
ASK = 'pl.exercises.guess("bytes per parameter", low=4, high=40, unit="bytes", decimals=0)'
# Ends only when Stop and the question's button have been pressed, or as a failure soon after that.
BUSY = f"""\
import time
bench.steps, end = 500, time.monotonic() + {ANSWER_S / 2}
bench.run()
while time.monotonic() < end and (bench.state == "running" or question.value is None):
    time.sleep(0.05)
del bench.steps
print(bench.state, question.value)"""
# Over before anything else happens on the page: a timer of 0 ms is late for a figure on a fast one.
OVER = """() => {
    const over = new AbortController();
    queueMicrotask(() => over.abort());
    window.over = (window.over ?? 0) + 1;
    return over.signal;
}"""


def test_what_is_shown_can_be_read_on_pages_of_any_width(open_notebook):
    """A figure also when it is shown again, where plotly's code is loaded and it is drawn before it
    has its place; a legend of two rows on a narrow page is one of one row on a wide one after it. A
    table is scrolled; words in bars that are too narrow for them are left out. A question also says
    that its answer is out.
    """
    moved = "knobs = pl.view.widgets.memory()\nknobs.set(recipe='fp32')\nknobs"
    parts = "{'parameters': 9.9e6, 'gradients': 9.9e6, 'buffers': 80e6}"
    chart = f"pl.view.bytes_bars({{'a': {parts}}}, title='Three parts')"
    questions = [f"{name} = {ASK}\n{name}" for name in ("fresh", "out", "said")]
    questions += ["pl.exercises.choose('Why?', ['a long <b>reason</b> & another one ' * 9, 'b'])"]
    notebook = open_notebook(
        cells=[f"import paralab as pl\n{OFFLOAD}", moved, "pl.view.widgets.zero()", chart,
               *questions, "out.reveal(16), said.commit(12)"]
    )  # fmt: skip
    notebook.run_all()
    notebook.run_cell(1)
    assert notebook.crowded(1, 1280) == []
    assert [notebook.crowded(0, width) for width in (1280, 1000, 1280)] == [[], [], []]
    assert notebook.crowded(2, 720) == []
    words = notebook.cell(3).get_by_text("9.9 MB", exact=True).filter(visible=True)
    assert notebook.crowded(3, 1280) == [] and words.count() == 2
    assert notebook.crowded(3, 600) == []

    told = "the answer has been shown: run the question's cell again to guess"
    out = notebook.cell(5).get_by_text(told)
    notebook.wait(out.count, ANSWER_S, "the question does not say that the answer is out")

    def cut() -> list[str]:
        found = [one for cell in (4, 5, 6, 7) for one in notebook.ask("crowded", cell)]
        return [one for one in found if "unused" not in one]  # it is no figure

    for width in (1000, 1280):
        notebook.page.set_viewport_size({"width": width, "height": HEIGHT})
        notebook.wait(lambda: not cut(), FIT_S / 6, cut)


def test_a_widget_follows_its_knobs_and_runs_and_stops(open_notebook):
    """Also what is said to it before it is drawn, as when all cells are run at once."""
    notebook = open_notebook(
        cells=[
            f"import paralab as pl\nbench = {MADE}\nbench",
            "bench.set(pp=2)\nbench.predict()",
            "print(bench.state)",
            "bench.chart",
            "bench",
            f"question = {ASK}\nquestion",
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

    # so it does while the page's thread of cells is busy, and a question is answered
    notebook.write(STATE, BUSY)
    notebook.start_cell(STATE)
    notebook.wait(lambda: bench.enabled("Stop"), ANSWER_S, bench.words)
    notebook.cell(ASKS).get_by_role("button", name="Commit").click()
    bench.button("Stop").click()
    notebook.until_run(STATE)
    assert notebook.text(STATE) == "stopped 4.0\n", bench.words()

    # the next one ends, and the picture then has what was measured in it
    bench.start()
    bench.finish()
    assert bench.figure["data"] == displayed(notebook, CHART) != twin
    assert [notebook.crowded(SHOW, width) for width in (1000, 1500)] == [[], []]

    # a cell that shows it is run again: the new picture follows, and is the same at the third time
    for _ in range(2):
        displayed(notebook, AGAIN)
    notebook.write(CHART, "bench.set(pp=8, microbatches=16)\nbench.chart")
    changed, again = displayed(notebook, CHART), Bench(notebook, AGAIN)
    for _ in range(2):
        notebook.wait(
            lambda: again.figure and again.figure["data"] == changed, ANSWER_S,
            lambda: f"shown again:\n{again.figure}\n.chart is:\n{changed}",
        )  # fmt: skip
        notebook.run_cell(AGAIN)
    assert notebook.complaints() == [] and notebook.page.evaluate("() => window.over") > 0
