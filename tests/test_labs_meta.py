"""The labs' harness keeps its promise: a stored output that is no longer true fails the run.

One small notebook is built once, every stored cell is falsified in its own way, and strict nbval
runs it once. Each cell belongs to one mutation, whose test asks what became of exactly its cell. In
the same run are a kernel that dies, one that does not start at once, and a lab with its solution.
"""

from __future__ import annotations

import ast
import base64
import copy
import functools
import json
import os
import re
import struct
import subprocess
import symtable
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import nbformat
import pytest

import build
import paralab as pl
import strict_nbval
from browser import chromium
from lab_outputs import PLOTLY, PNG, canonical_figure
from paralab.exercises import sources

ROOT = Path(__file__).resolve().parent.parent
LABS = ROOT / "labs"


class Mutation(NamedTuple):
    """A cell, what is done to it once it is stored, and the tags that it has."""

    source: str
    change: Callable[[Any], object]
    tags: tuple[str, ...] = ()


TEXT = 'print("four ranks")\nprint("loss 5.2")'
FIGURE = "figure(loss=np.array([3.0, 2.0, 1.0 / 3.0]), bound=[1, 2, 3])"
CLOCK = "print(time.perf_counter())\nfigure(wait=[time.perf_counter(), time.perf_counter()])"
RAISES = 'raise ValueError("dp=0: out of range")'
TWO = 'display("first")\nprint("second")'
UPDATED = 'shown = display("a", display_id="same")\nshown.update("a")'
WIDGET = "import ipywidgets\nipywidgets.IntSlider()"


def drawn(cell: Any) -> Any:
    """The stored figure of a cell."""
    return next(o.data[PLOTLY] for o in cell.outputs if PLOTLY in o.get("data", {}))


def unrun(cell: Any) -> None:
    cell.execution_count = None


def unchanged(cell: Any) -> None:
    pass


def as_list(cell: Any) -> None:
    drawn(cell).data[0].y = [3.0, 2.0, 0.33333333]  # was bdata; and other digits after the sixth


def other_seconds(cell: Any) -> None:
    cell.outputs[0].text, drawn(cell).data[0].y = "9.9\n", [1, 2]


def ignore(reason: str | None) -> Callable[[Any], None]:
    def change(cell: Any) -> None:
        cell.metadata.tags = ["nbval-ignore-output"]
        cell.outputs[0].text = "anything"
        if reason:
            cell.metadata.ignore_reason = reason

    return change


def first(**changed: object) -> Callable[[Any], None]:
    """Change the first output."""
    return lambda cell: cell.outputs[0].update(changed)


def trace(**changed: object) -> Callable[[Any], None]:
    """Change the first trace of the figure."""
    return lambda cell: drawn(cell).data[0].update(changed)


