"""Lab 05: ZeRO-3s that are wrong in more than a line of the answer, and one that is right.

Ranks import this module.
"""

from __future__ import annotations

from written import MyPrefetch


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
