"""A program is a list of instructions per pipeline rank, data without torch.

A *value* is a tuple (kind, where, version); instructions name the values that they read and write.
Kinds, and what they hold on one rank:

    x        the state before op ``where`` of micro-batch ``version``         activations, workspace
    r        the same, where forward runs a second time
    g        the gradient of x
    saved    what ops (i, j) keep from forward for backward; ``deferred`` what waits for the second
             half of a split backward; ``again`` an input that is gathered once more for it;
             ``xpart`` a tp rank's part of a block's input; ``xslice``, ``gslice`` of what goes to
             another stage
    w        a unit's parameters, flat; version > 0: gathered for one use
    grad     a unit's gradient, flat: the sum so far; where ZeRO reduces after every micro-batch
             (`Plan.reduces_often`) that of micro-batch ``version``
    part     this rank's share of one reduced gradient, on its way into ``gshard``, their sum
    wide     a copy in fp32 of a gradient in 16 bits, or of its share, for the update
    shard    this rank's share of the parameters; ``master`` in fp32, where they have 16 bits;
             ``second`` the larger one of hpZ
    piece    a copy of it that has come up from another tier; ``back`` an x that has
    opt      the optimizer's states of what this rank updates
    norm     squares of the gradients, summed; ``host.norm`` is their norm, ``host.verdict`` what
             follows from it; ``scale`` the loss scale of fp16; ``mask`` the causal mask
    sent     a message has left

``host.`` or ``file.`` before a kind: the same values off the device. A *unit* is the parameters in
one flat buffer (buckets.py); ``where`` of w, grad ... is its number on the rank.

Data-parallel and tensor-parallel ranks of a pipeline rank have the same list. Passes (parallel/)
say only what each instruction reads and writes; when a rank waits, and when a value's memory ends,
is derived once for all of them (derive.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

Value = tuple  # (kind, where, version)
Range = tuple[int, int]  # ops (i, j)

FORWARD, RECOMPUTE = "FORWARD", "RECOMPUTE"
BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = "BACKWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT"
SEND, RECEIVE = "SEND", "RECEIVE"
ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER = "ALL_REDUCE", "REDUCE_SCATTER", "ALL_GATHER"
COPY, UPDATE, NORM, RESCALE = "COPY", "UPDATE", "NORM", "RESCALE"
KEEP, ADD, WAIT, CALL = "KEEP", "ADD", "WAIT", "CALL"

FORWARDS = frozenset((FORWARD, RECOMPUTE))
BACKWARDS = frozenset((BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT))
COMPUTE = FORWARDS | BACKWARDS
ADDS_GRADIENTS = frozenset((BACKWARD, BACKWARD_WEIGHT))
COLLECTIVES = frozenset((ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER))
MESSAGES = frozenset((SEND, RECEIVE))
# All that a list may have; in predictions a CALL marks, stands for several, or is an op's own call.
OPS = COMPUTE | COLLECTIVES | MESSAGES | {COPY, UPDATE, NORM, RESCALE, KEEP, ADD, WAIT}
# What a schedule calls an action, and what of a model's ops compute runs.
ACTIONS = {"F": FORWARD, "B": BACKWARD, "I": BACKWARD_INPUT, "W": BACKWARD_WEIGHT}
METHODS = {
    FORWARD: ("forward",),
    RECOMPUTE: ("forward",),
    BACKWARD: ("input", "weight"),
    BACKWARD_INPUT: ("input",),
    BACKWARD_WEIGHT: ("weight",),
}
# What a report calls what the rank's own thread does.
KINDS = {
    FORWARD: "forward",
    RECOMPUTE: "backward",
    BACKWARD: "backward",
    BACKWARD_INPUT: "backward",
    BACKWARD_WEIGHT: "weight_grad",
    **dict.fromkeys((UPDATE, NORM, RESCALE), "optimizer"),
    **dict.fromkeys((KEEP, ADD, COPY), "copy"),
}
# Lanes of a rank that other threads run, or streams; any other lane is a group's.
WORKERS = frozenset(("h2d", "d2h", "disk", "host"))
# A tensor-parallel rank's part of a state, along the sequence.
PARTS = frozenset(("xpart", "xslice", "gslice"))
# Values that are the state between two ops, of which the last entry is sent.
STATES = frozenset(("x", "r", "g", "again", "back")) | PARTS
# The phase of what is carried on into the next step: no instruction waits for it in its own.
LATE = "late"


class Instr(NamedTuple):
    """One instruction.

    op      what it does
    at      of compute: the ops (i, j) that it runs; of a message: the boundary between ops; of a
            sum of gradients that only some ranks share: (axis, phase); of a WAIT: its call's op
    mb      the micro-batch, or -1
    unit    the unit of parameters that it is about, or -1
    reads, writes  values
    lane    "" on the rank's own thread (a GPU's compute stream); else the axis of the group whose
            call it is, or "h2d", "d2h", "disk", "host": then it is only begun here, and the
            instruction that needs what it writes waits first (a WAIT has the lane of its call)
    peer    pipeline rank of the other end of a message
    phase   what the report calls the traffic; on a BACKWARD_WEIGHT, not empty: it was split off to
            hide a message
    frees   values whose memory ends behind it
    """

    op: str
    at: Any = 0
    mb: int = -1
    unit: int = -1
    reads: tuple[Value, ...] = ()
    writes: tuple[Value, ...] = ()
    lane: str = ""
    peer: int = -1
    phase: str = ""
    frees: tuple[Value, ...] = ()


Code = list[Instr]
Pass = Callable[[Code], Code]


def compute(
    op: str, i: int, j: int, k: int, n: int, *, keeps: bool = True, whole: Range | None = None
) -> Instr:
    """What ops (i, j) of a model of n do with micro-batch k.

    keeps  a forward that keeps nothing is run again before its backward
    whole  the range that a RECOMPUTE is a piece of: what it passes on inside is called "r"
    """
    at = (i, j)
    x = (("x", i, k),) if i else ()
    saved, deferred = ("saved", at, k), ("deferred", at, k)
    if op == FORWARD:
        y = (("x", j, k),) if j < n else ()
        return Instr(op, at, k, -1, x, (*y, saved) if keeps else y)
    if op == RECOMPUTE:
        begin, end = whole or at
        again = (("r", j, k),) if j < end else ()
        return Instr(op, at, k, -1, x if i == begin else (("r", i, k),), (*again, saved))
    gi = (("g", i, k),) if i else ()
    gj = (("g", j, k),) if j < n else ()
    if op == BACKWARD:
        return Instr(op, at, k, -1, (saved, *gj), gi)
    if op == BACKWARD_INPUT:
        return Instr(op, at, k, -1, (saved, *gj), (*gi, deferred))
    return Instr(BACKWARD_WEIGHT, at, k, -1, (deferred,), ())


def keeps(ins: Instr) -> bool:
    """Whether a forward leaves anything for a backward."""
    return any(v[0] == "saved" for v in ins.writes)


def cut(code: Code, cuts: Iterable[int], n: int) -> Code:
    """Compute split at these boundaries between ops: forward from the first piece to the last,
    backward from the last to the first.
    """
    cuts, made = sorted(set(cuts)), []
    for ins in code:
        begin, end = ins.at if ins.op in COMPUTE else (0, 0)
        edges = [c for c in cuts if begin < c < end]
        if not edges:
            made.append(ins)
            continue
        pieces, kept = list(pairwise([begin, *edges, end])), keeps(ins) or ins.op not in FORWARDS
        for i, j in pieces if ins.op in FORWARDS else reversed(pieces):
            made.append(compute(ins.op, i, j, ins.mb, n, keeps=kept, whole=ins.at))
    return made


# ---- what passes are written with ----------------------------------------------------------------
def insert(code: Code, after: Mapping[int, Iterable[Instr]]) -> Code:
    """``code`` with more instructions behind some positions."""
    made: Code = []
    for position, ins in enumerate(code):
        made.append(ins)
        made += after.get(position, ())
    return made


def completed(code: Code, *, per_microbatch: bool = False) -> dict[int, list[int]]:
    """{position: units whose gradient is complete behind it}: nothing later in the step adds to it,
    or, ``per_microbatch``, nothing of the same micro-batch does.
    """
    last: dict[tuple[int, int], int] = {}
    for position, ins in enumerate(code):
        if ins.op in ADDS_GRADIENTS:
            for v in ins.writes:
                if v[0] == "grad":
                    last[v[1], ins.mb if per_microbatch else 0] = position
    found: dict[int, list[int]] = {}
    for (unit, _), position in last.items():
        found.setdefault(position, []).append(unit)
    return found


def gradients(code: Code) -> list[int]:
    """The units that have a gradient, in the order in which these are complete."""
    return [unit for _, units in sorted(completed(code).items()) for unit in units]


def sums_shared(ins: Instr) -> bool:
    """Whether it sums only the gradients that the ranks of ``at``'s axis share, in one message."""
    return ins.op == ALL_REDUCE and isinstance(ins.at, tuple)


def all_reduce(unit: int, axis: str = "dp") -> Instr:
    """The sum of a unit's gradient over the ranks of ``axis``, in place."""
    grad = ("grad", unit, 0)
    return Instr(ALL_REDUCE, unit, -1, unit, (grad,), (grad,), axis, phase="grad_sync")


def reduce_scatter(unit: int, axis: str = "dp") -> Instr:
    """The same sum, of which each rank gets one equal part."""
    grad, part = ("grad", unit, 0), ("part", unit, 0)
    return Instr(REDUCE_SCATTER, unit, -1, unit, (grad,), (part,), axis, phase="grad_sync")


def all_gather(unit: int, axis: str = "dp") -> Instr:
    """The ranks' parts of a gradient, put together to a whole one on each of them."""
    grad, part = ("grad", unit, 0), ("part", unit, 0)
    return Instr(ALL_GATHER, unit, -1, unit, (part,), (grad,), axis, phase="grad_sync")


def wait(call: Instr) -> Instr:
    """The rank waits here for this call; without it, where its result is first used."""
    return Instr(WAIT, reads=call.writes)
