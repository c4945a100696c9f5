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
from paralab.theory.order import F, Order
from paralab.theory.schedule_check import checked, timed

UNITS = (1.0, 2.0, 1.0, 1.0)  # of F, B, I, W: what a linear layer's products cost
MESSAGE = 0.125


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
    only   the rank whose list is asked for: it needs its own messages alone, and the other lists
           stay empty. Of 64 ranks and 512 micro-batches one takes 0.2 s, all take 0.6 s

    Raises ScheduleError, a ValueError, if the schedule is not valid.
    """
    ahead = whole("ahead", ahead, at_least=0)
    schedule, order = checked(schedule)
    makers, users = row_of(order)
    if only is not None:
        near = (order.rank[makers] == only) | (order.rank[users] == only)
        makers, users = makers[near], users[near]
    asked = range(len(schedule)) if only is None else [only]
    forward = order.kind[makers] == F
    first, rank = order.first.tolist(), order.rank.tolist()
    lists: list[list[Step]] = [[] for _ in schedule]
    at = order.first[:-1].tolist()  # how far each rank's actions are in its list
    awaits, owes = set(users.tolist()), set(makers.tolist())  # messages to come, to leave

    def upto(rank: int, node: int) -> None:
        """Put a rank's actions before ``node`` into its list, but not past a message's turn."""
        here = at[rank]
        while here < node and here not in awaits:
            if here > first[rank] and here - 1 in owes:
                break
            lists[rank].append(schedule[rank][here - first[rank]])
            here += 1
        at[rank] = here

    for maker, user, is_forward in zip(
        makers.tolist(), users.tolist(), forward.tolist(), strict=True
    ):
        a, b, what = rank[maker], rank[user], "F" if is_forward else "B"
        made, used = schedule[a][maker - first[a]], schedule[b][user - first[b]]
        if a in asked:
            upto(a, maker + 1)
            lists[a].append(Transfer("send", what, made.stage, made.microbatch, b))
            owes.discard(maker)
        if b in asked:
            upto(b, user - ahead)
            lists[b].append(Transfer("recv", what, used.stage, used.microbatch, a))
            awaits.discard(user)
    for r in asked:
        upto(r, first[r + 1])
    return lists


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
