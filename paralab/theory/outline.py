"""A step in outline: one rank per pipeline stage, one box per action, at any scale.

`predict` in full writes down every call of every rank, rows that grow with world size times
micro-batches times layers. But the ranks of a stage do the same, all micro-batches but the first
and the last repeat each other, and so do stages with equally many blocks. So here

    a program   of each *kind* of rank (its stages' parts, and which of its groups cross nodes) the
                rows of a step with two to four micro-batches, from the very code that writes them
                in full (predict_step.py), played on one rank: `Program`
    actions     what an action takes is read off there: its work, and what of its messages, gathers
                and copies the rank stands still for. Prefetches and reduce-scatters run on beside,
                in their lanes, into the next action, as they do in full
    a pipeline  the actions of the whole schedule and the messages between stages as one graph:
                `Timetable`. A message leaves when it is made, its receive is posted one action
                before it is needed, and each direction of a pair is one wire
    the end     per rank, from when its last micro-batch really came: what is left of gradient sync,
                the tied embedding's sum, the optimizer, what is gathered afterwards: `Tail`

Simulated are the ranks with data-parallel and tensor-parallel index 0, with their real numbers.
Bytes are exact. Time is that of the full simulation but for a lane that an action before a wait
has left busy, and for receives that could be posted earlier. tests/test_outline.py says what that
comes to. Cost: about 10 microseconds per action and step, whatever the number of layers and ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from paralab.parallel.lowering import posted_after
from paralab.parallel.schedules import Action, relay
from paralab.records import metrics
from paralab.spec import Cluster, ModelSpec, Plan
from paralab.theory import memory
from paralab.theory.engine import Collective, Compute, Copy, Wait, link_cost
from paralab.theory.order import CODE, F, I, Order, W, order
from paralab.theory.predict_step import Row, step_rows

WORK = ("forward", "backward", "weight_grad")
EXACT = 10_000  # actions up to which it is worked out when each receive is posted
FEW = 3  # micro-batches of a program: the first, one like all the others, the last
FEW_IN_LANES = 4  # where traffic runs on into the next, one more until it repeats itself


class Played(NamedTuple):
    """When every row of a program starts and ends, if nothing ever holds the rank up."""

    start: list[float]
    end: list[float]


class Slice(NamedTuple):
    """What one action of a program is.

    first, end  of its rows
    begin       when it starts there
    seconds     from then to the next one's start
    cost        of these, those that the rank computes, without
    copies      seconds of putting gradients together
    """

    first: int
    end: int
    begin: float
    seconds: float
    cost: float
    copies: float


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
        begins = self._now_at(marks)
        done: dict[tuple[int, str], int] = {}
        for number, action in enumerate(self.actions):
            unit = action.stage if plan.relays else action.stage // plan.pp
            half = action.kind.replace("B", "I")
            at = done[unit, half] = done.get((unit, half), -1) + 1
            first, end = marks[number], marks[number + 1]
            work = [row for row in self.rows[first:end] if type(row.item) is Compute]
            copies = sum(row.item.seconds for row in work if row.kind == "copy")
            cost = sum(row.item.seconds for row in work) - copies
            self.slices[unit, action.kind, at] = Slice(
                first, end, begins[number], begins[number + 1] - begins[number], cost, copies
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
                for moments, done in (work, any_work) if row.kind in WORK else (any_work,):
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

    def _now_at(self, marks: Sequence[int]) -> list[float]:
        """When the compute lane comes to these rows."""
        found, now, at = [], 0.0, 0
        for mark in marks:
            for position in range(at, mark):
                if type(self.rows[position].item) in (Compute, Wait):
                    now = self.played.end[position]
            at = mark
            found.append(now)
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
        if row.axis not in levels:
            levels[row.axis] = _slowest(plan, cluster, rank, row.axis, item.level)
        wire = item.wire_bytes  # index 0's, the most; but for whoever sends on
        if item.op == "broadcast":
            wire = row.payload * (len(row.ranks) - 1).bit_length()
        elif item.op == "reduce":
            wire = row.payload * (len(row.ranks) > 1)
        return link(item.op, levels[row.axis], wire)

    return cost


def _slowest(plan: Plan, cluster: Cluster, rank: int, axis: str, own: str) -> str:
    """The level of the slowest group along ``axis`` at the rank's stage; its ``own`` is known."""
    fits = axis.startswith("tp") and cluster.devices_per_node % plan.tp == 0
    if own == "inter" or fits or axis == "pp":
        return own
    group = "shard" if axis == "dp" and plan.zero_stage else axis
    for member in range(rank, rank + plan.dp * plan.tp):
        if len({cluster.node_of(r) for r in plan.ranks(group, member)}) > 1:
            return "inter"
    return own


