"""Tensor parallelism in one dimension: every layer is cut over t ranks that see the same tokens.

Two linear layers with anything elementwise between them need only two messages. The first is cut by
columns, the second by rows (Megatron-LM, Shoeybi+ 2019, arXiv:1909.08053, sec. 3):

    Y_r = GELU(X A_r)        A = [A_1 ... A_t]        each rank a t-th of the outputs
    Z   = sum_r Y_r B_r      B = [B_1; ...; B_t]      each rank a t-th of the inputs

Two conjugate operators (`model.ops.Collective`) enclose such a pair: f in front of it and g behind
it or, with sequence parallelism, f-bar and g-bar. Outside of f-bar and g-bar each rank has a t-th
of the tokens. What one of the two does in forward, the other does in backward.

                forward           backward                      forward           backward
    f           nothing           all-reduce        f-bar       all-gather        reduce-scatter
    g           all-reduce        nothing           g-bar       reduce-scatter    all-gather

(Korthikanti+ 2022 call the first pair f and f-bar, the second g and g-bar.)

Elements sent, x = b s h: per block and micro-batch two all-reduces of x forward and two backward,
so 4 * 2 (t-1)/t x by each rank. Sequence parallelism (Korthikanti+ 2022, arXiv:2205.05198,
sec. 4.2.2) sends as much, since an all-reduce is a reduce-scatter and an all-gather, and
2 (t-1)/t x more in backward: what f-bar gathered is not saved, because a rank would then save all
tokens, but gathered again.

A column-parallel layer's backward hides its messages, as in Megatron-LM: f-bar gathers again while
the input's gradient is computed, which does not need it, and the message of that gradient is in
flight while the weight's gradient is computed. Lab 07.
"""

from __future__ import annotations

from paralab.model.build import Model
from paralab.model.ops import F_BAR, G_BAR, F, G, Op
from paralab.programs.instructions import (
    ALL_GATHER,
    ALL_REDUCE,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    COMPUTE,
    FORWARDS,
    REDUCE_SCATTER,
    Code,
    Instr,
    Value,
    keeps,
    wait,
)

CALLS = {"all_reduce": ALL_REDUCE, "all_gather": ALL_GATHER, "reduce_scatter": REDUCE_SCATTER}
# Boundaries at which compute is cut for an operator's messages: 0 is in front of the operator, 1
# behind it, 2 behind the layer that follows it.
CUTS = {F: (0, 2), G: (1,), F_BAR: (0, 1, 2), G_BAR: (0, 1)}


def message_cuts(model: Model) -> set[int]:
    """The boundaries between ops at which compute is cut for a message."""
    return {at + cut for at, op in enumerate(model.ops) for cut in CUTS.get(op.message, ())}


def tensor_parallel(code: Code, model: Model, *, overlap: bool = True) -> Code:
    """Insert the operators' messages between compute instructions. Without ``overlap`` backward
    waits for each message where it is posted.
    """
    new_code: Code = []
    for ins in code:
        if ins.op not in COMPUTE:
            new_code.append(ins)
            continue
        i, j = ins.at
        first, last = model.ops[i], model.ops[j - 1]
        if first.message in (F_BAR, G_BAR):  # the range is this operator alone
            new_code += _instead(ins, first)
        elif ins.op in FORWARDS:
            new_code.append(ins)
            if last.message == G:
                new_code.append(_call(last, "forward", j, ins.mb, ins.writes[0]))
        else:
            new_code += _backward(ins, first, model.ops[i - 1] if i else None, overlap)
    return new_code


def _call(op: Op, method: str, at: int, k: int, source: Value, *targets: Value) -> Instr:
    """The operator's collective in "forward" or "backward"; in place without ``targets``."""
    call, axis = CALLS[getattr(op.message, method)], op.message.axis
    return Instr(call, at, k, -1, (source,), targets or (source,), axis, phase=op.phase(method))


def _instead(ins: Instr, op: Op) -> Code:
    """The collective of f-bar or g-bar instead of compute. f-bar saves its input for backward."""
    i, k, gathers = ins.at[0], ins.mb, op.message == F_BAR
    if ins.op in FORWARDS:
        saved = [("saved", ins.at, k)] if gathers and keeps(ins) else []
        return [_call(op, "forward", i, k, ins.reads[0], ins.writes[0], *saved)]
    if ins.op == BACKWARD_WEIGHT or gathers:
        return []  # `_backward` of the layer behind f-bar sends this gradient
    return [_call(op, "backward", i, k, ("g", i + 1, k), ("g", i, k))]


def _backward(ins: Instr, first: Op, before: Op | None, overlap: bool) -> Code:
    """Backward of a range of ops. If it begins with f, or with the layer behind f-bar, the weight
    half is split off to hide the message; its phase "backward" marks it as part of this backward.
    """
    i, k = ins.at[0], ins.mb
    behind_f_bar = before is not None and before.message == F_BAR
    again = [("again", i, k)] if behind_f_bar else []
    if ins.op == BACKWARD_WEIGHT or not (behind_f_bar or first.message == F):
        return [ins._replace(reads=(*ins.reads, *again))]
    g, gathers = ins.writes[0], []  # gathers: f-bar's second all-gather, if any
    if behind_f_bar:
        gather = _call(before, "forward", i, k, ("saved", (i - 1, i), k), *again)
        gathers.append(gather._replace(phase=before.phase("backward")))
        message = _call(before, "backward", i - 1, k, g, ("g", i - 1, k))
    else:
        message = _call(first, "backward", i, k, g)
    waits = [wait(gather) for gather in gathers]
    if ins.op == BACKWARD_INPUT:  # the weight half is another action: the gathers end in this one
        return [*gathers, ins, message, *waits] if overlap else [*gathers, *waits, ins, message]
    deferred, grads = ("deferred", ins.at, k), tuple(v for v in ins.writes if v[0] == "grad")
    input_half = ins._replace(op=BACKWARD_INPUT, writes=(g, deferred))
    reads = (deferred, *again)
    weight_half = ins._replace(op=BACKWARD_WEIGHT, reads=reads, writes=grads, phase="backward")
    if not overlap:
        return [*gathers, *waits, input_half, weight_half, message]
    return [*gathers, input_half, message, weight_half]
