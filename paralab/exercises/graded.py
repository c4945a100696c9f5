"""`paralab check lab.ipynb`: points for the answers in a learner's notebook, as data.

The notebook is read, not run (notebook.py). For each exercise a first process executes the answer
and the statements that it needs, and pickles it. A second process loads the pickle, checks the
answer and writes the verdict as JSON. Both start in the notebook's folder, where its modules are.
So what a cell redefines or patches does not reach the checkers, and the process that reads the
verdicts loads nothing of the learner's. Answers that run on ranks end by the checks' time limits.
"""

from __future__ import annotations

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

from paralab.exercises import ALL, LADDERS, notebook
from paralab.exercises.attempts import first_line
from paralab.exercises.exercise import Exercise
from paralab.exercises.notebook import Notebook
from paralab.exercises.verdict import Row, Verdict
from paralab.ranks.failure import KILLED
from paralab.version import __version__

Json = dict[str, Any]
RUNGS = ("warm-up", "implement", "go further")  # of a lab's exercises, in their order
DEFINED_S = 60.0  # seconds for the cells of one answer
JUDGED_S = 600.0  # seconds for the check of one answer, whose launches end long before


def grade(book: Notebook) -> Json:
    """Check a notebook's answers: one point for each exercise of its lab that passes. An answer
    that is missing, fails or does not end gets a verdict too. What answers print goes to the
    standard error.
    """
    ladder = LADDERS[book.lab]
    rows = [
        {"exercise": exercise.name, "rung": RUNGS[(position > 0) + (position == len(ladder) - 1)]}
        | points(exercise, book)
        for position, exercise in enumerate(ladder)
    ]
    total = {"points": sum(row["points"] for row in rows), "of": len(rows), "exercises": rows}
    return {"notebook": book.name, "lab": book.lab, "paralab": __version__, **total}


def points(exercise: Exercise, book: Notebook) -> Json:
    """The points (0 or 1), the verdict and the limits of one answer."""
    names, statements = answer_names(exercise), notebook.until(exercise.name, book.statements)
    missing = [name for name in names if not any(name in one.defines for one in statements)]
    verdict: Verdict | str = f"the notebook does not define {', '.join(missing)}{book.broken}"
    if not missing:
        source = notebook.needed(statements, names)
        verdict = _judged(exercise, source, names, book.path.absolute().parent)
    if isinstance(verdict, str):
        return {"points": 0, "verdict": verdict, "limits": []}
    limits = [row._asdict() for row in verdict.rows]
    return {"points": int(verdict.passed), "verdict": repr(verdict), "limits": limits}


def answer_names(exercise: Exercise) -> list[str]:
    """The names that an answer defines, from the call of ``check`` that its task shows."""
    [call] = re.findall(rf"pl\.exercises\.{exercise.name}\.check\(([\w, ]+)\)", exercise.task)
    return [name.strip() for name in call.split(",")]


def _judged(exercise: Exercise, source: str, names: Sequence[str], folder: Path) -> Verdict | str:
    """The verdict on the answer that ``source`` defines, in parts with these names; or why there is
    none. Both processes run in ``folder``.
    """
    with tempfile.TemporaryDirectory() as workspace:
        request = {"source": source, "names": names, "exercise": exercise.name}
        Path(workspace, "given").write_text(json.dumps(request), encoding="utf-8")
        for step, seconds, overdue in (
            (_execute, DEFINED_S, "the cells that it needs had not ended"),
            (_judge, JUDGED_S, "its check had not ended"),
        ):
            status = _run(step.__name__, workspace, folder, seconds)
            result = _read(Path(workspace, step.__name__))
            if status is None:
                return f"{overdue} after {seconds:g} s"
            if result is None:
                killed = KILLED * (status == -signal.SIGKILL)
                return f"its cells failed: they ended their process with status {status}{killed}"
            if "failed" in result:
                return f"its cells failed: {result['failed']}"
    rows = tuple(Row(*row) for row in result["rows"])
    return Verdict(exercise=exercise.name, rows=rows, said=result["said"])


def _run(step: str, workspace: str, folder: Path, seconds: float) -> int | None:
    """Run one step in a process. Returns its exit status, or None if it did not end; its whole
    process group is killed afterwards.
    """
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "paralab.exercises.graded", step, workspace],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        stdout=2,  # standard output is for the points alone
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


def _read(file: Path) -> Json | None:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


# ---- in the two processes ------------------------------------------------------------------------
class Shell:
    """Stands for IPython's shell: magics and shell commands do nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **settings: None


def _execute(request: Json, workspace: Path) -> Json:
    """Run the statements as a notebook would, and pickle the named values."""
    from paralab.ranks.code import pickled

    # in "__main__", so that what the cells define is pickled by value
    namespace: dict[str, Any] = {"__name__": "__main__", "get_ipython": Shell}
    namespace["display"] = lambda *args, **settings: None
    exec(compile(request["source"], "answer", "exec"), namespace)
    Path(workspace, "answer").write_bytes(
        pickled(tuple(namespace[name] for name in request["names"]))
    )
    return {}


def _judge(request: Json, workspace: Path) -> Json:
    """Check the pickled values."""
    exercise, text = ALL[request["exercise"]], request["source"]
    # a verdict shows the line of an error from here
    linecache.cache["answer"] = len(text), None, text.splitlines(True), "answer"
    verdict = exercise.check(*pickle.loads(Path(workspace, "answer").read_bytes()))
    return {"rows": [tuple(row) for row in verdict.rows], "said": verdict.said}


def _main(step: str, workspace: str) -> None:
    sys.path.insert(0, os.getcwd())  # as in a notebook
    sys.argv[1:] = []
    request = json.loads(Path(workspace, "given").read_text(encoding="utf-8"))
    try:
        result = {"_execute": _execute, "_judge": _judge}[step](request, Path(workspace))
    except BaseException as error:
        result = {"failed": f"{type(error).__name__}: {first_line(error)}".removesuffix(": ")}
    Path(workspace, step).write_text(json.dumps(result), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # without waiting for threads that the answer has started


if __name__ == "__main__":
    _main(*sys.argv[1:])