EXTRA = nbformat.v4.new_output("stream", name="stdout", text="and more\n")
RAISED, MEASURED = ("raises-exception",), ("measured",)
FALSE = {
    "text changed": Mutation(TEXT, first(text="four ranks\n")),
    "stream renamed": Mutation(TEXT, first(name="stderr")),
    "output removed": Mutation(TEXT, lambda c: c.outputs.clear()),
    "output added": Mutation("x = 1", lambda c: c.outputs.append(copy.deepcopy(EXTRA))),
    "order of outputs changed": Mutation(TWO, lambda c: c.outputs.reverse()),
    "never run": Mutation("x = 1", unrun),
    "kept outputs of no run": Mutation(TEXT, unrun),
    "source changed": Mutation(TEXT, lambda c: c.update(source=TEXT.replace("5", "6"))),
    "error renamed": Mutation(RAISES, first(ename="TypeError"), RAISED),
    "error's words changed": Mutation(RAISES, first(evalue="dp=1"), RAISED),
    "plotly value changed": Mutation(FIGURE, trace(y=[3.0, 2.0, 0.34])),
    "plotly trace renamed": Mutation(FIGURE, trace(name="gain")),
    "plotly trace removed": Mutation(FIGURE, lambda c: drawn(c).data.pop()),
    "plotly title changed": Mutation(FIGURE, lambda c: drawn(c).layout.title.update(text="new")),
    "plotly turned text": Mutation(FIGURE, lambda c: c.outputs[0].data.update({"text/plain": "F"})),
    "measured: trace renamed": Mutation(CLOCK, trace(name="comm"), MEASURED),
    "measured: trace of another type": Mutation(CLOCK, trace(type="bar"), MEASURED),
    "measured: trace added": Mutation(CLOCK, lambda c: drawn(c).data.append({"x": [1]}), MEASURED),
    "measured: text removed": Mutation(CLOCK, lambda c: c.outputs.pop(0), MEASURED),
    "measured: figure removed": Mutation(CLOCK, lambda c: c.outputs.pop(), MEASURED),
    "output ignored without a reason": Mutation(TEXT, ignore(None)),
    "cell skipped": Mutation(TEXT, lambda c: c.update(source="# NBVAL_SKIP\n" + TEXT)),
    "shown output updated": Mutation(UPDATED, unchanged),
}
TRUE = {
    "nothing": Mutation(TEXT, unchanged),
    "nothing in a figure": Mutation(FIGURE, unchanged),
    "nothing in an error": Mutation(RAISES, unchanged, RAISED),
    "nothing in an order": Mutation(TWO, unchanged),
    "nothing to show": Mutation("x = 1", unchanged),
    "measured: nothing": Mutation(CLOCK, unchanged, MEASURED),
    "nothing in a widget": Mutation(WIDGET, unchanged),
    "plotly uid": Mutation(FIGURE, trace(uid="5a1b")),
    "plotly template": Mutation(FIGURE, lambda c: drawn(c).layout.update(template={"layout": {}})),
    "plotly array as list": Mutation(FIGURE, as_list),
    "picture beside a figure": Mutation(FIGURE, lambda c: c.outputs[0].data.update({PNG: "iVBO"})),
    "measured: other seconds": Mutation(CLOCK, other_seconds, MEASURED),
    "output ignored with a reason": Mutation(TEXT, ignore("prints the machine's name")),
}
MUTATIONS = FALSE | TRUE

SETUP = """\
import time
import numpy as np
import plotly.graph_objects as go
def figure(**curves):
    title = "a finding"
    go.Figure([go.Scatter(y=y, name=n) for n, y in curves.items()], {"title": title}).show()
"""


def percent_script(cells: Mapping[str, Mutation]) -> str:
    parts = ["# %% [markdown]\n# # A lab\n", "# %%\n" + SETUP]
    for cell in cells.values():
        parts.append(f"# %% tags={json.dumps(list(cell.tags))}\n{cell.source}\n")
    return "\n".join(parts)


