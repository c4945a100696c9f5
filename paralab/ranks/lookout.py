"""Signs of life from a GPU: what a rank has posted and its device has not completed.

With NCCL no wait blocks the host. A rank that hangs is at the end of its step, where numbers come
back, and so is one whose step is only long. So a thread of each rank asks the events: while the
device passes some, the rank is alive; if it does not, its note names the oldest call in flight.

Under torchrun no other process reads that note, and NCCL's own watchdog aborts a process whose call
has taken too long: no Python code runs after that. So the thread prints the note shortly before.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

SECONDS = 0.25  # between two looks
LATE = 0.9  # of its limit a call has taken when that is printed


class _Posted(NamedTuple):
    """A call in words, the event that completes it, and when it was posted."""

    what: str
    event: Any
    since: float


class Lookout:
    """One rank's thread.

    note    writes what the rank is blocked in
    passed  how many moments the device has passed so far
    alive   tells the launching process that the rank gets on
    rank    as it is called where a call takes long
    limit   seconds after which NCCL ends the process, counted from when a call was posted
    """

    def __init__(
        self,
        note: Callable[[str], None],
        passed: Callable[[], int],
        alive: Callable[[], None],
        *,
        rank: int = 0,
        limit: float = math.inf,
    ) -> None:
        self.note, self.passed, self.alive = note, passed, alive
        self.rank, self.limit = rank, limit
        self.calls: list[_Posted] = []
        self.before, self.said = -1, ""
        self._late: _Posted | None = None  # what was printed last

    def start(self) -> None:
        threading.Thread(target=self._go_on, daemon=True, name="lookout").start()

    def posted(self, what: str, event: Any) -> None:
        """A call is in flight until ``event`` has happened."""
        self.calls.append(_Posted(what, event, time.monotonic()))

    def look(self) -> None:
        """Ask the device once."""
        calls = self.calls[:]
        over = [one for one in calls if one.event.query()]
        for one in over:
            self.calls.remove(one)
        passed = self.passed()
        if over or passed != self.before:
            self.before = passed
            self.alive()
        oldest = next((call for call in calls if call not in over), None)
        said = oldest.what if oldest else ""
        if said or self.said:  # the rank's own thread writes too, and wipes what it wrote
            self.note(said)
        self.said = said
        if oldest and oldest is not self._late:
            self._look_at_the_clock(oldest)

    def _look_at_the_clock(self, call: _Posted) -> None:
        waited = time.monotonic() - call.since
        if waited >= LATE * self.limit:
            self._late = call
            said = f"paralab: rank {self.rank} has waited {waited:.0f} s in {call.what}; NCCL ends "
            print(f"{said}the rank after {self.limit:g} s", file=sys.stderr, flush=True)

    def _go_on(self) -> None:
        while True:
            time.sleep(SECONDS)
            self.look()
