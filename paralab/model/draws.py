"""Random numbers of a training: initial weights and dropout masks.

Both belong to the model and not to a plan, so every way to split a training starts from, and draws,
the same numbers, and so does the reference.

[Note: initial weights] Every parameter is drawn from a generator of its own, seeded by the run's
seed and the parameter's name. A rank that holds a part of the model draws what the one-device model
has there, without drawing the rest; of a tensor of which it holds a block, it draws the whole and
keeps its block. A dropout mask is seeded by seed, step, micro-batch and op in the same way; where
torch's own kernels draw, its generators are seeded so while they do (`drawing`).
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
    """Fill ``parameter`` in place with what the model called ``name`` starts from, or the block of
    that which ``holding(name)`` says it is.

    GPT-2's rule, by name and shape: normal with deviation 0.02, the two projections into the
    residual stream divided by sqrt(2 l); biases 0; norm weights, and whatever else has at most one
    dimension, 1. A tied head's copy starts from what the embedding starts from. See [Note: initial
    weights]. Tensors without values are left alone.
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
        # 32 bits: all that torch's CPU generator takes of a seed
        own = torch.Generator().manual_seed(name_seed(seed, name))
        mine = None if holding is None else holding(name)
        shape = parameter.shape if mine is None else mine.whole
        drawn = torch.empty(shape).normal_(0.0, deviation, generator=own)
        parameter.copy_(drawn if mine is None else drawn[mine.box].reshape(mine.shape))


def name_seed(seed: int, name: str) -> int:
    """Seed of what the parameter, or the block of the user's own, called ``name`` starts from."""
    return zlib.crc32(f"{seed} {name}".encode())


def mask_seed(seed: int, step: int, sample: int, name: str) -> int:
    """Seed of the dropout of the op ``name``, for micro-batch ``sample`` of the global batch."""
    return zlib.crc32(f"{seed} {step} {sample} {name}".encode())


def mask(shape: tuple[int, ...], p: float, *, seed: int, device: str | torch.device) -> Tensor:
    """Which elements dropout keeps: booleans, each True with probability 1 - p. On "meta" there is
    nothing to draw.
    """
    found = torch.empty(shape, dtype=torch.bool, device=device)
    if found.is_meta:
        return found
    return found.bernoulli_(1 - p, generator=torch.Generator(device).manual_seed(seed))


@contextmanager
def drawing(seed: int, device: str | torch.device = "cpu") -> Iterator[None]:
    """torch's own generators draw from ``seed`` in here; afterwards they go on where they were."""
    with torch.random.fork_rng([device] if str(device).startswith("cuda") else []):
        torch.manual_seed(seed)
        yield
