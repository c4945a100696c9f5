"""Modules whose forwards and backwards cost what a checker says, and are recorded in order.

A `Layer` has parameters that autograd treats like all others: hooks fire, gradients are
accumulated, and a view of them is saved for backward. Its arithmetic is one sum. So an answer's
hooks run in the order in which they would in a real model, and the recorded order, with stated
costs, is a time that is the same on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paralab.exercises.watched import freed


class Layer(nn.Module):
    """Parameters of these sizes. ``number`` (from 1) is its span's chunk."""

    def __init__(self, number: int, sizes: Sequence[int], recorder: Any) -> None:
        super().__init__()
        self.number, self.recorder = number, recorder
        self.weights = nn.ParameterList(torch.zeros(size) for size in sizes)
        self.gradient = 0.0  # of every element, in addition to the weight's mean

    def forward(self, x: Tensor) -> Tensor:
        return _Work.apply(x, self, *self.weights)


def timed(layers: Sequence[Sequence[int]], recorder: Any) -> nn.Sequential:
    """Layers of these sizes, one after the other."""
    return nn.Sequential(*(Layer(i, sizes, recorder) for i, sizes in enumerate(layers, 1)))


class _Work(torch.autograd.Function):
    """x plus the mean of every weight: so a weight that is not there changes what comes out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Layer, *weights: Tensor) -> Tensor:
        _look_at(weights, layer, "forward")
        ctx.layer = layer
        ctx.save_for_backward(*(weight[:] for weight in weights))
        with layer.recorder.span("forward", chunk=layer.number):
            return x + sum(weight.mean() for weight in weights)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        layer, weights = ctx.layer, ctx.saved_tensors  # a hook of the answer's may get them
        _look_at(weights, layer, "backward")
        with layer.recorder.span("backward", chunk=layer.number):
            made = [torch.full_like(w, layer.gradient + w.mean()) for w in weights]
        return gradient, None, *made


def _look_at(weights: Sequence[Tensor], layer: Layer, doing: str) -> None:
    if freed(weights) is not None:
        raise RuntimeError(
            f"{doing} of layer {layer.number} has begun while its parameters are freed"
        )