def play(rows: Sequence[Row], cost: Callable[[Row], float]) -> Played:
    """One rank's rows one after the other; the other members of its groups do the same."""
    now, lanes = 0.0, {}
    starts: list[float] = []
    ends: list[float] = []
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
            start = max([start, lanes.get(item.lane, 0.0), *[ends[on] for on in item.after]])
            end = lanes[item.lane] = start + cost(row)
        starts.append(start)
        ends.append(end)
    return Played(starts, ends)


# ---- which ranks are alike -----------------------------------------------------------------------
def programs(model: ModelSpec, plan: Plan, cluster: Cluster, optimizer: str) -> list[Program]:
    """The program of every pipeline rank's kind; ranks of one kind share it."""
    made: dict[Any, Program] = {}
    by_rank, lists = [], plan.actions()
    if plan.relays:
        lists = [relay(len(memory.stage_parts(model, plan, 0)[0]), plan.microbatches)]
    for rank, actions in zip(pipeline_ranks(plan), lists, strict=True):
        key = _kind(model, plan, cluster, rank)
        if key not in made:
            made[key] = Program(model, plan, cluster, rank, optimizer, actions)
        by_rank.append(made[key])
    return by_rank


def pipeline_ranks(plan: Plan) -> range:
    """The ranks with data-parallel and tensor-parallel index 0, stage by stage."""
    return range(0, plan.world_size, plan.dp * plan.tp)


def _kind(model: ModelSpec, plan: Plan, cluster: Cluster, rank: int) -> Any:
    """Equal for ranks that do the same: parts alike, and groups alike within and between nodes."""
    held = memory.stage_parts(model, plan, rank).values()
    if model.frozen:
        parts: Any = tuple(held)
    else:
        parts = tuple((len(p), p[0] == "embedding", p[-1] == "head") for p in held)
    if plan.world_size <= cluster.devices_per_node:
        return parts, 0
    return parts, rank % cluster.devices_per_node


# ---- the schedule --------------------------------------------------------------------------------
class Timetable(NamedTuple):
    """When every action happens, rank after rank in the order of their lists; n actions, t messages.

    order       the actions; of a relay with parts in place of stages
    number      the how-manieth of its stage and kind in its rank's list              (n,)
    start, end  seconds from the start of the step                                    (n,)
    cost, copies  seconds of its work, and of putting gradients together in it        (n,)
    maker, user  actions at both ends of every message                                (t,)
    left, came  when it starts and ends                                               (t,)
    """

    order: Order
    number: np.ndarray
    start: np.ndarray
    end: np.ndarray
    cost: np.ndarray
    copies: np.ndarray
    maker: np.ndarray
    user: np.ndarray
    left: np.ndarray
    came: np.ndarray

    def key(self, plan: Plan, action: int, few: int) -> tuple[int, str, int]:
        """The slice of its rank's program that an action is like."""
        found = self.order
        stage, kind = int(found.stage[action]), "FBIW"[found.kind[action]]
        number = stands_for(self.number[action], plan.microbatches, few)
        return stage if plan.relays else stage // plan.pp, kind, int(number)

    def first(self, plan: Plan, rank: int, key: tuple[int, str, int]) -> float:
        """When the first action that is like this slice of the rank's program starts."""
        found, (unit, kind, number) = self.order, key
        stage = unit if plan.relays else unit * plan.pp + rank
        here = slice(found.first[rank], found.first[rank + 1])
        like = (found.stage[here] == stage) & (found.kind[here] == CODE[kind])
        like &= self.number[here] >= number
        return float(self.start[here][like].min())


