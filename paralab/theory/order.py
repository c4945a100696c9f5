"""What must happen before what in a pipeline: a schedule as arrays, and when its actions happen.

Two things hold an action up. The action before it in its rank's list, because a rank does one thing
at a time, in order; and at most one action of another stage, whose result it computes with:

    F of stage s       needs  F of stage s - 1, the same micro-batch
    B or I of stage s  needs  B or I of stage s + 1
    W                  needs  its own I, which comes earlier in the same list

NumPy finds what each action needs for all of them at once: about 0.5 microseconds each, so that a
slider feels live. `walk` then lets every rank go on as far as it can. Nothing in a schedule is
decided by the clock, so the answer does not depend on which rank goes first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from math import inf
from typing import Any

import numpy as np

from paralab.parallel.schedules import Action

F, B, I, W = range(4)  # noqa: E741  # the field's letters
CODE = {"F": F, "B": B, "I": I, "W": W}


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


def home(stage: Any, ranks: int, folded: bool) -> Any:
    """The rank that has a stage, or those of an array of stages: 0 ... p-1, and again; ``folded``,
    0 ... p-1, p-1 ... 0, the V of ZB-V and DualPipeV.
    """
    turn, place = stage // ranks, stage % ranks
    back = turn % 2 * folded
    return (1 - 2 * back) * place + back * (ranks - 1)


def order(
    schedule: Sequence[Sequence[Action]],
    stages: int | None,
    microbatches: int | None,
    folded: bool = False,
) -> Order | None:
    """The arrays of a schedule in which every action is there once and each list makes sense.

    Numbers of stages and micro-batches that are None are read off the lists. Stages are on the
    ranks that `home` says. Returns None if something is wrong; theory/schedule_check.py then says
    what. A schedule with an order may still deadlock.
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
        ((kind >= 0) & (stage >= 0) & (stage < stages) & (home(stage, ranks, folded) == rank)).all()
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


def walk(
    order: Order,
    seconds: np.ndarray,
    comm: np.ndarray | None = None,
    pairs: Mapping[int, int] | None = None,
) -> tuple[list[float], list[float]]:
    """(start, end) of every action, with every rank going through its list as far as it can.

    An action that is never reached, because ranks wait for each other, has infinity for both.

    seconds  of every action                                                                (n,)
    comm     seconds that each action's result is in flight, if it goes to another rank     (n,)
    pairs    {action: what another one, which overlaps with it, needs}: it waits for that too
    """
    n = len(order.rank)
    late = np.zeros(n)
    if comm is not None:
        needed = np.maximum(order.source, 0)
        late = np.where(order.rank[needed] != order.rank, comm[needed], 0.0)
    source, takes, delay = order.source.tolist(), seconds.tolist(), late.tolist()
    at, stop = order.first[:-1].tolist(), order.first[1:].tolist()
    start, end, clock = [inf] * n, [inf] * n, [0.0] * order.ranks
    waiting: dict[int, int] = {}  # action -> the rank that is idle until it is done
    both = pairs or {}
    ready = list(range(order.ranks))
    while ready:
        rank = ready.pop()
        now = clock[rank]
        for node in range(at[rank], stop[rank]):
            need, other = source[node], both.get(node, -1)
            if other >= 0 and (need < 0 or end[need] < inf):
                if end[other] == inf:
                    waiting[other] = rank
                    break
                now = max(now, end[other] + delay[node + 1])
            if need >= 0:
                if end[need] == inf:
                    waiting[need] = rank
                    break
                arrived = end[need] + delay[node]
                if arrived > now:
                    now = arrived
            start[node] = now
            now = end[node] = now + takes[node]
            at[rank] = node + 1
            if node in waiting:
                ready.append(waiting.pop(node))
        clock[rank] = now
    return start, end
