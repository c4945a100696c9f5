"""A rank's list of instructions with the time of each, as arrays; a step in outline reads them.

In a list of thousands of micro-batches the same few instructions come again and again. A `Table`
has each distinct instruction once, with everything that is known before the list is timed. A `Line`
is a rank's list, as indices into its table, with the times of every instruction. A `Step` has the
lines of all pipeline ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from paralab.interpret.costs import Compute, Cost, Costs, Job, Posted
from paralab.interpret.time import Times
from paralab.programs.instructions import CALL, COMPUTE, KINDS, MESSAGES, Instr
from paralab.programs.tiers import kind_of, moved
from paralab.report.intervals import union
from paralab.report.tables import COPY_LANES
from paralab.theory.order import CODE
from paralab.theory.traffic import BOOKKEEPING

SHORT = 1e-9  # as a share of the step; anything shorter is rounding error
WORKS = COMPUTE | {CALL}
# A `Call`, or a copy between tiers as (lane, op, category, bytes); and the seconds it takes.
Transfer = tuple[Any, float]


class Actions(NamedTuple):
    """The actions in a rank's list, in order, (n,) each. letter: as in `CODE`; first, last:
    positions of the first and the last compute.
    """

    stage: np.ndarray
    letter: np.ndarray
    microbatch: np.ndarray
    first: np.ndarray
    last: np.ndarray


class Box(NamedTuple):
    """What is drawn, and belongs to no action."""

    pp: int
    lane: str
    kind: str
    start: float
    end: float
    cost: float


class Table:
    """The k distinct instructions of a rank's list; every column is an array of shape (k,).

    A *composite* CALL stands for several instructions that run by themselves (deep.py).

    code       the instructions, each with its cost; for a composite CALL the `Times` of its parts
    computes   whether the rank's own thread is busy with it; ``works``: with forward or backward.
               Both hold of every CALL: posting a call that an op makes itself is work, too
    summed     for a WAIT: seconds to add up what a reduction received
    flight     1 for a call, bookkeeping left out; 2 for a copy between tiers; else 0
    lane       (lane of the timeline, kind of box), or None where nothing is drawn, as for calls of
               tensor parallelism and messages between stages; ``drawn``: whether something is
    host       whether the host does it
    seconds    for a composite CALL: how long it takes. Of this, in seconds: ``idle``, the rank is
               idle; ``copied``, it adds up and copies; ``inner``, calls of its own are in flight;
               ``hidden``, they are in flight while the rank computes
    transfers  {index: the calls and copies that the instruction stands for, with their counts};
               set by the caller
    """

    transfers: dict[int, Counter[Transfer]]

    def __init__(
        self, code: Sequence[tuple[Instr, Cost | Times]], awaited: Mapping[int, Cost]
    ) -> None:
        """awaited: {index of a WAIT: cost of the call that it waits for}."""
        self.code, k = code, len(code)
        self.lane: list[tuple[str, str] | None] = [None] * k
        self.flight, self.summed, composite = np.zeros(k, int), np.zeros(k), np.zeros((5, k))
        self.seconds, self.idle, self.copied, self.inner, self.hidden = composite
        self.works = np.array([ins.op in WORKS for ins, _ in code], bool)
        self.host = np.array([ins.lane == "host" for ins, _ in code], bool)
        self.computes = self.works | np.array([type(cost) is Compute for _, cost in code], bool)
        for at, (ins, cost) in enumerate(code):
            if type(cost) is Times:
                line = Line.of(cost, -1)
                inside = overlap(*joined(line.in_flight[0]), *line.work)
                composite[:, at] = cost.seconds, line.idled.sum(), line.copies.sum(), *inside
            elif type(cost) is Job:
                self.flight[at] = 2 * (ins.lane in COPY_LANES)
                self.lane[at] = ins.lane, kind_of(ins)
            elif type(cost) is Posted:
                self.flight[at] = ins.phase not in BOOKKEEPING
                if not ins.lane.startswith("tp") and ins.op not in MESSAGES:
                    self.lane[at] = f"comm:{'pp' if ins.lane == 'ends' else ins.lane}", "comm"
        self.drawn = np.array([lane is not None for lane in self.lane], bool)
        for at, cost in awaited.items():
            if type(cost) is Posted:  # where another member adds up, the rank is idle for it
                (self.idle if cost.other else self.summed)[at] = cost.summed


@dataclass(eq=False)
class Line:
    """A rank's list of n instructions with their times, in seconds; arrays of shape (n,).

    pp             pipeline rank
    symbol         index of each instruction in the table
    entered, left  when the rank begins the instruction, and when it goes on to the next
    over           when a WAIT itself ends (the work that belongs to it follows); negative for other
                   instructions, and for a WAIT whose job an earlier WAIT has shown to be over
    calls, when    positions of the c calls and jobs (c,), and their (start, end) in flight (c, 2)
    actions        the actions in the list; of the list of a composite CALL one, all of it
    waits          whether it is a WAIT; computes, works, summed, idle: the table's columns
    inside         whether it lies inside an action, before its last compute
    """

    pp: int
    table: Table
    symbol: np.ndarray
    left: np.ndarray
    over: np.ndarray
    calls: np.ndarray
    when: np.ndarray
    actions: Actions

    def __post_init__(self) -> None:
        table, symbol = self.table, self.symbol
        self.entered, self.waits = np.append(0.0, self.left[:-1]), self.over >= 0.0
        self.computes, self.works = table.computes[symbol], table.works[symbol]
        self.summed, self.idle = table.summed[symbol] * self.waits, table.idle[symbol]
        begun, over = (np.bincount(at, minlength=len(symbol)) for at in self.actions[-2:])
        self.inside = (begun - over).cumsum() > 0

    @classmethod
    def of(cls, times: Times, pp: int, actions: Actions | None = None) -> Line:
        """The line of a rank that walk.py has timed; each instruction has an index of its own."""
        code, rank = times.lists[pp], times.ranks[pp]
        left, waits, calls = rank.left, rank.waits, rank.calls
        table = Table(code, {at: code[call][1] for at, (call, _) in waits.items()})
        over = np.full(len(code), -1.0)
        for at, (_, end) in waits.items():
            over[at] = max(left[at - 1], end)
        in_flight = np.array(list(calls), int), np.array(list(calls.values())).reshape(-1, 2)
        if actions is None:
            works = np.flatnonzero(table.works)
            actions = Actions(*np.zeros((3, 1), int), works[:1], works[-1:])
        return cls(pp, table, np.arange(len(code)), np.array(left), over, *in_flight, actions)

    @cached_property
    def begins(self) -> np.ndarray:
        """When the box of an instruction begins, if it has one: where the last compute or wait
        before it ends (boxes.py).
        """
        ends = np.where(self.computes, self.left, 0.0)
        ends = np.where(self.waits, self.over + self.idle + self.summed, ends)
        return np.append(0.0, np.maximum.accumulate(ends)[:-1])

    # ---- compute ---------------------------------------------------------------------------------
    @property
    def action_times(self) -> tuple[np.ndarray, ...]:
        """(start, end, cost, copied, copied after) of each action, in seconds, (actions,) each.

        cost          end - start, less the time that the rank is idle in between
        copied        the part of ``cost`` in which the rank adds up and copies
        copied after  the same between this action and the next
        """
        first, last = self.actions.first, self.actions.last
        idled, copies = (np.append(0.0, seconds.cumsum()) for seconds in (self.idled, self.copies))
        start, end = self.begins[first], self.left[last]
        cost = end - start - idled[last + 1] + idled[first]
        after = np.append(copies[first[1:]] - copies[last[:-1] + 1], 0.0)
        return start, end, cost, copies[last + 1] - copies[first], after

    @cached_property
    def idled(self) -> np.ndarray:
        """Seconds of each instruction in which the rank is idle."""
        return self.idle + self.waits * (self.over - self.entered)

    @cached_property
    def copies(self) -> np.ndarray:
        """Seconds of each instruction in which the rank adds up what it received, or, outside the
        actions, copies. A copy between an action's first and last compute belongs to the action
        (spans.py).
        """
        copied = self.table.copied[self.symbol] + self.summed
        outside = self.computes & ~self.works & ~self.inside
        return np.where(outside, self.left - self.begins, copied)

    @cached_property
    def work(self) -> np.ndarray:
        """(begin, end, seconds of work) of all compute, of the packing and posting that comes
        before waits inside actions, and of adding up what a reduction received; (3, intervals).
        """
        start, end = self.begins, np.where(self.computes, self.left, self.entered)
        done, added = end - start - self.idle * self.computes, self.over + self.idle
        works = self.computes | self.waits & self.inside
        if not self.summed.any():
            return np.array([start[works], end[works], done[works]])
        pieces = np.array([[start, added], [end, added + self.summed], [done, self.summed]])
        return pieces.transpose(0, 2, 1)[:, np.stack([works, self.summed > 0], 1)]

    def boxes(self, short: float) -> list[Box]:
        """The boxes to draw that belong to no action: what the rank computes after all actions; the
        calls and copies begun since the earliest of the last actions, but for those of tensor
        parallelism and between stages; and all that the host computes. Boxes of ``short`` seconds
        or less are left out.
        """
        boxes: list[Box] = []

        def add(kind: str, start: float, end: float) -> None:
            if boxes and boxes[-1].kind == kind and start - boxes[-1].end < short:
                boxes[-1] = boxes[-1]._replace(end=end, cost=boxes[-1].cost + end - start)
            elif end - start > short:
                boxes.append(Box(self.pp, "compute", kind, start, end, end - start))

        for at in range(self.actions.last.max() + 1, len(self.left)):
            ins, cost = self.table.code[self.symbol[at]]
            if type(cost) is Compute:
                kind = KINDS.get(ins.op, "copy")
                add(kind, float(self.begins[at]), float(self.left[at]))
            elif self.summed[at] > 0.0:
                add("copy", float(self.over[at]), float(self.over[at] + self.summed[at]))
        actions = self.actions
        alike = actions.stage * len(CODE) + actions.letter
        _, last = np.unique(alike[::-1], return_index=True)  # of each stage, one per letter
        since = actions.first[::-1][last].min()
        symbols = self.symbol[self.calls]
        chosen = self.table.drawn[symbols] & (self.table.host[symbols] | (self.calls >= since))
        lanes: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for symbol, when in zip(symbols[chosen].tolist(), self.when[chosen].tolist(), strict=True):
            lanes.setdefault(self.table.lane[symbol], []).append(tuple(when))
        for (lane, kind), intervals in lanes.items():
            boxes += [
                Box(self.pp, lane, kind, start, end, (end - start) * (kind != "comm"))
                for start, end in union(intervals)
                if end - start > short
            ]
        return boxes

    # ---- calls and copies ------------------------------------------------------------------------
    @cached_property
    def in_flight(self) -> tuple[np.ndarray, np.ndarray]:
        """(start, end) of the calls, bookkeeping left out, and of the copies between tiers."""
        flight = self.table.flight[self.symbol[self.calls]]
        return self.when[flight == 1], self.when[flight == 2]

    @property
    def moving(self) -> np.ndarray:
        """(seconds with calls in flight, of these while the rank works, seconds with copies between
        tiers in flight, of these while it works), (4,).
        """
        calls, jobs = map(joined, self.in_flight)
        moved = overlap(*calls, *self.work)
        # Composites have calls of their own, which count where no others are in flight.
        composite = self.table.seconds[self.symbol] > 0.0
        symbol, end = self.symbol[composite], self.left[composite]
        own = self.table.inner[symbol], self.table.hidden[symbol]
        _, *twice = overlap(*calls, end - self.table.seconds[symbol], end, *own)
        return np.append(moved + np.sum(own, 1) - twice, overlap(*jobs, *self.work))


def transfers(
    costs: Costs, pp: int, code: Mapping[int, tuple[Instr, Cost | Times]]
) -> dict[int, Counter[Transfer]]:
    """The calls and the copies between tiers that each of these instructions stands for."""
    found: dict[int, Counter[Transfer]] = {at: Counter() for at in code}
    for at, whole in code.items():
        for ins, cost in whole[1].lists[-1] if type(whole[1]) is Times else [whole]:
            if type(cost) is Posted:
                for call in costs.calls.of(pp, ins):
                    found[at][call, cost.seconds + cost.late_for(ins)] += 1
            elif type(cost) is Job and kind_of(ins) == "copy":
                found[at][(ins.lane, *moved(costs.program, ins, pp)), cost.seconds] += 1
    return found


def joined(intervals: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(starts, ends) of the union of intervals, (c, 2), one after the other."""
    low, high = intervals[np.argsort(intervals[:, 0], kind="stable")].T
    high = np.maximum.accumulate(high)
    later = low[1:] > high[:-1]
    return low[np.append(True, later)[: len(low)]], high[np.append(later, True)[: len(low)]]


