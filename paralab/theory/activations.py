"""Bytes that a micro-batch's forward leaves for its backward, part by part, as formulas.

Kept by one block, in elements, as autograd keeps them in paralab/model.py: input of norm1, of qkv,
of proj (with x = b s h each: 3x), q, k and v (3x), input of norm2 and of up (2x), input of GELU
(4x), input of down (4x): 16 x; the softmax's result, a b s^2; two norms' mean and deviation, 4 b s.
Korthikanti+ 2022 (arXiv:2205.05198, eq. 1) write s b h (34 + 5 a s/h) bytes: the same 16 tensors
at 2 bytes each and 2 for two dropout masks; the softmax's result, its dropped copy and that mask.
Fused attention keeps one number per row of the scores, in 4 bytes, in their place. (With dropout
torch has no fused kernel on a CPU, and keeps at least what "explicit" does.)

A tensor-parallel rank keeps a share of each (`theory.tensor.Shares`). With 1D on t ranks that is
the whole of the inputs of norm1, qkv, norm2 and up, and of the dropout masks, and a t-th of the 12
others, and of the scores: in the paper's bytes, 4 * 2 + 2 = 10 and 12 * 2 / t, s b h (10 + 24/t +
5 a s/(h t)). Sequence parallelism leaves a t-th of everything. 3D keeps what it brings together:
inputs of linear layers, (1 + 1 + 1 + 4) x / q^2, and their weights, 12 h^2/q^2.

What is recomputed (parallel/recompute.py) is not kept: with "full" a block keeps its input, x; with
"selective" the same 16 x without scores (qkv's result in place of q, k and v). What a block then
needs while its backward runs is `recomputed_bytes`, for one block at a time.
"""

from __future__ import annotations

from paralab.spec import BYTES_PER_ELEMENT, ModelSpec
from paralab.theory.formulas import forward_parts, sizes
from paralab.theory.tensor import WHOLE, Shares

GENERATOR_STATE = 5056  # bytes of torch's CPU generator: to draw the same dropout masks again


