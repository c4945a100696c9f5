"""Lab 02: answers that are wrong, and unusual ones that are right.

Ranks import this module, so it imports torch only where it runs.
"""

from __future__ import annotations

import contextlib


# ---- average_gradients ---------------------------------------------------------------------------
def mean_coalesced(module):
    """Right: reduced to rank 0 in large messages, then broadcast, which sends as much."""
    import torch
    import torch.distributed as dist

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
    import torch
    import torch.distributed as dist

    for parameter in module.parameters():
        everyone = torch.empty(dist.get_world_size() * parameter.numel())
        dist.all_gather_into_tensor(everyone, parameter.grad.flatten())
        parameter.grad = everyone.view(-1, *parameter.shape).mean(0)


# ---- my_ddp --------------------------------------------------------------------------------------
class Good:
    """A right answer by other means; the wrong ones change one thing of it."""

    def __init__(self, module, bucket_bytes):
        self.module, self.bucket_bytes = module, bucket_bytes
        self.parameters, self.quiet = list(module.parameters()), False
        self.begin()
        self.agree()
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self.ready)

    def begin(self):
        self.buckets, self.sent = [[]], []

    def agree(self):
        import torch.distributed as dist

        for parameter in self.parameters:
            dist.broadcast(parameter.data, src=0)

    def __call__(self, *inputs):
        return self.module(*inputs)

    @contextlib.contextmanager
    def no_sync(self):
        self.quiet = True
        yield
        self.quiet = False

    def ready(self, parameter):
        if self.quiet:
            return
        self.buckets[-1].append(parameter)
        if sum(p.grad.nbytes for p in self.buckets[-1]) >= self.bucket_bytes:
            self.send(self.buckets[-1])
            self.buckets.append([])

    def flat(self, bucket):
        import torch

        return torch.cat([p.grad.flatten() for p in bucket])

    def send(self, bucket):
        import torch.distributed as dist

        flat = self.flat(bucket)
        self.sent.append((flat, bucket, dist.all_reduce(flat, async_op=True)))

    def finish(self):
        if self.buckets[-1]:
            self.send(self.buckets[-1])
        for flat, bucket, work in self.sent:
            work.wait()
            self.give_back(flat, bucket)
        self.begin()

    def mean(self, flat):
        import torch.distributed as dist

        return flat / dist.get_world_size()

    def give_back(self, flat, bucket):
        parts = self.mean(flat).split([p.numel() for p in bucket])
        for p, part in zip(bucket, parts, strict=True):
            p.grad.copy_(part.view_as(p))


class DividesFirst(Good):
    """Right: every rank's share is divided before it is sent."""

    def flat(self, bucket):
        return super().mean(super().flat(bucket))

    def mean(self, flat):
        return flat


class Sums(Good):
    def mean(self, flat):
        return flat


class AveragesTwice(Good):
    def mean(self, flat):
        return super().mean(super().mean(flat))


class ForFour(Good):
    def mean(self, flat):
        return flat / 4


class UntilTheSecond(Good):
    """Right in two steps."""

    count = 0

    def finish(self):
        self.count += 1
        super().finish()

    def mean(self, flat):
        return super().mean(flat) * (1 if self.count <= 2 else 2)


class ForgetsOne(Good):
    def ready(self, parameter):
        if parameter is not self.parameters[3]:
            super().ready(parameter)


class ForgetsTheRest(Good):
    """A bucket that is not full is not sent."""

    def finish(self):
        self.buckets[-1] = []
        super().finish()


class Nothing(Good):
    def ready(self, parameter):
        pass


class NoBroadcast(Good):
    """Every rank goes on from weights of its own."""

    def agree(self):
        pass


class NoSyncSyncs(Good):
    """Right, and sends after every micro-batch."""

    @contextlib.contextmanager
    def no_sync(self):
        yield
        self.finish()


class NoSyncForGood(Good):
    """Once quiet, always quiet."""

    @contextlib.contextmanager
    def no_sync(self):
        self.quiet = True
        yield


class NoWait(Good):
    """Reads the sums before they have arrived."""

    def send(self, bucket):
        super().send(bucket)
        flat, bucket, work = self.sent[-1]
        self.sent[-1] = flat.clone(), bucket, work


class WaitsForTheLast(Good):
    def finish(self):
        if self.buckets[-1]:
            self.send(self.buckets[-1])
        self.sent[-1][2].wait()
        for flat, bucket, _ in self.sent:
            self.give_back(flat, bucket)
        self.begin()


class KeepsBuckets(Good):
    """What was left of the step before is sent again."""

    first = True

    def begin(self):
        if self.first:
            super().begin()
        self.first = False


class OnlyRootKnows(Good):
    def give_back(self, flat, bucket):
        import torch.distributed as dist

        if dist.get_rank() == 0:
            super().give_back(flat, bucket)


class PerParameter(Good):
    def __init__(self, module, bucket_bytes):
        super().__init__(module, 1)


class OneBucket(Good):
    def __init__(self, module, bucket_bytes):
        super().__init__(module, 2**40)


class AfterBackward(Good):
    def ready(self, parameter):
        if not self.quiet:
            self.buckets[-1].append(parameter)
            if sum(p.grad.nbytes for p in self.buckets[-1]) >= self.bucket_bytes:
                self.buckets.append([])

    def finish(self):
        for bucket in filter(None, self.buckets[:-1]):
            self.send(bucket)
        super().finish()


class WaitsAtOnce(Good):
    def send(self, bucket):
        super().send(bucket)
        self.sent[-1][2].wait()


class GathersAll(Good):
    """Every rank gets every gradient and adds them up itself."""

    def send(self, bucket):
        import torch.distributed as dist

        flat = self.flat(bucket)
        everyone = flat.new_empty(dist.get_world_size() * flat.numel())
        work = dist.all_gather_into_tensor(everyone, flat, async_op=True)
        self.sent.append((everyone, bucket, work))

    def give_back(self, flat, bucket):
        import torch.distributed as dist

        super().give_back(flat.view(dist.get_world_size(), -1).sum(0), bucket)


class TwoCopies(Good):
    """Keeps what it sent in addition to what came back."""

    kept = ()

    def send(self, bucket):
        super().send(bucket)
        self.kept = [*self.kept, self.flat(bucket)]


class NumpyCopies(Good):
    """Right, and keeps three copies of the gradients where no tensor shows them."""

    def begin(self):
        self.kept = []
        super().begin()

    def ready(self, parameter):
        self.kept += [parameter.grad.numpy().copy() for _ in range(3)]
        super().ready(parameter)


class Little(Good):
    """Guesses every sum, and sends next to nothing."""

    def send(self, bucket):
        import torch
        import torch.distributed as dist

        work = dist.all_reduce(torch.zeros(1), async_op=True)
        self.sent.append((4 * self.flat(bucket), bucket, work))


class OtherOrderOnEveryRank(AfterBackward):
    """Buckets are sent in an order of each rank's own."""

    def finish(self):
        import torch.distributed as dist

        if dist.get_rank():
            self.buckets.reverse()
        self.buckets.append([])
        super().finish()


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


class Raises(Good):
    def finish(self):
        raise KeyError("bucket 7")


class HasNoFinish:
    def __init__(self, module, bucket_bytes):
        pass

    def no_sync(self):
        pass


class OneArgument(Good):
    def __init__(self, module):
        super().__init__(module, 2**20)
