"""What no pass has to say, because it follows: when a rank waits, and when memory ends.

    a WAIT   stands before the first instruction that reads or writes what a call brings
    a value  ends behind its last use; if a call in flight still reads it, behind that call's WAIT

An instruction on a worker's lane ("h2d", "disk", "host" ...) may follow another's without the rank
waiting: the lane itself waits for what comes before. When the rank has waited for the last of such
a chain, the others are over. What is `LATE` goes on during the next step. Of sends one per peer is
in flight, so that the memory of a step does not depend on how fast a link is.
"""

from __future__ import annotations

from paralab.programs.instructions import LATE, SEND, WAIT, WORKERS, Code, Instr, Value

# Kinds that last from step to step: they are never freed.
LASTING = frozenset(
    ("shard", "opt", "master", "scale", "mask")
    + ("host.count", "host.norm", "host.verdict", "host.ring")
    + tuple(tier + kind for kind in ("shard", "opt", "gshard") for tier in ("host.", "file."))
)


def lasts(value: Value) -> bool:
    """Whether a value is there before the step and after it."""
    return value[2] == 0 and (value[0] in LASTING or value[0] == "w")


def add_waits(code: Code) -> Code:
    """A WAIT before the first use of what a call brings, and at the end for what no instruction
    used.
    """
    made: Code = []
    in_flight: dict[Value, Instr] = {}  # value -> the call that writes it
    readers: dict[Value, list[Instr]] = {}  # value -> calls in flight that read it
    behind: dict[int, list[Instr]] = {}  # a worker's call, by id -> those that its lane waits for
    followed: set[int] = set()  # by one that writes the same: its WAIT is for both
    waited: set[int] = set()
    sent: dict[int, Instr] = {}

    def wait(call: Instr) -> None:
        due = [call]  # no recursion: a function that refers to itself keeps all of this alive
        waited.discard(id(call))
        while due:
            call = due.pop()
            if id(call) in waited:
                continue
            if id(call) not in followed:
                at, mb, unit, lane, peer = call.op, call.mb, call.unit, call.lane, call.peer
                made.append(Instr(WAIT, at, mb, unit, call.writes, lane=lane, peer=peer))
            waited.add(id(call))
            for v in call.writes:
                if in_flight.get(v) is call:
                    in_flight.pop(v)
            for v in call.reads:
                if v in readers and call in readers[v]:
                    readers[v].remove(call)
            due += reversed(behind.pop(id(call), ()))  # they are over, too

    calls, read = in_flight.keys(), readers.keys()
    for ins in code:
        op, reads, writes, lane = ins.op, ins.reads, ins.writes, ins.lane
        if op == WAIT:  # a pass wants it here already
            call = in_flight.get(reads[0])
            if call is not None:
                wait(call)
            continue
        worker = lane in WORKERS
        if not calls.isdisjoint(reads):
            for v in reads:
                call = in_flight.get(v)
                if call is not None and not (worker and call.lane in WORKERS):
                    wait(call)
        if not (calls.isdisjoint(writes) and read.isdisjoint(writes)):
            for v in writes:
                call = in_flight.get(v)
                if call is not None and not (worker and call.lane in WORKERS):
                    wait(call)
                for call in tuple(readers.get(v, ())):
                    if not (worker and call.lane in WORKERS):
                        wait(call)
        if op == SEND:
            before = sent.get(ins.peer)
            if before is not None and before.writes[0] in in_flight:
                wait(before)
            sent[ins.peer] = ins
        made.append(ins)
        if lane:
            if worker:
                used = (in_flight.get(v) for v in (*reads, *writes))
                behind[id(ins)] = [call for call in used if call is not None]
                followed |= {id(call) for call in behind[id(ins)] if call.writes == writes}
            for v in writes:
                in_flight[v] = ins
            for v in reads:
                readers.setdefault(v, []).append(ins)
    for call in tuple(in_flight.values()):
        if call.phase != LATE and id(call) not in waited:
            wait(call)
    return made


def add_frees(code: Code) -> Code:
    """Each instruction frees what no instruction uses after it; what a call in flight reads or
    writes is freed behind the call's WAIT.
    """
    last: dict[Value, int] = {}
    until: dict[tuple[Value, ...], list[Value]] = {}  # a call's writes -> what it uses
    for position, ins in enumerate(code):
        reads, writes = ins.reads, ins.writes
        if ins.op == WAIT:
            for v in until.pop(reads, ()):
                last[v] = position
            continue
        for v in reads:
            last[v] = position
        for v in writes:
            last[v] = position
        if ins.lane:
            until.setdefault(writes, []).extend((*reads, *writes))
    ends: dict[int, list[Value]] = {}
    for v, position in last.items():
        if not lasts(v):
            ends.setdefault(position, []).append(v)
    made = list(code)
    for position, values in ends.items():
        made[position] = Instr(*made[position][:-1], tuple(values))  # quicker than _replace
    return made


def derived(code: Code) -> Code:
    """Both, in this order."""
    return add_frees(add_waits(code))
