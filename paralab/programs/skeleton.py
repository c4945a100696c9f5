"""A schedule as instructions: what every pipeline rank computes, and its messages. Torch-free.

A stage is a range of ops. The lists of actions come from parallel/schedules.py or from the user's
own schedule; parallel/lowering.py adds the messages in an order that cannot deadlock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paralab.model.build import Model
from paralab.parallel.partition import partition
from paralab.parallel.schedules import Action, relay
from paralab.programs.instructions import ACTIONS, RECEIVE, SEND, Code, Instr, compute
from paralab.spec import ModelSpec, Plan

if TYPE_CHECKING:
    from paralab.parallel.lowering import Transfer


def stage_parts(spec: ModelSpec, plan: Plan) -> list[tuple[str, ...]]:
    """The names of every stage's parts of the model."""
    return partition(spec, plan.stages, plan.microbatch_size)


def stage_ranges(spec: ModelSpec, plan: Plan, model: Model) -> tuple[tuple[int, int], ...]:
    """Ops (i, j) of every stage."""
    where = {name: (i, j) for name, i, j in model.parts}
    return tuple((where[names[0]][0], where[names[-1]][1]) for names in stage_parts(spec, plan))


def skeleton(spec: ModelSpec, plan: Plan, model: Model, *, only: int | None = None) -> list[Code]:
    """Per pipeline rank its compute and its messages, in an order that is safe for NCCL.

    only  the one rank whose list is built; the other lists are empty
    """
    n = len(model.ops)
    if plan.relays:
        actions = relay(len(model.parts), plan.microbatches)
        return [[compute(ACTIONS[kind], *model.parts[s][1:], k, n) for s, kind, k in actions]]
    rows = plan.actions()
    if plan.pp > 1:
        # Imported late, because it imports NumPy, which `import paralab` does not load.
        from paralab.parallel.lowering import lower

        rows = lower(rows, only=only)
    stages = stage_ranges(spec, plan, model)
    return [[instruction(step, stages, n) for step in actions] for actions in rows]


def instruction(step: Action | Transfer, stages: Sequence[tuple[int, int]], n: int) -> Instr:
    """The instruction of an action or a transfer. stages: ops (i, j) of each, of n ops in all."""
    if isinstance(step, Action):
        return compute(ACTIONS[step.kind], *stages[step.stage], step.microbatch, n)
    border = stages[min(step.stage, step.other_stage)][1]
    v = ("x" if step.what == "F" else "g", border, step.microbatch)
    op, reads, writes = RECEIVE, (), (v,)
    if step.kind == "send":
        op, reads, writes = SEND, (v,), (("sent", v[:2], v[2]),)
    return Instr(op, v[1], v[2], -1, reads, writes, "pp", step.peer, "activations")
