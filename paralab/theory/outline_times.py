"""When the actions of a pipeline in outline happen, and the messages between them.

A rank works through its list; an action starts when the one before it has ended and what it needs
has come. A message leaves when it is made, each direction of a pair of ranks is one wire, and a
receive is posted where the lowered lists have it (parallel/lowering.py): long messages wait for
all three. See theory/outline.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from paralab.parallel.lowering import posted_after
from paralab.parallel.schedules import relay
from paralab.spec import Cluster, ModelSpec, Plan
from paralab.theory import memory
from paralab.theory.order import CODE, F, Order, W, order_of
from paralab.theory.outline_program import Program

EXACT = 10_000  # actions up to which it is worked out when each receive is posted


class Timetable(NamedTuple):
    """When every action happens, rank after rank in the order of their lists; n of them, t
    messages.

    order       the actions; of a relay with parts in place of stages
    number      the how-manieth of its stage and kind in its rank's list              (n,)
    start, end  seconds from the start of the step                                    (n,)
    cost, copies  seconds of its work, and of putting gradients together in it        (n,)
    more        seconds of its cost that messages before it add, at its start         (n,)
    maker, user  actions at both ends of every message                                (t,)
    left, came  when it starts and ends                                               (t,)
    """

    order: Order
    number: np.ndarray
    start: np.ndarray
    end: np.ndarray
    cost: np.ndarray
    copies: np.ndarray
    more: np.ndarray
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
        return order_of(plan)
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
    plan: Plan, found: Order, made: Sequence[Program], message: Callable[[int, int], float],
    cluster: Cluster,
) -> Timetable:  # fmt: skip
    """When everything happens. message: seconds from one pipeline rank to another."""
    m, few = plan.microbatches, made[0].count
    count = numbers(found)
    number = stands_for(count, m, few)
    units = found.stages if plan.relays else plan.virtual_stages
    table = np.zeros((found.ranks, units, 4, few, 4))
    for rank, program in enumerate(made):
        for (unit, kind, at), part in program.slices.items():
            table[rank, unit, CODE[kind], at] = part.seconds, part.cost, part.copies, part.waits
    unit = found.stage if plan.relays else found.stage // plan.pp
    seconds, cost, copies, waits = table[found.rank, unit, found.kind, number].T
    user = np.flatnonzero(found.source >= 0)
    maker = found.source[user]
    away = found.rank[maker] != found.rank[user]  # what stays on its rank was made there before
    user, maker = user[away], maker[away]
    pair = found.rank[maker] * found.ranks + found.rank[user]
    row = np.lexsort((maker, pair))  # each wire in the order in which its messages are made
    user, maker, pair = user[row], maker[row], pair[row]
    kinds, wire = np.unique(pair, return_inverse=True)
    takes = np.array([message(*divmod(int(p), found.ranks)) for p in kinds])
    ahead = _posted(found, user)
    more = np.where(waits, 0.0, _overheads(found, user, maker, ahead, cluster))
    start, end, left, came = _played(found, seconds + more, user, maker, wire, takes, ahead)
    return Timetable(found, count, start, end, cost + more, copies, more, maker, user, left, came)


def _posted(found: Order, user: np.ndarray) -> np.ndarray:
    """Behind which action the receive of each message is posted; -1: before a rank's first."""
    if len(found.rank) <= EXACT:
        return posted_after(found)[user]
    return np.where(user - 2 >= found.first[found.rank[user]], user - 2, -1)


def _overheads(
    found: Order, user: np.ndarray, maker: np.ndarray, ahead: np.ndarray, cluster: Cluster
) -> np.ndarray:
    """Seconds that messages add to every action, as predict_rows.py has them: one that waits for a
    message goes on more slowly; any other has to wait until the messages before it are posted. (n,)
    """
    posts = np.zeros(len(found.rank))
    if not cluster.call_overhead and not cluster.wait_overhead:
        return posts
    sent = np.setdiff1d(maker + 1, found.first)  # what is sent behind the last is free
    np.add.at(posts, sent, 1)
    np.add.at(posts, np.where(ahead >= 0, ahead + 1, found.first[found.rank[user]]), 1)
    more = cluster.call_overhead * posts
    more[user] = cluster.wait_overhead
    return more


def _played(
    found: Order, seconds: np.ndarray, user: np.ndarray, maker: np.ndarray, wire: np.ndarray,
    takes: np.ndarray, ahead: np.ndarray,
) -> tuple[np.ndarray, ...]:  # fmt: skip
    """Starts and ends of the n actions and of the t messages, each as early as can be.

    A message waits for its maker, for the one before it on its wire, and for its receive. Wave by
    wave: of each wire the next message, of each rank the next action, if they can be known by now;
    in a deep pipeline that is much at once.
    """
    n, t = len(seconds), len(maker)
    if not t:  # one rank
        end = np.cumsum(seconds)
        return np.r_[0.0, end[:-1]], end, np.zeros(0), np.zeros(0)
    needs = np.full(n + 1, t)  # the message that an action waits for; t: none, it is always there
    needs[user] = np.arange(t)
    maker, ahead = np.r_[maker, n], np.r_[np.where(ahead >= 0, ahead, n), n]
    start, end, done = np.zeros(n + 1), np.zeros(n + 1), np.zeros(n + 1, bool)
    left, came, there = np.zeros(t + 1), np.zeros(t + 1), np.zeros(t + 1, bool)
    done[n] = there[t] = True
    due = np.searchsorted(wire, np.arange(len(takes)))
    over, free = np.r_[due[1:], t], np.zeros(len(takes))
    at, stop, now = found.first[:-1].copy(), found.first[1:], np.zeros(found.ranks)
    while True:
        wires = (done[maker[due]] & done[ahead[due]] & (due < over)).nonzero()[0]
        if len(wires):
            which = due[wires]
            goes = np.maximum(end[maker[which]], end[ahead[which]])
            left[which] = goes = np.maximum(goes, free[wires])
            came[which] = free[wires] = goes + takes[wires]
            there[which] = True
            due[wires] += 1
        ranks = (there[needs[at]] & (at < stop)).nonzero()[0]
        if len(ranks):
            which = at[ranks]
            start[which] = begun = np.maximum(now[ranks], came[needs[which]])
            end[which] = now[ranks] = begun + seconds[which]
            done[which] = True
            at[ranks] += 1
        elif not len(wires):
            return start[:n], end[:n], left[:t], came[:t]
