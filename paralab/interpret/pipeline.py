"""When everything in a deep pipeline happens: a graph of moments, built once for any costs.

Which moment depends on which others follows from the schedule and from the instructions of each
action, not from the clock. So the moments of all ranks are the nodes of a graph, by the rules of
walk.py: each is the later of two others, plus the duration of something. NumPy lays out all lists
and numbers their nodes, those of 65,000 actions in 0.3 s. To evaluate the graph for given costs is
a comparison and a sum per node, 12 ms: all that a slider takes that leaves schedule and actions as
they are. Tests compare the moments with those of the whole program (time.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from paralab.interpret.jobs import Begun, Order
from paralab.interpret.listed import OP, Lists, Shape
from paralab.interpret.walk import CALL, JOB, WAIT, WORK
from paralab.parallel.lowering import Lowered, lowered
from paralab.spec import Plan
from paralab.spec.forms import make_schedule
from paralab.theory.schedule_check import checked

NARROW = 8  # with fewer nodes per level, a loop over nodes is quicker than one over levels
POSTING = 1  # index of the weight of posting a call; weight 0 is zero, the ranks' follow from 2 on


class Graph(NamedTuple):
    """Node i > 0 is the later of two earlier nodes plus a weight; node 0 is the start of the step.

    A level's nodes depend on earlier levels only.

    source, other, weight  per node but the first the two nodes, and the index of the weight; sorted
             by level
    edges    the first node of each level, and at the end the number of nodes
    symbol, left, over  per rank and instruction: its index in the rank's table; the node when the
             rank goes on to the next; for a WAIT the end of what it waits for, else 0
    actions  as in `listed.Lists`
    calls    per rank two rows: positions of the calls, messages and jobs; the nodes of their ends
    """

    source: np.ndarray
    other: np.ndarray
    weight: np.ndarray
    edges: list[int]
    symbol: list[np.ndarray]
    left: list[np.ndarray]
    over: list[np.ndarray]
    actions: list[np.ndarray]
    calls: list[np.ndarray]

    def moments(self, weights: np.ndarray) -> np.ndarray:
        """When each node happens, in seconds."""
        takes = weights[self.weight]
        if len(takes) < NARROW * len(self.edges):
            by_node = [0.0]
            columns = zip(self.source.tolist(), self.other.tolist(), takes.tolist(), strict=True)
            for a, b, seconds in columns:
                x, y = by_node[a], by_node[b]
                by_node.append((x if x > y else y) + seconds)
            return np.array(by_node)
        moments = np.zeros(len(takes) + 1)
        for low, high in pairwise(self.edges):
            rows = slice(low - 1, high - 1)
            latest = np.maximum(moments[self.source[rows]], moments[self.other[rows]])
            moments[low:high] = latest + takes[rows]
        return moments


def graph(plan: Plan, shapes: tuple[Shape, ...], kinds: tuple[int, ...], posts: bool) -> Graph:
    """The graph of a plan's schedule.

    shapes  `Item`s whose ``takes`` and ``before`` are indices in the table of the rank
    kinds   per pipeline rank the index of its shape
    posts   whether posting a call takes time
    """
    own = callable(plan.schedule)  # a function may return another schedule each time
    sizes = plan.schedule, plan.pp, plan.microbatches, plan.virtual_stages
    make = _graph.__wrapped__ if own else _graph
    return make(sizes, shapes, kinds, posts, plan if plan.tiers else None)


@lru_cache(maxsize=2)
def _rows(*sizes: Any) -> Lowered:
    """The schedule with its messages, which depends on no costs; cached."""
    return lowered(checked(make_schedule(*sizes))[1])


@lru_cache(maxsize=6)
def _graph(
    sizes: tuple, shapes: tuple[Shape, ...], kinds: tuple[int, ...], posts: bool, plan: Plan | None
) -> Graph:
    """sizes: schedule, ranks, micro-batches, stages per rank; plan: given if it offloads."""
    rows = _rows.__wrapped__ if callable(sizes[0]) else _rows
    lists = Lists(rows(*sizes), *sizes[2:], shapes, kinds)
    nodes = _Nodes(lists, posts, plan)
    source, other, weight = nodes.made()
    starts = lists.first[:-1]
    level = np.array(_levels(source.tolist(), other.tolist()))
    order, place = np.argsort(level, kind="stable")[1:], np.zeros(len(level), int)
    place[order] = np.arange(1, len(level))
    columns = lists.takes, place[nodes.left], place[nodes.over], place[nodes.end], nodes.begun
    symbol, left, over, end, begun = (np.split(column, starts[1:]) for column in columns)
    calls = [np.flatnonzero(is_call) for is_call in begun]
    return Graph(
        place[source[order]],
        place[other[order]],
        weight[order],
        (1 + np.searchsorted(level[order], np.arange(1, level.max() + 2))).tolist(),
        symbol,
        left,
        over,
        lists.actions,
        [np.stack([at, mine[at]]) for at, mine in zip(calls, end, strict=True)],
    )


class _Nodes:
    """The nodes of each instruction, by number, before they are sorted by level.

    An instruction's nodes are consecutive: the end of what it does before its call, the end of the
    call or the waits for the jobs before it, the end of posting. So are a rank's. From number n on
    follow the nodes at which ranks meet: the ends of messages and of calls of several ranks.

    first, last  an instruction's first and last node, (instructions,) as all that follow
    left, now    the nodes when the rank goes on to the next instruction, and when it came to this
                 one; ``front``: when it launches the call
    begun, end   whether it is a call or a job; the node when that is over
    free         for a rank's own call or job the node when its lane is free
    over         for a WAIT the node when what it waits for is over, else 0
    base, takes  index of the first of the rank's weights; index of the instruction's weight
    """

    def __init__(self, lists: Lists, posts: bool, plan: Plan | None) -> None:
        self.lists, self.posts = lists, posts
        works, waits, calls, jobs = (lists.op == OP[op] for op in (WORK, WAIT, CALL, JOB))
        self.predecessors, early = _jobs(lists, plan) if jobs.any() else ({}, [])
        waits[early] = False
        before, own = calls & (lists.before >= 0), calls & (lists.members == 0)
        count = works.astype(int) + waits + before + own + posts * calls
        for job, others in self.predecessors.items():
            count[job] = 1 + len(others)
        self.last = np.cumsum(count)
        self.first, self.n = self.last - count + 1, int(self.last[-1]) + 1
        self.works, self.waits, self.calls, self.before, self.own = works, waits, calls, before, own
        self.begun = calls | jobs

        clock = np.where(works | waits | (calls & posts), self.last, self.first * before)
        starts = lists.first[:-1]
        self.left = np.maximum.accumulate(clock)
        self.left[self.left < self.first[starts][lists.rank]] = 0  # a node of the rank before
        self.now = np.r_[0, self.left[:-1]]
        self.now[starts] = 0
        self.front = np.where(before, self.first, self.now)
        self.end = np.where(own, self.first + before, self.last * jobs)
        self.free = self._free(np.flatnonzero(own | jobs))
        self.base = np.cumsum([POSTING + 1, *lists.sizes])[lists.rank]
        self.takes = lists.takes + self.base
        self.met = self._meet()
        self.over = np.zeros_like(clock)
        self.over[lists.waits] = self.end[lists.of]
        self.over *= waits

    def _free(self, begun: np.ndarray) -> np.ndarray:
        lane, free = self.lists.lane[begun], np.zeros_like(self.end)
        turn = np.argsort(lane, kind="stable")
        earlier, later = begun[turn[:-1]], begun[turn[1:]]
        same = lane[turn[:-1]] == lane[turn[1:]]
        free[later[same]] = self.end[earlier[same]]
        return free

    def _meet(self) -> list[tuple[int, int, int]]:
        """Number the ends of messages, then the nodes of calls of several ranks; returns these."""
        lists, nodes = self.lists, []
        first = self.n + len(lists.sends)
        self.end[lists.sends] = self.end[lists.receives] = np.arange(self.n, first)
        for lane in lists.met:
            free: list[int] = []
            for members in lane:
                moments = [*self.front[members], *free]
                nodes += _chain(moments, self.takes[members[-1]], first + len(nodes))
                free = [first + len(nodes) - 1]
                self.end[members] = free
        return nodes

    def made(self) -> np.ndarray:
        """All nodes, the first included; the rows source, other and weight of `Graph`."""
        lists, now, front, end, takes = self.lists, self.now, self.front, self.end, self.takes
        sends, receives = lists.sends, lists.receives
        nodes = np.zeros((3, self.n + len(sends) + len(self.met)), int)

        def put(at: np.ndarray, *node: np.ndarray | int) -> None:
            for row, values in zip(nodes, node, strict=True):
                row[at] = values

        these = self.works
        put(self.first[these], now[these], now[these], takes[these])
        these = self.waits
        put(self.first[these], now[these], self.over[these], takes[these])
        these = self.before
        put(self.first[these], now[these], now[these], (lists.before + self.base)[these])
        these = self.own
        put(end[these], front[these], self.free[these], takes[these])
        put(end[sends], front[sends], front[receives], takes[sends])
        these = self.calls & self.posts
        put(self.last[these], front[these], front[these], POSTING)
        for job, others in self.predecessors.items():
            moments, at = [now[job], self.free[job], *end[others]], self.first[job]
            put(slice(at, self.last[job] + 1), *zip(*_chain(moments, takes[job], at), strict=True))
        put(slice(self.n + len(sends), None), *np.reshape(self.met, (-1, 3)).T)
        return nodes


def _chain(moments: Sequence[int], takes: int, first: int) -> list[tuple[int, int, int]]:
    """Nodes from number ``first`` on. The last one is the end of something that begins at the
    latest of these moments and has the weight ``takes``.
    """
    start, nodes = moments[0], []
    others = moments[1:] or moments
    for number, moment in enumerate(others, 1):
        nodes.append((start, moment, takes if number == len(others) else 0))
        start = first + number - 1
    return nodes


def _jobs(lists: Lists, plan: Plan | None) -> tuple[dict[int, list[int]], list[int]]:
    """({job: the jobs before it}, the WAITs whose job an earlier WAIT has shown to be over)."""
    before, over, awaited = {}, [], dict(zip(lists.waits.tolist(), lists.of.tolist(), strict=True))
    for r in range(len(lists.sizes)):
        order, begun = Order(plan), {}
        for at, item in lists.of_rank(r, (JOB, WAIT)):
            if item.op == JOB:
                begun[at] = Begun(at, None, order.predecessors(item.name))
                before[at] = [other.position for other in begun[at].predecessors]
                order.add(item.name, begun[at])
                continue
            job = begun.get(awaited[at])
            if job and job.over:
                over.append(at)
            elif job:
                job.settled()
            order.end(item.frees)
    return before, over


def _levels(source: list[int], other: list[int]) -> list[int]:
    """Per node the length of the longest chain of nodes before it: its level."""
    level, later = [0] + [-1] * (len(source) - 1), []  # later: once the node at hand is known
    for number in range(1, len(source)):
        node = number
        while True:
            x, y = level[source[node]], level[other[node]]
            if x < 0 or y < 0:
                later.append(node)
                node = source[node] if x < 0 else other[node]
                continue
            level[node] = (x if x > y else y) + 1
            if not later:
                break
            node = later.pop()
    return level
