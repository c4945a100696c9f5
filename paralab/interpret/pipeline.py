"""When everything in a deep pipeline happens: the longest paths through its lists, found once.

Which moment follows from which does not depend on the clock, but on the schedule and on what every
action consists of. So the moments of all ranks are the nodes of a graph, by the rules of walk.py:
each is the later of two others, and what something takes after it. NumPy lays all lists out at
once and numbers their nodes: of 65,000 actions in 0.3 s. The graph is evaluated for any costs, a
comparison and a sum per node, in 12 ms: a slider that moves nothing of this asks for no more of it.
That this is what time.py says of the program as a whole is tested.
"""

from __future__ import annotations

from collections import defaultdict
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

NARROW = 8  # nodes on a level: of fewer, they are gone through one by one
POSTING = 1  # the weight of posting a call; number 0 is nothing, and behind come the ranks'


class Graph(NamedTuple):
    """Node i > 0 is the later of two others plus a weight; node 0 is the start.

    one, other, added   of every node but the first: the two, and the number of the weight; those
             of a level after those of the one before, which no node of their own comes before
    edges    where the levels begin, and at last how many nodes there are
    symbol, left, over  per rank of every instruction its number in the rank's table, the node
             behind it, and of a WAIT the node of what it waits for, or 0
    actions  per rank letter, chunk, which of FEW, micro-batch and first instruction of each
    calls    per rank the position of every call, message and job, and the node when it is over
    """

    one: np.ndarray
    other: np.ndarray
    added: np.ndarray
    edges: list[int]
    symbol: list[np.ndarray]
    left: list[np.ndarray]
    over: list[np.ndarray]
    actions: list[np.ndarray]
    calls: list[np.ndarray]

    def moments(self, weights: np.ndarray) -> np.ndarray:
        """Of every node, in seconds."""
        more = weights[self.added]
        if len(more) < NARROW * len(self.edges):  # one by one
            made = [0.0]
            columns = zip(self.one.tolist(), self.other.tolist(), more.tolist(), strict=True)
            for a, b, seconds in columns:
                x, y = made[a], made[b]
                made.append((x if x > y else y) + seconds)
            return np.array(made)
        now = np.zeros(len(more) + 1)
        for low, high in pairwise(self.edges):
            here = slice(low - 1, high - 1)
            now[low:high] = np.maximum(now[self.one[here]], now[self.other[here]]) + more[here]
        return now


def graph(plan: Plan, shapes: tuple[Shape, ...], kinds: tuple[int, ...], posts: bool) -> Graph:
    """Of a plan's schedule.

    shapes, kinds  per pipeline rank the number of its shape: `Item`s whose ``takes`` and ``before``
                   are numbers in the rank's table
    posts          whether posting a call takes time
    """
    own = callable(plan.schedule)  # it may change its mind
    sizes = plan.schedule, plan.pp, plan.microbatches, plan.virtual_stages
    make = _graph.__wrapped__ if own else _graph
    return make(sizes, shapes, kinds, posts, plan if plan.tiers else None)


@lru_cache(maxsize=2)
def _rows(*sizes: Any) -> Lowered:
    """What every rank does: the same, whatever its actions consist of."""
    return lowered(checked(make_schedule(*sizes))[1])


@lru_cache(maxsize=6)
def _graph(
    sizes: tuple, shapes: tuple[Shape, ...], kinds: tuple[int, ...], posts: bool, plan: Plan | None
) -> Graph:
    """sizes: schedule, ranks, micro-batches, stages of a rank; plan: of one that offloads."""
    rows = _rows.__wrapped__ if callable(sizes[0]) else _rows
    lists = Lists(rows(*sizes), *sizes[2:], shapes, kinds)
    nodes = _Nodes(lists, posts, plan)
    one, other, added = nodes.made()
    starts = lists.first[:-1]
    level = np.array(_levels(one.tolist(), other.tolist(), nodes.first[starts].tolist(), nodes.n))
    order, place = np.argsort(level, kind="stable")[1:], np.zeros(len(level), int)
    place[order] = np.arange(1, len(level))
    symbol, left, over, end, begun = (
        np.split(of, starts[1:])
        for of in (lists.takes, place[nodes.left], place[nodes.over], place[nodes.end], nodes.begun)
    )
    calls = [np.flatnonzero(some) for some in begun]
    return Graph(
        place[one[order]],
        place[other[order]],
        added[order],
        (1 + np.searchsorted(level[order], np.arange(1, level.max() + 2))).tolist(),
        symbol,
        left,
        over,
        lists.actions,
        [np.stack([at, mine[at]]) for at, mine in zip(calls, end, strict=True)],
    )


