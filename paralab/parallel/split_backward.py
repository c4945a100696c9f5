"""Backward in two halves: the input's gradient now, the weights' whenever there is time.

A linear layer y = x W^T + b has two products in backward: grad_x = grad_y W, for which the stage
before is waiting, and grad_W = grad_y^T x, for which nobody waits before the optimizer. Zero-bubble
schedules do the second where the pipeline would stand idle (Zero Bubble, Qi+ 2023,
arXiv:2401.10241, sec. 2). Lab 04 has the pictures.

    I   autograd's backward, in which every `Linear` computes grad_x and puts (x, grad_y) aside
    W   `WeightHalves.run`: the products left behind, in the order in which backward met them

Time: I + W is the whole backward; both halves have the same products. Memory: between I and W the
x and grad_y of every linear layer stay, which the whole backward would have freed one by one.

Weight and bias of linear layers belong to W. Those of LayerNorm and of the embedding stay in I:
they are sums and look-ups, 0.1 % of the work, that torch computes along with the input's gradient.
The gradients are bitwise those of the whole backward: the same calls on the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class WeightHalves:
    """The weight halves that one model piece has put aside, by micro-batch.

    `collect` names the micro-batch whose backward is about to run; `run` computes its rest.

    owns  is told what a tensor is for: `Recorder.owns`
    """

    def __init__(self, owns: Callable[..., None] = lambda category, *tensors: None) -> None:
        self.owns = owns
        self._aside: dict[int, list[tuple[nn.Linear, Tensor, Tensor]]] = {}
        self._current: list[tuple[nn.Linear, Tensor, Tensor]] = []

    def collect(self, microbatch: int) -> None:
        self._current = self._aside.setdefault(microbatch, [])

    def put(self, layer: nn.Linear, x: Tensor, grad: Tensor) -> None:
        self.owns("activations", grad)
        self._current.append((layer, x, grad))

    @torch.no_grad()
    def run(self, microbatch: int, accumulated: Callable[[Tensor], None]) -> None:
        """Add what was put aside to the gradients; ``accumulated`` hears of each parameter.

        Autograd's own hooks see nothing of it: whoever counts gradients has to be told.
        """
        aside = self._aside.pop(microbatch)
        while aside:  # each x and grad is let go as soon as it is used
            layer, x, grad = aside.pop(0)
            x, grad = x.flatten(0, -2), grad.flatten(0, -2)  # (B*s, in), (B*s, out)
            self._add(layer.weight, grad.t() @ x)
            accumulated(layer.weight)
            if layer.bias is not None:
                self._add(layer.bias, grad.sum(0))
                accumulated(layer.bias)

    def _add(self, parameter: Tensor, grad: Tensor) -> None:
        if parameter.grad is None:
            parameter.grad = grad
            self.owns("gradients", grad)
        else:
            parameter.grad += grad


class Linear(nn.Linear):
    """`nn.Linear` whose backward puts its weight half aside, in ``halves``."""

    def __init__(
        self, inputs: int, outputs: int, *, bias: bool = True, role: str = "", halves: WeightHalves
    ) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.halves = halves

    def forward(self, x: Tensor) -> Tensor:
        return _InputHalf.apply(x, self)


class _InputHalf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Linear) -> Tensor:
        ctx.save_for_backward(x, layer.weight)
        ctx.layer = layer
        return F.linear(x, layer.weight, layer.bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x, weight = ctx.saved_tensors
        ctx.layer.halves.put(ctx.layer, x, grad)
        return grad @ weight, None
