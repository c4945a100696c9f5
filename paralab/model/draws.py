"""Random numbers of a training: initial weights and dropout masks.

Both depend on the model and the run's seed, and not on the plan. So every plan starts from the same
weights and draws the same masks, and so does the reference.

[Note: initial weights] Every parameter is drawn from a generator of its own, seeded by the run's
seed and the parameter's name. A rank that holds some of the parameters draws only those, and gets
the numbers of the one-device model; of a sharded parameter it draws the whole and keeps its block.
A dropout mask is seeded in the same way by seed, step, micro-batch and op. Where torch's own
kernels draw, `drawing` seeds torch's generators for as long.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from paralab.parallel.layouts import Holding
from paralab.spec import TIED, ModelSpec


@torch.no_grad()
def initialize(
    parameter: Tensor,
    *,
    name: str,
    spec: ModelSpec,
    seed: int,
    holding: Callable[[str], Holding] | None = None,
) -> None:
    """Fill ``parameter`` in place with the initial weights of the parameter called ``name``.

    holding  {name: `Holding`} as a function, if ``parameter`` is only this rank's block

    The rule is GPT-2's, by name and shape: normal with deviation 0.02, the two projections into the
    residual stream divided by sqrt(2 l); biases 0; norm weights, and all else with at most one
    dimension, 1. A tied head's copy gets the embedding's weights. See [Note: initial weights].
    Tensors on the meta device are left alone.
    """
    if parameter.is_meta:
        return
    if spec.tied and name == TIED[1]:
        name = TIED[0]
    if name.endswith("bias"):
        parameter.zero_()
    elif "norm" in name or parameter.dim() < 2:
        parameter.fill_(1.0)
    else:
        deviation = 0.02
        if name.endswith(("proj.weight", "down.weight")):
            deviation /= math.sqrt(2 * spec.layers)
        # The seed has 32 bits because torch's CPU generator uses no more.
        generator = torch.Generator().manual_seed(name_seed(seed, name))
        held = None if holding is None else holding(name)
        shape = parameter.shape if held is None else held.whole
        drawn = torch.empty(shape).normal_(0.0, deviation, generator=generator)
        parameter.copy_(drawn if held is None else drawn[held.box].reshape(held.shape))


def name_seed(seed: int, name: str) -> int:
    """The seed for the initial values of the parameter, or user's block, called ``name``."""
    return zlib.crc32(f"{seed} {name}".encode())


def mask_seed(seed: int, step: int, sample: int, name: str) -> int:
    """The seed for the dropout of the op ``name`` in micro-batch ``sample`` of the global batch."""
    return zlib.crc32(f"{seed} {step} {sample} {name}".encode())


def mask(shape: tuple[int, ...], p: float, *, seed: int, device: str | torch.device) -> Tensor:
    """The elements that dropout keeps: booleans, each True with probability 1 - p; no values on the
    meta device.
    """
    keep = torch.empty(shape, dtype=torch.bool, device=device)
    if keep.is_meta:
        return keep
    return keep.bernoulli_(1 - p, generator=torch.Generator(device).manual_seed(seed))


@contextmanager
def drawing(seed: int, device: str | torch.device = "cpu") -> Iterator[None]:
    """In this context torch's global generators draw from ``seed``; then they are restored."""
    with torch.random.fork_rng([device] if str(device).startswith("cuda") else []):
        torch.manual_seed(seed)
        yield
