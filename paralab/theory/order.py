"""The dependencies of a pipeline schedule: its actions as arrays, and when each of them runs.

An action depends on the action before it in its rank's list, because a rank runs one action at a
time, in order; and on at most one action of another stage, whose result it computes with:

    F of stage s       needs  F of stage s - 1, the same micro-batch
    B or I of stage s  needs  B or I of stage s + 1
    W                  needs  its own I, which comes earlier in the same list

NumPy finds the dependencies of all actions at once, in about 0.5 microseconds per action, so that a
slider feels live. `walk` then advances every rank as far as it can. No action of a schedule depends
on the clock, so the result does not depend on which rank is advanced first.
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
    """The n actions of a schedule, rank after rank, in the order of the lists.

    first       index of each rank's first action, and n at the end     (ranks + 1,)
    rank, stage, kind (as in CODE), microbatch  of each action          (n,)
    source      index of the action of another stage that each action needs; -1: none   (n,)
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
        """Action number ``node``."""
        return Action(int(self.stage[node]), "FBIW"[self.kind[node]], int(self.microbatch[node]))


def home(stage: Any, ranks: int, folded: bool) -> Any:
    """The rank that has a stage, or the ranks of an array of stages.

    folded  stages are on ranks 0 ... p-1, p-1 ... 0, the V of ZB-V and DualPipeV; else on
            0 ... p-1, 0 ... p-1
    """
    chunk, place = stage // ranks, stage % ranks
    back = chunk % 2 * folded
    return (1 - 2 * back) * place + back * (ranks - 1)


def order(
    schedule: Sequence[Sequence[Action]],
    stages: int | None,
    microbatches: int | None,
    folded: bool = False,
) -> Order | None:
    """The arrays of a schedule that has every action once, in lists that are valid by themselves.

    Numbers of stages and micro-batches that are None are taken from the lists; `home` assigns the
    stages to ranks. Returns None for any other schedule; theory/schedule_check.py then finds the
    fault. A schedule that has an `Order` may still deadlock.
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
    if stages * microbatches > n:  # actions are missing; this also bounds the table below
        return None
    lengths = [len(row) for row in schedule]
    rank = np.repeat(np.arange(ranks), lengths)
    own = (stage >= 0) & (stage < stages) & (home(stage, ranks, folded) == rank)
    if not (own & (kind >= 0) & (microbatch >= 0) & (microbatch < microbatches)).all():
        return None
    index = np.full((4, stages, microbatches), -1)  # of each action, by kind, stage, micro-batch
    index[kind, stage, microbatch] = np.arange(n)
    present = index >= 0
    split = present[I] & present[W]
    whole_or_split = (present[B] != present[I]) & (present[B] != present[W])
    if present.sum() != n or not (present[F] & whole_or_split).all():
        return None
    backward = np.where(split, index[I], index[B])
    if not ((index[F] < backward) & (~split | (index[I] < index[W]))).all():
        return None
    source = np.full(n, -1)
    source[index[F, 1:]] = index[F, :-1]
    source[backward[:-1]] = backward[1:]
    first = np.concatenate([[0], np.cumsum(lengths)])
    return Order(ranks, stages, microbatches, first, rank, stage, kind, microbatch, source)


def walk(
    order: Order,
    seconds: np.ndarray,
    comm: np.ndarray | None = None,
    pairs: Mapping[int, int] | None = None,
) -> tuple[list[float], list[float]]:
    """(start, end) of every action, if every rank works through its list as far as it can.

    An action that no rank reaches, because ranks wait for each other, starts and ends at infinity.

    seconds  duration of every action                                                       (n,)
    comm     seconds that each action's result is in flight, if it goes to another rank     (n,)
    pairs    {action: the action that its overlapped successor needs}: it waits for that too
    """
    n = len(order.rank)
    delays = np.zeros(n)
    if comm is not None:
        needed = np.maximum(order.source, 0)
        delays = np.where(order.rank[needed] != order.rank, comm[needed], 0.0)
    source, takes, delay = order.source.tolist(), seconds.tolist(), delays.tolist()
    at, stop = order.first[:-1].tolist(), order.first[1:].tolist()
    start, end, clock = [inf] * n, [inf] * n, [0.0] * order.ranks
    waiting = {}  # {action: the rank that is idle until the action ends}
    overlapped = pairs or {}
    ready = list(range(order.ranks))
    while ready:
        rank = ready.pop()
        now = clock[rank]
        for node in range(at[rank], stop[rank]):
            need, need_of_next = source[node], overlapped.get(node, -1)
            if need_of_next >= 0 and (need < 0 or end[need] < inf):
                if end[need_of_next] == inf:
                    waiting[need_of_next] = rank
                    break
                now = max(now, end[need_of_next] + delay[node + 1])
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
