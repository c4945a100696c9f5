"""Data parallelism: every rank holds the whole model and trains on its own share of the batch.

The loss is divided by the samples of the *global* batch (train.py), so the gradient of the whole
batch is the sum of what the N ranks have after backward. One all-reduce of the Psi gradients makes
every rank send 2 (N-1)/N Psi elements, whichever of the three forms runs:

    Naive       one all-reduce per parameter once backward is over: hundreds of small messages, each
                paying alpha
    Bucketed    the same bytes in a few flat buffers
    Overlapped  each buffer leaves as soon as its last gradient is there, while backward computes
                the rest

Memory: 4 Psi bytes of fp32 gradients, and one bucket more. Time: alpha * calls + bytes / bandwidth,
of which Overlapped hides what fits behind the backward that is left.

Li+ 2020, "PyTorch Distributed", arXiv:2006.15704, sec. 3.2 has the same ladder. Lab 02
shows it.

Each form has the same three moments: `grad_ready(parameter)`, raised once per step and parameter
when its gradient is complete over all micro-batches; `finish()`, after backward; `reset()`, before
the next step's first backward.
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

    def reset(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


class Bucketed:
    """All-reduce flat buckets when backward is over.

    Once its last gradient is complete, a bucket is put together and the gradients' own memory is
    given back, so there is never more than one bucket of extra memory. Each ``parameter.grad`` is
    then a view into its bucket, where the optimizer finds the sum.
    """

    def __init__(self, parameters: Sequence[Tensor], *, group: Group, bucket_bytes: int) -> None:
        self.parameters, self.group = list(parameters), group
        sizes = [p.numel() for p in self.parameters]
        itemsize = self.parameters[0].element_size()
        buckets = assign(sizes, bucket_bytes=bucket_bytes, itemsize=itemsize, multiple=group.size)
        self.members = [[self.parameters[index] for index in bucket.params] for bucket in buckets]
        self.padding = [  # (numel - what the gradients fill,), so that N divides the bucket
            self.parameters[0].new_zeros(b.numel - sum(sizes[i] for i in b.params)) for b in buckets
        ]
        self.bucket_of = {p: number for number, ps in enumerate(self.members) for p in ps}
        self.reset()

    def grad_ready(self, parameter: Tensor) -> None:
        number = self.bucket_of[parameter]
        self.missing[number] -= 1
        if self.missing[number] == 0:
            self.flat[number] = self.pack(self.members[number], self.padding[number])

    def pack(self, members: list[Tensor], padding: Tensor) -> Tensor:
        """One flat tensor with the gradients of ``members``, which become views into it."""
        with self.group.recorder.span("copy"):
            flat = torch.cat([*(p.grad.flatten() for p in members), padding])
            parts = flat.split([*(p.numel() for p in members), padding.numel()])
            for parameter, part in zip(members, parts, strict=False):
                parameter.grad = part.view_as(parameter)
        self.group.recorder.owns("gradients", flat)
        return flat

    def finish(self) -> None:
        for flat in self.flat:
            self.group.all_reduce(flat).wait()

    def reset(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
        self.missing = [len(members) for members in self.members]
        self.flat: list[Tensor | None] = [None] * len(self.members)


class Overlapped(Bucketed):
    """Bucketed, but a bucket leaves as soon as its last gradient is complete."""

    def grad_ready(self, parameter: Tensor) -> None:
        super().grad_ready(parameter)
        # Buckets leave in order even if a later one is complete first: every rank has to make the
        # same calls in the same order, and which gradient is ready first may differ between ranks.
        while self.next < len(self.flat) and self.flat[self.next] is not None:
            self.pending.append(self.group.all_reduce(self.flat[self.next]))
            self.next += 1

    def finish(self) -> None:
        for pending in self.pending:
            pending.wait()

    def reset(self) -> None:
        super().reset()
        self.pending: list[Pending] = []
        self.next = 0


FORMS = {"naive": Naive, "bucketed": Bucketed, "overlapped": Overlapped}
