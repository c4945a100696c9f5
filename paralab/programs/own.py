"""Passes of the learner's own: ``Plan(passes=(f,))`` with f(program) -> program.

    from paralab.programs import ALL_REDUCE, insert, wait

    def not_hidden(program):  # the rank waits for every sum at once, which nothing hides then
        calls = {at: [wait(ins)] for at, ins in enumerate(program.code) if ins.op == ALL_REDUCE}
        return program.replace(insert(program.code, calls))

    pl.Plan(dp=4, passes=(not_hidden,))

A pass sees one rank's list after all built-in passes and before waits and frees are derived, and
says what each instruction reads and writes. What it makes is run, timed, weighed, counted and
printed like anything else, so it is looked at first: here whether it is a list of instructions at
all, in checks.py whether they fit together. ``f(pl.program(model, plan))`` shows the result.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from paralab.checks import illegal, instance
from paralab.parallel.layouts import mode_of
from paralab.programs.instructions import (
    ADD,
    ALL_GATHER,
    ALL_REDUCE,
    COLLECTIVES,
    COMPUTE,
    COPY,
    KEEP,
    MESSAGES,
    OPS,
    PARTS,
    RECEIVE,
    RESCALE,
    SEND,
    UPDATE,
    WAIT,
    WORKERS,
    Code,
    Instr,
    sums_shared,
)
from paralab.programs.program import Program
from paralab.spec.forms import form_name

# What an instruction that moves values reads and writes: how many.
MOVES = dict.fromkeys((*COLLECTIVES, KEEP, ADD, COPY, SEND), (1, 1)) | {RECEIVE: (0, 1)}

COPIED = PARTS | {"wide", "second", "host.verdict"}  # what a COPY of the rank's own makes


class RankProgram:
    """One rank's list of instructions, as passes see it.

    code   the list, before waits and frees are derived; `replace` takes a changed one
    rank   global, a rank that has this list; ``pp`` its place in the pipeline
    model, plan, units  what is trained, how it is split, and the flat buffers of parameters
    """

    def __init__(self, program: Program, rank: int, code: Iterable[Instr]) -> None:
        self.program, self.rank, self.code = program, rank, list(code)
        self.model, self.plan, self.pp = program.spec, program.plan, program.plan.place(rank).pp
        self.units = program.units[self.pp]

    def replace(self, code: Iterable[Instr]) -> Any:
        """The same rank's program with another list."""
        legal = "a list; append, insert and sort change the list itself and return None"
        instance("code", code, Iterable, legal, "list of instructions")
        return type(self)(self.program, self.rank, code)


def own_passes(program: Program, pp: int, code: Code) -> Code:
    """The list after all of ``plan.passes``; ``ValueError`` where one of them makes no program."""
    plan = program.plan
    for number, form in enumerate(plan.passes):
        given = RankProgram(program, pp * plan.dp * plan.tp, code)
        made = form(given)
        if why := _refused(program, pp, code, made):
            raise illegal(f"passes[{number}]", form_name(form), *why)
        code = made.code
    return code


def _refused(program: Program, pp: int, code: Code, made: Any) -> tuple[str, str] | None:
    """Why what a pass has made of a list is no program, and what would be legal."""
    legal = "return program.replace(code), with a list of paralab.programs.Instr"
    if not isinstance(made, RankProgram):
        return f"it returned a {type(made).__name__}, not a program", legal
    if made.program is not program or made.pp != pp:
        return "it returned another rank's program", legal
    if not made.code:  # or a generator that was used up before
        return "it returned an empty list", legal
    as_given = set(map(id, code))
    for position, ins in enumerate(made.code):
        if id(ins) not in as_given and (wrong := _wrong(program, pp, ins)):
            known = isinstance(ins, Instr)
            said = f"{ins.op} of {(ins.reads or ins.writes)!r:.60}" if known else repr(ins)[:60]
            return f"instruction {position} of its list, {said}, {wrong[0]}", wrong[1]
    return None


