"""Offload's rows of a step: the counterpart of parallel/offload.py, for theory/predict_step.py.

The jobs that a run hands to its lanes, in the same order and with the same dependencies: copies
over the links between tiers, alpha + bytes / bandwidth each, and what the host's processor does,
bytes over its memory's bandwidth. A plan's ``bandwidth`` holds a link down here too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paralab.checks import illegal
from paralab.cluster import Cluster
from paralab.spec import Plan
from paralab.theory import memory
from paralab.theory.engine import Copy
from paralab.theory.formulas import ITEM, optimizer_work
from paralab.theory.gathering import Event
from paralab.theory.offload import layout
from paralab.theory.predict_zero import ZeroRows

if TYPE_CHECKING:
    from paralab.theory.predict_rows import Pieces, RankRows


def check_links(plan: Plan, cluster: Cluster) -> None:
    """Raise ``ValueError`` if ``cluster`` does not say how fast the links are that a plan uses."""
    if plan.tiers is None:
        return
    lacking = {"host": cluster.host, "host_bandwidth": cluster.host_bandwidth}
    if plan.tiers.uses("nvme"):
        lacking["disk"] = cluster.disk
    for name, value in lacking.items():
        if value is None:
            raise illegal(name, None, f"the plan offloads, and {cluster.name!r} does not say what "
                          "its links to host and files carry",
                          "cluster.replace(host=pl.Link(alpha=10e-6, bandwidth=25e9), "
                          "disk=pl.Link(...), host_bandwidth=...)")  # fmt: skip


class Lanes:
    """A rank's jobs on the links between tiers and on the host's processor.

    pieces  the span that is open: whatever is handed over or waited for ends a piece of it
    """

    def __init__(self, rank: RankRows) -> None:
        self.rank, self.cluster = rank, rank.cluster
        self.limits = rank.plan.tiers.limits
        self.pieces: Pieces | None = None

    def wait(self, *positions: int) -> None:
        if positions:
            self._cut()
            self.rank.wait(*positions)

    def _cut(self) -> None:
        if self.pieces is not None:
            self.pieces.cut()

    def copy(self, lane: str, category: str, size: int, after: Sequence[int] = (),
             op: str = "copy") -> int:  # fmt: skip
        """Hand over a copy; returns its position."""
        seconds = self.cluster.copy_seconds(lane, size, self.limits.get(lane))
        self._cut()
        return self.rank.queue(Copy(lane, seconds, tuple(after)), "copy", op, category, size)

    def host(self, size: int, after: Sequence[int] = (), kind: str = "compute") -> int:
        """``size`` bytes read and written by the host's processor."""
        seconds = size / self.cluster.host_bandwidth
        self._cut()
        return self.rank.queue(Copy("host", seconds, tuple(after)), kind, "", "", 0)


