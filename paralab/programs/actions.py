"""Write the instructions of every action: compiled for micro-batch 0 once, copied for the others.

Passes that concern one micro-batch's path through a stage see the forward and the backward of
micro-batch 0 alone, one after the other. Their result is copied in the order of the schedule, so a
thousand micro-batches cost no more passes than two.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from paralab.programs.instructions import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    CALL,
    COMPUTE,
    FORWARD,
    STATES,
    Code,
    Instr,
    Pass,
    Value,
    compute,
)

# Kinds of values whose version is a micro-batch.
OF_MICROBATCH = STATES | {"saved", "deferred", "sent"}
PATHS = (FORWARD, BACKWARD), (FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)


def write(skeleton: Code, chain: Sequence[Pass], n: int) -> Code:
    """The skeleton with each action replaced by its instructions.

    chain  the passes that concern one micro-batch's path through a stage
    n      number of the model's ops
    """
    ops = {}
    for ins in skeleton:
        if ins.op in COMPUTE:
            ops.setdefault(ins.at, set()).add(ins.op)
    compiled = {}
    for at, ops_here in ops.items():
        for path in PATHS:
            if ops_here.issuperset(path):
                code = []
                for op in path:
                    code += [mark((op, at)), compute(op, *at, 0, n)]
                for step in chain:
                    code = step(code)
                for ins in code:
                    if ins.op == CALL:
                        current = compiled[ins.at] = []
                    else:
                        current.append(ins)
    new_code = []
    for ins in skeleton:
        new_code += of_microbatch(compiled[ins.op, ins.at], ins.mb) if ins.op in COMPUTE else [ins]
    return new_code


def of_microbatch(code: Iterable[Instr], k: int) -> Code:
    """The same instructions for micro-batch ``k``."""
    return [
        Instr(op, at, k, unit, numbered(reads, k), numbered(writes, k), lane, peer, phase)
        for op, at, _, unit, reads, writes, lane, peer, phase, _ in code
    ]


def numbered(
    values: Iterable[Value], k: int, kinds: frozenset[str] = OF_MICROBATCH
) -> tuple[Value, ...]:
    """``values`` with version ``k`` in those of ``kinds``, which exist once per micro-batch."""
    return tuple([(v[0], v[1], k) if v[0] in kinds else v for v in values])


def mark(at: Any) -> Instr:
    """A CALL of nothing, which passes do not move: the instructions after it belong to ``at``."""
    return Instr(CALL, at)
