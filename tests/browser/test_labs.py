"""Every lab in JupyterLab as a student finds it: opened, its pictures there, nothing wrong.

Whether its stored outputs are true is nbval's to say (tests/labs/strict_nbval.py), which runs every
cell. Here no cell is run but those that one lab's widget and exercise need.
"""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from browser.bench import Bench, displayed
from browser.notebook import Notebook
from patience import HANG_S

LABS = Path(__file__).resolve().parents[2] / "labs"
DRIVEN, TWIN = LABS / "05_zero.ipynb", "bench.predict()"


def shows_its_pictures(lab: Notebook) -> None:
    lab.wait(lambda: not lab.ask("blank"), HANG_S, "cells do not show the pictures they store")
    assert lab.complaints(drawn=False) == []


@pytest.mark.parametrize(
    "path", sorted({*LABS.glob("[0-9]*.ipynb")} - {DRIVEN}), ids=lambda path: path.stem
)
def test_a_lab_opens_with_its_pictures(open_notebook, path):
    shows_its_pictures(open_notebook(path))


def test_a_lab_s_widget_is_moved_and_its_exercise_solved(open_notebook):
    """As a student does it: a knob, the stub's verdict, an answer, the answer's verdict. A widget's
    run is in test_widgets.py.
    """
    lab = open_notebook(DRIVEN, cells=[TWIN])
    shows_its_pictures(lab)
    cells = lab.cells()
    *own, twin = range(len(cells))
    sources = {cell["index"]: cell["source"] for cell in cells}
    imports, *_ = (index for index in own if "import paralab as pl" in sources[index])
    [knobs] = (index for index in own if "view.widgets.zero()" in sources[index])
    [answer] = (index for index in own if "exercises.zero_step.check(" in sources[index])
    [asks] = (index for index in own if "= pl.exercises.zero_step\n" in sources[index])

    lab.run_cell(imports)
    lab.write(knobs, f"bench = {sources[knobs]}\nbench")
    lab.run_cell(knobs)
    lab.wait(lambda: lab.figures(knobs), HANG_S, "the widget shows no figure")
    widget = Bench(lab, knobs)
    widget.move(widget.sliders[0])
    widget.choose(widget.choices[0])
    predicted = displayed(lab, twin)
    lab.wait(lambda: widget.figure["data"] == predicted, HANG_S, "the picture does not follow")

    lab.run_cell(asks)
    lab.run_cell(answer)
    assert "not started yet" in lab.cell(answer).inner_text()
    solved, *_ = (
        cell.source
        for cell in nbformat.read(LABS / "solutions" / DRIVEN.name, as_version=4).cells
        if "exercises.zero_step.check(" in cell.source
    )
    lab.write(answer, solved)
    lab.run_cell(answer)
    assert "passed" in lab.cell(answer).inner_text()
    assert lab.complaints(drawn=False) == []
