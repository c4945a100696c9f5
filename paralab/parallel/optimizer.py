"""From gradients to new weights: sums that other axes owe, clipping, loss scale, update.

The loss of a micro-batch is divided by all samples of the global batch, and in fp16 multiplied by a
loss scale, so gradients only ever add up. What is left when backward is over:

    shared   gradients of what tp ranks hold the same and see a part of, summed over them; and of a
             tied embedding, summed over a pipeline's first and last stage
    COPY     with grad_dtype="fp32-copy", the recipe of 20 bytes per parameter (theory/needs.py):
             all gradients once more in fp32. Else an UPDATE widens those of its own unit
    NORM     squares of what this rank counts, summed over everything that is partitioned
    UPDATE   one instruction per unit: unscale, clip, AdamW or SGD on fp32 values, round

fp16 has 5 bits of exponent, so the loss is multiplied by a scale that looks for its own size: where
a gradient overflows the step is left out and the scale halved, after 2000 good steps it doubles
(Mixed Precision Training, Micikevicius+ 2018, arXiv:1710.03740, sec. 3.2; the numbers are those of
torch.amp.GradScaler). Norm, scale and verdict stay on the device: nothing waits for a number.
"""

from __future__ import annotations

from collections.abc import Iterable

from paralab.programs.instructions import (
    ALL_REDUCE,
    COPY,
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
    """Sums that are partial over another axis too: one all-reduce for all of an axis and phase.

    axes  {(axis, phase): units that it concerns}; ``kind``: "grad" or "gshard"
    """
    made: Code = []
    for (axis, phase), units in axes.items():
        at, values = (axis, phase), tuple((kind, u, 0) for u in sorted(units))
        made.append(Instr(ALL_REDUCE, at, reads=values, writes=values, lane=axis, phase=phase))
    return code + made


def update(code: Code, *, stage: int, mixed: bool, scaled: bool, copied: bool) -> Code:
    """One optimizer step of every unit, in the order in which their gradients are complete."""
    grad, target = ("gshard", "shard") if stage else ("grad", "w")
    made, units = list(code), gradients(code)
    for u in units * copied:
        made.append(Instr(COPY, u, -1, u, ((grad, u, 0),), (("wide", u, 0),)))
    for u in units:
        wide = (("wide", u, 0),) * copied  # next to what it is a copy of
        reads: tuple[Value, ...] = (*wide, (grad, u, 0), ("opt", u, 0))
        writes: tuple[Value, ...] = ((target, u, 0),)
        if mixed:
            reads, writes = (*reads, ("master", u, 0)), (*writes, ("master", u, 0))
        made.append(Instr(UPDATE, u, -1, u, (*reads, *((SCALE,) * scaled)), writes))
    return made


def clip(code: Code, axes: Iterable[str], *, scaled: bool) -> Code:
    """No update before the norm of all gradients is known.

    axes    those over which gradients are partitioned
    scaled  fp16: whether the step counts is read off the norm too, and the scale adapts to it
    """
    updates = [position for position, ins in enumerate(code) if ins.op == UPDATE]
    grads, norm = tuple(code[position].reads[0] for position in updates), (NORM_VALUE,)
    made = [ins._replace(reads=(*ins.reads, *norm)) if ins.op == UPDATE else ins for ins in code]
    if updates:
        sums = [
            Instr(ALL_REDUCE, reads=norm, writes=norm, lane=axis, phase="control") for axis in axes
        ]
        made[updates[0] : updates[0]] = [Instr(NORM, reads=grads, writes=norm), *sums]
    if scaled:
        made.append(Instr(RESCALE, reads=(*norm, SCALE), writes=(SCALE,)))
    return made
