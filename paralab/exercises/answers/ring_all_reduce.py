"""Lab 01's exercise: an all-reduce on a ring, from sends and receives."""

import torch
import torch.distributed as dist
from torch import Tensor


def ring_all_reduce(tensor: Tensor) -> None:
    """Sum tensor, (elements,), over all ranks, in place; elements need not be a multiple of N."""
    n, rank = dist.get_world_size(), dist.get_rank()
    left, right = (rank - 1) % n, (rank + 1) % n
    ### BEGIN SOLUTION
    chunks = tensor.tensor_split(n)  # views; the first ones are an element longer
    buffer = torch.empty_like(chunks[0])

    def exchange(leaving: Tensor, arriving: Tensor) -> None:
        pair = [
            dist.P2POp(dist.isend, leaving, right),
            dist.P2POp(dist.irecv, arriving, left),
        ]
        for work in dist.batch_isend_irecv(pair):
            work.wait()

    for step in range(n - 1):  # reduce-scatter: partial sums move on and grow
        mine = chunks[(rank - step - 1) % n]
        partial = buffer[: mine.numel()]
        exchange(chunks[(rank - step) % n], partial)
        mine += partial
    for step in range(n - 1):  # all-gather: complete sums move on
        exchange(chunks[(rank + 1 - step) % n], chunks[(rank - step) % n])
    ### END SOLUTION
