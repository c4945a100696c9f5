"""How much of a device's promise a step uses: model and hardware FLOPs utilisation.

    model FLOPs      what a step has to compute, however it is done: forward, and twice that for
                     backward. 72 B s l h^2 (1 + s/(6h) + V/(12 l h)) for B samples
    hardware FLOPs   what it does compute: recomputation on top. "full" once more the blocks'
                     forward, which makes 96 B s l h^2 (1 + s/(6h) + V/(16 l h)), PTD-P's eq. 3
                     (Narayanan+ 2021, arXiv:2104.04473); "selective" the products with the scores,
                     4 B s^2 h in each block
    utilisation      FLOPs / (step time * devices * peak)

Korthikanti+ 2022 (arXiv:2205.05198, sec. 6) define both; "achieved teraFLOP/s" in PTD-P is hardware
FLOPs over step time and devices. Matrix products alone are counted, 2 FLOPs per multiply-add. What
is frozen has no gradient of its own, and below all that trains nothing has any.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paralab.checks import choice
from paralab.spec import ModelSpec, Plan
from paralab.theory.formulas import block_flops, head_flops
from paralab.theory.gathering import parts_with_backward

if TYPE_CHECKING:
    from paralab.report import Report

LAYERS = {"attention.qkv": 3, "attention.proj": 1, "mlp.up": 4, "mlp.down": 4}  # in 2 b s h^2


def model_flops(model: ModelSpec, samples: int) -> int:
    """FLOPs that a step on ``samples`` needs, whatever is recomputed: forward and backward."""
    block, head = block_flops(model, samples), head_flops(model, samples)
    if not model.frozen:
        return 3 * (model.layers * block + head)
    unit = 2 * samples * model.seq_len * model.hidden**2
    flows, total = _flows(model), model.layers * block + head
    for part in flows:  # the gradient of the input, then of every weight that trains
        if part == "head":
            weight = "embedding.token.weight" if model.tied else "head.output.weight"
            total += head * (1 + model.trainable(weight))
        elif part.startswith("blocks."):
            total += 2 * block - 12 * unit
            total += sum(n * unit for layer, n in LAYERS.items()
                         if model.trainable(f"{part}.{layer}.weight"))  # fmt: skip
    return total


def hardware_flops(model: ModelSpec, samples: int, recompute: str = "none") -> int:
    """FLOPs that a step on ``samples`` does compute: `model_flops` and what ``recompute`` adds."""
    choice("recompute", recompute, ("none", "selective", "full"))
    again = {"none": 0, "full": block_flops(model, samples),
             "selective": 4 * samples * model.seq_len**2 * model.hidden}[recompute]  # fmt: skip
    blocks = model.layers
    if model.frozen:
        blocks = sum(part.startswith("blocks.") for part in _flows(model))
    return model_flops(model, samples) + blocks * again


def _flows(model: ModelSpec) -> set[str]:
    parts = ("embedding", *(f"blocks.{i}" for i in range(model.layers)), "head")
    return parts_with_backward(model, {0: parts})


def achieved(model: ModelSpec, plan: Plan, step_time: float) -> dict[str, float]:
    """{"model", "hardware"}: FLOP/s per device of steps that take ``step_time`` seconds."""
    devices, samples = plan.world_size, plan.global_batch
    return {
        "model": model_flops(model, samples) / (step_time * devices),
        "hardware": hardware_flops(model, samples, plan.recompute) / (step_time * devices),
    }


def utilisation(report: Report) -> dict[str, float]:
    """{"model", "hardware"}: shares of the peak that the report's cluster states; empty if none."""
    peak = report.cluster.peak_flops if report.cluster is not None else None
    if report.model is None or not peak:
        return {}
    rates = achieved(report.model, report.plan, report.step_time)
    return {name: rate / peak for name, rate in rates.items()}
