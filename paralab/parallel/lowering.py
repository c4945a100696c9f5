"""From what every rank computes to what it does: the sends and receives between the actions.

A schedule says only what is computed (parallel/schedules.py). `lower` adds a send after every
action whose result another rank needs, and a receive before the action that needs it. Between
stages of one rank nothing is sent. The rule that makes it safe:

    All transfers stand in one row, and every rank makes its own in the order of that row.

So the transfer that is first in the row can go: both its ends have done all their earlier
transfers, and what stands between those is compute, which waits for nothing but earlier transfers.
Hence no deadlock, even if every transfer holds up both its ranks until it is over and messages are
matched by order alone, as with NCCL; tests run the lists under those rules. The row is the order in
which the results are ready, with F, I and W costing 1, B 2 and a message 1/8 (without it, what
comes would often be in a tie with what goes). Ties: activations before gradients, then the lower
stage.

A receive stands ``ahead`` actions before the one that needs it, as far as the row allows: its
message travels while the rank computes. One is enough unless a message takes longer than an
action; each costs a buffer. Of an activation and a gradient that two neighbours swap at the same
moment only one can be hidden so. If they were one exchange, as NCCL needs it where nothing else
sets an order, neither could: it would begin only when both have computed. Torch is not imported
here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from paralab.checks import whole
from paralab.parallel.schedules import Action
from paralab.theory.order import B, F, Order
from paralab.theory.schedule_check import checked, timed

UNITS = (1.0, 2.0, 1.0, 1.0)  # of F, B, I, W: what a linear layer's products cost
MESSAGE = 0.125
ENDS = "send", "recv"
SEND, RECV = 4, 5  # behind the numbers of actions


class Transfer(NamedTuple):
    """One end of a message: ``str`` is "1RECV_F0", stage 1 receives micro-batch 0's activations.

    kind        "send" or "recv"
    what        "F": activations, to the next stage; "B": their gradient, to the stage before
    stage       the stage of this rank that it leaves, or enters
    microbatch
    peer        pipeline rank of the other end
    """

    kind: str
    what: str
    stage: int
    microbatch: int
    peer: int

    @property
    def other_stage(self) -> int:
        """The stage at the other end."""
        up = (self.what == "F") == (self.kind == "send")
        return self.stage + 1 if up else self.stage - 1

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.upper()}_{self.what}{self.microbatch}"


Step = Action | Transfer


def lower(
    schedule: Sequence[Sequence[Action | str]], *, ahead: int = 1, only: int | None = None
) -> list[list[Step]]:
    """Per rank what it does, in order: its actions, and the transfers they need.

    ahead  a receive is posted so many actions before the one that needs it; earlier where the row
           has its turn before that of a send, for a result leaves as soon as it is there
    only   the rank whose list is asked for: the other lists stay empty

    Raises ScheduleError, a ValueError, if the schedule is not valid.
    """
    ahead = whole("ahead", ahead, at_least=0)
    schedule, order = checked(schedule)
    found = lowered(order, ahead)
    lists: list[list[Step]] = [[] for _ in schedule]
    for r in range(len(schedule)) if only is None else [only]:
        mine, actions = slice(found.first[r], found.first[r + 1]), iter(schedule[r])
        columns = (column[mine].tolist() for column in found[1:])
        lists[r] += (
            next(actions) if kind < SEND else Transfer(ENDS[kind - SEND], "FB"[what], *more)
            for kind, what, *more in zip(*columns, strict=True)
        )
    return lists


class Lowered(NamedTuple):
    """What all ranks do, one rank after the other: n steps.

    first  where each rank's begin, and at last n                                   (ranks + 1,)
    kind   of an action as in `CODE`, of a transfer SEND or RECV                            (n,)
    what, stage, microbatch, peer  of a transfer as there, what being F or B                (n,)
    """

    first: np.ndarray
    kind: np.ndarray
    what: np.ndarray
    stage: np.ndarray
    microbatch: np.ndarray
    peer: np.ndarray


def lowered(order: Order, ahead: int = 1) -> Lowered:
    """`lower` as arrays: of 64 ranks and 512 micro-batches 0.1 s."""
    row = np.stack(row_of(order), 1)
    away = row[:, ::-1].ravel()
    ends, forward = row.ravel(), np.repeat(order.kind[row[:, 0]] == F, 2)
    by_rank = np.argsort(order.rank[ends], kind="stable")
    ends, away, forward = ends[by_rank], away[by_rank], forward[by_rank]
    sends, rank = by_rank % 2 == 0, order.rank[ends]
    # How many actions stand in front: those that the transfer comes after, but none that needs a
    # message of a later turn, or comes after one that makes such a message. They are numbered
    # through all ranks, so what accumulates over one rank's transfers stays within it.
    wanted = np.maximum(ends - min(ahead, len(order.rank)), order.first[rank])
    wanted, most = np.where(sends, ends + 1, wanted), ends + sends
    most = np.minimum.accumulate(most[::-1])[::-1]
    at = np.maximum.accumulate(np.minimum(wanted, most)) + np.arange(len(ends))

    def merged(actions: np.ndarray, transfers: np.ndarray) -> np.ndarray:
        both = np.empty(len(actions) + len(transfers), int)
        there = np.ones(len(both), bool)
        there[at] = False
        both[there], both[at] = actions, transfers
        return both

    return Lowered(
        order.first + np.searchsorted(rank, np.arange(order.ranks + 1)),
        merged(order.kind, np.where(sends, SEND, RECV)),
        merged(order.kind, np.where(forward, F, B)),
        merged(order.stage, order.stage[ends]),
        merged(order.microbatch, order.microbatch[ends]),
        merged(order.rank, order.rank[away]),
    )


def row_of(order: Order) -> tuple[np.ndarray, np.ndarray]:
    """The row of all messages: the actions that make them, and those that need them."""
    _, end = timed(order, np.array(UNITS)[order.kind], np.full(len(order.rank), MESSAGE))
    to = np.flatnonzero(order.source >= 0)
    source = order.source[to]
    away = order.rank[source] != order.rank[to]
    to, source = to[away], source[away]
    stage, ready = order.stage[source], np.array(end)[source]
    row = np.lexsort((order.microbatch[source], stage, order.kind[source] != F, ready))
    return source[row], to[row]
