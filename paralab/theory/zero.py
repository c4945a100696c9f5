"""What the ZeRO papers state: bytes per device, largest model, traffic. Formulas, for any size.

Psi parameters, N ranks that share one copy of the model states, a recipe of bytes per parameter
(theory/needs.py; the paper's is "zero-fp16": 2 + 2 + K with K = 12). Every stage divides one more
kind of state by N (Rajbhandari+ 2020, arXiv:1910.02054, sec. 5 and 7, figure 1):

    stage                    bytes per device            elements sent per device and step
    0  data parallelism      (2 + 2 + K) Psi             2 Psi (N-1)/N
    1  Pos      optimizer    (2 + 2 + K/N) Psi           2 Psi (N-1)/N
    2  Pos+g    + gradients  (2 + (2 + K)/N) Psi         (m + 1) Psi (N-1)/N
    3  Pos+g+p  + parameters (2 + 2 + K)/N Psi           3 m Psi (N-1)/N

The paper prints volumes without (N-1)/N and for one micro-batch: 2, 2, 2 and 3 Psi. With m of them
stage 2 reduces what each produced and stage 3 gathers again for each, forward and backward.

These are model states; a run keeps in addition padding, buffers and activations; those are in
`pl.program(...).peak()`, which says what this very program keeps. "16 bytes per parameter over N"
alone is a factor off: stage 3 holds at least the largest unit whole while it computes.
"""

from __future__ import annotations

from decimal import ROUND_HALF_UP, Decimal

from paralab.checks import choice, illegal, real, whole
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
    """Gigabytes as ZeRO's table 1 prints them: 10^9 bytes; from 100 on cut off, below rounded.

    Three digits, at most two of them behind the point: 4187.5 is "4187", 41.25 "41.3", 1.875
    "1.88".
    """
    gigabytes = Decimal(repr(float(num_bytes))) / 10**9
    if gigabytes >= 100:
        return str(int(gigabytes))
    digits = Decimal("0.1") if gigabytes >= 10 else Decimal("0.01")
    text = str(gigabytes.quantize(digits, ROUND_HALF_UP))
    return text.rstrip("0").rstrip(".")


# ---- traffic ----
def volume(stage: int, microbatches: int = 1) -> int:
    """Elements that a device sends per step, in Psi and for many devices; ZeRO, sec. 7.

    2, 2, m + 1, 3 m: reduce-scatters of gradients and all-gathers of parameters count one each, an
    all-reduce is one of each.
    """
    m = whole("microbatches", microbatches, at_least=1)
    return (2, 2, m + 1, 3 * m)[whole("stage", stage, at_least=0, at_most=3)]


def elements_sent(params: float, devices: int, stage: int, microbatches: int = 1) -> float:
    """Elements that each of ``devices`` sends per step: `volume` times Psi (N-1)/N."""
    n = whole("devices", devices, at_least=1)
    return volume(stage, microbatches) * real("params", params, above=0.0) * (n - 1) / n


def hybrid_elements_sent(
    params: float, shard: int, replicas: int, stage: int, microbatches: int = 1
) -> dict[str, float]:
    """{"shard", "replica"}: elements that each device sends per step, where N = ``shard`` devices
    share the states and ``replicas`` such groups hold copies (HSDP; MiCS, Zhang+ 2022,
    arXiv:2205.00119; FSDP, Zhao+ 2023, arXiv:2304.11277, sec. 3.2.2).

    In the shard group it is ZeRO's traffic; between groups an all-reduce of a shard's gradients
    once a step: 2 Psi/N (R-1)/R. With one group per node the first never leaves a node. The two are
    not alike: their links differ by a factor of ten, so a sum of both says nothing about time.
    """
    n, r = whole("shard", shard, at_least=1), whole("replicas", replicas, at_least=1)
    choice("stage", stage, (1, 2, 3))
    return {
        "shard": elements_sent(params, n, stage, microbatches),
        "replica": 2 * params / n * (r - 1) / r,
    }


# ---- DeepSpeed's estimators ----
BUFFERS = 1.5  # "additional_buffer_factor": what the estimators multiply host memory by


def deepspeed_zero3(
    params: int,
    largest: int,
    *,
    devices: int,
    per_node: int,
    offload: str = "none",
    zero_init: bool = True,
) -> tuple[float, float]:
    """(GPU bytes per device, CPU bytes per node) by `estimate_zero3_model_states_mem_needs`.

    deepspeed/runtime/zero/stage3.py. largest: parameters of the largest layer, which is gathered
    whole, 4 L. offload: "none", "optimizer", or "all" (parameters too). zero_init: whether the
    model is born in shards; if not, every process holds all of it at first.
    """
    p, n, local = params, devices, per_node
    if n % local:
        raise illegal("per_node", local, f"devices={n} are not whole nodes of it", "a divisor")
    nodes = n // local
    choice("offload", offload, ("none", "optimizer", "all"))
    if offload == "none":
        born = largest if zero_init else p
        return 4.0 * largest + 18.0 * p / n, BUFFERS * 4 * born * local
    host = 18 if offload == "all" else 16
    gpu = 4.0 * largest + (2.0 * p / n if offload == "optimizer" else 0.0)
    if zero_init:
        return gpu, BUFFERS * host * p / nodes
    return gpu, BUFFERS * p * max(4 * local, host / nodes)
