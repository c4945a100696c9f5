"""A timed step as actions: what outline.py makes its tables of.

When each action begins and ends and what its rank computes of that time are arrays; the end of a
step, which belongs to no action, is rows of its own; calls and copies are summed up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from paralab.interpret.boxes import since as beginnings
from paralab.interpret.costs import Compute, Costs, Job, Posted
from paralab.interpret.spans import KINDS
from paralab.interpret.time import Body, Times
from paralab.interpret.traffic import Calls, Member
from paralab.model.ops import Call
from paralab.programs.instructions import (
    COMPUTE,
    COPY,
    MESSAGES,
    UPDATE,
    WAIT,
    WORKERS,
    Code,
    Instr,
)
from paralab.programs.tiers import moved
from paralab.report.metrics import union
from paralab.report.tables import COPY_LANES
from paralab.theory.traffic import BOOKKEEPING

SHORT = 1e-9  # of a step: less than that is rounding
Interval = tuple[float, float]
Said = tuple[Any, float]  # a `Call`, or of a copy (lane, op, category, bytes); and its seconds


class Turn(NamedTuple):
    """An action in a rank's list: its first and its last instruction of compute.

    letter  "F", "B", "I" or "W"
    """

    stage: int
    letter: str
    microbatch: int
    first: int
    last: int


class Box(NamedTuple):
    """What is drawn and belongs to no action."""

    pp: int
    lane: str
    kind: str
    start: float
    end: float
    cost: float


class Sum(NamedTuple):
    """All calls of a rank that a table has in one row, or copies: the seconds of all, and when the
    first begins.
    """

    payload: int
    wire: int
    seconds: float
    start: float


class Step(NamedTuple):
    """Seconds from the start of the step, and bytes; n actions, rank after rank, in order.

    pp, stage, letter, microbatch  of actions; letter: one of "FBIW"                          (n,)
    start, end     (n,)
    cost, copies   what the rank does in that time, and of it what it adds up and copies      (n,)
    more           what it adds up and copies behind it, before the next one                  (n,)
    boxes      of no action
    sums       {(pipeline rank, what a row of a table says): Sum} of calls and of copies
    ends       of every rank's step                                                       (ranks,)
    moving     seconds that calls are in flight, and of these during forward and backward; that
               copies between tiers are, and of these during any work: of all ranks           (4,)
    kinds      (tier, category) of bytes
    held       per rank (moment, bytes of every kind), the peaks among them
    """

    pp: np.ndarray
    stage: np.ndarray
    letter: np.ndarray
    microbatch: np.ndarray
    start: np.ndarray
    end: np.ndarray
    cost: np.ndarray
    copies: np.ndarray
    more: np.ndarray
    boxes: list[Box]
    sums: dict[tuple, Sum]
    ends: np.ndarray
    moving: np.ndarray
    kinds: list[tuple[str, str]]
    held: list[list[tuple[float, np.ndarray]]]


# ---- time ----------------------------------------------------------------------------------------
def timed(
    code: Code, times: Times, pp: int, turns: Sequence[Turn], bodies: Mapping[Any, Code]
) -> tuple[np.ndarray, ...]:
    """`Step.start`, ``end``, ``cost``, ``copies`` and ``more`` of actions of a rank."""
    begins, left = np.array(beginnings(times, pp)), np.array(times.left[pp])
    first, last = np.array([(turn.first, turn.last) for turn in turns], int).reshape(-1, 2).T
    inside = [(turn.first, turn.last) for turn in turns]
    still, copies = (
        np.concatenate([[0.0], some.cumsum()])
        for some in (stands_still(times, pp), copies_of(code, times, pp, bodies, inside))
    )
    start, end = begins[first], left[last]
    cost = end - start - still[last + 1] + still[first]
    more = np.append(copies[first[1:]] - copies[last[:-1] + 1], np.zeros(min(len(last), 1)))
    return start, end, cost, copies[last + 1] - copies[first], more


def stands_still(times: Times, pp: int) -> np.ndarray:
    """Seconds that a rank does in every instruction."""
    found = np.zeros(len(times.left[pp]))
    for at, cost in enumerate(times.costs[pp]):
        if type(cost) is Body:
            found[at] = idle(cost)
    for at in times.waits[pp]:
        found[at] = times.turned[pp][at] - times.entered[pp][at]
    for at, calls in times.inside[pp].items():
        events = posted(times.costs[pp][at])
        found[at] = sum(
            call.until - call.waited + of.summed * of.other
            for call, of in zip(calls, events, strict=True)
        )
    return found


def posted(cost: Compute) -> list[Posted]:
    """The calls that ops make inside an instruction."""
    return [event for event in cost.inside if type(event) is Posted]


def copies_of(
    code: Code,
    times: Times,
    pp: int,
    bodies: Mapping[Any, Code],
    actions: Sequence[tuple[int, int]],
) -> np.ndarray:
    """Seconds of every instruction that a rank adds up what it received, or copies outside the
    ``actions``, first and last instruction of each: inside it belongs to them (spans.py).
    """
    found, costs, begins = np.zeros(len(code)), times.costs[pp], beginnings(times, pp)
    inside = {at for first, last in actions for at in range(first, last)}
    for at, call in times.waits[pp].items():
        if type(costs[call]) is Posted:
            found[at] = costs[call].summed
    for at in times.inside[pp]:
        found[at] = sum(of.summed for of in posted(costs[at]) if not of.other)
    for at, (ins, cost) in enumerate(zip(code, costs, strict=True)):
        if type(cost) is Compute and ins.op not in COMPUTE and at not in inside:
            found[at] = times.left[pp][at] - begins[at]
        elif type(cost) is Body:
            some = [n for n, one in enumerate(bodies[ins.at]) if one.op in COMPUTE]
            own = [(some[0], some[-1])] if some else []
            found[at] = copies_of(bodies[ins.at], cost.times, -1, bodies, own).sum()
    return found


def idle(body: Body) -> float:
    """Seconds of a CALL that its rank is idle."""
    return float(stands_still(body.times, -1).sum())


def boxes(code: Code, times: Times, pp: int, since: int, behind: int) -> list[Box]:
    """What a rank computes from instruction ``behind`` on; and the calls and copies that are in
    flight from ``since`` on, those of tensor parallelism and between stages apart. What the host
    computes is from the begin on.
    """
    begins, turned, left = beginnings(times, pp), times.turned[pp], times.left[pp]
    made: list[Box] = []
    lanes: dict[tuple[str, str], list[Interval]] = {}

    short = SHORT * times.seconds

    def add(kind: str, start: float, end: float) -> None:
        if made and made[-1].kind == kind and start - made[-1].end < short:
            made[-1] = made[-1]._replace(end=end, cost=made[-1].cost + end - start)
        elif end - start > short:
            made.append(Box(pp, "compute", kind, start, end, end - start))

    for position, (ins, cost) in enumerate(zip(code, times.costs[pp], strict=True)):
        if position < since and ins.lane != "host":
            continue
        drawn = not ins.lane.startswith("tp") and ins.op not in MESSAGES
        if position in times.calls[pp] and drawn:
            at = f"comm:{'pp' if ins.lane == 'ends' else ins.lane}", "comm"
            if type(cost) is Job:
                kind = {COPY: "copy", UPDATE: "optimizer"}.get(ins.op, "compute")
                at = ins.lane, kind
            lanes.setdefault(at, []).append(times.calls[pp][position])
        if position < behind:
            continue
        if type(cost) is Compute:
            add(KINDS.get(ins.op, "copy"), begins[position], left[position])
        elif position in times.waits[pp]:
            of = times.costs[pp][times.waits[pp][position]]
            if type(of) is Posted:
                add("copy", turned[position], turned[position] + of.summed)
    for (lane, kind), some in lanes.items():
        made += [
            Box(pp, lane, kind, start, end, (end - start) * (kind != "comm"))
            for start, end in union(some)
            if end - start > short
        ]
    return made


def in_flight(
    code: Code, times: Times, pp: int, since: int = 0
) -> tuple[list[Interval], list[Interval]]:
    """When calls are, bookkeeping apart, from an instruction on; and when copies between tiers."""
    found: tuple[list[Interval], list[Interval]] = [], []
    for position, when in times.calls[pp].items():
        ins, job = code[position], type(times.costs[pp][position]) is Job
        if ins.lane in COPY_LANES if job else position >= since and ins.phase not in BOOKKEEPING:
            found[job].append(when)
    for calls in times.inside[pp].values():
        found[0].extend((call.start, call.end) for call in calls)
    return found


def beside(
    some: Sequence[Interval] | np.ndarray, start: np.ndarray, end: np.ndarray, work: np.ndarray
) -> np.ndarray:
    """Seconds of a union of intervals, and of the work in it, which is spread evenly from start to
    end                                                                                       (2,)
    """
    if not len(some) or not len(work):
        return np.zeros(2)
    moments, some = np.stack([start, end], 1).ravel(), np.asarray(some)
    done = np.stack([work.cumsum() - work, work.cumsum()], 1).ravel()
    low, high = some[np.argsort(some[:, 0], kind="stable")].T
    high = np.maximum.accumulate(high)
    first = np.r_[True, low[1:] > high[:-1]]
    begins, ends = low[first], high[np.r_[first[1:], True]]
    both = np.interp(ends, moments, done) - np.interp(begins, moments, done)
    return np.array([(ends - begins).sum(), both.sum()])


def worked(
    times: Times, pp: int, which: Sequence[bool] | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Begin, end and seconds of work of the instructions that compute, all or those that count;
    where an op waits for calls of its own, of what is between.
    """
    made: list[tuple[float, float, float]] = []
    begins = beginnings(times, pp)
    for at, cost in enumerate(times.costs[pp]):
        if type(cost) not in (Compute, Body) or which is not None and not which[at]:
            continue
        start, end = begins[at], times.left[pp][at]
        if type(cost) is Body:
            made.append((start, end, end - start - idle(cost)))
            continue
        calls = zip(times.inside[pp].get(at, ()), posted(cost), strict=True)
        for call, of in sorted(calls, key=lambda both: both[0].waited):
            made.append((start, call.waited, call.waited - start))
            start = call.until + of.summed
        made.append((start, end, end - start))
    start, end, work = np.array(made).reshape(-1, 3).T
    return start, end, work


