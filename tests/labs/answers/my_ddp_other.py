"""Another DDP: every bucket has a buffer that lasts, and gradients are views of it."""

import contextlib

import torch
import torch.distributed as dist


class BucketViews(torch.nn.Module):
    def __init__(self, module, bucket_bytes):
        super().__init__()
        self.module, self.quiet, self.works = module, False, []
        buckets, self.place = [[]], {}
        for parameter in reversed(list(module.parameters())):  # backward's order
            if sum(p.nbytes for p in buckets[-1]) >= bucket_bytes:
                buckets.append([])
            buckets[-1].append(parameter)
            dist.broadcast(parameter.data, src=0)
            parameter.register_post_accumulate_grad_hook(self.ready)
        self.sizes = [len(bucket) for bucket in buckets]
        self.missing = list(self.sizes)
        self.flats = [b[0].new_zeros(sum(p.numel() for p in b)) for b in buckets]
        for number, bucket in enumerate(buckets):
            parts = self.flats[number].split([p.numel() for p in bucket])
            for parameter, part in zip(bucket, parts, strict=True):
                self.place[parameter] = number, part.view_as(parameter)

    def forward(self, *inputs):
        return self.module(*inputs)

    @contextlib.contextmanager
    def no_sync(self):
        self.quiet = True
        yield
        self.quiet = False

    def ready(self, parameter):
        if self.quiet:
            return
        number, view = self.place[parameter]
        parameter.grad = view.copy_(parameter.grad)
        self.missing[number] -= 1
        if not self.missing[number]:
            self.works.append(dist.all_reduce(self.flats[number], async_op=True))

    def finish(self):
        for work in self.works:
            work.wait()
        for flat in self.flats:
            flat /= dist.get_world_size()
        self.works, self.missing = [], list(self.sizes)
