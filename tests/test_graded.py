"""`paralab check`: answers are taken out of a notebook and judged by the package's own checkers."""

import json
import pickle
import re
from pathlib import Path

import psutil
import pytest

import paralab as pl
from paralab import cli
from paralab.exercises import graded
from paralab.exercises.answers import model_states as answers
from paralab.exercises.graded import answer_names, grade, points
from paralab.exercises.notebook import needed, read, until
from paralab.exercises.notebook import statements as statements_of
from processes import python
from processes import until as eventually
from refusals import refuses, shell_refuses

ALL = tuple(pl.exercises.ALL.values())
ANSWER = str(pl.exercises.model_states.solution())
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


def judged(path, name="model_states"):
    """What is said about one exercise, the others of its lab are not judged."""
    return points(pl.exercises.ALL[name], read(path))


def is_right(path):
    """Whether what `model_states` needs, executed here, defines a right answer."""
    exercise, book = pl.exercises.model_states, read(path)
    assert not book.broken
    names = answer_names(exercise)
    source = needed(until(exercise.name, book.statements), names)
    graded._execute({"source": source, "names": names}, path.parent)
    found = pickle.loads((path.parent / "answer").read_bytes())
    model, recipe = pl.ModelSpec.preset("ptdp-1t"), {"parameters": 2, "moments": 8}
    return [
        part(model, recipe, 80) if i else part(model, recipe) for i, part in enumerate(found)
    ] == [answers.model_states(model, recipe), answers.devices_needed(model, recipe, 80)]


def test_the_answers_of_a_notebook_get_their_points_and_limits(tmp_path):
    found = grade(read(notebook(tmp_path, "import paralab as pl", ANSWER)))
    [row] = [one for one in found["exercises"] if one["exercise"] == "model_states"]
    assert row["points"] == 1 and row["verdict"].startswith("model_states: passed")
    assert all(limit["ok"] for limit in row["limits"]) and row["rung"] == "warm-up"
    assert found["lab"] == "00" and found["of"] == sum(one.lab == "00" for one in ALL)
    assert found["points"] == sum(one["points"] for one in found["exercises"])
    clinic = notebook(tmp_path, str(pl.exercises.deadlock_clinic.solution()), name="04_a.ipynb")
    assert judged(clinic, "deadlock_clinic")["points"] == 1


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


PLAIN = ANSWER.replace("import math\n", "")
OVER = (
    "import math\ndef up(x):\n    left = (\n        x\n        % 1\n    )\n    return math.ceil(x)"
)
SHELL = "files = !ls\nmodel_states?\n!ls \\\n  -l\n%matplotlib inline\nfrom math import ceil"


@pytest.mark.parametrize(
    "cells",
    [
        ["import math\nups = []", "for one in [math.ceil]:\n    ups.append(one)", "ups[0]"],
        ["import math\nups = {}", "ups.update(up=math.ceil)", "ups['up']"],
        ["import math\nups = [[1]]", "ups[0].insert(0, ups[0].pop())\nups[0][0] = math.ceil",
         "ups[0][0]"],
        ["import math\nups = []\ndef fill(table): table.append(math.ceil)", "fill(ups)", "ups[0]"],
        ["from math import *", "ceil"],
        ["import math\nups = [math.ceil]", "ups.remove(math.floor)", "ups[0]"],
        ["from __future__ import annotations",
         "import math\ndef up(x: Unknown): return math.ceil(x)", "up"],
        [OVER, "up"],
        [SHELL, "ceil"],
        ["import math\nif True:\n    %matplotlib inline\n    up = math.ceil", "up"],
        ["%%time\nfrom math import ceil", "ceil"],
        ["import math\nups = {}\nfor key in ['up']:\n    ups[key] = math.ceil",
         "if True:\n    def up(x):\n        return ups['up'](x)", "up"],
    ],
    ids=["append", "update", "in place", "argument", "star", "fails in the notebook too",
         "future", "an operator", "shell", "within if", "cell magic",
         "loop and if"],
)  # fmt: skip
def test_what_an_answer_needs_is_run_however_cells_define_it(tmp_path, cells):
    """An operator is no magic, and what changes a value is run although it assigns nothing."""
    *cells, up = cells
    assert is_right(notebook(tmp_path, *cells, PLAIN.replace("math.ceil(", f"{up}(")))


