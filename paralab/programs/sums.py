"""Partial sums: every gradient is summed over each axis that has more of it, and once.

A value is *partial* over an axis if every rank there has a part of it and the sum of all is meant:

    gradient   over the data-parallel ranks and the replicas of a share; over tp ranks that hold
               the same parameter, and both ends of a pipeline with a tied embedding
    x, r, g    over tp ranks, where a layer that is cut over them has made it
    norm       the squares, over the axes whose ranks hold different gradients

A sum over an axis completes a value there. Gradients that are added up must be partial over the
same axes; whatever else reads a value needs the complete one. So a forgotten sum, one over a wrong
axis, one too early and one too many are all found by going through the list once.

A gradient also *holds* what backward has added, by micro-batch, and what is copied, summed or added
up holds it on. An UPDATE or a NORM needs all of its unit, each once: a copy made too early misses
what comes later, and parts that overlap count twice. What is updated in shares of whole parameters
(stages 1 and 2 of ZeRO) is gathered again before the step is over.
"""

from __future__ import annotations

from collections import Counter

from paralab.checks import illegal
from paralab.model.build import Model
from paralab.programs.derive import lasts
from paralab.programs.instructions import (
    ADD,
    ADDS_GRADIENTS,
    ALL_GATHER,
    ALL_REDUCE,
    COMPUTE,
    COPY,
    FORWARDS,
    KEEP,
    NORM,
    REDUCE_SCATTER,
    RESCALE,
    UPDATE,
    WAIT,
    Code,
    Instr,
    Value,
    sums_shared,
)
from paralab.programs.names import Names
from paralab.programs.program import Program

GRADIENTS = frozenset(("grad", "part", "gshard", "wide"))
NORMS = frozenset(("norm", "host.verdict"))  # what an UPDATE learns the norm from
PASS_ON = frozenset((KEEP, ADD, COPY, ALL_GATHER))  # their result is as partial as what they read
RANKS = {
    "dp": "data-parallel ranks",
    "replica": "ranks that keep the same share",
    "ends": "first and the last pipeline rank, which both hold the tied embedding",
    "pp": "pipeline ranks",
    "tp": "tensor-parallel ranks",
}
Axis = object  # "dp", or (axis, phase): of a unit only some parameters are shared by its ranks
Added = tuple[int, object, int]  # (unit, ops, micro-batch): what one backward adds to a gradient


class Refusal:
    """The ``ValueError`` to raise at a position in a pipeline rank's list: what is wrong there, and
    what would be legal.
    """

    def __init__(self, program: Program, pp: int) -> None:
        self.names, self.code = Names(program, pp), program.codes[pp]
        self.of = f" of pipeline rank {pp}" * (program.plan.pp > 1)

    def __call__(self, position: int, why: str, legal: str) -> ValueError:
        name, value = f"program{self.of}", f"{len(self.code)} instructions"
        if position < len(self.code):
            name = f"instruction {position}{self.of}"
            value = self.names.instruction(self.code[position])
        return illegal(name, value, why, legal)


