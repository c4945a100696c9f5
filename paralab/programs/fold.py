"""Fold a program: what repeats itself in a deep pipeline is written once. For predictions.

A step of a trillion parameters on 3,072 devices, 512 micro-batches each, has 7 million
instructions, and almost all of them are the same few actions again and again. A folded program has,
of every *kind* of pipeline rank (ranks whose stages hold parts alike), the list of a step of four
micro-batches, compiled like any other and cut into its actions (`Lists`): those of the first
micro-batch, of the second, of one like all that follow, of the last, and what comes after them.

A rank's whole step is these in the order of its schedule, with the schedule's messages between;
tests put it together so, and it is the list that was never folded, instruction by instruction. What
an action waits for from another rank stands inside it where the compiler has put it: so a block is
computed again while its gradient is still on its way. interpret/deep.py says when all of it happens
without putting it together.

It needs that what passes add to an action depends on no other micro-batch but the one before, and
not on what was computed in between. A learner's passes may do anything, what is copied between
tiers in every micro-batch waits for the copy before it, and a relay has no actions of stages:
`folds` says what can be folded.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from paralab.parallel.lowering import Transfer
from paralab.parallel.schedules import Action
from paralab.programs.actions import OF_MICROBATCH, mark, numbered
from paralab.programs.compile import passed
from paralab.programs.derive import derived
from paralab.programs.instructions import CALL, COMPUTE, MESSAGES, RECEIVE, SEND, WAIT, Code, Instr
from paralab.programs.program import Program
from paralab.programs.skeleton import instruction, stage_parts
from paralab.spec import Plan
from paralab.theory.order import CODE

FEW = 4  # micro-batches of the lists that a step is put together from
LIKE_ALL = 2  # the one of these that stands for all but two at the start and one at the end
END = "end"  # what a step ends with, behind its last action
# Kinds of values of which every micro-batch has its own.
IN_EACH = OF_MICROBATCH | {"part", "grad"}
Key = tuple[str, int, int]  # "F", "B", "I" or "W"; of which of the rank's stages; which of FEW
Way = tuple[str, str, int]  # SEND, RECEIVE, or WAIT for a SEND; "x" or "g"; of which stage


def folds(plan: Plan) -> bool:
    """Whether a plan's program can be put together from a few micro-batches."""
    if plan.microbatches <= FEW or plan.relays or plan.passes:
        return False
    tiers, several = plan.tiers, plan.virtual_stages > 1
    if tiers is not None and (plan.reduces_often or tiers.activations != "device" or several):
        return False
    if tiers is not None and tiers.delayed:
        return False
    if several and (plan.zero_stage == 3 or plan.pp == 1):
        return False
    if not callable(plan.schedule):
        return True
    letters = {action.kind for row in plan.actions() for action in row}
    return not several and not letters.issuperset("BI")


# ---- a few micro-batches -------------------------------------------------------------------------
class Lists(NamedTuple):
    """A step of `FEW` micro-batches of a kind of rank, one after the other.

    program  where the list of ``rank``, one of the kind, stands, the others' being empty
    labels   per instruction the `Key` of its action, the `Way` of its message, or `END`
    turns    {key: what an action consists of}, and of `END`. What micro-batches have each is named
             like the first's
    """

    program: Program
    rank: int
    labels: list[Any]
    turns: dict[Any, Code]

    @property
    def messages(self) -> dict[Way, Instr]:
        """One of each."""
        pairs = zip(self.labels, self.program.codes[self.rank], strict=True)
        return {label: ins for label, ins in pairs if label[0] in (SEND, RECEIVE, WAIT)}


def lists(program: Program, rank: int) -> Lists:
    """Of a pipeline rank of a program that is laid out."""
    plan = program.plan
    codes: list[Code] = [[] for _ in range(plan.pp)]
    found, label = Lists(replace(program, codes=codes), rank, [], {}), None
    begins, ends = ({edges[side]: s for s, edges in enumerate(program.stages)} for side in (0, 1))

    def way(ins: Instr) -> Way:
        kind, at, _ = (ins.reads or ins.writes)[0]
        kind, at = at if kind == "sent" else (kind[0], at)  # "x" of an xslice
        stage_of = ends if (kind == "x") == (ins.op != RECEIVE) else begins
        return ins.op, kind, stage_of[at] // plan.pp

    for ins in derived(passed(program, rank, _few(program, rank))):
        if ins.op == CALL:
            label = ins.at
            found.turns[label] = []
            continue
        codes[rank].append(ins)
        sent = ins.op == WAIT and ins.at == SEND
        found.labels.append(way(ins) if sent or ins.op in MESSAGES else label)
        if not (sent and label != END or ins.op in MESSAGES):
            found.turns[label].append(_plain(ins))
    return found


def _few(program: Program, rank: int) -> Code:
    """What a rank computes of a few micro-batches, and its messages; a mark before each action."""
    plan, stages, n = program.plan, program.stages, len(program.model.ops)
    letters = {action.kind for action in plan.actions()[rank]}
    mine, code = range(rank, plan.stages, plan.pp), []
    for k in range(FEW):
        for letter in (some for some in CODE if some in letters):
            for s in mine if letter == "F" else reversed(mine):
                what, to = ("F", 1) if letter == "F" else ("B", -1)
                steps = [Action(s, letter, k)]
                if 0 <= s - to < plan.stages and letter != "W":
                    steps.insert(0, Transfer("recv", what, s, k, (s - to) % plan.pp))
                if 0 <= s + to < plan.stages and letter != "W":
                    steps.append(Transfer("send", what, s, k, (s + to) % plan.pp))
                made = [instruction(step, stages, n) for step in steps]
                at = next(at for at, ins in enumerate(made) if ins.op in COMPUTE)
                code += [*made[:at], mark((letter, s // plan.pp, k)), *made[at:]]
    return [*code, mark(END)]


def _plain(ins: Instr) -> Instr:
    """Without the number of a micro-batch."""
    op, at, mb, unit, reads, writes, lane, peer, phase, frees = ins
    reads, writes = numbered(reads, 0, IN_EACH), numbered(writes, 0, IN_EACH)
    frees = numbered(frees, 0, IN_EACH) if frees else frees
    return Instr(op, at, min(mb, 0), unit, reads, writes, lane, peer, phase, frees)


def first_alike(program: Program) -> list[int]:
    """Per pipeline rank the first one that is of its kind."""
    names, plan = stage_parts(program.spec, program.plan), program.plan
    found: dict[Any, int] = {}
    return [
        found.setdefault(tuple(map(_alike, names[rank :: plan.pp])), rank)
        for rank in range(plan.pp)
    ]


def _alike(parts: tuple[str, ...]) -> tuple[bool, int, bool]:
    """Equal for stages whose parts of the model are alike."""
    ends = parts[0] == "embedding", parts[-1] == "head"
    return ends[0], len(parts) - sum(ends), ends[1]
