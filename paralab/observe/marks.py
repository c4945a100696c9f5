"""The clocks of a rank: what a moment is, on a CPU, on a GPU, and in a dry run.

A mark is a moment, taken on the spot and read later: ``mark`` on the rank's own thread, ``host``
beside it. ``seconds`` of a mark are those of ``time.perf_counter``, which on one machine all
processes share; ``cost`` is what the rank computed between two of them.
"""

from __future__ import annotations

import time
from typing import Any


def clock_of(device: str) -> Any:
    """The clock of a rank whose tensors are on ``device``."""
    if device == "meta":
        return _OrderClock()
    return _CudaClock(device) if device.startswith("cuda") else _CpuClock()


class _Clock:
    """What a clock of a real run knows beside its marks."""

    def now(self) -> float:
        """The host's time, between two marks."""
        return time.perf_counter()

    def beside(self) -> float:
        """Processor seconds so far of this process's other threads: those that carry messages."""
        return time.process_time() - time.thread_time()


class _OrderClock:
    """A dry run's: a mark is the number of what happens, and nothing takes any time."""

    def __init__(self) -> None:
        self._count = 0

    def mark(self) -> int:
        self._count += 1
        return self._count

    host = now = mark

    def seconds(self, mark: int) -> float:
        return float(mark)

    def cost(self, start: int, end: int) -> float:
        return 0.0

    def beside(self) -> float:
        return 0.0


class _CpuClock(_Clock):
    """A mark is (wall seconds, this thread's CPU seconds).

    The thread's CPU time leaves out what other ranks did on the same core: it is what the span
    would take on a core of its own.
    """

    def mark(self) -> tuple[float, float]:
        return time.perf_counter(), time.thread_time()

    def host(self) -> tuple[float, float]:
        """A mark for what happens beside this thread: wall time only. Safe in any thread."""
        return time.perf_counter(), 0.0

    def seconds(self, mark: tuple[float, float]) -> float:
        return mark[0]

    def cost(self, start: tuple[float, float], end: tuple[float, float]) -> float:
        return end[1] - start[1]


class _CudaClock(_Clock):
    """A mark is a CUDA event on the current stream; its time is known once the device has passed
    it.

    One event is tied to the wall clock at birth, so device times land on the ranks' common clock.
    """

    def __init__(self, device: str) -> None:
        import torch

        self._cuda, self.device = torch.cuda, torch.device(device)
        self._base = self._event()
        self._base.synchronize()
        self._base_wall = time.perf_counter()

    def _event(self) -> Any:
        event = self._cuda.Event(enable_timing=True)
        event.record(self._cuda.current_stream(self.device))
        return event

    def mark(self) -> Any:
        return self._event()

    def host(self) -> float:
        return time.perf_counter()

    def seconds(self, mark: Any) -> float:
        if isinstance(mark, float):  # a host time: gloo on a shared GPU ends on the host
            return mark
        mark.synchronize()
        return self._base_wall + self._base.elapsed_time(mark) / 1e3

    def cost(self, start: Any, end: Any) -> float:
        return self.seconds(end) - self.seconds(start)
