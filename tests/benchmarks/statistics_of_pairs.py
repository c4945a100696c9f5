"""How a ratio is stated: pairs timed in turn, their median, and its 95 % interval."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence


def median_interval(values: Sequence[float], *, draws: int = 2000) -> tuple[float, float, float]:
    """(median, lower, upper): the interval by bootstrap of the median, seeded."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(draws))
    return statistics.median(values), medians[int(0.025 * draws)], medians[int(0.975 * draws)]


def row(name: str, peer: str, ours: Sequence[float], theirs: Sequence[float], note: str) -> dict:
    """One comparison for bench.json: seconds of both sides and the ratio pair by pair."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    ratio, low, high = median_interval(ratios)
    interval = f"95 % interval {low:.3f} to {high:.3f} over {len(ratios)} pairs"
    return {
        "name": name,
        "peer": peer,
        "paralab_s": statistics.median(ours),
        "peer_s": statistics.median(theirs),
        "ratio": ratio,
        "note": f"{interval}; {note}",
    }
