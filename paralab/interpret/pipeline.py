"""When the actions of a deep pipeline happen: the longest paths through its schedule, found once.

Which moment follows from which does not depend on the clock, but on the schedule and on what every
action consists of. So the graph is made once, by going through the lists of all ranks as time.py
does, and is evaluated for any costs, a comparison and a sum per node:

    compute   when the one before it is over
    a WAIT    when the one before it is over and what it waits for
    a call    when it is begun and its lane is free
    a message when it is made, its receive is posted, and the one before it on its way is over, for
              which its sender waits

A slider that moves anything but the schedule costs 65,000 actions 30 ms. That this is what time.py
says of the program as a whole is tested.
"""

from __future__ import annotations

from array import array
from collections import deque
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from paralab.parallel.lowering import lower
from paralab.parallel.schedules import Action
from paralab.programs.fold import FEW, LIKE_ALL, Key
from paralab.spec import Plan
from paralab.spec.forms import make_schedule

LETTERS = "FBIW"
NARROW = 8  # nodes on a level: of fewer, they are gone through one by one
MESSAGE = "message"  # what an action waits for of another rank
# Weights: of posting a call; from here on of a rank's messages, two for each of its v stages, and
# behind them of the waits for those that it sent.
POSTING, WAYS = 1, 2


class Item(NamedTuple):
    """A node of an action, and what the rank computes behind it at once.

    waits    for the call of this name, or `MESSAGE`; None: for nothing
    lane     whose call is begun here, by this name: ``call``
    works    whether anything is computed
    """

    waits: Any = None
    lane: str = ""
    call: Any = None
    works: bool = False


# Of a kind of rank: what its actions consist of. As pairs it can be hashed.
Shape = tuple[tuple[Key, tuple[Item, ...]], ...]


class Graph(NamedTuple):
    """Node i > 0 is the later of two others plus a weight; node 0 is the start.

    level            per node how many come before it on the longest way there
    one, other, added  of every node but the first, those of a level after those of the one before:
                     where among these the two others stand, and the number of the weight
    base        per rank the number of its first weight
    symbol      per kind of rank {key: number of its action's first weight, from ``base`` on}
    rank, letter, chunk, few, microbatch  of every action, rank after rank; letter: in LETTERS  (n,)
    begin, message   nodes when its rank comes to it, and when its message is there, or 0       (n,)
    ahead            calls posted just before, in its first compute's box                       (n,)
    opens            the weight of its first compute                                            (n,)
    first, last      nodes behind its first and its last compute                                (n,)
    works            per rank the weights of all compute, and the nodes behind it          (2, ...)
    sender, receiver, takes, left  of every message: ranks, weight, the node when it is over    (t,)
    caller, asks, done  of every call in an action: rank, weight, the node when it is over      (c,)
    steps            per rank what its list consists of: numbers of actions from 0 on, of messages
                     and WAITs for them as `way` has them
    ends             per rank the node behind its last action
    sent             per rank, of its last messages, the node when one is over, and the weight of
                     the wait for it
    """

    level: np.ndarray
    one: np.ndarray
    other: np.ndarray
    added: np.ndarray
    base: np.ndarray
    symbol: list[dict[Key, int]]
    rank: np.ndarray
    letter: np.ndarray
    chunk: np.ndarray
    few: np.ndarray
    microbatch: np.ndarray
    begin: np.ndarray
    message: np.ndarray
    ahead: np.ndarray
    opens: np.ndarray
    first: np.ndarray
    last: np.ndarray
    sender: np.ndarray
    receiver: np.ndarray
    takes: np.ndarray
    left: np.ndarray
    caller: np.ndarray
    asks: np.ndarray
    done: np.ndarray
    works: list[np.ndarray]
    steps: list[np.ndarray]
    ends: np.ndarray
    sent: list[list[tuple[int, int]]]

    def moments(self, weights: np.ndarray) -> np.ndarray:
        """Of every node, in seconds: level by level, where these are wide."""
        order, more = np.argsort(self.level, kind="stable"), weights[self.added]
        found, top = np.zeros(len(order)), int(self.level[order[-1]])
        if len(order) < NARROW * top:
            made = [0.0]
            columns = zip(self.one.tolist(), self.other.tolist(), more.tolist(), strict=True)
            for a, b, seconds in columns:
                x, y = made[a], made[b]
                made.append((x if x > y else y) + seconds)
            found[order] = made
            return found
        now = np.zeros(len(order))
        edges = np.searchsorted(self.level[order], np.arange(1, top + 2)).tolist()
        for low, high in pairwise(edges):
            here = slice(low - 1, high - 1)
            latest = now[self.one[here]]
            np.maximum(latest, now[self.other[here]], out=latest)
            latest += more[here]
            now[low:high] = latest
        found[order] = now
        return found


