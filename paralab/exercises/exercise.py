"""One exercise: a task, limits that its checker enforces, three hints, and an answer to compare.

The decorator `exercise` makes one of its checker. Task and hints are in tasks/NAME.md, stub and
answer are one text in answers/NAME.py (sources.py).
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

from paralab.checks import count_of, misfit, real, shown, whole
from paralab.exercises import sources
from paralab.exercises.questions import kind_of
from paralab.exercises.tries import Tries, Try
from paralab.exercises.verdict import Notes, Verdict, first
from paralab.ranks.errors import interrupted

LEFT = 'raise NotImplementedError("your turn") is reached: delete it, and write what is missing'
TIMEOUT_S = 20.0  # without a sign of life; a check takes a second or two


class Text(str):
    """A short text that a notebook cell shows as it is, without quotes."""

    __repr__ = str.__str__

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(self)}</p>"


class Source(Text):
    """Source code that a notebook cell shows."""

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self)}</pre>"

    def _repr_markdown_(self) -> str:
        return f"```python\n{self}\n```"


class Takes(NamedTuple):
    """What one part of an answer has to be.

    call     how the checker calls it, keyword arguments with "=": "MyDDP(module, bucket_bytes=...)"
    methods  the methods that a class needs
    kind     its kind in words, "a dict {patient: lists}"; by default "a class" if the name in
             ``call`` begins with a capital letter, else "a function"
    """

    call: str = ""
    methods: tuple[str, ...] = ()
    kind: str = ""

    @property
    def noun(self) -> str:
        return self.kind or ("a class" if self.call[0].isupper() else "a function")

    def refusal(self, part: Any) -> str:
        """Why ``part`` is refused, as far as that can be known before it is called, or ""."""
        if self.noun.startswith("a dict"):
            said = f"required: {self.noun}, yours is {kind_of(part)}"
            return "" if isinstance(part, Mapping) else said
        if not callable(part):
            return f"required: {self.noun}, yours is {shown(part)}"
        if why := _from_library(part):
            return f"{shown(part)} {why}; required: one that you have written"
        function = isinstance(part, type) and inspect.ismethod(getattr(part, "apply", None))
        if function and self.noun.startswith("a function"):  # of torch.autograd
            name = part.__name__
            return f"required: {self.noun}, yours is the class {name}: give {name}.apply"
        missing = [m for m in self.methods if not callable(getattr(part, m, None))]
        if isinstance(part, type) and missing:
            return f"the class has no method {' and no method '.join(missing)}"
        given = [word for word in self.call.partition("(")[2][:-1].split(", ") if word]
        named = dict.fromkeys(word.partition("=")[0] for word in given if "=" in word)
        why = misfit(part, *given[: len(given) - len(named)], unwrap=True, **named)
        return f"required: {self.call}, yours cannot be called in this way: {why}" if why else ""


def _from_library(part: Any) -> str:
    """In which way an answer is the library's own code, extends it or calls it; "" if in none."""
    if _is_of("paralab", part):
        return "is the library's own"
    kind = part if isinstance(part, type) else type(part)
    if any(_is_of("paralab", one) for one in kind.__mro__):
        return "extends a class of the library"
    for function in (part, *vars(kind).values()):
        if isinstance(function, FunctionType):
            names = inspect.getclosurevars(function)
            values = (*names.globals.values(), *names.nonlocals.values())
            if any(_is_of("paralab.exercises.answers", one) for one in values):
                return "calls an answer of the library"
    return ""


def _is_of(package: str, value: Any) -> bool:
    """Whether a value is a module of the package, or is defined in one."""
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "")
    return f"{name}.".startswith(f"{package}.")