def schedule_order(model: ModelSpec, plan: Plan) -> Order:
    """The plan's actions as arrays."""
    if not plan.relays:
        return order(plan.actions(), plan.stages, plan.microbatches)
    parts = len(memory.stage_parts(model, plan, 0)[0])
    stage, kind, k = zip(*relay(parts, plan.microbatches), strict=True)
    n = len(stage)
    letters = np.array([CODE[letter] for letter in kind], np.int8)
    return Order(1, parts, plan.microbatches, np.array([0, n]), np.zeros(n, int), np.array(stage),
                 letters, np.array(k), np.full(n, -1))  # fmt: skip


def numbers(found: Order) -> np.ndarray:
    """The how-manieth of its stage and kind every action is; a whole backward counts as an I."""
    n = len(found.rank)
    kind = np.where(found.kind == W, 2, np.where(found.kind == F, 0, 1))
    group = kind * found.stages + found.stage
    row = np.argsort(group, kind="stable")
    ordered = group[row]
    first = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    made = np.empty(n, int)
    made[row] = np.arange(n) - np.repeat(first, np.diff(np.r_[first, n]))
    return made


def stands_for(count: np.ndarray, microbatches: int, few: int) -> np.ndarray:
    """Which of a program's micro-batches is like the ``count``-th of all."""
    middle = np.minimum(count, max(few - 2, 0))
    return np.where(count == microbatches - 1, few - 1, middle) if few < microbatches else count


def timetable(
    plan: Plan, found: Order, made: Sequence[Program], message: Callable[[int, int], float]
) -> Timetable:
    """When everything happens. message: seconds from one pipeline rank to another."""
    n, m, few = len(found.rank), plan.microbatches, made[0].count
    count = numbers(found)
    number = stands_for(count, m, few)
    units = found.stages if plan.relays else plan.virtual_stages
    table = np.zeros((found.ranks, units, 4, few, 3))
    for rank, program in enumerate(made):
        for (unit, kind, at), part in program.slices.items():
            table[rank, unit, CODE[kind], at] = part.seconds, part.cost, part.copies
    unit = found.stage if plan.relays else found.stage // plan.pp
    seconds, cost, copies = table[found.rank, unit, found.kind, number].T
    user = np.flatnonzero(found.source >= 0)
    maker = found.source[user]
    away = found.rank[maker] != found.rank[user]
    near = user[~away]
    user, maker = user[away], maker[away]
    pair = found.rank[maker] * found.ranks + found.rank[user]
    row = np.lexsort((maker, pair))  # each wire in the order in which its messages are made
    user, maker, pair = user[row], maker[row], pair[row]
    kinds, inverse = np.unique(pair, return_inverse=True)
    takes = np.array([message(*divmod(int(p), found.ranks)) for p in kinds] or [0.0])
    takes = takes[inverse] if len(pair) else np.zeros(0)
    begin, finish = _longest(found, seconds, near, user, maker, pair, takes)
    return Timetable(found, count, begin[:n], finish[:n], cost, copies, maker, user, begin[n:],
                     finish[n:])  # fmt: skip