def _wrong(program: Program, pp: int, ins: Any) -> tuple[str, str] | None:
    """Why something is no instruction that this rank can run, and what would be legal."""
    plan = program.plan
    if not isinstance(ins, Instr):
        legal = "Instr(op, ...), or a helper such as all_reduce(unit); insert() takes lists of them"
        return "is no instruction", legal
    if not all(isinstance(vs, tuple) for vs in (ins.reads, ins.writes)):
        return "does not read and write tuples of values", 'reads=(("grad", 0, 0),)'
    try:
        hash(ins)  # lists of instructions are looked through by what they consist of
    except TypeError as error:
        return f"holds what can change: {error}", "strings, whole numbers and tuples of them"
    if ins.op not in OPS:
        return f"has an unknown op {ins.op!r}", ", ".join(sorted(OPS))
    groups = {"dp", *mode_of(plan).axes, *(["pp", "ends"] * (plan.pp > 1))}
    groups |= {"replica"} if plan.shard_degree < plan.dp else set()
    groups |= {"secondary"} if plan.secondary_shard else set()
    lanes = groups if ins.op in COLLECTIVES else {"", *(WORKERS if plan.tiers else ())}
    if ins.op in MESSAGES:
        lanes = {"pp"} if plan.pp > 1 else set()
    if ins.lane not in lanes and ins.op != WAIT:
        legal = ", ".join(map(repr, sorted(lanes))) or "no message, without a pipeline"
        return f"has the lane {ins.lane!r}, which this plan does not have for it", legal
    if ins.op in MESSAGES and not (0 <= ins.peer < plan.pp and ins.peer != pp):
        return f"has no other end: peer={ins.peer}", "another pipeline rank"
    for v in (*ins.reads, *ins.writes):
        try:
            program.size(v, pp)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            units = f"units are 0 to {len(program.units[pp]) - 1}"
            return f"names {v!r}, which is no value", f"(kind, where, version); {units}"
    if ins.op in COMPUTE and not isinstance(ins.at, tuple):
        return "computes no range of ops", "at=(i, j), and a pass leaves compute as it is"
    if ins.op == WAIT and not ins.reads:
        return "waits for nothing", "wait(call)"
    counts = len(ins.reads), len(ins.writes)
    shared = sums_shared(ins)
    if shared and ins.at not in program.shared(pp, None):
        return f"sums what {ins.at!r} does not share", str(list(program.shared(pp, None)))
    if shared:  # as one message, whose parts ranks and predictions know by its axis and phase
        kind = "gshard" if plan.zero_stage else "grad"
        alike = {(kind, share.unit, 0) for share in program.shared(pp, None)[ins.at]}
        if set(ins.reads) != alike:
            return (
                f"sums not all that {ins.lane!r} shares",
                f"one sum of all {len(alike)}, in place",
            )
    fits = counts == MOVES.get(ins.op, counts) or (shared and counts[0] == counts[1])
    if ins.op == ALL_GATHER and ins.lane not in ("dp", "secondary"):
        fits = counts[0] == 1  # what a tp rank gathers may stay for backward too
    if ins.op == ADD and ins.lane:  # the host's reads what it adds to, too
        fits = fits or (counts == (2, 1) and ins.reads[1:] == ins.writes)
    if ins.op in (ADD, KEEP) and ins.reads[:1] == ins.writes:
        return "reads and writes the same value", "a value that is added to, or kept as, another"
    if ins.op == ALL_REDUCE and fits and ins.reads != ins.writes:
        return "sums into another value", "a sum in place: writes=reads"
    if ins.op == COPY and fits and not ins.lane and ins.writes[0][0] not in COPIED:
        legal = ", ".join(map(repr, sorted(COPIED)))
        return f"copies to {ins.writes[0][0]!r}, which a rank copies nothing to", legal
    if ins.op == UPDATE and not (ins.reads and 0 <= ins.unit < len(program.units[pp])):
        legal = f"reads=(gradient, ...), unit=0 to {len(program.units[pp]) - 1}"
        return "updates no unit, or with no gradient", legal
    if ins.op == RESCALE and plan.precision != "fp16":
        return f"adapts a loss scale, which precision={plan.precision!r} has not", "fp16's alone"
    if not fits:
        return f"reads {counts[0]} values and writes {counts[1]}", f"{MOVES[ins.op]}"
    return None
