"""Which parameters a rank holds: a pipeline's stages of the model, and blocks of them under tp.

Their sizes, and the buckets of their gradients. All else that is predicted of a rank begins here:
its bytes (memory.py), its work, what it sends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from paralab.parallel.buckets import Unit, assign, part_of, units
from paralab.parallel.layouts import holding
from paralab.parallel.partition import partition
from paralab.spec import BYTES_PER_ELEMENT, ModelSpec, Plan


def stage_parts(model: ModelSpec, plan: Plan, rank: int) -> dict[int, tuple[str, ...]]:
    """{stage: names of its parts} of the stages on ``rank``, chunk by chunk."""
    stages = partition(model, plan.stages, plan.microbatch_size)
    return {s: stages[s] for s in range(plan.place(rank)[0], plan.stages, plan.pp)}


def like(model: ModelSpec, plan: Plan, rank: int) -> int:
    """The first rank that holds as much as this one, in layers of the same kinds.

    In a deep pipeline nearly all are alike. (Frozen parameters go by number, but beside a pipeline
    there are none.)
    """
    at = plan.place(rank)
    return _likes(model, plan)[at.pp] * plan.dp * plan.tp + at.tp


@lru_cache(maxsize=8)
def _likes(model: ModelSpec, plan: Plan) -> list[int]:
    """For each place of a pipeline the first one like it."""
    stages = partition(model, plan.stages, plan.microbatch_size)
    kinds = [(len(parts), parts[0] == "embedding", parts[-1] == "head") for parts in stages]
    first: dict[object, int] = {}
    return [first.setdefault(tuple(kinds[at :: plan.pp]), at) for at in range(plan.pp)]


@lru_cache(maxsize=16)
def _shapes_by_part(model: ModelSpec) -> dict[str, dict[str, tuple[int, ...]]]:
    """{part: {name: shape}}: asked for stage by stage, and thousands in a large model."""
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in model.parameter_shapes().items():
        found.setdefault(part_of(name), {})[name] = shape
    return found


def stage_shapes(model: ModelSpec, parts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Every parameter of these parts, in order of registration.

    A head that is tied to an embedding on another stage keeps a copy of it, ``head.output.weight``.
    """
    by_part = _shapes_by_part(model)
    order = {part: number for number, part in enumerate(by_part)}
    shapes: dict[str, tuple[int, ...]] = {}
    for part in sorted(parts, key=order.__getitem__):
        shapes.update(by_part[part])
    if model.tied and "head" in parts and "embedding" not in parts:
        shapes["head.output.weight"] = (model.vocab, model.hidden)
    return shapes


def gradient_buckets(
    model: ModelSpec, plan: Plan, rank: int = 0
) -> list[tuple[tuple[int, ...], int]]:
    """(indices of its parameters, bytes with padding) of every bucket, in the order they leave.

    Empty where nothing is bucketed (one data-parallel rank, grad_sync="naive"), or where nobody
    knows: a grad_sync of the user's own.
    """
    if plan.dp == 1 or plan.zero_stage or plan.grad_sync not in ("bucketed", "overlapped"):
        return []
    item = BYTES_PER_ELEMENT[plan.precision]
    counts = [n for name, n in rank_sizes(model, plan, rank).items() if model.trainable(name)]
    buckets = assign(counts, bucket_bytes=plan.bucket_bytes, itemsize=item, multiple=plan.dp)
    return [(bucket.params, bucket.numel * item) for bucket in buckets]


def parameter_sizes(model: ModelSpec) -> dict[str, int]:
    """Elements of every parameter of the whole model, in order of registration."""
    return {name: math.prod(shape) for name, shape in model.parameter_shapes().items()}


def rank_sizes(model: ModelSpec, plan: Plan, rank: int = 0) -> dict[str, int]:
    """Elements of every parameter that ``rank`` holds, in order of registration."""
    return dict(_rank_sizes(model, plan, rank))


@lru_cache(maxsize=128)
def _rank_sizes(model: ModelSpec, plan: Plan, rank: int) -> dict[str, int]:
    index = plan.place(rank).tp
    in_a_block: dict[str, int] = {}  # {name without the block: elements}, alike in all of them
    found: dict[str, int] = {}
    for parts in stage_parts(model, plan, rank).values():
        for name, shape in stage_shapes(model, parts).items():
            layer = name.split(".", 2)[2] if name.startswith("blocks.") else name
            if layer not in in_a_block:
                whole = plan.tp == 1
                mine = shape if whole else holding(model, plan, name, index).shape
                in_a_block[layer] = math.prod(mine)
            found[name] = in_a_block[layer]
    return found


@lru_cache(maxsize=128)
def rank_units(model: ModelSpec, plan: Plan, rank: int = 0) -> tuple[Unit, ...]:
    """The flat buffers that ZeRO shares out on ``rank``, in the order in which they are numbered:
    `parallel.buckets.units`.
    """
    return tuple(units(_rank_sizes(model, plan, rank), model, plan))
