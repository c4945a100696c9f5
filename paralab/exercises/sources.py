"""One text gives both the stub that a learner gets and the answer, for a notebook and its solution.

Marker lines enclose the part that the learner writes:

    def devices_needed(total, memory):
        ### BEGIN SOLUTION
        ### STUB: raise NotImplementedError("your turn")
        return math.ceil(total / memory)
        ### END SOLUTION

`student` replaces everything between the markers by the STUB lines (without any, by the one shown
above), at the indentation of BEGIN. `solution` leaves out the markers and the STUB lines. An answer
that builds on an earlier one of its lab imports it; the import is left out, because the notebook
has the earlier answer in a cell.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ANSWERS = Path(__file__).resolve().parent / "answers"

BLOCK = re.compile(
    r"^([ \t]*)### BEGIN SOLUTION[ \t]*\n((?:.*\n)*?)[ \t]*### END SOLUTION[ \t]*$", re.MULTILINE
)
STUB = re.compile(r"^[ \t]*### STUB:(?: (.*))?\n", re.MULTILINE)
_EARLIER = re.compile(r"\nfrom paralab\.exercises\.answers\..*\n")


def answer(name: str, folder: Path = ANSWERS) -> str:
    """The text of an exercise's answer, with its markers and without the file's docstring."""
    text = (folder / f"{name}.py").read_text(encoding="utf-8")
    abstract = ast.parse(text).body[0]
    return _EARLIER.sub("", "\n".join(text.splitlines()[abstract.end_lineno :])).strip()


def student(text: str) -> str:
    """``text`` with stubs in place of solutions."""

    def stub(block: re.Match) -> str:
        lines = STUB.findall(block[2]) or ['raise NotImplementedError("your turn")']
        return "\n".join(f"{block[1]}{line}".rstrip() for line in lines)

    return BLOCK.sub(stub, text)


def solution(text: str) -> str:
    """``text`` with solutions and without markers."""
    return BLOCK.sub(lambda block: STUB.sub("", block[2]).removesuffix("\n"), text)
