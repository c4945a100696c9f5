"""The result of a training step on one process, without torch, so that a notebook can keep it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np


class Step(NamedTuple):
    """One training step.

    loss        mean over the micro-batches, nats per token
    gradients   {name: array}, mean over the micro-batches, before clipping
    weights     {name: array} after the update, rounded to the precision that the model computes in
    """

    loss: float
    gradients: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]