def pytest_on(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Strict nbval, with the settings of this repository, on the notebooks of ``folder``."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "COV_"))}
    settings = ["-c", ROOT / "pyproject.toml", "--rootdir", folder, "-p", "no:cacheprovider"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", ".", "--nbval", "-q", *settings, *options],
        cwd=folder, env=env, capture_output=True, text=True,
    )  # fmt: skip


DIES = """\
import os
if not os.path.exists("died"):
    open("died", "w").close()
    raise SystemExit("ZMQError: Address already in use")
from ipykernel import kernelapp
kernelapp.launch_new_instance()
"""


@pytest.fixture(scope="module")
def harness(tmp_path_factory) -> SimpleNamespace:
    """What nbval said of a notebook's mutants and of two last cells, of which one kills the kernel;
    of a lab with its solution, for which a kernel finds its ports taken; and their folder.
    """
    folder = tmp_path_factory.mktemp("labs")
    script = folder / "mutated.py"
    last = dict.fromkeys(("kills", "after"), Mutation("x = 1", unchanged))
    script.write_text(percent_script(MUTATIONS | last), encoding="utf-8")
    mutated = build.execute(build.cells_of(script), folder, pictures=False)
    of_mutation = mutated.cells[2:-2]  # after the heading and the imports
    for cell, mutation in zip(of_mutation, MUTATIONS.values(), strict=True):
        mutation.change(cell)
    mutated.cells[-2].source = "import os\nos.kill(os.getpid(), 9)"
    nbformat.write(mutated, folder / "mutated.ipynb")
    (folder / "twice").mkdir()
    build_both(folder / "twice")
    (folder / "twice" / "ipykernel_launcher.py").write_text(DIES)  # found before the real one
    ran = pytest_on(folder, "--junit-xml=out.xml")
    outcomes: dict[str, list[SimpleNamespace]] = {"mutated": []}
    for case in ET.parse(folder / "out.xml").iter("testcase"):
        said = "".join(part.text or "" for part in case if part.tag in ("failure", "error"))
        notebook = case.get("classname", "").split(".")[0]
        passed = not any(part.tag in ("failure", "error", "skipped") for part in case)
        cell = SimpleNamespace(name=case.get("name"), passed=passed, said=said)
        outcomes.setdefault(notebook, []).append(cell)
    return SimpleNamespace(ran=ran, folder=folder, **outcomes)


@pytest.mark.parametrize("name", MUTATIONS)
def test_exactly_what_a_mutation_falsifies_fails(harness, name):
    assert harness.ran.returncode == 1 and len(harness.mutated) == 1 + len(MUTATIONS) + 2
    cell = harness.mutated[1 + list(MUTATIONS).index(name)]
    assert cell.passed == (name in TRUE), cell.said or harness.ran.stdout[-3000:]
    if not cell.passed:
        assert "Notebook cell execution failed" in cell.said  # said by nbval, not a crash of ours


def test_every_cell_that_a_mutation_falsifies_passes_as_it_was_stored(harness):
    """So it fails for its mutation. Its twin is the cell of which nothing is changed."""
    assert harness.mutated[0].passed, harness.mutated[0].said
    twins = {(m.source, m.tags) for name, m in TRUE.items() if "nothing" in name}
    assert {(m.source, m.tags) for m in FALSE.values()} - twins == {(UPDATED, ())}


def test_a_dead_kernel_fails_its_cell_at_once_and_every_cell_after_it(harness):
    *_, before, killer, after = harness.mutated
    assert before.passed and not killer.passed and not after.passed
    assert "the kernel died" in killer.said  # nbval alone waits until the cell times out


def test_a_kernel_that_finds_its_ports_taken_is_started_again(harness):
    cell, *_ = harness.twice
    assert cell.passed and (harness.folder / "twice" / "died").exists(), cell.said


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [("nbval_lax", True, "--nbval-lax"), ("dist", "load", "--dist=loadfile")],
)
def test_a_weaker_run_of_the_labs_is_refused(request, monkeypatch, option, value, said):
    monkeypatch.setattr(request.config.option, "nbval", True)
    monkeypatch.setattr(request.config.option, option, value)
    with pytest.raises(pytest.UsageError, match=said):
        strict_nbval.pytest_configure(request.config)


# ---- the builder ---------------------------------------------------------------------------------
EXERCISE = """\
# %% [markdown]
# # One text, two notebooks

# %%
open("runs.txt", "a").write("once")

# %%
open("alike.txt", "a").write("once")

# %%
def twice(n):
    ### BEGIN SOLUTION
    ### STUB: return None  # what is asked?
    return 2 * n
    ### END SOLUTION


twice(21)

# %% [markdown] tags=["solution-only"]
# Another answer:

# %% tags=["solution-only", "measured"]
21 + 21

# %% [markdown] tags=["student-only"]
# Stuck?

# %% tags=["readme-picture"]
import plotly.graph_objects as go
go.Figure(go.Scatter(y=[1, 2], name="loss")).show()

# %% tags=["raises-exception"]
import paralab.spec
paralab.spec.Plan(dp=0)

# %%
import ipywidgets
ipywidgets.IntSlider()

# %%
1 + 1

# %%
1 + 1
"""


def labs_in(folder: Path, patch: pytest.MonkeyPatch) -> Path:
    """Make ``folder`` a labs folder with one script in it, the builder's while ``patch`` lasts."""
    (folder / "src").mkdir()
    script = folder / "src" / "00_twice.py"
    script.write_text(EXERCISE, encoding="utf-8")
    patch.setattr(build, "LABS", folder)
    patch.setattr(build, "SOURCES", script.parent)
    patch.setattr(build, "README_PICTURE", folder / "timeline.png")
    patch.setenv("PYTHONPATH", str(ROOT))
    patch.setenv("BROWSER_PATH", os.environ.get("BROWSER_PATH", ""))  # a build sets it
    return script


