"""What holds for every compiled program; checked without torch and before a process starts.

    schedule   without messages, copies and updates a list is the schedule: the same actions in the
               same order, and each of them runs every op of its stage once; and backward writes the
               gradients of the parameters of its ops
    lifetimes  no value is read before it is written, or freed or written over while a call in
               flight uses it; all that does not last is freed once, and every call is waited for
    sums       every gradient is summed over each axis that it is partial over, once, before an
               UPDATE or a NORM reads it (sums.py)
    order      the calls of the pipeline ranks match where each holds up its ranks until it is over,
               point-to-point by order alone, as with NCCL (parallel/lowering.py has the same rule
               for a schedule). Data-parallel and tensor-parallel ranks have one list, so their
               calls match

`check` raises ``ValueError`` that names the parameters, the axis, the instruction and its position
in the printed program. compile.py checks what has a pass or a schedule of the learner's own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import zip_longest

from paralab.programs.derive import lasts
from paralab.programs.instructions import (
    ADD,
    ADDS_GRADIENTS,
    ALL_GATHER,
    BACKWARD,
    BACKWARD_WEIGHT,
    COLLECTIVES,
    COMPUTE,
    FORWARD,
    KEEP,
    LATE,
    MESSAGES,
    RECOMPUTE,
    WAIT,
    WORKERS,
    Code,
    Instr,
    Value,
)
from paralab.programs.program import Program
from paralab.programs.skeleton import skeleton
from paralab.programs.sums import Refusal, Sums, is_gradient


def check(program: Program) -> None:
    """Raise ``ValueError`` at the first thing that does not hold."""
    refusals = [Refusal(program, pp) for pp in range(len(program.codes))]
    for pp, (code, refuse) in enumerate(zip(program.codes, refusals, strict=True)):
        if code:
            _schedule(program, pp, code, refuse)
            _gradients(program, pp, code, refuse)
            _lifetimes(program, pp, code, refuse)
            Sums(program, pp, code, refuse).check()
    if all(program.codes):
        _order(program, refusals)


# ---- schedule ------------------------------------------------------------------------------------
def _schedule(program: Program, pp: int, code: Code, refuse: Refusal) -> None:
    """A weight half that is split off to hide a message may run later than its input half."""
    ops = program.model.ops
    asked = skeleton(program.spec, program.plan, program.model, only=pp)[pp]
    sends = [bool(op.message and op.message.forward and op.message.backward) for op in ops]
    turns = [turn for turn in _computed(asked) if not sends[turn[1]]]  # f-bar, g-bar: no compute
    found, nothing = list(_computed(code)), ("", 0, 0, len(code))
    for turn, mine in zip_longest(turns, found, fillvalue=nothing):
        if turn[:3] != mine[:3]:
            op, at, k = turn[:3]
            said = f"{op} {refuse.names.ops(at, at + 1)} mb {k}" if op else "nothing more"
            legal = "a pass that neither adds, drops nor moves compute"
            raise refuse(mine[3], f"the schedule has {said} here", legal)
    adds = (ins for ins in code if ins.op in ADDS_GRADIENTS)
    weights = Counter((at, ins.mb) for ins in adds for at in range(*ins.at))
    for op, at, k, _ in found:
        if op == BACKWARD and weights[at, k] != 1:
            half = f"BACKWARD_WEIGHT {refuse.names.ops(at, at + 1)} mb {k}"
            raise refuse(len(code), f"{half} is computed {weights[at, k]} times", "once")


def _computed(code: Code) -> Iterator[tuple[str, int, int, int]]:
    """(FORWARD, BACKWARD or BACKWARD_WEIGHT, op of the model, micro-batch, position) of all that a
    list computes, what it computes again and what is split off to hide a message left out. An input
    half counts as BACKWARD.
    """
    for position, ins in enumerate(code):
        if ins.op in COMPUTE and ins.op != RECOMPUTE and not ins.phase:
            ops = range(*ins.at) if ins.op == FORWARD else reversed(range(*ins.at))
            kind = ins.op if ins.op in (FORWARD, BACKWARD_WEIGHT) else BACKWARD
            yield from ((kind, at, ins.mb, position) for at in ops)


def _gradients(program: Program, pp: int, code: Code, refuse: Refusal) -> None:
    """Of every parameter there is one: a rank that leaves one out has nowhere to put it."""
    unit_of = {name: u for u, unit in enumerate(program.units[pp]) for name in unit.names}
    for position, ins in enumerate(code):
        if ins.op in ADDS_GRADIENTS:
            of_ops = program.model.of_op[slice(*ins.at)]
            asked = Counter({unit_of[name]: 1 for names in of_ops for name in names})
            found = Counter(v[1] for v in ins.writes if v[0] == "grad")
            for u in sorted(asked | found):
                if asked[u] != found[u]:
                    why = f"writes {found[u]} gradients of {refuse.names.parameters(u)}, and its "
                    why += f"ops add to {asked[u]}"
                    raise refuse(position, why, "a pass that leaves compute as it is")


# ---- lifetimes -----------------------------------------------------------------------------------
def _lifetimes(program: Program, pp: int, code: Code, refuse: Refusal) -> None:
    names = refuse.names
    alive, ended = set(program.lasting(pp)), set()
    if program.plan.zero_stage in (1, 2):  # a share is a part of w
        alive |= {("shard", u, 0) for u in range(len(program.units[pp]))}
    kept: set[Value] = set()  # under another name: of what KEEP reads nothing is left
    flights: dict[tuple[Value, ...], list[Instr]] = {}  # by what they write; a worker's may follow
    using: dict[Value, list[Instr]] = {}  # calls in flight that read or write a value

    def unused(position: int, ins: Instr, v: Value, does: str) -> None:
        for call in using.get(v, ()):
            if ins.lane in WORKERS and call.lane in WORKERS and does != "frees":
                continue  # a worker's lane waits for another one itself
            if does != "reads" or v in call.writes:
                why = f"{does} {names.value(v)}, which a call in flight uses: "
                raise refuse(position, why + names.instruction(call), "a WAIT for it before")

    for position, ins in enumerate(code):
        if ins.op == WAIT:
            if ins.reads not in flights:
                raise refuse(position, "this call is not in flight", "a WAIT behind its call")
            for call in flights.pop(ins.reads):
                for v in {*call.reads, *call.writes}:
                    using[v].remove(call)
        else:
            for v in ins.reads:
                if v not in alive:
                    why = "which is freed" if v in ended else "which no instruction has written"
                    why = "which KEEP has given another name" if v in kept else why
                    raise refuse(position, f"reads {names.value(v)}, {why}", "a value that exists")
                unused(position, ins, v, "reads")
            if ins.op == KEEP:
                alive.discard(ins.reads[0])
                kept.add(ins.reads[0])
            for v in ins.writes:
                if ins.op == ADD and v not in alive:
                    why = f"adds to {names.value(v)}, which no instruction has written"
                    raise refuse(position, why, "KEEP of what is first, and ADD of the others")
                unused(position, ins, v, "writes")
                if v in alive and v not in ins.reads and not lasts(v) and not _adds(ins, v):
                    raise refuse(position, f"writes {names.value(v)} again", "another version")
                alive.add(v)
                kept.discard(v)
            if ins.lane:
                flights.setdefault(ins.writes, []).append(ins)
                for v in {*ins.reads, *ins.writes}:
                    using.setdefault(v, []).append(ins)
        for v in ins.frees:
            if (v not in alive and v not in kept) or lasts(v):
                why = "which lasts from step to step" if lasts(v) else "which does not exist"
                raise refuse(position, f"frees {names.value(v)}, {why}", "one free of each value")
            unused(position, ins, v, "frees")
            alive.discard(v)
            kept.discard(v)
            ended.add(v)
    for call in (call for calls in flights.values() for call in calls if call.phase != LATE):
        raise refuse(len(code), f"no WAIT for {names.instruction(call)}", "a WAIT for every call")
    for v in alive | kept:
        if not lasts(v):
            raise refuse(len(code), f"{names.value(v)} is never freed", "a free at its last use")


def _adds(ins: Instr, v: Value) -> bool:
    """Whether an instruction adds to a gradient, or puts one back to where it was."""
    return is_gradient(v) and (ins.op in ADDS_GRADIENTS or ins.op in (ADD, ALL_GATHER))


# ---- order ---------------------------------------------------------------------------------------
def _order(program: Program, refusals: list[Refusal]) -> None:
    """Every call holds up its ranks until all of them are at it."""
    last = len(program.codes) - 1
    members = {"pp": list(range(last + 1)), "ends": [0, last]}
    calls = [
        [
            (position, ins)
            for position, ins in enumerate(code)
            if ins.op in MESSAGES or (ins.op in COLLECTIVES and ins.lane in members)
        ]
        for code in program.codes
    ]
    at, ready = [0] * len(calls), list(range(len(calls)))

    def here(pp: int) -> tuple[int, Instr] | None:
        return calls[pp][at[pp]] if at[pp] < len(calls[pp]) else None

    while ready:
        pp = ready.pop()
        while (mine := here(pp)) is not None:
            position, ins = mine
            ranks = [ins.peer] if ins.op in MESSAGES else members[ins.lane]
            met = {r: here(r) for r in ranks if r != pp}
            if any(other is None or not _meets(other[1], ins, pp) for other in met.values()):
                break  # it will come to this call, and then this rank goes on
            for r, (_, other) in met.items():
                if not _fits(other, ins):
                    said = refusals[pp].names.instruction(other)
                    legal = "a send for every receive, the same collectives, in one order"
                    raise refusals[pp](position, f"meets {said} of pipeline rank {r}", legal)
            for r in (pp, *met):
                at[r] += 1
            ready += met
    stuck = {pp: here(pp) for pp in range(len(calls)) if here(pp) is not None}
    for pp, (position, _) in stuck.items():
        said = "; ".join(
            f"pipeline rank {r} waits at {n}, {refusals[r].names.instruction(ins)!r}"
            for r, (n, ins) in stuck.items()
        )
        legal = "the ranks of every call come to it in one order"
        raise refusals[pp](position, f"no rank can go on: {said}", legal)


def _meets(theirs: Instr, mine: Instr, pp: int) -> bool:
    """Whether a rank waits at a call of the group, or the pair, that this one waits at."""
    if mine.op in MESSAGES:
        return theirs.op in MESSAGES and theirs.peer == pp
    return theirs.op in COLLECTIVES and theirs.lane == mine.lane


def _fits(theirs: Instr, mine: Instr) -> bool:
    """Whether two sides agree: a send of what the other receives, or one collective."""
    if mine.op in MESSAGES:
        sent, taken = theirs.reads or theirs.writes, mine.reads or mine.writes
        return theirs.op != mine.op and sent[0] == taken[0]
    kinds = [[v[0] for v in ins.reads] for ins in (theirs, mine)]
    return (theirs.op, theirs.phase) == (mine.op, mine.phase) and kinds[0] == kinds[1]
