"""How busy the processors are: with this machine's other programs, or other machines' on the same
hardware.

What is measured meanwhile is not what the machine can do. Linux tells it in /proc/stat; elsewhere
the processors seem to be free.
"""

from __future__ import annotations

import time
from pathlib import Path

LOOK_S = 0.2  # how long to look


def spent() -> tuple[int, int]:
    """Processor time since the machine started, in ticks: all, with what a hypervisor gave to other
    machines; and idle or waiting for a disk. Zeros where it is not told.
    """
    try:
        words = Path("/proc/stat").read_text().split(maxsplit=9)
        ticks = [int(word) for word in words[1:9]]
    except (OSError, ValueError):
        return 0, 0
    return sum(ticks), ticks[3] + ticks[4]


def processors_busy(seconds: float = LOOK_S) -> float:
    """Share of all processors' time that programs take now, from 0 to 1. This process does nothing
    meanwhile.
    """
    before = spent()
    time.sleep(seconds)
    total, idle = (now - then for then, now in zip(before, spent(), strict=True))
    return 1 - idle / total if total > 0 else 0.0