def number(letter: str, chunk: int, few: int, v: int) -> int:
    """Of an action among those of a rank with v stages."""
    return (LETTERS.index(letter) * v + chunk) * FEW + few


def way(op: str, state: str, chunk: int, v: int) -> int:
    """Of a message, or of the WAIT for one, among a rank's steps: behind the actions."""
    kind = ("SEND", "RECEIVE", "WAIT").index(op) * 2 + (state == "g")
    return len(LETTERS) * v * FEW + kind * v + chunk


def graph(plan: Plan, kind: tuple[int, ...], shapes: tuple[Shape, ...], *, posts: bool) -> Graph:
    """Of a plan's schedule.

    kind, shapes  per pipeline rank the number of its shape
    posts         whether posting a call takes time
    """
    make = _graph if callable(plan.schedule) else _graph_once  # an own one may change its mind
    return make(plan.schedule, plan.pp, plan.microbatches, plan.virtual_stages, kind, shapes, posts)


def _graph(
    schedule: Any, pp: int, m: int, v: int, kind: tuple[int, ...], shapes: tuple, posts: bool
) -> Graph:
    rows = lower(make_schedule(schedule, pp, m, v))
    return _Writer(rows, m, v, kind, [dict(shape) for shape in shapes], posts).graph()


_graph_once = lru_cache(maxsize=6)(_graph)


