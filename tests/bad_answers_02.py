"""Lab 02: answers that are wrong in more than a line, and an unusual one that is right.

Ranks import this module.
"""

from __future__ import annotations

import torch
import torch.distributed as dist


# ---- average_gradients ---------------------------------------------------------------------------
def mean_coalesced(module):
    """Right: reduced to rank 0 in large messages, then broadcast, which sends as much."""
    gradients, n = [p.grad for p in module.parameters()], dist.get_world_size()
    flat = torch.cat([g.flatten() for g in gradients])
    padded = flat.new_zeros(-(-flat.numel() // n) * n)
    padded[: flat.numel()] = flat
    own = padded.new_empty(padded.numel() // n)
    dist.reduce_scatter_tensor(own, padded)
    dist.all_gather_into_tensor(padded, own / n)
    place = 0
    for gradient in gradients:
        gradient.copy_(padded[place : place + gradient.numel()].view_as(gradient))
        place += gradient.numel()


def mean_gathered(module):
    """Right, and every rank sends N - 1 whole gradients."""
    for parameter in module.parameters():
        everyone = torch.empty(dist.get_world_size() * parameter.numel())
        dist.all_gather_into_tensor(everyone, parameter.grad.flatten())
        parameter.grad = everyone.view(-1, *parameter.shape).mean(0)


# ---- my_ddp --------------------------------------------------------------------------------------
class Torchs:
    """PyTorch's own class does it."""

    def __init__(self, module, bucket_bytes):
        from torch.nn.parallel import DistributedDataParallel

        self.ddp = DistributedDataParallel(module, bucket_cap_mb=bucket_bytes / 2**20)
        self.no_sync = self.ddp.no_sync

    def __call__(self, *inputs):
        return self.ddp(*inputs)

    def no_sync(self):
        pass

    def finish(self):
        pass
