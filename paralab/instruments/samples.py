"""What the ledger sampled, as rows of the table of memory. No torch here."""

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
HELD = [("device", name) for name in CATEGORIES]


class Sample(NamedTuple):
    """What was alive at one moment of a step.

    mark  the moment on the recorder's clock, at a span's boundary; None within a span
    host  seconds of ``time.perf_counter``
    held  {category: bytes} on the device, in the order of CATEGORIES
    away  {(tier, category): bytes} of what was offloaded from it
    """

    step: int
    mark: Any
    host: float
    held: dict[str, int]
    away: dict[tuple[str, str], int]


def rows(samples: list[Sample], clock: Any, rank: int) -> list[tuple]:
    """(rank, step, time, tier, category, bytes), for every category there is or has been.

    Times rise strictly, so that a time is one sample. Within a span a sample was taken by the
    host's clock; on a GPU the span runs later, and the sample lies as far into it as the host was
    between launching its beginning and its end.
    """
    import numpy as np

    table: list[tuple] = []
    seen: set[tuple[str, str]] = set()
    last = float("-inf")
    moments = [(one.host, clock.seconds(one.mark)) for one in samples if one.mark is not None]
    times = np.interp([one.host for one in samples], *zip(*moments, strict=True)) if samples else ()
    for (step, mark, _, held, away), between in zip(samples, times, strict=True):
        when = float(between) if mark is None else clock.seconds(mark)
        last = when = max(when, last + 1e-7)
        found = [*zip(HELD, held.values(), strict=True), *away.items()]
        seen.update([key for key, size in found if size])
        table += [(rank, step, when, *key, size) for key, size in found if key in seen]
    return table
