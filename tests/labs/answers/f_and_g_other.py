"""Lab 07's warm-up in another way: a hook for f, and one trick for g."""

import torch
import torch.distributed as dist


def summed(x: torch.Tensor) -> torch.Tensor:
    x = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x)
    return x


def f(x: torch.Tensor) -> torch.Tensor:
    copy = x.view_as(x)
    if copy.requires_grad:
        copy.register_hook(summed)
    return copy


def g(x: torch.Tensor) -> torch.Tensor:
    return x + (summed(x) - x).detach()  # the others' terms are constants to autograd
