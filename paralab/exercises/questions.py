"""Functions that are asked questions: they run on a rank, and their answers travel as plain values.

A learner's function may return anything: an int of five thousand digits, an object whose repr
raises, a generator without end. `plain` makes of it what a checker can look at without harm.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
import numbers
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from paralab.checks import shortened, shown
from paralab.exercises.attempts import attempt
from paralab.exercises.diagnose import times
from paralab.exercises.tries import Try, on_ranks
from paralab.exercises.verdict import NOT_STARTED, Notes

LINES = 2_000_000  # of the learner's own code that one question may run: half a second
ENDLESS = "lines of it were run, and it has not ended"
MOST = 20_000  # entries of a list that are looked at
OURS = str(Path(__file__).parents[1])
NOT_THEIRS = tuple({sys.prefix, sys.base_prefix, OURS, "<frozen "})


class Odd(NamedTuple):
    """What a checker has no use for, in words."""

    type: str
    words: str

    def __repr__(self) -> str:
        return self.words


class Reply(NamedTuple):
    """What came of one question: a plain value, or why there is none."""

    value: Any
    trouble: str


def asked(
    watch: Any, answer: tuple, seed: int, questions: Sequence[tuple[int, tuple]]
) -> list[Reply]:
    """What the rank runs: part ``number`` of the answer is called with ``args``, for every pair."""
    replies: list[Reply] = []
    endless: dict[int, Reply] = {}  # by part: it is not asked again
    for number, args in questions:
        if number in endless:
            replies.append(endless[number])
            continue
        if number >= len(answer):
            replies.append(Reply(None, NOT_STARTED))
            continue
        call = functools.partial(answer[number], *copy.deepcopy(args))
        with ends():
            value, trouble = attempt(lambda call=call: plain(call()))
        stub = trouble.startswith("raised NotImplementedError")
        replies.append(Reply(value, NOT_STARTED if stub else trouble))
        if trouble.endswith(ENDLESS):
            endless[number] = replies[-1]
    return replies


def replies(
    tries: Sequence[Try], cases: Sequence[Any], timeout: float, work: Callable[..., Any], *args: Any
) -> Iterator[tuple[Notes, Any, Reply]]:
    """(notes, case, reply) of every answer and case. A stub's try is over.

    work  what the rank runs with ``args``: `asked`, or one that asks in its own way, case by case
    """
    for notes, found in on_ranks(tries, work, 1, args, timeout=timeout):
        for case, reply in zip(cases, found.results[0], strict=True):
            if reply.trouble == NOT_STARTED:
                notes.end(NOT_STARTED)
                break
            yield notes, case, reply


def asked_alone(
    watch: Any, answer: tuple, seed: int, questions: Sequence, why: str, legal: tuple[str, ...] = ()
) -> list[Reply]:
    """`asked`, for what this package could answer itself: who calls it is told ``why`` not.

    legal  its folders and files that may be called
    """
    legal = tuple(f"{OURS}/{name}" for name in legal)

    def alone(call: Callable[..., Any], *args: Any) -> Any:
        refused = False

        def noted(frame: Any, event: str, _: Any) -> None:
            nonlocal refused
            name, caller = (one.f_code.co_filename for one in (frame, frame.f_back))
            called = event == "call" and name.startswith(OURS) and not caller.startswith(OURS)
            if called and not name.startswith(legal):
                refused = True
                raise RuntimeError(why)

        before = sys.getprofile()
        sys.setprofile(noted)
        try:
            value = plain(call(*args))
        finally:
            sys.setprofile(before)
        if refused:  # an answer may catch the first refusal, and nothing is noted any more
            raise RuntimeError(why)
        return value

    parts = tuple(functools.partial(alone, part) for part in answer)
    return asked(watch, parts, seed, questions)


@contextlib.contextmanager
def ends() -> Iterator[None]:
    """An error in place of a loop without end, which could fill the memory before a timeout."""
    left, before = LINES, sys.gettrace()

    def count(frame: Any, event: str, _: Any) -> Callable[..., Any] | None:
        nonlocal left
        if event == "call" and frame.f_code.co_filename.startswith(NOT_THEIRS):
            return None
        left -= 1
        if left < 0:
            raise RuntimeError(f"{LINES:,} {ENDLESS}")
        return count

    sys.settrace(count)
    try:
        yield
    finally:
        sys.settrace(before)


def plain(value: Any, depth: int = 4) -> Any:
    """``value`` as None, bool, int, float, str, or lists, tuples and dicts of these. A generator
    becomes a list of its first entries, an action of a schedule its text, anything else an `Odd`.
    """
    if value is None or isinstance(value, (bool, Odd)):
        return value
    if isinstance(value, str):
        return shortened(str(value), 10_000)
    if is_number(value):
        return _number(value)
    if depth and isinstance(value, Mapping):
        pairs = itertools.islice(value.items(), MOST)
        return {plain(key, 0): plain(entry, depth - 1) for key, entry in pairs}
    if type(value).__module__.startswith("paralab.parallel"):
        return str(value)  # an Action
    if depth and isinstance(value, (list, tuple, Iterator, range)):
        entries = [plain(entry, depth - 1) for entry in itertools.islice(value, MOST)]
        return tuple(entries) if isinstance(value, tuple) else entries
    return Odd(type(value).__name__, shown(value))


def is_number(value: object) -> bool:
    """Whether ``value`` is one finite or infinite number: of Python, NumPy or torch, no text."""
    if not hasattr(value, "__float__") or isinstance(value, (bool, str)):
        return False
    try:
        float(value)  # type: ignore[arg-type]
    except Exception:  # an array of several, or an int of 400 digits
        return False
    return True


def _number(value: Any) -> int | float:
    with contextlib.suppress(Exception):
        return operator.index(value)
    if isinstance(value, numbers.Rational) and value.denominator == 1:
        return int(value.numerator)
    return float(value)


def kind_of(value: Any) -> str:
    """The type of a plain value, as the learner knows it."""
    return value.type if isinstance(value, Odd) else type(value).__name__


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """The library's own work within a question, at its own speed."""
    before = sys.gettrace()
    sys.settrace(None)
    try:
        yield
    finally:
        sys.settrace(before)


