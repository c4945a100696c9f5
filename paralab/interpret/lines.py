"""A rank's list with its moments, as arrays.

Of a list with thousands of micro-batches almost all instructions are the same few again and again.
So what is known of each before anything is timed stands in a `Table`, and a `Line` is a list by
numbers in it, with the moments of every instruction. A `Step` is all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from paralab.interpret.costs import Compute, Cost, Costs, Job, Posted
from paralab.interpret.time import Times
from paralab.interpret.traffic import Member
from paralab.interpret.turns import Box, Turns
from paralab.model.ops import Call
from paralab.programs.instructions import CALL, COMPUTE, KINDS, MESSAGES, Instr
from paralab.programs.tiers import kind_of, moved
from paralab.report.intervals import union
from paralab.report.tables import COPY_LANES
from paralab.theory.traffic import BOOKKEEPING

SHORT = 1e-9  # of a step: less than that is rounding
Said = tuple[Any, float]  # a `Call`, or of a copy (lane, op, category, bytes); and its seconds


class Table:
    """Instructions, and what each of them takes; k of them, and so every column has (k,).

    code             both; of a CALL for several the `Times` of these
    computes, works  on the rank's own lane; of actions: forward, backward, and CALLs (to post an
                     op's own call is work)
    summed           of a WAIT: seconds to add up what came
    flight           1: a call that reports count; 2: a copy between tiers
    seconds          of a CALL for several; ``idle``, ``copied``, ``inner``, ``hidden``: those that
                     its rank is idle, adds up and copies, that its own calls are in flight, and of
                     these during compute
    said             set by who needs it: {number: what it sends and copies, and how often}
    """

    said: dict[int, Counter[Said]]

    def __init__(
        self, code: Sequence[tuple[Instr, Cost | Times]], awaited: Mapping[int, Cost]
    ) -> None:
        """awaited: costs of the calls that WAITs are for."""
        self.code = code
        calls = np.array([ins.op == CALL for ins, _ in code], bool)
        self.computes = calls | np.array([type(cost) is Compute for _, cost in code], bool)
        self.works = calls | np.array([ins.op in COMPUTE for ins, _ in code], bool)
        self.flight = np.array([self._flight(*one) for one in code], int)
        self.summed = np.zeros(len(code))
        several = np.zeros((5, len(code)))
        self.seconds, self.idle, self.copied, self.inner, self.hidden = several
        for at, (_, cost) in enumerate(code):
            if type(cost) is Times:
                several[:, at] = cost.seconds, *Line.of(cost, -1).within
        for at, cost in awaited.items():
            if type(cost) is Posted:  # where another member adds up, the rank is idle for it
                (self.idle if cost.other else self.summed)[at] = cost.summed

    @cached_property
    def lane(self) -> list[tuple[str, str] | None]:
        """Of a call or a job that is drawn its lane there and its kind."""
        return [self._lane(*one) for one in self.code]

    @staticmethod
    def _lane(ins: Instr, cost: Cost | Times) -> tuple[str, str] | None:
        """Those of tensor parallelism and between stages are not drawn."""
        if type(cost) is Job:
            return ins.lane, kind_of(ins)
        if type(cost) is not Posted or ins.lane.startswith("tp") or ins.op in MESSAGES:
            return None
        return f"comm:{'pp' if ins.lane == 'ends' else ins.lane}", "comm"

    @staticmethod
    def _flight(ins: Instr, cost: Cost | Times) -> int:
        if type(cost) is Job:
            return 2 * (ins.lane in COPY_LANES)
        return int(type(cost) is Posted and ins.phase not in BOOKKEEPING)


@dataclass(eq=False)
class Line:
    """A rank's list with its moments; n instructions, (n,) each.

    pp             its pipeline rank
    symbol         what an instruction is: its number in the table
    entered, left  when the rank comes to it, and goes on behind it
    over           of a WAIT: its end, behind which comes work that goes with it; else below 0
    calls, when    positions of calls and jobs, and from when to when they are in flight (c,) (c, 2)
    """

    pp: int
    table: Table
    symbol: np.ndarray
    left: np.ndarray
    over: np.ndarray
    calls: np.ndarray
    when: np.ndarray

    def __post_init__(self) -> None:
        table, symbol = self.table, self.symbol
        self.entered, self.waits = np.r_[0.0, self.left[:-1]], self.over >= 0.0
        self.computes, self.works = table.computes[symbol], table.works[symbol]
        self.summed, self.idle = table.summed[symbol] * self.waits, table.idle[symbol]

    @classmethod
    def of(cls, times: Times, pp: int) -> Line:
        """A rank's part of a walk; every instruction is one of its own."""
        code, left, waits, calls = (
            some[pp] for some in (times.lists, times.left, times.waits, times.calls)
        )
        table = Table(code, {at: code[call][1] for at, (call, _) in waits.items()})
        over = np.full(len(code), -1.0)
        for at, (_, end) in waits.items():
            over[at] = max(left[at - 1], end)
        called = np.array(list(calls), int), np.array(list(calls.values())).reshape(-1, 2)
        return cls(pp, table, np.arange(len(code)), np.array(left), over, *called)

    @property
    def end(self) -> float:
        return float(self.left[-1]) if len(self.left) else 0.0

    @cached_property
    def begins(self) -> np.ndarray:
        """When the box begins that an instruction may open: see boxes.py."""
        now = np.where(self.computes, self.left, 0.0)
        now = np.where(self.waits, self.over + self.idle + self.summed, now)
        return np.r_[0.0, np.maximum.accumulate(now)[:-1]]

    @property
    def within(self) -> tuple[float, ...]:
        """What a CALL of this list is: `Table.idle`, ``copied``, ``inner``, ``hidden``."""
        works = np.flatnonzero(self.works)
        in_flight = beside(self.in_flight[0], *self.worked(self.waits))
        return (self.still.sum(), self.copies(works[:1], works[-1:]).sum(), *in_flight)

    # ---- compute ---------------------------------------------------------------------------------
    def actions(self, turns: Turns) -> tuple[np.ndarray, ...]:
        """When each starts and ends; what the rank does in that time, and of it what it adds up
        and copies; and what of this it does behind it, before the next one            (n,) each
        """
        first, last = turns.first, turns.last
        still, copies = (
            np.r_[0.0, some.cumsum()] for some in (self.still, self.copies(first, last))
        )
        start, end = self.begins[first], self.left[last]
        cost = end - start - still[last + 1] + still[first]
        more = np.append(copies[first[1:]] - copies[last[:-1] + 1], np.zeros(min(len(last), 1)))
        return start, end, cost, copies[last + 1] - copies[first], more

    @cached_property
    def still(self) -> np.ndarray:
        """Seconds that the rank does nothing in every instruction."""
        return self.idle + self.waits * (self.over - self.entered)

    def copies(self, first: np.ndarray, last: np.ndarray) -> np.ndarray:
        """Seconds of every instruction that the rank adds up what it received, or copies outside
        the actions, between whose first and last compute it belongs to them (spans.py).
        """
        found = self.table.copied[self.symbol] + self.summed
        adds = self.computes & ~self.works & ~in_actions(first, last, len(self.left))
        return np.where(adds, self.left - self.begins, found)

    def worked(self, waits: np.ndarray) -> np.ndarray:
        """Of all that computes, and of what is packed and posted ahead of these waits, which are
        inside actions: begin, end, seconds of work                                     (3, ...)
        """
        which = self.computes | waits
        start, end = self.begins, np.where(self.computes, self.left, self.entered)
        return np.stack([start, end, end - start - self.idle * self.computes])[:, which]

    def boxes(self, since: int, behind: int, short: float) -> list[Box]:
        """What the rank computes from instruction ``behind`` on; and the calls and copies that are
        in flight from ``since`` on, those of tensor parallelism and between stages apart. What the
        host computes is from the begin on. What is ``short`` is left out.
        """
        made: list[Box] = []

        def add(kind: str, start: float, end: float) -> None:
            if made and made[-1].kind == kind and start - made[-1].end < short:
                made[-1] = made[-1]._replace(end=end, cost=made[-1].cost + end - start)
            elif end - start > short:
                made.append(Box(self.pp, "compute", kind, start, end, end - start))

        for at in range(behind, len(self.left)):
            ins, cost = self.table.code[self.symbol[at]]
            if type(cost) is Compute:
                kind = KINDS.get(ins.op, "copy")
                add(kind, float(self.begins[at]), float(self.left[at]))
            elif self.summed[at] > 0.0:
                add("copy", float(self.over[at]), float(self.over[at] + self.summed[at]))
        drawn = np.array([lane is not None for lane in self.table.lane], bool)
        host = np.array([ins.lane == "host" for ins, _ in self.table.code], bool)
        symbols = self.symbol[self.calls]
        here = drawn[symbols] & (host[symbols] | (self.calls >= since))
        lanes: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for symbol, when in zip(symbols[here].tolist(), self.when[here].tolist(), strict=True):
            lanes.setdefault(self.table.lane[symbol], []).append(tuple(when))
        for (lane, kind), some in lanes.items():
            made += [
                Box(self.pp, lane, kind, start, end, (end - start) * (kind != "comm"))
                for start, end in union(some)
                if end - start > short
            ]
        return made

    # ---- calls and copies ------------------------------------------------------------------------
    @cached_property
    def in_flight(self) -> tuple[np.ndarray, np.ndarray]:
        """When calls are, bookkeeping apart; and when copies between tiers         (c, 2) each"""
        flight = self.table.flight[self.symbol[self.calls]]
        return self.when[flight == 1], self.when[flight == 2]

    def moving(self, turns: Turns) -> np.ndarray:
        """Seconds that calls are in flight, and of these while the rank works; that copies between
        tiers are, and of these while it works. Calls within CALLs count once, next to others in
        flight.                                                                                 (4,)
        """
        calls, jobs = self.in_flight
        work = self.worked(self.waits & in_actions(turns.first, turns.last, len(self.left)))
        found = beside(calls, *work)
        several = self.table.seconds[self.symbol] > 0.0
        if several.any():
            symbol, end = self.symbol[several], self.left[several]
            own = self.table.inner[symbol], self.table.hidden[symbol]
            _, *within = beside(calls, end - self.table.seconds[symbol], end, *own)
            found = found + np.sum(own, 1) - within
        return np.r_[found, beside(jobs, *work) if len(jobs) else np.zeros(2)]

    def sums(self, costs: Costs) -> dict[tuple, list]:
        """{(pipeline rank, what a row of a table says): [payload, bytes sent, seconds, begin]} of
        all calls of the rank that a table has in one row, or copies.
        """
        plan, table = costs.plan, self.table
        member = Member(costs.program, self.pp * plan.dp * plan.tp, costs.cluster.node_of)
        count = np.bincount(self.symbol, minlength=len(table.code)).tolist()
        first = np.zeros(len(count), int)
        first[self.symbol[::-1]] = np.arange(len(self.symbol))[::-1]
        found: dict[tuple, list] = {}
        for symbol in sorted(table.said, key=first.__getitem__):
            for (what, seconds), each in table.said[symbol].items() if count[symbol] else ():
                *row, payload, wire = member.row(what) if type(what) is Call else (*what, 0)
                times, start = each * count[symbol], float(self.entered[first[symbol]])
                one = found.setdefault((self.pp, *row), [0, 0, 0.0, start])
                for at, more in enumerate((payload, wire, seconds)):
                    one[at] += times * more
        return found


