"""Strict order: a program whose calls pass these checks does not deadlock on NCCL.

Gloo matches messages by tag and buffers what it sends, so a program with a wrong order may run on
it. NCCL matches by order alone: the k-th calls of two ranks to each other have to fit, a batch is
one call, and a send may block until its receive is posted. In strict mode `Group` enforces these
rules on every backend. Every exchange waits until its peers are at theirs, so that a program that
ends has run without any buffering. The k-th exchanges of two ranks must mirror each other. The
collectives of a group are numbered, and its members must agree on operation, root, number of
elements and element type, and on how many of them come before a message.
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from paralab.checks import count_of


class OrderError(RuntimeError):
    """Two ranks made calls that do not fit each other; on NCCL the program would hang."""


class Strict:
    """The checks of one group on one rank. context: the rank's `RankContext`, with the store."""

    def __init__(self, context: Any, *, axis: str) -> None:
        self.rank = context.rank
        self.store = dist.PrefixStore(f"strict {axis}", context.store)
        self._numbers: Counter[tuple] = Counter()  # calls so far: of a group, of two of its ranks

    def collective(
        self, ranks: tuple[int, ...], op: str, payload: Tensor, root: int | None
    ) -> None:
        """Raise OrderError if another member's call with the same number was a different one."""
        end = "" if root is None else f" with root={root}"
        self._agree(ranks, f"{op} of {elements(payload.numel(), payload.dtype)}{end}")

    def end(self, ranks: tuple[int, ...]) -> None:
        """Raise OrderError if another member has made more collectives."""
        self._agree(ranks, "the end of the function")

    def _agree(self, ranks: tuple[int, ...], mine: str) -> None:
        """Raise OrderError if ``mine``, the call in words, is not that of the other members.

        Does not wait: the first member to arrive stores its call, the others compare theirs.
        """
        number = self._number(ranks)
        first = self.store.compare_set(f"{ranks}/{number}", "", f"{self.rank} {mine}").decode()
        rank, _, theirs = first.partition(" ")
        if theirs != mine:
            raise OrderError(
                f"on rank {self.rank}, call #{number} of the group of ranks {ranks} is {mine}, but "
                f"on rank {rank} it is {theirs}: every member has to make the same calls in the "
                "same order"
            )

    def rendezvous(self, ranks: tuple[int, ...], parts: Sequence[tuple[str, Tensor, int]]) -> None:
        """Wait until each peer is at its exchange; raise OrderError if the two do not fit."""
        by_peer: dict[int, list[list]] = defaultdict(list)
        for kind, tensor, peer in parts:
            by_peer[peer].append([kind, tensor.numel(), str(tensor.dtype)])
        places = {}  # {peer: (the two ranks, the number of their exchanges before this one)}
        for peer, calls in by_peer.items():
            pair = (min(self.rank, peer), max(self.rank, peer))
            places[peer] = (pair, self._number((ranks, pair)))
            facts = json.dumps([self._numbers[ranks], calls])
            self.store.set(f"{ranks}/{places[peer]}/{self.rank}", facts)
        for peer, calls in by_peer.items():
            pair, number = places[peer]
            before, theirs = json.loads(self.wait_for(f"{ranks}/{places[peer]}/{peer}"))
            why = "" if _in_order(theirs) == _in_order(calls)[::-1] else _why(calls + theirs)
            if before != self._numbers[ranks]:
                made = count_of(self._numbers[ranks], "collective")
                why = (
                    f"before it rank {self.rank} made {made} of their group, rank {peer} made "
                    f"{before}: each waits forever in its first call that the other makes later"
                )
            if why:
                raise OrderError(
                    f"call #{number} between ranks {pair[0]} and {pair[1]}: rank {self.rank} "
                    f"{_words(calls)}, rank {peer} {_words(theirs)}; {why}"
                )

    def _number(self, what: tuple) -> int:
        """The number of a call, from 0 on, among those of ``what``."""
        self._numbers[what] += 1
        return self._numbers[what] - 1

    def wait_for(self, key: str) -> bytes:
        """The value of ``key`` in the store, once a rank has set it.

        A `FileStore` polls only every 10 ms: too slow for a peer that is about to arrive, but cheap
        for a long wait. So for the first 0.1 s the key is polled here, less and less often.
        """
        began = time.monotonic()
        while (waited := time.monotonic() - began) < 0.1 and not self.store.check([key]):
            time.sleep(max(0.0005, waited / 8))
        return self.store.get(key)


def _in_order(calls: list[list]) -> tuple[list, list]:
    """(sends, receives), each in the order of the exchange, in which NCCL pairs them up."""
    return ([c[1:] for c in calls if c[0] == "send"], [c[1:] for c in calls if c[0] == "recv"])


def _why(calls: list[list]) -> str:
    """Why these calls of two ranks do not fit each other, and what would."""
    for kind, other in (("send", "receives"), ("recv", "sends")):
        if all(call[0] == kind for call in calls):
            return (
                f"each waits forever until the other {other}: post both in one call, "
                'group.exchange([("send", …), ("recv", …)])'
            )
    return "each send needs a receive in the same exchange, with the same size and type"


def _words(calls: list[list]) -> str:
    verbs = {"send": "sends", "recv": "receives"}
    return " and ".join(f"{verbs[kind]} {elements(numel, dtype)}" for kind, numel, dtype in calls)


def elements(numel: int, dtype: object) -> str:
    """A payload in words: "3 elements of torch.float32"."""
    return f"{count_of(numel, 'element')} of {dtype}"
