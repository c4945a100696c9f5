"""Activation recomputation: save less for backward, and compute the rest again just before it.

    "full"       every block saves only its input: Chen+ 2016 (arXiv:1604.06174) with segments of
                 one block. Their memory of sqrt(l) for l blocks comes from sqrt(l) segments: fewer
                 inputs, but a longer segment during its backward. That is not done here
    "selective"  only the attention core, from the result of qkv to the input of proj, is recomputed
                 from its input: it has most of the memory and few of the FLOPs (Korthikanti+ 2022,
                 arXiv:2205.05198, sec. 5), with attention="explicit". A fused kernel ("sdpa", the
                 default on GPUs) saves no scores, so that "selective" gains little for the same
                 FLOPs

A FORWARD of such a range saves nothing, and a RECOMPUTE of it precedes its backward. Memory, as
elements saved by one block for one micro-batch, x = b s h: "full" x, and all activations of one
block during its backward; "selective" 16 x instead of 16 x plus the s x s scores. Communication:
none, except that under tensor parallelism the second forward sends its messages again. Time: "full"
one more forward, which makes backward half as long again; "selective" 4 b s^2 h FLOPs per block.

Under 1D tensor parallelism every rank saves the same x. With ``partition_activations`` each saves a
t-th, and gathers x before it recomputes the block: one all-gather of x per block and micro-batch
(ZeRO's P_a, Rajbhandari+ 2020, arXiv:1910.02054, sec. 6.1).

The gradients are bitwise equal to those without recomputation: the same calls on the same numbers,
and dropout masks that depend on sample and op alone. Lab 06 shows it.
"""

from __future__ import annotations

from paralab.model.build import Model
from paralab.model.ops import Attention
from paralab.programs.instructions import (
    ALL_GATHER,
    BACKWARD,
    BACKWARD_INPUT,
    COPY,
    FORWARD,
    RECOMPUTE,
    Code,
    Instr,
    Value,
    compute,
    cut,
    keeps,
)


def recompute(code: Code, model: Model, kind: str) -> Code:
    """Blocks ("full") or attention cores ("selective") are recomputed before their backward."""
    ranges, n, new_code = recomputed(model, kind), len(model.ops), []
    for ins in cut(code, {edge for op_range in ranges for edge in op_range}, n):
        if ins.at in ranges and ins.op == FORWARD:
            ins = compute(FORWARD, *ins.at, ins.mb, n, keeps=False)
        elif ins.at in ranges and ins.op in (BACKWARD, BACKWARD_INPUT):
            new_code.append(compute(RECOMPUTE, *ins.at, ins.mb, n))
        new_code.append(ins)
    return new_code


def recomputed(model: Model, kind: str) -> frozenset[tuple[int, int]]:
    """The ranges of ops that are recomputed."""
    if kind == "full":
        return frozenset((i, j) for name, i, j in model.parts if name.startswith("blocks"))
    if kind == "none":
        return frozenset()
    return frozenset((i, i + 1) for i, op in enumerate(model.ops) if isinstance(op, Attention))


def kept_inputs(code: Code) -> dict[Value, int]:
    """{x, the saved input of a recomputed block: position of its last use in forward}."""
    inputs = {ins.reads[0] for ins in code if ins.op == RECOMPUTE and ins.reads[0][0] == "x"}
    last_use: dict[Value, int] = {}
    for position, ins in enumerate(code):
        for v in ins.reads:
            if v in inputs and ins.op == FORWARD and not keeps(ins):
                last_use[v] = position
    return last_use


def partition_activations(code: Code) -> Code:
    """Each tp rank saves a part of a block's input; the whole is gathered for the recomputation."""
    last_use, new_code = kept_inputs(code), []
    for position, ins in enumerate(code):
        if ins.op == RECOMPUTE and (x := ins.reads[0]) in last_use:
            _, i, k = x
            part, whole = ("xpart", i, k), ("back", i, k)
            new_code.append(Instr(ALL_GATHER, i, k, -1, (part,), (whole,), "tp", phase="recompute"))
            ins = ins._replace(reads=(whole, *ins.reads[1:]))
        new_code.append(ins)
        for v in ins.reads:
            if last_use.get(v) == position:
                new_code.append(Instr(COPY, v[1], v[2], -1, (v,), (("xpart", *v[1:]),)))
    return new_code
