"""What training costs once it runs: utilisation, days, energy; "what would my model cost?"

With F FLOPs per step (`needs.step_flops`), n devices of a peak of C FLOP/s and t seconds per step:

    throughput per device        X = F / (n t)
    hardware FLOPs utilisation   F / (n t C), F with what is computed again
    model FLOPs utilisation      the same with F without it: what the model itself asks for
    days for T tokens            T F / (B s) / (n X)            exact
                                 8 T P / (n X)                  PTD-P, eq. 4

PTD-P (Narayanan+ 2021, arXiv:2104.04473, sec. 5.1) reports X with everything recomputed. Model
FLOPs utilisation is PaLM's (Chowdhery+ 2022, arXiv:2204.02311, app. B, which counts 6 P + 12 l h s
FLOPs per token; here the products are counted); Korthikanti+ 2022 (arXiv:2205.05198, sec. 6.3) put
the hardware's next to it. Both count for a whole step, from the first forward to the end of the
update, so bubbles, messages and the optimizer all lower them.
"""

from __future__ import annotations

from typing import NamedTuple

from paralab.checks import real, whole
from paralab.spec import ModelSpec
from paralab.theory import needs

SECONDS_PER_HOUR = 3600
# Bytes per parameter of a checkpoint from which training goes on: 16-bit weights, and in 32 bits
# the master weights and AdamW's two moments. Gradients are not kept.
SAVED_BYTES = 2 + 4 + 8


class Utilisation(NamedTuple):
    """Shares of the devices' peak, from 0 to 1."""

    model: float
    hardware: float


class Cost(NamedTuple):
    """What a training asks for.

    params           elements
    state_bytes      of one copy of the model states, in all
    fewest_devices   that hold them between them, with nothing else
    saved_bytes      of a checkpoint from which training goes on
    flops            in all, what is recomputed included
    days             from the first step to the last
    device_hours     all devices together
    energy           joules, or None if no power was stated
    """

    params: int
    state_bytes: int
    fewest_devices: int
    saved_bytes: int
    flops: float
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
    recompute  what of the activations: as in `Plan`
    """
    room = real("seconds", seconds, above=0.0) * real("peak", peak, above=0.0)
    room *= whole("devices", devices, at_least=1)
    plain = needs.step_flops(model, samples)
    return Utilisation(plain / room, needs.step_flops(model, samples, recompute=recompute) / room)


def printed_selective_flops(model: ModelSpec, samples: int) -> float:
    """FLOPs per step with selective recomputation as Korthikanti+ print them, eq. 8.

    72 b s l h^2 (1 + s/(3h) + V/(12 l h)). The text says that the core's two products are computed
    once more, 4 b s^2 h in a block. That makes s/(6h) + s/(18h) = 2s/(9h): eq. 8 counts it three
    times, and so do the hardware utilisations of table 5 (and the 2.7 % and 1.6 % of sec. 5, which
    are 0.9 % and 0.5 %). `needs.step_flops` counts it once.
    """
    core = needs.step_flops(model, samples, recompute="selective")
    plain = needs.step_flops(model, samples)
    return plain + 3 * (core - plain)


def days_by_parameters(params: float, *, tokens: float, devices: int, flops: float) -> float:
    """Days to train, 8 T P / (n X): PTD-P, eq. 4, with activations recomputed.

    1.5 to 3 % low, without the terms of attention and vocabulary, compared with
    `needs.training_days`, which gives the days of the paper's table 2.
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
    recipe: str = "megatron-bf16",
    memory: int = 80 * 10**9,
    watts: float | None = None,
) -> Cost:
    """What ``model`` on ``tokens`` costs with ``devices`` that each reach ``flops`` FLOP/s.

    flops      with what is recomputed counted in, as PTD-P's 140 to 163 TFLOP/s on A100s are
    recompute  as in `needs.step_flops`
    recipe     bytes per parameter by name, see theory/needs.py
    memory     bytes of one device
    watts      of one device with its share of the rest; None: energy is left out
    """
    days = needs.training_days(
        model, tokens=tokens, devices=devices, flops=flops, recompute=recompute
    )
    states = sum(needs.model_states(model, recipe).values())
    seconds = devices * days * needs.SECONDS_PER_DAY
    return Cost(
        params=model.num_params,
        state_bytes=states,
        fewest_devices=needs.devices_for(states, memory),
        saved_bytes=SAVED_BYTES * model.num_params,
        flops=seconds * flops,
        days=days,
        device_hours=seconds / SECONDS_PER_HOUR,
        energy=None if watts is None else seconds * real("watts", watts, above=0.0),
    )
