"""Lab 07's exercise: causal self-attention whose heads are sharded over t ranks."""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F


class MyAttention(nn.Module):
    """Causal self-attention of ``heads`` heads, of which each rank computes a t-th."""

    def __init__(
        self, qkv: nn.Linear, proj: nn.Linear, *, heads: int, f: Callable, g: Callable
    ) -> None:
        # qkv: h -> 3h (all queries, then all keys, then all values; head after head in each),
        # proj: h -> h: whole, with biases, the same on every rank; t divides heads
        super().__init__()
        self.f, self.g = f, g
        ### BEGIN SOLUTION
        ### STUB: # parameters that this rank keeps: qkv.weight, qkv.bias, proj.weight, proj.bias
        t, rank = dist.get_world_size(), dist.get_rank()
        h = proj.weight.shape[0]
        self.heads, self.width = heads // t, h // heads
        own = slice(rank * h // t, (rank + 1) * h // t)  # of the h entries of all heads
        self.qkv, self.proj = nn.Linear(h, 3 * h // t), nn.Linear(h // t, h)
        with torch.no_grad():
            self.qkv.weight.copy_(qkv.weight.view(3, h, h)[:, own].flatten(0, 1))
            self.qkv.bias.copy_(qkv.bias.view(3, h)[:, own].flatten())
            self.proj.weight.copy_(proj.weight[:, own])
            self.proj.bias.copy_(proj.bias)
        ### END SOLUTION

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (b, s, h), the same on every rank. Returns (b, s, h), on every rank."""
        ### BEGIN SOLUTION
        b, s, _ = x.shape
        parts = self.qkv(self.f(x)).view(b, s, 3, self.heads, self.width)
        q, k, v = parts.permute(2, 0, 3, 1, 4)  # (b, a/t, s, h/a) each
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.width)
        future = torch.ones(s, s, dtype=torch.bool, device=x.device).triu(1)
        share = scores.masked_fill(future, -math.inf).softmax(-1)
        mixed = (share @ v).transpose(1, 2).reshape(b, s, -1)  # (b, s, h/t)
        return self.g(F.linear(mixed, self.proj.weight)) + self.proj.bias
        ### END SOLUTION
