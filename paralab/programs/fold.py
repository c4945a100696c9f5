"""Fold a program: the repeated actions of a deep pipeline are written once. For predictions.

A step of a trillion parameters on 3,072 devices, 512 micro-batches each, has 7 million
instructions, almost all of them repetitions of the same few actions. A folded program has, for
every *kind* of pipeline rank (ranks whose stages hold the same kinds of parts), the list of a step
of four micro-batches. It is compiled like any other and cut into its actions (`Lists`): those of
the first micro-batch, of the second, of one that stands for all that follow, and of the last; and
the end of the step.

A rank's whole step is these actions in the order of its schedule, with the schedule's messages
between; tests assemble it in this way and get the unfolded list, instruction by instruction. The
WAIT for a message from another rank stays inside the action, where the compiler put it, so that for
example a block is recomputed while its gradient is in flight. interpret/deep.py computes the times
of a whole step without assembling it.

Folding requires that the instructions that passes add to an action depend on no micro-batch but the
previous one, and not on the actions in between. This does not hold for passes of the user's own,
for copies between tiers in every micro-batch, which wait for the previous copy, or for a relay,
which has no actions of stages: `folds` says which plans qualify.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from paralab.programs.actions import OF_MICROBATCH, mark, numbered
from paralab.programs.compile import passed
from paralab.programs.derive import derived
from paralab.programs.instructions import (
    ACTIONS,
    CALL,
    MESSAGES,
    RECEIVE,
    SEND,
    WAIT,
    Code,
    Instr,
    compute,
    message,
)
from paralab.programs.program import Program
from paralab.programs.skeleton import stage_parts
from paralab.spec import Plan
from paralab.theory.order import CODE

FEW = 4  # micro-batches in the compiled lists
LIKE_ALL = 2  # the micro-batch of the lists that stands for all but the first two and the last
END = "end"  # label of the instructions behind the last action of a step
# Kinds of values that exist once per micro-batch.
IN_EACH = OF_MICROBATCH | {"part", "grad"}
# An action: "F", "B", "I" or "W"; the stage's index among the rank's stages; micro-batch below FEW.
Key = tuple[str, int, int]
# A message: SEND, RECEIVE, or WAIT for a SEND; "x" or "g"; the stage's index as above.
Way = tuple[str, str, int]


def folds(plan: Plan) -> bool:
    """Whether a plan's program can be folded."""
    if plan.microbatches <= FEW or plan.relays or plan.passes:
        return False
    tiers, interleaved = plan.tiers, plan.virtual_stages > 1
    if tiers is not None and (plan.reduces_often or tiers.activations != "device" or interleaved):
        return False
    if tiers is not None and tiers.delayed:
        return False
    if interleaved and (plan.zero_stage == 3 or plan.pp == 1):
        return False
    if not callable(plan.schedule):
        return True
    letters = {action.kind for row in plan.actions() for action in row}
    return not interleaved and not letters.issuperset("BI")


# ---- a few micro-batches -------------------------------------------------------------------------
class Lists(NamedTuple):
    """A step of `FEW` micro-batches, one after the other, on one kind of rank.

    program  a program with the list of ``rank`` alone; the other lists are empty
    rank     the pipeline rank that stands for its kind
    labels   per instruction the `Key` of its action, the `Way` of its message, or `END`
    code_of  {key, or `END`: its instructions}, with all values numbered as those of micro-batch 0
    """

    program: Program
    rank: int
    labels: list[Any]
    code_of: dict[Any, Code]

    @property
    def messages(self) -> dict[Way, Instr]:
        """{way: one instruction of this kind}."""
        pairs = zip(self.labels, self.program.codes[self.rank], strict=True)
        return {label: ins for label, ins in pairs if label[0] in (SEND, RECEIVE, WAIT)}


def lists(program: Program, rank: int) -> Lists:
    """The lists of a pipeline rank of a program that has no instructions yet (`laid_out`)."""
    plan = program.plan
    codes = [[] for _ in range(plan.pp)]
    result, label = Lists(replace(program, codes=codes), rank, [], {}), None
    # {boundary: the stage that starts, or ends, there}
    starts, ends = ({edges[side]: s for s, edges in enumerate(program.stages)} for side in (0, 1))

    def way(ins: Instr) -> Way:
        kind, at, _ = (ins.reads or ins.writes)[0]
        kind, at = at if kind == "sent" else (kind[0], at)  # "x" of an xslice
        stage_of = ends if (kind == "x") == (ins.op != RECEIVE) else starts
        return ins.op, kind, stage_of[at] // plan.pp

    for ins in derived(passed(program, rank, _few(program, rank))):
        if ins.op == CALL:
            label = ins.at
            result.code_of[label] = []
            continue
        codes[rank].append(ins)
        of_schedule = ins.op in MESSAGES or (ins.op == WAIT and ins.at == SEND)
        result.labels.append(way(ins) if of_schedule else label)
        if not of_schedule or (ins.op == WAIT and label == END):
            result.code_of[label].append(_plain(ins))
    return result


def _few(program: Program, rank: int) -> Code:
    """A rank's skeleton for `FEW` micro-batches, with a mark before each action."""
    plan, stages, code = program.plan, program.stages, []
    letters = {action.kind for action in plan.actions()[rank]}
    for k in range(FEW):
        for letter in (known for known in CODE if known in letters):
            state, later = ("x", 1) if letter == "F" else ("g", -1)
            for s in range(rank, plan.stages, plan.pp)[::later]:
                before, after = s - later, s + later
                if letter != "W" and 0 <= before < plan.stages:
                    code.append(message(RECEIVE, state, stages[s], k, before % plan.pp))
                code.append(mark((letter, s // plan.pp, k)))
                code.append(compute(ACTIONS[letter], *stages[s], k, len(program.model.ops)))
                if letter != "W" and 0 <= after < plan.stages:
                    code.append(message(SEND, state, stages[s], k, after % plan.pp))
    return [*code, mark(END)]


def _plain(ins: Instr) -> Instr:
    """``ins`` with all values numbered as those of micro-batch 0."""
    op, at, mb, unit, reads, writes, lane, peer, phase, frees = ins
    reads, writes = numbered(reads, 0, IN_EACH), numbered(writes, 0, IN_EACH)
    frees = numbered(frees, 0, IN_EACH) if frees else frees
    return Instr(op, at, min(mb, 0), unit, reads, writes, lane, peer, phase, frees)


def first_alike(program: Program) -> list[int]:
    """Per pipeline rank the first rank of the same kind, with as many blocks in its stages."""
    pp, names = program.plan.pp, stage_parts(program.spec, program.plan)
    alike = [[name.partition(".")[0] for name in parts] for parts in names]
    kinds = [alike[rank::pp] for rank in range(pp)]
    return [kinds.index(kind) for kind in kinds]
