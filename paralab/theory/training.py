"""The cost of a training run: utilisation, days, device hours, energy.

With F FLOPs per step (`needs.step_flops`), n devices with a peak of C FLOP/s and t seconds per
step:

    throughput per device        X = F / (n t)
    hardware FLOPs utilisation   F / (n t C), F with recomputation
    model FLOPs utilisation      F / (n t C), F without recomputation
    seconds for T tokens         T F / (B s) / (n X)            exact
                                 8 T P / (n X)                  PTD-P, eq. 4

PTD-P (Narayanan+ 2021, arXiv:2104.04473, sec. 5.1) reports X with everything recomputed. PaLM
(Chowdhery+ 2022, arXiv:2204.02311) defines model FLOPs utilisation (app. B), in place of the older
hardware FLOPs utilisation, and counts 6 P + 12 l h s FLOPs per token; paralab counts those of the
matrix products. Korthikanti+ 2022 (arXiv:2205.05198, sec. 6.3) print both. Both are for a whole
step, from the first forward to the end of the update, so bubbles, messages and the optimizer lower
them.
"""

from __future__ import annotations

from typing import NamedTuple

from paralab.checks import real, whole
from paralab.spec import ModelSpec
from paralab.theory import needs

# Bytes per parameter of a checkpoint to resume from: 16-bit weights, and in 32 bits the master
# weights and AdamW's two moments. Gradients are not saved.
SAVED_BYTES = 2 + 4 + 8


class Utilisation(NamedTuple):
    """Shares of the devices' peak, from 0 to 1."""

    model: float
    hardware: float


class Cost(NamedTuple):
    """The cost of a training run.

    params           parameters of the model
    state_bytes      bytes of one whole copy of the model states, 18 per parameter ("megatron-bf16")
    fewest_devices   devices of 80 GB that together hold these states, and nothing else
    saved_bytes      bytes of a checkpoint to resume from
    days             from the first step to the last
    device_hours     hours of all devices together
    energy           joules, or None if no power was stated
    """

    params: int
    state_bytes: int
    fewest_devices: int
    saved_bytes: int
    days: float
    device_hours: float
    energy: float | None


def utilisation(
    model: ModelSpec,
    samples: int,
    *,
    seconds: float,
    devices: int,
    peak: float,
    recompute: bool | str = "none",
) -> Utilisation:
    """(MFU, HFU) of steps of ``samples`` that take ``seconds``; Korthikanti+, sec. 6.3.

    peak       FLOP/s that the maker states for one device
    recompute  as in `Plan`
    """
    possible = real("seconds", seconds, above=0.0) * real("peak", peak, above=0.0)
    possible *= whole("devices", devices, at_least=1)  # FLOPs of all devices at their peak
    plain = needs.step_flops(model, samples)
    computed = needs.step_flops(model, samples, recompute=recompute)
    return Utilisation(plain / possible, computed / possible)


def days_by_parameters(params: float, *, tokens: float, devices: int, flops: float) -> float:
    """Days to train, 8 T P / (n X): PTD-P, eq. 4, with activations recomputed.

    Lower than `needs.training_days`, which gives the days of the paper's table 2: this equation
    leaves out the terms of attention and vocabulary, 1.6 and 2.6 % there, more in smaller models.
    """
    work = 8 * real("tokens", tokens, above=0.0) * real("params", params, above=0.0)
    rate = whole("devices", devices, at_least=1) * real("flops", flops, above=0.0)
    return work / rate / needs.SECONDS_PER_DAY


def training_cost(
    model: ModelSpec,
    *,
    tokens: float,
    devices: int,
    flops: float,
    recompute: bool | str = "full",
    watts: float | None = None,
) -> Cost:
    """The cost of training ``model`` on ``tokens`` with ``devices`` that reach ``flops`` FLOP/s.

    flops      per device, with recomputation, as PTD-P's 140 to 163 TFLOP/s on A100s
    recompute  as in `needs.step_flops`
    watts      power of one device, with its share of the rest of the machine; None: no energy
    """
    days = needs.training_days(
        model, tokens=tokens, devices=devices, flops=flops, recompute=recompute
    )
    states = sum(needs.model_states(model, "megatron-bf16").values())
    seconds = devices * days * needs.SECONDS_PER_DAY
    return Cost(
        params=model.num_params,
        state_bytes=states,
        fewest_devices=needs.devices_for(states, 80 * 10**9),
        saved_bytes=SAVED_BYTES * model.num_params,
        days=days,
        device_hours=seconds / 3600,
        energy=None if watts is None else seconds * real("watts", watts, above=0.0),
    )
