"""Bytes a rank needs, by category, as formulas: what a run's memory is held against.

Model states, Psi parameters of which all are trained, w bytes each (4 in fp32, 2 in bf16 and fp16),
N ranks that share them out (ZeRO, Rajbhandari+ 2020, arXiv:1910.02054, sec. 3.1 and 5):

    stage            0           1            2            3
    parameters       w Psi       w Psi        w Psi        w Psi/N and what is gathered
    gradients        w Psi       w Psi        w Psi/N      w Psi/N
    optimizer        K Psi       K Psi/N      K Psi/N      K Psi/N

K is 8 for AdamW in fp32 (two moments) and 12 in 16 bits (master weights too); SGD has 0 and 4. With
each tensor, or unit of ZeRO, AdamW keeps a step count of 4 bytes. ZeRO's units are padded to a
multiple of N, and Psi is counted with padding wherever it stands beside N. Frozen parameters have
their own bytes and nothing else.

Once complete, gradients lie in data parallelism's buckets, whose padding counts as "buffers".
ZeRO's buffers are the reduce-scatters under way: memory_zero.py. Activations: activations.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from paralab.checks import choice
from paralab.parallel.buckets import assign, part_of, units
from paralab.parallel.layouts import holding, residual_shape
from paralab.parallel.partition import partition
from paralab.parallel.schedules import Action
from paralab.spec import BYTES_PER_ELEMENT, ModelSpec, Plan
from paralab.theory.activations import (
    activation_bytes,
    block_activation_bytes,
    part_activation_bytes,
    put_aside_bytes,
    recomputed_bytes,
)
from paralab.theory.tensor import shares
from paralab.theory.workspace import backward_workspace

__all__ = ["activation_bytes", "block_activation_bytes", "fullest", "gradient_buckets", "moments",
           "parameter_sizes", "part_activation_bytes", "put_aside_bytes", "rank_sizes",
           "stage_parts", "stage_shapes", "state_bytes", "table"]  # fmt: skip

OPTIMIZERS = ("adamw", "sgd")


def stage_parts(model: ModelSpec, plan: Plan, rank: int) -> dict[int, tuple[str, ...]]:
    """{stage: names of its parts} of the stages on ``rank``, chunk by chunk."""
    stages = partition(model, plan.stages, plan.microbatch_size)
    return {s: stages[s] for s in range(plan.place(rank)[0], plan.stages, plan.pp)}


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
    return {
        name: math.prod(shape if plan.tp == 1 else holding(model, plan, name, index).shape)
        for parts in stage_parts(model, plan, rank).values()
        for name, shape in stage_shapes(model, parts).items()
    }


def state_bytes(
    model: ModelSpec, plan: Plan, *, optimizer: str = "adamw", rank: int = 0
) -> dict[str, int]:
    """Bytes of the model states on one rank, by category. Raises ValueError on an unknown
    optimizer.

    What is offloaded is not on the device and counts 0: theory/offload.py; of gradients what has to
    wait there for the sum over other ranks.

    gradients: what a step keeps of them between two micro-batches; with one alone ZeRO's first
    stage gives them away as they come, like its second.
    """
    choice("optimizer", optimizer, OPTIMIZERS)
    item, mixed = BYTES_PER_ELEMENT[plan.precision], plan.precision != "fp32"
    counts = rank_sizes(model, plan, rank)
    trained = {name: count for name, count in counts.items() if model.trainable(name)}
    parameters, gradients = sum(counts.values()), sum(trained.values())
    updated, tensors, padding, waiting = gradients, len(trained), 0, 0
    tiers = plan.tiers
    if plan.zero_stage:
        n, made = plan.shard_degree, units(counts, model, plan)
        shared = [unit for unit in made if not unit.frozen]
        padded = sum(unit.numel for unit in made)
        updated, tensors = sum(unit.numel for unit in shared) // n, len(shared)
        alone = parameters - sum(counts[name] for unit in made for name in unit.names)
        parameters = alone + (padded // n if plan.zero_stage == 3 else padded)
        gradients = updated if plan.reduces_often or plan.zero_stage == 3 else gradients
        waiting = item * sum(unit.numel for unit in shared if unit.waits) // n
    elif buckets := gradient_buckets(model, plan, rank):
        padding = sum(size for _, size in buckets) - item * gradients
    moments = 8 * updated + 4 * tensors if optimizer == "adamw" else 0
    here = {
        "parameters": item * parameters,
        "gradients": item * gradients,
        "optimizer": moments + (4 * updated if mixed else 0),
        "buffers": padding,
    }
    for name in ("parameters", "gradients", "optimizer"):
        if tiers is not None and getattr(tiers, name) != "device":
            here[name] = waiting if name == "gradients" else 0
    return here


def moments(
    model: ModelSpec, plan: Plan, *, optimizer: str = "adamw", rank: int = 0
) -> dict[str, dict[str, int]]:
    """Bytes by category at the two moments of a step that can be the peak of ``rank``.

    "forward": activations and gradients are at their most after a forward (in a pipeline of one
    stage the last: there are gradients if an earlier micro-batch left them). "backward": the last
    gradient is being copied into the last bucket; all the others are in theirs already, their own
    memory given back. Or, if it is more, the first block to be recomputed is there once more.
    Workspace inside a kernel is not part of the formula. Beside the parameters every block has its
    causal mask, s^2 bytes. For ZeRO see memory_zero.py.
    """
    states = state_bytes(model, plan, optimizer=optimizer, rank=rank)
    held = [part for parts in stage_parts(model, plan, rank).values() for part in parts]
    masks = sum(part.startswith("blocks.") for part in held) * model.seq_len**2
    states["parameters"] += masks
    if plan.zero_stage:
        from paralab.theory.memory_zero import zero_moments

        return zero_moments(model, plan, states, rank)
    action, kept, gradients = fullest(model, plan, rank)
    moving = offloaded_input(model, plan)  # the last block's input is on its way to the host
    forward = {**states, "gradients": gradients, "activations": kept + moving}
    filling = 0
    if buckets := gradient_buckets(model, plan, rank):
        counts = [n for name, n in rank_sizes(model, plan, rank).items() if model.trainable(name)]
        item = BYTES_PER_ELEMENT[plan.precision]
        filling = states["buffers"] + item * sum(counts[i] for i in buckets[-1][0])
    backward = {**states, "buffers": states["buffers"] + filling, "activations": 0}
    if plan.recompute != "none":
        more = recomputed_bytes(model, plan.microbatch_size, **asked(plan))
        if "head" in stage_parts(model, plan, rank)[action.stage]:  # its backward is over
            more -= part_activation_bytes(model, "head", plan.microbatch_size, **asked(plan))
        if moving:  # its own input is back, and that of the block below, if there is one
            blocks = [p for p in stage_parts(model, plan, rank)[action.stage] if "blocks" in p]
            more += moving * min(2, len(blocks)) - moving  # forward has counted one
        again = {**forward, "activations": kept + more}
        if moving:
            hand = backward_workspace(model, plan)
            again["workspace"] = hand.down + hand.tied
        backward = max(backward, again, key=lambda found: sum(found.values()))
    return {"forward": forward, "backward": backward}


def kept_bytes(model: ModelSpec, plan: Plan, parts: Sequence[str]) -> dict[str, int]:
    """{part: bytes of activations} of one micro-batch in a stage of these parts.

    "" is what leaves for the next stage, which stays too, for backward starts from it.
    """
    batch, gone = plan.microbatch_size, offloaded_input(model, plan)
    kept = {
        part: part_activation_bytes(model, part, batch, **asked(plan))
        - (gone if part.startswith("blocks.") else 0)
        for part in parts
    }
    leaving = BYTES_PER_ELEMENT[plan.precision] * math.prod(residual_shape(model, plan))
    return {"": 0 if "head" in parts else leaving, **kept}


def offloaded_input(model: ModelSpec, plan: Plan) -> int:
    """Bytes of a block's input, if inputs are kept off the device; else 0."""
    if plan.tiers is None or plan.tiers.activations == "device":
        return 0
    return BYTES_PER_ELEMENT[plan.precision] * math.prod(residual_shape(model, plan))


