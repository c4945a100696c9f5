"""Compute reads the parameters of its ops, and backward adds to their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from paralab.model.build import Model
from paralab.parallel.buckets import Unit
from paralab.programs.instructions import ADDS_GRADIENTS, BACKWARD_WEIGHT, COMPUTE, Code, Value


def add_parameters(code: Code, model: Model, units: Sequence[Unit]) -> Code:
    """Every compute instruction reads ``w`` of the units that its ops' parameters lie in; a
    backward or a weight half writes their ``grad``. A weight half needs no parameters.
    """
    unit_of = {name: number for number, unit in enumerate(units) for name in unit.names}

    @cache
    def used(i: int, j: int) -> tuple[tuple[Value, ...], tuple[Value, ...]]:
        read = dict.fromkeys(unit_of[n] for names in model.read_by[i:j] for n in names)
        added = dict.fromkeys(unit_of[n] for names in model.of_op[i:j] for n in names)
        return tuple(("w", u, 0) for u in read), tuple(("grad", u, 0) for u in added)

    made: Code = []
    for ins in code:
        if ins.op in COMPUTE:
            w, grads = used(*ins.at)
            ins = ins._replace(
                unit=w[0][1] if w else -1,
                reads=ins.reads if ins.op == BACKWARD_WEIGHT else ins.reads + w,
                writes=ins.writes + grads if ins.op in ADDS_GRADIENTS else ins.writes,
            )
        made.append(ins)
    return made


def gradient_cuts(model: Model, units: Sequence[Unit]) -> set[int]:
    """Boundaries between ops where a unit's gradient may be complete: before the first op that one
    of its parameters belongs to.

    None separates a conjugate operator from the layer behind it: while the operator's message is in
    flight, that layer's weight half is computed.
    """
    place = {name: index for index, op in enumerate(model.ops) for name in op.owned.values()}
    found = set()
    for unit in units:
        at = min(place[name] for name in unit.names)
        before = model.ops[at - 1].message if at else None
        if before is None or before.forward:
            found.add(at)
    return found
