"""Verdicts on tables of answers: those that can share a launch do, and a table costs one check."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from paralab.exercises import Exercise, Verdict
from patience import HANG_S

launching = importlib.import_module("paralab.launch")  # pl.launch is a function
_known: dict[tuple, Verdict] = {}
launches: dict[str, int] = {}  # by exercise: how many the shared check took


def missed(verdict: Verdict) -> set[str]:
    """The limits that an answer breaks."""
    return {row.limit for row in verdict.rows if row.ok is False}


def defined(text: str, name: str) -> Any:
    """What a cell with this text defines; its classes and functions travel by value, as there."""
    names: dict = {"__name__": "__main__"}
    exec(text, names)
    return names[name]


def judged(
    exercise: Exercise,
    answer: Any,
    table: Sequence,
    *,
    alone: Sequence = (),
    timeout: float = HANG_S,
) -> Verdict:
    """The verdict on ``answer``, one of ``table``'s: each its parts, or the only one.

    alone  answers that stop the others: they hang, or fail on some ranks only
    """
    if any(answer is one for one in alone):
        return exercise.check(*_parts(answer), timeout=5)
    place = next(i for i, one in enumerate(table) if one is answer or one == answer)
    if (exercise.name, id(table), place) not in _known:
        together = [one for one in table if not any(one is other for other in alone)]
        real, count = launching._launch, 0

        def counted(*args: Any, **settings: Any) -> Any:
            nonlocal count
            count += 1
            return real(*args, **settings)

        launching._launch = counted
        try:
            verdicts = exercise.check_each(list(map(_parts, together)), timeout=timeout)
        finally:
            launching._launch = real
        launches[exercise.name] = count
        for one, verdict in zip(together, verdicts, strict=True):
            at = next(i for i, other in enumerate(table) if other is one)
            _known[exercise.name, id(table), at] = verdict
    return _known[exercise.name, id(table), place]


def assert_reads_the_same_alone(exercise: Exercise, answer: Any, table: Sequence) -> None:
    """A notebook's stored verdict is compared with a fresh one: of another launch."""
    first, second = judged(exercise, answer, table), exercise.check(*_parts(answer))
    assert first == second and first._repr_html_() == second._repr_html_(), repr(second)


def _parts(answer: Any) -> tuple:
    return answer if isinstance(answer, tuple) else (answer,)
