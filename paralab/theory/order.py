"""What must happen before what in a pipeline: a schedule as arrays, and its graph for the engine.

Two things hold an action up. The action before it in its rank's list, because a rank does one thing
at a time, in order; and at most one action of another stage, whose result it computes with:

    F of stage s       needs  F of stage s - 1, the same micro-batch
    B or I of stage s  needs  B or I of stage s + 1
    W                  needs  its own I, which comes earlier in the same list

NumPy does it for all actions at once: about 0.5 microseconds each, so that a slider feels live.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from paralab.forms import make_schedule
from paralab.parallel.schedules import Action

if TYPE_CHECKING:
    from paralab.spec import Plan

F, B, I, W = range(4)  # noqa: E741  # the field's letters
CODE = {"F": F, "B": B, "I": I, "W": W}
FREE = 2**62  # so many are missing that it never starts


@dataclass(frozen=True, eq=False)
class Order:
    """A schedule's actions, rank after rank, in the order of the lists; n of them.

    first       where each rank's actions begin, and at last n          (ranks + 1,)
    rank, stage, kind (as in CODE), microbatch                           (n,)
    source      the action of a neighbour stage that each one needs, -1: none   (n,)
    """

    ranks: int
    stages: int
    microbatches: int
    first: np.ndarray
    rank: np.ndarray
    stage: np.ndarray
    kind: np.ndarray
    microbatch: np.ndarray
    source: np.ndarray

    def action(self, node: int) -> Action:
        return Action(int(self.stage[node]), "FBIW"[self.kind[node]], int(self.microbatch[node]))


def order(
    schedule: Sequence[Sequence[Action]], stages: int | None, microbatches: int | None
) -> Order | None:
    """The arrays of a schedule in which every action is there once and each list makes sense.

    Numbers of stages and micro-batches that are None are read off the lists. Returns None if
    something is wrong; theory/schedule_check.py then says what. A schedule with an order may still
    deadlock.
    """
    ranks, flat = len(schedule), list(chain.from_iterable(schedule))
    n = len(flat)
    if not n:
        return None
    stage, kind, microbatch = zip(*flat, strict=True)
    try:
        kind = np.fromiter(map(CODE.get, kind, repeat(-1)), np.int8, n)
        stage, microbatch = np.array(stage), np.array(microbatch)
    except (TypeError, ValueError, OverflowError):
        return None
    if stage.dtype.kind != "i" or microbatch.dtype.kind != "i":
        return None
    if stages is None:
        stages = -(-(int(stage.max()) + 1) // ranks) * ranks
    if microbatches is None:
        microbatches = int(microbatch.max()) + 1
    if stages * microbatches > n:  # surely some are missing; and no tables of any size
        return None
    lengths = [len(row) for row in schedule]
    rank = np.repeat(np.arange(ranks), lengths)
    if not (
        ((kind >= 0) & (stage >= 0) & (stage < stages) & (stage % ranks == rank)).all()
        and ((microbatch >= 0) & (microbatch < microbatches)).all()
    ):
        return None
    at = np.full((4, stages, microbatches), -1)
    at[kind, stage, microbatch] = np.arange(n)
    there = at >= 0
    split = there[I] & there[W]
    whole_or_split = (there[B] != there[I]) & (there[B] != there[W])
    if there.sum() != n or not (there[F] & whole_or_split).all():
        return None
    backward = np.where(split, at[I], at[B])
    if not ((at[F] < backward) & (~split | (at[I] < at[W]))).all():
        return None
    source = np.full(n, -1)
    source[at[F, 1:]] = at[F, :-1]
    source[backward[:-1]] = backward[1:]
    first = np.concatenate([[0], np.cumsum(lengths)])
    return Order(ranks, stages, microbatches, first, rank, stage, kind, microbatch, source)


def order_of(plan: Plan) -> Order:
    """`plan.actions` as arrays, not to be altered. Raises what that raises."""
    made = _order_of if callable(plan.schedule) else _order_once  # an own one may change its mind
    return made(plan.schedule, plan.pp, plan.microbatches, plan.virtual_stages)


def _order_of(form: Any, pp: int, microbatches: int, virtual_stages: int) -> Order:
    lists = make_schedule(form, pp, microbatches, virtual_stages)
    return order(lists, pp * virtual_stages, microbatches)


_order_once = lru_cache(maxsize=8)(_order_of)


class Graph(NamedTuple):
    """What `engine.longest_path` takes. Nodes: the n actions, then transfers, then a dummy."""

    seconds: list[float]
    missing: list[int]
    following: list[tuple[int, ...]]
    ready: list[float]


def graph(order: Order, seconds: np.ndarray, comm: np.ndarray | None = None) -> Graph:
    """The graph of a schedule: lists as chains, and an edge from each action to whom it serves.

    seconds  of every action                                             (n,)
    comm     seconds that each action's result is under way, if it goes to another rank     (n,)
    """
    n = len(order.rank)
    served = np.flatnonzero(order.source >= 0)  # who needs something, and from whom
    source = order.source[served]
    away = np.zeros(len(served), bool)
    if comm is not None:
        away = (order.rank[source] != order.rank[served]) & (comm[source] > 0)
    dummy = n + int(away.sum())  # so that each action has exactly two that follow
    to, later = np.full(n, dummy), np.arange(1, n + 1)
    to[source] = served
    to[source[away]] = np.arange(n, dummy)
    later[order.first[1:] - 1] = dummy
    missing = np.ones(dummy + 1, np.int64)
    missing[served] += 1
    missing[order.first[:-1]] -= 1
    missing[dummy] = FREE
    duration = np.zeros(dummy + 1)
    duration[:n] = seconds
    if comm is not None:
        duration[n:dummy] = comm[source[away]]
    following: list[tuple[int, ...]] = list(zip(later.tolist(), to.tolist(), strict=True))
    following += [(node,) for node in served[away].tolist()]
    following.append(())
    return Graph(duration.tolist(), missing.tolist(), following, [0.0] * (dummy + 1))
