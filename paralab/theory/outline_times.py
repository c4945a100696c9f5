"""When the actions of a pipeline in outline happen, and the messages between them: one graph.

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
from paralab.theory.engine import longest_path
from paralab.theory.order import CODE, FREE, F, Order, W, order
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
    plan: Plan, found: Order, made: Sequence[Program], message: Callable[[int, int], float],
    cluster: Cluster,
) -> Timetable:  # fmt: skip
    """When everything happens. message: seconds from one pipeline rank to another."""
    n, m, few = len(found.rank), plan.microbatches, made[0].count
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
    away = found.rank[maker] != found.rank[user]
    near = user[~away]
    user, maker = user[away], maker[away]
    pair = found.rank[maker] * found.ranks + found.rank[user]
    row = np.lexsort((maker, pair))  # each wire in the order in which its messages are made
    user, maker, pair = user[row], maker[row], pair[row]
    kinds, inverse = np.unique(pair, return_inverse=True)
    takes = np.array([message(*divmod(int(p), found.ranks)) for p in kinds] or [0.0])
    takes = takes[inverse] if len(pair) else np.zeros(0)
    ahead = _posted(found, user)
    more = np.where(waits, 0.0, _overheads(found, user, maker, ahead, cluster))
    begin, finish = _longest(found, seconds + more, near, user, maker, pair, takes, ahead)
    return Timetable(found, count, begin[:n], finish[:n], cost + more, copies, more, maker, user,
                     begin[n:], finish[n:])  # fmt: skip


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
    sent = np.setdiff1d(maker + 1, found.first)  # what is sent behind the last is free
    np.add.at(posts, sent, 1)
    np.add.at(posts, np.where(ahead >= 0, ahead + 1, found.first[found.rank[user]]), 1)
    more = cluster.call_overhead * posts
    more[user] = cluster.wait_overhead
    return more


def _longest(
    found: Order, seconds: np.ndarray, near: np.ndarray, user: np.ndarray, maker: np.ndarray,
    pair: np.ndarray, takes: np.ndarray, ahead: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Starts and ends of the n actions and then of the messages, each as early as can be.

    A message waits for its maker, for the one before it on its wire, and for its receive.
    """
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
