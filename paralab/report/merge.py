"""From what every rank wrote to one report: ranks in order, one clock, one loss per step.

Ranks on one machine share a clock; ranks of different machines measured how far theirs is off, and
say how well they know it. Adding a constant per rank keeps every duration as it was measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from paralab.checks import illegal
from paralab.parallel.layouts import holding
from paralab.ranks.waits import ranks
from paralab.report import tables
from paralab.spec import ModelSpec, Plan

CLOCK_OFFSET = ("clock_offset", "clock_uncertainty")
PART_KEYS = ("rank", *CLOCK_OFFSET, *tables.COLUMNS, "losses")


def merge(
    parts: Sequence[Mapping[str, Any]],
    *,
    plan: Plan,
    meta: Mapping[str, Any],
    model: ModelSpec | None = None,
) -> dict[str, Any]:
    """The tables, losses, weights, gradients, results and meta, from one part per rank.

    model  of a training; weights and gradients that tp ranks hold in blocks are put together
    """
    ordered = _all_ranks(parts, plan.world_size)
    offsets, uncertain = ([float(part[name]) for part in ordered] for name in CLOCK_OFFSET)
    for rank, pair in enumerate(zip(offsets, uncertain, strict=True)):
        if not all(map(math.isfinite, pair)):
            raise illegal(f"clock_offset of rank {rank}", pair[0], "not finite", "seconds")
    columns = [{name: _own(name, part) for name in tables.COLUMNS} for part in ordered]
    starts = [
        (step != 0, start + offset)
        for own, offset in zip(columns, offsets, strict=True)
        for step, start in zip(own["steps"]["step"], own["steps"]["start"], strict=True)
    ]
    zero = min(starts, default=(True, 0.0))[1]  # the earliest step 0, or the earliest step there is
    merged: dict[str, Any] = {
        name: {c: [] for c in kinds} for name, kinds in tables.COLUMNS.items()
    }
    for own, offset in zip(columns, offsets, strict=True):
        for name, table in own.items():
            for column, values in table.items():
                shift = (offset - zero) if column in tables.TIMES else 0
                merged[name][column] += [v + shift for v in values] if shift else values
    merged["meta"] = {**meta, "clock_offsets": {"offset_s": offsets, "uncertainty_s": uncertain}}
    for state in ("weights", "gradients"):
        held = {p["rank"]: p[state] for p in ordered if p.get(state) is not None}
        merged[state] = whole_model(held, plan, model)
    about = [part.get("meta", {}).get("observed") for part in ordered]
    # A rank of an observed program may return no losses.
    told = [p["losses"] for p, seen in zip(ordered, about, strict=True) if p["losses"] or not seen]
    merged["losses"] = _losses(told)
    if any(about):  # what pl.observe found each rank's program to be made of
        merged["meta"]["observed"] = about
    if any("result" in part for part in ordered):  # of a traced function
        merged["results"] = [part.get("result") for part in ordered]
    return merged


def whole_model(
    held: Mapping[int, Mapping[str, Any]], plan: Plan, model: ModelSpec | None
) -> dict[str, Any] | None:
    """The tensors of all stages and blocks, in the order of the single-device model.

    held  {rank: {name: what it holds of that tensor}}
    """
    import numpy as np  # `import paralab` does without

    if not held or model is None:
        return None
    shapes, found = model.parameter_shapes(), {}
    for rank, own in held.items():
        for name, array in own.items():
            if plan.tp == 1:
                found[name] = array
                continue
            block = holding(model, plan, name, plan.place(rank).tp)
            if name not in found:
                found[name] = np.empty(block.whole, array.dtype)
            found[name][block.box] = array.reshape(found[name][block.box].shape)
    return {name: found[name].reshape(shape) for name, shape in shapes.items() if name in found}


def _all_ranks(parts: Sequence[Mapping[str, Any]], world_size: int) -> list[Mapping[str, Any]]:
    """One part per rank, in rank order, all of one run."""
    for part in parts:
        lacking = [key for key in PART_KEYS if key not in part]
        if lacking:
            raise ValueError(f"the part of rank {part.get('rank', '?')} lacks {', '.join(lacking)}")
    runs = {part.get("run_id") for part in parts}
    if len(runs) > 1:
        whose = "; ".join(
            f"{ranks(sorted(p['rank'] for p in parts if p.get('run_id') == run))}: run {run}"
            for run in sorted(runs, key=str)
        )
        raise ValueError(f"these parts belong to different runs ({whose}); keep one folder per run")
    found = [part["rank"] for part in parts]
    strange = [r for r in found if r not in range(world_size)]
    twice = sorted({r for r in found if found.count(r) > 1})
    missing = [r for r in range(world_size) if r not in found]
    asked = f"the plan has {world_size} ranks, 0 to {world_size - 1}"
    if strange:
        raise ValueError(f"{asked}, but there is a part of rank {strange[0]!r}")
    if twice:
        raise ValueError(f"{asked}, but {ranks(twice)} wrote more than one part")
    if missing:
        raise ValueError(
            f"{asked}, but there is no part of {ranks(missing)}; every rank must write one"
        )
    return sorted(parts, key=lambda part: part["rank"])


def _own(name: str, part: Mapping[str, Any]) -> dict[str, list[Any]]:
    own = tables.columns_of(name, part[name])
    others = set(own["rank"]) - {part["rank"]}
    if others:
        raise ValueError(f"rank {part['rank']} wrote {name} of rank {min(others)}")
    return own


def _losses(by_rank: Sequence[Sequence[Sequence[float]]]) -> list[float]:
    """Mean over all ranks' micro-batches, step by step.

    fsum is the correctly rounded sum, so the mean does not depend on how the micro-batches were
    distributed over ranks (and not on the Python version, as the built-in sum does).
    """
    lengths = {len(losses) for losses in by_rank}
    if len(lengths) > 1:
        raise ValueError(
            f"ranks wrote losses of {sorted(lengths)} steps; all must write the same number"
        )
    means = []
    for step in zip(*by_rank, strict=True):
        values = [float(v) for v in chain.from_iterable(step)]
        if not values:
            raise ValueError(f"step {len(means)} has no loss of any rank")
        # A diverged run holds inf or NaN, which fsum may refuse; the plain sum hands them on.
        finite = all(map(math.isfinite, values))
        means.append((math.fsum(values) if finite else sum(values)) / len(values))
    return means
