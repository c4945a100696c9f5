"""A call under way: what every method of a `Group` returns, and where a rank stands idle.

[Note: arrivals] Gloo's sends and receives say nothing when they end; only somebody who waits for
one hears of it. So a thread for each direction and peer waits for them in turn, as a pair's
messages arrive in order: the end of a receive is then the moment at which its bytes were there, not
the moment at which the rank had time to look, and a buffer that has been sent is let go at once.

[Note: lent] Gloo's thread says that a collective is over before it lets go of the tensors: in 2 to
7 % of 12,000 calls they were still held when the rank went on, for up to 11 ms, and in half of them
where every core was busy. A peak of memory that was counted just then would be another in the next
run. So where memory is counted, gloo is lent storages that share the bytes, and a wait is
over when gloo has none of them.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from paralab.theory.traffic import POINT_TO_POINT

if TYPE_CHECKING:
    from torch import Tensor

PATIENCE = 1.0  # seconds that gloo may hold what it was lent after it says that a call is over


class Pending:
    """A call under way. ``wait()`` returns when its result may be read; twice is harmless."""

    __slots__ = ("_group", "_works", "_span", "_what", "_finish", "_lent", "_done")

    def __init__(
        self,
        group: Any,
        works: Sequence[Any],
        span: int,
        what: tuple,
        finish: Callable | None,
        lent: Lent | None = None,
    ) -> None:
        self._group, self._works, self._span = group, works, span
        self._what, self._finish, self._done = what, finish, False
        self._lent = lent

    def wait(self) -> None:
        wait_all([self])

    def test(self) -> bool:
        """Whether it is over, without waiting: then there is nothing left to wait for."""
        if not self._done and self._group.over(self._works):
            self._settle()
            self._end()
        return self._done

    def _settle(self) -> None:
        """Stand still until it is over; raises what the transport raised."""
        self._group.settle(self._works)
        self._works = ()  # each holds its tensors
        if self._lent is not None:
            self._lent.wait()
            self._lent = None

    def _end(self) -> None:
        self._done = True
        self._group.recorder.settled(self._span)
        if self._finish is not None:
            self._finish()


def wait_all(calls: Sequence[Pending]) -> None:
    """Wait for several calls of one group: one wait in the picture, as nothing runs in between."""
    calls = [call for call in calls if not call._done]
    if not calls:
        return
    group = calls[0]._group
    group.recorder.enter("wait", after=tuple(call._span for call in calls))
    for call in calls:
        group.blocked_in(*call._what)
        call._settle()
        group.recorder.settled(call._span)
    group.blocked_in()
    group.recorder.leave()
    for call in calls:
        call._end()


class Lent:
    """A call's tensors for gloo, as storages of their own that share the bytes, and when gloo has
    let go of them and of every view it made. See [Note: lent].
    """

    def __init__(self, tensors: Sequence[Tensor], ledger: Any) -> None:
        import torch

        self._uses = torch._C._storage_Use_Count
        self.tensors = [torch.from_dlpack(tensor.detach()) for tensor in tensors]
        ledger.shares_bytes(*self.tensors)
        self._own = self._counts()

    def wait(self) -> None:
        give_up = time.monotonic() + PATIENCE
        while self._counts() != self._own and time.monotonic() < give_up:
            time.sleep(1e-5)  # the thread may need Python's lock to go on

    def _counts(self) -> list[int]:
        """References to the tensors, to their Python objects, which gloo's thread gives up last,
        and to their storages, for views.
        """
        counts = []
        for tensor in self.tensors:
            storage = tensor.untyped_storage()
            counts += [tensor._use_count(), sys.getrefcount(tensor), self._uses(storage._cdata)]
        return counts


class Arrivals:
    """Who notes when a group's calls end: gloo's own threads, or one that waits for them."""

    def __init__(self) -> None:
        self._queues: dict[tuple[str, int], SimpleQueue] = {}

    def watch(
        self, works: Sequence[Any], ops: Sequence[tuple[str, int, int]], ended: Callable[[], None]
    ) -> list[Any]:
        """Call ``ended`` when each of ``works`` ends, on whichever thread sees it.

        ops  (operation, bytes, peer) of each, or of the one collective that they make up. Returns
        what to wait for in their place.
        """
        if not works:
            ended()
        pairs = len(ops) == len(works) and all(op in POINT_TO_POINT for op, _, _ in ops)
        watched = []
        for number, work in enumerate(works):
            if pairs:
                op, _, peer = ops[number]
                watched.append(self._pair((op, peer), work, ended))
                continue
            with contextlib.suppress(RuntimeError):  # `reduce` sends: its `wait` notes the end
                work.get_future().add_done_callback(lambda _: ended())
            watched.append(work)
        return watched

    def _pair(self, way: tuple[str, int], work: Any, ended: Callable[[], None]) -> Arrival:
        """See [Note: arrivals]."""
        if way not in self._queues:
            self._queues[way] = SimpleQueue()
            threading.Thread(target=_watch, args=(self._queues[way],), daemon=True).start()
        arrival = Arrival(ended)
        self._queues[way].put((work, arrival))
        return arrival


class Arrival:
    """The end of one send or receive, for the one thread that computes."""

    __slots__ = ("ended", "error", "_lock")

    def __init__(self, ended: Callable[[], None]) -> None:
        self.ended, self.error = ended, None
        self._lock = threading.Lock()  # held until the end
        self._lock.acquire()

    def is_completed(self) -> bool:
        return not self._lock.locked()

    def wait(self) -> None:
        """Stand still until the end. Raises what the transport raised."""
        with self._lock:
            pass
        if self.error is not None:
            raise self.error

    def note(self, error: Exception | None) -> None:
        self.error = error
        self.ended()
        self._lock.release()


def _watch(queue: SimpleQueue) -> None:
    while True:
        work, arrival = queue.get()
        error = None
        try:
            work.wait()
        except Exception as raised:  # the rank hears of it where it waits itself
            error = raised
        work = None  # with it the message's memory: the rank may count on it once it hears
        arrival.note(error)
        del arrival  # nothing is kept alive while there is nothing to wait for
