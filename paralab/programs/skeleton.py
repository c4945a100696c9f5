"""A schedule as instructions: what every pipeline rank computes, and its messages. Torch-free.

A stage is a range of ops. The lists of actions come from parallel/schedules.py or from the user's
own schedule; parallel/lowering.py adds the messages in an order that cannot deadlock.
"""

from __future__ import annotations

from paralab.parallel.partition import partition
from paralab.parallel.schedules import relay
from paralab.programs.instructions import ACTIONS, MESSAGES, RECEIVE, SEND, Code, compute, message
from paralab.programs.program import Program
from paralab.spec import ModelSpec, Plan


def stage_parts(spec: ModelSpec, plan: Plan) -> list[tuple[str, ...]]:
    """The names of every stage's parts of the model."""
    return partition(spec, plan.stages, plan.microbatch_size)


def skeleton(program: Program, *, only: int | None = None) -> list[Code]:
    """Per pipeline rank its compute and its messages, in an order that is safe for NCCL.

    only  the one rank whose list is built; the other lists are empty
    """
    plan, stages, model = program.plan, program.stages, program.model
    n = len(model.ops)
    if plan.relays:
        actions = relay(len(model.parts), plan.microbatches)
        return [[compute(ACTIONS[kind], *model.parts[s][1:], k, n) for s, kind, k in actions]]
    # Imported late, because they import NumPy, which `import paralab` does not load.
    from paralab.parallel import lowering
    from paralab.theory.order import CODE, F, order

    steps = lowering.lowered(order(plan.actions(), plan.stages, plan.microbatches))
    op_of = {CODE[letter]: op for letter, op in ACTIONS.items()}
    op_of |= {lowering.SEND: SEND, lowering.RECV: RECEIVE}
    codes: list[Code] = [[] for _ in range(plan.pp)]
    for r in range(plan.pp) if only is None else [only]:
        own_steps = slice(steps.first[r], steps.first[r + 1])
        columns = (column[own_steps].tolist() for column in steps[1:])
        for kind, what, s, k, peer in zip(*columns, strict=True):
            op = op_of[kind]
            if op in MESSAGES:
                codes[r].append(message(op, "x" if what == F else "g", stages[s], k, peer))
            else:
                codes[r].append(compute(op, *stages[s], k, n))
    return codes
