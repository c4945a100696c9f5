"""The clocks of a rank, on a CPU and on a GPU.

A mark stands for a moment. It is taken when the moment comes, and read later: ``mark()`` takes it
on the rank's own thread, ``host()`` on any other. ``seconds(mark)`` is its time as
``time.perf_counter`` has it, a clock that all processes of one machine share. ``cost(start, end)``
is the time that the rank computed between two marks.
"""

from __future__ import annotations

import time
from typing import Any

RESYNC = 10.0  # seconds after which a device's clock is set by the host's again


def clock_of(device: str) -> Any:
    """The clock of a rank whose tensors are on ``device``."""
    return _CudaClock(device) if device.startswith("cuda") else _CpuClock()


class _CpuClock:
    """A mark is (wall seconds, this thread's CPU seconds).

    The thread's CPU time leaves out the time that other ranks spent on the same core: it is the
    time that the span would take on a core of its own.
    """

    def now(self) -> float:
        """The host's time in seconds."""
        return time.perf_counter()

    def anchor(self, *, waits: bool = True) -> None:
        """A step begins: later marks are timed from here. ``waits``: until the device is idle."""

    def resolve(self) -> None:
        """A step has ended: turn its marks into seconds, as far as they can be read by now."""

    def beside(self) -> float:
        """CPU seconds so far of this process's other threads, which carry its messages."""
        return time.process_time() - time.thread_time()

    def mark(self) -> tuple[float, float]:
        return time.perf_counter(), time.thread_time()

    def host(self) -> tuple[float, float]:
        """A mark for what happens on other threads: wall time only. Safe in any thread."""
        return time.perf_counter(), 0.0

    def seconds(self, mark: tuple[float, float]) -> float:
        return mark[0]

    def cost(self, start: tuple[float, float], end: tuple[float, float]) -> float:
        return end[1] - start[1]


class _Mark:
    """A moment on the device: an event, until the time of the event, ``at``, is known.

    That time is the time of the ``anchor``, an earlier mark, and what elapsed between their events.
    An anchor without an anchor has a known time.
    """

    __slots__ = ("event", "anchor", "at")

    def __init__(self, event: Any, anchor: _Mark | None) -> None:
        self.event, self.anchor, self.at = event, anchor, 0.0


class _CudaClock(_CpuClock):
    """A mark is a CUDA event on the current stream; its time is known once the device has passed
    it.

    Every step has an anchor: an event recorded while the device is idle, so that its time is the
    host's. CUDA returns the milliseconds between two events as a 32-bit float, whose resolution is
    4 us after a minute and 60 us after a quarter of an hour; within one step it is finer than the
    device's clock. When the step has ended, its marks become seconds and its events are reused.

    An observed program may launch its next step while the device still executes this one, and must
    not be delayed. The time of that step's anchor is then derived from the previous step's anchor.
    The clocks of device and host may drift apart by 1e-5, so once in `RESYNC` seconds the host
    waits until the device is idle.
    """

    def __init__(self, device: str) -> None:
        import torch

        self._cuda, self.device = torch.cuda, torch.device(device)
        self._free: list[Any] = []  # events of marks whose time is known
        self._open: list[_Mark] = []  # marks whose time is not known yet
        self._synced = 0.0  # when the host last waited for the device
        self.anchor()

    def anchor(self, *, waits: bool = True) -> None:
        event, stream = self._cuda.Event(enable_timing=True), self._cuda.current_stream(self.device)
        waits = waits or time.perf_counter() - self._synced > RESYNC or stream.query()
        event.record(stream)
        self._anchor = _Mark(event, None if waits else self._anchor)
        if waits:
            event.synchronize()
            self._anchor.at = self._synced = time.perf_counter()

    def mark(self) -> _Mark:
        try:
            event = self._free.pop()
        except IndexError:
            event = self._cuda.Event(enable_timing=True)
        event.record(self._cuda.current_stream(self.device))
        mark = _Mark(event, self._anchor)
        self._open.append(mark)
        return mark

    host = _CpuClock.now

    def passed(self) -> int:
        """How many of the open marks the device has passed."""
        events = [mark.event for mark in self._open[:]]  # None: its time is known already
        return sum(event is None or event.query() for event in events)

    def resolve(self) -> None:
        """Marks that the device has not passed, of copies that overlap the next step, stay open."""
        marks, self._open = self._open, []  # those without an event have been read already
        self._open += [mark for mark in marks if mark.event is not None and not self._read(mark)]

    def _read(self, mark: _Mark, *, waits: bool = False) -> bool:
        """Find the mark's time, and those of the anchors that it depends on. False if the device
        has not passed one of them (a mark on another stream can be passed before its anchor);
        ``waits`` until it has.
        """
        current, chain = mark, []
        while current.anchor is not None:
            chain.append(current)
            current = current.anchor
        for current in reversed(chain):
            if waits:
                current.event.synchronize()
            elif not current.event.query():
                return False
            current.at = current.anchor.at + current.anchor.event.elapsed_time(current.event) / 1e3
            current.anchor = None
        event, mark.event = mark.event, None
        self._free.append(event)
        return True

    def seconds(self, mark: Any) -> float:
        if not isinstance(mark, _Mark):  # from `host`; or a CPU clock's, from before moves_to
            return mark if isinstance(mark, float) else mark[0]
        if mark.event is not None:
            self._read(mark, waits=True)
        return mark.at

    def cost(self, start: Any, end: Any) -> float:
        return self.seconds(end) - self.seconds(start)
