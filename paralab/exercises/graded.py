"""`paralab check lab.ipynb`: points for the answers in a learner's notebook, as data.

The notebook is read, not run. Its answers, and of the other cells what they need (statements that
import, define or assign a name that is used), are executed in a process of their own, which hands
them over pickled. What defines a name again behind the answer's last check does not count. The
checkers are this package's: what a cell redefines or patches does not reach them. What answers do
later, they do in the ranks of a check, which end by their time limits.
"""

from __future__ import annotations

import ast
import json
import linecache
import pickle
import re
import subprocess
import symtable
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from paralab import checks
from paralab.checks import illegal, real
from paralab.exercises.exercise import Exercise
from paralab.version import __version__

RUNGS = ("warm-up", "implement", "go further")  # of a lab's ladder, in the order of its exercises
DEFINED_S = 60.0  # seconds in which the cells of one answer have to be through


class Statement(NamedTuple):
    """One statement of a notebook: its cell, its text, the names that it defines or changes, and
    those that it uses.
    """

    cell: int
    text: str
    defines: frozenset[str]
    uses: frozenset[str]


def grade(
    path: Any, exercises: Sequence[Exercise], *, timeout: float = DEFINED_S
) -> dict[str, Any]:
    """Check a notebook's answers: one point for each exercise of its lab that passes.

    exercises  all that there are; those of the notebook's lab are asked for, in ladder order
    timeout    seconds in which the cells of one answer have to be through

    Raises ValueError if the file is no notebook of a lab. An answer that is missing, fails or does
    not end is a verdict.
    """
    file = checks.path("notebook", path, legal := "a notebook of a lab, as labs/05_zero.ipynb")
    timeout = real("timeout", timeout, above=0.0)
    try:
        cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
        texts = [(one["cell_type"], "".join(one["source"])) for one in cells]
    except OSError as error:
        raise illegal("notebook", str(path), error.strerror or "cannot be read", legal) from error
    except (ValueError, KeyError, TypeError) as error:
        raise illegal("notebook", str(path), "this is no notebook", legal) from error
    number = _lab(file.name, texts, {one.lab for one in exercises}, legal)
    cells = [text for kind, text in texts if kind == "code"]
    statements, broken = _statements(cells)
    ladder, folder = [one for one in exercises if one.lab == number], file.absolute().parent
    rows = [
        {"exercise": exercise.name, "rung": RUNGS[(place > 0) + (place == len(ladder) - 1)]}
        | _said(exercise, _until(exercise, cells, statements), broken, folder, timeout)
        for place, exercise in enumerate(ladder)
    ]
    points = {"points": sum(row["points"] for row in rows), "of": len(rows), "exercises": rows}
    return {"notebook": file.name, "lab": number, "paralab": __version__, **points}


def _said(
    exercise: Exercise, statements: list[Statement], broken: str, folder: Path, timeout: float
) -> dict[str, Any]:
    names = asked_for(exercise)
    missing = [name for name in names if not any(name in one.defines for one in statements)]
    parts, trouble = (), f"the notebook does not define {', '.join(missing)}{broken}"
    if not missing:
        parts, trouble = _executed(needed(statements, names), names, folder, timeout)
    if trouble:
        return {"points": 0, "verdict": trouble, "limits": []}
    verdict = exercise.check(*parts)
    limits = [row._asdict() for row in verdict.rows]
    return {"points": int(verdict.passed), "verdict": repr(verdict), "limits": limits}


def _until(
    exercise: Exercise, cells: Sequence[str], statements: Sequence[Statement]
) -> list[Statement]:
    """Without those behind the exercise's last check that only define again what was defined."""
    call = f"exercises.{exercise.name}.check("
    last = max((at for at, text in enumerate(cells) if call in text), default=len(cells))
    before = {name for one in statements if one.cell <= last for name in one.defines}
    return [one for one in statements if one.cell <= last or not one.defines <= before]


def asked_for(exercise: Exercise) -> list[str]:
    """The names that an answer defines: those in the call that its task shows."""
    [call] = re.findall(rf"pl\.exercises\.{exercise.name}\.check\(([\w, ]+)\)", exercise.task)
    return [name.strip() for name in call.split(",")]


