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

A tensor-parallel rank has its shares of these (`theory.tensor.shares`), x of the residual stream
and 4 x or S of what is inside a pair of layers apart, and besides

    1D               L, while the logits' gradient is multiplied
    sequence par.    2 x, the whole sequence as it is gathered and once more in its order
    2D, 2.5D         of down's input and weight a second block: what travels
    3D               x of q^2 ranks' tokens and features, gathered; of down's input and weight what
                     is added up and what arrives, q of its blocks each
"""

from __future__ import annotations

from typing import NamedTuple

from paralab.spec import BYTES_PER_ELEMENT, ModelSpec, Plan
from paralab.theory.formulas import sizes
from paralab.theory.tensor import shares


class Workspace(NamedTuple):
    """Bytes at each of the moments; see the top of the file.

    head, down, core, close, lookup  in hand
    down_gradient  of a weight, in "down"
    gone      activations of the block that "core" no longer has
    core_gradients  of weights that "core" has already
    tied      waits from the head to the embedding
    """

    head: int
    down: int
    core: int
    close: int
    lookup: int
    down_gradient: int
    gone: int
    core_gradients: int
    tied: int


def backward_workspace(model: ModelSpec, plan: Plan) -> Workspace:
    """Of a backward under ``plan``."""
    (x, scores), h, kept = sizes(model, plan.microbatch_size), model.hidden, shares(plan)
    item, words = BYTES_PER_ELEMENT[plan.precision], model.vocab * model.hidden
    q, _ = plan.tp_grid
    weights = q * q if plan.tp_mode in ("2d", "2.5d") else plan.tp
    blocks = 1 if plan.tp == 1 else {"1d": 1, "3d": 2 * q + 1}.get(plan.tp_mode, 2)
    inside, words = x // kept.inside, words // weights
    scores = scores // kept.inside if model.attention == "explicit" else 0
    logits = x // h * model.vocab // kept.inside
    stream = x // kept.outside
    again = stream if plan.recompute == "full" else 0
    dropped = stream if model.dropout else 0
    gathered = 2 * x if plan.sequence_parallel else x // q**2 if plan.tp_mode == "3d" else 0
    squared = h * h // weights
    entering = stream + (logits if plan.tp > 1 else 0) + (gathered and gathered + stream)
    return Workspace(
        head=max(2 * 4 * logits, item * (entering + words)),
        down=item * (again + dropped + stream + gathered + blocks * 4 * (inside + squared)),
        core=item * (again + max(stream + 3 * inside + scores, stream + inside + 2 * scores)
                     + (scores if dropped else 0)),
        close=item * (again + 2 * stream),
        lookup=item * 3 * words,
        down_gradient=item * 4 * squared,
        gone=item * (stream + x // kept.entered + 4 * inside + 5 * x // kept.left),
        core_gradients=item * 9 * squared,
        tied=item * words if model.tied and plan.stages == 1 else 0,
    )  # fmt: skip
