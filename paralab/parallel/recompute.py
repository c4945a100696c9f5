"""Activation recomputation: keep less for backward, and compute it again when backward is there.

    "full"       every block keeps only its input: Chen+ 2016 (arXiv:1604.06174) with segments of
                 one block. Their memory of sqrt(l) for l blocks comes from sqrt(l) segments, fewer
                 inputs and more of a segment in its backward; that is not done here
    "selective"  only the attention core, from the result of qkv to the input of proj, keeps its
                 input alone: it has most of the memory and few of the FLOPs (Korthikanti+ 2022,
                 arXiv:2205.05198, sec. 5), with attention="explicit". A fused kernel ("sdpa", the
                 default on GPUs) keeps no scores: there it saves little, and costs the same FLOPs

A FORWARD of such a range keeps nothing, and a RECOMPUTE of it stands before its backward. Memory,
elements kept by one block of a micro-batch, x = b s h: "full" x, and during its backward the whole
block's once more; "selective" 16 x in place of 16 x and what the s x s scores take. Bytes on the
wire: none; but under tensor parallelism the messages of the second forward. Time: "full" one
forward more, which makes backward half as long again; "selective" 4 b s^2 h FLOPs per block.

Under 1D tensor parallelism every rank keeps the same x. ``partition_activations`` keeps a t-th on
each, and gathers it before the block is computed again: one all-gather of x per block and
micro-batch (ZeRO's P_a, Rajbhandari+ 2020, arXiv:1910.02054, sec. 6.1).

The gradients are bitwise those without: the same calls on the same numbers, and dropout masks that
follow from sample and op. Lab 06 shows it.
"""

from __future__ import annotations

from paralab.model.build import Model
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
    """Blocks ("full") or attention cores ("selective") are computed again before their backward."""
    ranges, n, made = recomputed(model, kind), len(model.ops), []
    for ins in cut(code, {edge for some in ranges for edge in some}, n):
        if ins.at in ranges and ins.op == FORWARD:
            ins = compute(FORWARD, *ins.at, ins.mb, n, keeps=False)
        elif ins.at in ranges and ins.op in (BACKWARD, BACKWARD_INPUT):
            made.append(compute(RECOMPUTE, *ins.at, ins.mb, n))
        made.append(ins)
    return made


def recomputed(model: Model, kind: str) -> frozenset[tuple[int, int]]:
    """The ranges of ops that run a second time."""
    if kind == "full":
        return frozenset((i, j) for name, i, j in model.parts if name.startswith("blocks"))
    return model.cores if kind == "selective" else frozenset()


def kept_inputs(code: Code) -> dict[Value, int]:
    """{the input that a block keeps to be computed again: position of its last forward use}."""
    again = {ins.reads[0] for ins in code if ins.op == RECOMPUTE and ins.reads[0][0] == "x"}
    found: dict[Value, int] = {}
    for position, ins in enumerate(code):
        for v in ins.reads:
            if v in again and ins.op == FORWARD and not keeps(ins):
                found[v] = position
    return found


def partition_activations(code: Code) -> Code:
    """Of a block's input each tp rank keeps a part, and the whole is gathered for its backward."""
    last, made = kept_inputs(code), []
    for position, ins in enumerate(code):
        if ins.op == RECOMPUTE and (x := ins.reads[0]) in last:
            part, whole = ("xpart", *x[1:]), ("back", *x[1:])
            gather = Instr(ALL_GATHER, *x[1:], -1, (part,), (whole,), "tp", phase="recompute")
            made.append(gather)
            ins = ins._replace(reads=(whole, *ins.reads[1:]))
        made.append(ins)
        for v in ins.reads:
            if last.get(v) == position:
                made.append(Instr(COPY, v[1], v[2], -1, (v,), (("xpart", *v[1:]),)))
    return made