class _Writer:
    """Goes through the lists of all ranks, each as far as it can."""

    def __init__(
        self, rows: list, m: int, v: int, kind: tuple[int, ...], shapes: list[dict], posts: bool
    ) -> None:
        self.rows, self.m, self.v, self.posts = rows, m, v, posts
        self.pp = n = len(rows)
        self.one, self.other, self.added = array("i"), array("i"), array("i")
        self.level = array("i", [0])
        self.symbol: list[dict[Key, int]] = []
        counts = []
        for shape in shapes:
            at, here = WAYS + 4 * v, {}
            for key, items in shape.items():
                here[key], at = at, at + len(items)
            self.symbol.append(here)
            counts.append(at)
        self.kind, self.shapes = kind, shapes
        self.base = np.concatenate([[0], np.cumsum([counts[k] for k in kind])])
        self.actions: list[list[tuple]] = [[] for _ in rows]
        self.steps = [array("h") for _ in rows]
        self.works = [array("i") for _ in rows]
        self.messages: list[tuple] = []
        self.calls: list[tuple] = []
        self.there: dict[tuple, int] = {}  # message -> the node when it is over
        self.half: dict[tuple, tuple] = {}  # one end of which is posted -> (node, weight)
        # peer -> (last message, the step and the weight of the wait for it)
        self.sent: list[dict[int, tuple]] = [{} for _ in rows]
        self.lanes: list[dict[str, int]] = [{} for _ in rows]
        self.begun: list[dict[Any, int]] = [{} for _ in rows]
        self.count: list[dict] = [{} for _ in rows]
        self.posted = [0] * n  # calls, since it has computed or waited
        self.clock, self.at, self.todo = [0] * n, [0] * n, deque(range(n))
        self.waiting: dict[tuple, int] = {}  # message -> the rank that waits for it

    def graph(self) -> Graph:
        while self.todo:
            self.go(self.todo.popleft())
        level = np.frombuffer(self.level, np.int32)
        order = np.argsort(level, kind="stable")
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        one, other, added = (
            np.frombuffer(some, np.int32)[order[1:] - 1]
            for some in (self.one, self.other, self.added)
        )
        rank = np.repeat(np.arange(self.pp), [len(mine) for mine in self.actions])
        columns = np.array([action for mine in self.actions for action in mine]).T
        messages = np.array(self.messages, int).reshape(-1, 4).T
        calls = np.array(self.calls, int).reshape(-1, 3).T
        sent = [
            [(self.there[message], paid) for message, _, paid in mine.values()]
            for mine in self.sent
        ]
        steps = [np.frombuffer(mine, np.int16) for mine in self.steps]
        works = [np.frombuffer(mine, np.int32).reshape(-1, 2).T for mine in self.works]
        return Graph(
            level,
            place[one],
            place[other],
            added,
            self.base,
            self.symbol,
            rank,
            *columns,
            *messages,
            *calls,
            works,
            steps,
            np.array(self.clock),
            sent,
        )

    def node(self, one: int, other: int, added: int) -> int:
        self.one.append(one)
        self.other.append(other)
        self.added.append(added)
        level = self.level
        a, b = level[one], level[other]
        level.append((a if a > b else b) + 1)
        return len(self.one)

    def go(self, r: int) -> None:
        """As far as rank ``r`` comes."""
        row, base, steps, v, pp = self.rows[r], int(self.base[r]), self.steps[r], self.v, self.pp
        for position in range(self.at[r], len(row)):
            step = row[position]
            if type(step) is Action:
                stage, letter, k = step
                chunk, message = stage // pp, 0
                if 0 < stage + (letter != "F") < pp * v and letter != "W":
                    needs = "F" if letter == "F" else "B", stage, k
                    message = self.there.get(needs, -1)
                    if message < 0:
                        self.waiting[needs] = r
                        self.at[r] = position
                        return
                done = self.count[r][letter, chunk] = self.count[r].get((letter, chunk), -1) + 1
                few = FEW - 1 if done == self.m - 1 else min(done, LIKE_ALL)
                steps.append(number(letter, chunk, few, v))
                what = LETTERS.index(letter), chunk, few, k, self.clock[r], message
                items = self.shapes[self.kind[r]][letter, chunk, few]
                begins = next(item for item in items if not item.lane)
                ahead = self.posted[r] if begins == Item(works=True) else 0
                ends = self.action(r, (letter, chunk, few), message, base)
                self.actions[r].append((*what, ahead, *ends))
                ends = next(at for at, item in enumerate(reversed(items)) if not item.lane)
                self.posted[r] = ends
                continue
            op, what, stage, k, peer = step
            chunk, state = stage // pp, "x" if what == "F" else "g"
            if op == "send":
                last, its, paid = self.sent[r].get(peer, (None, 0, 0))
                if last is not None:
                    end = self.there.get(last)
                    if end is None:
                        self.waiting[last] = r
                        self.at[r] = position
                        return
                    steps.append(its)
                    self.clock[r] = self.node(self.clock[r], end, paid)
                    self.posted[r] = 0
                key, takes = (what, step.other_stage, k), base + WAYS + 2 * chunk + (state == "g")
                self.sent[r][peer] = key, way("WAIT", state, chunk, v), takes + 2 * v
                self.post(key, r, takes, r, peer)
                steps.append(way("SEND", state, chunk, v))
            else:
                self.post((what, stage, k), r, -1, peer, r)
                steps.append(way("RECEIVE", state, chunk, v))
            if self.posts:
                self.clock[r] = self.node(self.clock[r], self.clock[r], base + POSTING)
            self.posted[r] += 1
        self.at[r] = len(row)

    def action(self, r: int, key: Key, message: int, base: int) -> tuple[int, int, int]:
        """Returns the first compute's weight, and the nodes behind that and behind the last."""
        clock, kind, works = self.clock[r], self.kind[r], self.works[r]
        lanes, begun, node = self.lanes[r], self.begun[r], self.node
        opens = first = last = -1
        symbol = base + self.symbol[kind][key]
        for item in self.shapes[kind][key]:
            if item.lane:
                end = node(clock, lanes.get(item.lane, 0), symbol)
                lanes[item.lane] = begun[item.call] = end
                self.calls.append((r, symbol, end))
                if self.posts:
                    clock = node(clock, clock, base + POSTING)
            else:
                until = clock
                if item.waits is not None:
                    until = message if item.waits == MESSAGE else begun.pop(item.waits)
                clock = node(clock, until, symbol)
                if item.works:
                    if first < 0:
                        opens, first = symbol, clock
                    last = clock
                    works.append(symbol)
                    works.append(clock)
            symbol += 1
        self.clock[r] = clock
        return opens, first, last

    def post(self, key: tuple, r: int, takes: int, sender: int, receiver: int) -> None:
        """An end of a message is posted by rank ``r``; with the second one it goes."""
        first = self.half.pop(key, None)
        if first is None:
            self.half[key] = self.clock[r], takes
            return
        takes = max(takes, first[1])
        end = self.there[key] = self.node(self.clock[r], first[0], takes)
        self.messages.append((sender, receiver, takes, end))
        if key in self.waiting:
            self.todo.append(self.waiting.pop(key))
