"""Which row a box is drawn on: overlapping spans of one lane get tracks of their own.

Several buckets are often in flight at once on one communication lane. Drawn on one row they would
hide one another; dealt to tracks (first one that is free), every start and end can be read.
"""

from __future__ import annotations

from collections.abc import Sequence


def tracks(intervals: Sequence[tuple[float, float]], *, at_most: int) -> list[int]:
    """The track of each interval, 0 first. Beyond ``at_most``, the one free soonest is shared."""
    free: list[float] = []
    chosen = [0] * len(intervals)
    for i in sorted(range(len(intervals)), key=lambda i: intervals[i]):
        start, end = intervals[i]
        track = next((t for t, until in enumerate(free) if until <= start), None)
        if track is None and len(free) < at_most:
            free.append(end)
            track = len(free) - 1
        elif track is None:
            track = min(range(len(free)), key=free.__getitem__)
        free[track] = max(free[track], end)
        chosen[i] = track
    return chosen
