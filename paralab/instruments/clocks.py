"""One clock for ranks on several machines.

Cristian's algorithm (1989, "Probabilistic clock synchronization"): the first rank asks another for
its time. The answer was written somewhere within the round trip, so taking it for the middle is
wrong by half the trip at most. Of many rounds the shortest trip says most. With NCCL a wait orders
the device's stream and lets the host go on: it is `item` that returns when a message is here.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from paralab.comm import Group


def measure_offset(group: Group, *, rounds: int = 32) -> tuple[float, float]:
    """(seconds to add to this rank's clock to read the first rank's, uncertainty in seconds).

    The first rank asks the others in turn; every member of ``group`` has to call this. Clocks are
    ``time.perf_counter``, which all processes of one machine share: there nothing is sent.
    """
    if len(set(group.context.nodes)) == 1:
        return 0.0, 0.0
    first, me = group.ranks[0], group.context.rank
    if me == first:
        for other in group.ranks[1:]:
            _ask(group, other, rounds)
        return 0.0, 0.0
    return _answer(group, first, rounds)


def _ask(group: Group, other: int, rounds: int) -> None:
    stamp, best = _message(group, 0.0), (float("inf"), 0.0)
    for _ in range(rounds):
        asked = time.perf_counter()
        group.send(stamp, to=other, phase="setup").wait()
        group.recv(stamp, source=other, phase="setup").wait()
        theirs = stamp.item()
        trip = time.perf_counter() - asked
        best = min(best, (trip, asked + trip / 2 - theirs))
    group.send(_message(group, *best), to=other, phase="setup").wait()


def _answer(group: Group, first: int, rounds: int) -> tuple[float, float]:
    stamp, best = _message(group, 0.0), _message(group, 0.0, 0.0)
    for _ in range(rounds):
        group.recv(stamp, source=first, phase="setup").wait()
        stamp.item()
        stamp.fill_(time.perf_counter())
        group.send(stamp, to=first, phase="setup").wait()
    group.recv(best, source=first, phase="setup").wait()
    trip, offset = best.tolist()
    return offset, trip / 2


def _message(group: Group, *values: float) -> torch.Tensor:
    # float32 would round a clock to 0.1 s; NCCL sends from device memory only
    return torch.tensor(values, dtype=torch.float64, device=group.context.device)
