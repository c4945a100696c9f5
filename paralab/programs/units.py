"""The units of every pipeline rank, and where their gradients are complete. Torch-free.

Which parameters a unit has is a rule of parallel/buckets.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from paralab.model.build import Model
from paralab.parallel.buckets import Unit, units
from paralab.spec import ModelSpec, Plan


def rank_units(spec: ModelSpec, plan: Plan, model: Model, parts: Sequence[str]) -> tuple[Unit, ...]:
    """The units of a pipeline rank that holds these parts of the model."""
    sizes = {name: size for part in parts for name, size in model.numels[part].items()}
    return units(sizes, spec, plan)


def edges(model: Model, units: Sequence[Unit]) -> set[int]:
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
