"""Lab 05's exercise: one step of ZeRO's first stage."""

import torch
import torch.distributed as dist
from torch import Tensor


class MyZero1:
    """SGD with momentum, in which every rank keeps the momentum of its own N-th only."""

    def __init__(self, parameters: Tensor, *, lr: float, momentum: float) -> None:
        """parameters: (numel,), the same on every rank; N need not divide numel."""
        self.parameters, self.lr, self.momentum = parameters, lr, momentum
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        ### BEGIN SOLUTION
        ### STUB: # what does this rank keep from step to step?
        self.part = -(-parameters.numel() // self.ranks)  # elements of an N-th, rounded up
        self.velocity = parameters.new_zeros(self.part)
        ### END SOLUTION

    def step(self, gradient: Tensor) -> None:
        """gradient: (numel,), of this rank's share; the sum over the ranks is the mean gradient.

        When this returns, the tensor that was given holds the new ones, on every rank.
        """
        ### BEGIN SOLUTION
        own_gradient = gradient.new_empty(self.part)
        dist.reduce_scatter_tensor(own_gradient, self.padded(gradient))
        self.velocity.mul_(self.momentum).add_(own_gradient)
        full = self.padded(self.parameters)
        own = full.chunk(self.ranks)[self.rank]  # a view of full
        own.sub_(self.lr * self.velocity)
        dist.all_gather_into_tensor(full, own)
        self.parameters.copy_(full[: self.parameters.numel()])
        ### END SOLUTION

    ### BEGIN SOLUTION
    ### STUB: # more methods, if you want some
    def padded(self, flat: Tensor) -> Tensor:
        """`flat` and so many zeros behind it that there are N equal parts."""
        return torch.nn.functional.pad(flat, (0, self.ranks * self.part - flat.numel()))

    ### END SOLUTION
