"""A program: one training step as a list of instructions per pipeline rank. Plain data, no torch.

A *value* is a tuple (kind, where, version); instructions name the values that they read and write.
A *unit* is a group of parameters in one flat buffer (buckets.py); for w, grad and the other kinds
of a unit, ``where`` is the unit's number on the rank. Kinds, and what they hold on one rank:

    x        the state before op ``where`` of micro-batch ``version``         activations, workspace
    r        the same state, when forward is recomputed
    g        the gradient of x
    saved    what ops (i, j) keep from forward for backward
    deferred what the input half of a split backward keeps for the weight half
    again    what an f-bar gathered in forward, gathered a second time for backward
    xpart    a tp rank's part of a block's input; ``xslice``, ``gslice``: its part of an x or g that
             is sent to another stage
    w        a unit's parameters, flat; version > 0: gathered for one use
    grad     a unit's gradient, flat, summed over the micro-batches so far; where ZeRO reduces after
             every micro-batch (`Plan.reduces_often`), the gradient of micro-batch ``version`` alone
    part     this rank's shard of one reduced gradient, before it is added to ``gshard``
    gshard   this rank's shard of the unit's gradient, summed over micro-batches
    shard    this rank's shard of the parameters; ``second``: its larger shard under hpZ
    master   the fp32 master weights that this rank updates, where parameters have 16 bits
    piece    a copy of ``shard`` fetched from another tier; ``back``: an x fetched from one, or
             gathered from its parts
    opt      the optimizer states of the parameters that this rank updates
    norm     the sum of the squares of the gradients; ``host.norm``: the norm of one unit's
             gradient, taken on the host; ``host.verdict``: what follows from the norm, a divisor of
             the gradients and whether to skip the step
    scale    the loss scale of fp16; ``mask``: the causal mask
    sent     marks a message that has left; it holds no memory

``host.`` or ``file.`` before a kind: the same value in host memory or in a file. programs/tiers.py
has the kinds that exist only there.

All data-parallel and tensor-parallel ranks of a pipeline rank run the same list. Passes (parallel/)
say only what each instruction reads and writes. When a rank waits, and when a value is freed, is
derived once for all passes (derive.py).
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
COPY, UPDATE, NORM, RESCALE = "COPY", "UPDATE", "NORM", "RESCALE"  # RESCALE: the loss scale
# KEEP gives the first summand of a gradient the name of the sum, without a copy; ADD adds another.
KEEP, ADD, WAIT, CALL = "KEEP", "ADD", "WAIT", "CALL"

FORWARDS = frozenset((FORWARD, RECOMPUTE))
BACKWARDS = frozenset((BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT))
COMPUTE = FORWARDS | BACKWARDS
ADDS_GRADIENTS = frozenset((BACKWARD, BACKWARD_WEIGHT))
COLLECTIVES = frozenset((ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER))
MESSAGES = frozenset((SEND, RECEIVE))
# All that a rank's list may contain. CALL is not among them: it marks where an action begins while
# a list is compiled; in predictions it stands for several instructions, or for a message that an op
# sends itself (`model.ops.Call`).
OPS = COMPUTE | COLLECTIVES | MESSAGES | {COPY, UPDATE, NORM, RESCALE, KEEP, ADD, WAIT}
# The instruction of each kind of action in a schedule; the methods of a model's ops that it runs.
ACTIONS = {"F": FORWARD, "B": BACKWARD, "I": BACKWARD_INPUT, "W": BACKWARD_WEIGHT}
METHODS_OF = {
    FORWARD: ("forward",),
    RECOMPUTE: ("forward",),
    BACKWARD: ("input", "weight"),
    BACKWARD_INPUT: ("input",),
    BACKWARD_WEIGHT: ("weight",),
}
# The names that a report gives to instructions on the rank's own thread.
KINDS = {
    FORWARD: "forward",
    **dict.fromkeys((RECOMPUTE, BACKWARD, BACKWARD_INPUT), "backward"),
    BACKWARD_WEIGHT: "weight_grad",
    **dict.fromkeys((UPDATE, NORM, RESCALE), "optimizer"),
    **dict.fromkeys((KEEP, ADD, COPY), "copy"),
}
# Lanes that other threads or streams of a rank run; every other lane is a group's.
WORKERS = frozenset(("h2d", "d2h", "disk", "host"))
# A tensor-parallel rank's part of a state, along the sequence.
PARTS = frozenset(("xpart", "xslice", "gslice"))
# Kinds that are the state between two ops; a message carries the state's last entry.
STATES = frozenset(("x", "r", "g", "again", "back")) | PARTS
# The phase of calls that go on during the next step: no instruction of their own step waits.
LATE = "late"


class Instr(NamedTuple):
    """One instruction.

    op      one of `OPS`
    at      for compute: the ops (i, j) that it runs; where a state is sent, gathered or copied: its
            boundary between ops; for a sum of gradients that only some ranks share: (axis, phase);
            for a WAIT: its call's op
    mb      the micro-batch, or -1
    unit    the number of the unit that it moves, sums or updates, or -1
    reads, writes  the values that it reads and writes; its operand (a state, what was saved, a
            gradient) and its result come first
    lane    "": the rank's own thread (a GPU's compute stream) executes it. Else the axis of the
            group that communicates, or "h2d", "d2h", "disk", "host": the instruction only starts
            the call, and a WAIT precedes the first use of its result (it has the call's lane)
    peer    pipeline rank at the other end of a message
    phase   what the report calls the traffic. A BACKWARD_WEIGHT with a phase was split off its
            BACKWARD to hide a message
    frees   values that are freed once it is done
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
    """The compute instruction ``op`` over ops (i, j), of a model of n ops, for micro-batch k.

    keeps  whether a FORWARD saves anything; if not, a RECOMPUTE has to precede its backward
    whole  the recomputed range that a RECOMPUTE is a piece of: states inside it are "r", not "x"
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


def message(op: str, state: str, stage: Range, k: int, peer: int) -> Instr:
    """The SEND or RECEIVE of a state, "x", or of its gradient, "g", by a stage with ops (i, j).
    peer: pipeline rank at the other end.
    """
    i, j = stage
    border = j if (state == "x") == (op == SEND) else i  # a state leaves at j, a gradient at i
    v = (state, border, k)
    reads, writes = ((v,), (("sent", v[:2], k),)) if op == SEND else ((), (v,))
    return Instr(op, border, k, -1, reads, writes, "pp", peer, "activations")


def keeps(ins: Instr) -> bool:
    """Whether a FORWARD or a RECOMPUTE saves anything for backward."""
    return any(v[0] == "saved" for v in ins.writes)


def cut(code: Code, cuts: Iterable[int], n: int) -> Code:
    """``code`` with compute instructions split at the boundaries ``cuts`` between the model's n
    ops. Forward runs the pieces from first to last, backward from last to first.
    """
    cuts, new_code = sorted(set(cuts)), []
    for ins in code:
        begin, end = ins.at if ins.op in COMPUTE else (0, 0)
        edges = [c for c in cuts if begin < c < end]
        if not edges:
            new_code.append(ins)
            continue
        pieces = list(pairwise([begin, *edges, end]))
        for i, j in pieces if ins.op in FORWARDS else reversed(pieces):
            new_code.append(compute(ins.op, i, j, ins.mb, n, keeps=keeps(ins), whole=ins.at))
    return new_code


# ---- helpers for passes --------------------------------------------------------------------------
def insert(code: Code, after: Mapping[int, Iterable[Instr]]) -> Code:
    """``code`` with the instructions ``after[position]`` inserted behind each such position."""
    return [new for at, ins in enumerate(code) for new in (ins, *after.get(at, ()))]


def completed(code: Code, *, per_microbatch: bool = False) -> dict[int, list[int]]:
    """{position: units whose gradient is complete after the instruction there}, that is, to which
    no later instruction of the step adds, or, ``per_microbatch``, none of the same micro-batch.
    """
    last = {}
    for position, ins in enumerate(code):
        if ins.op in ADDS_GRADIENTS:
            for v in ins.writes:
                if v[0] == "grad":
                    last[v[1], ins.mb if per_microbatch else 0] = position
    units_at = {}
    for (unit, _), position in last.items():
        units_at.setdefault(position, []).append(unit)
    return units_at


def gradients(code: Code) -> list[int]:
    """The units that have a gradient, in the order in which the gradients are complete."""
    return [unit for _, units in sorted(completed(code).items()) for unit in units]


def sums_shared(ins: Instr) -> bool:
    """Whether ``ins`` sums, in one message, the gradients that only the ranks of one axis share
    (``ins.at`` is then the axis and a phase).
    """
    return ins.op == ALL_REDUCE and isinstance(ins.at, tuple)


def all_reduce(unit: int, axis: str = "dp", kind: str = "grad") -> Instr:
    """The sum of a unit's gradient, or of its shard, over the ranks of ``axis``, in place."""
    return _grad_sync(ALL_REDUCE, unit, axis, kind, kind)


def reduce_scatter(unit: int, axis: str = "dp") -> Instr:
    """The same sum, of which each rank receives one equal part."""
    return _grad_sync(REDUCE_SCATTER, unit, axis, "grad", "part")


def all_gather(unit: int, axis: str = "dp") -> Instr:
    """The ranks' parts of a gradient, gathered into the whole gradient on each rank."""
    return _grad_sync(ALL_GATHER, unit, axis, "part", "grad")


def _grad_sync(op: str, unit: int, axis: str, read: str, written: str) -> Instr:
    return on_unit(op, (read, unit, 0), (written, unit, 0), lane=axis, phase="grad_sync")


def on_unit(op: str, source: Value, into: Value, k: int = -1, **lane_and_phase: str) -> Instr:
    """``op`` from one value of a unit to another, in micro-batch k."""
    return Instr(op, 0, k, source[1], (source,), (into,), **lane_and_phase)


def wait(call: Instr) -> Instr:
    """A WAIT for ``call`` here. Without one, the rank waits where the result is first used."""
    return Instr(WAIT, reads=call.writes)
