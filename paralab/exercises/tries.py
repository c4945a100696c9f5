"""Runs learners' answers on ranks, and keeps the notes that become their verdicts.

`Tries.run` is the only way in which a checker runs an answer: in the processes of a launch, never
in the notebook's. There the answer may loop without end, call sys.exit or fill the memory: the time
limit ends the launch, and the verdict says what happened. What an answer gets on its rank, and how
it is watched, is in watched.py.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import linecache
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from paralab.exercises.attempts import launched, without_stub
from paralab.exercises.lazy import watched
from paralab.exercises.verdict import Notes
from paralab.launch import unsent
from paralab.ranks.failure import ENDED
from paralab.ranks.hangs import Frame
from paralab.report.report import Report
from paralab.spec import Plan
from paralab.trace import trace

UNWRITTEN = re.compile(r"\s*def .*:\s*raise NotImplementedError")


@dataclass
class Try:
    """An answer to be judged, as the parts that ``check`` was called with, and its notes."""

    answer: tuple
    notes: Notes

    @functools.cached_property
    def seed(self) -> int:
        """The seed of the data for this answer, a checksum of its source: no answer can be written
        for the data that it gets, and the same answer gets the same verdict again.
        """
        return zlib.crc32("".join(_sources(self.answer)).encode())

    def differs(self, stub: str) -> bool:
        """Whether a function of the answer, or a method of its class, is not one of the stub's, nor
        one that begins with the stub's last line.
        """
        own = (vars(part).values() if isinstance(part, type) else (part,) for part in self.answer)
        for function in (getattr(one, "__wrapped__", one) for row in own for one in row):
            code = getattr(function, "__code__", None)  # Function.apply is torch's own
            own_code = code and Frame(code.co_filename, 0, code.co_name).own
            text = "".join(_sources(function)) if own_code else ""
            if text.strip() and not UNWRITTEN.match(text) and text.strip() not in stub:
                return True
        return False


def _sources(value: Any, within: tuple[type, ...] = ()) -> Iterator[str]:
    """The sources of all functions in ``value``. within: the classes that ``value`` is part of."""
    if isinstance(value, tuple):
        for part in value:
            yield from _sources(part, within)
    elif isinstance(value, type):
        for base in value.__mro__ if value not in within else ():
            if base.__module__ == value.__module__:  # written by the learner, unlike torch's
                yield from _sources(tuple(vars(base).values()), (*within, value))
    elif code := getattr(value, "__code__", None):
        lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 :]
        with contextlib.suppress(Exception):  # Python does not find the end of the function
            yield "".join(inspect.getblock(lines))  # the same in every version of Python


@dataclass(frozen=True)
class Outcome:
    """What one answer did in one launch.

    answer   its parts
    seed     the seed of the data that it got
    report   its calls and spans
    results  what ``work`` returned on each rank; ``outcome["y"]`` is the entry "y" of each
    """

    answer: tuple
    seed: int
    report: Report
    results: list[Any]

    def __getitem__(self, name: str) -> list[Any]:
        return [result[name] for result in self.results]

    def sent(self, *labels: str, level: str = "") -> list[int]:
        """Bytes that each rank sent while its watch had one of these labels; without labels, in the
        whole run. level: count only bytes that stay in a node ("intra") or leave it ("inter").
        """
        calls = self.report.traffic(("rank", "level", "phase"), bookkeeping=True)
        calls = calls[calls["level"] == level] if level else calls
        calls = calls[calls["phase"].isin(labels)] if labels else calls
        total = calls.groupby("rank")["bytes"].sum()
        return [int(total.get(rank, 0)) for rank in range(len(self.results))]


@dataclass
class Tries:
    """What a checker gets: the answers that it judges together.

    timeout  seconds without a sign of life until the ranks of a launch are stopped, per answer
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
        unbroken: Iterable[str] | None = None,
        memory: bool = True,
    ) -> Iterator[tuple[Notes, Outcome]]:
        """Run ``work(watch, answer, seed, *args)`` on every rank, in one launch for all answers
        whose check goes on; yield the notes and the outcome of each. A failure is noted in
        ``limit`` (by default the first limit) and ends the check of its answer.

        where     the case, in words for the verdict: "N=2"
        nodes     virtual nodes, as `pl.trace` has them
        patience  factor on the timeout
        unbroken  limits: an answer that has broken one of them is not run; by default all limits
        memory    whether ``work`` measures bytes of tensors. Then every operation is watched, which
                  takes as long as a small model does. Without, an answer that reads a freed tensor
                  crashes its process, and runs again watched, so that the verdict can say why
        """
        tries = [t for t in self.all if not (t.notes.over or t.notes.broke(unbroken))]
        if not tries:
            return
        answers = [(t.answer, t.seed) for t in tries]
        timeout = patience * len(tries) * self.timeout
        settings = {"nodes": nodes, "device": "cpu", "timeout": timeout}
        launch = functools.partial(launched, trace, _program, ranks, **settings)
        report, trouble = launch((work, answers, args, memory))
        if trouble and len(tries) > 1:
            raise RuntimeError(f"one of several answers ended their launch: {trouble}")
        if trouble.startswith("fn='_program': "):  # the launch refuses to send the answer
            trouble = unsent("answer", *tries[0].answer) or trouble
        if not memory and ENDED in trouble:
            report, trouble = launch((work, answers, args, True))
        for position, judged in enumerate(tries):
            judged.notes.where = where
            parts = [{"failed": trouble}] if trouble else [one[position] for one in report.results]
            if failed := [part["failed"] for part in parts if "failed" in part]:
                judged.notes.end(without_stub(failed[0]), limit=limit)
                continue
            open_ = [f"rank {p['rank']} never waits for {p['open'][0]}" for p in parts if p["open"]]
            if open_:
                judged.notes.look(limit or next(iter(judged.notes.limits)), open_[0], "")
            own = Report.from_parts(parts, model=None, plan=Plan(dp=ranks), meta=report.meta)
            results = [part["result"] for part in parts]
            yield judged.notes, Outcome(judged.answer, judged.seed, own, results)


def _program(group: Any, *args: Any) -> Any:
    return watched.run_answers(group, *args)
