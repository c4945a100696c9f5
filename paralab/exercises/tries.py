"""One try of a learner: an answer, what it must be, and the notes that become its verdict.

`on_ranks` is the only way in which a checker runs an answer: in the processes of a launch, never in
the notebook's. There it may loop without end, call sys.exit or fill the memory: the launch is ended
by its time limit, and what came of it is an observation. What the answers are given, and how they
are watched, is watched.py.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from paralab.checks import shown
from paralab.exercises.attempts import attempt, said, time_limit
from paralab.exercises.verdict import Notes

if TYPE_CHECKING:
    from paralab.report.report import Report


class Takes(NamedTuple):
    """What one part of an answer must be.

    kind     "a function", "a class", or what a dict has to look like: "a dict {patient: lists}"
    call     how it is called, keyword arguments with "=": "MyDDP(module, bucket_bytes=...)"
    methods  what a class needs
    """

    kind: str
    call: str = ""
    methods: tuple[str, ...] = ()

    def refusal(self, part: Any) -> tuple[str, str]:
        """(what ``part`` is, why that will not do) as far as can be known before it is called, or
        two empty strings.
        """
        if self.kind.startswith("a dict"):
            wrong = not isinstance(part, Mapping)
            said = f"required: {self.kind}, yours is {_a(type(part).__name__)}"
            return ("no dict", said) if wrong else ("", "")
        if not callable(part):
            return "nothing to call", f"required: {self.kind}, yours is {shown(part)}"
        if str(getattr(part, "__module__", "")).partition(".")[0] == "paralab":
            return "the library's", f"{shown(part)} is the library's own; required: one of yours"
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


def _a(name: str) -> str:
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


@dataclass
class Try:
    """``answer``: its parts, as they were given to ``check``."""

    answer: tuple
    notes: Notes

    def begin(self, takes: Sequence[Takes]) -> None:
        """Refuse what cannot be an answer."""
        if not 1 <= len(self.answer) <= len(takes):
            said = f"required: {', '.join(one.kind for one in takes)}"
            self.notes.end(f"{said}; yours has {len(self.answer)} parts", yours="no answer")
        for part, one in zip(self.answer, takes, strict=False):
            yours, why = one.refusal(part)
            if why and not self.notes.over:
                self.notes.end(why, yours=yours)

    @property
    def seed(self) -> int:
        """For the data that this answer gets: a number that the answer itself decides, so that no
        answer can know its data, and a verdict reads the same twice.
        """
        return zlib.crc32("".join(_codes(self.answer)).encode())


def _codes(value: Any) -> Iterator[str]:
    """What the functions in ``value`` do: their bytecode."""
    if isinstance(value, tuple):
        for one in value:
            yield from _codes(one)
    elif isinstance(value, type):
        for base in value.__mro__[:-1]:
            yield from _codes(tuple(vars(base).values()))
    elif code := getattr(value, "__code__", None):
        yield code.co_code.hex()


@dataclass(frozen=True)
class Found:
    """What came of one answer in one launch. report: its calls and spans; results: by rank."""

    report: Report
    results: list[Any]

    def sent(self, *labels: str, level: str = "") -> list[int]:
        """Bytes that each rank sent while the watch had one of these labels; of none: ever. level:
        those alone that stay in a node ("intra") or leave it ("inter").
        """
        calls = self.report.collectives
        calls = calls[calls["level"] == level] if level else calls
        calls = calls[calls["phase"].isin(labels) if labels else calls["phase"] != "control"]
        sent = calls.groupby("rank")["wire_bytes"].sum()
        return [int(sent.get(rank, 0)) for rank in range(len(self.results))]


class Apart(Exception):
    """Several answers were tried in one launch, and one of them ended it."""


def on_ranks(
    tries: Sequence[Try],
    work: Callable[..., Any],
    ranks: int,
    args: Sequence[Any] = (),
    *,
    timeout: float,
    where: str = "",
    limit: str = "",
    nodes: int = 1,
) -> Iterator[tuple[Notes, Found]]:
    """Run ``work(watch, answer, seed, *args)`` on every rank, in one launch for all tries that are
    not over; yield what came of each. One that fails is noted in ``limit`` (by default the first),
    and is over.

    where  the case, in words: "N=2"
    nodes  virtual nodes, as `pl.trace` has them
    """
    from paralab.report.report import Report
    from paralab.spec import Plan
    from paralab.trace import trace

    tries = [one for one in tries if not one.notes.over]
    if not tries:
        return
    timeout *= len(tries)
    given = (work, [(one.answer, one.seed) for one in tries], tuple(args))
    with time_limit(timeout) as stop:
        report, trouble = attempt(
            lambda: trace(
                _program, ranks, given, nodes=nodes, timeout=timeout, device="cpu", stop=stop
            )
        )
    if trouble and len(tries) > 1:
        raise Apart(trouble)
    if trouble:
        tries[0].notes.end(trouble, where=where, limit=limit)
        return
    for number, one in enumerate(tries):
        parts = [result[number] for result in report.results]
        failed = [part["failed"] for part in parts if "failed" in part]
        if failed:
            one.notes.end(said(failed[0]), where=where, limit=limit)
            continue
        own = Report.from_parts(parts, model=None, plan=Plan(dp=ranks), meta=report.meta)
        late = next(
            (f"rank {p['rank']} never waits for {p['open'][0]}" for p in parts if p["open"]), ""
        )
        if late:
            one.notes.look(limit or next(iter(one.notes.limits)), where, late, "")
        yield one.notes, Found(own, [part["result"] for part in parts])


def _program(group: Any, *given: Any) -> Any:
    from paralab.exercises import watched

    return watched.each(group, *given)
