"""Lab 05's implementation: ZeRO-3, with units that are gathered before use and freed after it."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn


class MyZero3:
    """SGD on 1/N of every unit's parameters; a unit is whole only while it computes."""

    def __init__(self, units: Sequence[nn.Module], lr: float) -> None:
        """units: modules that are called one after the other, with the same weights on every
        rank. After this call no rank holds more than 1/N of their parameters.
        """
        self.lr = lr
        ### BEGIN SOLUTION
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.units, self.flats, self.shards, self.gradients = list(units), [], [], []
        self.missing = [0] * len(self.units)  # gradients of the unit that are still to come
        for i, unit in enumerate(self.units):
            self.shard(unit)
            unit.register_forward_pre_hook(lambda *_, i=i: self.gather_unit(i))
            unit.register_forward_hook(lambda _, inputs, output, i=i: self.used(i, output))
            for parameter in unit.parameters():
                parameter.register_post_accumulate_grad_hook(lambda _, i=i: self.ready(i))
        ### END SOLUTION

    def step(self) -> None:
        """After the last backward: update this rank's shards with the mean gradient."""
        ### BEGIN SOLUTION
        for shard, gradient in zip(self.shards, self.gradients, strict=True):
            shard -= self.lr * gradient
            gradient.zero_()
        ### END SOLUTION

    def gather(self) -> None:
        """All parameters are whole again, on every rank: for a checkpoint or an evaluation."""
        ### BEGIN SOLUTION
        for i in range(len(self.units)):
            self.gather_unit(i)
        ### END SOLUTION

    ### BEGIN SOLUTION
    ### STUB: # more methods, if you want some
    def shard(self, unit: nn.Module) -> None:
        """Parameters become views of one flat tensor, whose storage is freed; a shard stays."""
        parameters = list(unit.parameters())
        sizes = [parameter.numel() for parameter in parameters]
        part = -(-sum(sizes) // self.ranks)  # padded to N equal parts
        flat = parameters[0].new_zeros(self.ranks * part)
        views = flat[: sum(sizes)].split(sizes)
        for parameter, view in zip(parameters, views, strict=True):
            view.copy_(parameter.data.flatten())
            parameter.data = view.view_as(parameter)
        self.shards.append(flat.chunk(self.ranks)[self.rank].clone())
        self.gradients.append(torch.zeros_like(self.shards[-1]))
        self.flats.append(flat)
        self.free(len(self.flats) - 1)

    def gather_unit(self, i: int) -> None:
        flat = self.flats[i]
        flat.untyped_storage().resize_(flat.nbytes)
        dist.all_gather_into_tensor(flat, self.shards[i])
        self.missing[i] = len(list(self.units[i].parameters()))

    def used(self, i: int, output: torch.Tensor) -> None:
        """Forward of this unit is over; its backward begins when the output has a gradient."""
        self.free(i)
        output.register_hook(lambda _: self.gather_unit(i))

    def free(self, i: int) -> None:
        """The views stay and lose their storage: autograd has saved some of them for backward."""
        self.flats[i].untyped_storage().resize_(0)

    def ready(self, i: int) -> None:
        """One more gradient of this unit is complete; after the last, they are reduced."""
        self.missing[i] -= 1
        if not self.missing[i]:
            self.free(i)
            self.reduce(i)

    def reduce(self, i: int) -> None:
        """This rank adds its N-th of the mean gradient to what it keeps; the rest is freed."""
        parameters = list(self.units[i].parameters())
        flat = torch.cat([parameter.grad.flatten() for parameter in parameters])
        flat = nn.functional.pad(flat, (0, self.flats[i].numel() - flat.numel()))
        own = torch.empty_like(self.shards[i])
        dist.reduce_scatter_tensor(own, flat)
        self.gradients[i] += own / self.ranks
        for parameter in parameters:
            parameter.grad = None

    ### END SOLUTION