@pytest.fixture
def lab(tmp_path, monkeypatch) -> Path:
    """The script of a labs folder."""
    return labs_in(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def again(tmp_path_factory) -> Path:
    """The student's notebook in another folder, with pictures if there is a browser."""
    folder = tmp_path_factory.mktemp("again")
    with pytest.MonkeyPatch.context() as patch:
        script = labs_in(folder, patch)
        if chromium.find():
            assert build.main([]) == 0
        else:
            build.build(script, folder / "00_twice.ipynb", pictures=False)
    return folder / "00_twice.ipynb"


def test_two_builds_are_the_same_bytes_and_hold_nothing_of_this_machine(harness, again):
    one, other = harness.folder / "twice" / again.name, nbformat.read(again, as_version=4)
    text = one.read_bytes()
    for output in (output for cell in other.cells for output in cell.get("outputs", ())):
        output.get("data", {}).pop(PNG, None)  # pixels are the browser's
    assert text.decode() == nbformat.writes(other) + "\n"
    notebook = nbformat.reads(text.decode(), as_version=4)
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)
    assert notebook.metadata == build.METADATA
    assert b"model_id" not in text and b"iopub" not in text
    for folder in (sys.prefix, str(one.parent)):
        assert folder.encode() not in text


def test_a_cell_that_fails_stops_the_build_and_leaves_the_old_notebook(lab, monkeypatch, capsys):
    monkeypatch.setattr(chromium, "find", lambda: "chromium")
    target = lab.parent.parent / "00_twice.ipynb"
    target.write_text("old")
    lab.write_text('# %%\nraise RuntimeError("the lab is wrong")\n')
    assert build.main([]) == 1
    err = capsys.readouterr().err
    assert "00_twice" in err and "RuntimeError: the lab is wrong" in err and "\x1b" not in err
    assert target.read_text() == "old"


def test_every_figure_is_stored_with_a_picture_as_wide_as_a_cell_and_readme_has_the_tagged(again):
    if not chromium.find():
        pytest.skip("only `make labs` draws pictures, and there is no browser here")
    data = nbformat.read(again, as_version=4).cells[5].outputs[0].data
    picture = base64.b64decode(data[PNG])
    assert PLOTLY in data and struct.unpack(">I", picture[16:20]) == (830,)
    assert again.with_name("timeline.png").read_bytes() == picture


# ---- student and solution ------------------------------------------------------------------------
def build_both(folder: Path) -> None:
    """EXERCISE's notebooks, of which the solution is wrong as stored: in the answer, and in what it
    shows in the shared cell.
    """
    with pytest.MonkeyPatch.context() as patch:
        source = labs_in(folder, patch)
        for target, solved in build.notebooks_of(source).items():
            build.build(source, target, solved=solved, pictures=False)
    solved = nbformat.read(folder / "solutions" / "00_twice.ipynb", as_version=4)
    assert solved.cells[3].outputs[0].data["text/plain"] == "42"
    solved.cells[3].outputs[0].data["text/plain"] = "43"
    solved.cells[1].outputs[0].data["text/plain"] = "5"
    nbformat.write(solved, folder / "solutions" / "00_twice.ipynb")
    for written in folder.rglob("*.txt"):
        written.unlink()


def test_one_source_builds_both_notebooks(harness):
    folder = harness.folder / "twice"
    student, solved = (
        nbformat.read(folder / name, as_version=4)
        for name in ("00_twice.ipynb", "solutions/00_twice.ipynb")
    )
    assert len(student.cells) == 10 and len(solved.cells) == 11
    asked = "def twice(n):\n    return None  # what is asked?\n\n\ntwice(21)"
    assert student.cells[3].source == asked
    assert solved.cells[3].source == "def twice(n):\n    return 2 * n\n\n\ntwice(21)"
    assert student.cells[3].outputs == [] and solved.cells[3].outputs
    assert solved.cells[5].metadata == {"tags": ["measured"]}
    assert "tags" not in student.cells[4].metadata
    assert "SOLUTION" not in nbformat.writes(student) + nbformat.writes(solved)
    assert "2 * n" not in nbformat.writes(student)


def test_strict_nbval_runs_each_output_of_a_lab_and_its_solution_once(harness):
    found = {cell.name: cell.passed for cell in harness.twice}
    names = [*(f"Cell {n}" for n in range(8)), *(f"Solution Cell {n}" for n in range(9))]
    false = ("Solution Cell 0", "Solution Cell 2")
    assert found == {name: name not in false for name in names}, harness.ran.stdout[-3000:]
    # a shared cell that is stored otherwise in the solution is run there too
    written = (harness.folder / "twice").rglob("*.txt")
    ran = {one.name: one.read_text() for one in written}
    assert ran == {"alike.txt": "once", "runs.txt": "onceonce"}