# ---- numbers that are wrong ----------------------------------------------------------------------
Mistakes = Iterable[tuple[str, float]]


def wrong_number(
    yours: Any,
    right: float,
    show: Callable[[float], str],
    known: Mistakes,
    *,
    what: str,
    tolerance: float = 0.0,
) -> str:
    """What is wrong with a number, and the known mistake that gives it; "" if nothing is.

    show   a number as text, with its unit
    known  (words, the number that this mistake gives)
    what   "required: a number of FLOPs"
    """
    if isinstance(yours, bool) or not isinstance(yours, (int, float)):
        return f"{what}, yours is {shown(yours)}"
    if math.isclose(yours, right, rel_tol=tolerance):
        return ""
    both = [show(right), show(yours)]
    if both[0] == both[1]:
        both = [f"{right:,.12g}", f"{yours:,.12g}"]
    said = f"{both[0]}, yours {both[1]}"
    for words, number in known:
        if math.isclose(yours, number, rel_tol=tolerance):
            return f"{said} ({words})"
    factor = yours / right if right else 0.0
    return f"{said} ({times(factor)} as much)" if 0 < factor < math.inf else said


def wrong_numbers(
    reply: Reply, right: Mapping[str, tuple[float, Mistakes]], tolerance: float
) -> Iterator[tuple[str, str]]:
    """(limit, what is wrong) of each number of a reply that has to be a tuple of them.

    right  {limit: (the number, the known mistakes)}, in the order of the tuple
    """
    wrong, found = reply.trouble, reply.value
    if not wrong and not (isinstance(found, (list, tuple)) and len(found) == len(right)):
        wrong = f"required: ({', '.join(right)}), yours is a {kind_of(found)}"
    for place, (limit, (number, known)) in enumerate(right.items()):
        yield (
            limit,
            wrong
            or wrong_number(
                found[place],
                number,
                "{:.6g}".format,
                known,
                what=f"required: a number, {limit}",
                tolerance=tolerance,
            ),
        )


def wrong_states(
    found: Any,
    right: Mapping[str, float],
    known: Callable[[str], Mistakes],
    tolerance: float = 0.0,
) -> str:
    """What is wrong with the first wrong entry of {state: bytes}, or ""."""
    if not isinstance(found, Mapping):
        return f"required: a dict, {{state: bytes}}, yours is a {kind_of(found)}"
    for state in (*right, *found):
        if state not in found:
            return f"the state {state!r} is missing"
        if state not in right:
            return f"{shown(state)} is not in the recipe"
    for state, size in right.items():
        what = f"not a number of bytes: {state!r}"
        wrong = wrong_number(
            found[state], size, size_text, known(state), what=what, tolerance=tolerance
        )
        if wrong:
            return wrong if wrong.startswith(what) else f"{state!r} is {wrong}"
    return ""


def size_text(count: float) -> str:
    """Bytes as a data sheet has them, with enough digits to tell answers apart."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if abs(count) >= factor:
            return f"{count / factor:,.3f} {unit}"
    return f"{count:,.10g} bytes"