@pytest.mark.parametrize(
    "check",
    [
        "task = pl.exercises.model_states\ntask.check(model_states, devices_needed)",
        "looked = pl.exercises.model_states.check\nlooked(model_states, devices_needed)",
    ],
)
def test_the_last_check_is_found_by_its_call(tmp_path, check):
    first = "import paralab as pl\npl.exercises.model_states.check(model_states, devices_needed)"
    again = "def model_states(*_): 1\nmath = 0\n# pl.exercises.model_states.check(model_states)"
    path = notebook(tmp_path, pl.exercises.model_states.stub, first, ANSWER, check, again)
    assert is_right(path)


def test_without_a_check_the_last_definition_counts_however_many_cells_there_are():
    cells = ["def f(): return 1", "%matplotlib inline", "!ls", "!ls", "def f(): return 2"]
    found, _ = statements_of(cells)
    assert needed(until("model_states", found), ["f"]) == "\n\n".join(cells[::4])


def test_a_cell_in_another_language_defines_nothing(tmp_path):
    for magic in ("%%writefile answer.py", "%%bash", "%%timeit"):
        row = judged(notebook(tmp_path, f"{magic}\n{ANSWER}"))
        assert "does not define model_states, devices_needed" in row["verdict"]


def test_an_answer_imports_the_modules_of_its_folder(tmp_path):
    (tmp_path / "helpers.py").write_text(
        "import math\nup = math.ceil\ndef size(gb): return gb * 10**9"
    )
    helped = PLAIN.replace("math.ceil(", "helpers.up(").replace(
        "memory_gb * 10**9", "helpers.size(memory_gb)"
    )
    row = judged(notebook(tmp_path, "import helpers", helped))
    assert row["points"] == 1, row["verdict"]


REDEFINES = """import paralab as pl, paralab.exercises.states as states
class Yes: passed, rows, said = True, (), ''
def model_states(*_): return {}
def devices_needed(*_): return 1
pl.exercises.model_states.__dict__['check'] = lambda *a: Yes()"""


@pytest.mark.parametrize(
    "cells, words",
    [
        ([pl.exercises.model_states.stub], "not started yet"),
        (["import math"], "does not define model_states, devices_needed"),
        (["def model_states(:"], "code cell 2 cannot be read"),
        ([ANSWER, "def model_states(*_):\n    1 / 0"], "in model_states: 1 / 0"),
        ([ANSWER, LOOPS], "the cells that it needs had not ended after 0.5 s"),
        (["model_states = devices_needed = sys.exit(0)"], "its cells failed: SystemExit: 0"),
        (["model_states = devices_needed = os.kill(os.getpid(), 9)"], "status -9. If no other"),
        ([REDEFINES, "states.wrong_states = states.wrong_number = lambda *a, **k: ''"], "not yet"),
    ],
    ids=["stub", "missing", "syntax", "fails", "endless", "exit", "killed", "redefines"],
)  # fmt: skip
def test_a_notebook_without_a_right_answer_gets_a_verdict_and_does_nothing_to_the_grader(
    tmp_path, monkeypatch, cells, words
):
    if LOOPS in cells:
        monkeypatch.setattr(graded, "DEFINED_S", 0.5)
    row = judged(notebook(tmp_path, "import os, sys", *cells))
    assert row["points"] == 0 and words in row["verdict"], row["verdict"]


def test_a_process_that_an_answer_leaves_behind_ends_with_it(tmp_path):
    left = "import subprocess\nserver = subprocess.Popen(['sleep', '9797.25'])"
    judged(notebook(tmp_path, left, ANSWER.replace("    total =", "    server\n    total =")))

    def over():  # a process that was killed is there until the system has taken it down
        every = psutil.process_iter(["cmdline"])
        return not any("9797.25" in (one.info["cmdline"] or ()) for one in every)

    assert eventually(over)


