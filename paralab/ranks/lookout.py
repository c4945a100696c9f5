"""Signs of life from a GPU: what a rank has posted and its device has not completed.

With NCCL no wait blocks the host. A rank that hangs is at the end of its step, where numbers come
back, and so is one whose step is only long. So a thread of each rank asks the events: while the
device passes some, the rank is alive; if it does not, its note names the oldest call in flight.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

SECONDS = 0.25  # between two looks


class Lookout:
    """One rank's thread.

    note    writes what the rank is blocked in
    passed  how many moments the device has passed so far
    alive   tells the launching process that the rank gets on
    """

    def __init__(
        self, note: Callable[[str], None], passed: Callable[[], int], alive: Callable[[], None]
    ) -> None:
        self.note, self.passed, self.alive = note, passed, alive
        self.calls: list[tuple[str, Any]] = []
        self.before, self.said = -1, ""

    def start(self) -> None:
        threading.Thread(target=self._go_on, daemon=True, name="lookout").start()

    def posted(self, what: str, event: Any) -> None:
        """A call is in flight until ``event`` has happened."""
        self.calls.append((what, event))

    def look(self) -> None:
        """Ask the device once."""
        calls = self.calls[:]
        over = [one for one in calls if one[1].query()]
        for one in over:
            self.calls.remove(one)
        passed = self.passed()
        if over or passed != self.before:
            self.before = passed
            self.alive()
        said = next((call[0] for call in calls if call not in over), "")
        if said or self.said:  # the rank's own thread writes too, and wipes what it wrote
            self.note(said)
        self.said = said

    def _go_on(self) -> None:
        while True:
            time.sleep(SECONDS)
            self.look()
