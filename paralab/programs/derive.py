"""What follows from a list and no pass has to write: when a rank waits, and when memory is freed.

    a WAIT   precedes the first instruction that uses a result of the call, or that would overwrite
             what the call still uses
    a value  is freed after its last use; if a call in flight still uses it, after that call's WAIT

An instruction on a worker's lane ("h2d", "disk", "host" ...) may depend on another worker's without
the rank waiting: the lane itself waits for the earlier call. When the rank has waited for the last
call of such a chain, the others are over too. `LATE` calls go on during the next step. At most one
send per peer is in flight, so that the memory of a step does not depend on how fast a link is.
"""

from __future__ import annotations

from paralab.programs.instructions import LATE, SEND, WAIT, WORKERS, Code, Instr, Value

# Kinds that exist from step to step and are never freed.
LASTING = frozenset(
    ("shard", "opt", "master", "scale", "mask")
    + ("host.count", "host.norm", "host.verdict", "host.ring")
    + tuple(tier + kind for kind in ("shard", "opt", "gshard") for tier in ("host.", "file."))
)


def lasts(value: Value) -> bool:
    """Whether a value exists before the step and after it."""
    return value[2] == 0 and (value[0] in LASTING or value[0] == "w")


def add_waits(code: Code) -> Code:
    """Add a WAIT before the first use of each call's result; at the end for unused results."""
    new_code = []
    in_flight = {}  # value -> the call that writes it
    readers = {}  # value -> calls in flight that read it
    predecessors = {}  # id of a worker's call -> calls its lane waits for
    superseded = set()  # ids of calls that share the WAIT of a later call that writes the same
    waited = set()  # ids of calls that have ended
    last_send = {}

    def add_wait(call: Instr) -> None:
        pending = [call]  # no recursion: a closure that refers to itself would keep all this alive
        while pending:
            call = pending.pop()
            if id(call) in waited:
                continue
            if id(call) not in superseded:
                at, mb, unit, lane, peer = call.op, call.mb, call.unit, call.lane, call.peer
                new_code.append(Instr(WAIT, at, mb, unit, call.writes, lane=lane, peer=peer))
            waited.add(id(call))
            for v in call.writes:
                if in_flight.get(v) is call:
                    in_flight.pop(v)
            for v in call.reads:
                if v in readers and call in readers[v]:
                    readers[v].remove(call)
            pending += reversed(predecessors.pop(id(call), ()))  # these are over, too

    written, being_read = in_flight.keys(), readers.keys()  # by calls in flight; live views
    for ins in code:
        op, reads, writes, lane = ins.op, ins.reads, ins.writes, ins.lane
        if op == WAIT:  # written by a pass
            call = in_flight.get(reads[0])
            if call is not None:
                add_wait(call)
            continue
        worker, conflicts = lane in WORKERS, []  # calls whose values this one uses or overwrites
        if not written.isdisjoint(reads):
            conflicts += map(in_flight.get, reads)
        if not (written.isdisjoint(writes) and being_read.isdisjoint(writes)):
            for v in writes:
                conflicts += in_flight.get(v), *readers.get(v, ())
        for call in conflicts:
            if call is not None and not (worker and call.lane in WORKERS):
                add_wait(call)
        if op == SEND:
            previous = last_send.get(ins.peer)
            if previous is not None and previous.writes[0] in in_flight:
                add_wait(previous)
            last_send[ins.peer] = ins
        new_code.append(ins)
        if lane:
            if worker:
                used_calls = (in_flight.get(v) for v in (*reads, *writes))
                predecessors[id(ins)] = [call for call in used_calls if call is not None]
                superseded |= {id(call) for call in predecessors[id(ins)] if call.writes == writes}
            for ended in (waited, superseded):  # a pass may put one instruction into a list twice
                ended.discard(id(ins))
            for v in writes:
                in_flight[v] = ins
            for v in reads:
                readers.setdefault(v, []).append(ins)
    for call in tuple(in_flight.values()):
        if call.phase != LATE and id(call) not in waited:
            add_wait(call)
    return new_code


def add_frees(code: Code) -> Code:
    """Let each instruction free the values that it uses last. A value that a call in flight uses is
    freed by the call's WAIT.
    """
    last_use = {}
    held_by_call = {}  # a call's writes -> values it uses
    for position, ins in enumerate(code):
        if ins.op == WAIT:
            used = held_by_call.pop(ins.reads, ())
        else:
            used = ins.reads + ins.writes
            if ins.lane:
                held_by_call[ins.writes] = held_by_call.get(ins.writes, ()) + used
        for v in used:  # quicker than by dict.fromkeys
            last_use[v] = position
    freed_at = {}
    for v, position in last_use.items():
        if not lasts(v):
            freed_at.setdefault(position, []).append(v)
    new_code = list(code)
    for position, values in freed_at.items():
        new_code[position] = Instr(*new_code[position][:-1], tuple(values))  # quicker than _replace
    return new_code


def derived(code: Code) -> Code:
    """``code`` with waits and frees."""
    return add_frees(add_waits(code))
