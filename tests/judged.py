"""Verdicts on tables of answers: those that can share a launch do, and a table costs one check.

    RINGS = Table(EXERCISE, WRONG, RIGHT, alone=HANGS)
    test_a_wrong_ring_is_refused, test_a_right_ring_passes, test_its_stub = RINGS.tests()

The answers that the package shows are run by the notebooks of labs/solutions, whose stored verdicts
say that they pass: here is what no notebook runs. The stub is judged with them.
"""

from __future__ import annotations

import functools
import importlib
import linecache
import zlib
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest

import marks
from paralab.exercises import ALL, Exercise, Verdict, sources
from paralab.exercises.graded import answer_names
from paralab.exercises.verdict import NOT_STARTED
from patience import HANG_S

ALONE_S = 3.0  # without a sign of life; what an answer is given takes a hundredth of it
TABLES: list[Table] = []
SOURCES: dict[str, tuple] = {}  # of texts that no file holds, as linecache has them before it reads
BUILDS_ON = {"my_prefetch": "my_zero3"}  # its class inherits from the one that was written before
launching = importlib.import_module("paralab.launch")  # pl.launch is a function


def missed(verdict: Verdict) -> set[str]:
    """The limits that an answer breaks."""
    return {row.limit for row in verdict.rows if row.ok is False}


def defined(text: str, *names: str) -> Any:
    """What a cell with this text defines; its classes and functions travel by value, as there, and
    have their source.
    """
    found: dict = {"__name__": "__main__"}
    file = f"cell {zlib.crc32(text.encode())}"
    SOURCES[file] = linecache.cache[file] = (lambda: text,)  # read when it is asked for
    exec(compile(text, file, "exec"), found)
    return found[names[0]] if len(names) == 1 else tuple(found[name] for name in names)


def stored(name: str, *parts: str) -> Any:
    """These parts of answers/NAME.py."""
    return defined(_text(name), *parts)


def altered(name: str) -> Callable[..., Any]:
    """A function of pairs (old, new): an exercise's answer, in which, and in the answer that it
    builds on, each old text is replaced by the new one: what a learner might have written.
    """

    def answer(*changes: tuple[str, str]) -> Any:
        text = _text(name)
        for old, new in changes:
            assert old in text, old
            text = text.replace(old, new)
        return defined(text, *answer_names(ALL[name]))

    return answer


@functools.cache  # hundreds of answers are alterations of a few
def _text(name: str) -> str:
    return _built(name) + sources.solution(marks.answer(name))


def _built(name: str) -> str:
    """What an answer needs of the answer before it."""
    before = BUILDS_ON.get(name)
    return f"{sources.solution(sources.answer(before))}\n\n\n" if before else ""


class Table:
    """Answers to one exercise, each its parts, or the only one.

    wrong   (answer, limits it breaks, words of its verdict: one text or several); a text in the
            place of a function or a class is added to them
    right   answers that pass and that no notebook runs; without one, the answer that is shown
    alone   answers that stop the others: they hang, or fail on some ranks only
    exact   whether a wrong answer breaks no other limits
    most    launches for all answers: one for each number of ranks or plan that they run on
    """

    def __init__(
        self,
        exercise: Exercise,
        wrong: Sequence[tuple[Any, set[str], str | tuple[str, ...]]],
        right: Sequence = (),
        *,
        alone: Sequence = (),
        exact: bool = False,
        most: int = 6,
    ) -> None:
        self.exercise, self.alone, self.exact, self.most = exercise, alone, exact, most
        names, self.launches = answer_names(exercise), 0
        self.right = list(right) or [stored(exercise.name, *names)]
        self.stub = defined(_built(exercise.name) + exercise.stub, *names)
        form = "a class" if isinstance(_parts(self.stub)[0], type) else "a function"
        words = f"required: {exercise.takes[0].kind or form}, yours is 'no answer'"
        self.wrong = [*wrong, ("no answer", {next(iter(exercise.required))}, words)]
        self._answers: list[Any] = []
        for one in (*(row[0] for row in self.wrong), *self.right, self.stub):
            if not _is_in(one, [*self._answers, *alone]):
                self._answers.append(one)
        self._verdicts: list[Verdict] = []
        TABLES.append(self)

    def __getitem__(self, answer: Any) -> Verdict:
        """The verdict on one of the answers. The first that is asked for brings all."""
        if _is_in(answer, self.alone):
            return self.exercise.check(*_parts(answer), timeout=ALONE_S)
        if not self._verdicts:
            real = launching.Run

            def counted(*args: Any, **settings: Any) -> Any:
                self.launches += 1
                return real(*args, **settings)

            parts = list(map(_parts, self._answers))
            with mock.patch.object(launching, "Run", counted):
                each = max(ALONE_S, HANG_S / len(parts))  # the limit of a launch is the sum
                self._verdicts = self.exercise.check_each(parts, timeout=each)
            linecache.cache.update(SOURCES)  # launches of other tables do not send what was read
            assert self.launches <= self.most, f"{self.launches} launches for one table"
        assert _is_in(answer, self._answers), answer
        return self._verdicts[_place(answer, self._answers)]

    def tests(self) -> tuple[Callable, Callable, Callable]:
        """Tests that wrong answers are refused by the limits they break, in words that name the
        mistake; that right ones pass; that the stub is not started.
        """

        @pytest.mark.parametrize("answer, limits, words", self.wrong, ids=_name)
        def refused(answer: Any, limits: set[str], words: str | tuple[str, ...]) -> None:
            verdict = self[answer]  # once: what hangs is waited for each time
            broken = missed(verdict)
            assert not verdict and verdict.started, repr(verdict)
            assert limits == broken if self.exact else limits <= broken, verdict.table.to_string()
            said = repr(verdict) + verdict.table.to_string()
            for part in (words,) if isinstance(words, str) else words:
                assert part in said, repr(verdict)

        @pytest.mark.parametrize("answer", self.right, ids=_name)
        def passes(answer: Any) -> None:
            verdict = self[answer]
            assert verdict.passed, verdict.table.to_string()
            self._says_every_limit(verdict)

        def not_started() -> None:
            verdict = self[self.stub]
            assert not verdict and not verdict.started and NOT_STARTED in repr(verdict)
            self._says_every_limit(verdict)

        return refused, passes, not_started

    def _says_every_limit(self, verdict: Verdict) -> None:
        assert [(row.limit, row.required) for row in verdict.rows] == list(
            self.exercise.required.items()
        )
        assert "\n" not in repr(verdict) and len(verdict.table) == len(self.exercise.required)


def _parts(answer: Any) -> tuple:
    return answer if isinstance(answer, tuple) else (answer,)


def _place(answer: Any, answers: Sequence) -> int:
    return next((i for i, one in enumerate(answers) if one is answer or one == answer), -1)


def _is_in(answer: Any, answers: Sequence) -> bool:
    return _place(answer, answers) >= 0


def _name(value: Any) -> str | None:
    return getattr(value, "__name__", None)
