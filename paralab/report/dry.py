"""Reports of a dry run: one rank's rows, in an order and without times.

What needs no clock works as on any report: bytes by category, by link, by operation. What does is
refused in one sentence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paralab.checks import illegal
from paralab.report.tables import DRY

if TYPE_CHECKING:
    from paralab.report.tables import Tables

CLOCK = DRY


def needs_times(report: Tables, what: str) -> None:
    """Refuse ``what`` for a report that has none."""
    if report.clock == CLOCK:
        raise illegal(
            "clock",
            CLOCK,
            f"{what} needs times, and a dry run has none: it knows what happens and in which order",
            "summary(), peaks(), traffic(), copied(), "
            "memory_chart(), traffic_chart() of this report; times from pl.predict or "
            "pl.run",
        )


def device_of(report: Tables) -> str:
    """What a run was on, "cpu" or "cuda"; "cpu" of what no rank has run."""
    return str(report.meta.get("device") or "cpu").partition(":")[0]


def needs_own_devices(report: Tables, what: str) -> None:
    """Refuse ``what`` for a run whose ranks shared a GPU: no span there is one rank's alone."""
    if report.meta.get("shared_gpu"):
        raise illegal(
            "device",
            report.meta.get("device"),
            f"{what} needs what each rank computed, "
            "and ranks shared this GPU: what one took has the others' in it",
            "a run with device='cpu', or with a GPU for each rank",
        )
