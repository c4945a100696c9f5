"""The tries of learners: answers, and the notes that become their verdicts.

`Tries.run` is the only way in which a checker runs an answer: in the processes of a launch, never
in the notebook's. There it may loop without end, call sys.exit or fill the memory: the launch is
ended by its time limit, and what came of it is an observation. What the answers are given, and how
they are watched, is watched.py.
"""

from __future__ import annotations

import inspect
import linecache
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from paralab.exercises.attempts import launched, said
from paralab.exercises.verdict import Notes
from paralab.launch import unsent
from paralab.ranks.failure import ENDED
from paralab.report.report import Report
from paralab.spec import Plan
from paralab.trace import trace


@dataclass
class Try:
    """``answer``: its parts, as they were given to ``check``."""

    answer: tuple
    notes: Notes

    @cached_property
    def seed(self) -> int:
        """For the data that this answer gets: a number that the answer itself decides, so that no
        answer can know its data, and a verdict reads the same twice.
        """
        return zlib.crc32("".join(_codes(self.answer)).encode())


def _codes(value: Any, within: tuple[type, ...] = ()) -> Iterator[str]:
    """What the functions in ``value`` say. within: classes that it is a part of."""
    if isinstance(value, tuple):
        for one in value:
            yield from _codes(one, within)
    elif isinstance(value, type):
        for base in value.__mro__ if value not in within else ():
            if base.__module__ == value.__module__:  # the answer's own, not what torch says
                yield from _codes(tuple(vars(base).values()), (*within, value))
    elif code := getattr(value, "__code__", None):
        lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 :]
        try:
            text = "".join(inspect.getblock(lines))  # the same for every Python
        except Exception:  # Python does not find where it ends
            text = ""
        yield text or code.co_code.hex()


@dataclass(frozen=True)
class Found:
    """What came of one answer in one launch.

    answer   its parts
    seed     of the data that it got
    report   its calls and spans
    results  what each rank returned; ``found["y"]`` is the entry "y" of each
    """

    answer: tuple
    seed: int
    report: Report
    results: list[Any]

    def __getitem__(self, name: str) -> list[Any]:
        return [result[name] for result in self.results]

    def sent(self, *labels: str, level: str = "") -> list[int]:
        """Bytes that each rank sent while the watch had one of these labels; of none: ever. level:
        those alone that stay in a node ("intra") or leave it ("inter").
        """
        calls = self.report.traffic(("rank", "level", "phase"), bookkeeping=True)
        calls = calls[calls["level"] == level] if level else calls
        calls = calls[calls["phase"].isin(labels)] if labels else calls
        sent = calls.groupby("rank")["bytes"].sum()
        return [int(sent.get(rank, 0)) for rank in range(len(self.results))]


@dataclass
class Tries:
    """What a checker gets: the answers that are judged together.

    timeout  seconds without a sign of life until the ranks of a launch are stopped
    """

    all: list[Try]
    timeout: float

    def run(
        self,
        work: Callable[..., Any],
        ranks: int,
        *args: Any,
        where: str = "",
        limit: str = "",
        nodes: int = 1,
        patience: float = 1,
        standing: Iterable[str] | None = None,
        memory: bool = True,
    ) -> Iterator[tuple[Notes, Found]]:
        """Run ``work(watch, answer, seed, *args)`` on every rank, in one launch for all tries that
        are not over; yield what came of each. One that fails is noted in ``limit`` (by default the
        first), and is over.

        where     the case, in words: "N=2"
        nodes     virtual nodes, as `pl.trace` has them
        patience  how many times the timeout
        standing  limits: an answer that has broken one of them is not run again; by default all
        memory    whether ``work`` asks for bytes of tensors: every operation is looked at, which
                  takes as long as a small model. Without, one that reads a freed tensor ends its
                  process, and the answer runs again, looked at, for the words
        """
        tries = [one for one in self.all if not (one.notes.over or one.notes.broke(standing))]
        if not tries:
            return
        answers = [(one.answer, one.seed) for one in tries]
        how = {"nodes": nodes, "device": "cpu", "timeout": patience * len(tries) * self.timeout}
        report, trouble = launched(trace, _program, ranks, (work, answers, args, memory), **how)
        if trouble and len(tries) > 1:
            raise RuntimeError(f"one of several answers ended their launch: {trouble}")
        if trouble.startswith("fn='_program': "):  # the launch's refusal of what it was given
            trouble = unsent("answer", *tries[0].answer) or trouble
        if not memory and ENDED in trouble:
            report, trouble = launched(trace, _program, ranks, (work, answers, args, True), **how)
        for number, one in enumerate(tries):
            one.notes.where = where
            parts = [{"failed": trouble}]
            if not trouble:
                parts = [result[number] for result in report.results]
            if failed := [part["failed"] for part in parts if "failed" in part]:
                one.notes.end(said(failed[0]), limit=limit)
                continue
            late = [f"rank {p['rank']} never waits for {p['open'][0]}" for p in parts if p["open"]]
            if late:
                one.notes.look(limit or next(iter(one.notes.limits)), late[0], "")
            own = Report.from_parts(parts, model=None, plan=Plan(dp=ranks), meta=report.meta)
            yield one.notes, Found(one.answer, one.seed, own, [part["result"] for part in parts])


def _program(group: Any, *given: Any) -> Any:
    from paralab.exercises import watched

    return watched.each(group, *given)
