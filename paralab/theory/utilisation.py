"""How much of a device's promise a step uses: model and hardware FLOPs utilisation.

    model FLOPs      what a step has to compute, however it is done: forward and backward
    hardware FLOPs   what it does compute: recomputation on top (`needs.step_flops` has both)
    utilisation      FLOPs / (step time * devices * peak)

Korthikanti+ 2022 (arXiv:2205.05198, sec. 6) define both; "achieved teraFLOP/s" in PTD-P is hardware
FLOPs over step time and devices. Matrix products alone are counted, 2 FLOPs per multiply-add.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paralab.report import metrics
from paralab.spec import ModelSpec, Plan
from paralab.theory.needs import step_flops

if TYPE_CHECKING:
    from paralab.report.tables import Tables


def achieved(model: ModelSpec, plan: Plan, step_time: float) -> dict[str, float]:
    """{"model", "hardware"}: FLOP/s per device of steps that take ``step_time`` seconds."""
    done = {"model": "none", "hardware": plan.recompute}
    return {
        name: step_flops(model, plan.global_batch, recompute=again) / (step_time * plan.world_size)
        for name, again in done.items()
    }


def utilisation(report: Tables) -> dict[str, float]:
    """{"model", "hardware"}: shares of the peak that the report's cluster states; empty if none."""
    peak = report.cluster.peak_flops if report.cluster is not None else None
    if report.model is None or not peak:
        return {}
    rates = achieved(report.model, report.plan, metrics.step_time(report))
    return {name: rate / peak for name, rate in rates.items()}
