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
from paralab.model.ops import Call
from paralab.programs.instructions import WAIT, WORKERS, Instr
from paralab.programs.program import Program
from paralab.spec import Cluster


class Serial(Costs):
    """Of a program's instructions on a cluster, without overlap."""

    def of(self, pp: int, ins: Instr) -> Cost:
        """Of an instruction; a worker's job is the rank's own work, and so is the wait for it."""
        if ins.lane not in WORKERS:
            return super().of(pp, ins)
        if ins.op == WAIT:
            return Compute(self.cluster.wait_overhead)
        return Compute(super().of(pp, ins).seconds)

    def posted(self, pp: int, call: Call) -> Posted:
        """A call whose bytes move behind the wait for it."""
        found = super().posted(pp, call)
        return found._replace(seconds=0.0, behind=found.behind + found.seconds)


def costs_of(program: Program, cluster: Cluster, *, overlap: bool = True) -> Costs:
    """Of a program's instructions, with overlap or without."""
    return (Costs if overlap else Serial)(program, cluster)
