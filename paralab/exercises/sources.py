"""One text gives both the stub that a learner gets and the answer, for a notebook and its solution.

Marker lines enclose the part that the learner writes:

    def devices_needed(total, memory):
        ### BEGIN SOLUTION
        ### STUB: raise NotImplementedError("your turn")
        return math.ceil(total / memory)
        ### END SOLUTION

`student` replaces everything between the markers by the STUB lines (without any, by the one shown
above), at the indentation of BEGIN. `solution` leaves out the markers and the STUB lines. In the
source of a lab the line

    ### ANSWER: model_states

stands for the text of answers/model_states.py, which both functions insert first. An answer that
builds on an earlier one of its lab imports it; the import is left out, because the notebook has the
earlier answer in a cell. The exercises and the builder of the labs read all texts through these two
functions; the builder has a second folder of answers.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from pathlib import Path

ANSWERS = Path(__file__).resolve().parent / "answers"
DEFAULT_STUB = 'raise NotImplementedError("your turn")'

_BEGIN = re.compile(r"^(\s*)### BEGIN SOLUTION\s*$")
_END = re.compile(r"^\s*### END SOLUTION\s*$")
_STUB = re.compile(r"^\s*### STUB:(?: (.*))?$")
_ANSWER = re.compile(r"^### ANSWER: (\w+)[ \t]*$", re.MULTILINE)
_EARLIER = re.compile(r"\nfrom paralab\.exercises\.answers\..*\n")
_MARKER_LIKE = re.compile(r"^\s*#+\s*(BEGIN|END) SOLUTION|^\s*#+\s*(STUB|ANSWER):", re.IGNORECASE)


def answer(name: str, folders: Sequence[Path] = (ANSWERS,)) -> str:
    """The text of an exercise's answer, with its markers. Raises ValueError if there is none."""
    known = {path.stem: path for folder in folders for path in folder.glob("[a-z]*.py")}
    if name not in known:
        legal = ", ".join(sorted(known))
        raise ValueError(f"### ANSWER: {name}: there is no such answer; legal: {legal}")
    text = known[name].read_text(encoding="utf-8")
    abstract = ast.parse(text).body[0]  # the file's docstring is for readers of the package
    return _EARLIER.sub("", "\n".join(text.splitlines()[abstract.end_lineno :])).strip()


def student(text: str, folders: Sequence[Path] = (ANSWERS,)) -> str:
    """``text`` with stubs in place of solutions. Raises ValueError for a misplaced marker."""
    return _read(text, folders, solved=False)


def solution(text: str, folders: Sequence[Path] = (ANSWERS,)) -> str:
    """``text`` with solutions and without markers. Raises ValueError for a misplaced marker."""
    return _read(text, folders, solved=True)


def _read(text: str, folders: Sequence[Path], *, solved: bool) -> str:
    lines: list[str] = []
    stub: list[str] | None = None  # the STUB lines of the block that this line is in
    indent = ""
    text = _ANSWER.sub(lambda mark: answer(mark[1], folders), text)
    for number, line in enumerate(text.splitlines(), 1):
        if begin := _BEGIN.match(line):
            if stub is not None:
                raise _misplaced(number, line, "the block before it has no END")
            indent, stub = begin[1], []
        elif _END.match(line):
            if stub is None:
                raise _misplaced(number, line, "there is no BEGIN before it")
            if not solved:
                lines += [f"{indent}{words}".rstrip() for words in stub or [DEFAULT_STUB]]
            stub = None
        elif words := _STUB.match(line):
            if stub is None:
                raise _misplaced(number, line, "it is not between BEGIN and END")
            stub.append(words[1] or "")
        elif _MARKER_LIKE.match(line):
            raise _misplaced(number, line, "it is not spelled like a marker")
        elif stub is None or solved:
            lines.append(line)
    if stub is not None:
        raise ValueError("### BEGIN SOLUTION: there is no END; legal: ### END SOLUTION after it")
    return "\n".join(lines)


def _misplaced(number: int, line: str, why: str) -> ValueError:
    return ValueError(
        f"line {number}, {line.strip()!r}: {why}; legal: ### BEGIN SOLUTION, any number of "
        "### STUB: lines and the answer, ### END SOLUTION"
    )
