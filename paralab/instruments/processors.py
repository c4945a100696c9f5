"""How busy the processors are with other programs, or with other virtual machines on the same
hardware. A measurement that is made meanwhile does not show what the machine can do.
"""

from __future__ import annotations

import time
from pathlib import Path

LOOK_S = 0.2  # seconds over which the share is taken


def spent() -> tuple[int, int]:
    """Ticks of all processors since the machine started: (all, idle or waiting for a disk). All
    includes the time that a hypervisor gave to other machines. Zeros without Linux's /proc/stat.
    """
    try:
        words = Path("/proc/stat").read_text().split(maxsplit=9)
        ticks = [int(word) for word in words[1:9]]
    except (OSError, ValueError):
        return 0, 0
    return sum(ticks), ticks[3] + ticks[4]


def processors_busy() -> float:
    """Share of all processors' time that programs take, from 0 to 1, while this process sleeps."""
    before = spent()
    time.sleep(LOOK_S)
    total, idle = (after - ticks for ticks, after in zip(before, spent(), strict=True))
    return 1 - idle / total if total > 0 else 0.0
