"""When everything in a deep pipeline happens: the longest paths through its lists, found once.

Which moment follows from which does not depend on the clock, but on the schedule and on what every
action consists of. So the lists of all ranks are walked once (walk.py), where a moment is the node
of a graph: the later of two others, and what something takes after it. It is evaluated for any
costs, a comparison and a sum per node: a slider that moves anything but the schedule costs 65,000
actions 50 ms. That this is what time.py says of the program as a whole is tested.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from paralab.interpret.jobs import Order
from paralab.interpret.walk import CALL, WAIT, Item, Rank, Walk
from paralab.parallel.lowering import lower
from paralab.parallel.schedules import Action
from paralab.programs.fold import END, FEW, LIKE_ALL
from paralab.programs.instructions import RECEIVE, SEND
from paralab.spec import Plan
from paralab.spec.forms import make_schedule
from paralab.theory.order import CODE

# What stands between actions: messages, and WAITs for those that were sent. The WAIT for an
# ARRIVAL, of what was received, stands inside an action.
SENT, ARRIVAL = "SENT", "ARRIVAL"
WAYS = (SEND, RECEIVE, SENT, ARRIVAL)
NARROW = 8  # nodes on a level: of fewer, they are gone through one by one
POSTING = 1  # the weight of posting a call; number 0 is nothing, and behind come the ranks'

Shape = tuple[tuple[Any, tuple[Item, ...]], ...]  # what a kind of rank does in its actions


def way(op: str, state: str, chunk: int, v: int) -> int:
    """The number in a rank's table of one of `WAYS`: of "x" or "g", of one of its v stages."""
    return (2 * WAYS.index(op) + (state == "g")) * v + chunk


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
def _rows(*sizes: Any) -> list[list[Any]]:
    """What every rank does: the same, whatever its actions consist of."""
    return lower(make_schedule(*sizes))


@lru_cache(maxsize=6)
def _graph(
    sizes: tuple, shapes: tuple[Shape, ...], kinds: tuple[int, ...], posts: bool, plan: Plan | None
) -> Graph:
    """sizes: schedule, ranks, micro-batches, stages of a rank; plan: of one that offloads."""
    walk, base, lists, ranks = _Nodes(POSTING * posts), POSTING + 1, [], []
    rows = _rows.__wrapped__ if callable(sizes[0]) else _rows
    for r, row in enumerate(rows(*sizes)):
        lists.append(_List(r, *sizes[1:], base, dict(shapes[kinds[r]])))
        ranks.append(Rank(walk, lists[r].items(row), Order(plan)))
        base += lists[r].size
    walk.go(ranks)
    over = []
    for rank in ranks:
        over.append(np.zeros(len(rank.left), int))
        over[-1][list(rank.waits)] = [node for _, node in rank.waits.values()]
    order, place, edges = walk.levels()
    calls = [
        np.array([[*rank.calls], [end for _, end in rank.calls.values()]], int) for rank in ranks
    ]
    return Graph(
        *(place[some][order] for some in (walk.one, walk.other)),
        np.array(walk.added)[order],
        edges,
        [np.array(mine.symbol) for mine in lists],
        [place[rank.left] for rank in ranks],
        [place[some] for some in over],
        [np.array(mine.actions).reshape(-1, 5).T for mine in lists],
        [np.stack([at, place[node]]) for at, node in calls],
    )


class _Nodes(Walk):
    """Moments are nodes, and what something takes is the number of a weight."""

    queues = False  # a sender has waited for the message before
    origin = 0

    def __init__(self, posting: int) -> None:
        super().__init__(posting)
        self.one, self.other, self.added = array("i"), array("i"), array("i")

    def levels(self) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """The nodes but the first, level by level; where each stands then; and `Graph.edges`."""
        level = [0]
        for a, b in zip(self.one, self.other, strict=True):
            x, y = level[a], level[b]
            level.append((x if x > y else y) + 1)
        order, place = np.argsort(level, kind="stable"), np.empty(len(level), int)
        place[order] = np.arange(len(level))
        edges = np.searchsorted(np.array(level)[order], np.arange(1, max(level) + 2))
        return order[1:] - 1, place, edges.tolist()

    def later(self, one: int, other: int, takes: int) -> int:
        self.one.append(one)
        self.other.append(other)
        self.added.append(takes)
        return len(self.one)

    def lasts(self, moments: Sequence[int], takes: int) -> tuple[int, int]:
        start = moments[0]
        for other in moments[1:-1]:
            start = self.later(start, other, 0)
        return start, self.later(start, moments[-1], takes)


class _List:
    """A rank's list, as it is walked.

    base     the number of its first weight; ``size``: how many it has
    symbol, actions  see `Graph`
    """

    def __init__(self, r: int, pp: int, m: int, v: int, base: int, shape: dict) -> None:
        self.r, self.pp, self.m, self.v, self.base = r, pp, m, v, base
        every = [item for items in shape.values() for item in items]
        self.size = 1 + max(max(item.takes, item.before or 0) for item in every)
        self.turns = {
            key: [(item.takes, self._weighed(item)) for item in items]
            for key, items in shape.items()
        }
        self.symbol, self.actions = array("i"), array("i")

    def _weighed(self, item: Item) -> Item:
        before = None if item.before is None else item.before + self.base
        return item._replace(takes=item.takes + self.base, before=before)

    def items(self, row: Sequence[Any]) -> Iterator[Item]:
        symbol, count = self.symbol, {}
        known: dict[tuple, tuple[Item, ...]] = {}  # of messages alike
        sent: dict[Any, Item] = {}  # name -> the WAIT for the last message of this name

        for step in row:
            if type(step) is Action:
                stage, letter, k = step
                done = count[step[:2]] = count.get(step[:2], -1) + 1
                few = FEW - 1 if done == self.m - 1 else min(done, LIKE_ALL)
                key = letter, stage // self.pp, few
                self.actions.extend((CODE[letter], *key[1:], k, len(symbol)))
                needs = "F" if letter == "F" else "B", stage, k
                for at, item in self.turns[key]:
                    symbol.append(at)
                    yield Item(WAIT, item.takes, needs) if item.name == ARRIVAL else item
                continue
            op, what, stage, k, _ = step
            if (op, what, stage) not in known:
                known[op, what, stage] = self._message(*step)
            call, *waits = known[op, what, stage]
            if op == "recv":
                symbol.append(call.takes - self.base)
                yield Item(CALL, call.takes, (what, stage, k), call.lane, call.members)
                continue
            if call.name in sent:
                symbol.append(sent[call.name].takes - self.base)
                yield sent[call.name]
            [sent[call.name]] = waits
            symbol.append(call.takes - self.base)
            yield call
        for at, item in self.turns[END]:
            own = sent[item.name] if item.op == WAIT and item.name[0] == SENT else item
            symbol.append(own.takes - self.base if own is not item else at)
            yield own

    def _message(self, op: str, what: str, stage: int, k: int, peer: int) -> tuple[Item, ...]:
        """The call; of what is sent, the WAIT for it too: one per direction."""
        of = "x" if what == "F" else "g", stage // self.pp, self.v
        if op == "recv":
            call = Item(CALL, self.base + way(RECEIVE, *of), (what, stage, k), (peer, self.r), 2)
            return (call,)
        name = SENT, (peer - self.r) % self.pp
        call = Item(CALL, self.base + way(SEND, *of), name, (self.r, peer), 2)
        return call, Item(WAIT, self.base + way(SENT, *of), name)
