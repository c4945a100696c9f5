"""Lab 10's warm-up: the coordinates of a rank in a mesh, and its groups."""

import torch
import torch.distributed as dist


def mesh_groups(*, dp, pp, tp):
    """This rank's coordinates {"dp": int, "pp": int, "tp": int} and its groups {axis: group}.

    Ranks are numbered r = (pp_index * dp + dp_index) * tp + tp_index.
    """
    ### BEGIN SOLUTION
    grid, rank = torch.arange(pp * dp * tp).reshape(pp, dp, tp), dist.get_rank()
    where = dict(zip(("pp", "dp", "tp"), (grid == rank).nonzero()[0].tolist(), strict=True))
    groups = {}
    for dim, axis in enumerate(("pp", "dp", "tp")):
        for ranks in grid.movedim(dim, -1).reshape(-1, grid.shape[dim]).tolist():
            made = dist.new_group(ranks)  # every rank, whether it is in the group or not
            if rank in ranks:
                groups[axis] = made
    return where, groups
    ### END SOLUTION
