"""A plan's step in two numbers, seconds and the highest peak: without a report's tables.

The plan is compiled once, and then timed on any cluster with the same kind of devices; the peak is
that on the first one. It is folded (deep.py) where that is quicker, and where one program is to
serve many clusters; the numbers are the same.
"""

from __future__ import annotations

from paralab.interpret.deep import Deep
from paralab.interpret.memory import memory
from paralab.interpret.serial import costs_of
from paralab.interpret.time import time
from paralab.programs.compile import compiled
from paralab.programs.fold import folds
from paralab.spec import Cluster, ModelSpec, Plan

MANY = 30  # micro-batches times pipeline ranks from which a folded program is quicker


class Totals:
    """A plan's step, compiled. many: whether it is to be timed on many clusters."""

    def __init__(
        self, spec: ModelSpec, plan: Plan, cluster: Cluster, optimizer: str, *, many: bool = False
    ) -> None:
        self.plan, self.cluster = plan, cluster
        self._deep = self._program = None
        if folds(plan) and (many or plan.pp * plan.microbatches > MANY):
            self._deep = Deep(spec, plan, cluster, optimizer)
        else:
            self._program = compiled(spec, plan, optimizer=optimizer)

    def seconds(self, cluster: Cluster | None = None, *, overlap: bool = True) -> float:
        """Of the step, on another cluster if one is named; without ``overlap`` see serial.py."""
        cluster = cluster or self.cluster
        if self._program is not None:
            return time(self._program, cluster, overlap=overlap).seconds
        if overlap and cluster is self.cluster:
            return self._deep.seconds
        return self._deep.priced(costs_of(self._deep.program, cluster, overlap=overlap)).seconds

    @property
    def peak(self) -> int:
        """Bytes of the device that holds most at its peak."""
        if self._program is None:
            return self._deep.peak
        ranks, gloo = range(self.plan.pp), not self.cluster.gpus
        return max(memory(self._program, r, gloo=gloo).peak for r in ranks)
