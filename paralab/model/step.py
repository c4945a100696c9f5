"""What a training step on one process arrives at; without torch, so that a notebook can hold it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np


class Step(NamedTuple):
    """loss     mean over the micro-batches, nats per token
    gradients   mean over the micro-batches, before clipping, {name: array}
    weights     after the update, as the model computes with them, {name: array}
    """

    loss: float
    gradients: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]
