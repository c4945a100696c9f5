"""Which setting would make a run fit, by its program: what `pl.OutOfMemory` says at its end."""

from __future__ import annotations

import math
import warnings
from typing import Any

from paralab.interpret import quick
from paralab.spec import ModelSpec, Plan


def advice(model: ModelSpec, plan: Plan, *, limit: int, **how: Any) -> str:
    """One or two sentences: the settings that bring this rank under ``limit`` bytes, or come
    nearest.

    Each is tried alone, then all together. Sizes are predicted peaks, workspace included, of the
    ``optimizer``, ``rank`` and ``gloo`` that `quick.peak` takes.
    """
    alone = _changes(plan)
    together: dict[str, Any] = {}
    for change in alone:  # the later the stronger: stage 3 replaces stage 1
        together |= change
    sizes = [(change, _peak(model, plan, change, how)) for change in [*alone, together]]
    now = _peak(model, plan, {}, how)
    found = [(change, size) for change, size in sizes if size < now]
    enough = [(change, size) for change, size in found if size <= limit]
    if enough:
        first, *others = enough
        said = f"By prediction {_said(*first)} would fit"
        if others := [other for other in others if other[0] is not together][:2]:
            said += f"; so would {' or '.join(_said(*other) for other in others)}"
        return said + "."
    if found:
        change, size = min(found, key=lambda pair: pair[1])
        more = "More data-parallel ranks to shard the states (dp), more" if plan.dp == 1 else "More"
        return (
            f"By prediction {_said(change, size)} comes nearest, but does not fit. {more} ranks to "
            "split the layers (tp, pp), a smaller model or a larger limit would help."
        )
    return "No other setting of this plan needs less: use more ranks, a smaller model or batch."


def _changes(plan: Plan) -> list[dict[str, Any]]:
    """Settings that take less memory and leave the result as it is, the cheapest first."""
    changes: list[dict[str, Any]] = []
    if plan.dp > 1:
        changes += [{"zero_stage": stage} for stage in range(plan.zero_stage + 1, 4)]
    size, count = plan.microbatch_size, plan.microbatches
    changes += [
        {"microbatch_size": size // n, "microbatches": count * n}
        for n in (2, 4, 8)
        if size % n == 0
    ]
    if plan.tp > 1 and plan.tp_mode == "1d" and not plan.sequence_parallel:
        changes.append({"sequence_parallel": True})
    if plan.recompute != "full":
        changes.append({"recompute": "full"})
    if plan.tiers is None:  # it moves bytes over slow links: when nothing else is enough
        changes.append({"zero_stage": 3, "offload": "cpu"})
    return changes


def _peak(model: ModelSpec, plan: Plan, change: dict[str, Any], how: dict[str, Any]) -> float:
    """Bytes at the peak; infinite if the changed plan is not legal."""
    if change.get("zero_stage") and plan.grad_sync != "overlapped":
        change = {**change, "grad_sync": "overlapped"}  # ZeRO has its own way
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            changed = plan.replace(**change)
            changed.validate(model)
            return sum(quick.peak(model, changed, **how).values())
    except ValueError:
        return math.inf


def _said(change: dict[str, Any], size: float) -> str:
    settings = ", ".join(f"{name}={value!r}" for name, value in change.items())
    return f"{settings} ({size / 1e6:,.1f} MB)"