# ---- what is compared ----------------------------------------------------------------------------


def test_small_values_are_compared_by_their_digits_and_noise_is_zero():
    """Microseconds are not rounded away; what is left of a cancelled sum is."""
    [trace] = canonical_figure({"data": [{"y": [1.23456789e-6, 1e-17, float("nan")]}]})["data"]
    assert trace["y"] == [1.23457e-6, 0.0, None]


# ---- the labs themselves -------------------------------------------------------------------------
SOURCES = sorted(build.SOURCES.glob("[0-9]*.py"))
STORED = sorted([*LABS.glob("*.ipynb"), *(LABS / "solutions").glob("*.ipynb")])


@functools.cache
def described(source: Path, *, solved: bool) -> Any:
    """What a source describes. Nobody changes it."""
    return build.cells_of(source, solved=solved)


@functools.cache
def stored(path: Path) -> Any:
    """A stored lab. Nobody changes it."""
    return nbformat.read(path, as_version=4)


def test_every_lab_has_a_source_and_every_source_its_labs():
    assert sorted(target for source in SOURCES for target in build.notebooks_of(source)) == STORED


@pytest.mark.parametrize("path", STORED, ids=lambda path: str(path.relative_to(LABS)))
def test_a_stored_lab_is_its_source_run_once_from_top_to_bottom(path):
    lab = stored(path)
    new = described(build.SOURCES / f"{path.stem}.py", solved=path.parent != LABS)
    for old, cell in zip(lab.cells, new.cells, strict=True):
        assert (old.id, old.source, old.metadata) == (cell.id, cell.source, cell.metadata)
    assert lab.metadata == new.metadata
    code = [c for c in lab.cells if c.cell_type == "code" and c.source.strip()]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    figures = [o.data for c in code for o in c.outputs if PLOTLY in o.get("data", {})]
    assert all(base64.b64decode(data.get(PNG, ""))[:4] == b"\x89PNG" for data in figures)
    widgets = [c for c in code if re.search(r"pl\.(view\.widgets\.\w+|explore)\(", c.source)]
    assert all(any(PNG in o.get("data", {}) for o in c.outputs) for c in widgets)


@pytest.mark.parametrize("exercise", pl.exercises.ALL.values(), ids=lambda e: e.name)
def test_what_an_exercise_shows_as_stub_and_solution_is_what_its_lab_has(exercise):
    [source] = [source for source in SOURCES if source.stem.startswith(exercise.lab)]
    for solved, text in ((False, exercise.stub), (True, str(exercise.solution()))):
        cells = described(source, solved=solved).cells
        [cell] = [c for c in cells if c.cell_type == "code" and text in c.source]
        assert "check(" in cell.source
        if not solved:
            answer = set(str(exercise.solution()).splitlines()) - set(text.splitlines())
            assert answer and not [line for line in answer if line.strip() and line in cell.source]


def test_every_answer_that_the_package_has_is_checked_in_a_solution_and_stored_as_passed():
    """A run of the labs compares with what is stored; here that is what it should be."""
    solutions = [cell for path in STORED if path.parent != LABS for cell in stored(path).cells]
    checks = [c for c in solutions if c.cell_type == "code" and "check(" in c.source]
    for cell in checks:
        shown = " ".join(str(o.get("data")) for o in cell.outputs)
        assert re.search(r": passed, (all \d+ limits|its one limit) kept", shown), cell.source
    for path in sources.ANSWERS.glob("[a-z]*.py"):
        answer = sources.solution(sources.answer(path.stem))
        assert any(answer in cell.source for cell in checks), path.stem


def test_what_a_solution_quotes_a_checker_says():
    said = "".join(path.read_text() for path in Path(pl.exercises.__file__).parent.glob("*.py"))
    cells = [cell for source in SOURCES for cell in described(source, solved=True).cells]
    mistakes = " ".join(cell.source for cell in cells if "ommon mistakes" in cell.source)
    assert all(quote in said for quote in re.findall("“([^”…]+)”", mistakes))


