"""The costs of a program if nothing overlaps: no call and no copy moves while its rank computes.

A prediction lets a call move its bytes while its rank computes, as fast as if the rank were idle.
Real devices do so only in part, because a call needs processors of the device, its kernel, or the
host. This file is the other extreme: a call moves while its ranks wait for it, each rank spends the
time of all its calls one after the other, that of a message at both ends, and does the jobs of its
workers itself. The order of the instructions and all dependencies stay. A step lasts at least as
long as with overlap, and exactly as long if no rank has calls or copies.

The costs alone differ, so the same walk (time.py, deep.py) gives the seconds.
"""

from __future__ import annotations

from paralab.interpret.costs import Compute, Cost, Costs, Posted
from paralab.programs.instructions import WAIT, WORKERS, Instr


class Serial(Costs):
    """These costs without overlap."""

    def __init__(self, costs: Costs) -> None:
        vars(self).update(vars(costs))  # both share one cache

    def of(self, pp: int, ins: Instr) -> Cost:
        """The cost of an instruction; a worker's job and its WAIT are the rank's own work."""
        cost = super().of(pp, ins)
        if ins.lane in WORKERS:
            return Compute(self.cluster.wait_overhead if ins.op == WAIT else cost.seconds)
        if type(cost) is Compute and cost.inside:
            return cost._replace(inside=tuple((part, _exposed(own)) for part, own in cost.inside))
        return _exposed(cost)


def _exposed(cost: Cost) -> Cost:
    """A call's bytes move after the wait for it, on the rank's own lane."""
    if type(cost) is not Posted:
        return cost
    return cost._replace(seconds=0.0, late=0.0, unpacked=cost.unpacked + cost.seconds + cost.late)
