"""The ledger's samples, and the rows of the memory table made of them. Torch-free."""

from __future__ import annotations

from typing import Any, NamedTuple

CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "buffers",
    "workspace",
    "other",
)


class Sample(NamedTuple):
    """The bytes that were alive at one moment of a step."""

    step: int
    mark: Any  # the moment on the recorder's clock if it is a span's boundary; None within a span
    host: float  # the moment in seconds of ``time.perf_counter``
    held: dict[str, int]  # {category: bytes} on the device, in the order of CATEGORIES
    offloaded: dict[tuple[str, str], int]  # {(tier, category): bytes} offloaded from the device


def rows(samples: list[Sample], clock: Any, rank: int) -> list[tuple]:
    """(rank, step, time, tier, category, bytes), for every category that has had bytes so far.

    Times rise strictly, so that each time belongs to one sample. A sample within a span has only
    the time of the host, which on a GPU is ahead of the device. Its time on the device is
    interpolated between the nearest samples that have both.
    """
    import numpy as np

    table: list[tuple] = []
    seen: set[tuple[str, str]] = set()
    last = float("-inf")
    marked = [(s.host, clock.seconds(s.mark)) for s in samples if s.mark is not None]
    times = np.interp([s.host for s in samples], *zip(*marked, strict=True)) if samples else ()
    for (step, mark, _, held, offloaded), interpolated in zip(samples, times, strict=True):
        time = float(interpolated) if mark is None else clock.seconds(mark)
        last = time = max(time, last + 1e-7)
        sizes = [*((("device", name), size) for name, size in held.items()), *offloaded.items()]
        seen.update([key for key, size in sizes if size])
        table += [(rank, step, time, *key, size) for key, size in sizes if key in seen]
    return table
