"""The ranks as a grid, one axis per kind of parallelism: who belongs to whose groups.

    numpy.arange(world_size).reshape(pp, dp, tp)

Neighbours in rank are tensor-parallel to each other: they send most and wait for it, and lie on one
node. Then come the data-parallel ones; a pipeline's stages, which send least, lie farthest apart
(PTD-P, Narayanan+ 2021, arXiv:2104.04473, sec. 3.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from paralab.comm import Group
from paralab.instruments.recorder import Recorder
from paralab.parallel.layouts import mode_of
from paralab.spec import Plan

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Grid:
    """One rank's groups: ``world``, ``tp``, ``dp``, ``pp``; ``shard``, ``replica``, ``secondary``;
    and ``ends``.

    tp       {axis: group}: "tp", all ranks that share a layer, and the axes of its mode's grid

    shard    the data-parallel ranks that share one copy of the model states; ``replica`` those that
             keep the same part of theirs, None where there is one copy; ``secondary`` those
             that share a second copy of the parameters, or None

    ends     the first and the last rank of the pipeline, on these two, if they are different (the
             embedding group of Megatron-LM); else None
    """

    def __init__(self, plan: Plan, context: Any, recorder: Recorder) -> None:
        self.context, self.recorder = context, recorder
        everyone = range(context.world_size)
        self.world = self._group(everyone, "world")

        def groups(kind: str) -> set[tuple[int, ...]]:
            return {plan.ranks(kind, rank) for rank in everyone}

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
        ends = {(ranks[0], ranks[-1]) for ranks in pipelines}
        self.ends = self.pp if plan.pp == 2 else self._mine(ends, "pp") if plan.pp > 2 else None
        if context.backend == "nccl":
            self._connect(sorted(pipelines))

    def _connect(self, pipelines: list[tuple[int, ...]]) -> None:
        """NCCL connects a communicator at its first call: here, not within the first step's
        backward. Those of some of the ranks are connected already (`Group.subgroup`).
        """
        if self.world.size > 1:
            self.world.barrier(phase="setup")
        if self.pp.size > 1:
            self.pp.open_ways(pipelines)

    def mesh(self) -> DeviceMesh:
        """The same grid as torch has it, over the same process groups, for what is built on it
        (DTensor, fully_shard): dimensions "pp", "dp", "tp", of these the ones with several ranks.
        """
        from torch.distributed.device_mesh import DeviceMesh

        axes = {"pp": self.pp, "dp": self.dp, "tp": self.tp["tp"]}
        axes = {name: group for name, group in axes.items() if group.size > 1} or {"dp": self.dp}
        ranks = torch.arange(self.world.size).reshape([group.size for group in axes.values()])
        return DeviceMesh.from_group(
            [group.process_group for group in axes.values()],
            self.context.device.split(":")[0],
            ranks,
            mesh_dim_names=tuple(axes),
        )

    def _mine(self, groups: set[tuple[int, ...]], axis: str) -> Group | None:
        """Of disjoint groups the one that this rank is in; every rank asks for the same ones."""
        groups = sorted(groups)
        if len(groups[0]) in (1, self.context.world_size):  # needs no communicator of its own
            return next(self._group(g, axis) for g in groups if self.context.rank in g)
        made = [self.world.subgroup(ranks, axis=axis) for ranks in groups]
        return next((group for group in made if group is not None), None)

    def _group(self, ranks: Sequence[int], axis: str) -> Group:
        return Group(ranks, axis=axis, context=self.context, recorder=self.recorder)
