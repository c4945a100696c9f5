"""ZeRO's rows of a step: the counterpart of parallel/zero.py, for theory/predict_step.py.

stage 1   reduce-scatter of every unit in the last micro-batch, as its gradients complete;
          all-gather of every unit after the optimizer
stage 2   the reduce-scatters in every micro-batch (in a pipeline in the last)
stage 3   in every micro-batch all-gathers before each part's forward and before its backward,
          some units ahead, and the reduce-scatters; nothing after the optimizer
HSDP      the same in the shard group, and an all-reduce of every shard's gradient over the
          ranks that keep the same shard, once, at the end
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paralab.parallel.buckets import IN_FLIGHT
from paralab.theory import memory
from paralab.theory.formulas import ITEM, Work, bucket_copy_work
from paralab.theory.gathering import Event, Gathering

if TYPE_CHECKING:
    from paralab.theory.predict_rows import Pieces, RankRows


class ZeroRows:
    """The launches, copies and waits of a stage of ZeRO; the moments are those of plain data
    parallelism in predict_data_parallel.py.
    """

    def __init__(self, rank: RankRows) -> None:
        model, plan = rank.model, rank.plan
        self.rank, self.plan, self.item = rank, plan, rank.item
        self.groups: dict[str, tuple[int, ...]] = {}
        self.units = memory.rank_units(model, plan, rank.rank)
        self.every = plan.reduces_often
        self.trained = [n for n, unit in enumerate(self.units) if not unit.frozen]
        self.unit_of = {name: n for n in self.trained for name in self.units[n].names}
        self.sizes = {n: self.units[n].numel // plan.shard_degree for n in self.trained}
        self.missing = {n: len(self.units[n].names) for n in self.trained}
        self.pending: list[tuple[int, int]] = []  # (unit, position) of reduce-scatters under way
        self.arriving: dict[int, int] = {}  # unit -> position of its all-gather
        self.gathering = None
        if plan.zero_stage == 3:
            held = memory.stage_parts(model, plan, rank.rank)
            away = plan.tiers is not None and plan.tiers.parameters != "device"
            self.gathering = Gathering(model, held, self.units, plan.prefetch, away=away,
                                       alone=plan.shard_degree == 1)  # fmt: skip

    # ---- parameters ----------------------------------------------------------------------------
    def forward(self, parts: Sequence[str], at: int, pieces: Pieces) -> None:
        if self.gathering is not None:
            self._do(self.gathering.forward(parts, at), pieces)

    def leave(self, parts: Sequence[str], at: int, pieces: Pieces) -> None:
        if self.gathering is not None:
            self._do(self.gathering.leave(parts, at), pieces)

    def backward(self, parts: Sequence[str], at: int, pieces: Pieces) -> None:
        if self.gathering is not None:
            self._do(self.gathering.backward(parts, at), pieces)

    def _do(self, events: Sequence[Event], pieces: Pieces | None = None) -> None:
        for what, unit in events:
            if what == "gather":
                self._cut(pieces)
                self.arriving[unit] = self._gather(unit)
            elif what == "wait":
                self._cut(pieces)
                self.rank.wait(self.arriving[unit])

    def _gather(self, unit: int) -> int:
        return self._launch("all_gather", self.units[unit].numel, "param_gather")

    def _launch(self, op: str, elements: int, phase: str, group: str = "shard") -> int:
        if group not in self.groups:
            self.groups[group] = self.plan.ranks(group, self.rank.rank)
        ranks = self.groups[group]
        axis = "dp" if group == "shard" else group
        return self.rank.launch(op, self.item * elements, ranks, axis, phase)

    def _cut(self, pieces: Pieces | None) -> None:
        if pieces is not None:
            pieces.cut()

    # ---- gradients -----------------------------------------------------------------------------
    def complete(self, names: Sequence[str], pieces: Pieces) -> None:
        for name in names:
            unit = self.unit_of[name]
            self.missing[unit] -= 1
            if self.missing[unit] == 0:
                self.missing[unit] = len(self.units[unit].names)
                self._reduce(unit, pieces)

    def _reduce(self, unit: int, pieces: Pieces) -> None:
        self._settle(IN_FLIGHT - 1, pieces)
        numel = self.units[unit].numel
        pieces.cut()
        self.rank.compute(bucket_copy_work(numel, len(self.units[unit].names)), "copy")
        if self.plan.shard_degree == 1:
            self._keep(unit, pieces)
        else:
            pieces.cut()
            self.pending.append((unit, self._launch("reduce_scatter", numel, "grad_sync")))
        if self.gathering is not None:
            self._do(self.gathering.release([unit]), pieces)

    def _settle(self, keep: int, pieces: Pieces | None = None) -> None:
        """Wait for all but the last ``keep`` reduce-scatters; each adds its N parts up."""
        while len(self.pending) > keep:
            unit, position = self.pending.pop(0)
            self._cut(pieces)
            self.rank.wait(position)
            self._cut(pieces)
            elements = self.units[unit].numel + self.sizes[unit]
            self.rank.compute(Work(0, ITEM * elements, 2), "copy")
            self._keep(unit, pieces)

    def _keep(self, unit: int, pieces: Pieces | None = None) -> None:
        """The rank's part of the sum is there, and stays."""

    def finish(self) -> None:
        if self.gathering is not None:
            self._do(self.gathering.release(list(self.gathering.here)))
        self._settle(0)
        if self.plan.shard_degree < self.plan.dp:
            calls = [
                self._launch("all_reduce", size, "grad_sync", "replica")
                for size in self.sizes.values()
            ]
            for call in calls:
                self.rank.wait(call)

    def summed(self) -> None:
        """What other axes have a part of too is summed over them as well."""

    def updated(self) -> None:
        if self.gathering is None and self.plan.shard_degree > 1:
            for call in [self._gather(unit) for unit in self.trained]:
                self.rank.wait(call)
