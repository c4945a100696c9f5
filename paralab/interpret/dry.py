"""The dry run of one rank: what it sends, copies and holds, in order but without times.

Only the list of one pipeline rank is compiled, so its messages have no other end, and nothing says
when anything happens. An order takes the place of time: a piece of compute, the posting of a call
and what follows a wait count one each, and a call or a copy is over as soon as it is begun. time.py
walks the list with these counts as costs, and the rows are those of a prediction. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

from paralab.interpret.boxes import boxes
from paralab.interpret.costs import Costs, Posted
from paralab.interpret.memory import moments, on_device
from paralab.interpret.predict import Rows, Samples, Tables
from paralab.interpret.spans import spans
from paralab.interpret.time import Times, walked
from paralab.interpret.traffic import Calls, Member
from paralab.model.ops import Call
from paralab.programs.instructions import Instr
from paralab.programs.program import Program
from paralab.spec import Cluster, Link
from paralab.theory.work import Work

LINK = Link(alpha=0.0, bandwidth=1.0)
ONES = Cluster(flops=1.0, memory_bandwidth=1.0, call_overhead=1.0, wait_overhead=1.0, intra=LINK)


class _Numbers(Costs):
    """Costs that count instead of measuring time."""

    def seconds(self, work: Work, precision: str = "") -> float:
        return 1.0

    def posted(self, pp: int, call: Call) -> Posted:
        return super().posted(pp, call)._replace(seconds=0.0, members=0)

    def _job(self, pp: int, ins: Instr) -> float:
        return 0.0


def numbered(program: Program, rank: int, node_of: Callable[[int], int], *, gloo: bool) -> Tables:
    """The tables of a step of a global rank whose pipeline rank's list is compiled."""
    times = walked(program, _Numbers(program, ONES))
    member = Member(program, rank, node_of)
    mine, held = boxes(times, member, Calls(program)), _samples(program, times, member.at.pp, gloo)
    rows = Rows(program.plan.world_size)
    rows.add(member, mine, held, 0, 0.0, times.seconds)
    return rows.tables()


def _samples(program: Program, times: Times, pp: int, gloo: bool) -> Samples:
    """(count, bytes by kind) of each action: at its peak, after the instruction that leaves most
    alive, and at its end.
    """
    (entered, left), weighed = times.of_program(pp), moments(program, pp, gloo=gloo)
    taken = {0.0: next(weighed)[2]}
    actions = enumerate(spans(program, program.codes[pp]))
    for _, action in groupby(actions, key=lambda numbered_span: numbered_span[1]):
        rows = [(position, *next(weighed)) for position, _ in action]
        at, _, held, _ = max(rows, key=lambda row: row[1])
        most = max(rows, key=lambda row: on_device(row[3]))
        taken |= {left[position]: behind for position, *_, behind in (most, rows[-1])}
        taken[(entered[at] + left[at]) / 2] = held
    return sorted(taken.items(), key=lambda sample: sample[0])
