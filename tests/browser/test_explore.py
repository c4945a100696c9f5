"""`pl.explore` by keyboard and mouse: every slider, a combination that cannot be, a real run.

On pages of several widths, in light and dark, before and after a run, all text can be read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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

    @property
    def figure(self) -> dict[str, Any]:
        """All views as one: a knob moves some of them."""
        return {"print": json.dumps([view["print"] for view in self.views])}

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


def readable(notebook: Notebook, picture: Path) -> dict[int, list[str]]:
    """{width: what cannot be read there}, where there is anything; a picture of each page."""
    found = {}
    for width in WIDTHS:
        found[width] = notebook.crowded(SHOW, width)
        notebook.page.screenshot(path=f"{picture}-{width}.png")
    return {width: lines for width, lines in found.items() if lines}


def two_by_two(bench: Explorer) -> bool:
    """Whether its four views are: the second next to the first, the others beneath."""
    plots = bench.cell.locator(".js-plotly-plot").all()
    one, two, three, four = (plot.bounding_box() for plot in plots)
    columns = one["x"] == three["x"] < two["x"] == four["x"]
    return columns and abs(one["y"] - two["y"]) <= 40 and two["y"] < three["y"]


def test_the_explorer_is_driven_like_a_reader_would(open_notebook, tmp_path):
    show = "import paralab as pl\nbench = pl.explore()\nbench"
    dark = "pl.view.use_theme('dark')\nbench.set();"
    notebook = open_notebook(cells=[show, TWIN_CELL, dark])
    notebook.page.set_viewport_size({"width": WIDE, "height": HIGH})
    notebook.run_cell(SHOW, timeout=90)  # the first one measures this machine
    notebook.wait(notebook.settled, ANSWER_S, lambda: notebook.ask("missing"))
    bench = Explorer(notebook, SHOW)
    notebook.wait(lambda: len(bench.views) == 4, ANSWER_S, "not four views")

    # two next to each other, all of them inside the cell, whatever the page's width
    assert readable(notebook, tmp_path / "start") == {}
    notebook.page.set_viewport_size({"width": WIDE, "height": HIGH})
    notebook.wait(lambda: two_by_two(bench), ANSWER_S, "the views are not two by two")

    # every knob, one after the other from the same start, each back to where it was
    start = bench.figure["print"]
    moved = 0
    for slider in bench.sliders:
        label = slider.locator("xpath=../*[1]").inner_text()
        readout = slider.locator(".widget-readout")
        said = readout.inner_text()
        handle = slider.locator(".noUi-handle").first
        handle.focus()
        handle.press("ArrowRight")
        notebook.wait(lambda r=readout, s=said: r.inner_text() != s, ANSWER_S, f"{label} is stuck")
        notebook.wait(
            lambda: bench.figure["print"] != start or bench.faded() < 1, ANSWER_S,
            f"nothing follows {label}",
        )  # fmt: skip
        handle.press("ArrowLeft")
        notebook.wait(
            lambda: bench.figure["print"] == start and bench.faded() == 1, ANSWER_S,
            lambda name=label: f"{name} does not lead back: {bench.words()}",
        )  # fmt: skip
        moved += 1
    for row in bench.choices:
        first = row.locator("button.mod-active").inner_text()
        for name in row.locator("button").all_inner_texts():
            if name == first:
                continue
            row.get_by_role("button", name=name, exact=True).click()
            notebook.wait(
                lambda: bench.figure["print"] != start or bench.faded() < 1, ANSWER_S,
                f"nothing follows the button {name}",
            )  # fmt: skip
            row.get_by_role("button", name=first, exact=True).click()
            notebook.wait(
                lambda: bench.figure["print"] == start and bench.faded() == 1, ANSWER_S,
                lambda name=name: f"{name} does not lead back: {bench.words()}",
            )  # fmt: skip
        moved += 1
    assert moved == 14  # the fifteenth, the cluster's nodes, is for clusters only
    assert notebook.complaints() == []

    # what cannot be says why in place of the views, which fade, and there is nothing to run
    bench.key("chunks, v", "ArrowRight")
    notebook.wait(
        lambda: "What would work" in bench.words() and bench.faded() == 0.2, ANSWER_S, bench.words
    )  # words and views are two messages to the page
    assert "virtual_stages=2 cannot be" in bench.words()
    assert not bench.enabled("Run it") and bench.figure["print"] == start
    notebook.page.screenshot(path=tmp_path / "impossible.png")
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
    notebook.wait(lambda: bench.figure["print"] != start, ANSWER_S, "the run is not shown")
    words = bench.words()
    assert all(f"\n{clock}" in words for clock in ("predicted", "replayed", "measured"))
    assert "4 real processes: the predicted step" in words
    timeline, _, memory, traffic = bench.views
    assert "predicted" in timeline["title"] and "replayed" in timeline["title"]
    assert "measured" in memory["data"] and "measured" in traffic["data"]
    assert readable(notebook, tmp_path / "run") == {}
    notebook.darken()
    notebook.run_cell(DARK)
    notebook.wait(lambda: DARK_INK in bench.cell.inner_html(), ANSWER_S, "the figures stay light")
    assert readable(notebook, tmp_path / "run-dark") == {}
    bench.key("micro-batches, m", "ArrowRight")  # of which there was no run
    notebook.wait(lambda: bench.enabled("Run it"), ANSWER_S, bench.words)
    assert readable(notebook, tmp_path / "start-dark") == {}
    bench.key("micro-batches, m", "ArrowLeft")
    notebook.wait(lambda: bench.enabled("Run again"), ANSWER_S, bench.words)
    notebook.page.set_viewport_size({"width": WIDE, "height": HIGH})

    # a machine of the literature: more nodes, more ranks, nothing to run here
    bench.cell.get_by_role("button", name="dgx-a100").click()
    notebook.wait(lambda: "prediction for dgx-a100" in bench.words(), ANSWER_S, bench.words)
    assert not bench.enabled("Run it") and not bench.enabled("Run again")
    for _ in range(3):
        bench.key("nodes", "ArrowRight")
    bench.key("tensor, tp", "End")
    notebook.wait(lambda: "heads=8 cannot be" in bench.words(), ANSWER_S, bench.words)
    bench.key("tensor, tp", "ArrowLeft")
    for _ in range(2):
        bench.key("data, dp", "ArrowRight")
    notebook.wait(lambda: "dp=4, tp=8, pp=2" in bench.words(), ANSWER_S, bench.words)
    notebook.wait(
        lambda: "of 63 others" in bench.views[1]["title"] and bench.faded() == 1, ANSWER_S,
        lambda: bench.views[1]["title"],
    )  # fmt: skip
    notebook.page.screenshot(path=tmp_path / "cluster.png")

    # more boxes than pixels: each stage's stretches, shared out by what their time went to
    bench.key("micro-batches, m", "End")
    notebook.wait(
        lambda: "height of a colour" in bench.views[0]["title"], ANSWER_S,
        lambda: bench.views[0]["title"],
    )  # fmt: skip
    notebook.page.screenshot(path=tmp_path / "stretches.png")
    bench.key("micro-batches, m", "Home")
    notebook.wait(
        lambda: "height" not in bench.views[0]["title"], ANSWER_S,
        lambda: bench.views[0]["title"],
    )  # fmt: skip
    assert notebook.complaints() == []