class Sums:
    """One pipeline rank's list."""

    def __init__(self, program: Program, pp: int, code: Code, refuse: Refusal) -> None:
        self.program, self.pp, self.code, self.refuse = program, pp, code, refuse
        self.names, self.parameters = refuse.names, refuse.names.parameters
        self.born = born(program, pp)
        self.owed: dict[Value, frozenset[Axis]] = {}  # what each value is still partial over
        self.holds: dict[Value, Counter[Added]] = {}  # what backward has added, and how often
        self.whole: dict[int, Counter[Added]] = {}  # unit -> what its gradient consists of
        self.last: dict[int, int] = {}  # unit -> position of what adds to its gradient last
        for position, ins in enumerate(code):
            for v in ins.writes if ins.op in ADDS_GRADIENTS else ():
                if v[0] == "grad":
                    self.last[v[1]] = position
                    self.whole.setdefault(v[1], Counter())[v[1], ins.at, ins.mb] += 1
        self.odd: ValueError | None = None  # kept: a gradient that nothing reads may say more
        self.adds: dict[int, int] = {}  # the same, of what there is up to here
        self.unread: dict[Value, int] = {}  # gradients, and where they were written
        self.updated: Counter[int] = Counter()
        self.stale: dict[int, int] = {}  # unit -> position where each rank updated a share of it

    def check(self) -> None:
        """Raise ``ValueError`` at the first value that is used as what it is not."""
        for position, ins in enumerate(self.code):
            if ins.op != WAIT:
                self._follow(position, ins)
        for unit in self.adds:
            if self.updated[unit] != 1:
                why = f"UPDATE of {self.parameters(unit)} is there {self.updated[unit]} times"
                raise self.refuse(len(self.code), why, "one UPDATE of all that has a gradient")
        rescaled = sum(ins.op == RESCALE for ins in self.code)
        if rescaled != (self.program.plan.precision == "fp16"):
            why = f"the loss scale is adapted {rescaled} times"
            raise self.refuse(len(self.code), why, "one RESCALE, behind the norm")
        for v, position in self.unread.items():
            why = f"nothing reads the gradient of {self.parameters(v[1])} that it leaves"
            raise self.refuse(position, why, "what adds it up or updates with it")
        if self.odd is not None:
            raise self.odd
        for unit, position in self.stale.items():
            why = f"each rank updates its share of {self.parameters(unit)}, and no other gets it"
            raise self.refuse(position, why, "ALL_GATHER over 'dp' behind it, for the next step")

    def _follow(self, position: int, ins: Instr) -> None:
        if ins.op in (ALL_REDUCE, REDUCE_SCATTER):
            for v, made in zip(ins.reads, ins.writes, strict=True):
                self._summed(position, ins, v, made)
        elif ins.op in PASS_ON:
            self._passed_on(position, ins)
        else:
            for v in ins.reads:
                self._complete(position, v)
            for v in ins.writes if ins.op in COMPUTE else ():
                self._made(position, ins, v)
        for v in ins.reads:
            self.unread.pop(v, None)
        new = [v for v in ins.writes if is_gradient(v) and not lasts(v)]
        self.unread |= dict.fromkeys(new, position)
        for v in ins.reads if ins.op == NORM else ():
            if is_gradient(v):  # else the host's norm of one
                self._holds_all(position, v, v[1])
        if ins.op == NORM and not ins.lane:  # the host's is of one unit
            self._of_all(position, ins)
            self.owed[ins.writes[0]] = frozenset(self.program.norm_axes)
        if ins.op == ALL_GATHER and ins.writes[0][0] == "w":
            self.stale.pop(ins.unit, None)
        if ins.op == UPDATE:
            self._holds_all(position, ins.reads[0], ins.unit)
            self._clips(position, ins)
            self.updated[ins.unit] += 1
            if self.program.plan.zero_stage in (1, 2) and self.program.shards > 1:
                self.stale[ins.unit] = position

    def _complete(self, position: int, v: Value) -> None:
        """A later instruction needs the sum over all ranks."""
        missing = self.owed.get(v)
        if not missing:
            return
        axis = min(missing, key=str)
        lane = _lane(axis)
        over = f"over the {RANKS.get(lane.partition(':')[0], 'ranks')} (axis {lane!r})"
        call = f"ALL_REDUCE over {lane!r}" + f" with at={axis}" * isinstance(axis, tuple)
        if not is_gradient(v):
            why = f"{self.names.value(v)} is a partial sum: it is not summed {over}"
            raise self.refuse(position, why, f"{call} before this position")
        at = self.adds[v[1]]
        why = f"the gradient of {self.parameters(v[1])} is never summed {over}, so "
        last = self.names.instruction(self.code[at])
        legal = f"{call} behind position {at}, {last!r}, which adds to it last"
        raise self.refuse(position, why + _without(lane), legal)

    def _holds_all(self, position: int, v: Value, unit: int) -> None:
        """Whether this is the gradient of a unit, with what each micro-batch adds to it once."""
        held, whole = self.holds.get(v, Counter()), self.whole.get(unit, Counter())
        if held == whole or self.odd is not None:
            return
        what, others = self.names.value(v), [u for u, _, _ in held if u != unit]
        if others:
            why = f"{what} holds the gradient of {self.parameters(others[0])}"
            self.odd = self.refuse(position, why, f"the gradient of {self.parameters(unit)}")
            return
        odd = min((whole - held) or (held - whole), key=lambda added: added[2])
        why = f"{what} is to hold what each micro-batch adds to the gradient of "
        why += f"{self.parameters(unit)} once, and holds that of micro-batch {odd[2]} {held[odd]} "
        legal = f"one made of it behind position {self.last[unit]}, which adds to it last; or the "
        self.odd = self.refuse(
            position, why + "times", legal + "sum of parts that have none in common"
        )

    def _of_all(self, position: int, ins: Instr) -> None:
        """The norm is that of all gradients."""
        missing = self.whole.keys() - {v[1] for v in ins.reads}
        if missing:
            why = f"does not read the gradient of {self.parameters(min(missing))}"
            raise self.refuse(position, why, "one NORM, of what each UPDATE reads")

    def _clips(self, position: int, ins: Instr) -> None:
        """An update reads the norm where it has to."""
        scaled = self.program.plan.precision == "fp16"
        if (self.program.clips or scaled) and not any(v[0] in NORMS for v in ins.reads):
            lost = "be clipped" if self.program.clips else "leave out a step that overflows"
            why = f"does not read the norm, without which it would not {lost}"
            raise self.refuse(position, why, "('norm', 0, 0) among what it reads, behind the NORM")

    def _made(self, position: int, ins: Instr, v: Value) -> None:
        if v[0] != "grad":
            self.owed[v] = cut_by(self.program.model, ins, v)
            return
        unit = v[1]
        self.adds[unit] = position
        self.holds.setdefault(v, Counter())[unit, ins.at, ins.mb] += 1
        if self.owed.setdefault(v, self.born[unit]) != self.born[unit]:
            why = f"adds to the gradient of {self.parameters(unit)}, which is summed over "
            why += f"{_axes(self.born[unit] - self.owed[v])} already: another sum would count "
            why += "that part once per rank"
            legal = "a sum behind the last position that adds to it"
            raise self.refuse(position, why, legal)

    def _summed(self, position: int, ins: Instr, v: Value, made: Value) -> None:
        axis: Axis = ins.at if sums_shared(ins) else ins.lane
        missing = self.owed.get(v, frozenset())
        if axis in missing:
            self.owed[made] = missing - {axis}
            self.holds[made] = self.holds.get(v, Counter()).copy()
            return
        what, legal = self.names.value(v), "one sum over each axis over which a value is partial"
        why = f"is not partial over {ins.lane!r}"
        if is_gradient(v):
            what = f"the gradient of {self.parameters(v[1])}"
            legal = f"one sum over each of its axes: {_axes(self.born[v[1]])}"
            if axis in self.born[v[1]]:
                why = f"is summed over {ins.lane!r} already: again would count it once per rank"
        raise self.refuse(position, f"{what} {why}", legal)

    def _passed_on(self, position: int, ins: Instr) -> None:
        v, made = ins.reads[0], ins.writes[0]
        missing = self.owed.get(v, frozenset())
        before = self.owed.get(made, missing) if ins.op == ADD else missing
        if before != missing:
            why = f"one is partial over {_axes(missing)}, the other over {_axes(before)}"
            raise self.refuse(position, why, "two values summed over the same axes")
        self.owed[made] = missing
        held = self.holds.get(v, Counter())
        if ins.op == KEEP:  # there is nothing left under its first name
            self.holds.pop(v, None)
        if ins.op == ADD:
            self.holds.setdefault(made, Counter()).update(held)
        else:
            self.holds[made] = held.copy()


