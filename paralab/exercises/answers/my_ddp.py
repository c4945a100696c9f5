"""Lab 02's implementation: DDP, with buckets that leave while backward still runs."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn


class MyDDP:
    """A module whose gradients become their mean over the ranks, as DistributedDataParallel."""

    def __init__(self, module: nn.Module, bucket_bytes: int) -> None:
        """bucket_bytes: a bucket is closed when it holds at least this many bytes."""
        self.module, self.bucket_bytes = module, bucket_bytes
        ### BEGIN SOLUTION
        ### STUB: # all ranks begin with rank 0's weights; autograd has to call you
        self.quiet = False  # inside no_sync()
        self.bucket, self.in_flight = [], []
        with torch.no_grad():
            for parameter in module.parameters():
                dist.broadcast(parameter, src=0)
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self.ready)
        ### END SOLUTION

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        """The module's forward."""
        return self.module(*inputs)

    @contextlib.contextmanager
    def no_sync(self):
        """Within, a backward adds to the gradients and sends nothing."""
        ### BEGIN SOLUTION
        ### STUB: raise NotImplementedError("your turn")
        ### STUB: yield
        self.quiet = True
        try:
            yield
        finally:
            self.quiet = False
        ### END SOLUTION

    def finish(self) -> None:
        """Backward is over. When this returns, every gradient is the mean over the ranks."""
        ### BEGIN SOLUTION
        if self.bucket:
            self.send()
        for flat, parameters, work in self.in_flight:
            work.wait()
            flat /= dist.get_world_size()
            parts = flat.split([parameter.numel() for parameter in parameters])
            for parameter, part in zip(parameters, parts, strict=True):
                parameter.grad = part.view_as(parameter)
        self.in_flight = []
        ### END SOLUTION

    ### BEGIN SOLUTION
    ### STUB: # more methods, if you want some
    def ready(self, parameter: nn.Parameter) -> None:
        """parameter.grad is complete on this rank, and backward goes on after this call."""
        if self.quiet:
            return
        self.bucket.append(parameter)
        if sum(one.grad.nbytes for one in self.bucket) >= self.bucket_bytes:
            self.send()

    def send(self) -> None:
        """One message for the whole bucket, without waiting for it."""
        flat = torch.cat([parameter.grad.flatten() for parameter in self.bucket])
        work = dist.all_reduce(flat, async_op=True)
        self.in_flight.append((flat, self.bucket, work))
        self.bucket = []

    ### END SOLUTION
