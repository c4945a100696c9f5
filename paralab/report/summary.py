"""A report on one screen: the rows of `Report.summary`."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from paralab.instruments.allocator import PEAKS
from paralab.report import metrics, moved
from paralab.report.peaks import peaks
from paralab.report.tables import DRY
from paralab.spec.tiers import WAYS

if TYPE_CHECKING:
    import pandas as pd

    from paralab.report.tables import Tables

COPIES_HIDDEN = "of the copies hidden behind compute"
NAN = float("nan")


def summary(report: Tables) -> pd.DataFrame:
    """The report on one screen: index quantity; columns value and unit."""
    if report.clock == DRY:
        return _dry_summary(report)
    import pandas as pd

    steps = metrics.measured_steps(report)
    parts = [metrics.shares(report, s) for s in steps] or [
        dict.fromkeys(("work", "optimizer", "wait", "communication", "hidden"), NAN)
    ]
    typical = {name: median(p[name] for p in parts) for name in parts[0]}
    comm = typical["communication"]
    sent = moved.traffic(report)["bytes"].sum() / max(len(metrics.reported_ranks(report)), 1)
    rows: list[tuple[str, float, str]] = [
        ("step time", metrics.step_time(report) * 1e3, "ms"),
        ("forward and backward", typical["work"] * 1e3, "ms"),
        ("optimizer", typical["optimizer"] * 1e3, "ms"),
        ("waiting", typical["wait"] * 1e3, "ms"),
        ("communication in flight", comm * 1e3, "ms"),
        ("of it hidden behind compute", 100 * typical["hidden"] / comm if comm > 0 else 0.0, "%"),
        ("sent per rank and step", sent / 1e6, "MB"),
    ]
    rows += _copy_rows(report)
    rows += _allocator_rows(report)
    rows += _flops_rows(report)
    if report.plan.pp > 1:
        rows.append(("bubble", 100 * metrics.bubble(report), "% of device time"))
    if report.losses:
        rows += [("loss, first step", report.losses[0], "nats")]
        rows += [("loss, last step", report.losses[-1], "nats")]
    if skipped := report.meta.get("skipped_steps"):
        rows.append(
            ("left out: a gradient overflowed", skipped, f"of {report.meta['steps']} steps")
        )
    frame = pd.DataFrame(
        {
            "quantity": [r[0] for r in rows],
            "value": [r[1] for r in rows],
            "unit": [r[2] for r in rows],
        }
    )
    return frame.round({"value": 4}).set_index("quantity")


def _flops_rows(report: Tables) -> list[tuple[str, float, str]]:
    """What a step computes per second, and of a stated peak how much: theory/utilisation.py."""
    from paralab.theory.utilisation import achieved, utilisation

    seconds = metrics.step_time(report)
    if report.model is None or not seconds > 0:
        return []
    rate = achieved(report.model, report.plan, seconds)["model"]
    rows = [("model FLOP/s per device", rate / 1e9, "GFLOP/s")]
    return rows + [
        (f"{name} FLOPs utilisation", 100 * share, "% of peak")
        for name, share in utilisation(report).items()
    ]


def _allocator_rows(report: Tables) -> list[tuple[str, float, str]]:
    """The ledger's peak, and beside it the worst of what GPUs' allocators say of a rank's step."""
    table, peak = report.allocator, metrics.peak_memory(report)
    if table.empty:
        return []
    found = {} if peak is None else {"peak memory: bytes of tensors": peak}
    found |= {f"of the allocator: {name}": table[name].max() for name in PEAKS}
    found["of the allocator: largest free block"] = table["largest_free"].max()
    return [(name, float(size) / 1e6, "MB") for name, size in found.items()]


def _copy_rows(report: Tables) -> list[tuple[str, float, str]]:
    """What summary says of copies between memory tiers: nothing where there are none."""
    n, unit = len(metrics.reported_ranks(report)), "MB" + " per rank" * (report.world_size > 1)
    copies = moved.copied(report, "link").set_index("link")["bytes"]
    names = {
        "host to device per step": WAYS[:1],
        "device to host per step": WAYS[1:2],
        "disk, read and written per step": WAYS[2:],
    }
    mega = {
        name: float(sum(copies.get(link, 0) for link in links)) / n / 1e6
        for name, links in names.items()
    }
    rows = [(name, size, unit) for name, size in mega.items() if size]
    steps = metrics.measured_steps(report)
    spans = report.spans[report.spans["lane"] == "host"]
    seconds = spans["cost"] if metrics.in_outline(report) else spans["end"] - spans["start"]
    host = seconds.groupby(spans["step"]).sum()
    if len(host):
        busy = median(float(host.get(step, 0.0)) for step in steps) / n
        rows.append(("host's processor at work", busy * 1e3, "ms"))
    parts = [metrics.copy_shares(report, step) for step in steps]
    if middle := median([part["copies"] for part in parts] or [0.0]):
        hidden = 100 * median(part["hidden"] for part in parts) / middle
        rows.append((COPIES_HIDDEN, hidden, "%"))
    return rows


def _dry_summary(report: Tables) -> pd.DataFrame:
    """What the rank holds, sends and copies: index quantity; columns value and unit."""
    import pandas as pd

    rows: list[tuple[str, float, str]] = [
        ("parameters", report.meta.get("num_params", float("nan")), "of this rank")
    ]
    table = peaks(report)[DRY]
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
