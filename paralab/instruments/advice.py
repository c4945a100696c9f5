"""Which settings would make a run fit in memory: the last sentence of a `pl.OutOfMemory`."""

from __future__ import annotations

import math
import operator
import warnings
from itertools import accumulate
from typing import Any

from paralab.interpret import quick
from paralab.spec import ModelSpec, Plan


def advice(model: ModelSpec, plan: Plan, *, limit: int, **how: Any) -> str:
    """One or two sentences: the settings whose predicted peak, workspace included, is at most
    ``limit`` bytes; if there is none, the setting with the lowest peak.

    Each setting is tried alone, then each together with those that cost less.

    how  ``optimizer``, ``gloo`` and ``clips``, as `quick.peak` takes them
    """
    alone = _changes(plan)
    # A later change of the same setting is the stronger: stage 3 replaces 1.
    together = [change for change in accumulate(alone, operator.or_) if change not in alone]
    sizes = [(change, _peak(model, plan, change, how)) for change in [*alone, *together]]
    unchanged = _peak(model, plan, {}, how)
    smaller = [(change, size) for change, size in sizes if size < unchanged]
    fitting = [(change, size) for change, size in smaller if size <= limit]
    if fitting:
        first, *others = fitting
        sentence = f"By prediction, {_text(*first)} would fit"
        if others := [other for other in others if other[0] in alone][:2]:
            sentence += f"; so would {' or '.join(_text(*other) for other in others)}"
        return sentence + "."
    if smaller:
        change, size = min(smaller, key=lambda pair: pair[1])
        more = "More data-parallel ranks to shard the states (dp), more" if plan.dp == 1 else "More"
        return (
            f"By prediction, {_text(change, size)} comes closest, but does not fit. {more} ranks "
            "to split the layers (tp, pp), a smaller model or a larger limit would help."
        )
    return "No other setting of this plan needs less: use more ranks, a smaller model or batch."


def _changes(plan: Plan) -> list[dict[str, Any]]:
    """Changes of settings that save memory and train the same, the one that costs least first."""
    changes: list[dict[str, Any]] = [{"schedule": "1f1b"}] * (plan.schedule_name == "gpipe")
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
    if plan.tiers is None:  # last, as it moves bytes over slow links
        changes.append({"zero_stage": 3, "offload": "cpu"})
    return changes


def _peak(model: ModelSpec, plan: Plan, change: dict[str, Any], how: dict[str, Any]) -> float:
    """Bytes at the highest peak of all ranks; infinite if the changed plan is not legal."""
    if change.get("zero_stage") and plan.grad_sync != "overlapped":
        change = {**change, "grad_sync": "overlapped"}  # the only one with ZeRO
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return sum(quick.fullest(model, plan.replace(**change), **how)[1].values())
    except ValueError:
        return math.inf


def _text(change: dict[str, Any], size: float) -> str:
    settings = ", ".join(f"{name}={value!r}" for name, value in change.items())
    return f"{settings} ({size / 1e6:,.1f} MB)"
