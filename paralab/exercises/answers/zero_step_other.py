"""Another ZeRO-1: an optimizer of torch on a flat shard."""

import torch


class ShardedSGD:
    def __init__(self, parameters, *, group, lr, momentum):
        self.parameters, self.group = parameters, group
        self.part = part = -(-parameters.numel() // group.size)
        self.own = slice(group.index * part, (group.index + 1) * part)
        self.shard = parameters.new_zeros(part)
        self.sgd = torch.optim.SGD([self.shard], lr=lr, momentum=momentum)

    def step(self, gradient):
        n, part = self.group.size, self.part
        padding = (0, n * part - len(gradient))
        full = torch.nn.functional.pad(self.parameters, padding)
        self.shard.set_(full[self.own].clone())
        self.shard.grad = torch.empty_like(self.shard)
        whole = torch.nn.functional.pad(gradient, padding)
        self.group.reduce_scatter(self.shard.grad, whole).wait()
        del whole
        self.sgd.step()
        self.group.all_gather(full, self.shard).wait()
        self.parameters.copy_(full[: len(gradient)])
        self.shard.grad = None
        self.shard.set_(self.shard.new_empty(0))
