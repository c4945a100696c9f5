"""A step in outline: one rank per pipeline stage, one box per action, at any scale.

`predict` in full writes down every call of every rank: its rows grow with world size times
micro-batches times layers. But the ranks of a stage do the same, so do stages with equally many
blocks, and all micro-batches but the first and the last few repeat each other. So a plan's program
is folded where that is possible (programs/fold.py, deep.py). Where every micro-batch has copies
between tiers, or a learner's pass has changed the program, it is interpreted whole. Either way the
rows are the actions of one pipeline's ranks.

Times, bytes and the peak are those of the program in full.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paralab.interpret.costs import Costs
from paralab.interpret.deep import Deep
from paralab.interpret.lines import Line, Step, transfers
from paralab.interpret.memory import moments
from paralab.interpret.memory_samples import samples
from paralab.interpret.outline_parts import Actions
from paralab.interpret.outline_tables import tables
from paralab.interpret.spans import spans
from paralab.interpret.time import walked
from paralab.programs.compile import compiled
from paralab.programs.fold import folds
from paralab.programs.instructions import COMPUTE
from paralab.programs.program import Program
from paralab.report.tables import LETTER
from paralab.spec import Cluster, ModelSpec, Plan
from paralab.theory.order import CODE


def outline(
    spec: ModelSpec, plan: Plan, cluster: Cluster, *, optimizer: str, steps: int
) -> tuple[dict[str, dict[str, Any]], dict[str, float]]:
    """(the report's tables for ``steps`` steps; seconds per step, averaged over ranks, in which
    calls are in flight, in which they are hidden behind work of the rank, and the same for copies).
    """
    if folds(plan):
        step = Deep(spec, plan, cluster, optimizer).step()
    else:
        step = whole(compiled(spec, plan, optimizer=optimizer), cluster)
    names = ("communication", "communication hidden", "copies", "copies hidden")
    moving = sum((line.moving(actions) for line, actions in step.ranks), np.zeros(4)) / plan.pp
    return tables(plan, step, steps), dict(zip(names, moving.tolist(), strict=True))


def whole(program: Program, cluster: Cluster) -> Step:
    """The step of a program that is not folded."""
    costs, ranks = Costs(program, cluster), range(len(program.codes))
    times = walked(program, costs)
    lines, actions, held = [Line.of(times, pp) for pp in ranks], [], []
    walks = [list(moments(program, pp, gloo=not cluster.gpus)) for pp in ranks]
    memories = (held for walk in walks for _, *both in walk for held in both)
    kinds = sorted({kind for held in memories for kind in held})
    device = np.array([tier == "device" for tier, _ in kinds])
    for line, walk in zip(lines, walks, strict=True):
        mine, last = actions_of(program, line.pp), np.array(times.last[line.pp])
        first = np.r_[0, last[:-1] + 1]
        actions.append(mine._replace(first=first[mine.first], last=last[mine.last]))
        calls = ((at, pair) for at, pair in enumerate(line.table.code) if pair[0].lane)
        line.table.transfers = {at: transfers(costs, line.pp, [pair]) for at, pair in calls}
        peaks, *both = zip(*walk, strict=True)
        tops, behind = (
            np.array([[held.get(kind, 0) for kind in kinds] for held in helds]) for helds in both
        )
        most, top, left = np.array(peaks[1:]), tops[1:].__getitem__, line.left[last]
        held.append(samples(behind, most, top, left, mine.last, device))
    return Step(lines, actions, kinds, held, costs)


def actions_of(program: Program, pp: int) -> Actions:
    """The actions in a rank's list; in a relay, parts of the model stand in place of stages."""
    code, part_of = program.codes[pp], {}
    if program.plan.relays:
        parts = enumerate(program.model.parts)
        part_of = {op: number for number, (_, i, j) in parts for op in range(i, j)}
    ends_of: dict[tuple, list[int]] = {}
    for position, span in enumerate(spans(program, code)):
        ins = code[position]
        if span and span[0] in LETTER and ins.op in COMPUTE:
            stage = part_of.get(ins.at[0], span[2])
            action = stage, CODE[LETTER[span[0]]], span[1]
            ends_of.setdefault(action, [position, 0])[1] = position
    return Actions(*np.array([(*action, *ends) for action, ends in ends_of.items()]).T)
