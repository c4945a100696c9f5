"""Lab 05: ZeRO-3s that are wrong, each in one thing, and an unusual one that is right.

Ranks import this module, so it imports torch only where it runs.
"""

from __future__ import annotations


class Good:
    """A right answer; the wrong ones change one thing of it."""

    def __init__(self, units, lr):
        import torch.distributed as dist

        self.lr, self.n, self.rank = lr, dist.get_world_size(), dist.get_rank()
        self.units = [self.made(unit) for unit in units]

    def made(self, unit):
        import torch

        parameters = list(unit.parameters())
        sizes = [p.numel() for p in parameters]
        flat = torch.zeros(-(-sum(sizes) // self.n) * self.n)
        for p, view in zip(parameters, flat[: sum(sizes)].split(sizes), strict=True):
            view.copy_(p.data.flatten())
            p.data = view.view_as(p)
        shard = flat.chunk(self.n)[self.own_part()].clone()
        one = {"flat": flat, "shard": shard, "gradient": torch.zeros_like(shard)}
        one |= {"parameters": parameters, "missing": 0}
        self.free(one)
        unit.register_forward_pre_hook(lambda *_: self.fetch(one))
        unit.register_forward_hook(lambda _, inputs, output: self.after(one, output))
        for p in parameters:
            p.register_post_accumulate_grad_hook(lambda _: self.ready(one))
        return one

    def own_part(self):
        return self.rank

    def fetch(self, one):
        import torch.distributed as dist

        one["flat"].untyped_storage().resize_(one["flat"].nbytes)
        dist.all_gather_into_tensor(one["flat"], one["shard"])
        one["missing"] = len(one["parameters"])

    def free(self, one):
        one["flat"].untyped_storage().resize_(0)

    def after(self, one, output):
        self.free(one)
        output.register_hook(lambda _: self.fetch(one))

    def ready(self, one):
        one["missing"] -= 1
        if not one["missing"]:
            self.free(one)
            self.reduce(one)

    def reduce(self, one):
        import torch
        import torch.distributed as dist

        flat = torch.cat([p.grad.flatten() for p in one["parameters"]])
        flat = torch.nn.functional.pad(flat, (0, one["flat"].numel() - flat.numel()))
        own = torch.empty_like(one["shard"])
        dist.reduce_scatter_tensor(own, flat)
        self.add(one, own)
        for p in one["parameters"]:
            p.grad = None

    def add(self, one, own):
        one["gradient"] += own / self.n

    def step(self):
        for one in self.units:
            one["shard"] -= self.lr * one["gradient"]
            one["gradient"].zero_()

    def gather(self):
        for one in self.units:
            self.fetch(one)


class Recomputes(Good):
    """Right: sums first, divides in the step."""

    def add(self, one, own):
        one["gradient"] += own

    def step(self):
        for one in self.units:
            one["gradient"] /= self.n
        super().step()


class StaysWhole(Good):
    """A unit stays gathered between forward and backward: stage 2 in memory."""

    def after(self, one, output):
        pass


class NeverFrees(StaysWhole):
    def ready(self, one):
        one["missing"] -= 1
        if not one["missing"]:
            self.reduce(one)


class KeepsAll(Good):
    """Every rank keeps whole parameters in addition to its shard."""

    def made(self, unit):
        one = super().made(unit)
        self.fetch(one)
        one["copy"] = one["flat"].clone()
        self.free(one)
        return one


class GradientsAtTheEnd(Good):
    """Whole gradients of all units wait for the step."""

    def ready(self, one):
        one["missing"] -= 1
        if not one["missing"]:
            self.free(one)

    def step(self):
        for one in self.units:
            self.reduce(one)
        super().step()


class Sums(Good):
    def add(self, one, own):
        one["gradient"] += own


class LastMicrobatchOnly(Good):
    def add(self, one, own):
        one["gradient"].copy_(own / self.n)


class NeverZero(Good):
    """The gradients of the step before are added to those of this one."""

    def step(self):
        for one in self.units:
            one["shard"] -= self.lr * one["gradient"]


class ForFour(Good):
    def add(self, one, own):
        one["gradient"] += own / 4


class OwnGradient(Good):
    """Every rank updates its part by its own samples."""

    def reduce(self, one):
        import torch

        flat = torch.cat([p.grad.flatten() for p in one["parameters"]])
        flat = torch.nn.functional.pad(flat, (0, one["flat"].numel() - flat.numel()))
        one["gradient"] += flat.chunk(self.n)[self.rank]
        for p in one["parameters"]:
            p.grad = None


class AllReduces(Good):
    """Right, and sends twice what a reduce-scatter does."""

    def reduce(self, one):
        import torch
        import torch.distributed as dist

        flat = torch.cat([p.grad.flatten() for p in one["parameters"]])
        flat = torch.nn.functional.pad(flat, (0, one["flat"].numel() - flat.numel()))
        dist.all_reduce(flat)
        self.add(one, flat.chunk(self.n)[self.rank])
        for p in one["parameters"]:
            p.grad = None


class OtherPart(Good):
    def own_part(self):
        return (self.rank + 1) % self.n


class NoStep(Good):
    def step(self):
        pass


class NoGather(Good):
    """Only rank 0 gathers: the others have not met it."""

    def gather(self):
        for one in self.units:
            one["flat"].untyped_storage().resize_(one["flat"].nbytes)
            one["flat"].zero_()


class Raises(Good):
    def step(self):
        raise KeyError("unit 7")


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


class HasNoGather:
    def __init__(self, units, lr):
        pass

    def step(self):
        pass
