"""Time a program: when every instruction begins and ends, if each rank had a device of its own.

walk.py goes through the lists, costs.py has the seconds of each instruction. Data-parallel and
tensor-parallel ranks do the same at the same moments, so one pipeline is walked for all of them;
the walk itself takes about a microsecond for an instruction. What an op sends inside its methods is
timed, drawn and counted like a program's own calls (`spelled`). The model of a link is Hockney's
(1994): alpha + bytes / bandwidth. Labs 02 to 05.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from math import inf
from typing import NamedTuple

from paralab.interpret.costs import Awaited, Compute, Cost, Costs
from paralab.interpret.jobs import Order
from paralab.interpret.resumed import share, until
from paralab.interpret.serial import Serial
from paralab.interpret.walk import Item, Rank, Walk, item
from paralab.programs.instructions import Code, Instr
from paralab.programs.names import Names
from paralab.programs.program import Program
from paralab.spec import Cluster

Timed = list[tuple[Instr, Cost]]


class Times(NamedTuple):
    """Seconds from the start of the step, for every pipeline rank.

    lists   its list as it is timed, of each instruction what was counted, too: see `spelled`
    last    per instruction of the program where its last is
    left    per instruction of the list when the rank goes on behind it
    calls, waits, behind  by position: see `walk.Rank`
    """

    lists: list[Timed]
    last: list[list[int]]
    left: list[list[float]]
    calls: list[dict[int, tuple[float, float]]]
    waits: list[dict[int, tuple[int, float]]]
    behind: list[dict[int, list[int]]]

    def of_program(self, pp: int) -> tuple[list[float], list[float]]:
        """When a rank comes to each instruction of its program, and goes on behind it."""
        left = [self.left[pp][at] for at in self.last[pp]]
        return [0.0, *left[:-1]], left

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


def spelled(
    costs: Costs, r: int, code: Code, after: float = inf
) -> tuple[Timed, list[Item], list[int]]:
    """A rank's list as it is timed, with what each instruction takes; the same as the walk reads
    it; and where in it the last is of each of the program's. Calls that ops make themselves are
    instructions of their own there (a CALL of the `Call`, and its WAIT), with parts of the compute
    in between.

    after  see `resumed.until`, of a part of an action
    """
    made, read, last = [], [], []
    begun: dict[tuple, Cost] = {}
    known: dict[int, tuple[Compute, list[Item]]] = {}  # of blocks alike the same
    cluster, timed = costs.cluster, [(ins, costs.of(r, ins)) for ins in code]
    behind: Iterable[float] = repeat(inf)
    if cluster.wait_work:
        behind, _ = until(cluster, timed, after=after, within=after < inf)
    for (ins, cost), work in zip(timed, behind, strict=False):
        if type(cost) is Compute:
            if id(cost) not in known:
                parts = cost.inside or ((ins, cost),)
                calls = {one.writes: takes for one, takes in parts}
                known[id(cost)] = cost, [item(r, *part, calls.get(part[0].reads)) for part in parts]
            if cost.inside:
                made += [(ins if type(own) is Compute else one, own) for one, own in cost.inside]
            else:
                made.append((ins, cost))
            read += known[id(cost)][1]
        else:
            made.append((ins, cost))
            call = begun.get(ins.reads) if type(cost) is Awaited else None
            read.append(item(r, ins, cost, call, share(cluster, work) if call else 1.0))
            if ins.lane:
                begun[ins.writes] = cost
        last.append(len(made) - 1)
    return made, read, last


def walked(program: Program, costs: Costs, after: float = inf) -> Times:
    """When everything happens, if instructions take what ``costs`` says. after: see `spelled`."""
    posting = costs.cluster.call_overhead
    spelt = [spelled(costs, r, code, after) for r, code in enumerate(program.codes)]
    lists, items, last = map(list, zip(*spelt, strict=True))
    walk = Walk(posting)
    ranks = [Rank(walk, some, Order(program.plan)) for some in items]
    walk.go(ranks)
    over = max((rank.left[-1] for rank in ranks if rank.left), default=0.0)
    if any(job.end > over for rank in ranks for job in rank.jobs.values()):
        # A worker goes on during the next step, which is like all that follow.
        walk, before = Walk(posting), ranks
        for job in (job for rank in before for job in rank.jobs.values()):
            job.next_step(over)
        ranks = [
            Rank(walk, some, rank.order, {at: t - over for at, t in rank.lanes.items()})
            for some, rank in zip(items, before, strict=True)
        ]
        walk.go(ranks)
    stuck = [
        f"pipeline rank {r} waits at {Names(program, r).instruction(some[len(rank.left)][0])}"
        for r, (rank, some) in enumerate(zip(ranks, lists, strict=True))
        if len(rank.left) < len(some)
    ]
    if stuck:  # what a learner writes is checked before (programs/checks.py)
        raise ValueError(f"no rank can go on: {'; '.join(stuck)}")
    names = ("left", "calls", "waits", "behind")
    moments = ([getattr(rank, name) for rank in ranks] for name in names)
    return Times(lists, last, *moments)
