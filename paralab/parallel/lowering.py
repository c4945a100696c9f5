"""Lowering a schedule: where each rank sends and receives between its actions. Torch-free.

A schedule says only what is computed (parallel/schedules.py). `lowered` adds a send after every
action whose result another rank needs, and a receive before the action that needs it. Stages of one
rank exchange no messages. One rule makes the lists safe:

    All messages have one global order, and every rank makes its sends and receives in that order.

The first message that is still to be made can then always proceed: both its ranks have finished all
their earlier messages, and between those they only compute, which waits for nothing but earlier
messages. So no deadlock is possible, even if every message blocks both its ranks until it is over
and messages are matched by order alone, as with NCCL; tests run the lists under those rules. The
global order is that in which the results are ready if F, I and W take 1, B 2 and a message 1/8
(without the 1/8 a rank's incoming and outgoing messages would often tie). Ties: activations before
gradients, then the lower stage.

A receive is posted one action before the action that needs it, so that the message travels while
the rank computes: one is enough unless a message takes longer than an action, and each more would
cost a buffer. It is posted earlier if a later message of the global order is, and later if a send
that precedes it there has first to be made. GPipe's rank 0 of 2, with two micro-batches, in the
notation of torch.distributed.pipelining:

    0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0RECV_B1 0B0 0B1

When two neighbours swap an activation and a gradient at the same moment, only one of the two
messages can be hidden in this way. As one exchange, which NCCL needs where nothing else sets an
order, neither could be hidden: the exchange would start only when both ranks have computed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from paralab.theory.order import B, F, Order
from paralab.theory.schedule_check import timed

UNITS = (1.0, 2.0, 1.0, 1.0)  # durations of F, B, I, W: the matrix products of a linear layer
MESSAGE = 0.125
SEND, RECV = 4, 5  # kinds of steps, after the four kinds of actions in theory.order.CODE


class Lowered(NamedTuple):
    """The steps (actions and transfers) of all ranks, one rank after the other: n steps.

    first  index of each rank's first step; the last entry is n                     (ranks + 1,)
    kind   of an action as in theory.order.CODE, of a transfer SEND or RECV                 (n,)
    what   of a transfer F: activations, to the next stage; or B: their gradient, to the stage
           before                                                                           (n,)
    stage, microbatch  of an action; of a transfer this rank's stage, which sends or receives it
    peer   of a transfer the pipeline rank at the other end                                 (n,)
    """

    first: np.ndarray
    kind: np.ndarray
    what: np.ndarray
    stage: np.ndarray
    microbatch: np.ndarray
    peer: np.ndarray


def lowered(order: Order) -> Lowered:
    """The schedule with its transfers; 0.1 s for 64 ranks and 512 micro-batches."""
    messages = np.stack(global_order(order), 1)  # (messages, 2): the actions at a message's ends
    partner = messages[:, ::-1].ravel()
    action, forward = messages.ravel(), np.repeat(order.kind[messages[:, 0]] == F, 2)
    by_rank = np.argsort(order.rank[action], kind="stable")
    action, partner, forward = action[by_rank], partner[by_rank], forward[by_rank]
    sends, rank = by_rank % 2 == 0, order.rank[action]  # the first end is the send
    # How many actions precede each transfer: a send one more than its own, a receive one less, or
    # fewer if a later transfer has fewer. If an earlier one made a later one wait, a message would
    # be posted when it is needed. Actions are numbered through all ranks, so that running minima
    # and maxima do not mix two ranks.
    made = np.where(sends, action + 1, 0)
    wanted = np.where(sends, made, np.maximum(action - 1, order.first[rank]))
    early = np.minimum.accumulate(wanted[::-1])[::-1]
    at = np.maximum(early, np.maximum.accumulate(made)) + np.arange(len(action))

    def merged(actions: np.ndarray, transfers: np.ndarray) -> np.ndarray:
        steps = np.empty(len(actions) + len(transfers), int)
        is_action = np.ones(len(steps), bool)
        is_action[at] = False
        steps[is_action], steps[at] = actions, transfers
        return steps

    return Lowered(
        order.first + np.searchsorted(rank, np.arange(order.ranks + 1)),
        merged(order.kind, np.where(sends, SEND, RECV)),
        merged(order.kind, np.where(forward, F, B)),
        merged(order.stage, order.stage[action]),
        merged(order.microbatch, order.microbatch[action]),
        merged(order.rank, order.rank[partner]),
    )


def global_order(order: Order) -> tuple[np.ndarray, np.ndarray]:
    """All messages in their global order: the actions that make them, and those that need them."""
    _, end = timed(order, np.array(UNITS)[order.kind], np.full(len(order.rank), MESSAGE))
    target = np.flatnonzero(order.source >= 0)
    source = order.source[target]
    crosses = order.rank[source] != order.rank[target]
    target, source = target[crosses], source[crosses]
    stage, ready = order.stage[source], np.array(end)[source]
    turn = np.lexsort((order.microbatch[source], stage, order.kind[source] != F, ready))
    return source[turn], target[turn]
