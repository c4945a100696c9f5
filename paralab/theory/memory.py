"""Bytes a rank needs, by category, as formulas for fp32: what a run's memory is held against.

Model states, Psi parameters (ZeRO, Rajbhandari+ 2020, arXiv:1910.02054, sec. 3.1, has the same
three lines for its 16-bit recipe of 2 + 2 + 12 bytes):

    parameters  4 Psi
    gradients   4 Psi           once complete, in the data-parallel buckets where there are any
    optimizer   AdamW 8 Psi + 4 per tensor (two moments; a step count for each tensor), SGD 0
    buffers     the padding of the gradient buckets

Activations kept for backward by one block, in elements, as autograd keeps them in paralab/model.py:
input of norm1, of qkv, of proj (with x = b s h each: 3x), q, k and v (3x), input of norm2 and of up
(2x), input of GELU (4x), input of down (4x): 16 x; the softmax's result, a b s^2; two norms' mean
and deviation, 4 b s. Korthikanti+ 2022 (arXiv:2205.05198, eq. 1) write s b h (34 + 5 a s/h) bytes:
the same 16 tensors at 2 bytes each and 2 for two dropout masks; the softmax's result, its dropped
copy and that mask. Fused attention keeps no scores: one number per row of them, and its own result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from paralab.checks import choice
from paralab.parallel.buckets import assign
from paralab.parallel.partition import partition
from paralab.parallel.schedules import Action
from paralab.spec import BYTES_PER_ELEMENT, ModelSpec, Plan
from paralab.theory.formulas import forward_parts, sizes

OPTIMIZERS = ("adamw", "sgd")


def stage_parts(model: ModelSpec, plan: Plan, rank: int) -> dict[int, tuple[str, ...]]:
    """{stage: names of its parts} of the stages on ``rank``, chunk by chunk."""
    stages = partition(model, plan.stages, plan.microbatch_size)
    return {s: stages[s] for s in range(plan.place(rank)[0], plan.stages, plan.pp)}


def stage_shapes(model: ModelSpec, parts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Every trainable tensor of these parts, in order of registration.

    A head that is tied to an embedding on another stage keeps a copy of it, ``head.output.weight``.
    """
    mine = tuple(f"{part}." for part in parts)
    shapes = {n: s for n, s in model.parameter_shapes().items() if n.startswith(mine)}
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
    if plan.dp == 1 or plan.grad_sync not in ("bucketed", "overlapped"):
        return []
    item = BYTES_PER_ELEMENT[plan.precision]
    counts = list(rank_sizes(model, plan, rank).values())
    buckets = assign(counts, bucket_bytes=plan.bucket_bytes, itemsize=item, multiple=plan.dp)
    return [(bucket.params, bucket.numel * item) for bucket in buckets]


def parameter_sizes(model: ModelSpec) -> dict[str, int]:
    """Elements of every parameter of the whole model, in order of registration."""
    return {name: math.prod(shape) for name, shape in model.parameter_shapes().items()}


def rank_sizes(model: ModelSpec, plan: Plan, rank: int = 0) -> dict[str, int]:
    """Elements of every parameter that ``rank`` holds, in order of registration."""
    return {
        name: math.prod(shape)
        for parts in stage_parts(model, plan, rank).values()
        for name, shape in stage_shapes(model, parts).items()
    }


def state_bytes(
    model: ModelSpec, plan: Plan, *, optimizer: str = "adamw", rank: int = 0
) -> dict[str, int]:
    """Bytes of the model states on one rank, by category. Raises ValueError on an unknown
    optimizer.
    """
    choice("optimizer", optimizer, OPTIMIZERS)
    counts = rank_sizes(model, plan, rank)
    psi = sum(counts.values()) * BYTES_PER_ELEMENT[plan.precision]
    padded = sum(size for _, size in gradient_buckets(model, plan, rank))
    return {
        "parameters": psi,
        "gradients": psi,
        "optimizer": 2 * psi + 4 * len(counts) if optimizer == "adamw" else 0,
        "buffers": padded - psi if padded else 0,
    }


def block_activation_bytes(model: ModelSpec, batch: int, *, mask_bytes: int = 4) -> int:
    """Bytes that one block keeps for the backward of ``batch`` samples.

    mask_bytes  of a dropped element: torch keeps 4 on a CPU and 1 on a GPU, as the paper counts
    """
    x, scores = sizes(model, batch)
    tokens = batch * model.seq_len
    elements = 16 * x + 4 * tokens
    masks = 0
    if model.attention == "explicit":
        # One sample's k and v need no copy to be multiplied: they keep the projection's whole
        # result.
        elements += x if batch == 1 else 0
        elements += scores * (2 if model.dropout else 1)
        masks += scores if model.dropout else 0
    else:
        elements += x + model.heads * tokens
    if model.dropout:
        masks += 2 * x
    return 4 * elements + mask_bytes * masks