@dataclass(kw_only=True, repr=False, eq=False)
class Exercise:
    """An exercise of a lab. A notebook shows its task and its limits; a script can print them
    (``task``, ``stub``, ``required``).

        exercise.check(answer)   a Verdict on the function, class or dict that the task asks for; if
                                 it asks for several, in the task's order
        exercise.hint()          one hint at a time
        exercise.solution()      source of one answer

    name      the attribute of ``pl.exercises``
    lab       the lab that it belongs to, "01", from the package's `LADDERS`
    required  {limit: what is required}, in the order in which the checker looks at them
    takes     the parts of an answer, of which only the first has to be there
    checker   judges the answers of a `Tries` and records its findings in their notes
    patients  {name: plan or schedule to be diagnosed} of a clinic
    """

    name: str
    lab: str = ""
    required: dict[str, str]
    takes: tuple[Takes, ...]
    checker: Callable[[Tries], None]
    patients: dict[str, Any] = field(default_factory=dict)
    _hints_given: int = 0

    def check(self, *answer: Any, timeout: float = TIMEOUT_S) -> Verdict:
        """Compare an answer with every limit.

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
                self._refuse_form(one)
            self.checker(Tries([one for one in tries if not one.notes.over], timeout))
        except KeyboardInterrupt as interrupt:
            raise interrupted(interrupt, "") from None
        except Exception as error:
            if len(tries) > 1:  # one answer may have prevented the verdicts on the others
                return [self.check(*answer, timeout=timeout) for answer in answers]
            said = f"the answer cannot be judged: {type(error).__name__}: {shown(error)}"
            tries[0].notes.end(said, yours="cannot be judged")
        for one in tries:
            if not one.notes.verdict().started and one.differs(self.stub):
                one.notes.said = ""
                one.notes.end(LEFT, yours="not finished")
        return [one.notes.verdict() for one in tries]

    def _refuse_form(self, candidate: Try) -> None:
        """End the check of an answer that has the wrong parts, before any of them is called."""
        why = [takes.refusal(p) for p, takes in zip(candidate.answer, self.takes, strict=False)]
        if not 1 <= len(candidate.answer) <= len(self.takes):
            nouns = ", ".join(part.noun for part in self.takes)
            count = count_of(len(candidate.answer), "argument")
            why = [f"required: {nouns}; check was called with {count}"]
        if said := first(why):
            candidate.notes.end(said, yours="refused")

    @cached_property
    def _texts(self) -> list[str]:
        file = Path(__file__).resolve().parent / "tasks" / f"{self.name}.md"
        return file.read_text(encoding="utf-8").split("\n## Hint\n")

    @property
    def task(self) -> str:
        """What to write, in Markdown."""
        return self._texts[0].strip()

    @property
    def hints(self) -> tuple[str, ...]:
        """Three hints: the first is a nudge, the third gives nearly everything away."""
        return tuple(" ".join(hint.split()) for hint in self._texts[1:])

    def hint(self, number: int | None = None) -> Text:
        """The next hint, or hint ``number`` (1 to 3) again."""
        count = len(self.hints)
        if number is None:
            if self._hints_given == count:
                return Text(f"Those were all {count} hints; .solution() shows one answer.")
            number = self._hints_given = self._hints_given + 1
        number = whole("number", number, at_least=1, at_most=count)
        return Text(f"hint {number} of {count} for {self.name}: {self.hints[number - 1]}")

    @property
    def stub(self) -> str:
        """The code that the learner starts from."""
        return sources.student(sources.answer(self.name))

    def solution(self) -> Source:
        """Source of one answer that passes."""
        return Source(sources.solution(sources.answer(self.name)))

    def __repr__(self) -> str:
        return f"Exercise({self.name}, lab {self.lab}, {count_of(len(self.required), 'limit')})"

    def _repr_markdown_(self) -> str:
        rows = "".join(f"| {limit} | {required} |\n" for limit, required in self.required.items())
        return f"{self.task}\n\n| limit | required |\n|---|---|\n{rows}"


def exercise(
    *takes: Takes, required: dict[str, str], patients: Sequence[Any] = ()
) -> Callable[[Callable[[Tries], None]], Exercise]:
    """Make a checker an `Exercise` with its name; for the arguments see `Exercise`."""

    fields = {"takes": takes, "required": required, "patients": {one.name: one for one in patients}}
    return lambda checker: Exercise(name=checker.__name__, checker=checker, **fields)
