"""The summary table of a report, and the FLOP/s that it achieved."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from paralab.instruments.allocator import PEAKS
from paralab.report import metrics
from paralab.report.amounts import copied, peak, peak_memory, peaks, traffic
from paralab.report.facts import reported_ranks
from paralab.report.tables import DRY, Tables
from paralab.spec.tiers import WAYS
from paralab.theory import training

if TYPE_CHECKING:
    import pandas as pd

Row = tuple[str, float, str]  # quantity, value, unit


def achieved(report: Tables) -> dict[str, float]:
    """{"model", "hardware"}: FLOP/s per device, of matrix products only, 2 FLOPs per multiply-add.

    Model FLOPs are those of a step's forward and backward, however they are computed; hardware
    FLOPs include recomputation (Korthikanti+ 2022, arXiv:2205.05198, sec. 6), as do PTD-P's
    "achieved teraFLOP/s". Empty if no model was trained, if the model has a block of the user's
    own, if a replay scaled the costs of compute, or if no time is known.
    """
    seconds, plan = metrics.step_time(report), report.plan
    model, scaled = report.model, "compute" in report.meta
    if model is None or model.block is not None or scaled or not seconds > 0:
        return {}
    settings = {"seconds": seconds, "devices": plan.world_size, "recompute": plan.recompute}
    return training.utilisation(model, plan.global_batch, peak=1.0, **settings)._asdict()


def utilisation(report: Tables) -> dict[str, float]:
    """``achieved`` as shares of the cluster's peak FLOP/s; empty if the report states none."""
    peak_flops = report.cluster.peak_flops if report.cluster is not None else None
    return {name: rate / peak_flops for name, rate in achieved(report).items() if peak_flops}


def summary(report: Tables) -> pd.DataFrame:
    """The main figures of a report: index quantity; columns value and unit."""
    import pandas as pd

    rows = _of_a_dry_run(report) if report.clock == DRY else _of_a_run(report)
    frame = pd.DataFrame(rows, columns=["quantity", "value", "unit"])
    # To the byte, and without a sign of zero.
    frame["value"] = [round(n, 4 if abs(n) >= 0.01 else 6) + 0.0 for n in frame["value"]]
    return frame.set_index("quantity")


def readable(value: float) -> str:
    """A value of `summary` as text: whole numbers and values from 1000 on without decimals, four
    digits of others, "–" for NaN.
    """
    if not math.isfinite(value):
        return "–"
    if abs(value) >= 1000 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.4g}" if abs(value) >= 1e-4 else f"{value:.6f}"


def _of_a_run(report: Tables) -> Iterable[Row]:
    shares, n = metrics.typical_shares(report), max(len(reported_ranks(report)), 1)
    comm = shares["communication"]
    yield "step time", metrics.step_time(report) * 1e3, "ms"
    yield "forward and backward", shares["work"] * 1e3, "ms"
    yield "optimizer", shares["optimizer"] * 1e3, "ms"
    yield "waiting", shares["wait"] * 1e3, "ms"
    yield "communication in flight", comm * 1e3, "ms"
    yield "of it hidden behind compute", 100 * shares["hidden"] / comm if comm > 0 else 0.0, "%"
    yield "sent per rank and step", traffic(report)["bytes"].sum() / n / 1e6, "MB"
    yield from _of_copies(report, shares, n)
    if len(table := report.allocator):
        # The ledger's peak, then the largest values of the GPUs' allocators in any rank's step.
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
        unit = "nats" if report.model is not None else ""  # an observed program has any loss
        yield "loss, first step", report.losses[0], unit
        yield "loss, last step", report.losses[-1], unit
    if skipped := report.meta.get("skipped_steps"):
        yield "left out: a gradient overflowed", skipped, f"of {report.meta.get('steps')} steps"


def _of_copies(report: Tables, shares: Mapping[str, float], n: int) -> Iterable[Row]:
    unit = "MB" + " per rank" * (report.world_size > 1)
    sizes = copied(report, "link").set_index("link")["bytes"]
    names = ("host to device", "device to host", "disk, read and written")
    for name, links in zip(names, (WAYS[:1], WAYS[1:2], WAYS[2:]), strict=True):
        if size := sum(sizes.get(link, 0) for link in links):
            yield f"{name} per step", float(size) / n / 1e6, unit
    if report.spans["lane"].eq("host").any():
        yield "host's processor at work", shares["host"] * 1e3, "ms"
    if shares["copies"] > 0:
        hidden = 100 * shares["copies hidden"] / shares["copies"]
        yield "of the copies hidden behind compute", hidden, "%"


def _of_a_dry_run(report: Tables) -> Iterable[Row]:
    whole = ", before ZeRO shards them" * (report.plan.zero_stage == 3)
    yield "parameters", report.meta.get("num_params", math.nan), "of this rank" + whole
    table = peaks(report)[DRY]
    yield "peak memory", table["total"] / 1e6, "MB"
    for name, size in table.items():
        if size and name != "total":
            yield f"of it {name}", size / 1e6, "MB"
    for tier in ("host", "file"):
        if held := peak(report, tier=tier):
            yield f"on the host{' in files' * (tier == 'file')}", held.total / 1e6, "MB"
    yield "sent per step", traffic(report)["bytes"].sum() / 1e6, "MB"
    copies = copied(report, "link")
    for link, size in zip(copies["link"], copies["bytes"], strict=True):
        yield f"copied, {link}, per step", size / 1e6, "MB"