def block_activation_bytes(
    model: ModelSpec, batch: int, *, mask_bytes: int | None = None, recompute: str = "none",
    precision: str = "fp32", shares: Shares = WHOLE, partition: int = 1,
) -> int:  # fmt: skip
    """Bytes that one block keeps for the backward of ``batch`` samples.

    shares      what of it a tensor-parallel rank keeps; ``partition``: tp ranks that deal out what
                full recomputation keeps
    mask_bytes  of a dropped element: torch keeps one as wide as the element on a CPU (default), and
                1 on a GPU, as the paper counts
    """
    x, scores = sizes(model, batch)
    tokens, item = batch * model.seq_len, BYTES_PER_ELEMENT[precision]
    mask_bytes = item if mask_bytes is None else mask_bytes
    state = GENERATOR_STATE if model.dropout else 0
    if recompute == "full":
        return item * x // shares.outside // partition + state
    kept = item * (2 * x // shares.outside + 2 * x // shares.entered + 7 * x // shares.inside
                   + 5 * x // shares.left + 4 * tokens // shares.tokens)  # fmt: skip
    kept += 2 * mask_bytes * x // shares.outside if model.dropout else 0
    if shares.weights:
        kept += item * 12 * model.hidden**2 // shares.weights
    if recompute == "selective":
        return kept + state
    if model.attention == "sdpa":
        return kept + 4 * model.heads * tokens // shares.inside
    if _one(model, batch, shares):
        # One sample's or head's k and v need no copy to be multiplied: they keep the projection's
        # whole result.
        kept += item * x // shares.inside
    return kept + _scores_bytes(model, scores, item, mask_bytes) // shares.inside


def _one(model: ModelSpec, batch: int, shares: Shares) -> bool:
    """Whether a rank's attention is of one sample or one head."""
    return batch == shares.samples or model.heads == shares.heads


def _scores_bytes(model: ModelSpec, scores: int, item: int, mask_bytes: int) -> int:
    """The softmax's result; where it is dropped, the dropped copy and the mask too."""
    return scores * (item + (item + mask_bytes if model.dropout else 0))


def recomputed_bytes(
    model: ModelSpec, batch: int, *, recompute: str, mask_bytes: int | None = None,
    precision: str = "fp32", shares: Shares = WHOLE, partition: int = 1,
) -> int:  # fmt: skip
    """Bytes that the backward of one block adds to those it kept, once its part is recomputed."""
    if recompute == "none":
        return 0
    x, scores = sizes(model, batch)
    item = BYTES_PER_ELEMENT[precision]
    if recompute == "full":  # all but the part of the input that is there
        whole = block_activation_bytes(model, batch, mask_bytes=mask_bytes, precision=precision,
                                       shares=shares)  # fmt: skip
        return whole - item * x // shares.outside // partition
    if model.attention == "sdpa":
        return 4 * model.heads * batch * model.seq_len // shares.inside
    mask_bytes = item if mask_bytes is None else mask_bytes
    copies = x if _one(model, batch, shares) else 3 * x
    return (item * copies + _scores_bytes(model, scores, item, mask_bytes)) // shares.inside


def activation_bytes(
    model: ModelSpec, batch: int, *, mask_bytes: int | None = None, recompute: str = "none",
    precision: str = "fp32",
) -> int:  # fmt: skip
    """Bytes that the whole model keeps for the backward of one micro-batch of ``batch`` samples."""
    settings = {"mask_bytes": mask_bytes, "recompute": recompute, "precision": precision}
    parts = forward_parts(model, batch)
    return sum(part_activation_bytes(model, part, batch, **settings) for part in parts)


def part_activation_bytes(
    model: ModelSpec, part: str, batch: int, *, mask_bytes: int | None = None,
    recompute: str = "none", precision: str = "fp32", shares: Shares = WHOLE, partition: int = 1,
) -> int:  # fmt: skip
    """What one part keeps: "embedding", "blocks.0" ... or "head".

    The head adds the input and the result of its norm (2x), mean and deviation, and the
    log-probabilities (b s V, always of 4 bytes); the embedding the token and position indices (8
    bytes each) and its dropout mask. Where the vocabulary is dealt out, embedding and loss each
    keep the entries that a rank has (8 bytes per token), and which these are (1).
    """
    x, _ = sizes(model, batch)
    tokens, item = batch * model.seq_len, BYTES_PER_ELEMENT[precision]
    split = shares != WHOLE
    if part == "head":
        kept = x // shares.outside + x // shares.entered + 2 * tokens // shares.tokens
        if shares.weights:
            kept += model.vocab * model.hidden // shares.weights
        chosen = 9 * tokens // shares.samples if split else 0
        return item * kept + 4 * tokens * model.vocab // shares.inside + chosen
    if part == "embedding":
        mask = item if mask_bytes is None else mask_bytes
        dropped = mask * x // shares.outside if model.dropout else 0
        if split:
            return dropped + 9 * tokens // shares.lookups
        return dropped + 8 * (2 * tokens + model.seq_len)
    return block_activation_bytes(
        model, batch, mask_bytes=mask_bytes, recompute=recompute, precision=precision,
        shares=shares, partition=partition,
    )  # fmt: skip


def put_aside_bytes(
    model: ModelSpec, part: str, batch: int, tp: int = 1, precision: str = "fp32"
) -> int:  # fmt: skip
    """What a part keeps between the input and the weight half of a backward: what its linear layers
    do, 7x and 9x in a block, x and b s V in the head.
    """
    layers = {"embedding": (), "head": ("output",)}.get(part, ("qkv", "proj", "up", "down"))
    return sum(layer_aside_bytes(model, layer, batch, tp, precision) for layer in layers)


def layer_aside_bytes(
    model: ModelSpec, layer: str, batch: int, tp: int = 1, precision: str = "fp32"
) -> int:  # fmt: skip
    """What a linear layer puts aside: its input and its output's gradient, of which 1D tensor
    parallelism cuts what is inside a pair of layers.

    layer  "qkv", "proj", "up", "down" or "output"
    """
    x, _ = sizes(model, batch)
    inside = {"qkv": 3 * x, "proj": x, "up": 4 * x, "down": 4 * x,
              "output": batch * model.seq_len * model.vocab}[layer]  # fmt: skip
    return BYTES_PER_ELEMENT[precision] * (x + inside // tp)
