"""What holds for every compiled program; checked without torch and before a process starts.

    schedule   the compute instructions of a list are those of the schedule, in the same order: each
               action runs every op of its stage once, and backward writes the gradients of the
               parameters of its ops
    lifetimes  no value is read before it is written, nor freed or overwritten while a call in
               flight uses it; every value is freed once, unless it lasts from step to step; and
               every call is waited for
    sums       every gradient is summed over each axis that it is partial over, once, before an
               UPDATE or a NORM reads it (sums.py)
    order      the calls of the pipeline ranks match even if each call blocks its ranks until it is
               over and messages are matched by order alone, as with NCCL (parallel/lowering.py
               has the same rule for a schedule). Data-parallel and tensor-parallel ranks share one
               list, so their calls match anyway

`check` raises ``ValueError`` with the parameters, the axis, the instruction and its position in the
printed program. compile.py calls it for programs with a pass or a schedule of the user's own.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from itertools import zip_longest

from paralab.checks import illegal
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
from paralab.spec.forms import form_name


def check(program: Program) -> None:
    """Raise ``ValueError`` for the first violation."""
    refusals = [Refusal(program, pp) for pp in range(len(program.codes))]
    for refuse in refusals:
        if refuse.code:
            _schedule(refuse)
            _gradients(refuse)
            _lifetimes(refuse)
            Sums(refuse).check()
    if all(program.codes):
        _order(program, refusals)


# ---- schedule ------------------------------------------------------------------------------------
def _schedule(refuse: Refusal) -> None:
    """The list computes what the schedule asks for. Only a weight half that was split off to hide a
    message may run later than its input half.
    """
    program, pp, code = refuse.program, refuse.pp, refuse.code
    ops = program.model.ops
    scheduled = skeleton(program, only=pp)[pp]
    is_call = [bool(op.message and op.message.forward and op.message.backward) for op in ops]
    due = [turn for turn in _computed(scheduled) if not is_call[turn[1]]]  # without f-bar, g-bar
    computed, nothing = list(_computed(code)), ("", 0, 0, len(code))
    for turn, actual in zip_longest(due, computed, fillvalue=nothing):
        if turn[:3] != actual[:3]:
            op, at, k = turn[:3]
            expected = f"{op} {refuse.names.ops(at, at + 1)} mb {k}" if op else "nothing more"
            legal = "a pass that neither adds, drops nor moves compute"
            if callable(own := program.plan.schedule):
                same = "a function that returns the same lists at every call"
                if not program.plan.passes:
                    raise illegal("schedule", form_name(own), "a later call made other lists", same)
                legal += f", and as the schedule {same}"
            raise refuse(actual[3], f"the schedule has {expected} here", legal)
    adds = (ins for ins in code if ins.op in ADDS_GRADIENTS)
    weights = Counter((at, ins.mb) for ins in adds for at in range(*ins.at))
    for op, at, k, _ in computed:
        if op == BACKWARD and weights[at, k] != 1:
            half = f"BACKWARD_WEIGHT {refuse.names.ops(at, at + 1)} mb {k}"
            raise refuse(len(code), f"{half} is computed {weights[at, k]} times", "once")


def _computed(code: Code) -> Iterator[tuple[str, int, int, int]]:
    """(FORWARD, BACKWARD or BACKWARD_WEIGHT, op of the model, micro-batch, position) of each op
    that a list computes, without recomputation and without weight halves split off to hide a
    message. An input half counts as BACKWARD.
    """
    for position, ins in enumerate(code):
        if ins.op in COMPUTE and ins.op != RECOMPUTE and not ins.phase:
            ops = range(*ins.at) if ins.op == FORWARD else reversed(range(*ins.at))
            kind = ins.op if ins.op in (FORWARD, BACKWARD_WEIGHT) else BACKWARD
            yield from ((kind, at, ins.mb, position) for at in ops)


def _gradients(refuse: Refusal) -> None:
    """Backward adds to the gradient of every parameter of its ops, and to no other."""
    program, units = refuse.program, refuse.program.units[refuse.pp]
    unit_of = {name: u for u, unit in enumerate(units) for name in unit.names}
    for position, ins in enumerate(refuse.code):
        if ins.op in ADDS_GRADIENTS:
            of_ops = program.model.of_op[slice(*ins.at)]
            expected = Counter({unit_of[name]: 1 for names in of_ops for name in names})
            actual = Counter(v[1] for v in ins.writes if v[0] == "grad")
            for u in sorted(expected | actual):
                if expected[u] != actual[u]:
                    why = f"writes the gradient of {refuse.names.parameters(u)} {actual[u]} times "
                    why += f"instead of {expected[u]}"
                    raise refuse(position, why, "a pass that does not change compute")


# ---- lifetimes -----------------------------------------------------------------------------------
def _lifetimes(refuse: Refusal) -> None:
    program, pp, code, names = refuse.program, refuse.pp, refuse.code, refuse.names
    alive, freed = set(program.lasting(pp)), set()
    if program.plan.zero_stage in (1, 2):  # the shard is a part of w
        alive |= {("shard", u, 0) for u in range(len(program.units[pp]))}
    renamed = set()  # values that a KEEP has given another name
    # Calls in flight by the values they write; several if one worker's call follows another's.
    flights = {}
    used_by = {}  # value -> calls in flight that read or write it

    def require_unused(position: int, ins: Instr, v: Value, does: str) -> None:
        for call in used_by.get(v, ()):
            if ins.lane in WORKERS and call.lane in WORKERS and does != "frees":
                continue  # workers' lanes wait for each other themselves
            if does != "reads" or v in call.writes:
                why = f"{does} {names.value(v)}, which a call in flight uses: "
                raise refuse(position, why + names.instruction(call), "a WAIT for that call first")

    for position, ins in enumerate(code):
        if ins.op == WAIT:
            if ins.reads not in flights:
                why = "the call that it waits for is not in flight"
                raise refuse(position, why, "one WAIT after each call")
            for call in flights.pop(ins.reads):
                for v in {*call.reads, *call.writes}:
                    used_by[v].remove(call)
        else:
            for v in ins.reads:
                if v not in alive:
                    why = "which was freed" if v in freed else "which no instruction has written"
                    why = "which KEEP has renamed" if v in renamed else why
                    raise refuse(position, f"reads {names.value(v)}, {why}", "a value that exists")
                require_unused(position, ins, v, "reads")
            if ins.op == KEEP:
                alive.discard(ins.reads[0])
                renamed.add(ins.reads[0])
            for v in ins.writes:
                if ins.op == ADD and v not in alive:
                    why = f"adds to {names.value(v)}, which no instruction has written"
                    raise refuse(position, why, "KEEP of the first value, and ADD of the others")
                require_unused(position, ins, v, "writes")
                if v in alive and v not in ins.reads and not lasts(v) and not _adds(ins, v):
                    raise refuse(position, f"writes {names.value(v)} again", "a new version of it")
                alive.add(v)
                renamed.discard(v)
            if ins.lane:
                flights.setdefault(ins.writes, []).append(ins)
                for v in {*ins.reads, *ins.writes}:
                    used_by.setdefault(v, []).append(ins)
        for v in ins.frees:
            if (v not in alive and v not in renamed) or lasts(v):
                why, legal = "which does not exist", "one free of each value"
                if lasts(v):
                    why, legal = "which lasts from step to step", "no free of such a value"
                raise refuse(position, f"frees {names.value(v)}, {why}", legal)
            require_unused(position, ins, v, "frees")
            alive.discard(v)
            renamed.discard(v)
            freed.add(v)
    for call in (call for calls in flights.values() for call in calls if call.phase != LATE):
        raise refuse(len(code), f"has no WAIT for {names.instruction(call)}", "one WAIT per call")
    for v in alive | renamed:
        if not lasts(v):
            raise refuse(len(code), f"{names.value(v)} is never freed", "a free at its last use")


def _adds(ins: Instr, v: Value) -> bool:
    """Whether ``ins`` adds to the gradient ``v``, or gathers it back to where it was."""
    return is_gradient(v) and (ins.op in ADDS_GRADIENTS or ins.op in (ADD, ALL_GATHER))


# ---- order ---------------------------------------------------------------------------------------
def _order(program: Program, refusals: list[Refusal]) -> None:
    """Run the lists with calls that block their ranks until all of them have arrived."""
    last = len(program.codes) - 1
    members = {"pp": list(range(last + 1)), "ends": [0, last]}
    calls = [  # of each rank those that are still to come
        deque(
            (position, ins)
            for position, ins in enumerate(code)
            if ins.op in MESSAGES or (ins.op in COLLECTIVES and ins.lane in members)
        )
        for code in program.codes
    ]
    ready = list(range(len(calls)))
    while ready:
        pp = ready.pop()
        while calls[pp]:
            position, ins = calls[pp][0]
            others = {ins.peer} if ins.op in MESSAGES else {*members[ins.lane]} - {pp}
            if not all(calls[r] and _meets(calls[r][0][1], ins, pp) for r in others):
                break  # once that rank arrives at this call, both go on
            for r in others:
                if not _fits(other := calls[r][0][1], ins):
                    call = refusals[pp].names.instruction(other)
                    why = f"pipeline rank {r} makes a call that does not match, {call!r}"
                    legal = "in the same order a RECEIVE for each SEND, and the same collectives"
                    raise refusals[pp](position, why, legal)
            for r in (pp, *others):
                calls[r].popleft()
            ready += others
    stuck = {pp: rest[0] for pp, rest in enumerate(calls) if rest}
    for pp, (position, _) in stuck.items():
        report = "; ".join(
            f"pipeline rank {r} waits at position {n}, {refusals[r].names.instruction(ins)!r}"
            for r, (n, ins) in stuck.items()
        )
        legal = "an order in which no ranks wait for each other in a cycle"
        raise refusals[pp](position, f"deadlock: {report}", legal)


def _meets(theirs: Instr, mine: Instr, pp: int) -> bool:
    """Whether another rank waits at a call of the same group, or pair, as rank ``pp`` does."""
    if mine.op in MESSAGES:
        return theirs.op in MESSAGES and theirs.peer == pp
    return theirs.op in COLLECTIVES and theirs.lane == mine.lane


def _fits(theirs: Instr, mine: Instr) -> bool:
    """Whether the two calls match: a send of what the other receives, or one collective."""
    if mine.op in MESSAGES:
        sent, taken = theirs.reads or theirs.writes, mine.reads or mine.writes
        return theirs.op != mine.op and sent[0] == taken[0]
    kinds = [[v[0] for v in ins.reads] for ins in (theirs, mine)]
    return (theirs.op, theirs.phase) == (mine.op, mine.phase) and kinds[0] == kinds[1]
