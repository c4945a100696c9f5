"""Activation memory by the formulas of Korthikanti+: table 2, and a pipeline's first stage.

Korthikanti+ 2022 (arXiv:2205.05198), sec. 4 and 5: bytes that one block saves for the backward of b
samples, with 16-bit activations, dropout masks of one byte, and the s x s scores in memory:

    no parallelism                           s b h (34 + 5 a s/h)
    tensor parallel                          s b h (10 + 24/t + 5 a s/(h t))
    tensor and sequence parallel             s b h (34/t + 5 a s/(h t))
    tensor parallel, selective               s b h (10 + 24/t)
    tensor and sequence parallel, selective  s b h 34/t
    full recomputation                       s b h 2

The paper neglects the norms' means and deviations, 4 b s numbers per block, and everything outside
the blocks. interpret/memory.py computes what paralab's programs save, in the plan's precision.

A pipeline's first stage holds p micro-batches in flight, for L/p blocks each: as much as L blocks,
independent of p. Interleaving with v chunks per rank makes it L (1 + (p-1)/(p v)) (sec. 4.2.3).
"""

from __future__ import annotations

from fractions import Fraction

from paralab.checks import choice, whole
from paralab.spec import ModelSpec
from paralab.theory.flops import standard


def layer_bytes(
    model: ModelSpec,
    batch: int,
    *,
    tp: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
) -> Fraction:
    """Bytes that one block saves on each of ``tp`` ranks for ``batch`` samples: table 2.

    recompute  "none", "selective" (the attention core), or "full", which saves only the block's
               input: all of it on every rank, as in the paper, or with sequence parallelism 1/t
    """
    t = whole("tp", tp, at_least=1)
    standard(model, batch)
    choice("recompute", recompute, ("none", "selective", "full"))
    sbh = model.seq_len * batch * model.hidden
    if recompute == "full":
        return Fraction(2 * sbh, t if sequence_parallel else 1)
    factor = Fraction(34, t) if sequence_parallel else 10 + Fraction(24, t)
    if recompute == "none":
        factor += Fraction(5 * model.heads * model.seq_len, model.hidden * t)
    return sbh * factor
