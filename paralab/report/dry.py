"""Reports of a dry run: one rank's rows, in an order and without times.

What needs no clock works as on any report: bytes by category, by link, by operation. What does is
refused in one sentence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paralab.checks import illegal

if TYPE_CHECKING:
    import pandas as pd

    from paralab.report.report import Report

CLOCK = "dry run"


def needs_times(report: Report, what: str) -> None:
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


def device_of(report: Report) -> str:
    """What a run was on, "cpu" or "cuda"; "cpu" of what no rank has run."""
    return str(report.meta.get("device") or "cpu").partition(":")[0]


def needs_own_devices(report: Report, what: str) -> None:
    """Refuse ``what`` for a run whose ranks shared a GPU: no span there is one rank's alone."""
    if report.meta.get("shared_gpu"):
        raise illegal(
            "device",
            report.meta.get("device"),
            f"{what} needs what each rank computed, "
            "and ranks shared this GPU: what one took has the others' in it",
            "a run with device='cpu', or with a GPU for each rank",
        )


def summary(report: Report) -> pd.DataFrame:
    """What the rank holds, sends and copies: index quantity; columns value and unit."""
    import pandas as pd

    from paralab.report import moved

    rows: list[tuple[str, float, str]] = [
        ("parameters", report.meta.get("num_params", float("nan")), "of this rank")
    ]
    table = report.peaks()[CLOCK]
    rows.append(("peak memory", table["total"] / 1e6, "MB"))
    rows += [
        (f"of it {name}", size / 1e6, "MB")
        for name, size in table.items()
        if size and name != "total"
    ]
    for tier in ("host", "file"):
        mine = report.memory[report.memory["tier"] == tier]
        if len(mine):
            most = mine.groupby(["step", "time"])["bytes"].sum().max()
            rows.append((f"on the host{' in files' * (tier == 'file')}", most / 1e6, "MB"))
    rows.append(("sent per step", moved.traffic(report)["bytes"].sum() / 1e6, "MB"))
    copies = moved.copied(report, "link")
    rows += [
        (f"copied, {link}, per step", size / 1e6, "MB")
        for link, size in zip(copies["link"], copies["bytes"], strict=True)
    ]
    frame = pd.DataFrame(rows, columns=["quantity", "value", "unit"])
    return frame.round({"value": 4}).set_index("quantity")
