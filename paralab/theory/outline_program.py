"""A kind of rank in outline: its step with few micro-batches, played on one rank.

The rows are those of the full prediction (predict_step.py), for two to four micro-batches: the
first, one like all others, the last. Played by itself a rank is never held up by another stage; the
other members of its groups do as it does. So every action's time is read off, with what it stands
still for inside, and what the step moves. See theory/outline.py for what is made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from paralab.parallel.schedules import Action, relay
from paralab.records import metrics
from paralab.records.tables import COMPUTE_KINDS
from paralab.spec import Cluster, ModelSpec, Plan
from paralab.theory import memory
from paralab.theory.engine import Collective, Compute, Copy, Wait, link_cost
from paralab.theory.predict_rows import Row
from paralab.theory.predict_step import step_rows
from paralab.theory.traffic import POINT_TO_POINT

FEW = 3  # micro-batches of a program: the first, one like all the others, the last
FEW_IN_LANES = 4  # where traffic runs on into the next, one more until it repeats itself


def pipeline_ranks(plan: Plan) -> range:
    """The ranks with data-parallel and tensor-parallel index 0, stage by stage."""
    return range(0, plan.world_size, plan.dp * plan.tp)


class Played(NamedTuple):
    """When every row of a program starts and ends, if nothing ever holds the rank up; and when its
    compute lane is free again after that row.
    """

    start: list[float]
    end: list[float]
    free: list[float]


class Slice(NamedTuple):
    """What one action of a program is.

    first, end  of its rows
    begin       when it starts there
    seconds     from then to the next one's start
    cost        of these, those that the rank computes, without
    copies      seconds of putting gradients together
    waits       whether it begins with a wait of its own
    """

    first: int
    end: int
    begin: float
    seconds: float
    cost: float
    copies: float
    waits: bool


class Sum(NamedTuple):
    """All calls, or copies, of a rank that the table has in one row.

    where  (key of the slice of its first one, seconds after that slice began); or (None, position)
           if that comes before or after all actions
    """

    payload: int
    wire: int
    seconds: float
    where: tuple[Any, float]


class Program:
    """The rows of one kind of rank with few micro-batches, and when they happen.

    slices  {(unit, kind, number): Slice}; unit: which of the rank's stages (of a relay: the part),
            kind: a letter, number: the how-manieth micro-batch
    head, tail  where the rows of actions begin and end: what a step starts with, what it ends with
    """

    def __init__(
        self, model: ModelSpec, plan: Plan, cluster: Cluster, rank: int, optimizer: str,
        actions: Sequence[Action],
    ) -> None:  # fmt: skip
        kinds = {action.kind for action in actions}
        count = plan.microbatches if {"B", "W"} <= kinds else few_of(plan)
        few = plan.replace(microbatches=count)
        self.rank, self.cost, self.count = rank, _seconds(plan, cluster, rank), count
        self.actions = actions if count == plan.microbatches else \
            _few_actions(model, few, rank, "".join(k for k in "FBIW" if k in kinds))  # fmt: skip
        self._sums: dict[str, dict[tuple, Sum]] | None = None
        marks: list[int] = []
        steps = () if plan.relays else self.actions
        self.rows = step_rows(model, few, cluster, rank=rank, optimizer=optimizer, steps=steps,
                              marks=marks)  # fmt: skip
        self.head, self.tail = marks[0], marks[-1]
        self.played = play(self.rows, self.cost)
        self.slices: dict[tuple[int, str, int], Slice] = {}
        begins = [self.played.free[mark - 1] if mark else 0.0 for mark in marks]
        done: dict[tuple[int, str], int] = {}
        for number, action in enumerate(self.actions):
            unit = action.stage if plan.relays else action.stage // plan.pp
            half = action.kind.replace("B", "I")
            at = done[unit, half] = done.get((unit, half), -1) + 1
            first, end = marks[number], marks[number + 1]
            work = [row for row in self.rows[first:end] if type(row.item) is Compute]
            copies = sum(row.item.seconds for row in work if row.kind == "copy")
            cost = sum(row.item.seconds for row in work) - copies
            types = (type(row.item) for row in self.rows[first:end])
            waits = next((of is Wait for of in types if of in (Compute, Wait)), False)
            self.slices[unit, action.kind, at] = Slice(
                first, end, begins[number], begins[number + 1] - begins[number], cost, copies, waits
            )

    def times(self, number: int, microbatches: int) -> int:
        """How many of a step's micro-batches are like the program's ``number``-th."""
        return microbatches - self.count + 1 if number == self.count - 2 else 1

    def sums(self, microbatches: int) -> dict[str, dict[tuple, Sum]]:
        """What a rank of this kind moves in a step: {"calls": {(op, axis, ranks, peer, level,
        phase): Sum}, "copies": {(lane, op, category): Sum}}, with the ranks of this one.
        """
        if self._sums is None:
            self._sums = {"calls": {}, "copies": {}}
            ends = [(None, 0, self.head, 1), (None, self.tail, len(self.rows), 1)]
            for key, part in self.slices.items():
                ends.append((key, part.first, part.end, self.times(key[2], microbatches)))
            for key, first, end, times in sorted(ends, key=lambda some: some[1]):
                self._add(key, first, end, times)
        return self._sums

    def _add(self, key: tuple | None, first: int, end: int, times: int) -> None:
        for position in range(first, end):
            row, item = self.rows[position], self.rows[position].item
            if type(item) is Collective:
                into, wire = self._sums["calls"], item.wire_bytes
                name = item.op, row.axis, row.ranks, row.peer, item.level, row.phase
            elif row.op:
                into, wire, name = self._sums["copies"], 0, (row.lane, row.op, row.category)
            else:
                continue
            before = into.get(name)
            if before is None:
                offset = position
                if key is not None:
                    offset = self.played.start[position] - self.slices[key].begin
                before = Sum(0, 0, 0.0, (key, offset))
            into[name] = Sum(
                before.payload + times * row.payload, before.wire + times * wire,
                before.seconds + times * self.cost(row), before.where,
            )  # fmt: skip

    @cached_property
    def lanes(self) -> dict[tuple, dict[tuple[str, str], tuple[float, float, float]]]:
        """{slice: {(lane, kind): (from, to, seconds at work)}} of copies, after the slice began."""
        found: dict[tuple, dict[tuple[str, str], tuple[float, float, float]]] = {}
        for key, part in self.slices.items():
            mine = found[key] = {}
            for position in range(part.first, part.end):
                row = self.rows[position]
                if type(row.item) is Copy:
                    start = self.played.start[position] - part.begin
                    end = self.played.end[position] - part.begin
                    first, last, busy = mine.get((row.lane, row.kind), (start, end, 0.0))
                    mine[row.lane, row.kind] = first, max(last, end), busy + end - start
        return found

    def in_flight(self, microbatches: int) -> np.ndarray:
        """Seconds of a step that calls are under way, and of these beside forward and backward;
        that copies between tiers are, and of these beside any work                         (4,)
        """
        work: tuple[list[float], list[float]] = [0.0], [0.0]  # moments, and work done until then
        any_work: tuple[list[float], list[float]] = [0.0], [0.0]
        for row, start, end in zip(self.rows, self.played.start, self.played.end, strict=True):
            if type(row.item) is Compute:
                for moments, done in (work, any_work) if row.kind in COMPUTE_KINDS else (any_work,):
                    moments += (start, end)
                    done += (done[-1], done[-1] + end - start)
        parts = [(0, self.head, 1), (self.tail, len(self.rows), 1)]
        parts += [(s.first, s.end, self.times(key[2], microbatches))
                  for key, s in self.slices.items()]  # fmt: skip
        found = np.zeros(4)
        for first, end, times in parts:
            calls, copies = [], []
            for position in range(first, end):
                row = self.rows[position]
                into = calls if type(row.item) is Collective else copies if row.op else None
                if into is not None:
                    into.append((self.played.start[position], self.played.end[position]))
            for at, some, (moments, done) in ((0, calls, work), (2, copies, any_work)):
                if some:
                    both = np.array(metrics.union(some)).T
                    beside = np.interp(both, moments, done)
                    found[at] += times * (both[1] - both[0]).sum()
                    found[at + 1] += times * (beside[1] - beside[0]).sum()
        return found


def few_of(plan: Plan) -> int:
    """Micro-batches of a program."""
    runs_on = plan.zero_stage >= 2 or plan.tiers is not None
    return min(plan.microbatches, FEW_IN_LANES if runs_on else FEW)


def _few_actions(model: ModelSpec, few: Plan, rank: int, kinds: str) -> list[Action]:
    """What a rank does with few micro-batches: by itself its own list, in a pipeline in turn."""
    if few.relays:
        return relay(len(memory.stage_parts(model, few, rank)[0]), few.microbatches)
    if few.pp == 1 and not callable(few.schedule):
        return few.actions()[0]
    stages = list(memory.stage_parts(model, few, rank))
    return [
        Action(stage, kind, k)
        for k in range(few.microbatches)
        for kind in kinds
        for stage in (stages if kind == "F" else stages[::-1])
    ]


def _seconds(plan: Plan, cluster: Cluster, rank: int) -> Callable[[Row], float]:
    """What a call of ``rank`` takes its slowest member, in the slowest of its stage's groups:
    sooner or later the others wait for that one.
    """
    link = link_cost(cluster)
    levels: dict[str, str] = {}

    def cost(row: Row) -> float:
        item = row.item
        if type(item) is Copy:
            return item.seconds
        if item.op in POINT_TO_POINT:
            return link(item.op, item.level, item.wire_bytes)
        if row.axis not in levels:
            levels[row.axis] = _slowest(plan, cluster, rank, row, item.level)
        wire = item.wire_bytes  # index 0's, the most; but for whoever sends on
        if item.op == "broadcast":
            wire = row.payload * (len(row.ranks) - 1).bit_length()
        elif item.op == "reduce":
            wire = row.payload * (len(row.ranks) > 1)
        return link(item.op, levels[row.axis], wire)

    return cost


def _slowest(plan: Plan, cluster: Cluster, rank: int, row: Row, own: str) -> str:
    """The level of the slowest group along the row's axis at the rank's stage, or for a sum of a
    tied embedding of the pipelines beside this one; its ``own`` is known.
    """
    axis = row.axis
    fits = axis.startswith("tp") and cluster.devices_per_node % plan.tp == 0
    if own == "inter" or fits:
        return own
    group = "shard" if axis == "dp" and plan.zero_stage else axis
    for beside in range(plan.dp * plan.tp):
        members = [r + beside for r in row.ranks] if axis == "pp" else \
            plan.ranks(group, rank + beside)  # fmt: skip
        if len({cluster.node_of(r) for r in members}) > 1:
            return "inter"
    return own


def play(rows: Sequence[Row], cost: Callable[[Row], float]) -> Played:
    """One rank's rows one after the other; the other members of its groups do the same."""
    now, lanes = 0.0, {}
    starts: list[float] = []
    ends: list[float] = []
    free: list[float] = []
    for row in rows:
        item = row.item
        kind = type(item)
        start = now
        if kind is Compute:
            now = end = now + item.seconds
        elif kind is Wait:
            for on in item.on:
                if ends[on] > now:
                    now = ends[on]
            end = now
        else:
            start = max(start, lanes.get(item.lane, 0.0), *[ends[on] for on in item.after])
            end = lanes[item.lane] = start + cost(row)
        starts.append(start)
        ends.append(end)
        free.append(now)
    return Played(starts, ends, free)
