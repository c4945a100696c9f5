"""Passes of your own: ``Plan(passes=(f,))`` with f(program) -> program.

    from paralab.programs import ALL_REDUCE, insert, wait

    def not_hidden(program):  # the rank waits for every sum at once, so nothing hides it
        calls = {at: [wait(ins)] for at, ins in enumerate(program.code) if ins.op == ALL_REDUCE}
        return program.replace(insert(program.code, calls))

    pl.Plan(dp=4, passes=(not_hidden,))

A pass gets one rank's list after all built-in passes and before waits and frees are derived. Each
instruction that it adds says what it reads and writes. Here every entry is checked for whether it
is a possible instruction, in checks.py whether they fit together. ``f(pl.program(model, plan))``
shows the result.
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
from paralab.programs.names import Names
from paralab.programs.program import Program
from paralab.spec.forms import form_name

# How many values an instruction that moves values reads and writes.
MOVES = dict.fromkeys((*COLLECTIVES, KEEP, ADD, COPY, SEND), (1, 1)) | {RECEIVE: (0, 1)}

COPIED = PARTS | {"second", "host.verdict"}  # what a COPY on a rank's own thread may write


class RankProgram:
    """One rank's list of instructions, as passes see it; printed, one line for each.

    code   the list, before waits and frees are derived; `replace` takes a changed one
    rank   a global rank that has this list
    pp     its index in the pipeline
    model, plan, units  the `ModelSpec`, the `Plan`, and the flat buffers of the rank's parameters
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

    def __repr__(self) -> str:
        names = Names(self.program, self.pp, self.rank)
        texts = (
            repr(ins) if _wrong(self.program, self.pp, ins) else names.instruction(ins)
            for ins in self.code
        )
        return "\n".join(f"{position:5}  {text}" for position, text in enumerate(texts))


def own_passes(program: Program, pp: int, code: Code) -> Code:
    """The list after all of ``plan.passes``; ``ValueError`` if a pass returns no valid program."""
    plan = program.plan
    for number, form in enumerate(plan.passes):
        before = RankProgram(program, pp * plan.dp * plan.tp, code)
        after = form(before)
        if why := _refused(program, pp, code, after):
            raise illegal(f"passes[{number}]", form_name(form), *why)
        code = after.code
    return code


def _refused(program: Program, pp: int, code: Code, result: Any) -> tuple[str, str] | None:
    """(why, legal) if ``result``, which a pass returned, is no program of this rank, else None."""
    legal = "return program.replace(code), with a list of paralab.programs.Instr"
    if not isinstance(result, RankProgram):
        return f"it returned a {type(result).__name__}, not a program", legal
    if result.program is not program or result.pp != pp:
        return "it returned another rank's program", legal
    if not result.code:  # also of an exhausted generator
        return "it returned an empty list", legal
    as_given = set(map(id, code))
    for position, ins in enumerate(result.code):
        if id(ins) not in as_given and (wrong := _wrong(program, pp, ins)):
            is_instr = isinstance(ins, Instr)
            shown = f"{ins.op} of {(ins.reads or ins.writes)!r:.60}" if is_instr else repr(ins)[:60]
            return f"instruction {position} of its list, {shown}, {wrong[0]}", wrong[1]
    return None


