"""Calls a learner's functions with the arguments of many questions, on a rank.

A learner's function may return anything: an int of five thousand digits, an object whose repr
raises, a generator without end. `plain` makes of it a value that a checker can safely look at, and
that can be sent to the notebook's process.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from paralab.checks import shortened, shown
from paralab.exercises.attempts import attempt
from paralab.exercises.diagnose import times
from paralab.exercises.tries import Tries
from paralab.exercises.unaided import ENDLESS, bounded
from paralab.exercises.verdict import NOT_STARTED, Notes

MOST = 20_000  # entries of all lists in a reply together
UNITS = {"GB": 1e9, "GiB": 2**30, "MB": 1e6, "MiB": 2**20}  # in which sizes are given by mistake


@dataclass(frozen=True, repr=False)
class Opaque:
    """A value of a type that no checker reads: the name of its type, and its repr."""

    type: str
    words: str

    def __repr__(self) -> str:
        return self.words


class Reply(NamedTuple):
    """The reply to one question: a plain value, or in ``trouble`` why there is none."""

    value: Any
    trouble: str

    def number(self, right: float, known: Mistakes, *how: Any) -> str:
        """`wrong_number` of a reply that has to be one. how: its further arguments."""
        return self.trouble or wrong_number(self.value, right, known, *how)

    def numbers(
        self, right: Mapping[str, tuple[float, Mistakes]], tolerance: float
    ) -> Iterator[tuple[str, str]]:
        """(limit, what is wrong) of each number of a reply that has to be a tuple of them.

        right  {limit: (the number, the known mistakes)}, in the order of the tuple
        """
        numbers, wrong = self.value, self.trouble
        if not wrong and not (isinstance(numbers, (list, tuple)) and len(numbers) == len(right)):
            wrong = f"required: ({', '.join(right)}), yours is {kind_of(numbers)}"
        for position, (limit, (size, known)) in enumerate(right.items()):
            others = (pair for pair in right.items() if pair[0] != limit)
            known = *known, *((f"that is the number for {name}", n) for name, (n, _) in others)
            how = "{:.6g}".format, f", {limit}", tolerance
            yield limit, wrong or wrong_number(numbers[position], size, known, *how)

    def states(self, right: Mapping[str, float], known: Callable[[str], Mistakes]) -> str:
        """What is wrong with the first wrong entry of a reply that has to be {name: bytes}, or "".

        right  the right entries
        known  state -> the known mistakes
        """
        states = self.value
        if self.trouble:
            return self.trouble
        if not isinstance(states, Mapping):
            return f"required: a dict, {{name: bytes}}, yours is {kind_of(states)}"
        if missing := [state for state in right if state not in states]:
            return f"{missing[0]!r} is missing"
        if other := [state for state in states if state not in right]:
            return f"yours has {shown(other[0])}, required: only {', '.join(right)}"
        for state, size in right.items():
            if wrong := wrong_number(states[state], size, known(state), size_text, " of bytes"):
                return f"{state!r}: {wrong}"
        return ""


def ask(
    tries: Tries, cases: Sequence[Any], questions: Sequence[tuple[int, tuple]] = (), *how: Any
) -> Iterator[tuple[Notes, Any, Reply]]:
    """(notes, case, reply) of every answer and case, without the cases of a function that is still
    a stub: their limits stay open.

    questions  (which part of the answer to call, its arguments), one per case; by default the first
               part is called with the case itself
    how        further arguments of `bounded`
    """
    questions = questions or [(0, tuple(case)) for case in cases]
    for notes, found in tries.run(asked, 1, questions, *how, memory=False):
        parts, replies = [part for part, _ in questions], found.results[0]
        pairs = zip(parts, replies, strict=True)
        written = {part for part, reply in pairs if reply.trouble != NOT_STARTED}
        for case, part, reply in zip(cases, parts, replies, strict=True):
            if part in written and not notes.over:
                yield notes, case, reply
        left = len(set(parts)) - len(written)
        if written and left and not notes.said:
            words = "is one more function" if left == 1 else f"are {left} more functions"
            notes.said = f"there {words} to write"


def asked(
    watch: Any, answer: tuple, seed: int, questions: Sequence[tuple[int, tuple]], *how: Any
) -> list[Reply]:
    """What the rank runs: for each question (number, args) it calls that part of the answer with
    these arguments. how: further arguments of `bounded`.
    """
    replies: list[Reply] = []
    endless: dict[int, Reply] = {}  # by part; a part that did not end is not called again
    for number, args in questions:
        reply = endless.get(number, Reply(None, NOT_STARTED))
        if number < len(answer) and number not in endless:
            call = functools.partial(answer[number], *copy.deepcopy(args))
            reply = Reply(*bounded(lambda call=call: plain(call()), *how))
        if ENDLESS in reply.trouble:
            endless[number] = reply
        replies.append(reply)
    return replies


def plain_answers(tries: Tries) -> Iterator[tuple[Notes, Any]]:
    """(notes, answer as a plain value) of every answer, for exercises whose answer is data and no
    function. If an answer cannot be read, its check ends.
    """
    for judged in tries.all:
        answer, trouble = attempt(lambda judged=judged: plain(judged.answer[0]))
        if trouble:
            judged.notes.end(trouble)
        else:
            yield judged.notes, answer


def plain(value: Any, depth: int = 4, left: Iterator[int] | None = None) -> Any:
    """``value`` as None, bool, int, float, str, or lists, tuples and dicts of these. A generator
    becomes a list, an action of a schedule its text, anything else an `Opaque`. left: an iterator
    with one item for each further entry that is allowed. Raises ValueError if there are more.
    """
    left = iter(range(MOST)) if left is None else left
    if value is None or isinstance(value, (bool, Opaque)):
        return value
    if isinstance(value, str):
        return shortened(str(value), 10_000)
    if is_number(value):
        with contextlib.suppress(Exception):
            return operator.index(value)
        return float(value)
    if depth and isinstance(value, Mapping):
        pairs = _counted(value.items(), left)
        return {plain(key, 0): plain(entry, depth - 1, left) for key, entry in pairs}
    if type(value).__module__.startswith("paralab.parallel"):
        return str(value)  # an `Action` of a schedule
    if depth and isinstance(value, (list, tuple, Iterator, range)):
        entries = [plain(entry, depth - 1, left) for entry in _counted(value, left)]
        return tuple(entries) if isinstance(value, tuple) else entries
    return Opaque(type(value).__name__, " ".join(shown(value).split()))  # a refusal is one line


def _counted(entries: Iterable, left: Iterator[int]) -> Iterator[Any]:
    for entry in entries:
        if next(left, None) is None:
            raise ValueError(f"more than {MOST:,} entries; legal: those that the task asks for")
        yield entry


def is_number(value: object) -> bool:
    """Whether ``value`` is one number of Python, NumPy or torch, finite or not: no text, no bool,
    and no tensor that requires a gradient.
    """
    refused = isinstance(value, (bool, str)) or getattr(value, "requires_grad", False)
    if refused or not hasattr(value, "__float__"):
        return False
    try:
        float(value)  # type: ignore[arg-type]
    except Exception:  # an array of several numbers, or an int of 400 digits
        return False
    return True


def kind_of(value: Any) -> str:
    """The type of a value as the learner knows it: "an int", or "None"."""
    if value is None:
        return "None"
    name = value.type if isinstance(value, Opaque) else type(value).__name__
    length = f" of length {len(value)}" if isinstance(value, (list, tuple)) else ""
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}{length}"


def two(pair: Any, required: str) -> Any:
    """The pair that an answer returned. Raises ValueError if it is none."""
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise ValueError(f"required: {required}; the answer returns {kind_of(pair)}")
    return pair


# ---- numbers that are wrong ----------------------------------------------------------------------
Mistakes = Iterable[tuple[str, float]]


def wrong_number(
    yours: Any,
    right: float,
    known: Mistakes,
    show: Callable[[float], str],
    what: str = "",
    tolerance: float = 0.0,
    unexplained: str = "",
) -> str:
    """What is wrong with a number, with the known mistake that explains it; "" if it is right.

    known  (words, the number that this mistake gives); the message names the mistake whose number
           is nearest to ``yours``, and the first of several that are equally near
    show   formats a number with its unit
    what   the kind of number, for a message: " of FLOPs"
    unexplained  what the message says if no known mistake explains the number
    """
    if isinstance(yours, bool) or not isinstance(yours, (int, float)):
        return f"required: a number{what}, yours is {shown(yours)}"
    if math.isclose(yours, right, rel_tol=tolerance):
        return ""
    texts = [show(right), show(yours)]
    if texts[0] == texts[1]:
        digits = 17 if f"{right:,.12g}" == f"{yours:,.12g}" else 12
        texts = [f"{right:,.{digits}g}", f"{yours:,.{digits}g}"]
    message = f"required: {texts[0]}, yours {texts[1]}"
    units = UNITS.items() if show is size_text else ()
    known = *known, *((f"that is in {unit}, required: bytes", right / n) for unit, n in units)
    close = max(tolerance, 1e-15)  # n * 1e-9 and n / 1e9 may differ in the last bit
    near = [(abs(yours - n), words) for words, n in known if math.isclose(yours, n, rel_tol=close)]
    if near:
        return f"{message} ({min(near, key=operator.itemgetter(0))[1]})"
    factor = times(yours / right) if right and 0 < yours / right < math.inf else "1 times"
    factor = "" if factor == "1 times" else f"{factor} as much"
    said = "; ".join(filter(None, (factor, unexplained)))
    return f"{message} ({said})" if said else message


def unlike(known: Mistakes) -> list[tuple[str, float]]:
    """The known mistakes whose number no other mistake gives, so that they can be told apart."""
    known = list(known)
    alike = [sum(math.isclose(number, other) for _, other in known) for _, number in known]
    return [pair for pair, count in zip(known, alike, strict=True) if count == 1]


def size_text(count: float) -> str:
    """Bytes in TB, GB or MB (powers of ten), with enough digits to tell answers apart."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if abs(count) >= factor:
            return f"{count / factor:,.3f} {unit}"
    return f"{count:,.10g} bytes"