class _Nodes:
    """Where in the graph each instruction has its moments. Those of an instruction follow one
    another: what comes before its call, the call or the jobs that it comes behind, the posting.
    Ranks follow one another too; behind them, from number n on, come the nodes at which they meet.

    first, last  an instruction's nodes
    left, now    behind it, and in front of it; ``front``: of its call                      (n,)
    begun, end   whether it is a call or a job, and when that is over
    free         when the lane of a rank's own call or job is
    over         of a WAIT when what it is for is, or 0
    base, takes  where in all weights the rank's begin, and which one the instruction has
    """

    def __init__(self, lists: Lists, posts: bool, plan: Plan | None) -> None:
        self.lists, self.posts = lists, posts
        works, waits, calls, jobs = (lists.op == OP[op] for op in (WORK, WAIT, CALL, JOB))
        self.behind, early = _jobs(lists, plan) if jobs.any() else ({}, [])
        waits[early] = False
        before, own = calls & (lists.before >= 0), calls & (lists.members == 0)
        count = works.astype(int) + waits + before + own + posts * calls
        for job, others in self.behind.items():
            count[job] = 1 + len(others)
        self.last = np.cumsum(count)
        self.first, self.n = self.last - count + 1, int(self.last[-1]) + 1
        self.works, self.waits, self.calls, self.before, self.own = works, waits, calls, before, own
        self.begun = calls | jobs

        clock = np.where(works | waits | (calls & posts), self.last, self.first * before)
        starts = lists.first[:-1]
        self.left = np.maximum.accumulate(clock)
        self.left[self.left < self.first[starts][lists.rank]] = 0  # of the rank before
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
        """The nodes of messages have their numbers now, and those of calls of several ranks, behind
        them, are these.
        """
        lists, found = self.lists, []
        behind = self.n + len(lists.sends)
        self.end[lists.sends] = self.end[lists.receives] = np.arange(self.n, behind)
        for lane in lists.met:
            free: list[int] = []
            for members in lane:
                moments = [*self.front[members], *free]
                found += _chain(moments, self.takes[members[-1]], behind + len(found))
                free = [behind + len(found) - 1]
                self.end[members] = free
        return found

    def made(self) -> np.ndarray:
        """All nodes, as in `Graph`, with the first: one, other, added."""
        lists, now, front, end, takes = self.lists, self.now, self.front, self.end, self.takes
        sends, receives = lists.sends, lists.receives
        found = np.zeros((3, self.n + len(sends) + len(self.met)), int)

        def put(at: np.ndarray, *node: np.ndarray | int) -> None:
            for column, some in zip(found, node, strict=True):
                column[at] = some

        some = self.works
        put(self.first[some], now[some], now[some], takes[some])
        some = self.waits
        put(self.first[some], now[some], self.over[some], takes[some])
        some = self.before
        put(self.first[some], now[some], now[some], (lists.before + self.base)[some])
        some = self.own
        put(end[some], front[some], self.free[some], takes[some])
        put(end[sends], front[sends], front[receives], takes[sends])
        some = self.calls & self.posts
        put(self.last[some], front[some], front[some], POSTING)
        for job, others in self.behind.items():
            moments, at = [now[job], self.free[job], *end[others]], self.first[job]
            put(slice(at, self.last[job] + 1), *zip(*_chain(moments, takes[job], at), strict=True))
        put(slice(self.n + len(sends), None), *np.reshape(self.met, (-1, 3)).T)
        return found


def _chain(moments: Sequence[int], takes: int, first: int) -> list[tuple[int, int, int]]:
    """Nodes from number ``first`` on: the last one is when something is over that begins at the
    latest of these moments.
    """
    start, found = moments[0], []
    others = moments[1:] or moments
    for number, moment in enumerate(others, 1):
        found.append((start, moment, takes if number == len(others) else 0))
        start = first + number - 1
    return found


def _jobs(lists: Lists, plan: Plan | None) -> tuple[dict[int, list[int]], list[int]]:
    """Of every job those that it comes behind; and the WAITs for what is over by then."""
    behind, over, of = {}, [], dict(zip(lists.waits.tolist(), lists.of.tolist(), strict=True))
    for r in range(len(lists.sizes)):
        order, made = Order(plan), {}
        for at, item in lists.of_rank(r, (JOB, WAIT)):
            if item.op == JOB:
                made[at] = Begun(at, None, order.behind(item.name))
                behind[at] = [other.position for other in made[at].behind]
                order.add(item.name, made[at])
                continue
            job = made.get(of[at])
            if job and job.over:
                over.append(at)
            elif job:
                job.settled()
            order.end(item.frees)
    return behind, over


def _levels(one: list[int], other: list[int], begins: list[int], n: int) -> list[int]:
    """How many nodes come before each at least, one behind the other.

    begins  where the ranks' nodes begin, each after those that it needs, but for those from number
            ``n`` on, at which ranks meet
    """
    level = [0] + [-1] * (len(one) - 1)
    todo, waiting = [*pairwise([*begins, n])], defaultdict(list)

    def lacks(node: int) -> int:
        """The node of a rank that is to be known before; 0 if its level is known now."""
        rest = []
        while node >= n:
            x, y = level[one[node]], level[other[node]]
            if x < 0 or y < 0:
                rest.append(node)
                node = one[node] if x < 0 else other[node]
                continue
            level[node] = (x if x > y else y) + 1
            if not rest:
                return 0
            node = rest.pop()
        return node

    while todo:
        at, stop = todo.pop()
        for node in range(at, stop):
            than = other[node]
            y = level[than]
            if y < 0:
                if lack := lacks(than):
                    waiting[lack].append((node, stop))
                    break
                y = level[than]
            x = level[one[node]]
            level[node] = (x if x > y else y) + 1
            if node in waiting:
                todo += waiting.pop(node)
    for node in range(n, len(one)):  # what no rank waits for
        if level[node] < 0:
            lacks(node)
    return level