def asked(plan: Plan) -> dict[str, Any]:
    """The plan's settings as the formulas of activations.py take them."""
    return {"recompute": plan.recompute, "precision": plan.precision, "shares": shares(plan),
            "partition": plan.tp if plan.partition_activations else 1}  # fmt: skip


def fullest(model: ModelSpec, plan: Plan, rank: int) -> tuple[Action, int, int]:
    """(forward, bytes of activations, of gradients): the last after which both are at their most.

    A forward's activations stay until its backward, or until the weight half of it; what leaves
    for the next stage stays too, for backward starts from it.
    """
    batch, held = plan.microbatch_size, stage_parts(model, plan, rank)
    size, late, own, counts = {}, {}, {}, rank_sizes(model, plan, rank)
    for s, parts in held.items():
        size[s] = sum(kept_bytes(model, plan, parts).values())
        late[s] = sum(
            put_aside_bytes(model, part, batch, plan.tp, plan.precision) for part in parts
        )
        names = stage_shapes(model, parts)
        elements = sum(counts[name] for name in names if model.trainable(name))
        own[s] = BYTES_PER_ELEMENT[plan.precision] * elements
        own[s] //= plan.shard_degree if plan.reduces_often else 1
    live = gradients = 0
    missing = dict(own)  # of stages that no backward has come to
    change = {}
    for s in held:
        change |= {(s, "F"): size[s], (s, "B"): -size[s], (s, "W"): -late[s],
                   (s, "I"): late[s] - size[s]}  # fmt: skip
    most, found = -1, None
    for action in plan.actions()[plan.place(rank)[0]]:
        s, kind, _ = action
        live += change[s, kind]
        if kind != "F":
            gradients += missing.pop(s, 0)
        elif live + gradients >= most:
            most, found = live + gradients, (action, live, gradients)
    return found


def table(model: ModelSpec, plan: Plan, *, optimizer: str = "adamw") -> str:
    """The fullest rank at the fuller of its two moments, category by category, as text: what
    `pl.OutOfMemory` shows.
    """
    found = {
        (moment, rank): parts
        for rank in range(0, plan.world_size, plan.dp * plan.tp)  # the others hold as much
        for moment, parts in moments(model, plan, optimizer=optimizer, rank=rank).items()
    }
    moment, rank = max(found, key=lambda key: (sum(found[key].values()), -key[1]))
    rows = [(name, size) for name, size in found[moment, rank].items() if size]
    rows.append(("in all", sum(size for _, size in rows)))
    who = f"rank {rank}" if plan.pp > 1 else "one rank"
    lines = [f"what {who} needs by the formulas, when {moment} has ended:"]
    lines += [f"  {name:<12}{size / 2**20:>14,.1f} MiB" for name, size in rows]
    return "\n".join(lines)
