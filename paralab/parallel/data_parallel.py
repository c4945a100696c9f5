"""Data parallelism: every rank holds the whole model and trains on its own share of the batch.

After backward the ranks' gradients differ; their mean over the N ranks is the gradient of the whole batch. One
all-reduce of the Psi gradients makes every rank send 2 (N-1)/N Psi elements, whichever of the three forms runs:

    Naive       one all-reduce per parameter once backward is over: hundreds of small messages, each paying alpha
    Bucketed    the same bytes in a few flat buffers
    Overlapped  each buffer leaves as soon as its last gradient is there, while backward computes the rest

Memory: 4 Psi bytes of fp32 gradients, lying in the buckets. Time: alpha * calls + bytes / bandwidth, of which
Overlapped hides what fits behind the backward that is left.

Li+ 2020, "PyTorch Distributed", arXiv:2006.15704, sec. 3.2 has the same ladder. Labs 00 and 02 show it.

Each form has the same three moments: `grad_ready(parameter)`, raised once per step and parameter when its gradient is
complete over all micro-batches; `finish()`, after backward; `reset()`, before the next step's first backward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paralab.comm import Group, Pending
from paralab.parallel.buckets import assign


class Naive:
    """One all-reduce per parameter, one after the other, when backward is over."""

    def __init__(self, parameters: Sequence[Tensor], *, group: Group, bucket_bytes: int) -> None:
        self.parameters, self.group = list(parameters), group

    def grad_ready(self, parameter: Tensor) -> None:
        pass  # nothing leaves before backward is over

    def finish(self) -> None:
        for parameter in self.parameters:
            self.group.all_reduce(parameter.grad).wait()
            parameter.grad.div_(self.group.size)  # the sum over ranks becomes their mean

    def reset(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


class Bucketed:
    """All-reduce flat buckets when backward is over.

    ``parameter.grad`` is a view into its bucket, so backward itself puts the gradients where they leave from
    and where the optimizer finds the mean: no gradient is copied in or out.
    """

    def __init__(self, parameters: Sequence[Tensor], *, group: Group, bucket_bytes: int) -> None:
        self.parameters, self.group = list(parameters), group
        sizes = [p.numel() for p in self.parameters]
        itemsize = self.parameters[0].element_size()
        self.buckets = assign(sizes, bucket_bytes=bucket_bytes, itemsize=itemsize, multiple=group.size)
        self.flat = [self.parameters[0].new_zeros(b.numel) for b in self.buckets]  # (padded,)
        for bucket, flat in zip(self.buckets, self.flat, strict=True):
            for index, offset in zip(bucket.params, bucket.offsets, strict=True):
                parameter = self.parameters[index]
                parameter.grad = flat[offset : offset + sizes[index]].view_as(parameter)

    def grad_ready(self, parameter: Tensor) -> None:
        pass

    def finish(self) -> None:
        for flat in self.flat:
            self.group.all_reduce(flat).wait()
            flat.div_(self.group.size)

    def reset(self) -> None:
        for flat in self.flat:
            flat.zero_()  # backward adds to what is there


class Overlapped(Bucketed):
    """Bucketed, but a bucket leaves as soon as its last gradient is complete."""

    def __init__(self, parameters: Sequence[Tensor], *, group: Group, bucket_bytes: int) -> None:
        super().__init__(parameters, group=group, bucket_bytes=bucket_bytes)
        self.bucket_of = {
            self.parameters[index]: number
            for number, bucket in enumerate(self.buckets)
            for index in bucket.params
        }
        self.reset()

    def grad_ready(self, parameter: Tensor) -> None:
        number = self.bucket_of[parameter]
        self.missing[number] -= 1
        # Buckets leave in order even if one is complete early: every rank has to make the same calls in
        # the same order, and which gradient is ready first may differ between ranks.
        while self.next < len(self.buckets) and self.missing[self.next] == 0:
            self.pending.append(self.group.all_reduce(self.flat[self.next]))
            self.next += 1

    def finish(self) -> None:
        if self.next < len(self.buckets):
            raise RuntimeError(
                f"{sum(self.missing)} gradients were never complete: a parameter took no part in the loss"
            )
        for pending, flat in zip(self.pending, self.flat, strict=True):
            pending.wait()
            flat.div_(self.group.size)

    def reset(self) -> None:
        super().reset()
        self.missing = [len(bucket.params) for bucket in self.buckets]
        self.pending: list[Pending] = []
        self.next = 0


FORMS = {"naive": Naive, "bucketed": Bucketed, "overlapped": Overlapped}
