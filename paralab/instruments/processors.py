"""Whose the processors are: this machine's other programs', or other machines on the same hardware.

What is measured meanwhile is not what the machine can do. Linux tells both in /proc/stat; elsewhere
the processors seem to be free.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

LOOK_S = 0.2  # how long to look


class Spent(NamedTuple):
    """Processor time since the machine started, in ticks: all; idle or waiting for a disk; wanted
    here and given to other machines by the hypervisor.
    """

    total: int
    idle: int
    stolen: int


def spent() -> Spent:
    """Until now; zeros where it is not told."""
    try:
        words = Path("/proc/stat").read_text().split(maxsplit=9)
        ticks = [int(word) for word in words[1:9]]
    except (OSError, ValueError):
        return Spent(0, 0, 0)
    return Spent(sum(ticks), ticks[3] + ticks[4], ticks[7] if len(ticks) > 7 else 0)


def processors_busy(seconds: float = LOOK_S) -> float:
    """Share of all processors' time that programs take now, from 0 to 1. This process does nothing
    meanwhile.
    """
    before = spent()
    time.sleep(seconds)
    total, idle, _ = _since(before)
    return 1 - idle / total if total > 0 else 0.0


def stolen_since(before: Spent) -> float:
    """Share of the time that programs here wanted which other machines got instead, from 0 to 1."""
    total, idle, stolen = _since(before)
    return stolen / (total - idle) if total > idle else 0.0


def _since(before: Spent) -> Spent:
    return Spent(*(b - a for a, b in zip(before, spent(), strict=True)))
