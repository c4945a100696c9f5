"""A step in outline: one rank per pipeline stage, one box per action, at any scale.

`predict` in full writes down every call of every rank, rows that grow with world size times
micro-batches times layers. But the ranks of a stage do the same, stages that hold as many blocks
do the same, and all micro-batches but the first and the last repeat each other. So a plan's program
is folded where it can be (programs/fold.py, deep.py); where every micro-batch has copies between
tiers, or a learner's pass has been at work, it is interpreted whole. Either way one pipeline's
ranks are looked at, and their actions are the rows.

Times, bytes and the peak are those of the program in full.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from paralab.interpret.costs import Costs
from paralab.interpret.deep import SAMPLES, Deep
from paralab.interpret.memory import moments
from paralab.interpret.outline_tables import tables
from paralab.interpret.spans import spans
from paralab.interpret.time import Times, counted, walked
from paralab.interpret.traffic import Calls, alike
from paralab.interpret.turns import (
    Step,
    Sums,
    Turn,
    beside,
    boxes,
    in_flight,
    said,
    timed,
    worked,
)
from paralab.programs.compile import compiled
from paralab.programs.fold import folds
from paralab.programs.instructions import COMPUTE
from paralab.programs.program import Program
from paralab.report.tables import COMPUTE_KINDS
from paralab.spec import Cluster, ModelSpec, Plan

LETTER = {"forward": "F", "backward": "B", "weight_grad": "W"}


def outline(
    spec: ModelSpec, plan: Plan, cluster: Cluster, *, optimizer: str, steps: int
) -> tuple[dict[str, dict[str, Any]], dict[str, float]]:
    """The tables of ``steps`` steps; and what is in flight in one, seconds per rank: of calls, of
    these hidden behind forward and backward, of copies, of these hidden behind any work.
    """
    step = step_of(spec, plan, cluster, optimizer)
    names = ("communication", "communication hidden", "copies", "copies hidden")
    moving = zip(names, (step.moving / plan.pp).tolist(), strict=True)
    return tables(plan, step, steps), dict(moving)


def totals(step: Step) -> tuple[float, int]:
    """Of a step without its tables: its seconds, and the highest peak memory of a device."""
    device = np.array([tier == "device" for tier, _ in step.kinds])
    peaks = (held[device].sum() for samples in step.held for _, held in samples)
    return float(step.ends.max()), int(max(peaks))


def step_of(spec: ModelSpec, plan: Plan, cluster: Cluster, optimizer: str) -> Step:
    """A plan's step on a cluster."""
    if folds(plan):
        return Deep(spec, plan, cluster, optimizer).step()
    return whole(compiled(spec, plan, optimizer=optimizer), cluster)


def whole(program: Program, cluster: Cluster) -> Step:
    """The step of a program that is not folded."""
    costs, calls = Costs(program, cluster), Calls(program)
    times = walked(program, counted(program, costs), cluster.call_overhead)
    found: list[tuple] = []
    drawn, sums, moving = [], {}, np.zeros(4)
    weights = [
        list(moments(program, pp, gloo=not cluster.gpus)) for pp in range(len(program.codes))
    ]
    kinds = sorted({kind for some in weights for pair in some for one in pair for kind in one})
    held = []
    for pp, code in enumerate(program.codes):
        turns = turns_of(program, pp)
        last = {(turn.stage, turn.letter): turn.first for turn in turns}
        behind = max(turn.last for turn in turns) + 1
        found.append(
            (
                *(
                    [getattr(turn, name) for turn in turns]
                    for name in ("stage", "letter", "microbatch")
                ),
                *timed(code, times, pp, turns, {}),
            )
        )
        drawn += boxes(code, times, pp, min(last.values()), behind)
        sums |= _sums(costs, calls, pp, times, program)
        moving += _moving(program, times, pp, behind)
        held.append(_held(weights[pp], times, pp, turns, kinds))
    rank = np.repeat(np.arange(len(found)), [len(some[0]) for some in found])
    columns = [np.concatenate(some) for some in zip(*found, strict=True)]
    ends = np.array(times.ends)
    return Step(rank, *columns, drawn, sums, ends, moving, kinds, held)


def turns_of(program: Program, pp: int) -> list[Turn]:
    """The actions in a rank's list; of a relay with parts of the model in place of stages."""
    code, part_of = program.codes[pp], {}
    if program.plan.relays:
        parts = enumerate(program.model.parts)
        part_of = {op: number for number, (_, i, j) in parts for op in range(i, j)}
    found: dict[tuple, list[int]] = {}
    for position, span in enumerate(spans(program, code)):
        ins = code[position]
        if span and span[0] in COMPUTE_KINDS and ins.op in COMPUTE:
            stage = part_of.get(ins.at[0], span[2])
            found.setdefault((stage, LETTER[span[0]], span[1]), [position, 0])[1] = position
    return [Turn(*what, *ends) for what, ends in found.items()]


def _sums(costs: Costs, calls: Calls, pp: int, times: Times, program: Program) -> dict:
    sums, count, first = Sums(costs, pp), Counter(), {}
    for position, ins in enumerate(program.codes[pp]):
        if ins.lane or ins.op in COMPUTE:
            key = alike(pp, ins) if ins.lane else (ins.op, ins.at)
            count[key] += 1
            first.setdefault(key, (ins, position))
    for key, (ins, position) in first.items():
        for one in said(costs, calls, pp, ins):
            sums.add(one, times.entered[pp][position], count[key])
    return sums.found


def _moving(program: Program, times: Times, pp: int, behind: int) -> np.ndarray:
    code = program.codes[pp]
    calls, jobs = in_flight(code, times, pp)
    trains = [at < behind and ins.op in COMPUTE for at, ins in enumerate(code)]
    return np.r_[beside(calls, *worked(times, pp, trains)), beside(jobs, *worked(times, pp))]


def _held(
    walk: list, times: Times, pp: int, turns: list[Turn], kinds: list[tuple[str, str]]
) -> list[tuple[float, np.ndarray]]:
    """Samples: at the start, behind some actions, at each tier's peak, at the end."""

    def vector(held: dict) -> np.ndarray:
        return np.array([held.get(kind, 0) for kind in kinds])

    left, entered = times.left[pp], times.entered[pp]
    some = np.unique(np.linspace(0, len(turns) - 1, SAMPLES).astype(int)).tolist()
    found = {left[turns[n].last]: walk[turns[n].last + 1][1] for n in some}
    for device in (True, False):
        tops = [
            sum(
                size for (tier, _), size in held[not device].items() if (tier == "device") == device
            )
            for held in walk
        ]
        at = int(np.argmax(tops))
        moment = (entered[at - 1] + left[at - 1]) / 2 if at else 0.0
        found[moment] = walk[at][not device]
    found = {0.0: walk[0][0]} | found | {left[-1]: walk[-1][1]}
    return [(moment, vector(found[moment])) for moment in sorted(found)]
