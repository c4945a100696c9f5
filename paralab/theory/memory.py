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

from paralab.checks import choice
from paralab.parallel.buckets import assign
from paralab.spec import BYTES_PER_ELEMENT, ModelSpec, Plan
from paralab.theory.formulas import sizes

OPTIMIZERS = ("adamw", "sgd")


def gradient_buckets(model: ModelSpec, plan: Plan) -> list[tuple[tuple[int, ...], int]]:
    """(indices of its parameters, bytes with padding) of every bucket, in the order they leave.

    Empty where nothing is bucketed (one data-parallel rank, grad_sync="naive"), or where nobody
    knows: a grad_sync of the user's own.
    """
    if plan.dp == 1 or plan.grad_sync not in ("bucketed", "overlapped"):
        return []
    item = BYTES_PER_ELEMENT[plan.precision]
    counts = list(parameter_sizes(model).values())
    buckets = assign(counts, bucket_bytes=plan.bucket_bytes, itemsize=item, multiple=plan.dp)
    return [(bucket.params, bucket.numel * item) for bucket in buckets]


def parameter_sizes(model: ModelSpec) -> dict[str, int]:
    """Elements of every parameter, in order of registration."""
    counts = {}
    for name, shape in model.parameter_shapes().items():
        counts[name] = 1
        for length in shape:
            counts[name] *= length
    return counts


def state_bytes(model: ModelSpec, plan: Plan, *, optimizer: str = "adamw") -> dict[str, int]:
    """Bytes of the model states on one rank, by category. Raises ValueError on an unknown
    optimizer.
    """
    choice("optimizer", optimizer, OPTIMIZERS)
    item = BYTES_PER_ELEMENT[plan.precision]
    psi = model.num_params * item
    padded = sum(size for _, size in gradient_buckets(model, plan))
    tensors = len(model.parameter_shapes())
    return {
        "parameters": psi,
        "gradients": psi,
        "optimizer": 2 * psi + 4 * tensors if optimizer == "adamw" else 0,
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
    """Bytes that the whole model keeps for the backward of one micro-batch of ``batch`` samples.

    The head adds the input and the result of its norm (2x), mean and deviation, and the
    log-probabilities (b s V); the embedding the token and position indices (8 bytes each) and its
    dropout mask.
    """
    x, _ = sizes(model, batch)
    tokens = batch * model.seq_len
    head = 4 * (2 * x + 2 * tokens + tokens * model.vocab)
    embedding = 8 * (2 * tokens + model.seq_len) + (mask_bytes * x if model.dropout else 0)
    return (
        model.layers * block_activation_bytes(model, batch, mask_bytes=mask_bytes)
        + head
        + embedding
    )


def moments(model: ModelSpec, plan: Plan, *, optimizer: str = "adamw") -> dict[str, dict[str, int]]:
    """Bytes by category at the two moments of a step that can be its peak.

    "forward": the last forward has ended, all its activations are kept; there are gradients if an
    earlier micro-batch left them. "backward": the last gradient is being copied into the last
    bucket; all the others are in theirs already, their own memory given back. Workspace inside a
    kernel is not part of the formula.
    """
    states = state_bytes(model, plan, optimizer=optimizer)
    forward = {
        **states,
        "gradients": states["gradients"] if plan.microbatches > 1 else 0,
        "activations": activation_bytes(model, plan.microbatch_size),
    }
    filling = 0
    if buckets := gradient_buckets(model, plan):
        counts = list(parameter_sizes(model).values())
        item = BYTES_PER_ELEMENT[plan.precision]
        filling = states["buffers"] + item * sum(counts[i] for i in buckets[-1][0])
    backward = {**states, "buffers": states["buffers"] + filling, "activations": 0}
    return {"forward": forward, "backward": backward}


def table(model: ModelSpec, plan: Plan, *, optimizer: str = "adamw") -> str:
    """The larger of the two moments as text, category by category: what `pl.OutOfMemory` shows."""
    found = moments(model, plan, optimizer=optimizer)
    moment = max(found, key=lambda name: sum(found[name].values()))
    rows = [(name, size) for name, size in found[moment].items() if size]
    rows.append(("in all", sum(size for _, size in rows)))
    lines = [f"what one rank needs by the formulas, when {moment} has ended:"]
    lines += [f"  {name:<12}{size / 2**20:>14,.1f} MiB" for name, size in rows]
    return "\n".join(lines)
