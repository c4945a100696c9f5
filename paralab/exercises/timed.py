"""Modules whose forwards and backwards are recorded in order, so that a checker can assign costs.

Autograd treats the parameters of a `Layer` like all others: hooks fire, gradients are accumulated,
and a view of each is saved for backward. A layer computes no more than a sum. So an answer's hooks
run in the same order as in a real model; replaying that order with stated costs gives a time that
is the same on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paralab.exercises.watched import freed


class Layer(nn.Module):
    """A layer with parameters of these sizes. number: from 1, the chunk of its spans."""

    def __init__(self, number: int, sizes: Sequence[int], recorder: Any) -> None:
        super().__init__()
        self.number, self.recorder = number, recorder
        self.weights = nn.ParameterList(torch.zeros(size) for size in sizes)
        self.gradient = 0.0  # of every element; the mean of its weight is added

    def forward(self, x: Tensor) -> Tensor:
        return _Work.apply(x, self, *self.weights)


def timed(layers: Sequence[Sequence[int]], recorder: Any) -> nn.Sequential:
    """A layer for each entry of ``layers``, which has the sizes of its parameters."""
    return nn.Sequential(*(Layer(i, sizes, recorder) for i, sizes in enumerate(layers, 1)))


class _Work(torch.autograd.Function):
    """x plus the mean of every weight, so that the output shows a weight that was not gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Layer, *weights: Tensor) -> Tensor:
        _refuse_freed(weights, layer, "forward")
        ctx.layer = layer
        ctx.save_for_backward(*(weight[:] for weight in weights))
        with layer.recorder.span("forward", chunk=layer.number):
            return x + sum(weight.mean() for weight in weights)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        layer, weights = ctx.layer, ctx.saved_tensors  # reading them may run hooks of the answer
        _refuse_freed(weights, layer, "backward")
        with layer.recorder.span("backward", chunk=layer.number):
            gradients = [torch.full_like(w, layer.gradient + w.mean()) for w in weights]
        return gradient, None, *gradients


def _refuse_freed(weights: Sequence[Tensor], layer: Layer, phase: str) -> None:
    if freed(weights) is not None:
        said = f"{phase} of layer {layer.number} has begun while its parameters are freed"
        raise RuntimeError(said)
