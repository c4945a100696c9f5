"""The proof of programs/derive.py: no value is freed or overwritten while a call in flight uses it,
every value is freed once, unless it lasts from step to step, and every call is waited for.
"""

from __future__ import annotations

from paralab.programs.checks import check
from paralab.programs.derive import lasts
from paralab.programs.instructions import KEEP, LATE, WAIT, WORKERS, Instr, Value
from paralab.programs.program import Program
from paralab.programs.sums import Refusal


def check_all(program: Program) -> None:
    """Raise ``ValueError`` for the first violation of what checks.py checks, or of lifetimes."""
    check(program)
    for pp, code in enumerate(program.codes):
        if code:
            _lifetimes(Refusal(program, pp))


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
                    raise refuse(position, f"reads {names.value(v)}, {why}", "a value that exists")
                require_unused(position, ins, v, "reads")
            if ins.op == KEEP:
                alive.discard(ins.reads[0])
                renamed.add(ins.reads[0])
            for v in ins.writes:
                require_unused(position, ins, v, "writes")
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
