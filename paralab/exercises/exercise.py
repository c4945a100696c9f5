"""One exercise: a task, limits that its checker enforces, three hints, and an answer to compare.

A checker becomes an exercise by `exercise`, which says what it takes and what is required. Task
and hints are tasks/NAME.md. The answer is answers/NAME.py, with the markers of sources.py around
what is the learner's to write: stub, solution and the lab's cell are readings of that text.
"""

from __future__ import annotations

import html
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from paralab.checks import real, shown, whole
from paralab.exercises import sources
from paralab.exercises.questions import kind_of
from paralab.exercises.tries import Tries, Try
from paralab.exercises.verdict import Notes, Verdict
from paralab.ranks.errors import interrupted

TASKS = Path(__file__).resolve().parent / "tasks"
TIMEOUT_S = 20.0  # without any sign of life: a check needs a second or two


@dataclass(frozen=True, repr=False)
class Text:
    """A few words for a notebook cell: the words are the repr."""

    words: str

    def __str__(self) -> str:
        return self.words

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(self.words)}</p>"


@dataclass(frozen=True, repr=False)
class Source(Text):
    """Source code for a notebook cell."""

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.words)}</pre>"

    def _repr_markdown_(self) -> str:
        return f"```python\n{self.words}\n```"


class Takes(NamedTuple):
    """What one part of an answer must be.

    call     how it is called, keyword arguments with "=": "MyDDP(module, bucket_bytes=...)"
    methods  what a class needs
    kind     what it is, if it is not "a function" or, with a capital letter, "a class": what a dict
             has to look like, "a dict {patient: lists}"
    """

    call: str = ""
    methods: tuple[str, ...] = ()
    kind: str = ""

    @property
    def what(self) -> str:
        return self.kind or ("a class" if self.call[0].isupper() else "a function")

    def refusal(self, part: Any) -> tuple[str, str]:
        """(what ``part`` is, why that will not do) as far as can be known before it is called, or
        two empty strings.
        """
        if self.what.startswith("a dict"):
            said = f"required: {self.what}, yours is {kind_of(part)}"
            return ("", "") if isinstance(part, Mapping) else ("no dict", said)
        if not callable(part):
            return "nothing to call", f"required: {self.what}, yours is {shown(part)}"
        if why := _of_ours(part):
            return "the library's", f"{shown(part)} {why}; required: one of yours"
        function = isinstance(part, type) and inspect.ismethod(getattr(part, "apply", None))
        if function and self.what.startswith("a function"):  # of autograd
            name = part.__name__
            return "a class", f"required: {self.what}, yours is the class {name}: give {name}.apply"
        missing = [m for m in self.methods if not callable(getattr(part, m, None))]
        if isinstance(part, type) and missing:
            return "methods missing", f"the class has no method {' and no '.join(missing)}"
        try:
            given = [word for word in self.call.partition("(")[2][:-1].split(", ") if word]
            named = dict.fromkeys(word.partition("=")[0] for word in given if "=" in word)
            inspect.signature(part).bind(*given[: len(given) - len(named)], **named)
        except TypeError as error:
            return "cannot be called", f"required: {self.call}, yours cannot be called so: {error}"
        except Exception:  # built in, say: what it takes shows when it is called
            pass
        return "", ""


def _of_ours(part: Any) -> str:
    """How an answer is this package's, or extends or calls what it shows; "" if it does not."""
    if _home(part).partition(".")[0] == "paralab":
        return "is the library's own"
    kind = part if isinstance(part, type) else type(part)
    if any(_home(one).partition(".")[0] == "paralab" for one in kind.__mro__):
        return "extends a class of the library's"
    for function in (part, *vars(kind).values()):
        if isinstance(function, FunctionType):
            used = inspect.getclosurevars(function)
            values = (*used.globals.values(), *used.nonlocals.values())
            if any(_home(one).startswith("paralab.exercises.answers") for one in values):
                return "calls an answer of the library's"
    return ""


def _home(value: Any) -> str:
    return (
        value.__name__ if isinstance(value, ModuleType) else str(getattr(value, "__module__", ""))
    )


