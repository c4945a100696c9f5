"""The ranks as a grid with one axis per kind of parallelism, whose rows are the process groups.

    numpy.arange(world_size).reshape(pp, dp, tp)

Consecutive ranks form a tensor-parallel group, so that they share a node: they send most, and wait
for it. The ranks of a data-parallel group are farther apart. The stages of a pipeline, which send
least, are farthest apart (PTD-P, Narayanan+ 2021, arXiv:2104.04473, sec. 3.2).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paralab.comm import Group
from paralab.parallel.layouts import mode_of
from paralab.spec import Plan

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Grid:
    """The groups of one rank.

    world      all ranks; ``dp`` and ``pp``: this rank's data-parallel ranks and its pipeline
    tp         {axis: group}: "tp" for the ranks that share a layer, and the axes of the grid that
               the plan's tensor-parallel mode makes of them
    shard      the data-parallel ranks over which one copy of the model states is partitioned
    replica    the ranks with the same shard of different copies; None if there is one copy
    secondary  the ranks over which a second copy of the parameters is partitioned, or None
    ends       on the first and the last rank of a pipeline of several ranks a group of these two
               (the embedding group of Megatron-LM); None on other ranks
    """

    def __init__(self, plan: Plan, world: Group) -> None:
        self.world = world

        def groups(kind: str) -> set[tuple[int, ...]]:
            return {plan.ranks(kind, rank) for rank in world.ranks}

        self.tp = {axis: self._mine(groups(axis), axis) for axis in mode_of(plan).axes}
        self.dp = self._mine(groups("dp"), "dp")
        self.shard, self.replica, self.secondary = self.dp, None, None
        if plan.shard_degree < plan.dp:
            self.shard = self._mine(groups("shard"), "dp")
            self.replica = self._mine(groups("replica"), "replica")
        if plan.secondary_shard:
            self.secondary = self._mine(groups("secondary"), "secondary")
        pipelines = groups("pp")
        self.pp = self._mine(pipelines, "pp")
        self.ends = self.pp if plan.pp == 2 else None
        if plan.pp > 2:
            self.ends = self._mine({(ranks[0], ranks[-1]) for ranks in pipelines}, "pp")
        if world.context.backend == "nccl":
            self._connect(sorted(pipelines))

    def _connect(self, pipelines: list[tuple[int, ...]]) -> None:
        """Connect the world group and the pipelines before the first step, as NCCL connects a
        communicator at its first call. `Group.subgroup` has connected the other groups.
        """
        if self.world.size > 1:
            self.world.barrier(phase="setup")
        if self.pp.size > 1:
            self.pp.open_ways(pipelines)

    def mesh(self) -> DeviceMesh:
        """The grid as a `DeviceMesh` over the same process groups, for DTensor and fully_shard.
        Its dimensions are those of "pp", "dp", "tp" that have several ranks.
        """
        from torch.distributed.device_mesh import DeviceMesh

        axes = {"pp": self.pp, "dp": self.dp, "tp": self.tp["tp"]}
        axes = {name: group for name, group in axes.items() if group.size > 1} or {"dp": self.dp}
        ranks = torch.arange(self.world.size).reshape([group.size for group in axes.values()])
        return DeviceMesh.from_group(
            [group.process_group for group in axes.values()],
            self.world.context.device.split(":")[0],
            ranks,
            mesh_dim_names=tuple(axes),
        )

    def _mine(self, groups: set[tuple[int, ...]], axis: str) -> Group | None:
        """The one of these disjoint groups that this rank is in. All ranks pass the same ones."""
        groups, world = sorted(groups), self.world
        if len(groups[0]) in (1, world.size):  # needs no communicator of its own
            [ranks] = (ranks for ranks in groups if world.context.rank in ranks)
            return Group(ranks, axis=axis, context=world.context, recorder=world.recorder)
        subgroups = [world.subgroup(ranks, axis=axis) for ranks in groups]
        return next(filter(None, subgroups), None)