@pytest.mark.parametrize("path", SOLVED, ids=lambda path: path.stem)
def test_nothing_is_run_for_an_answer_of_the_solutions(path):
    """Runs and checks of other cells would take minutes."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    texts = ["".join(one["source"]) for one in cells if one["cell_type"] == "code"]
    statements, broken = statements_of(texts)
    for exercise in (one for one in ALL if one.lab == path.name[:2]):
        source = needed(until(exercise.name, statements), answer_names(exercise))
        assert not broken and not re.search(WORK, source), exercise.name


@pytest.mark.parametrize("text, words", [
    ("{}", "it is not a notebook"), ("[", "it is not a notebook"), (None, "No such file"),
])  # fmt: skip
def test_a_file_that_is_no_notebook_is_refused(tmp_path, capsys, text, words):
    path = tmp_path / "05_zero.ipynb"
    if text is not None:
        path.write_text(text)
    assert words in shell_refuses(capsys, "check", str(path))


@pytest.mark.parametrize("name, titles", [
    ("01_alice.ipynb", ["# 00 · Why"]), ("alice.ipynb", ["# Alice", "# 00 · Why"]),
    ("alice.ipynb", ["# Alice\n\n# 00 · Why"]), ("00_one_device.ipynb", ["# Alice"]),
])  # fmt: skip
def test_the_title_says_which_lab_it_is_and_else_the_name(tmp_path, name, titles):
    assert read(notebook(tmp_path, *titles, ANSWER, name=name)).lab == "00"


def test_a_notebook_of_no_lab_is_refused(tmp_path):
    mine = notebook(tmp_path, "import math", name="mine.ipynb")
    refuses("neither its title nor its name says which lab", read, mine)


def test_of_several_notebooks_there_is_a_list_by_path_and_none_is_judged_if_one_is_none(
    tmp_path, capsys
):
    paths = []
    for name in ("alice", "bob"):
        (tmp_path / name).mkdir()
        paths.append(str(notebook(tmp_path / name, "import math")))
    assert cli.main(["check", *paths]) == 1
    assert [one["notebook"] for one in json.loads(capsys.readouterr().out)] == paths
    shell_refuses(capsys, "check", *paths, str(tmp_path / "none.ipynb"))


def test_where_the_folder_for_temporary_files_is_full_no_answer_loses_its_point(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(cli.doctor, "SCRATCH", 2**62)
    path = str(notebook(tmp_path, ANSWER))
    said = shell_refuses(capsys, "check", path)
    assert "free, and without room right answers fail; legal: a folder with" in said
    rooms = iter([(str(tmp_path), 2**62), (str(tmp_path), 5)])
    monkeypatch.setattr(cli.doctor, "temp_folder", lambda: next(rooms))
    with pytest.raises(SystemExit):  # those that are judged by then are printed
        cli.main(["check", path, path])
    assert [one["points"] for one in json.loads(capsys.readouterr().out)] == [1]


def test_what_answers_print_is_not_among_the_points(tmp_path):
    loud = ANSWER.replace("    total =", "    print('how much?')\n    total =")
    path = notebook(tmp_path, loud, name="00_\udcff.ipynb")  # which cannot be printed
    done = python("-m", "paralab", "check", path)
    assert done.returncode == 1  # the lab has more points
    assert json.loads(done.stdout)["points"] == 1 and "how much?" in done.stderr


@pytest.mark.parametrize("exercise", ALL, ids=lambda one: one.name)
def test_every_task_shows_the_call_whose_names_its_stub_defines(exercise):
    found: dict = {"__name__": "__main__"}
    for one in ALL[: ALL.index(exercise)]:  # a stub may extend what an earlier one defines
        if one.lab == exercise.lab:
            exec(one.stub, found)
    before = set(found)
    exec(exercise.stub, found)
    assert set(answer_names(exercise)) <= set(found) - before