# ---- calls and copies ----------------------------------------------------------------------------
def said(costs: Costs, calls: Calls, pp: int, ins: Instr) -> list[Said]:
    """The calls that an instruction makes, or the copy that it is."""
    if ins.op == WAIT:
        return []
    if ins.lane in WORKERS:
        what = moved(costs.program, ins, pp)
        if what.op in ("optimizer", "compute"):
            return []
        return [((ins.lane, *what), costs.of(pp, ins).seconds)]
    made = calls.of(pp, ins)
    if not made:
        return []
    cost = costs.of(pp, ins)
    each = [cost] if type(cost) is Posted else posted(cost)
    return [(call, one.seconds) for call, one in zip(made, each, strict=True)]


class Sums:
    """The calls and copies of a rank, by the row of a report's table that they are in."""

    def __init__(self, costs: Costs, pp: int) -> None:
        plan = costs.plan
        self.pp = pp
        self.member = Member(costs.program, pp * plan.dp * plan.tp, costs.cluster.node_of)
        self.found: dict[tuple, Sum] = {}

    def add(self, one: Said, start: float, times: int) -> None:
        """So many of these, the first at ``start``."""
        what, seconds = one
        if isinstance(what, Call):
            *row, payload, wire = self.member.row(what)
        else:
            *row, payload, wire = *what, 0
        key = self.pp, *row
        before = self.found.get(key, Sum(0, 0, 0.0, start))
        self.found[key] = Sum(
            before.payload + times * payload,
            before.wire + times * wire,
            before.seconds + times * seconds,
            min(before.start, start),
        )
