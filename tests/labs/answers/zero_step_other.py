"""Another ZeRO-1: an optimizer of torch on a flat shard."""

import torch
import torch.distributed as dist


class ShardedSGD:
    def __init__(self, parameters, *, lr, momentum):
        self.parameters, self.n = parameters, dist.get_world_size()
        self.part = part = -(-parameters.numel() // self.n)
        self.own = slice(dist.get_rank() * part, (dist.get_rank() + 1) * part)
        self.shard = parameters.new_zeros(part)
        self.sgd = torch.optim.SGD([self.shard], lr=lr, momentum=momentum)

    def step(self, gradient):
        padding = (0, self.n * self.part - len(gradient))
        full = torch.nn.functional.pad(self.parameters, padding)
        self.shard.set_(full[self.own].clone())  # the same object: SGD finds its momentum by it
        self.shard.grad = torch.empty_like(self.shard)
        whole = torch.nn.functional.pad(gradient, padding)
        dist.reduce_scatter_tensor(self.shard.grad, whole)
        del whole
        self.sgd.step()
        dist.all_gather_into_tensor(full, self.shard)
        self.parameters.copy_(full[: len(gradient)])
        self.shard.grad = None  # between steps the parameters are whole, and the shard is empty
        self.shard.set_(self.shard.new_empty(0))
