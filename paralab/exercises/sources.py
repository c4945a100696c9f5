"""One text, two readings: what the learner gets and what an answer looks like.

Between the marker lines stands what is the learner's to write:

    def devices_needed(total, memory):
        ### BEGIN SOLUTION
        ### STUB: raise NotImplementedError("your turn")
        return math.ceil(total / memory)
        ### END SOLUTION

`student` puts the STUB lines in the place of everything between the markers (without a STUB line,
the one above), at the indentation of BEGIN. `solution` leaves out markers and STUB lines. The
notebooks of labs/ (labs/build.py) and the exercises read their texts through these two.
"""

from __future__ import annotations

import re

DEFAULT_STUB = 'raise NotImplementedError("your turn")'

_BEGIN = re.compile(r"^(\s*)### BEGIN SOLUTION\s*$")
_END = re.compile(r"^\s*### END SOLUTION\s*$")
_STUB = re.compile(r"^\s*### STUB:(?: (.*))?$")
_MARKER_LIKE = re.compile(r"^\s*#+\s*(BEGIN|END) SOLUTION|^\s*#+\s*STUB:", re.IGNORECASE)


def has_solution(text: str) -> bool:
    """Whether there is anything here that only a solution shows."""
    return any(_BEGIN.match(line) for line in text.splitlines())


def student(text: str) -> str:
    """``text`` with every solution replaced by its stub. Raises ValueError on a stray marker."""
    return _read(text, solved=False)


def solution(text: str) -> str:
    """``text`` with its solutions and without markers. Raises ValueError on a stray marker."""
    return _read(text, solved=True)


def _read(text: str, *, solved: bool) -> str:
    lines: list[str] = []
    stub: list[str] | None = None  # of the block we are in
    indent = ""
    for number, line in enumerate(text.splitlines(), 1):
        if begin := _BEGIN.match(line):
            if stub is not None:
                raise _stray(number, line, "the block before it has no END")
            indent, stub = begin[1], []
        elif _END.match(line):
            if stub is None:
                raise _stray(number, line, "there is no BEGIN before it")
            if not solved:
                lines += [f"{indent}{words}".rstrip() for words in stub or [DEFAULT_STUB]]
            stub = None
        elif words := _STUB.match(line):
            if stub is None:
                raise _stray(number, line, "it is not between BEGIN and END")
            stub.append(words[1] or "")
        elif _MARKER_LIKE.match(line):
            raise _stray(number, line, "it is not spelled like a marker")
        elif stub is None or solved:
            lines.append(line)
    if stub is not None:
        raise ValueError("### BEGIN SOLUTION: there is no END; legal: ### END SOLUTION after it")
    return "\n".join(lines)


def _stray(number: int, line: str, why: str) -> ValueError:
    return ValueError(
        f"line {number}, {line.strip()!r}: {why}; legal: ### BEGIN SOLUTION, any number of "
        "### STUB: lines and the answer, ### END SOLUTION"
    )
