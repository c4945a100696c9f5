"""The grid of ranks: Megatron's order, and the same grid as torch's own DeviceMesh."""

import pytest
import torch

import paralab as pl
from paralab.comm import everyone
from paralab.grid import Grid
from paralab.launch import launch_program


def as_torch_has_it(context, plan):
    """What torch's mesh over the grid's groups says, and what DTensor does on it."""
    from torch.distributed.tensor import Shard, distribute_tensor

    grid = Grid(plan, everyone(context))
    mesh = grid.mesh()
    ranks = {
        name: tuple(torch.distributed.get_process_group_ranks(mesh.get_group(name)))
        for name in mesh.mesh_dim_names
    }
    whole = torch.arange(24.0).reshape(8, 3)
    innermost = mesh[mesh.mesh_dim_names[-1]]
    dealt = distribute_tensor(whole, innermost, [Shard(0)])
    return {
        "mesh": mesh.mesh.tolist(), "ranks": ranks, "at": mesh.get_coordinate(),
        "lines": {name: tuple(mesh[name].mesh.tolist()) for name in mesh.mesh_dim_names},
        "own rows": dealt.to_local()[:, 0].tolist(),
        "sum": dealt.sum().full_tensor().item(),
    }  # fmt: skip


@pytest.mark.parametrize(
    "plan, mesh",
    [
        (pl.Plan(dp=2, tp=2, pp=2), [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]),
        (pl.Plan(pp=2, microbatches=2), [0, 1]),
        (pl.Plan(), [0]),
    ],
)
def test_torch_has_the_same_mesh_over_the_same_groups(plan, mesh):
    found = launch_program(as_torch_has_it, plan.world_size, (plan,), device="cpu")
    names = [axis for axis in ("pp", "dp", "tp") if getattr(plan, axis) > 1] or ["dp"]
    for rank, one in enumerate(found):
        assert one["mesh"] == mesh
        assert one["lines"] == one["ranks"] == {axis: plan.ranks(axis, rank) for axis in names}
        assert list(one["ranks"]) == names
        assert list(one["at"]) == [plan.ranks(axis, rank).index(rank) for axis in names]
        size, index = getattr(plan, names[-1]), one["at"][-1]
        assert one["own rows"] == [3.0 * row for row in range(8)][8 // size * index :][: 8 // size]
        assert one["sum"] == sum(range(24))