def private(source: str) -> list[str]:
    """The names in this code that begin with one underscore, and so are not for students to use."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            names.append(node.attr)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            modules = [getattr(node, "module", None) or ""]
            names += [
                part for n in (*modules, *(a.name for a in node.names)) for part in n.split(".")
            ]
    return [name for name in names if name.startswith("_") and not name.endswith("__")]


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_a_student_s_cells_have_no_linter_s_marks_no_private_names_and_leave_no_files(source):
    for solved in (False, True):
        for cell in described(source, solved=solved).cells:
            if cell.cell_type == "code":
                assert not re.search(r"#\s*(fmt:|noqa|type:|isort:)", cell.source), cell.source
                assert private(cell.source) == [], cell.source
                assert not re.search("mkdtemp|mkstemp", cell.source), "this outlives the kernel"
                assert not re.search("(?<!raise )NotImplementedError", cell.source), "ask a verdict"


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_no_two_questions_or_exercises_of_a_lab_have_one_name(source):
    """Where all cells were run a name is its last one's, and so would its hints be."""
    asked = re.findall(r"^(\w+) = pl\.exercises\.(?!\w+\.check)", source.read_text(), re.MULTILINE)
    assert len(asked) >= 3 and len(set(asked)) == len(asked), asked


def given_and_taken(source: str) -> tuple[set[str], set[str]]:
    """Of a cell: the variables that it sets, and the names that it has from other cells."""
    tables = [symtable.symtable(source, "cell", "exec")]
    bound = {s for s in tables[0].get_symbols() if s.is_assigned() or s.is_imported()}
    own, read = {s.get_name() for s in bound}, set()
    while tables:
        table = tables.pop()
        tables += table.get_children()
        names = [s for s in table.get_symbols() if s.is_referenced()]
        read |= {s.get_name() for s in names if s.is_global() or table.get_type() == "module"}
    given = {s.get_name() for s in bound if not s.is_imported() and not s.is_namespace()}
    return given, read - own


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_a_student_can_run_a_cell_again_after_any_other(source):
    """What a cell takes from above is set in one cell, so no other gives it something else."""
    code = [c.source for c in described(source, solved=False).cells if c.cell_type == "code"]
    cells = [given_and_taken(text) for text in code]
    for text, (_, taken) in zip(code, cells, strict=True):
        for name in taken:
            assert sum(name in given for given, _ in cells) <= 1, (name, text)


@pytest.mark.parametrize("path", STORED, ids=lambda path: str(path.relative_to(LABS)))
def test_a_stored_lab_shows_no_stderr_no_figure_without_a_finding_and_ignores_no_output(path):
    outputs = [o for c in stored(path).cells for o in c.get("outputs", ())]
    assert [o.text for o in outputs if o.output_type == "stream" and o.name == "stderr"] == []
    figures = [o.data[PLOTLY] for o in outputs if PLOTLY in o.get("data", {})]
    assert all(figure.layout.title.text for figure in figures)
    words = ("nbval-ignore-output", "NBVAL_IGNORE_OUTPUT", "PYTEST_VALIDATE_IGNORE_OUTPUT")
    assert not any(w in c.source + str(c.metadata) for c in stored(path).cells for w in words)


def test_a_listing_frees_no_value_that_the_labs_up_to_it_have_not_named():
    """Of a printed program a student reads every column: its values are in the text by then."""
    named, unnamed = "", []
    for source in SOURCES:
        cells = described(source, solved=False).cells
        for cell, ran in zip(cells, stored(LABS / f"{source.stem}.ipynb").cells, strict=True):
            named += cell.source * (cell.cell_type == "markdown")
            shown = "".join(
                str(o.get("data", {}).get("text/plain")) for o in ran.get("outputs", ())
            )
            freed = re.findall(r"  frees (.+)$", shown, re.MULTILINE)
            values = {value.split()[0] for line in freed for value in line.split(", ")}
            unnamed += [(source.stem, value) for value in values if f"`{value}`" not in named]
    assert unnamed == []


def test_labs_holds_what_a_student_needs():
    """What JupyterLab's file browser shows there; it hides what begins with a dot."""
    shown = {path.name for path in LABS.iterdir() if not path.name.startswith((".", "__"))}
    assert shown == {path.name for path in STORED} | {"README.md", "solutions"}
