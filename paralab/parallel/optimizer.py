"""From gradients to new weights: sums over the other axes, clipping, loss scale, update.

The loss of a micro-batch is divided by the number of samples of the global batch, and in fp16
multiplied by a loss scale, so gradients are only ever added up. After backward these remain:

    shared   sums of partial gradients: over tp ranks that hold the same parameter but process
             different tokens; and, of a tied embedding, over a pipeline's first and last stage
    NORM     the sum of the gradients' squares, over all axes over which gradients are partitioned
    UPDATE   one instruction per unit: widen, unscale, clip, AdamW or SGD on fp32 values, round

fp16 has 5 bits of exponent, so the loss is multiplied by a scale that adapts: when a gradient
overflows, the step is skipped and the scale halved; after 2000 good steps it doubles (Mixed
Precision Training, Micikevicius+ 2018, arXiv:1710.03740, sec. 3.2; the numbers are those of
torch.amp.GradScaler). Norm, scale and this decision stay on the device: the host waits for none.
"""

from __future__ import annotations

from collections.abc import Iterable

from paralab.programs.instructions import (
    ALL_REDUCE,
    NORM,
    RESCALE,
    UPDATE,
    Code,
    Instr,
    Value,
    gradients,
)

NORM_VALUE: Value = ("norm", 0, 0)
SCALE: Value = ("scale", 0, 0)


def shared(code: Code, axes: dict[tuple[str, str], set[int]], kind: str) -> Code:
    """Sums of partial gradients: one all-reduce per axis and phase, of all units together.

    axes  {(axis, phase): the units whose gradients are partial over that axis}
    kind  kind of the values to sum: "grad", or with ZeRO "gshard"
    """
    new_code: Code = []
    for (axis, phase), units in axes.items():
        at, values = (axis, phase), tuple((kind, u, 0) for u in sorted(units))
        new_code.append(Instr(ALL_REDUCE, at, reads=values, writes=values, lane=axis, phase=phase))
    return code + new_code


def update(code: Code, *, sharded: bool, mixed: bool, scaled: bool) -> Code:
    """One optimizer step of every unit, in the order in which their gradients are complete.

    sharded  whether shards of units are updated (ZeRO), not whole units
    mixed    whether parameters have 16 bits, with fp32 masters
    scaled   whether gradients have to be divided by fp16's loss scale
    """
    grad, target = ("gshard", "shard") if sharded else ("grad", "w")
    new_code, scale = list(code), [SCALE] if scaled else []
    for u in gradients(code):
        masters = [("master", u, 0)] if mixed else []
        reads: tuple[Value, ...] = ((grad, u, 0), ("opt", u, 0), *masters, *scale)
        new_code.append(Instr(UPDATE, unit=u, reads=reads, writes=((target, u, 0), *masters)))
    return new_code


def clip(code: Code, axes: Iterable[str], *, scaled: bool) -> Code:
    """Every update waits for the norm of all gradients.

    axes    the axes over which gradients are partitioned, so that their squares are summed
    scaled  fp16: the norm also decides whether the step is skipped, and the loss scale adapts
    """
    updates = [position for position, ins in enumerate(code) if ins.op == UPDATE]
    grads, norm = tuple(code[position].reads[0] for position in updates), (NORM_VALUE,)
    clipped = [ins._replace(reads=(*ins.reads, *norm)) if ins.op == UPDATE else ins for ins in code]
    if updates:
        sums = [
            Instr(ALL_REDUCE, reads=norm, writes=norm, lane=axis, phase="control") for axis in axes
        ]
        clipped[updates[0] : updates[0]] = [Instr(NORM, reads=grads, writes=norm), *sums]
    if scaled:
        clipped.append(Instr(RESCALE, reads=(*norm, SCALE), writes=(SCALE,)))
    return clipped
