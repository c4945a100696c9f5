"""Time a program: when every instruction begins and ends, if each rank had a device of its own.

walk.py goes through the lists, costs.py has the seconds of each instruction. Data-parallel and
tensor-parallel ranks do the same at the same moments, so one pipeline is walked for all of them;
the walk itself takes about a microsecond for an instruction. The model of a link is Hockney's
(1994): alpha + bytes / bandwidth. Labs 02 to 05.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from paralab.interpret.costs import Awaited, Cost, Costs
from paralab.interpret.jobs import Order
from paralab.interpret.serial import Serial
from paralab.interpret.walk import Inside, Item, Rank, Walk, item
from paralab.programs.instructions import Code
from paralab.programs.names import Names
from paralab.programs.program import Program
from paralab.spec import Cluster


class Body(NamedTuple):
    """What a CALL takes: its instructions, and when each of them happens on its rank."""

    code: Code
    seconds: float
    times: Times


class Times(NamedTuple):
    """Seconds from the start of the step, for every pipeline rank.

    entered, left  per instruction: the rank comes to it, goes on behind it
    calls, waits, inside, behind  by position: see `walk.Rank`
    costs          per instruction what was counted
    """

    entered: list[list[float]]
    left: list[list[float]]
    calls: list[dict[int, tuple[float, float]]]
    waits: list[dict[int, tuple[int, float]]]
    inside: list[dict[int, list[Inside]]]
    behind: list[dict[int, list[int]]]
    costs: list[list[Cost | Body]]

    @property
    def ends(self) -> list[float]:
        """When each rank's step is over."""
        return [left[-1] if left else 0.0 for left in self.left]

    @property
    def seconds(self) -> float:
        """Of the step: its slowest rank's."""
        return max(self.ends)


def time(program: Program, cluster: Cluster, *, overlap: bool = True) -> Times:
    """When everything happens in one step; without ``overlap`` see serial.py.

    Raises ValueError naming where each rank stands, if no rank can go on.
    """
    costs = Costs(program, cluster)
    return walked(program, costs if overlap else Serial(costs))


def body(program: Program, costs: Costs, r: int, code: Code) -> Body:
    """What a CALL takes on pipeline rank ``r``: nothing is in flight when it begins and ends, so it
    takes as long wherever it stands.
    """
    times = walked(replace(program, codes=[*([] for _ in range(r)), code]), costs)
    return Body(code, times.ends[r], times)


def walked(program: Program, costs: Costs) -> Times:
    """When everything happens, if instructions take what ``costs`` says."""
    posting = costs.cluster.call_overhead
    taken = [[costs.of(r, ins) for ins in code] for r, code in enumerate(program.codes)]
    lists = list(enumerate(zip(program.codes, taken, strict=True)))
    walk = Walk(posting)
    ranks = [Rank(walk, items(r, *one), Order(program.plan)) for r, one in lists]
    walk.go(ranks)
    over = max((rank.left[-1] for rank in ranks if rank.left), default=0.0)
    if any(job.end > over for rank in ranks for job in rank.jobs.values()):
        # A worker goes on during the next step, which is like all that follow.
        walk, before = Walk(posting), ranks
        for job in (job for rank in before for job in rank.jobs.values()):
            job.next_step(over)
        ranks = [
            Rank(walk, items(r, *one), rank.order, {at: t - over for at, t in rank.lanes.items()})
            for (r, one), rank in zip(lists, before, strict=True)
        ]
        walk.go(ranks)
    stuck = [
        f"pipeline rank {r} waits at {Names(program, r).instruction(code[len(rank.left)])}"
        for r, (rank, code) in enumerate(zip(ranks, program.codes, strict=True))
        if len(rank.left) < len(code)
    ]
    if stuck:  # what a learner writes is checked before (programs/checks.py)
        raise ValueError(f"no rank can go on: {'; '.join(stuck)}")
    entered = [[0.0, *rank.left[:-1]] if rank.left else [] for rank in ranks]
    names = ("left", "calls", "waits", "inside", "behind")
    return Times(entered, *([getattr(rank, name) for rank in ranks] for name in names), taken)


def items(r: int, code: Code, costs: list[Cost | Body]) -> Iterator[Item]:
    """A rank's list as the walk reads it."""
    begun: dict[tuple, Cost] = {}
    for ins, cost in zip(code, costs, strict=True):
        yield item(r, ins, cost, begun.get(ins.reads) if type(cost) is Awaited else None)
        if ins.lane:
            begun[ins.writes] = cost
