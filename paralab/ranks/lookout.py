"""Signs of life from a GPU: which calls a rank has posted that its device has not completed.

With NCCL no wait blocks the host. A rank that hangs is blocked at the end of its step, where it
reads results from the device; so is a rank whose step is only long. So a thread of each rank
queries CUDA events: while the device completes some, the rank is alive, and the rank's note names
the oldest call in flight.

Under torchrun no other process reads that note. So there the thread prints it when the device has
made no progress for most of the time allowed, and at its end ends the process. NCCL's own watchdog
cannot do this: it counts from the moment when a call is posted, which in a long step is far ahead
of the device.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

SECONDS = 0.25  # between two looks
LATE = 0.9  # share of a rank's patience after which a call is reported as late


def backstop(timeout: float) -> float:
    """Seconds after which torch ends a call where others watch for ``timeout`` seconds without
    progress.
    """
    return 10 * timeout + 60


class _Posted(NamedTuple):
    """A call in words, the event that completes it, what it uses, and when it was posted."""

    what: str
    event: Any
    held: Any
    since: float


class Lookout:
    """The thread of one rank that watches its device.

    context  the rank's `RankContext`, which says how to report, and how long to be patient
    passed   counts the recorded moments that the device has passed so far
    """

    def __init__(self, context: Any, passed: Callable[[], int]) -> None:
        self.context, self.passed = context, passed
        self.calls: list[_Posted] = []
        self.passed_before, self.noted = -1, ""
        self._moved = 0.0  # when the device was last seen to make progress
        self._late: _Posted | None = None  # the call that was last reported as late

    def start(self, settle: Callable[[], None]) -> None:
        """Look again and again, while this object is in use; first the thread calls ``settle``."""
        own = weakref.ref(self), settle
        threading.Thread(target=_go_on, args=own, daemon=True, name="lookout").start()

    def posted(self, what: str, event: Any, held: Any = None) -> None:
        """A call is in flight, and what it uses is ``held``, until ``event`` has happened."""
        self.calls.append(_Posted(what, event, held, time.monotonic()))

    def look(self) -> None:
        """Query the events of all calls in flight once."""
        calls = self.calls[:]
        in_flight = [call for call in calls if not call.event.query()]
        self.calls[: len(calls)] = in_flight  # the rank's own thread may have added others
        passed = self.passed()
        if len(in_flight) < len(calls) or passed != self.passed_before:
            self.passed_before, self._moved = passed, time.monotonic()
            self.context.alive()
        oldest = in_flight[0] if in_flight else None
        text = oldest.what if oldest else ""
        # Written at every look, as the rank's main thread may have overwritten it; an empty text is
        # written only to clear a note of this thread.
        if text or self.noted:
            self.context.note(text)
        self.noted = text
        if oldest:
            self._end_if_late(oldest)

    def _end_if_late(self, call: _Posted) -> None:
        waited = time.monotonic() - max(call.since, self._moved)
        rank, patience = self.context.rank, self.context.patience
        if waited >= LATE * patience and call is not self._late:
            self._late = call
            text = f"paralab: rank {rank} has waited {waited:.0f} s in {call.what}; it ends "
            print(f"{text}after {patience:g} s", file=sys.stderr, flush=True)
        if waited >= patience:
            os._exit(1)  # its main thread is blocked in CUDA; torchrun ends the other ranks


def _go_on(lookout: weakref.ref[Lookout], settle: Callable[[], None]) -> None:
    settle()  # else the first query would make a context, of 0.5 GB, on the first GPU
    while (own := lookout()) is not None:
        own.look()
        del own  # an event that is queried while a CUDA graph is captured ends the capture
        time.sleep(SECONDS)
