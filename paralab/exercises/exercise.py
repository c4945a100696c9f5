"""One exercise: a task, limits that its checker enforces, three hints, and an answer to compare.

    exercise = pl.exercises.all_gather_half
    exercise                      # the task and its limits
    exercise.check(my_function)   # a Verdict: limit | asked | yours | ok
    exercise.hint()               # one push at a time
    exercise.solution()           # source of one answer

The answer is a file of answers/, with the markers of labs/build.py around what is the learner's to
write: stub and solution are two readings of that one text.
"""

from __future__ import annotations

import ast
import html
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paralab.checks import whole
from paralab.exercises import sources
from paralab.exercises.verdict import Verdict

if TYPE_CHECKING:
    import pandas as pd

ANSWERS = Path(__file__).resolve().parent / "answers"


@dataclass(frozen=True, repr=False)
class Text:
    """A few words for a notebook cell: the words are the repr."""

    words: str

    def __str__(self) -> str:
        return self.words

    def __repr__(self) -> str:
        return self.words

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(self.words)}</p>"


@dataclass(frozen=True, repr=False)
class Source(Text):
    """Source code for a notebook cell."""

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.words)}</pre>"

    def _repr_markdown_(self) -> str:
        return f"```python\n{self.words}\n```"


@dataclass(frozen=True, kw_only=True, repr=False)
class Exercise:
    """An exercise of a lab. Its checker is what `check` calls; see that function for arguments.

    name      the attribute of ``pl.exercises``
    lab       where it is set, "01"
    task      markdown: what to write
    asked     (limit, what is asked) pairs, in the order in which they are looked at
    hints     three pushes, from a nudge to nearly all of it
    checker   (answer, ...) -> Verdict
    """

    name: str
    lab: str
    task: str
    asked: tuple[tuple[str, str], ...]
    hints: tuple[str, str, str]
    checker: Callable[..., Verdict]
    _given: list[int] = field(default_factory=list)

    def check(self, *answer: Any, **settings: Any) -> Verdict:
        """Hold an answer against every limit. A wrong answer, and one that fails, is a Verdict."""
        return self.checker(*answer, **settings)

    def hint(self, number: int | None = None) -> Text:
        """The next hint, or hint ``number`` (1 to 3) again."""
        if number is None:
            number = len(self._given) + 1
            if number > len(self.hints):
                return Text(f"Those were all {len(self.hints)}; .solution() shows one answer.")
            self._given.append(number)
        number = whole("number", number, at_least=1, at_most=len(self.hints))
        return Text(f"hint {number} of {len(self.hints)}: {self.hints[number - 1]}")

    @property
    def limits(self) -> pd.DataFrame:
        """What is asked, limit by limit; ``check`` enforces each row."""
        import pandas as pd

        return pd.DataFrame(self.asked, columns=["limit", "asked"]).set_index("limit")

    @cached_property
    def source(self) -> str:
        """The answer with its markers, as it stands in the lab's source."""
        text = (ANSWERS / f"{self.name}.py").read_text(encoding="utf-8")
        abstract = ast.parse(text).body[0]  # the file's docstring is not the learner's
        return "\n".join(text.splitlines()[abstract.end_lineno :]).strip()

    @property
    def stub(self) -> str:
        """What the learner starts from."""
        return sources.student(self.source)

    def solution(self) -> Source:
        """Source of one answer that passes."""
        return Source(sources.solution(self.source))

    def __repr__(self) -> str:
        return f"Exercise({self.name}, lab {self.lab}, {len(self.asked)} limits)"

    def _repr_markdown_(self) -> str:
        rows = "".join(f"| {limit} | {asked} |\n" for limit, asked in self.asked)
        return f"{textwrap.dedent(self.task).strip()}\n\n| limit | asked |\n|---|---|\n{rows}"