class OffloadRows(ZeroRows):
    """A stage of ZeRO whose shares leave the device; see `parallel.offload`."""

    def __init__(self, rank: RankRows, *, optimizer: str) -> None:
        super().__init__(rank)
        self.lanes, self.tiers, self.optimizer = Lanes(rank), rank.plan.tiers, optimizer
        self.at = layout(rank.model, rank.plan, optimizer=optimizer, rank=rank.rank)
        self.counts = [count for _, count in self.at.units]
        self.leaving: list[int] = []
        self.adding: dict[int, list[int]] = {}  # unit -> what its gradient waits for
        self.early: dict[int, int] = {}  # unit -> its update, made beside this step
        if self.tiers.delayed:
            self.early = {unit: self._update_of(unit, []) for unit in self.trained}

    # ---- parameters ----------------------------------------------------------------------------
    def _do(self, events: Sequence[Event], pieces: Pieces | None = None) -> None:
        self.lanes.pieces = pieces
        for event in events:
            if event.what == "fetch":
                size, after = self.item * self.counts[event.unit], []
                if self.tiers.parameters == "nvme":
                    after = [self.lanes.copy("disk", "parameters", size, op="read")]
                self.arriving[event.unit] = self.lanes.copy("h2d", "parameters", size, after)
            elif event.what == "raise":
                self.lanes.wait(self.arriving[event.unit])
            else:
                super()._do([event], pieces)

    # ---- gradients -----------------------------------------------------------------------------
    def _settle(self, keep: int, pieces: Pieces | None = None) -> None:
        self.lanes.pieces = pieces
        self.lanes.wait(*self.leaving)
        self.leaving = []
        super()._settle(keep, pieces)

    def _keep(self, unit: int, pieces: Pieces | None = None) -> None:
        if self.tiers.gradients == "device" or self.units[unit].waits:
            super()._keep(unit, pieces)
            return
        self._leave(unit, pieces)

    def _leave(self, unit: int, pieces: Pieces | None = None) -> None:
        self.lanes.pieces = pieces
        size, before = self.item * self.counts[unit], self.adding.get(unit, [])
        down = self.lanes.copy("d2h", "gradients", size, [] if before else self._updated(unit))
        self.leaving.append(down)
        after = [down]
        if before:
            if self.tiers.gradients == "nvme":
                before = [self.lanes.copy("disk", "gradients", size, before, op="read")]
            after = [self.lanes.host(3 * size, [down, *before])]
        if self.rank.plan.precision == "fp16":  # somebody asks for the norm
            after = [self.lanes.host(size, after)]
        if self.tiers.gradients == "nvme":
            after = [self.lanes.copy("disk", "gradients", size, after, op="write")]
        self.adding[unit] = after

    def _updated(self, unit: int) -> list[int]:
        return [self.early[unit]] if unit in self.early else []

    def finish(self) -> None:
        super().finish()
        self.lanes.pieces = None
        self.lanes.wait(*self.leaving)
        self.leaving = []

    def summed(self) -> None:
        for unit in self.trained:
            if self.units[unit].waits:
                self._leave(unit)
        self.lanes.wait(*self.leaving)
        self.leaving = []

    # ---- the update ----------------------------------------------------------------------------
    def update(self) -> None:
        """In place of the optimizer's work on the device."""
        from paralab.theory.predict_rows import Pieces

        pieces = self.lanes.pieces = Pieces(self.rank, "optimizer", -1, 0)
        self._update()
        pieces.cut()

    def _update(self) -> None:
        if self.tiers.delayed:
            self.lanes.wait(*[self._up(unit, [job]) for unit, job in self.early.items()])
            return
        if self.rank.plan.precision == "fp16":  # the norm is asked for
            self.lanes.wait(*[job for jobs in self.adding.values() for job in jobs])
        opened, ends = [], []
        for unit in self.trained:
            opened.append((unit, self._open(unit)))
            if len(opened) > 1:
                ends += self._close(*opened.pop(0))
        self.lanes.wait(*ends, *self._close(*opened.pop(0)))

    def _open(self, unit: int) -> list[int]:
        size, after = self.item * self.counts[unit], self.adding.get(unit, [])
        needs = []
        if self.tiers.optimizer == "nvme" and self.at.rows:
            states = 4 * self.at.rows * self.counts[unit]
            needs.append(self.lanes.copy("disk", "optimizer", states, after, op="read"))
        if self.tiers.gradients == "nvme":
            needs.append(self.lanes.copy("disk", "gradients", size, after, op="read"))
        elif self.tiers.gradients == "device":
            needs.append(self.lanes.copy("d2h", "gradients", size))
        if self.tiers.parameters == "nvme" and self.item == ITEM:
            needs.append(self.lanes.copy("disk", "parameters", size, after, op="read"))
        return [*needs, *after]

    def _update_of(self, unit: int, after: Sequence[int]) -> int:
        work = optimizer_work(self.rank.model, optimizer=self.optimizer,
                              parameters={0: self.counts[unit]},
                              mixed=self.item != ITEM)  # fmt: skip
        return self.lanes.host(int(work.bytes), after, "optimizer")

    def _close(self, unit: int, after: Sequence[int]) -> list[int]:
        size, done = self.item * self.counts[unit], self._update_of(unit, after)
        ends = [done]
        if self.tiers.optimizer == "nvme" and self.at.rows:
            states = 4 * self.at.rows * self.counts[unit]
            ends.append(self.lanes.copy("disk", "optimizer", states, [done], op="write"))
        if self.tiers.parameters == "nvme":
            ends.append(self.lanes.copy("disk", "parameters", size, [done], op="write"))
        if self.tiers.parameters == "device":
            ends.append(self._up(unit, ends))
        return ends

    def _up(self, unit: int, after: Sequence[int]) -> int:
        """The updated parameters' way to the device."""
        size = self.item * self.counts[unit]
        if self.item != ITEM:
            after = [self.lanes.host(self.counts[unit] * (ITEM + self.item), after)]
        return self.lanes.copy("h2d", "parameters", size, after)


class InputRows:
    """Inputs of recomputed blocks on their way to another tier and back."""

    def __init__(self, rank: RankRows) -> None:
        self.lanes = Lanes(rank)
        self.size = memory.offloaded_input(rank.model, rank.plan)
        self.file = rank.plan.tiers.activations == "nvme"
        self.leaving: list[int] = []
        self.there: dict[tuple[int, str], list[int]] = {}
        self.arriving: dict[tuple[int, str], int] = {}

    def leave(self, k: int, part: str, pieces: Pieces) -> None:
        """Block ``part`` begins its forward on micro-batch ``k``."""
        self._left(pieces)
        self.lanes.pieces = pieces
        job = self.lanes.copy("d2h", "activations", self.size)
        self.leaving, self.there[k, part] = [job], [job]
        if self.file:
            write = self.lanes.copy("disk", "activations", self.size, [job], op="write")
            self.there[k, part] = [write]

    def come(self, which: Sequence[tuple[int, str]], pieces: Pieces) -> None:
        """The first of these (micro-batch, block) begins its backward, the second comes next."""
        self._left(pieces)
        self._come(*which[0])
        self.lanes.wait(self.arriving.pop(which[0]))
        for following in which[1:2]:
            self._come(*following)

    def _come(self, k: int, part: str) -> None:
        if (k, part) in self.arriving:
            return
        after = self.there.pop((k, part))
        if self.file:
            after = [self.lanes.copy("disk", "activations", self.size, after, op="read")]
        self.arriving[k, part] = self.lanes.copy("h2d", "activations", self.size, after)

    def _left(self, pieces: Pieces) -> None:
        self.lanes.pieces = pieces
        self.lanes.wait(*self.leaving)
        self.leaving = []
