"""Lab 07's first exercise: an MLP whose two weights are sharded over t ranks."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F


class MyMLP(nn.Module):
    """down(GELU(up(x))), of which each rank keeps a t-th of the neurons in between."""

    def __init__(self, up: nn.Linear, down: nn.Linear, *, f: Callable, g: Callable) -> None:
        # up: h -> k, down: k -> h: whole, with biases, the same on every rank; t divides k
        super().__init__()
        self.f, self.g = f, g
        ### BEGIN SOLUTION
        ### STUB: # parameters that this rank keeps: up.weight, up.bias, down.weight, down.bias
        ### STUB: # (nn.Linear stores the transpose; a slice keeps the whole tensor alive)
        t, rank = dist.get_world_size(), dist.get_rank()
        k, h = up.weight.shape
        own = slice(rank * k // t, (rank + 1) * k // t)
        self.up, self.down = nn.Linear(h, k // t), nn.Linear(k // t, h)
        with torch.no_grad():
            self.up.weight.copy_(up.weight[own])
            self.up.bias.copy_(up.bias[own])
            self.down.weight.copy_(down.weight[:, own])
            self.down.bias.copy_(down.bias)
        ### END SOLUTION

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (b, s, h), the same on every rank. Returns (b, s, h), on every rank."""
        ### BEGIN SOLUTION
        inside = F.gelu(self.up(self.f(x)), approximate="tanh")  # (b, s, k/t)
        return self.g(F.linear(inside, self.down.weight)) + self.down.bias
        ### END SOLUTION