@dataclass(kw_only=True, repr=False, eq=False)
class Exercise:
    """An exercise of a lab; a notebook shows its task and its limits, anything else may print them
    (``task``, ``stub``, ``required``). Runs in a script, too.

        exercise.check(answer)   a Verdict on the function, class or dict that the task asks for; of
                                 several, in the task's order
        exercise.hint()          one hint at a time
        exercise.solution()      source of one answer

    name      the attribute of ``pl.exercises``
    lab       where it is set, "01": the package's `LADDERS` say it
    required  {limit: what is required}, in the order in which they are looked at
    takes     what an answer consists of; only the first part has to be there
    checker   notes what there is to say about each answer
    patients  {name: what is to be diagnosed}, of a clinic
    """

    name: str
    lab: str = ""
    required: dict[str, str]
    takes: tuple[Takes, ...]
    checker: Callable[[Tries], None]
    patients: dict[str, Any] = field(default_factory=dict)
    _given: list[int] = field(default_factory=list)

    def check(self, *answer: Any, timeout: float = TIMEOUT_S) -> Verdict:
        """Hold an answer against every limit.

        timeout  seconds without a sign of life until the ranks that run it are stopped

        Raises ValueError for a wrong timeout. An answer that is wrong, that fails, or that does not
        end is a Verdict.
        """
        __tracebackhide__ = True
        return self.check_each([answer], timeout=timeout)[0]

    def check_each(self, answers: Sequence[tuple], *, timeout: float = TIMEOUT_S) -> list[Verdict]:
        """Verdicts on several answers, which share their launches."""
        __tracebackhide__ = True
        timeout = real("timeout", timeout, above=0.0)
        tries = [Try(answer, Notes(self.name, self.required)) for answer in answers]
        try:
            for one in tries:
                self._begin(one)
            self.checker(Tries([one for one in tries if not one.notes.over], timeout))
        except KeyboardInterrupt as interrupt:
            raise interrupted(interrupt, "") from None
        except Exception as error:
            if len(tries) > 1:  # one of them keeps the others from their verdicts
                return [self.check(*answer, timeout=timeout) for answer in answers]
            said = f"cannot be judged: {type(error).__name__}: {shown(error)}"
            tries[0].notes.end(said, yours="cannot be judged")
        return [one.notes.verdict() for one in tries]

    def _begin(self, one: Try) -> None:
        """Refuse what cannot be an answer."""
        if not 1 <= len(one.answer) <= len(self.takes):
            said = f"required: {', '.join(part.what for part in self.takes)}"
            one.notes.end(f"{said}; yours has {len(one.answer)} parts", yours="no answer")
        for part, takes in zip(one.answer, self.takes, strict=False):
            yours, why = takes.refusal(part)
            if why and not one.notes.over:
                one.notes.end(why, yours=yours)

    @cached_property
    def _texts(self) -> list[str]:
        return (TASKS / f"{self.name}.md").read_text(encoding="utf-8").split("\n## Hint\n")

    @property
    def task(self) -> str:
        """Markdown: what to write."""
        return self._texts[0].strip()

    @property
    def hints(self) -> tuple[str, ...]:
        """Three pushes, from a nudge to nearly all of it."""
        return tuple(" ".join(hint.split()) for hint in self._texts[1:])

    def hint(self, number: int | None = None) -> Text:
        """The next hint, or hint ``number`` (1 to 3) again."""
        if number is None:
            number = len(self._given) + 1
            if number > len(self.hints):
                return Text(f"Those were all {len(self.hints)}; .solution() shows one answer.")
            self._given.append(number)
        number = whole("number", number, at_least=1, at_most=len(self.hints))
        which = f"hint {number} of {len(self.hints)} for {self.name}"
        return Text(f"{which}: {self.hints[number - 1]}")

    @property
    def stub(self) -> str:
        """What the learner starts from."""
        return sources.student(sources.answer(self.name))

    def solution(self) -> Source:
        """Source of one answer that passes."""
        return Source(sources.solution(sources.answer(self.name)))

    def __repr__(self) -> str:
        return f"Exercise({self.name}, lab {self.lab}, {len(self.required)} limits)"

    def _repr_markdown_(self) -> str:
        rows = "".join(f"| {limit} | {required} |\n" for limit, required in self.required.items())
        return f"{self.task}\n\n| limit | required |\n|---|---|\n{rows}"


def exercise(
    *takes: Takes, required: dict[str, str], patients: Sequence[Any] = ()
) -> Callable[[Callable[[Tries], None]], Exercise]:
    """Make an `Exercise` of its checker, whose name it has."""

    def made(checker: Callable[[Tries], None]) -> Exercise:
        about = {"required": required, "patients": {one.name: one for one in patients}}
        return Exercise(name=checker.__name__, takes=takes, checker=checker, **about)

    return made
