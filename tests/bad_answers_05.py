"""Lab 05: ZeRO-3s that are wrong in more than a line of the answer, and one that is right.

Ranks import this module.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from paralab.exercises.answers.my_prefetch import MyPrefetch
from paralab.exercises.answers.my_zero3 import MyZero3


class Torchs:
    """PyTorch's own function does it."""

    def __init__(self, units, lr):
        from torch.distributed.fsdp import fully_shard

        for unit in units:
            fully_shard(unit)

    def step(self):
        pass

    def gather(self):
        pass


# ---- my_prefetch ---------------------------------------------------------------------------------
class LearnsTheOrder(MyPrefetch):
    """Right: the first step shows which unit follows which, later ones look ahead."""

    def __init__(self, units, lr):
        self.seen, self.known, self.at = [], [], 0
        super().__init__(units, lr)

    def gather_unit(self, i, following=1):
        self.seen.append(i)
        self.at += 1
        self.post(i)
        if self.at < len(self.known) and self.known[self.at] != i:
            self.post(self.known[self.at])
        super().gather_unit(i, following=0)

    def step(self):
        self.known, self.seen, self.at = self.seen, [], 0
        super().step()

    def gather(self):
        self.known = []
        super().gather()


class AllAhead(MyPrefetch):
    def gather_unit(self, i, following=1):
        for place in range(i, len(self.units)) if following == 1 else range(i, -1, -1):
            self.post(place)
        super().gather_unit(i, following=0)


class WaitsWhenItIsOver(MyPrefetch):
    """A unit's gather is waited for after its forward."""

    def gather_unit(self, i, following=1):
        if following < 0:
            super().gather_unit(i, following)
            return
        self.post(i)
        self.post(i + following)

    def used(self, i, output):
        super().gather_unit(i, following=0)
        super().used(i, output)


class HidesReductionsOnly(MyZero3):
    """Reductions are in flight behind backward, gathers are not."""

    last = None

    def reduce(self, i):
        self.end()
        parameters = list(self.units[i].parameters())
        flat = torch.cat([p.grad.flatten() for p in parameters])
        flat = torch.nn.functional.pad(flat, (0, self.flats[i].numel() - flat.numel()))
        own = torch.empty_like(self.shards[i])
        self.last = i, own, dist.reduce_scatter_tensor(own, flat, async_op=True)
        for p in parameters:
            p.grad = None

    def end(self):
        if self.last:
            i, own, work = self.last
            work.wait()
            self.gradients[i] += own / self.ranks
            self.last = None

    def step(self):
        self.end()
        super().step()


class KnowsTheTimedUnits(HidesReductionsOnly):
    """Where it is timed it is stage 2: units stay whole, and are gathered after the update."""

    def __init__(self, units, lr):
        self.works = {}
        super().__init__(units, lr)

    def timed(self, i):
        return self.flats[i].numel() == 4000

    def shard(self, unit):
        super().shard(unit)
        i = len(self.flats) - 1
        if self.timed(i):
            self.flats[i].untyped_storage().resize_(self.flats[i].nbytes)
            dist.all_gather_into_tensor(self.flats[i], self.shards[i])

    def gather_unit(self, i):
        if not self.timed(i):
            super().gather_unit(i)
        elif i in self.works:
            self.works.pop(i).wait()
        self.missing[i] = len(list(self.units[i].parameters()))

    def free(self, i):
        if not self.timed(i):
            super().free(i)

    def step(self):
        super().step()
        for i in filter(self.timed, range(len(self.units))):
            work = dist.all_gather_into_tensor(self.flats[i], self.shards[i], async_op=True)
            self.works[i] = work


class Alone:
    """Every rank trains whole units, and sends nothing."""

    def __init__(self, units, lr):
        self.parameters = [p for unit in units for p in unit.parameters()]
        self.lr = lr

    def step(self):
        for p in self.parameters:
            p.data -= self.lr * p.grad
            p.grad = None

    def gather(self):
        pass
