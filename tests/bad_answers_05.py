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


class NotBefore(Good):
    """Forward of a unit begins while its parameters are freed."""

    def fetch(self, one):
        one["missing"] = len(one["parameters"])

    def after(self, one, output):
        output.register_hook(lambda _: super(NotBefore, self).fetch(one))


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


# ---- my_prefetch ---------------------------------------------------------------------------------
class Ahead(Good):
    """A right answer; the wrong ones change one thing of it."""

    def __init__(self, units, lr):
        self.flying = {}
        super().__init__(units, lr)
        for place, one in enumerate(self.units):
            one["place"] = place

    def post(self, place):
        import torch.distributed as dist

        if 0 <= place < len(self.units) and place not in self.flying:
            one = self.units[place]
            one["flat"].untyped_storage().resize_(one["flat"].nbytes)
            work = dist.all_gather_into_tensor(one["flat"], one["shard"], async_op=True)
            self.flying[place] = work

    def fetch(self, one, following=1):
        self.post(one["place"])
        self.post(one["place"] + following)
        self.arrive(one)

    def arrive(self, one):
        self.flying.pop(one["place"]).wait()
        one["missing"] = len(one["parameters"])

    def after(self, one, output):
        self.free(one)
        output.register_hook(lambda _: self.fetch(one, -1))


class LearnsTheOrder(Ahead):
    """Right: the first step shows which unit follows which, later ones look ahead."""

    def __init__(self, units, lr):
        self.seen, self.known, self.at = [], [], 0
        super().__init__(units, lr)

    def fetch(self, one, following=1):
        self.seen.append(one["place"])
        self.at += 1
        self.post(one["place"])
        if self.at < len(self.known) and self.known[self.at] != one["place"]:
            self.post(self.known[self.at])
        self.arrive(one)

    def step(self):
        self.known, self.seen, self.at = self.seen, [], 0
        super().step()

    def gather(self):
        self.known = []
        super().gather()


class InForwardOnly(Ahead):
    def after(self, one, output):
        self.free(one)
        output.register_hook(lambda _: self.fetch(one, 0))


class InBackwardOnly(Ahead):
    def fetch(self, one, following=0):
        super().fetch(one, following)


class PostsAfterwards(Ahead):
    """The next unit is posted when this one has computed."""

    def fetch(self, one, following=0):
        super().fetch(one, 0)

    def after(self, one, output):
        super().after(one, output)
        if one["place"] < len(self.units) - 1:
            self.post(one["place"] + 1)

    def reduce(self, one):
        super().reduce(one)
        self.post(one["place"] - 1)


class WaitsForBoth(Ahead):
    """The next unit is there before this one computes."""

    def fetch(self, one, following=1):
        super().fetch(one, following)
        for work in self.flying.values():
            work.wait()


class WrongWay(Ahead):
    """In backward, too, the next unit is the one behind."""

    def after(self, one, output):
        self.free(one)
        output.register_hook(lambda _: self.fetch(one, 1))


class TwoAhead(Ahead):
    def fetch(self, one, following=1):
        self.post(one["place"])
        self.post(one["place"] + following)
        self.post(one["place"] + 2 * following)
        self.arrive(one)


class AllAhead(Ahead):
    def fetch(self, one, following=1):
        places = range(len(self.units)) if following == 1 else range(one["place"], -1, -1)
        for place in [p for p in places if following < 0 or p >= one["place"]]:
            self.post(place)
        self.arrive(one)


class NeverWaits(Ahead):
    def arrive(self, one):
        self.flying.pop(one["place"])
        one["missing"] = len(one["parameters"])


class WaitsWhenItIsOver(Ahead):
    """A unit's gather is waited for after its forward."""

    def fetch(self, one, following=1):
        if following < 0:
            super().fetch(one, following)
            return
        self.post(one["place"])
        self.post(one["place"] + following)

    def after(self, one, output):
        self.arrive(one)
        super().after(one, output)


class OneGatherOnly(Ahead):
    """Nothing is gathered again for backward."""

    def after(self, one, output):
        self.free(one)


class AheadStaysWhole(Ahead):
    def after(self, one, output):
        pass


class AheadAllReduces(Ahead):
    reduce = AllReduces.reduce


class AheadSums(Ahead):
    add = Sums.add


class FirstUnitStays(Ahead):
    """The first unit of the next step is gathered at the end of this one."""

    def step(self):
        super().step()
        self.post(0)


class HidesReductionsOnly(Good):
    """Reductions are in flight behind backward, gathers are not."""

    last = None

    def reduce(self, one):
        import torch
        import torch.distributed as dist

        self.end()
        flat = torch.cat([p.grad.flatten() for p in one["parameters"]])
        flat = torch.nn.functional.pad(flat, (0, one["flat"].numel() - flat.numel()))
        own = torch.empty_like(one["shard"])
        self.last = one, own, dist.reduce_scatter_tensor(own, flat, async_op=True)
        for p in one["parameters"]:
            p.grad = None

    def end(self):
        if self.last:
            one, own, work = self.last
            work.wait()
            self.add(one, own)
            self.last = None

    def step(self):
        self.end()
        super().step()


class KnowsTheTimedUnits(HidesReductionsOnly):
    """Where it is timed it is stage 2: units stay whole, and are gathered after the update."""

    def made(self, unit):
        one = super().made(unit)
        one["timed"] = one["flat"].numel() == 4000
        if one["timed"]:
            super().fetch(one)
        return one

    def fetch(self, one):
        if not one.get("timed"):
            super().fetch(one)
        elif one.get("work"):
            one.pop("work").wait()
        one["missing"] = len(one["parameters"])

    def free(self, one):
        if not one.get("timed"):
            super().free(one)

    def step(self):
        import torch.distributed as dist

        super().step()
        for one in self.units:
            if one["timed"]:
                one["work"] = dist.all_gather_into_tensor(one["flat"], one["shard"], async_op=True)


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


class NoGatherAhead(Ahead):
    gather = None
