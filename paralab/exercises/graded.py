"""`paralab check lab.ipynb`: points for the answers in a learner's notebook, as data.

The notebook is read, not run (notebook.py). Its answers, and of the other cells what they need, are
executed in a process of their own, which hands them over pickled. Another one loads and checks them
and writes what it found as JSON: both begin in the notebook's folder, where its modules are. The
checkers are this package's: what a cell redefines or patches does not reach them, and nothing of
the learner's is loaded here. What answers do later, they do in the ranks of a check, which end by
their time limits.
"""

from __future__ import annotations

import ast
import contextlib
import json
import linecache
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paralab.checks import real
from paralab.exercises import notebook
from paralab.exercises.attempts import first_line
from paralab.exercises.exercise import Exercise
from paralab.exercises.notebook import Notebook
from paralab.exercises.verdict import Row, Verdict
from paralab.version import __version__

RUNGS = ("warm-up", "implement", "go further")  # of a lab's ladder, in the order of its exercises
DEFINED_S = 60.0  # seconds in which the cells of one answer have to be through
JUDGED_S = 600.0  # for the check of one answer, whose launches end long before


def read(path: Any, exercises: Sequence[Exercise]) -> Notebook:
    """The notebook of a lab of these exercises. Raises ValueError if the file is none."""
    return notebook.read(path, {one.lab for one in exercises})


def grade(
    path: Any, exercises: Sequence[Exercise], *, timeout: float = DEFINED_S
) -> dict[str, Any]:
    """Check a notebook's answers: one point for each exercise of its lab that passes.

    path       the file, or what `read` has made of it
    exercises  all that there are; those of the notebook's lab are asked for, in ladder order
    timeout    seconds in which the cells of one answer have to be through

    Raises ValueError if the file is no notebook of a lab. An answer that is missing, fails or does
    not end is a verdict. What answers print goes to the standard error.
    """
    timeout = real("timeout", timeout, above=0.0)
    book = path if isinstance(path, Notebook) else read(path, exercises)
    ladder = [one for one in exercises if one.lab == book.lab]
    rows = [
        {"exercise": exercise.name, "rung": RUNGS[(place > 0) + (place == len(ladder) - 1)]}
        | _said(exercise, book, timeout)
        for place, exercise in enumerate(ladder)
    ]
    points = {"points": sum(row["points"] for row in rows), "of": len(rows), "exercises": rows}
    return {"notebook": book.name, "lab": book.lab, "paralab": __version__, **points}


def _said(exercise: Exercise, book: Notebook, timeout: float) -> dict[str, Any]:
    names, statements = asked_for(exercise), notebook.until(exercise.name, book.statements)
    missing = [name for name in names if not any(name in one.defines for one in statements)]
    verdict, trouble = None, f"the notebook does not define {', '.join(missing)}{book.broken}"
    if not missing:
        source = notebook.needed(statements, names)
        verdict, trouble = _judged(exercise, source, names, book.path.absolute().parent, timeout)
    if verdict is None:
        return {"points": 0, "verdict": trouble, "limits": []}
    limits = [row._asdict() for row in verdict.rows]
    return {"points": int(verdict.passed), "verdict": repr(verdict), "limits": limits}


def asked_for(exercise: Exercise) -> list[str]:
    """The names that an answer defines: those in the call that its task shows."""
    [call] = re.findall(rf"pl\.exercises\.{exercise.name}\.check\(([\w, ]+)\)", exercise.task)
    return [name.strip() for name in call.split(",")]


def _judged(
    exercise: Exercise,
    source: Sequence[tuple[str, bool]],
    names: Sequence[str],
    folder: Path,
    timeout: float,
) -> tuple[Verdict | None, str]:
    """(the verdict on what ``source`` defines, "") or (None, why there is none)"""
    with tempfile.TemporaryDirectory() as here:
        given = {"source": source, "names": names, "exercise": exercise.name}
        Path(here, "given").write_text(json.dumps(given), encoding="utf-8")
        for step, seconds, late in (
            (_execute, timeout, "the cells that it needs were not through"),
            (_judge, JUDGED_S, "it was not judged"),
        ):
            status = _run(step.__name__, here, folder, seconds)
            said = _read(Path(here, step.__name__))
            if status is None:
                return None, f"{late} after {seconds:g} s"
            if said is None:
                return None, f"its cells failed: they ended their process with status {status}"
            if "failed" in said:
                return None, f"its cells failed: {said['failed']}"
    with contextlib.suppress(KeyError, TypeError, ValueError):
        rows = tuple(Row(*map(str, row[:3]), row[3]) for row in said["rows"])
        stated = [(row.limit, row.required) for row in rows] == [*exercise.required.items()]
        if stated and all(row.ok in (True, False, None) for row in rows):
            return Verdict(exercise=exercise.name, rows=rows, said=str(said["said"])), ""
    return None, "its cells failed: what they patched has spoiled the verdict"


def _run(step: str, here: str, folder: Path, seconds: float) -> int | None:
    """The status of a process that does one step, None if it did not end. Nothing of it is left."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "paralab.exercises.graded", step, here],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        stdout=2,  # this process's own output is the points alone
        start_new_session=True,
    )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _read(file: Path) -> dict[str, Any] | None:
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return said if isinstance(said, dict) else None


# ---- in the two processes ------------------------------------------------------------------------
class Shell:
    """In the place of IPython's: its magics and shell commands do nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **settings: None


def _execute(given: dict[str, Any], here: Path) -> dict[str, Any]:
    """Run statements as a notebook would, and hand over the named values."""
    from paralab.ranks.code import pickled

    # so that what it defines travels by value
    found: dict[str, Any] = {"__name__": "__main__", "get_ipython": Shell}
    found["display"] = lambda *args, **settings: None
    tree = ast.parse(_text(given))
    for place, (_, may_fail) in enumerate(given["source"]):
        if may_fail:
            caught = ast.ExceptHandler(type=ast.Name("Exception", ast.Load()), body=[ast.Pass()])
            tree.body[place] = ast.Try([tree.body[place]], [caught], [], [])
    exec(compile(ast.fix_missing_locations(tree), "answer", "exec"), found)
    Path(here, "answer").write_bytes(pickled(tuple(found[name] for name in given["names"])))
    return {}


def _judge(given: dict[str, Any], here: Path) -> dict[str, Any]:
    """Check the values."""
    from paralab.exercises import ALL

    exercise, text = ALL[given["exercise"]], _text(given)
    # where a verdict looks for the line of an error
    linecache.cache["answer"] = len(text), None, text.splitlines(True), "answer"
    verdict = exercise.check(*pickle.loads(Path(here, "answer").read_bytes()))
    return {"rows": [tuple(row) for row in verdict.rows], "said": verdict.said}


def _text(given: dict[str, Any]) -> str:
    return "\n\n".join(text for text, _ in given["source"])


def _main(step: str, here: str) -> None:
    sys.path.insert(0, os.getcwd())  # as in a notebook
    sys.argv[1:] = []
    given = json.loads(Path(here, "given").read_text(encoding="utf-8"))
    try:
        said = {"_execute": _execute, "_judge": _judge}[step](given, Path(here))
    except BaseException as error:
        said = {"failed": f"{type(error).__name__}: {first_line(error)}".removesuffix(": ")}
    Path(here, step).write_text(json.dumps(said), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # whatever threads it has left


if __name__ == "__main__":
    _main(*sys.argv[1:])
