"""Another prefetch: one list of all uses of a step, and reductions that are hidden as well."""

import torch
import torch.distributed as dist

from paralab.exercises.answers.my_zero3 import MyZero3


class InOrder(MyZero3):
    """The next unit in the order of uses is in flight, and so is the reduction before it."""

    def __init__(self, units, lr):
        super().__init__(units, lr)
        self.uses, self.flying, self.reduction = [], {}, None

    def gather_unit(self, i):
        last = len(self.units) - 1
        if not self.uses:  # a new micro-batch; the last unit stays whole until its backward
            self.uses = [*range(last + 1), *reversed(range(last))]
        for unit in self.uses[:2]:
            if unit not in self.flying:
                flat = self.flats[unit]
                flat.untyped_storage().resize_(flat.nbytes)
                work = dist.all_gather_into_tensor(flat, self.shards[unit], async_op=True)
                self.flying[unit] = work
        self.uses.pop(0)
        self.flying.pop(i).wait()
        self.missing[i] = len(list(self.units[i].parameters()))

    def used(self, i, output):
        if i < len(self.units) - 1:
            super().used(i, output)

    def reduce(self, i):
        self.finish()  # the unit before this one: all of this unit's backward has hidden it
        parameters = list(self.units[i].parameters())
        flat = torch.zeros_like(self.shards[i]).repeat(self.ranks)
        sizes = [parameter.numel() for parameter in parameters]
        for part, parameter in zip(flat[: sum(sizes)].split(sizes), parameters, strict=True):
            part.copy_(parameter.grad.flatten())
            parameter.grad = None
        own = torch.empty_like(self.shards[i])
        self.reduction = i, own, dist.reduce_scatter_tensor(own, flat, async_op=True)

    def finish(self):
        if self.reduction:
            i, own, work = self.reduction
            work.wait()
            self.gradients[i] += own / self.ranks
            self.reduction = None

    def step(self):
        self.finish()
        super().step()

    def gather(self):
        for i in range(len(self.units)):
            super().gather_unit(i)
