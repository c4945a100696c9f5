"""Lab 07's last exercise in another way: three messages, and autograd for the gradient."""

import torch
import torch.distributed as dist
from torch.nn.functional import pad


class Total(torch.autograd.Function):
    """g of the warm-up: a sum over ranks, whose backward does nothing."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        return grad


def vocab_parallel_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    n, width = logits.shape
    largest = logits.detach().amax(dim=1, keepdim=True)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    total = Total.apply((logits - largest).exp().sum(dim=1))
    local = (targets - dist.get_rank() * width).clamp(-1, width) + 1  # 0 and V/t + 1: elsewhere
    padded = pad(logits, (1, 1))
    target = Total.apply(padded.gather(1, local[:, None])[:, 0])
    return (largest[:, 0] + total.log() - target).sum() / n
