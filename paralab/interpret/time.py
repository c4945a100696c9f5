"""Time a program: when every instruction begins and ends, if each rank had a device of its own.

walk.py goes through the ranks' lists, costs.py has the seconds of each instruction. Data-parallel
and tensor-parallel ranks do the same at the same moments, so one pipeline is walked for all of
them, in about a microsecond per instruction. Calls that an op makes inside its methods are timed,
drawn and counted like the program's own (`spelled_out`). A link follows Hockney's model (1994):
alpha + bytes / bandwidth. Labs 02 to 05.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from paralab.interpret.costs import Awaited, Compute, Cost, Costs
from paralab.interpret.jobs import Order
from paralab.interpret.resumed import share, work_until_wait
from paralab.interpret.walk import Item, Rank, Walk, item
from paralab.programs.instructions import Code, Instr
from paralab.programs.program import Program
from paralab.spec import Cluster

Timed = list[tuple[Instr, Cost]]


class Times(NamedTuple):
    """When everything happens, in seconds from the start of the step; one entry per pipeline rank.

    lists   the list as it was timed, each instruction with its cost: see `spelled_out`
    last    per instruction of the program the position of its last part in that list
    ranks   the `walk.Rank` at the end of that list: when it went on to each next instruction, and
            when its calls and jobs were in flight
    """

    lists: list[Timed]
    last: list[list[int]]
    ranks: list[Rank]

    def of_program(self, pp: int) -> tuple[list[float], list[float]]:
        """(when the rank comes to each instruction of its program, when it goes on to the next)."""
        left = [self.ranks[pp].left[at] for at in self.last[pp]]
        return [0.0, *left[:-1]], left

    @property
    def ends(self) -> list[float]:
        """When each rank's step is over."""
        return [rank.left[-1] if rank.left else 0.0 for rank in self.ranks]

    @property
    def seconds(self) -> float:
        """How long the step takes: the time of its slowest rank."""
        return max(self.ends)


def time(program: Program, cluster: Cluster) -> Times:
    """When everything happens in one step.

    Raises ValueError if ranks wait for each other's calls in a cycle.
    """
    return walked(program, Costs(program, cluster))


def spelled_out(
    costs: Costs, r: int, code: Code, after: float = inf
) -> tuple[Timed, list[Item], list[int]]:
    """A rank's list, in which every call that an op makes itself is spelled out as a CALL and its
    WAIT, with parts of the op's compute in between.

    after  seconds of work that follow the list, if it is a part of an action (resumed.py)

    Returns (the list, each instruction with its cost; the same as `Item`s for the walk; per
    instruction of ``code`` the position of its last part).
    """
    timed, items, last = [], [], []
    begun: dict[tuple, Cost] = {}
    known: dict[int, tuple[Compute, list[Item]]] = {}  # equal blocks share a `Compute`
    cluster, costed = costs.cluster, [(ins, costs.of(r, ins)) for ins in code]
    works, _ = work_until_wait(cluster, costed, after=after, within=after < inf)
    for (ins, cost), work in zip(costed, works, strict=True):
        if type(cost) is Compute:
            if id(cost) not in known:
                parts = cost.inside or ((ins, cost),)
                calls = {part.writes: takes for part, takes in parts}
                known[id(cost)] = cost, [item(*part, calls.get(part[0].reads)) for part in parts]
            if cost.inside:
                timed += [
                    (ins if type(takes) is Compute else part, takes) for part, takes in cost.inside
                ]
            else:
                timed.append((ins, cost))
            items += known[id(cost)][1]
        else:
            timed.append((ins, cost))
            call = begun.get(ins.reads) if type(cost) is Awaited else None
            items.append(item(ins, cost, call, share(cluster, work) if call else 1.0))
            if ins.lane:
                begun[ins.writes] = cost
        last.append(len(timed) - 1)
    return timed, items, last


def walked(program: Program, costs: Costs, after: float = inf) -> Times:
    """When everything happens in a step at these costs. after: see `spelled_out`."""
    posting = costs.cluster.call_overhead
    spelled = [spelled_out(costs, r, code, after) for r, code in enumerate(program.codes)]
    lists, items, last = map(list, zip(*spelled, strict=True))
    walk = Walk(posting)
    ranks = [Rank(walk, mine, Order(program.plan)) for mine in items]
    walk.go(ranks)
    end = max((rank.left[-1] for rank in ranks if rank.left), default=0.0)
    if any(job.end > end for rank in ranks for job in rank.jobs.values()):
        # A worker's job goes on during the next step, which is timed instead: all later are alike.
        walk, before = Walk(posting), ranks
        for job in (job for rank in before for job in rank.jobs.values()):
            job.next_step(end)
        ranks = [
            Rank(walk, mine, rank.order, {lane: t - end for lane, t in rank.lanes.items()})
            for mine, rank in zip(items, before, strict=True)
        ]
        walk.go(ranks)
    return Times(lists, last, ranks)