def _lab(name: str, texts: Sequence[tuple[str, str]], known: set[str], legal: str) -> str:
    """ "05", from the file's name or else from the title."""
    title = next((text for kind, text in texts if kind == "markdown"), "")
    found = re.match(r"(\d\d)_", name) or re.match(r"# (\d\d)\b", title)
    if found is None or found[1] not in known:
        raise illegal(
            "notebook", name, "neither its name nor its title says which lab it is", legal
        )
    return found[1]


def _statements(cells: Sequence[str]) -> tuple[list[Statement], str]:
    """(every statement, what to say about cells that cannot be read)"""
    found, broken = [], ""
    for number, cell in enumerate(cells):
        lines = ["" if line.lstrip()[:1] in ("%", "!") else line for line in cell.splitlines()]
        text = "\n".join(lines)
        try:
            named = [(node, _names(node)) for node in ast.parse(text).body]
        except SyntaxError as error:
            broken += f"; code cell {number + 1} cannot be read: {error.msg}, line {error.lineno}"
            continue
        for node, names in named:
            source = ast.get_source_segment(text, node) or ""
            decorated = [f"@{ast.unparse(one)}" for one in getattr(node, "decorator_list", ())]
            found.append(Statement(number, "\n".join([*decorated, source]), *names))
    return found, broken


def _names(node: ast.stmt) -> tuple[frozenset[str], frozenset[str]]:
    """What a statement defines or changes in the notebook, and what it takes from it: names that
    are a function's own are neither.
    """
    table = symtable.symtable(ast.unparse(node), "notebook", "exec")
    names, inner = table.get_symbols(), [*table.get_children()]
    for one in inner:
        inner += one.get_children()
    defines = {n.get_name() for n in names if n.is_assigned() or n.is_imported()}
    defines |= {n.get_name() for n in names if n.is_namespace()}  # functions and classes
    uses = {n.get_name() for n in names if n.is_referenced()}
    uses |= {n.get_name() for one in inner for n in one.get_symbols() if n.is_global()}
    places = [] if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else ast.walk(node)
    for place in places:  # table[key] = ...
        if isinstance(place, (ast.Attribute, ast.Subscript)) and isinstance(place.ctx, ast.Store):
            while isinstance(place, (ast.Attribute, ast.Subscript)):
                place = place.value
            defines |= {place.id} if isinstance(place, ast.Name) else set()
    return frozenset(defines), frozenset(uses - defines)


def needed(statements: Sequence[Statement], names: Sequence[str]) -> str:
    """The source of ``names`` and of everything that they need, in the notebook's order."""
    wanted, grown = set(names), -1
    while grown != len(wanted):
        grown = len(wanted)
        for one in statements:
            if one.defines & wanted:
                wanted |= one.uses
    return "\n\n".join(one.text for one in statements if one.defines & wanted)


def _executed(source: str, names: Sequence[str], folder: Path, timeout: float) -> tuple[tuple, str]:
    """(the named values, "") or ((), why there are none), from a process of its own."""
    with tempfile.TemporaryDirectory() as here:
        script, out = Path(here, "answer.py"), Path(here, "answer.pickle")
        script.write_text(source, encoding="utf-8")
        command = [sys.executable, "-m", "paralab.exercises.graded", str(script), str(out), *names]
        try:
            done = subprocess.run(
                command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout
            )
        except subprocess.TimeoutExpired:
            return (), f"the cells that it needs were not through after {timeout:g} s"
        if done.returncode or not out.exists():
            said = done.stderr.decode(errors="replace").strip().splitlines() or ["no output"]
            return (), f"its cells failed: {said[-1]}"
        # where a verdict looks for the line of an error
        linecache.cache["answer"] = len(source), None, source.splitlines(True), "answer"
        return pickle.loads(out.read_bytes()), ""


def _execute(script: str, out: str, *names: str) -> None:
    """In that process: run the script as a notebook would, and write the named values."""
    from paralab.ranks.code import pickled

    found: dict[str, Any] = {"__name__": "__main__"}  # so that what it defines travels by value
    exec(compile(Path(script).read_text(encoding="utf-8"), "answer", "exec"), found)
    Path(out).write_bytes(pickled(tuple(found[name] for name in names)))


if __name__ == "__main__":
    _execute(*sys.argv[1:])