def _longest(
    found: Order, seconds: np.ndarray, near: np.ndarray, user: np.ndarray, maker: np.ndarray,
    pair: np.ndarray, takes: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Starts and ends of the n actions and then of the messages, each as early as can be.

    A message waits for its maker, for the one before it on its wire, and for its receive.
    """
    from paralab.theory.engine import longest_path
    from paralab.theory.order import FREE

    n, t = len(seconds), len(user)
    dummy = n + t
    messages = np.arange(n, dummy)
    later = np.arange(1, n + t + 1)
    later[found.first[1:] - 1] = dummy  # a rank's last action
    if t:
        later[n + np.flatnonzero(np.r_[pair[1:] != pair[:-1], True])] = dummy
    to = np.full(n + t, dummy)
    to[found.source[near]] = near
    to[maker] = messages
    to[n:] = user
    posts = np.full(n + t, dummy)  # the receive that is posted after this action
    if n <= EXACT:
        ahead = posted_after(found)[user]
    else:
        ahead = np.where(user - 2 >= found.first[found.rank[user]], user - 2, -1)
    posted = np.flatnonzero(ahead >= 0)
    posts[ahead[posted]] = messages[posted]
    others = posted[posts[ahead[posted]] != messages[posted]]  # posted behind the same action
    missing = np.zeros(dummy + 1, np.int64)
    for edges in (later, to, posts):
        missing += np.bincount(edges, minlength=dummy + 1)
    np.add.at(missing, messages[others], 1)
    missing[dummy] = FREE
    takes_all = np.concatenate([seconds, takes, [0.0]])
    following = list(zip(later.tolist(), to.tolist(), posts.tolist(), strict=True))
    following.append(())
    for action, message in zip(ahead[others].tolist(), messages[others].tolist(), strict=True):
        following[action] += (message,)
    ready = [0.0] * (dummy + 1)
    end, _ = longest_path(takes_all.tolist(), missing.tolist(), following, ready)
    return np.array(ready[:dummy]), np.array(end[:dummy])


# ---- after the last action -----------------------------------------------------------------------
class Tail:
    """One rank after its last action, and what of its traffic came from its last micro-batch.

    begun, now  seconds from the start of the step: when it begins, and in the end when it ends
    start, end  {position in the program: seconds from the start of the step}
    """

    def __init__(
        self, program: Program, last: Sequence[tuple[float, Slice]], now: float
    ) -> None:  # fmt: skip
        self.program, self.begun, self.now = program, now, now
        self.start: dict[int, float] = {}
        self.end: dict[int, float] = {}
        self.lanes: dict[str, float] = {}
        self.at = program.tail
        for position in range(program.head):
            self._launch(position, 0.0)
        for begin, part in last:
            self._launches(part, begin)

    def _launches(self, part: Slice, begin: float) -> None:
        """The calls and copies of an action that really began at ``begin``, in their lanes."""
        rows, now = self.program.rows, begin
        for position in range(part.first, part.end):
            if type(rows[position].item) in (Compute, Wait):
                now = begin + self.program.played.end[position] - part.begin
            else:
                self._launch(position, now)

    def _launch(self, position: int, now: float) -> None:
        row = self.program.rows[position]
        after = [self.end[on] for on in row.item.after if on in self.end]
        start = max([now, self.lanes.get(row.item.lane, 0.0), *after])
        self.start[position] = start
        self.end[position] = self.lanes[row.item.lane] = start + self.program.cost(row)

    def play(self, *, meet: Callable[[float], float] | None = None) -> float | None:
        """Go on to the end; or to a call that another stage is part of, and return its moment.

        meet  says when that call begins, given when this rank comes to it
        """
        rows = self.program.rows
        while self.at < len(rows):
            row, item = rows[self.at], rows[self.at].item
            if type(item) is Compute:
                self.start[self.at] = self.now
                self.now += item.seconds
                self.end[self.at] = self.now
            elif type(item) is Wait:
                self.start[self.at] = self.now
                self.now = max([self.now, *[self.end.get(on, 0.0) for on in item.on]])
                self.end[self.at] = self.now
            elif row.axis == "pp" and type(item) is Collective:
                if meet is None:
                    return self.now
                self._launch(self.at, meet(self.now))
                meet = None
            else:
                self._launch(self.at, self.now)
            self.at += 1
        return None


def tails(plan: Plan, made: Sequence[Program], times: Timetable) -> list[Tail]:
    """The end of the step on every pipeline rank."""
    found = times.order
    units = found.stage if plan.relays else found.stage // plan.pp
    last: list[list[tuple[float, Slice]]] = [[] for _ in made]
    for action in np.flatnonzero(times.number == plan.microbatches - 1).tolist():
        rank, kind = int(found.rank[action]), "FBIW"[found.kind[action]]
        part = made[rank].slices[int(units[action]), kind, made[rank].count - 1]
        last[rank].append((float(times.start[action]), part))
    nows = times.end[found.first[1:] - 1]
    sent = np.zeros(found.ranks)
    np.maximum.at(sent, found.rank[times.maker], times.came)
    ends = [
        Tail(program, parts, max(float(now), float(out)))
        for program, parts, now, out in zip(made, last, nows, sent, strict=True)
    ]
    met = [tail.play() for tail in ends]
    there = [moment for moment in met if moment is not None]
    for tail, moment in zip(ends, met, strict=True):
        if moment is not None:
            tail.play(meet=lambda _: max(there))
    return ends
