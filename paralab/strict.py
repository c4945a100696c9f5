"""Strict order: what passes here cannot deadlock on NCCL.

Gloo matches messages by tag and buffers what it sends, so a program with a wrong order may run on
it. NCCL matches by order alone: the k-th call that two ranks make on each other has to fit, a batch
is one call, and a send may have to wait for its receive. In strict mode `Group` keeps to
the harder rule whatever the backend: every exchange waits until its counterparts have arrived (so
whatever order passes here has a run in which nothing is buffered), and the k-th calls must be each
other's mirror image. Collectives are numbered per group and must agree on operation, bytes and
element type.
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor


class OrderError(RuntimeError):
    """Two ranks made calls that do not fit each other; on NCCL the program would hang."""


class Strict:
    """The order book of one group on one rank. context: the rank's context, with its store."""

    def __init__(self, context: Any, *, axis: str) -> None:
        self.rank = context.rank
        self.store = dist.PrefixStore(f"strict {axis}", context.store)
        self._numbers: Counter[tuple] = Counter()

    def collective(self, ranks: tuple[int, ...], op: str, payload: Tensor) -> None:
        """Raise OrderError if this group's call with this number was something else."""
        self._agree(ranks, f"{op} of {payload.numel()} {payload.dtype}")

    def end(self, ranks: tuple[int, ...]) -> None:
        """Raise OrderError if another member has made a collective more."""
        self._agree(ranks, "the end of the function")

    def _agree(self, ranks: tuple[int, ...], mine: str) -> None:
        """Does not wait: the first member to arrive writes its call down, and every other one
        compares its own with that.
        """
        number = self._next(ranks)
        first = self.store.compare_set(f"{ranks}/{number}", "", f"{self.rank} {mine}").decode()
        rank, _, theirs = first.partition(" ")
        if theirs != mine:
            raise OrderError(
                f"call #{number} of the group of ranks {ranks} is {mine} on rank {self.rank}, but "
                f"{theirs} on rank {rank}: every member has to make the same calls in the same "
                "order"
            )

    def rendezvous(self, ranks: tuple[int, ...], parts: Sequence[tuple[str, Tensor, int]]) -> None:
        """Wait until each peer is at its own exchange; raise OrderError if they do not fit."""
        by_peer: dict[int, list[list]] = defaultdict(list)
        for kind, tensor, peer in parts:
            by_peer[peer].append([kind, tensor.numel(), str(tensor.dtype)])
        places = {}  # peer -> (the two ranks, the how-manieth exchange of theirs this is)
        for peer, calls in by_peer.items():
            pair = (min(self.rank, peer), max(self.rank, peer))
            places[peer] = (pair, self._next((ranks, pair)))
            self.store.set(f"{ranks}/{places[peer]}/{self.rank}", json.dumps(calls))
        for peer, calls in by_peer.items():
            pair, number = places[peer]
            theirs = json.loads(self.wait_for(f"{ranks}/{places[peer]}/{peer}"))
            if _in_order(theirs) != _in_order(calls)[::-1]:
                raise OrderError(
                    f"call #{number} between ranks {pair[0]} and {pair[1]}: rank {self.rank} does "
                    f"{_words(calls)}, rank {peer} does {_words(theirs)}; {_why(calls + theirs)}"
                )

    def wait_for(self, key: str) -> bytes:
        """The value of ``key`` once it is there.

        A store on a file looks only every 10 ms: too slow for a peer who is about to come, but
        cheap while waiting for one who is not. The longer it has been, the longer until it is asked
        again.
        """
        began = time.monotonic()
        while (waited := time.monotonic() - began) < 0.1 and not self.store.check([key]):
            time.sleep(max(0.0005, waited / 8))
        return self.store.get(key)

    def _next(self, key: tuple) -> int:
        self._numbers[key] += 1
        return self._numbers[key] - 1


def _in_order(calls: list[list]) -> tuple[list, list]:
    """(sends, receives), each in the order asked for; NCCL pairs them up in that order."""
    return ([c[1:] for c in calls if c[0] == "send"], [c[1:] for c in calls if c[0] == "recv"])


def _why(calls: list[list]) -> str:
    """What is wrong with these calls of two ranks, and what would be right."""
    for kind, other in (("send", "receives"), ("recv", "sends")):
        if all(call[0] == kind for call in calls):
            return (
                f"each waits until the other {other}, for ever: post both in one call, "
                'group.exchange([("send", …), ("recv", …)])'
            )
    return "each send needs its receive in the same exchange, with the same size and type"


def _words(calls: list[list]) -> str:
    return " and ".join(f"{kind} of {numel} {dtype}" for kind, numel, dtype in calls)
