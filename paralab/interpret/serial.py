"""What a program takes if nothing overlaps: no call and no copy moves while its rank computes.

A prediction lets a call move its bytes while its rank computes, as fast as if the rank were idle.
Real devices do this in part: a call needs processors of the device, its kernel, or the host. The
other end is here: a call moves while its ranks wait for it, each rank pays for all of its calls one
after the other, a message at both ends, and what a worker would do is done by the rank itself. The
order of the instructions stays, and so does what waits for what. A step lasts at least as long as
with overlap, and as long where a rank has neither calls nor copies.

The costs alone differ, so the same walk (time.py, deep.py) gives the seconds.
"""

from __future__ import annotations

from paralab.interpret.costs import Compute, Cost, Costs, Posted
from paralab.programs.instructions import WAIT, WORKERS, Instr


class Serial(Costs):
    """What these costs are without overlap."""

    def __init__(self, costs: Costs) -> None:
        vars(self).update(vars(costs))  # what one of them has worked out the other knows

    def of(self, pp: int, ins: Instr) -> Cost:
        """Of an instruction; a worker's job is the rank's own work, and so is the wait for it."""
        cost = super().of(pp, ins)
        if ins.lane in WORKERS:
            return Compute(self.cluster.wait_overhead if ins.op == WAIT else cost.seconds)
        if type(cost) is Compute and cost.inside:
            return cost._replace(inside=tuple((one, _behind(takes)) for one, takes in cost.inside))
        return _behind(cost)


def _behind(one: Cost) -> Cost:
    """A call's bytes move behind the wait for it."""
    if type(one) is not Posted:
        return one
    return one._replace(seconds=0.0, behind=one.behind + one.seconds)
