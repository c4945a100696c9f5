"""An action of the schedule is the same instructions for every micro-batch: made once, and copied.

Passes that concern one micro-batch's way through a stage see that way alone, forward and backward
of micro-batch 0 in a row; what they make of it is written for every micro-batch, in the order of
the schedule. So a list of a thousand micro-batches takes no more passes than one of two.
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
WHOLE, HALVES = (FORWARD, BACKWARD), (FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)


def write(skeleton: Code, chain: Sequence[Pass], n: int) -> Code:
    """Every action of a skeleton as the instructions that it takes.

    chain  passes that concern one micro-batch's way through a stage
    n      ops of the model
    """
    ops: dict[tuple[int, int], set[str]] = {}
    for ins in skeleton:
        if ins.op in COMPUTE:
            ops.setdefault(ins.at, set()).add(ins.op)
    known: dict[Any, Code] = {}
    for at, some in ops.items():
        for way in (WHOLE, HALVES):
            if some.issuperset(way):
                code: Code = []
                for op in way:
                    code += [mark((op, at)), compute(op, *at, 0, n)]
                for step in chain:
                    code = step(code)
                for ins in code:
                    if ins.op == CALL:
                        here = known[ins.at] = []
                    else:
                        here.append(ins)
    made: Code = []
    for ins in skeleton:
        made += of_microbatch(known[ins.op, ins.at], ins.mb) if ins.op in COMPUTE else [ins]
    return made


def of_microbatch(code: Iterable[Instr], k: int) -> Code:
    """What is written of one micro-batch, as it is of another."""
    return [
        Instr(op, at, k, unit, numbered(reads, k), numbered(writes, k), lane, peer, phase)
        for op, at, _, unit, reads, writes, lane, peer, phase, _ in code
    ]


def numbered(
    values: Iterable[Value], k: int, kinds: frozenset[str] = OF_MICROBATCH
) -> tuple[Value, ...]:
    """Values of which every micro-batch has its own, of micro-batch ``k``."""
    return tuple([(v[0], v[1], k) if v[0] in kinds else v for v in values])


def mark(at: Any) -> Instr:
    """A CALL of nothing: what follows belongs to ``at``. Passes leave it where it is."""
    return Instr(CALL, at)
