"""The numbers of one step over several micro-batches: right ones, and those of known mistakes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from paralab.exercises.questions import Mistakes

LR, EPSILON = 0.5, 1e-6
Arrays = dict[str, Any]  # {name: NumPy array}


class Step(NamedTuple):
    """One step of an answer, and what it started from.

    sizes, clip    samples of each micro-batch, and to which norm the gradient is to be clipped
    before, after  the weights
    gradients      of each micro-batch, the mean over its own samples
    losses         the same
    returned       what the answer returned
    passes         samples in each forward pass that it made
    peak, largest  bytes: beyond the weights, and those of the largest micro-batch
    stale          gradients of the step before
    """

    sizes: Sequence[int]
    clip: float
    before: Arrays
    after: Arrays
    gradients: list[Arrays]
    losses: list[float]
    returned: list[Any]
    passes: list[int]
    peak: int
    largest: int
    stale: list[Arrays]

    @property
    def shares(self) -> list[float]:
        """Of each micro-batch in the mean over all samples."""
        return [n / sum(self.sizes) for n in self.sizes]

    @property
    def mean(self) -> Arrays:
        """The mean gradient of all samples."""
        return _added(self.gradients, self.shares)

    def loss(self) -> tuple[float, Mistakes]:
        """(the mean of all samples, what the mistakes give)."""
        loss = sum(w * one for w, one in zip(self.shares, self.losses, strict=True))
        mean = sum(self.losses) / len(self.losses)
        return loss, [
            ("the sum over the micro-batches", sum(self.losses)),
            ("the mean of their means: here they differ in size", mean),
            ("that is the last micro-batch's", self.losses[-1]),
            ("divided twice", loss / len(self.losses)),
        ]

    def norm(self) -> tuple[float, Mistakes]:
        """(the norm of the mean gradient, what the mistakes give)."""
        m, norm = len(self.sizes), _norm(self.mean)
        return norm, [
            ("that is the norm after clipping", min(norm, self.clip)),
            ("of a mean of means", _norm(_added(self.gradients, [1 / m] * m))),
            ("of the sum of all micro-batches", _norm(_added(self.gradients, [1.0] * m))),
            ("the norms of the tensors added up", sum(_norm({n: g}) for n, g in self.mean.items())),
            ("of the last micro-batch alone", _norm(self.gradients[-1])),
        ]

    def weights(self) -> tuple[Arrays, dict[str, Arrays]]:
        """(those after the update, {what was done: those that it gives})."""
        clip, mean, m, inf = self.clip, self.mean, len(self.sizes), math.inf
        means = _added(self.gradients, [1 / m] * m)
        each = {name: _clipped({name: g}, clip)[name] for name, g in mean.items()}
        clipped = _added([_clipped(g, clip) for g in self.gradients], self.shares)
        last = self.gradients[-1]
        done = {  # the gradient, and to what it is then clipped
            "the micro-batches are not added up: it is the last one alone": (last, clip),
            "the mean of the micro-batches' means, but they differ in size": (means, clip),
            "the gradient is not clipped": (mean, inf),
            "each tensor is clipped by its own norm": (each, inf),
            "each micro-batch is clipped, not their mean": (clipped, inf),
        }
        if self.stale:
            old = _clipped(_added(self.stale, self.shares), clip)
            both = _added([old, mean], [1.0, 1.0])
            done["the gradient of the step before is still in it"] = both, clip
        known = {words: _updated(self.before, *one) for words, one in done.items()}
        return _updated(self.before, mean, clip), known


def _added(gradients: Sequence[Arrays], weights: Sequence[float]) -> Arrays:
    pairs = list(zip(gradients, weights, strict=True))
    return {name: sum(w * one[name] for one, w in pairs) for name in gradients[0]}


def _norm(gradient: Arrays) -> float:
    return float(sum((g.astype("float64") ** 2).sum() for g in gradient.values()) ** 0.5)


def _clipped(gradient: Arrays, clip: float) -> Arrays:
    shrink = min(1.0, clip / (_norm(gradient) + EPSILON))
    return {name: shrink * g for name, g in gradient.items()}


def _updated(before: Arrays, gradient: Arrays, clip: float) -> Arrays:
    return {name: before[name] - LR * g for name, g in _clipped(gradient, clip).items()}
