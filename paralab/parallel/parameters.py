"""Which units a compute instruction reads, and to which units' gradients backward adds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from paralab.model.build import Model
from paralab.parallel.buckets import Unit
from paralab.programs.instructions import ADDS_GRADIENTS, BACKWARD_WEIGHT, COMPUTE, Code, Value


def add_parameters(code: Code, model: Model, units: Sequence[Unit]) -> Code:
    """Every compute instruction reads ``w`` of the units that hold its ops' parameters, except a
    weight half, which needs none; a whole backward or a weight half writes their ``grad``.
    """
    unit_of = {name: number for number, unit in enumerate(units) for name in unit.names}

    @cache
    def used(i: int, j: int) -> tuple[tuple[Value, ...], tuple[Value, ...]]:
        read = dict.fromkeys(unit_of[n] for names in model.read_by[i:j] for n in names)
        added = dict.fromkeys(unit_of[n] for names in model.of_op[i:j] for n in names)
        return tuple(("w", u, 0) for u in read), tuple(("grad", u, 0) for u in added)

    new_code: Code = []
    for ins in code:
        if ins.op in COMPUTE:
            w, grads = used(*ins.at)
            ins = ins._replace(
                reads=ins.reads if ins.op == BACKWARD_WEIGHT else ins.reads + w,
                writes=ins.writes + grads if ins.op in ADDS_GRADIENTS else ins.writes,
            )
        new_code.append(ins)
    return new_code


def gradient_cuts(model: Model, units: Sequence[Unit]) -> set[int]:
    """Boundaries between ops where backward completes a unit's gradient: before the first op that
    has one of its parameters.

    No such cut separates f from the layer behind it, because that layer's weight half is computed
    while f's message is in flight.
    """
    cuts = set()
    for unit in units:
        first = min(model.owner[name] for name in unit.names)
        before = model.ops[first - 1].message if first else None
        if before is None or before.forward:
            cuts.add(first)
    return cuts