def born(program: Program, pp: int) -> list[frozenset[Axis]]:
    """Per unit of a pipeline rank the axes over which its gradient is partial after backward."""
    plan = program.plan
    sizes = {"dp": plan.shard_degree, "replica": plan.dp // plan.shard_degree}
    alike: set[Axis] = {axis for axis, size in sizes.items() if size > 1}
    found = [set(alike) for _ in program.units[pp]]
    for key, shares in program.shared(pp, None).items():
        for share in shares:
            found[share.unit].add(key)
    return [frozenset(axes) for axes in found]


def cut_by(model: Model, ins: Instr, v: Value) -> frozenset[Axis]:
    """What a state is partial over that ops (i, j) write. Such a range ends with g in forward and
    begins with f in backward; g-bar follows it, or f-bar comes before it.
    """
    (i, j), ops = ins.at, model.ops
    if v[0] in ("x", "r") and ins.op in FORWARDS:
        near = [(ops[j - 1], "all_reduce"), *((op, "reduce_scatter") for op in ops[j : j + 1])]
        calls = [(op.message, op.message.forward, call) for op, call in near if op.message]
    elif v[0] == "g":
        before = ops[i - 1 : i] if i else ()
        near = [(ops[i], "all_reduce"), *((op, "reduce_scatter") for op in before)]
        calls = [(op.message, op.message.backward, call) for op, call in near if op.message]
    else:
        return frozenset()
    return frozenset(message.axis for message, made, call in calls if made == call)


def is_gradient(v: Value) -> bool:
    """Whether a value is a gradient or a share of one, on whatever tier."""
    return v[0].rpartition(".")[2] in GRADIENTS


def _without(lane: str) -> str:
    """What happens to a gradient that is never summed over this axis."""
    if lane == "ends":
        return "its two copies would become different"
    # tp ranks with a copy of one parameter see parts of the sequence, or of the micro-batch
    return f"every rank would follow its own {'tokens' if lane.startswith('tp') else 'samples'}"


def _lane(axis: Axis) -> str:
    return axis[0] if isinstance(axis, tuple) else str(axis)


def _axes(axes: frozenset[Axis]) -> str:
    return ", ".join(sorted(map(_lane, axes))) or "no axis"
