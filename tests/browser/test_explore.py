"""`pl.explore` by keyboard and mouse: sliders, a combination that cannot be, a real run.

On pages of several widths, in light and dark, before and after a run, all text can be read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from playwright.sync_api import Locator

from browser.bench import ANSWER_S, Bench
from browser.notebook import Notebook

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
        row = self.cell.locator(
            ".widget-hbox", has=self.notebook.page.get_by_text(label, exact=True)
        )
        handle = row.locator(".noUi-handle").first
        handle.focus()
        handle.press(pressed)

    def faded(self) -> float:
        """How much of the views can be seen: 1, or less while a combination cannot be."""
        return float(self.cell.locator(".widget-gridbox").last.evaluate(
            "node => getComputedStyle(node).opacity"))  # fmt: skip


def unreadable(notebook: Notebook) -> dict[int, list[str]]:
    """{width: what cannot be read there}, where there is anything."""
    found = {width: notebook.crowded(SHOW, width) for width in WIDTHS}
    return {width: lines for width, lines in found.items() if lines}


def keys(slider: Locator) -> tuple[Callable[[], None], Callable[[], None]]:
    """A step up of a slider, and one down."""
    handle = slider.locator(".noUi-handle").first
    return partial(handle.press, "ArrowRight"), partial(handle.press, "ArrowLeft")


def buttons(row: Locator) -> tuple[Callable[[], None], Callable[[], None]]:
    """The next button of a row, and the one that is pressed now."""
    pressed, *_ = row.locator("button.mod-active").all_inner_texts()
    other, *_ = row.locator("button:not(.mod-active)").all_inner_texts()
    named = partial(row.get_by_role, "button", exact=True)
    return named(name=other).click, named(name=pressed).click


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
    notebook.run_cell(SHOW, timeout=90)  # the first one measures this machine
    notebook.wait(notebook.settled, ANSWER_S, lambda: notebook.ask("missing"))
    bench = Explorer(notebook, SHOW)
    notebook.wait(lambda: len(bench.views) == 4, ANSWER_S, "not four views")

    # two next to each other, all of them inside the cell, whatever the page's width
    assert unreadable(notebook) == {}
    notebook.page.set_viewport_size({"width": WIDE, "height": HIGH})
    notebook.wait(lambda: two_by_two(bench), ANSWER_S, "the views are not two by two")

    # a knob of each kind, each back to where it was; all are made by one function, and every knob
    # without a page is in tests/test_widget_explore.py
    start = bench.prints()
    assert len(bench.sliders) + len(bench.choices) == 14  # without the nodes of other machines
    for press in (keys(bench.sliders[0]), buttons(bench.choices[0])):
        for there, goes in zip(press, (True, False), strict=True):
            there()
            notebook.wait(
                lambda goes=goes: (bench.prints() != start or bench.faded() < 1) == goes,
                ANSWER_S, bench.words,
            )  # fmt: skip
    assert notebook.complaints() == []

    # what cannot be says why in place of the views, which fade, and there is nothing to run
    bench.key("chunks, v", "ArrowRight")
    notebook.wait(
        lambda: "What would work" in bench.words() and bench.faded() == 0.2, ANSWER_S, bench.words
    )  # words and views are two messages to the page
    assert "virtual_stages=2 is impossible" in bench.words()
    assert not bench.enabled("Run it") and bench.prints() == start
    bench.key("chunks, v", "ArrowLeft")
    notebook.wait(
        lambda: "What would work" not in bench.words() and bench.enabled("Run it"), ANSWER_S,
        bench.words,
    )  # fmt: skip
    notebook.wait(lambda: bench.faded() == 1, ANSWER_S, bench.words)

    # the page shows what the plain functions draw
    notebook.run_cell(TWINS)
    notebook.wait(lambda: len(notebook.figures(TWINS)) == 4, ANSWER_S, "not four twins")
    shown = [
        [(view["data"], view["title"].split()) for view in notebook.figures(cell)]
        for cell in (SHOW, TWINS)  # a figure's own title is broken into lines where it ends
    ]
    assert shown[0] == shown[1]

    # a run: its replay below the prediction, on one axis, and a row for every clock
    bench.start()
    notebook.wait(lambda: bench.enabled("Run again"), ANSWER_S, bench.words)
    notebook.wait(lambda: bench.prints() != start, ANSWER_S, "the run is not shown")
    words = bench.words()
    assert all(f"\n{clock}" in words for clock in ("predicted", "replayed", "measured"))
    assert "4 real processes: the predicted step" in words
    timeline, _, memory, traffic = bench.views
    assert "predicted" in timeline["title"] and "replayed" in timeline["title"]
    assert "needs" in memory["title"] and "sends" in traffic["title"]
    assert unreadable(notebook) == {}
    notebook.darken()
    notebook.run_cell(DARK)
    notebook.wait(lambda: DARK_INK in bench.cell.inner_html(), ANSWER_S, "the figures stay light")
    assert unreadable(notebook) == {}
    bench.key("micro-batches, m", "ArrowRight")  # of which there was no run
    notebook.wait(lambda: bench.enabled("Run it"), ANSWER_S, bench.words)
    assert unreadable(notebook) == {}
    bench.key("micro-batches, m", "ArrowLeft")
    notebook.wait(lambda: bench.enabled("Run again"), ANSWER_S, bench.words)
    notebook.page.set_viewport_size({"width": WIDE, "height": HIGH})

    # a machine of the literature: more nodes, more ranks, nothing to run here
    bench.cell.get_by_role("button", name="dgx-a100").click()
    notebook.wait(lambda: "prediction for cluster dgx-a100" in bench.words(), ANSWER_S, bench.words)
    assert not bench.enabled("Run it") and not bench.enabled("Run again")
    for _ in range(3):
        bench.key("nodes", "ArrowRight")
    bench.key("tensor, tp", "End")
    notebook.wait(lambda: "heads=8 is impossible" in bench.words(), ANSWER_S, bench.words)
    bench.key("tensor, tp", "ArrowLeft")
    for _ in range(2):
        bench.key("data, dp", "ArrowRight")
    notebook.wait(lambda: "dp=4, tp=8, pp=2" in bench.words(), ANSWER_S, bench.words)
    notebook.wait(
        lambda: "of the 63 other ranks" in bench.views[1]["title"] and bench.faded() == 1, ANSWER_S,
        lambda: bench.views[1]["title"],
    )  # fmt: skip

    # more boxes than pixels: each stage's stretches, divided by what their time went to
    bench.key("micro-batches, m", "End")
    notebook.wait(
        lambda: "height of a colour" in bench.views[0]["title"], ANSWER_S,
        lambda: bench.views[0]["title"],
    )  # fmt: skip
    bench.key("micro-batches, m", "Home")
    notebook.wait(
        lambda: "height" not in bench.views[0]["title"], ANSWER_S,
        lambda: bench.views[0]["title"],
    )  # fmt: skip
    assert notebook.complaints() == []
