"""Lab 01's exercise, another way: the sum inside the node from an all-to-all."""

import torch.distributed as dist


def by_all_to_all(tensor, ranks_per_node):
    n, rank, k = dist.get_world_size(), dist.get_rank(), ranks_per_node
    inside = across = None
    for first in range(0, n, k):
        group = dist.new_group(list(range(first, first + k)))
        if first <= rank < first + k:
            inside = group
    for place in range(k):
        group = dist.new_group(list(range(place, n, k)))
        if rank % k == place:
            across = group
    terms = tensor.new_empty(k, tensor.numel() // k)  # row i: rank i's term of this rank's part
    dist.all_to_all_single(terms.view(-1), tensor, group=inside)
    part = terms[0]
    for term in terms[1:]:
        part += term
    dist.all_reduce(part, group=across)
    dist.all_gather_into_tensor(tensor, part, group=inside)