def said(costs: Costs, pp: int, code: Iterable[tuple[Instr, Cost]]) -> Counter[Said]:
    """The calls that instructions make, and the copies that they are, and how many of each."""
    found: Counter[Said] = Counter()
    for ins, cost in code:
        if type(cost) is Posted:
            for call in costs.calls.of(pp, ins):
                found[call, cost.seconds] += 1
        elif type(cost) is Job and kind_of(ins) == "copy":
            found[(ins.lane, *moved(costs.program, ins, pp)), cost.seconds] += 1
    return found


def in_actions(first: np.ndarray, last: np.ndarray, n: int) -> np.ndarray:
    """Which of n instructions are in an action that others of it follow                    (n,)"""
    edges = np.zeros(n, int)
    np.add.at(edges, first, 1)
    np.add.at(edges, last, -1)
    return edges.cumsum() > 0


def beside(some: np.ndarray, start: np.ndarray, end: np.ndarray, *works: np.ndarray) -> np.ndarray:
    """Seconds of a union of intervals, and of each kind of work in it, which is spread evenly from
    start to end                                                                    (1 + kinds,)
    """
    if not len(some) or not len(start):
        return np.zeros(1 + len(works))
    low, high = some[np.argsort(some[:, 0], kind="stable")].T
    high = np.maximum.accumulate(high)
    first = np.r_[True, low[1:] > high[:-1]]
    begins, ends = low[first], high[np.r_[first[1:], True]]
    moments, inside = np.stack([start, end], 1).ravel(), []
    for work in works:
        done = np.stack([work.cumsum() - work, work.cumsum()], 1).ravel()
        both = np.interp(ends, moments, done) - np.interp(begins, moments, done)
        inside.append(both.sum())
    return np.array([(ends - begins).sum(), *inside])


class Step(NamedTuple):
    """A timed step, rank after rank.

    lines, turns  every rank's list, and its actions
    kinds         (tier, category) of bytes
    held          per rank (moment, bytes of every kind), the peaks among them
    costs         of what is in the lists
    """

    lines: list[Line]
    turns: list[Turns]
    kinds: list[tuple[str, str]]
    held: list[list[tuple[float, np.ndarray]]]
    costs: Costs

    @property
    def ends(self) -> np.ndarray:
        """Of every rank's step."""
        return np.array([line.end for line in self.lines])

    @property
    def ranks(self) -> list[tuple[Line, Turns]]:
        return list(zip(self.lines, self.turns, strict=True))
