"""The clocks of a rank: what a moment is, on a CPU, on a GPU, and in a dry run.

A mark is a moment, taken on the spot and read later: ``mark`` on the rank's own thread, ``host``
from any other. ``seconds`` of a mark are those of ``time.perf_counter``, which on one machine all
processes share; ``cost`` is what the rank computed between two of them.
"""

from __future__ import annotations

import time
from typing import Any

TIED = 10.0  # seconds after which a device's clock is set by the host's


def clock_of(device: str) -> Any:
    """The clock of a rank whose tensors are on ``device``."""
    return _CudaClock(device) if device.startswith("cuda") else _CpuClock()


class _CpuClock:
    """A mark is (wall seconds, this thread's CPU seconds).

    The thread's CPU time leaves out what other ranks did on the same core: it is what the span
    would take on a core of its own.
    """

    def now(self) -> float:
        """The host's time, between two marks."""
        return time.perf_counter()

    def anchor(self, *, waits: bool = True) -> None:
        """A step begins: what its marks are told from. ``waits``: until the device is idle."""

    def resolve(self) -> None:
        """A step has ended, and its marks may be read."""

    def beside(self) -> float:
        """Processor seconds so far of this process's other threads: those that carry messages."""
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
    """A moment of the device: an event that is told from an earlier one, until its time is known.

    One that others are told from is an anchor.
    """

    __slots__ = ("event", "anchor", "at")

    def __init__(self, event: Any, anchor: _Mark | None) -> None:
        self.event, self.anchor, self.at = event, anchor, 0.0


class _CudaClock(_CpuClock):
    """A mark is a CUDA event on the current stream; its time is known once the device has passed
    it.

    Every step has an anchor: an event that is tied to the wall clock while the device is idle. CUDA
    says the milliseconds between two events as a 32-bit float, 4 us coarse after a minute and 60 us
    after a quarter of an hour; from the step's own anchor it is finer than the device's clock. When
    the step has ended, its marks become seconds, and its events are used again.

    A program that is observed may launch its next step while the device is still in this one, and
    must not be kept from it. The anchor of that step is told from the one before, a step ago. The
    device's clock and the host's may differ by 1e-5, so once in ``TIED`` seconds the host waits.
    """

    def __init__(self, device: str) -> None:
        import torch

        self._cuda, self.device = torch.cuda, torch.device(device)
        self._free: list[Any] = []  # events of marks that are seconds now
        self._open: list[_Mark] = []
        self._tied = 0.0  # when the host has last waited
        self.anchor()

    def anchor(self, *, waits: bool = True) -> None:
        event, stream = self._cuda.Event(enable_timing=True), self._cuda.current_stream(self.device)
        waits = waits or time.perf_counter() - self._tied > TIED or stream.query()
        event.record(stream)
        self._anchor = _Mark(event, None if waits else self._anchor)
        if waits:
            event.synchronize()
            self._anchor.at = self._tied = time.perf_counter()

    def mark(self) -> _Mark:
        try:
            event = self._free.pop()
        except IndexError:
            event = self._cuda.Event(enable_timing=True)
        event.record(self._cuda.current_stream(self.device))
        mark = _Mark(event, self._anchor)
        self._open.append(mark)
        return mark

    def host(self) -> float:
        return time.perf_counter()

    def passed(self) -> int:
        """Of this step's marks and those left of others, how many the device has passed."""
        events = [mark.event for mark in self._open[:]]  # None: it was read meanwhile
        return sum(event is None or event.query() for event in events)

    def resolve(self) -> None:
        """What the device has not passed, a copy that goes on during the next step, stays open."""
        marks, self._open = self._open, []
        for mark in marks:
            if mark.event is not None and not self._read(mark):  # else it was read meanwhile
                self._open.append(mark)

    def _read(self, mark: _Mark, *, waits: bool = False) -> bool:
        """Find the mark's time, unless the device has not passed it, or its anchor: on another
        stream a mark may be ahead of that.
        """
        one, later = mark, []
        while one.anchor is not None:
            later.append(one)
            one = one.anchor
        for one in reversed(later):
            if waits:
                one.event.synchronize()
            elif not one.event.query():
                return False
            one.at = one.anchor.at + one.anchor.event.elapsed_time(one.event) / 1e3
            one.anchor = None
        event, mark.event = mark.event, None
        self._free.append(event)
        return True

    def seconds(self, mark: Any) -> float:
        if not isinstance(mark, _Mark):  # a host time, where gloo ends; or an earlier CPU clock's
            return mark if isinstance(mark, float) else mark[0]
        if mark.event is not None:
            self._read(mark, waits=True)
        return mark.at

    def cost(self, start: Any, end: Any) -> float:
        return self.seconds(end) - self.seconds(start)
