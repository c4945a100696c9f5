"""FLOPs of a GPT's matrix products, 2 per multiply-add, by the formulas of PTD-P.

Narayanan+ 2021 (arXiv:2104.04473), appendix. Forward of b samples of s tokens, width h:

    block   24 b s h^2 (1 + s/(6h))     8 b s h^2 in qkv and proj, 16 b s h^2 in the MLP, and
                                        4 b s^2 h in the scores and their product with the values
    head    2 b s h V

Backward computes twice as many: one product for the input's gradient and one for the weight's.
Their eq. 3, F = 96 B s l h^2 (1 + s/(6h) + V/(16 l h)), counts the blocks' forward twice, because
activations are recomputed; the head's is counted once. Without recomputation the sum is
72 B s l h^2 (1 + s/(6h) + V/(12 l h)). model/ops.py states what paralab's ops compute.
"""

from __future__ import annotations

from paralab.checks import illegal, instance, whole
from paralab.spec import ModelSpec


def block_flops(model: ModelSpec, batch: int) -> int:
    """Forward FLOPs of one block on ``batch`` samples: 24 b s h^2 (1 + s/(6h))."""
    standard(model, batch)
    s, h = model.seq_len, model.hidden
    return 24 * batch * s * h * h + 4 * batch * s * s * h


def head_flops(model: ModelSpec, batch: int) -> int:
    """Forward FLOPs of the output projection: 2 b s h V."""
    _check(model, batch)
    return 2 * batch * model.seq_len * model.hidden * model.vocab


def forward_flops(model: ModelSpec, batch: int) -> int:
    """Forward FLOPs of the whole model on ``batch`` samples; backward is twice as many."""
    return block_flops(model, batch) * model.layers + head_flops(model, batch)


def standard(model: ModelSpec, batch: int) -> None:
    """Raise ValueError for a block of the user's own, for which there is no formula."""
    _check(model, batch)
    if model.block is not None:
        why = "the formula counts the standard block only, not a block of your own"
        raise illegal("block", model.block, why, "a ModelSpec with block=None")


def _check(model: ModelSpec, batch: int) -> None:
    instance("model", model, ModelSpec, "a pl.ModelSpec(...)")
    whole("batch", batch, at_least=1)
