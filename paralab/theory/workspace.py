"""What a rank has in hand at the fullest moments of a backward, beside what it keeps.

Gradients of activations and products that nobody saved: a few tensors, gone a moment later. Where
parameters, gradients and optimizer states fill the device they are a small part of it, and the
formulas of memory.py leave them out. Where these are offloaded (offload.py) they are what is left,
and are counted. Elements, in the order in which one block's backward comes by, for whole layers on
one device (x = b s h, S = a b s^2, L = b s V):

    head    2 L, or x + V h   loss and softmax: the gradient of either; then of its input and weight
    down    5 x + 4 h^2       the gradient that came in; of its input, 4x; of its weight. GELU needs
                              as much: its 4x take the place of what down had kept
    core    4 x + S, or 2 x + 2 S     attention: of its result, of v, of the block's input, and of
                              the softmax; by then 9 h^2 of weights' gradients are there, and the
                              activations of the MLP and of proj's input, 11 x, are gone
    close   2 x               the last norm; all gradients of the block are there, being packed
    lookup  3 V h             of a tied embedding: the head's part, its own, and their sum

A tied weight's part from the head waits all through the blocks, V h. Full recomputation has the
block's result besides, x; dropout a dropped copy of a gradient.
"""

from __future__ import annotations

from typing import NamedTuple

from paralab.spec import BYTES_PER_ELEMENT, ModelSpec, Plan
from paralab.theory.formulas import sizes


class Workspace(NamedTuple):
    """Bytes at each of the moments; see the top of the file.

    head, down, core, close, lookup  in hand
    gone      activations of the block that "core" no longer has
    core_gradients  of weights that "core" has already
    tied      waits from the head to the embedding
    """

    head: int
    down: int
    core: int
    close: int
    lookup: int
    gone: int
    core_gradients: int
    tied: int


def backward_workspace(model: ModelSpec, plan: Plan) -> Workspace:
    """Of a backward under ``plan``, where layers are whole; of a share of them it is too much."""
    (x, scores), h = sizes(model, plan.microbatch_size), model.hidden
    item, words = BYTES_PER_ELEMENT[plan.precision], model.vocab * model.hidden
    again = x if plan.recompute == "full" else 0
    dropped = x if model.dropout else 0
    scores = scores if model.attention == "explicit" else 0
    logits = x // h * model.vocab
    return Workspace(
        head=max(2 * 4 * logits, item * (x + words)),
        down=item * (again + dropped + 5 * x + 4 * h * h),
        core=item * (again + max(4 * x + scores, 2 * x + 2 * scores) + (scores if dropped else 0)),
        close=item * (again + 2 * x),
        lookup=item * 3 * words,
        gone=item * 11 * x,
        core_gradients=item * 9 * h * h,
        tied=item * words if model.tied and plan.stages == 1 else 0,
    )
