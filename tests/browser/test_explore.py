"""`pl.explore` by keyboard and mouse: sliders, a combination that cannot be, a real run.

On pages of several widths, in light and dark, before and after a run, all text can be read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from browser.bench import ANSWER_S, Bench
from browser.notebook import Notebook
from patience import HANG_S

SHOW, TWINS, DARK = range(3)  # the cells
WIDTHS = (1000, 1500, 1900)
WIDE, HIGH = 1500, 1500  # pixels
DARK_INK = "rgb(230, 237, 243)"
TWIN_CELL = """
from IPython.display import display
for chart in bench.views().values():
    display(chart)
"""


class Explorer(Bench):
    """The widget with its four views."""

    @property
    def views(self) -> list[dict[str, Any]]:
        return self.notebook.figures(self.index)

    def key(self, label: str, pressed: str) -> None:
        """A key on the slider of this name, whatever the views then do."""
        name = self.notebook.page.get_by_text(label, exact=True)
        handle = self.cell.locator(".widget-hbox", has=name).locator(".noUi-handle").first
        handle.focus()
        handle.press(pressed)

    def until(self, condition: Callable[[], Any]) -> None:
        self.notebook.wait(condition, ANSWER_S, lambda: f"{self.words()} {self.views}")

    def says(self, text: str) -> None:
        self.until(lambda: text in self.words())

    def faded(self) -> float:
        """How much of the views can be seen: 1, or less while a combination cannot be."""
        return float(self.cell.locator(".widget-gridbox").last.evaluate(
            "node => getComputedStyle(node).opacity"))  # fmt: skip


def unreadable(notebook: Notebook) -> dict[int, list[str]]:
    """{width: what cannot be read there}, where there is anything."""
    found = {width: notebook.crowded(SHOW, width) for width in WIDTHS}
    return {width: lines for width, lines in found.items() if lines}


def two_by_two(bench: Explorer) -> bool:
    """Whether its four views are: the second next to the first, the others beneath."""
    plots = bench.cell.locator(".js-plotly-plot").all()
    one, two, three, four = (plot.bounding_box() for plot in plots)
    columns = one["x"] == three["x"] < two["x"] == four["x"]
    return columns and abs(one["y"] - two["y"]) <= 40 and two["y"] < three["y"]


def test_the_explorer_is_driven_like_a_reader_would(open_notebook):
    show = "import paralab as pl\nbench = pl.explore()\nbench"
    dark = "pl.view.use_theme('dark')\nbench.set();"
    notebook = open_notebook(cells=[show, TWIN_CELL, dark], alone=True)
    notebook.page.set_viewport_size({"width": WIDE, "height": HIGH})
    notebook.run_cell(SHOW, timeout=HANG_S)  # the first one measures this machine
    notebook.wait(notebook.settled, ANSWER_S, lambda: notebook.ask("missing"))
    bench = Explorer(notebook, SHOW)
    bench.until(lambda: len(bench.views) == 4)

    # two next to each other, all of them inside the cell, whatever the page's width
    assert unreadable(notebook) == {}
    notebook.page.set_viewport_size({"width": WIDE, "height": HIGH})
    bench.until(lambda: two_by_two(bench))

    start = bench.prints()
    assert len(bench.sliders) + len(bench.choices) == 14  # without the nodes of other machines
    assert notebook.complaints() == []

    # what cannot be says why in place of the views, which fade, and there is nothing to run
    bench.key("chunks, v", "ArrowRight")
    bench.says("What would work")
    bench.until(lambda: bench.faded() == 0.2)
    assert "virtual_stages=2 is impossible" in bench.words()
    assert not bench.enabled("Run it") and bench.prints() == start
    bench.key("chunks, v", "ArrowLeft")
    bench.until(lambda: "What would work" not in bench.words() and bench.enabled("Run it"))
    bench.until(lambda: bench.faded() == 1)
    assert bench.prints() == start

    # the page shows what the plain functions draw
    notebook.run_cell(TWINS)
    bench.until(lambda: len(notebook.figures(TWINS)) == 4)
    shown = [
        [(view["data"], view["title"].split()) for view in notebook.figures(cell)]
        for cell in (SHOW, TWINS)  # a figure's own title is broken into lines where it ends
    ]
    assert shown[0] == shown[1]

    # a run: its replay below the prediction, on one axis, and a row for every clock
    bench.start()
    bench.finish()
    words = bench.words()
    assert all(f"\n{clock}" in words for clock in ("predicted", "replayed", "measured"))
    assert "4 real processes: the predicted step" in words
    timeline, _, memory, traffic = bench.views
    assert "predicted" in timeline["title"] and "replayed" in timeline["title"]
    assert "needs" in memory["title"] and "sends" in traffic["title"]
    assert unreadable(notebook) == {}
    notebook.look("Dark")
    notebook.run_cell(DARK)
    bench.until(lambda: DARK_INK in bench.cell.inner_html())
    assert unreadable(notebook) == {}
    bench.key("micro-batches, m", "ArrowRight")  # of which there was no run
    bench.until(lambda: bench.enabled("Run it"))
    assert unreadable(notebook) == {}
    bench.key("micro-batches, m", "ArrowLeft")
    bench.until(lambda: bench.enabled("Run again"))
    notebook.page.set_viewport_size({"width": WIDE, "height": HIGH})

    # a machine of the literature: more nodes, more ranks, nothing to run here
    bench.button("dgx-a100").click()
    bench.says("prediction for cluster dgx-a100")
    assert not bench.enabled("Run it") and not bench.enabled("Run again")
    for _ in range(3):
        bench.key("nodes", "ArrowRight")
    bench.key("tensor, tp", "End")
    bench.says("heads=8 is impossible")
    bench.key("tensor, tp", "ArrowLeft")
    for _ in range(2):
        bench.key("data, dp", "ArrowRight")
    bench.says("dp=4, tp=8, pp=2")
    bench.until(lambda: "of the 63 other ranks" in bench.views[1]["title"] and bench.faded() == 1)
    assert notebook.complaints() == []
