"""What the checkers of lab 07 give to an answer on a rank: whole layers, f and g, an MLP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import gelu, linear

from paralab.exercises.pairs import HEADS


class Copy(torch.autograd.Function):
    """f: nothing in forward, an all-reduce of the gradient in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return summed(grad)


class Sum(torch.autograd.Function):
    """g: an all-reduce in forward, nothing in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return summed(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def summed(x: Tensor) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x)
    return x


OPERATORS = {"f": Copy.apply, "g": Sum.apply}


class MLP(nn.Module):
    """The MLP that an answer's f and g are put into."""

    def __init__(self, up: nn.Linear, down: nn.Linear, f: Callable, g: Callable) -> None:
        super().__init__()
        t, rank = dist.get_world_size(), dist.get_rank()
        parts = (up.weight, 0), (up.bias, 0), (down.weight, 1)
        own = [nn.Parameter(whole.detach().chunk(t, dim)[rank].clone()) for whole, dim in parts]
        self.up, self.down, self.f, self.g = nn.Module(), nn.Module(), f, g
        self.up.weight, self.up.bias, self.down.weight = own
        self.down.bias = nn.Parameter(down.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        inside = gelu(linear(self.f(x), self.up.weight, self.up.bias), approximate="tanh")
        return self.g(linear(inside, self.down.weight)) + self.down.bias


def linears(weights: dict[str, Tensor]) -> list[nn.Linear]:
    """The whole layers, with copies of these weights, {"up.weight": ..., "up.bias": ...}."""
    made = []
    for name in dict.fromkeys(name.partition(".")[0] for name in weights):
        weight = weights[f"{name}.weight"]
        with torch.device("meta"):
            layer = nn.Linear(weight.shape[1], weight.shape[0])
        layer.weight = nn.Parameter(weight.clone())
        layer.bias = nn.Parameter(weights[f"{name}.bias"].clone())
        made.append(layer)
    return made


def module(
    kind: str, answer: Sequence[Callable], whole: Sequence[nn.Linear], operators: bool
) -> Any:
    """The rank's layer: an answer's, or the MLP above with an answer's f and g."""
    if operators and len(answer) < 2:
        raise ValueError("f alone is no answer: give both, check(f, g)")
    if operators:
        return MLP(*whole, *answer)
    more = {"heads": HEADS} if kind == "attention" else {}
    return answer[0](*whole, **more, **OPERATORS)
