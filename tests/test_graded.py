"""`paralab check`: answers are taken out of a notebook and judged by the package's own checkers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import paralab as pl
from paralab import cli
from paralab.exercises import graded
from paralab.exercises.graded import DEFINED_S, asked_for, grade

ALL = tuple(pl.exercises.ALL.values())
ANSWER = pl.exercises.model_states.solution().words
SOLVED = sorted((Path(__file__).parents[1] / "labs" / "solutions").glob("[0-9]*.ipynb"))
WORK = r"\bpl\.(run|observe|launch|trace|predict|plan_search)\(|\.check\("
LOOPS = "def loop():\n    while True: pass\ndevices_needed = loop()"


def notebook(folder, *cells, name="00_one_device.ipynb"):
    """A notebook of code cells; a cell that starts with # and a space is markdown."""
    made = [
        {"cell_type": "markdown" if text.startswith("# ") else "code", "source": [text]}
        for text in cells
    ]
    path = folder / name
    path.write_text(json.dumps({"cells": made}), encoding="utf-8")
    return path


def judged(path, **settings):
    """What is said about `model_states`."""
    found = grade(path, ALL, **settings)
    return next(row for row in found["exercises"] if row["exercise"] == "model_states")


def test_the_answers_of_a_notebook_get_their_points_and_limits(tmp_path):
    found = grade(notebook(tmp_path, "import paralab as pl", ANSWER), ALL)
    [row] = [one for one in found["exercises"] if one["exercise"] == "model_states"]
    assert row["points"] == 1 and row["verdict"].startswith("model_states: passed")
    assert all(limit["ok"] for limit in row["limits"]) and row["rung"] == "warm-up"
    assert found["lab"] == "00" and found["of"] == sum(one.lab == "00" for one in ALL)
    assert found["points"] == sum(one["points"] for one in found["exercises"])


def test_what_an_answer_needs_is_taken_from_any_cell_and_nothing_else_is_run(tmp_path):
    helped = ANSWER.replace("math.ceil(", "up(")
    assert helped != ANSWER
    path = notebook(
        tmp_path,
        "%matplotlib inline\nimport math\nstep = 1",
        "def up(x):\n    return math.ceil(x) * step",
        "raise SystemExit('this cell is not an answer')",
        "open('ran', 'w')",
        "for x in (1,):\n    open('ran', 'w')",
        "shown = [open('ran', 'w') for x in (1,)]",
        helped,
        "def broken(:",
    )
    assert judged(path)["points"] == 1 and not (tmp_path / "ran").exists()


def test_an_answer_has_what_loops_fill_and_ifs_define_and_no_later_namesake(tmp_path):
    helped = ANSWER.replace("math.ceil(", "up(")
    path = notebook(
        tmp_path,
        "import math\nimport paralab as pl\ntable = {}\nfor key in ['step']:\n    table[key] = 1",
        "if True:\n    def up(x):\n        return math.ceil(x) * table['step']",
        f"{helped}\n\npl.exercises.model_states.check(model_states, devices_needed)",
        "def up(a, b):\n    return a",
    )
    row = judged(path)
    assert row["points"] == 1, row["verdict"]


@pytest.mark.parametrize("path", SOLVED, ids=lambda path: path.stem)
def test_nothing_is_run_for_an_answer_of_the_solutions(path):
    """Runs and checks of other cells would take minutes."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    texts = ["".join(one["source"]) for one in cells if one["cell_type"] == "code"]
    statements, broken = graded._statements(texts)
    for exercise in (one for one in ALL if one.lab == path.name[:2]):
        source = graded.needed(graded._until(exercise, texts, statements), asked_for(exercise))
        assert not broken and not re.search(WORK, source), exercise.name


def test_what_a_notebook_redefines_does_not_reach_the_checker(tmp_path):
    wrong = "def model_states(spec, precision):\n    return {}\ndef devices_needed(total, gb):\n"
    path = notebook(
        tmp_path,
        "import paralab as pl",
        "class Yes:\n    passed = True\n    rows = ()\n    said = ''",
        "pl.exercises.model_states.__dict__['check'] = lambda *a: Yes()\n" + wrong + "    return 1",
        "import paralab.exercises.states as states\nstates.wrong_states = lambda *a: ''",
        "states.wrong_number = lambda *a, **k: ''",
    )
    row = judged(path)
    assert row["points"] == 0 and "not yet" in row["verdict"]


@pytest.mark.parametrize(
    "cells, words, timeout",
    [
        ([pl.exercises.model_states.stub], "not started yet", DEFINED_S),
        (["import math"], "does not define model_states, devices_needed", DEFINED_S),
        (["import math", "def model_states(:"], "code cell 2 cannot be read", DEFINED_S),
        ([ANSWER, "def model_states(*_):\n    1 / 0"], "in model_states: 1 / 0", DEFINED_S),
        ([ANSWER, "model_states = 1 / 0"], "ZeroDivisionError", DEFINED_S),
        ([ANSWER, LOOPS], "not through after 0.5 s", 0.5),
        (["import os", ANSWER, "model_states = os._exit(3)"], "its cells failed", DEFINED_S),
    ],
    ids=["stub", "missing", "syntax", "fails", "raises", "endless", "exits"],
)
def test_a_notebook_without_an_answer_gets_a_verdict(tmp_path, cells, words, timeout):
    row = judged(notebook(tmp_path, *cells), timeout=timeout)
    assert row["points"] == 0 and words in row["verdict"], row["verdict"]


def test_the_title_says_which_lab_it_is_where_the_name_does_not(tmp_path):
    path = notebook(tmp_path, "# 00 · Why one device is not enough", ANSWER, name="mine.ipynb")
    assert judged(path)["points"] == 1


@pytest.mark.parametrize(
    "text, words",
    [("{}", "this is no notebook"), ("words", "this is no notebook"), (None, "No such file")],
)
def test_a_file_that_is_no_notebook_is_refused(tmp_path, capsys, text, words):
    path = tmp_path / "05_zero.ipynb"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit) as left:
        cli.main(["check", str(path)])
    assert left.value.code == 2 and words in capsys.readouterr().err


def test_a_notebook_of_no_lab_is_refused(tmp_path):
    with pytest.raises(ValueError, match="neither its name nor its title says which lab"):
        grade(notebook(tmp_path, "import math", name="mine.ipynb"), ALL)


def test_the_command_prints_json_and_says_by_its_status_whether_every_point_is_there(
    tmp_path, capsys
):
    path = notebook(tmp_path, pl.exercises.model_states.stub)
    assert cli.main(["check", str(path)]) == 1
    assert json.loads(capsys.readouterr().out)["points"] == 0


@pytest.mark.parametrize("exercise", ALL, ids=lambda one: one.name)
def test_every_task_shows_the_call_whose_names_its_stub_defines(exercise):
    found: dict = {"__name__": "__main__"}
    for one in ALL[: ALL.index(exercise)]:  # a stub may extend what an earlier one defines
        if one.lab == exercise.lab:
            exec(one.stub, found)
    before = set(found)
    exec(exercise.stub, found)
    assert set(asked_for(exercise)) <= set(found) - before
