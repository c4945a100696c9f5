"""Which box of a timeline an instruction belongs to: one rule for runs and for predictions.

An action of the schedule is one box from its first compute to its last. Everything that the rank
does in between belongs to it, waits and additions of gradients included. Where a call is begun or
waited for, the box is cut in parts.
"""

from __future__ import annotations

from paralab.programs.instructions import COMPUTE, KINDS, Code
from paralab.programs.program import Program

Span = tuple[str, int, int, int]  # kind, micro-batch, stage, chunk


def spans(program: Program, code: Code) -> list[Span | None]:
    """Per instruction the box that it belongs to, or None."""
    stage_of = {op: s for s, (i, j) in enumerate(program.stages) for op in range(i, j)}
    boxes: list[Span | None] = []
    before, between = None, 0
    for position, ins in enumerate(code):
        kind, span = KINDS.get(ins.op) if ins.lane == "" else None, None
        if ins.op in COMPUTE:
            stage = stage_of[ins.at[0]]
            kind = ins.phase or kind  # of a weight half that is split off to hide a message
            span = kind, ins.mb, stage, stage // program.plan.pp
        elif kind is not None:
            span = kind, -1, 0, 0
        boxes.append(span)
        if span is not None and kind != "copy":
            if span == before:
                boxes[between:position] = [span] * (position - between)
            before, between = span, position + 1
    return boxes