def _wrong(program: Program, pp: int, ins: Any) -> tuple[str, str] | None:
    """(why, legal) if ``ins`` is no instruction that this rank can run, else None."""
    plan = program.plan
    if not isinstance(ins, Instr):
        legal = "Instr(op, ...), or a helper such as all_reduce(unit); insert() takes lists of them"
        return "is not an instruction", legal
    if not all(isinstance(vs, tuple) for vs in (ins.reads, ins.writes)):
        return "has reads or writes that are not tuples", 'reads=(("grad", 0, 0),)'
    try:
        hash(ins)  # instructions are used as dictionary keys
    except TypeError as error:
        legal = "strings, numbers, tuples of them; of a list of units one all_reduce(unit) for each"
        return f"has a mutable field ({error})", legal
    if ins.op not in OPS:
        return f"has an unknown op {ins.op!r}", ", ".join(sorted(OPS))
    groups = {"dp"} | ({"pp", "ends"} if plan.pp > 1 else set())
    groups |= mode_of(plan).axes.keys() if plan.tp > 1 else set()
    groups |= {"replica"} if plan.shard_degree < plan.dp else set()
    groups |= {"secondary"} if plan.secondary_shard else set()
    lanes = groups if ins.op in COLLECTIVES else {"", *(WORKERS if plan.tiers else ())}
    if ins.op in MESSAGES:
        lanes = {"pp"} if plan.pp > 1 else set()
    if ins.lane not in lanes and ins.op != WAIT:
        legal = f"lane={' or '.join(map(repr, sorted(lanes)))}"
        legal = legal if lanes else "no messages: with pp=1 there is no pipeline"
        return f"has the lane {ins.lane!r}, where this plan runs no {ins.op}", legal
    if ins.op in MESSAGES and not (0 <= ins.peer < plan.pp and ins.peer != pp):
        legal = f"another pipeline rank of 0 to {plan.pp - 1}"
        return f"has peer={ins.peer}, with which this rank exchanges no messages", legal
    for v in (*ins.reads, *ins.writes):
        try:
            program.size(v, pp)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            units = f"units are 0 to {len(program.units[pp]) - 1}"
            return f"names {v!r}, which is not a value", f"(kind, where, version); {units}"
    if ins.op in COMPUTE and not _is_range(ins.at, len(program.model.ops)):
        return f"has at={ins.at!r}, not a range of ops", "at=(i, j); a pass does not change compute"
    if ins.op == WAIT and not ins.reads:
        return "waits for nothing", "wait(call)"
    counts = len(ins.reads), len(ins.writes)
    shared, shares = sums_shared(ins), program.shared(pp, None)
    if shared:  # one message; ranks and predictions look its contents up by axis and phase
        if ins.at not in shares:
            legal = "at of these: " + (", ".join(map(str, shares)) or "none in this plan")
            return f"has at={ins.at!r}, over which ranks share no gradients", legal
        kind = "gshard" if plan.zero_stage else "grad"
        expected = {(kind, share.unit, 0) for share in shares[ins.at]}
        if set(ins.reads) != expected:
            why = f"does not sum all gradients that the ranks of {ins.lane!r} share"
            return why, f"one sum of all {len(expected)}, in place"
    fits = counts == MOVES.get(ins.op, counts) or (shared and counts[0] == counts[1])
    if ins.op == ALL_GATHER and ins.lane not in ("dp", "secondary"):
        fits = counts[0] == 1  # what a tp rank gathers may be saved for backward too
    if ins.op == ADD and ins.lane:  # on the host it also reads the value that it adds to
        fits = fits or (counts == (2, 1) and ins.reads[1:] == ins.writes)
    if ins.op in (ADD, KEEP) and ins.reads[:1] == ins.writes:
        return "reads and writes the same value", f"{ins.op} from one value to another"
    if ins.op == ALL_REDUCE and fits and ins.reads != ins.writes:
        return "writes its sum to another value", "a sum in place: writes=reads"
    if ins.op == COPY and fits and not ins.lane and ins.writes[0][0] not in COPIED:
        legal = ", ".join(map(repr, sorted(COPIED)))
        return f"copies to {ins.writes[0][0]!r}, which no COPY writes", f"one of {legal}"
    if ins.op == UPDATE and not (ins.reads and 0 <= ins.unit < len(program.units[pp])):
        legal = f"reads=(gradient, ...), unit=0 to {len(program.units[pp]) - 1}"
        return "names no unit to update or no gradient to read", legal
    if ins.op == RESCALE and plan.precision != "fp16":
        return f"adapts a loss scale, and precision={plan.precision!r} has none", "precision='fp16'"
    if not fits:
        read, written = MOVES[ins.op]
        return f"reads {counts[0]} values and writes {counts[1]}", f"{read} read, {written} written"
    return None


def _is_range(at: Any, n: int) -> bool:
    """Whether ``at`` are ops (i, j) of a model of n ops."""
    is_pair = isinstance(at, tuple) and list(map(type, at)) == [int, int]
    return is_pair and 0 <= at[0] < at[1] <= n
