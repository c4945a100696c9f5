"""Lab 00: right numbers of a step over several micro-batches, and numbers of known mistakes."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from paralab.exercises.lazy import np
from paralab.exercises.questions import Mistakes

LR, EPSILON = 0.5, 1e-6
MEANS = "that is the mean of the micro-batches' means, but they differ in size"
TWICE = "that is divided by the number of micro-batches twice"
MISSING = "micro-batch {} is missing, counted from 0"
NOT_ADDED = "the gradients of the micro-batches are not added up"
Arrays = dict[str, Any]  # {name: NumPy array}


class Step(NamedTuple):
    """One step of an answer, with what the checker knows of its micro-batches.

    sizes, clip    samples of each micro-batch, and the norm to which the gradient is to be clipped
    before, after  the weights before and after the step
    gradients      of each micro-batch, the mean over its own samples: (m, Ψ)
    losses         of each micro-batch, the mean over its own samples: (m,)
    returned       what the answer returned: loss and norm, if it is right
    passes         samples in each forward pass of the answer
    peak, largest  bytes beyond the weights: the answer's peak, that of the largest micro-batch
    stale          gradients of the step before, (m, Ψ)
    updates        how often the answer called optimizer.step()
    """

    sizes: Sequence[int]
    clip: float
    before: Arrays
    after: Arrays
    gradients: np.ndarray
    losses: list[float]
    returned: list[Any]
    passes: list[int]
    peak: int
    largest: int
    stale: np.ndarray
    updates: int

    @property
    def shares(self) -> np.ndarray:
        """The weight of each micro-batch in the mean over all samples, (m,)."""
        return np.array(self.sizes) / sum(self.sizes)

    @property
    def mean(self) -> np.ndarray:
        """The gradient of the mean over all samples."""
        return self.shares @ self.gradients

    def loss(self) -> tuple[float, Mistakes]:
        """(the mean loss over all samples, what known mistakes give)."""
        loss, m = float(self.shares @ self.losses), len(self.losses)
        return loss, [
            ("that is the sum over the micro-batches", sum(self.losses)),
            (MEANS, sum(self.losses) / m),
            ("that is the last micro-batch's loss", self.losses[-1]),
            (TWICE, loss / m),
            *zip(map(MISSING.format, range(m)), loss - self.shares * self.losses, strict=True),
        ]

    def norm(self) -> tuple[float, Mistakes]:
        """(the norm of the mean gradient, what known mistakes give)."""
        norm = np.linalg.norm
        right = float(norm(self.mean))
        return right, [
            ("that is the norm after clipping", min(right, self.clip)),
            ("that is the norm of the sum over the micro-batches", norm(self.gradients.sum(0))),
            (TWICE, right / len(self.losses)),
            ("that is the sum of the tensors' norms", sum(map(norm, self._tensors(self.mean)))),
            *((words, norm(gradient)) for words, (gradient, _) in self._known().items()),
        ]

    def weights(self) -> tuple[Arrays, dict[str, Arrays]]:
        """(the right weights after the step, {known mistake: the weights that it gives})."""
        known = {words: self._updated(*one) for words, one in self._known().items()}
        return self._updated(self.mean, self.clip), known

    def _known(self) -> dict[str, tuple[np.ndarray, float]]:
        """{known mistake: (the gradient that it gives, the norm to which that is then clipped)}."""
        clip, inf, parts = self.clip, math.inf, self.shares[:, None] * self.gradients
        mean, means = self.mean, self.gradients.mean(0)
        last, share = self.gradients[-1], parts[-1]
        by_tensor = np.concatenate([_clipped(one, clip) for one in self._tensors(mean)])
        running = functools.reduce(lambda total, part: _clipped(total, clip) + part, parts)
        accumulated = _clipped(self.shares @ self.stale, clip) + mean
        return {
            f"{NOT_ADDED}: only the last one is left": (last, clip),
            f"{NOT_ADDED}: only the last one's share is left": (share, clip),
            MEANS: (means, clip),
            TWICE: (mean / len(self.sizes), clip),
            "the gradient is not clipped": (mean, inf),
            "each tensor is clipped by its own norm": (by_tensor, inf),
            "the sum so far is clipped after each micro-batch, not once at the end": (
                running,
                clip,
            ),
            "the gradient of the step before is still in it": (accumulated, clip),
            **{MISSING.format(k): (mean - part, clip) for k, part in enumerate(parts)},
        }

    def _updated(self, gradient: np.ndarray, clip: float) -> Arrays:
        parts = zip(self.before.items(), self._tensors(_clipped(gradient, clip)), strict=True)
        return {name: w - LR * part.reshape(w.shape) for (name, w), part in parts}

    def _tensors(self, gradient: np.ndarray) -> list[np.ndarray]:
        """A gradient of all weights, (Ψ,), cut into those of the tensors."""
        return np.split(gradient, np.cumsum([w.size for w in self.before.values()])[:-1])


def _clipped(gradient: np.ndarray, clip: float) -> np.ndarray:
    return gradient * min(1.0, clip / (np.linalg.norm(gradient) + EPSILON))
