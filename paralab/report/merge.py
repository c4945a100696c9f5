"""Merge the parts that ranks wrote into one report: ranks in order, one clock, one loss per step.

Ranks on one machine share a clock. Ranks on several machines measure the offset of their clock and
its uncertainty. A rank's offset is added to all its times, so every duration stays as measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain, islice
from typing import Any

from paralab.parallel.layouts import holding
from paralab.ranks.hangs import rank_names
from paralab.report import tables
from paralab.spec import ModelSpec, Plan

CLOCK_OFFSET = ("clock_offset", "clock_uncertainty")


def merge(
    parts: Sequence[Mapping[str, Any]],
    *,
    plan: Plan,
    meta: Mapping[str, Any],
    model: ModelSpec | None = None,
) -> dict[str, Any]:
    """The fields of a `Tables` from one part per rank: tables, losses, weights, gradients, results
    and meta. With a model, weights and gradients are assembled from the blocks that tp ranks hold.
    """
    ordered = _all_ranks(parts, plan.world_size)
    offsets, uncertainties = ([float(part[name]) for part in ordered] for name in CLOCK_OFFSET)
    starts = [
        (step != 0, start + offset)
        for part, offset in zip(ordered, offsets, strict=True)
        for step, start in zip(part["steps"]["step"], part["steps"]["start"], strict=True)
    ]
    zero = min(starts, default=(True, 0.0))[1]  # the earliest step 0, or else the earliest step
    merged: dict[str, Any] = {
        name: {
            column: [
                value + (offset - zero) if column in tables.TIMES else value
                for part, offset in zip(ordered, offsets, strict=True)
                for value in part[name][column]
            ]
            for column in columns
        }
        for name, columns in tables.COLUMNS.items()
    }
    clocks = {"offset_s": offsets, "uncertainty_s": uncertainties}
    merged["meta"] = {**meta, "clock_offsets": clocks}
    for state in ("weights", "gradients"):
        held = {p["rank"]: p[state] for p in ordered if p.get(state) is not None}
        merged[state] = whole_model(held, plan, model)
    observed = [part.get("meta", {}).get("observed") for part in ordered]
    # A rank of an observed program may have fewer steps than others, or return no losses.
    most = max(len(part["losses"]) for part in ordered)
    losses = [
        p["losses"] + [[]] * (most - len(p["losses"])) * bool(o)
        for p, o in zip(ordered, observed, strict=True)
    ]
    merged["losses"] = _losses(losses)
    if any(observed):  # pl.observe's facts about each rank's program
        merged["meta"]["observed"] = observed
    if any("result" in part for part in ordered):  # of a traced function
        merged["results"] = [part.get("result") for part in ordered]
    return merged


def whole_model(
    held: Mapping[int, Mapping[str, Any]], plan: Plan, model: ModelSpec | None
) -> dict[str, Any] | None:
    """The whole tensors in the order of the single-device model. held: {rank: {name: its block}}"""
    import numpy as np  # `import paralab` does without

    if not held or model is None:
        return None
    shapes, tensors = model.parameter_shapes(), {}
    for rank, own in held.items():
        for name, array in own.items():
            if plan.tp == 1:
                tensors[name] = array
                continue
            block = holding(model, plan, name, plan.place(rank).tp)
            if name not in tensors:
                tensors[name] = np.empty(block.whole, array.dtype)
            tensors[name][block.box] = array.reshape(tensors[name][block.box].shape)
    return {name: tensors[name].reshape(shape) for name, shape in shapes.items() if name in tensors}


def _all_ranks(parts: Sequence[Mapping[str, Any]], world_size: int) -> list[Mapping[str, Any]]:
    """The parts in rank order. Raises ValueError unless there is one per rank, all of one run."""
    runs = {part.get("run_id") for part in parts}
    if len(runs) > 1:
        whose = "; ".join(
            f"{rank_names(sorted(p['rank'] for p in parts if p.get('run_id') == run))}: run {run}"
            for run in sorted(runs, key=str)
        )
        raise ValueError(f"the parts belong to different runs ({whose}); use one folder per run")
    present = [part["rank"] for part in parts]
    expected = f"the plan has {world_size} ranks, 0 to {world_size - 1}"
    absent = (r for r in range(world_size) if r not in present)
    if missing := list(islice(absent, 2**16)):  # a plan from elsewhere may have 2**60 ranks
        raise ValueError(
            f"{expected}, but there is no part of {rank_names(missing)}; every rank must write one"
        )
    if twice := sorted({r for r in present if present.count(r) > 1}):  # a copy of a file, say
        raise ValueError(f"{expected}, but {rank_names(twice)} wrote more than one part")
    return sorted(parts, key=lambda part: part["rank"])


def _losses(by_rank: Sequence[Sequence[Sequence[float]]]) -> list[float]:
    """The mean over all ranks' micro-batches, step by step.

    fsum rounds the exact sum once, so the mean depends neither on how the micro-batches were
    distributed over ranks nor, as with the built-in sum, on the Python version.
    """
    lengths = {len(losses) for losses in by_rank}
    if len(lengths) > 1:
        raise ValueError(
            f"ranks wrote losses of {sorted(lengths)} steps; all must write the same number"
        )
    means = []
    for step in zip(*by_rank, strict=True):
        values = [float(v) for v in chain.from_iterable(step)]
        # A diverged run has losses of inf or NaN, which fsum may refuse; the plain sum keeps them.
        finite = all(map(math.isfinite, values))
        means.append((math.fsum(values) if finite else sum(values)) / len(values))
    return means