def overlap(
    begins: np.ndarray, ends: np.ndarray, start: np.ndarray, end: np.ndarray, *works: np.ndarray
) -> np.ndarray:
    """(seconds that intervals cover, seconds of each kind of work done in them).

    begins, ends  of the intervals, `joined`
    start, end    of pieces of work, one after the other, (n,)
    works         per kind the seconds of work in each piece, (n,), spread evenly from start to end
    """
    if not len(begins) or not len(start):
        return np.zeros(1 + len(works))
    moments, inside = np.stack([start, end], 1).ravel(), []
    for work in works:
        sums = work.cumsum()
        done = np.stack([sums - work, sums], 1).ravel()
        both = np.interp(ends, moments, done) - np.interp(begins, moments, done)
        inside.append(both.sum())
    return np.array([(ends - begins).sum(), *inside])


class Step(NamedTuple):
    """A timed step of all pipeline ranks.

    lines  per rank its list of instructions
    kinds  the kinds of memory, (tier, category)
    held   per rank samples (moment, bytes of every kind), the peaks among them
    costs  the costs with which the lists were timed
    """

    lines: list[Line]
    kinds: list[tuple[str, str]]
    held: list[list[tuple[float, np.ndarray]]]
    costs: Costs

    @property
    def ends(self) -> np.ndarray:
        """When each rank's step ends, in seconds."""
        return np.array([line.left[-1] for line in self.lines])