def activation_bytes(model: ModelSpec, batch: int, *, mask_bytes: int = 4) -> int:
    """Bytes that the whole model keeps for the backward of one micro-batch of ``batch`` samples."""
    parts = forward_parts(model, batch)
    return sum(part_activation_bytes(model, part, batch, mask_bytes=mask_bytes) for part in parts)


def part_activation_bytes(
    model: ModelSpec, part: str, batch: int, *, mask_bytes: int = 4
) -> int:  # fmt: skip
    """What one part keeps: "embedding", "blocks.0" ... or "head".

    The head adds the input and the result of its norm (2x), mean and deviation, and the
    log-probabilities (b s V); the embedding the token and position indices (8 bytes each) and its
    dropout mask.
    """
    x, _ = sizes(model, batch)
    tokens = batch * model.seq_len
    if part == "head":
        return 4 * (2 * x + 2 * tokens + tokens * model.vocab)
    if part == "embedding":
        return 8 * (2 * tokens + model.seq_len) + (mask_bytes * x if model.dropout else 0)
    return block_activation_bytes(model, batch, mask_bytes=mask_bytes)


def put_aside_bytes(model: ModelSpec, part: str, batch: int) -> int:
    """What a part keeps between the input and the weight half of a backward.

    Input and output gradient of every linear layer: 7x and 9x in a block, x and b s V in the head.
    """
    x, _ = sizes(model, batch)
    if part == "head":
        return 4 * (x + batch * model.seq_len * model.vocab)
    return 0 if part == "embedding" else 4 * 16 * x


def moments(
    model: ModelSpec, plan: Plan, *, optimizer: str = "adamw", rank: int = 0
) -> dict[str, dict[str, int]]:
    """Bytes by category at the two moments of a step that can be the peak of ``rank``.

    "forward": activations and gradients are at their most after a forward (in a pipeline of one
    stage the last: there are gradients if an earlier micro-batch left them). "backward": the last
    gradient is being copied into the last bucket; all the others are in theirs already, their own
    memory given back. Workspace inside a kernel is not part of the formula.
    """
    states = state_bytes(model, plan, optimizer=optimizer, rank=rank)
    _, kept, gradients = fullest(model, plan, rank)
    forward = {**states, "gradients": gradients, "activations": kept}
    filling = 0
    if buckets := gradient_buckets(model, plan, rank):
        counts = list(rank_sizes(model, plan, rank).values())
        item = BYTES_PER_ELEMENT[plan.precision]
        filling = states["buffers"] + item * sum(counts[i] for i in buckets[-1][0])
    backward = {**states, "buffers": states["buffers"] + filling, "activations": 0}
    return {"forward": forward, "backward": backward}


def fullest(model: ModelSpec, plan: Plan, rank: int) -> tuple[Action, int, int]:
    """(forward, bytes of activations, of gradients): the last after which both are at their most.

    A forward's activations stay until its backward, or until the weight half of it; what leaves
    for the next stage stays too, for backward starts from it.
    """
    batch, held = plan.microbatch_size, stage_parts(model, plan, rank)
    item = BYTES_PER_ELEMENT[plan.precision]
    size, late, own = {}, {}, {}
    for s, parts in held.items():
        size[s] = sum(part_activation_bytes(model, part, batch) for part in parts)
        size[s] += 0 if "head" in parts else item * sizes(model, batch)[0]
        late[s] = sum(put_aside_bytes(model, part, batch) for part in parts)
        own[s] = item * sum(map(math.prod, stage_shapes(model, parts).values()))
    live, gradients = 0, dict.fromkeys(held, 0)
    most: list[tuple[Action, int, int]] = []
    for action in plan.actions()[plan.place(rank)[0]]:
        s = action.stage
        live += {"F": size[s], "B": -size[s], "W": -late[s], "I": late[s] - size[s]}[action.kind]
        if action.kind != "F":
            gradients[s] = own[s]
            continue
        now = (action, live, sum(gradients.values()))
        if not most or sum(now[1:]) >= sum(most[0][1:]):
            most = [now]
    return most[0]


def table(model: ModelSpec, plan: Plan, *, optimizer: str = "adamw") -> str:
    """The fullest rank at the fuller of its two moments, category by category, as text: what
    `pl.OutOfMemory` shows.
    """
    found = {
        (moment, rank): parts
        for rank in range(0, plan.world_size, plan.dp)  # data-parallel ranks hold the same
        for moment, parts in moments(model, plan, optimizer=optimizer, rank=rank).items()
    }
    moment, rank = max(found, key=lambda key: (sum(found[key].values()), -key[1]))
    rows = [(name, size) for name, size in found[moment, rank].items() if size]
    rows.append(("in all", sum(size for _, size in rows)))
    who = f"rank {rank}" if plan.pp > 1 else "one rank"
    lines = [f"what {who} needs by the formulas, when {moment} has ended:"]
    lines += [f"  {name:<12}{size / 2**20:>14,.1f} MiB" for name, size in rows]
    return "\n".join(lines)
