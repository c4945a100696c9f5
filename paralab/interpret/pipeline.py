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
from paralab.interpret.listed import Lists, Shape
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
    """sizes: schedule, ranks, micro-batches, stages per rank; plan: given if it offloads.

    At first the nodes are numbered by position: three per instruction, which few need all (what it
    does before its call, itself, posting), then when messages have left their lanes, when they have
    arrived, and all else that waits for more than two moments.
    """
    rows = _rows.__wrapped__ if callable(sizes[0]) else _rows
    lists = Lists(rows(*sizes), *sizes[2:], shapes, kinds)
    works, waits, calls, jobs = (lists.op == op for op in (WORK, WAIT, CALL, JOB))
    predecessors, early = _jobs(lists, plan) if jobs.any() else ({}, [])
    waits[early] = False
    before, own = calls & (lists.before >= 0), calls & (lists.members == 0)
    n, starts, sends, receives = len(works), lists.first[:-1], lists.sends, lists.receives
    messages = 3 * n + 1 + np.arange(2 * len(sends)).reshape(2, -1)
    more = 3 * n + 1 + messages.size  # the first node of all else
    ready, itself, posted = np.arange(1, 3 * n + 1).reshape(n, 3).T
    base = np.cumsum([POSTING + 1, *lists.sizes])[lists.rank]  # first weight of the rank
    takes = lists.takes + base

    # When the rank goes on to the next instruction, came to this one, and launches its call.
    clock = np.where(works | waits, itself, np.where(calls & posts, posted, ready * before))
    left = np.maximum.accumulate(clock)
    left[left < ready[starts][lists.rank]] = 0  # a node of the rank before
    now = np.r_[0, left[:-1]]
    now[starts] = 0
    front = np.where(before, ready, now)

    # When the call or the job is over, and when the lane of a rank's own call is free.
    end, free = itself * own, np.zeros(n, int)
    turn = np.flatnonzero(own)
    turn = turn[np.argsort(lists.lane[turn], kind="stable")]
    same = lists.lane[turn[1:]] == lists.lane[turn[:-1]]
    free[turn[1:][same]] = end[turn[:-1][same]]
    end[sends], end[receives] = messages
    chained: list[tuple[int, int, int]] = []
    free_of: dict[int, int] = {}

    def chain(lane: int, moments: Sequence[int], takes: int) -> int:
        """Nodes of which the last is the end of something on a lane that begins at the latest of
        these moments and has the weight ``takes``. Returns its number.
        """
        start = free_of.get(lane, 0)
        for number, moment in enumerate(moments, 1):
            chained.append((start, moment, takes if number == len(moments) else 0))
            start = more + len(chained) - 1
        free_of[lane] = start
        return start

    for (lane, _), members in lists.met:
        end[members] = chain(lane, front[members], takes[members[-1]])
    for job, others in predecessors.items():
        end[job] = chain(lists.lane[job], [now[job], *end[others]], takes[job])
    over = np.zeros(n, int)  # when that is over which a WAIT is for
    over[lists.waits] = end[lists.of]
    over *= waits

    nodes = np.full((3, more + len(chained)), -1)
    nodes[:, 0] = 0
    works |= waits
    posting = calls & posts
    for at, *node in (
        (itself[works], now[works], over[works], takes[works]),
        (ready[before], now[before], 0, (lists.before + base)[before]),
        (itself[own], front[own], free[own], takes[own]),
        (posted[posting], front[posting], 0, POSTING),
        (end[sends], front[sends], front[receives], takes[sends]),
        (end[receives], end[sends], 0, takes[receives]),
        (slice(more, None), *np.reshape(chained, (-1, 3)).T),
    ):
        for row, values in zip(nodes, node, strict=True):
            row[at] = values
    # From here on without gaps, because most of the time goes into a look at each number.
    made = np.flatnonzero(nodes[0] >= 0)
    number = np.zeros(nodes.shape[1], int)
    number[made] = np.arange(len(made))
    (source, other), weight = number[nodes[:2, made]], nodes[2, made]
    level = np.array(_levels(source.tolist(), other.tolist()))
    order, place = np.argsort(level, kind="stable")[1:], np.zeros(len(level), int)
    place[order] = np.arange(1, len(level))
    left, over, end = place[number[np.stack([left, over, end])]]
    columns = lists.takes, left, over, end, calls | jobs
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


def _jobs(lists: Lists, plan: Plan | None) -> tuple[dict[int, list[int]], list[int]]:
    """({job: the jobs before it}, the WAITs whose job an earlier WAIT has shown to be over)."""
    before, over, awaited = {}, [], dict(zip(lists.waits.tolist(), lists.of.tolist(), strict=True))
    orders, begun = [Order(plan) for _ in lists.sizes], {}
    for at in np.flatnonzero((lists.op == JOB) | (lists.op == WAIT)).tolist():
        item, order = lists.items[lists.at[at]], orders[lists.rank[at]]
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
    for node in range(1, len(source)):
        while level[node] < 0:
            x, y = level[source[node]], level[other[node]]
            if x < 0 or y < 0:
                later.append(node)
                node = source[node] if x < 0 else other[node]
                continue
            level[node] = (x if x > y else y) + 1
            node = later.pop() if later else 0
    return level
