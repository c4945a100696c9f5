"""A report on one screen, and the FLOP/s in it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import median
from typing import TYPE_CHECKING

from paralab.instruments.allocator import PEAKS
from paralab.report import metrics
from paralab.report.about import in_outline, measured_steps, reported_ranks
from paralab.report.amounts import copied, peak, peak_memory, peaks, traffic
from paralab.report.tables import COPY_LANES, DRY, Tables
from paralab.spec.tiers import WAYS
from paralab.theory import training

if TYPE_CHECKING:
    import pandas as pd

Row = tuple[str, float, str]  # quantity, value, unit


def achieved(report: Tables) -> dict[str, float]:
    """{"model", "hardware"}: FLOP/s per device. Model FLOPs are what a step has to compute, forward
    and backward, however it is done; hardware FLOPs have recomputation on top (Korthikanti+ 2022,
    arXiv:2205.05198, sec. 6; "achieved teraFLOP/s" in PTD-P is these). Matrix products alone, 2
    FLOPs per multiply-add. Empty where no model was trained, for a model with a block of one's own,
    of a replay with other costs of compute than the run's, and where no time is known.
    """
    seconds, plan = metrics.step_time(report), report.plan
    model, scaled = report.model, "compute" in report.meta
    if model is None or model.block is not None or scaled or not seconds > 0:
        return {}
    how = {"seconds": seconds, "devices": plan.world_size, "recompute": plan.recompute}
    return training.utilisation(model, plan.global_batch, peak=1.0, **how)._asdict()


def utilisation(report: Tables) -> dict[str, float]:
    """``achieved`` as shares of the peak that the report's cluster states; empty if none."""
    peak_flops = report.cluster.peak_flops if report.cluster is not None else None
    return {name: rate / peak_flops for name, rate in achieved(report).items() if peak_flops}


def summary(report: Tables) -> pd.DataFrame:
    """The report on one screen: index quantity; columns value and unit."""
    import pandas as pd

    rows = _of_a_dry_run(report) if report.clock == DRY else _of_a_run(report)
    frame = pd.DataFrame(rows, columns=["quantity", "value", "unit"])
    return frame.round({"value": 4}).set_index("quantity")


def readable(value: float) -> str:
    """A value of `summary` for people: counts and what is large as whole numbers, four digits of
    the rest, and "–" where there is none.
    """
    if not math.isfinite(value):
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"


def _of_a_run(report: Tables) -> Iterable[Row]:
    part, n = metrics.typical_shares(report), max(len(reported_ranks(report)), 1)
    comm = part["communication"]
    yield "step time", metrics.step_time(report) * 1e3, "ms"
    yield "forward and backward", part["work"] * 1e3, "ms"
    yield "optimizer", part["optimizer"] * 1e3, "ms"
    yield "waiting", part["wait"] * 1e3, "ms"
    yield "communication in flight", comm * 1e3, "ms"
    yield "of it hidden behind compute", 100 * part["hidden"] / comm if comm > 0 else 0.0, "%"
    yield "sent per rank and step", traffic(report)["bytes"].sum() / n / 1e6, "MB"
    yield from _of_copies(report, n)
    if len(table := report.allocator):
        # What the ledger counts, then the worst of what GPUs' allocators say of a rank's step.
        if (held := peak_memory(report)) is not None:
            yield "peak memory: bytes of tensors", held / 1e6, "MB"
        for name in (*PEAKS, "largest_free"):
            words = name.replace("largest_free", "largest free block")
            yield f"of the allocator: {words}", float(table[name].max()) / 1e6, "MB"
    if rates := achieved(report):
        yield "model FLOP/s per device", rates["model"] / 1e9, "GFLOP/s"
    for name, share in utilisation(report).items():
        yield f"{name} FLOPs utilisation", 100 * share, "% of peak"
    if report.plan.pp > 1:
        yield "bubble", 100 * metrics.bubble(report), "% of device time"
    if report.losses:
        unit = "nats" if report.model is not None else ""  # what a program returns may be any loss
        yield "loss, first step", report.losses[0], unit
        yield "loss, last step", report.losses[-1], unit
    if skipped := report.meta.get("skipped_steps"):
        yield "left out: a gradient overflowed", skipped, f"of {report.meta['steps']} steps"


def _of_copies(report: Tables, n: int) -> Iterable[Row]:
    unit = "MB" + " per rank" * (report.world_size > 1)
    sizes = copied(report, "link").set_index("link")["bytes"]
    for name, links in (
        ("host to device", WAYS[:1]),
        ("device to host", WAYS[1:2]),
        ("disk, read and written", WAYS[2:]),
    ):
        if size := sum(sizes.get(link, 0) for link in links):
            yield f"{name} per step", float(size) / n / 1e6, unit
    steps, lanes = measured_steps(report), report.spans["lane"]
    if lanes.eq("host").any():
        busy = median(metrics.host_seconds(report, step) for step in steps)
        yield "host's processor at work", busy * 1e3, "ms"
    if in_outline(report) or lanes.isin(COPY_LANES).any():
        parts = [metrics.copy_shares(report, step) for step in steps]
        part = metrics.medians(parts, metrics.COPIED)
        if part["copies"] > 0:
            hidden = 100 * part["hidden"] / part["copies"]
            yield "of the copies hidden behind compute", hidden, "%"


def _of_a_dry_run(report: Tables) -> Iterable[Row]:
    yield "parameters", report.meta.get("num_params", math.nan), "of this rank"
    table = peaks(report)[DRY]
    yield "peak memory", table["total"] / 1e6, "MB"
    for name, size in table.items():
        if size and name != "total":
            yield f"of it {name}", size / 1e6, "MB"
    for tier in ("host", "file"):
        if found := peak(report, tier=tier):
            yield f"on the host{' in files' * (tier == 'file')}", found.total / 1e6, "MB"
    yield "sent per step", traffic(report)["bytes"].sum() / 1e6, "MB"
    copies = copied(report, "link")
    for link, size in zip(copies["link"], copies["bytes"], strict=True):
        yield f"copied, {link}, per step", size / 1e6, "MB"
