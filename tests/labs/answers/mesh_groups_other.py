"""Lab 10's warm-up once more, from the coordinates alone."""

import itertools

import torch.distributed as dist


def mesh_groups(*, dp, pp, tp):
    """This rank's coordinates and groups: the ranks of a group have the other two in common."""
    sizes = {"pp": pp, "dp": dp, "tp": tp}
    everyone = [
        dict(zip(sizes, at, strict=True)) for at in itertools.product(*map(range, sizes.values()))
    ]
    where, groups = everyone[dist.get_rank()], {}
    for axis in sizes:
        same = {}
        for rank, at in enumerate(everyone):
            others = tuple(at[other] for other in sizes if other != axis)
            same.setdefault(others, []).append(rank)
        for others, ranks in same.items():
            made = dist.new_group(ranks)
            if others == tuple(where[other] for other in sizes if other != axis):
                groups[axis] = made
    return where, groups
