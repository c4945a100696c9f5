"""A plan's step in two numbers, seconds and the highest peak, without a report's tables.

The plan is compiled once and can then be timed on any cluster with the same kind of devices; the
peak is that on the first cluster. The program is folded (deep.py) where that is quicker, and where
many clusters are to be timed; the numbers are the same.
"""

from __future__ import annotations

from paralab.interpret.costs import Costs
from paralab.interpret.deep import Deep
from paralab.interpret.memory import peak
from paralab.interpret.serial import Serial
from paralab.interpret.time import walked
from paralab.programs.compile import compiled
from paralab.programs.fold import folds
from paralab.spec import Cluster, ModelSpec, Plan

MANY = 30  # micro-batches times pipeline ranks beyond which folding is quicker
AT_LEAST = 5  # fewer pipeline ranks than this count as so many


class Totals:
    """A plan's compiled step. many: whether it will be timed on many clusters."""

    def __init__(
        self, spec: ModelSpec, plan: Plan, cluster: Cluster, optimizer: str, *, many: bool = False
    ) -> None:
        self.plan, self.cluster = plan, cluster
        self._deep = None
        if folds(plan) and (many or max(plan.pp, AT_LEAST) * plan.microbatches > MANY):
            self._deep = Deep(spec, plan, cluster, optimizer)
            self._costs = self._deep.costs
        else:
            self._costs = Costs(compiled(spec, plan, optimizer=optimizer), cluster)

    def seconds(self, cluster: Cluster | None = None, *, overlap: bool = True) -> float:
        """How long the step takes, by default on the first cluster; overlap: see serial.py."""
        same = cluster in (None, self.cluster)
        costs = self._costs if same else Costs(self._costs.program, cluster)
        costs = costs if overlap else Serial(costs)
        if self._deep is None:
            return walked(costs.program, costs).seconds
        return (self._deep if costs is self._costs else self._deep.priced(costs)).seconds

    @property
    def peak(self) -> int:
        """Bytes on the device with the highest peak."""
        if self._deep is not None:
            return self._deep.peak
        ranks, gloo = range(self.plan.pp), not self.cluster.gpus
        return max(peak(self._costs.program, r, gloo=gloo) for r in ranks)
