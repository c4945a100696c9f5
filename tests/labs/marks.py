"""The marks in a lab's source: those of paralab/exercises/sources.py, and the line

    ### ANSWER: model_states

which stands for the text of paralab/exercises/answers/model_states.py, or of answers/, which has
second solutions. A mark that is misplaced or misspelled would show a learner the solution, so it is
an error.
"""

from __future__ import annotations

import re
from pathlib import Path

from paralab.exercises import sources

FOLDERS = sources.ANSWERS, Path(__file__).resolve().parent / "answers"
_ANSWER = re.compile(r"^### ANSWER: (\w+)[ \t]*$", re.MULTILINE)
_MARK_LIKE = re.compile(
    r"^[ \t]*#+[ \t]*(?:(?:BEGIN|END) SOLUTION|(?:STUB|ANSWER):).*", re.IGNORECASE | re.MULTILINE
)


def answer(name: str) -> str:
    """The text of an answer in either folder. Raises ValueError if there is none."""
    known = {path.stem: folder for folder in FOLDERS for path in folder.glob("[a-z]*.py")}
    if name not in known:
        legal = ", ".join(sorted(known))
        raise ValueError(f"### ANSWER: {name}: there is no such answer; legal: {legal}")
    return sources.answer(name, known[name])


def student(text: str) -> str:
    """``text`` with stubs in place of solutions. Raises ValueError for a misplaced mark."""
    return sources.student(_whole(text))


def solution(text: str) -> str:
    """``text`` with solutions and without marks. Raises ValueError for a misplaced mark."""
    return sources.solution(_whole(text))


def _whole(text: str) -> str:
    text = _ANSWER.sub(lambda mark: answer(mark[1]), text).removesuffix("\n")
    # An empty line in place of each mark, so that a line that is left keeps its number.
    rest = sources.BLOCK.sub(lambda block: "\n" + sources.STUB.sub("\n", block[2]), text)
    if stray := _MARK_LIKE.search(rest):
        line = rest.count("\n", 0, stray.start()) + 1
        raise ValueError(
            f"line {line}, {stray[0].strip()!r}: a marker that is misplaced or misspelled; legal: "
            "### BEGIN SOLUTION, any number of ### STUB: lines and the answer, ### END SOLUTION"
        )
    return text
