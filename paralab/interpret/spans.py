"""Which box of a timeline an instruction belongs to. One rule for what runs and what predicts.

An action of the schedule is one box from its first instruction to its last: all that the rank does
in between, waits and additions of gradients included, belongs to it. Where a call is begun or
waited for, the box is cut.
"""

from __future__ import annotations

from paralab.programs.instructions import COMPUTE, KINDS, Code
from paralab.programs.program import Program

Span = tuple[str, int, int, int]  # kind, micro-batch, stage, chunk


def spans(program: Program, code: Code) -> list[Span | None]:
    """Per instruction the box that it belongs to, or None: it is part of none."""
    stage_of = {op: s for s, (i, j) in enumerate(program.stages) for op in range(i, j)}
    found: list[Span | None] = []
    before, between = None, 0
    for position, ins in enumerate(code):
        kind, span = KINDS.get(ins.op) if ins.lane == "" else None, None
        if ins.op in COMPUTE:
            stage = stage_of[ins.at[0]]
            kind = ins.phase or kind  # of a weight half that is split off to hide a message
            span = kind, ins.mb, stage, stage // program.plan.pp
        elif kind is not None:
            span = kind, -1, 0, 0
        found.append(span)
        if span is not None and kind != "copy":
            if span == before:
                found[between:position] = [span] * (position - between)
            before, between = span, position + 1
    return found
