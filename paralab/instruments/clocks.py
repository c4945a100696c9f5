"""One clock for ranks on several machines.

Cristian's algorithm (1989, "Probabilistic clock synchronization"): the first rank asks each other
rank for its time. The other rank reads its clock at some moment of the round trip, so to assume the
middle of the trip is wrong by half the trip at most. Of many rounds the shortest is kept. A wait of
NCCL holds only the device's stream, not the host; `item` returns when the message has arrived.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from paralab.comm import Group


def measure_offset(group: Group, *, rounds: int = 32) -> tuple[float, float]:
    """(seconds to add to this rank's clock to get the first rank's, uncertainty in seconds).

    Every member of ``group`` has to call this; the first rank asks the others in turn. Clocks are
    ``time.perf_counter``, which all processes of one machine share: on one machine nothing is sent,
    and of several ranks on another one the shortest round holds for all.
    """
    nodes, first, me = group.context.nodes, group.ranks[0], group.context.rank
    if len(set(nodes)) == 1:
        return 0.0, 0.0
    for other in group.ranks[1:] if me == first else ():
        _ask(group, other, rounds)
    best = _message(group, 0.0, 0.0) if me == first else _answer(group, first, rounds)
    every = best.new_empty(2 * len(group.ranks))
    group.all_gather(every, best, phase="setup").wait()
    rows = zip(group.ranks, every.view(-1, 2).tolist(), strict=True)
    trip, offset = min(row for rank, row in rows if nodes[rank] == nodes[me])
    return offset, trip / 2


def _ask(group: Group, other: int, rounds: int) -> None:
    stamp, best = _message(group, 0.0), (float("inf"), 0.0)
    for _ in range(rounds):
        sent_at = time.perf_counter()
        group.send(stamp, to=other, phase="setup").wait()
        group.recv(stamp, source=other, phase="setup").wait()
        theirs = stamp.item()
        trip = time.perf_counter() - sent_at
        best = min(best, (trip, sent_at + trip / 2 - theirs))
    group.send(_message(group, *best), to=other, phase="setup").wait()


def _answer(group: Group, first: int, rounds: int) -> torch.Tensor:
    stamp, best = _message(group, 0.0), _message(group, 0.0, 0.0)
    for _ in range(rounds):
        group.recv(stamp, source=first, phase="setup").wait()
        stamp.item()
        stamp.fill_(time.perf_counter())
        group.send(stamp, to=first, phase="setup").wait()
    group.recv(best, source=first, phase="setup").wait()
    return best


def _message(group: Group, *values: float) -> torch.Tensor:
    # float32 would round a clock's seconds to 0.1; NCCL sends from device memory only
    return torch.tensor(values, dtype=torch.float64, device=group.context.device)
