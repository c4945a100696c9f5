"""The formulas of the ZeRO paper for any model size: bytes per device, and traffic.

Psi is the number of parameters, and N ranks shard one copy of the model states, whose bytes per
parameter follow a recipe (theory/needs.py; the paper's is "zero-fp16": 2 + 2 + K with K = 12).
Every stage divides one more kind of state by N (Rajbhandari+ 2020, arXiv:1910.02054, sec. 5 and 7,
figure 1):

    stage                    bytes per device            elements sent per device and step
    0  data parallelism      (2 + 2 + K) Psi             2 Psi (N-1)/N
    1  Pos      optimizer    (2 + 2 + K/N) Psi           2 Psi (N-1)/N
    2  Pos+g    + gradients  (2 + (2 + K)/N) Psi         (m + 1) Psi (N-1)/N
    3  Pos+g+p  + parameters (2 + 2 + K)/N Psi           3 m Psi (N-1)/N

The paper prints volumes without (N-1)/N and for one micro-batch: 2, 2, 2 and 3 Psi. With m
micro-batches, stage 2 reduces the gradients of each, and stage 3 also gathers the parameters for
the forward and the backward of each.

These are model states. A run needs padding, buffers and activations in addition
(`pl.program(...).peak()`), and stage 3 holds at least the largest unit unsharded while it computes.
"""

from __future__ import annotations

from decimal import ROUND_HALF_UP, Decimal

from paralab.checks import real, whole
from paralab.theory.needs import recipe_parts

NAMES = ("baseline", "Pos", "Pos+g", "Pos+g+p")  # of the stages, as the paper writes them
_SHARED_FROM = {"parameters": 3, "gradients": 2, "master gradients": 2, "master": 1, "moments": 1}


def stage_bytes(
    params: float, devices: int, stage: int, recipe: str = "zero-fp16"
) -> dict[str, float]:
    """{category: bytes} of the model states on each of ``devices``; ZeRO, figure 1.

    params  Psi, elements
    """
    params = real("params", params, above=0.0)
    n = whole("devices", devices, at_least=1)
    stage = whole("stage", stage, at_least=0, at_most=3)
    return {
        category: params * width / (n if stage >= _SHARED_FROM[category] else 1)
        for category, width in recipe_parts(recipe).items()
    }


def bytes_per_device(params: float, devices: int, stage: int, recipe: str = "zero-fp16") -> float:
    """Bytes of all model states on each of ``devices``: ZeRO, figure 1 and table 1."""
    return sum(stage_bytes(params, devices, stage, recipe).values())


def as_printed(num_bytes: float) -> str:
    """Gigabytes of 10^9 bytes, rounded as in ZeRO's table 1: from 100 on cut off to a whole number,
    below to three digits: 4187.5 is "4187", 41.25 "41.3", 1.875 "1.88".
    """
    gigabytes = Decimal(repr(float(num_bytes))) / 10**9
    if gigabytes >= 100:
        return str(int(gigabytes))
    digits = Decimal("0.1") if gigabytes >= 10 else Decimal("0.01")
    return str(gigabytes.quantize(digits, ROUND_HALF_UP)).rstrip("0").rstrip(".")


def volume(stage: int, microbatches: int = 1) -> int:
    """Elements that a device sends per step, in multiples of Psi (N-1)/N; ZeRO, sec. 7. A
    reduce-scatter and an all-gather count one each, an all-reduce counts two.
    """
    m = whole("microbatches", microbatches, at_least=1)
    return (2, 2, m + 1, 3 * m)[whole("stage", stage, at_least=0, at_most=3)]


def elements_sent(params: float, devices: int, stage: int, microbatches: int = 1) -> float:
    """Elements that each of ``devices`` sends per step: `volume` times Psi (N-1)/N."""
    n = whole("devices", devices, at_least=1)
    return volume(stage, microbatches) * real("params", params, above=0.0) * (n - 1) / n
