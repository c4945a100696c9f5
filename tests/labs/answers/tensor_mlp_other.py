"""Lab 07's first exercise in another way: the bias of one rank, and parts replaced in place."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F


class MyMLP(nn.Module):
    def __init__(self, up: nn.Linear, down: nn.Linear, *, f: Callable, g: Callable) -> None:
        super().__init__()
        t, rank = dist.get_world_size(), dist.get_rank()
        for layer, name, dim in ((up, "weight", 0), (up, "bias", 0), (down, "weight", 1)):
            part = getattr(layer, name).detach().chunk(t, dim)[rank].clone()
            setattr(layer, name, nn.Parameter(part))
        self.up, self.down, self.f, self.g = up, down, f, g

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inside = F.gelu(self.up(self.f(x)), approximate="tanh")
        z = self.g(inside @ self.down.weight.t())
        return torch.add(z, self.down.bias)
