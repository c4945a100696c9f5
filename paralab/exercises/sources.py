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
earlier answer in a cell. The builder of the labs has a second folder of answers.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from pathlib import Path

ANSWERS = Path(__file__).resolve().parent / "answers"
DEFAULT_STUB = 'raise NotImplementedError("your turn")'

_BLOCK = re.compile(
    r"^([ \t]*)### BEGIN SOLUTION[ \t]*\n((?:.*\n)*?)[ \t]*### END SOLUTION[ \t]*$", re.MULTILINE
)
_STUB = re.compile(r"^[ \t]*### STUB:(?: (.*))?\n", re.MULTILINE)
_ANSWER = re.compile(r"^### ANSWER: (\w+)[ \t]*$", re.MULTILINE)
_EARLIER = re.compile(r"\nfrom paralab\.exercises\.answers\..*\n")
_MARKER_LIKE = re.compile(
    r"^[ \t]*#+[ \t]*(?:(?:BEGIN|END) SOLUTION|(?:STUB|ANSWER):).*", re.IGNORECASE | re.MULTILINE
)


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

    def stub(block: re.Match) -> str:
        lines = _STUB.findall(block[2]) or [DEFAULT_STUB]
        return "\n".join(f"{block[1]}{line}".rstrip() for line in lines)

    solution(text, folders)  # refuses a misplaced marker
    return _BLOCK.sub(stub, _with_answers(text, folders))


def solution(text: str, folders: Sequence[Path] = (ANSWERS,)) -> str:
    """``text`` with solutions and without markers. Raises ValueError for a misplaced marker."""

    text = _with_answers(text, folders)
    # An empty line in place of each marker, so that a line that is left keeps its number.
    rest = _BLOCK.sub(lambda block: "\n" + _STUB.sub("\n", block[2]), text)
    if stray := _MARKER_LIKE.search(rest):
        line = rest.count("\n", 0, stray.start()) + 1
        raise ValueError(
            f"line {line}, {stray[0].strip()!r}: a marker that is misplaced or misspelled; legal: "
            "### BEGIN SOLUTION, any number of ### STUB: lines and the answer, ### END SOLUTION"
        )
    return _BLOCK.sub(lambda block: _STUB.sub("", block[2]).removesuffix("\n"), text)


def _with_answers(text: str, folders: Sequence[Path]) -> str:
    return _ANSWER.sub(lambda mark: answer(mark[1], folders), text).removesuffix("\n")
