"""Check of partial sums: every gradient is summed exactly once over each axis that needs it.

A value is *partial* over an axis if each rank along it has one summand of the value:

    gradient   over the data-parallel ranks and the replicas of a shard; over tp ranks that hold
               the same parameter, and over both ends of a pipeline with a tied embedding
    x, r, g    over tp ranks, where a layer that is cut over them computed the value
    norm       the sum of squares, over the axes whose ranks hold different gradients

A sum over an axis makes a value complete along it. Gradients that are added must be partial over
the same axes; every other reader of a value needs it complete. So one pass through the list finds
a missing sum, one over a wrong axis, one too early and one too many.

A gradient also has *contents*: which backwards, by micro-batch, have been added to it. Copies, sums
and additions pass the contents on. An UPDATE or a NORM needs all contents of its unit, each once: a
copy made too early misses later backwards, and overlapping summands count twice. Under stages 1 and
2 of ZeRO each rank updates a shard; the shards have to be gathered before the step is over. What
the host updates has to be copied to where it is kept: on the device, or in files.
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
    Instr,
    Value,
    sums_shared,
)
from paralab.programs.names import Names
from paralab.programs.program import Program
from paralab.programs.tiers import rows, tier_of

GRADIENTS = frozenset(("grad", "part", "gshard"))
NORMS = frozenset(("norm", "host.verdict"))  # the values from which an UPDATE reads the norm
PASS_ON = frozenset((KEEP, ADD, COPY, ALL_GATHER))  # their result is as partial as their operand
RANKS = {
    "dp": "data-parallel ranks",
    "replica": "ranks that keep the same shard",
    "ends": "first and the last pipeline rank, which both hold the tied embedding",
    "pp": "pipeline ranks",
    "tp": "tensor-parallel ranks",
}
Axis = object  # "dp"; or (axis, phase) where its ranks share only some of a unit's parameters
Added = tuple[int, object, int]  # (unit, ops, micro-batch): one backward's summand of a gradient


class Refusal:
    """Makes the ``ValueError`` for a position in a pipeline rank's list: what is wrong at that
    position, and what would be legal.
    """

    def __init__(self, program: Program, pp: int) -> None:
        self.program, self.pp, self.code = program, pp, program.codes[pp]
        self.names = Names(program, pp)
        self.of = f" of pipeline rank {pp}" * (program.plan.pp > 1)

    def __call__(self, position: int, why: str, legal: str) -> ValueError:
        name, value = f"program{self.of}", f"{len(self.code)} instructions"
        if position < len(self.code):
            name = f"instruction {position}{self.of}"
            value = self.names.instruction(self.code[position])
        return illegal(name, value, why, legal)


class Sums:
    """The check of one pipeline rank's list."""

    def __init__(self, refuse: Refusal) -> None:
        self.refuse, self.program, self.code = refuse, refuse.program, refuse.code
        self.names, self.parameters = refuse.names, refuse.names.parameters
        self.partial_at_first = after_backward(refuse.program, refuse.pp)
        self.partial: dict[Value, frozenset[Axis]] = {}  # axes over which each value is partial now
        self.contents: dict[Value, Counter[Added]] = {}  # what backward has added, and how often
        self.whole: dict[int, Counter[Added]] = {}  # unit -> all that its gradient has to contain
        self.last: dict[int, int] = {}  # unit -> position of the last addition to its gradient
        for position, ins in enumerate(self.code):
            for v in ins.writes if ins.op in ADDS_GRADIENTS else ():
                if v[0] == "grad":
                    self.last[v[1]] = position
                    self.whole.setdefault(v[1], Counter())[v[1], ins.at, ins.mb] += 1
        # Wrong contents; raised last, since an unread gradient may be the better explanation.
        self.wrong_contents: ValueError | None = None
        self.unread: dict[Value, int] = {}  # gradient -> position where it was written
        self.scattered: dict[tuple[int, Axis], int] = {}  # (unit, axis) -> its REDUCE_SCATTER
        self.updated: Counter[int] = Counter()
        self.stale: dict[int, int] = {}  # unit -> position where each rank updated a shard of it

    def check(self) -> None:
        """Raise ``ValueError`` for the first value that is not what its reader needs."""
        for position, ins in enumerate(self.code):
            if ins.op != WAIT:
                self._follow(position, ins)
        for unit in self.last:
            if self.updated[unit] != 1:
                why = f"{self.parameters(unit)} is updated {self.updated[unit]} times"
                raise self.refuse(len(self.code), why, "one UPDATE of each unit with a gradient")
        rescaled = sum(ins.op == RESCALE for ins in self.code)
        if rescaled != (self.program.plan.precision == "fp16"):
            why = f"the loss scale is adapted {rescaled} times"
            raise self.refuse(len(self.code), why, "one RESCALE, after the NORM")
        for v, position in self.unread.items():
            why = f"the gradient of {self.parameters(v[1])} that it writes is never read"
            raise self.refuse(position, why, "a sum, an ADD or an UPDATE that reads it")
        if self.wrong_contents is not None:
            raise self.wrong_contents
        if self.program.plan.tiers is not None:
            self._require_copies()
        for unit, position in self.stale.items():
            why = f"each rank updates its shard of {self.parameters(unit)}, which is never gathered"
            raise self.refuse(position, why, "ALL_GATHER over 'dp' after it, for the next step")

    def _follow(self, position: int, ins: Instr) -> None:
        if ins.op in (ALL_REDUCE, REDUCE_SCATTER):
            for v, target in zip(ins.reads, ins.writes, strict=True):
                self._summed(position, ins, v, target)
        elif ins.op in PASS_ON:
            self._passed_on(position, ins)
        else:
            for v in ins.reads:
                self._require_complete(position, v)
            for v in ins.writes if ins.op in COMPUTE else ():
                self._computed(position, ins, v)
        for v in ins.reads:
            self.unread.pop(v, None)
        written = [v for v in ins.writes if is_gradient(v) and not lasts(v)]
        self.unread |= dict.fromkeys(written, position)
        for v in ins.reads if ins.op == NORM else ():
            if is_gradient(v):  # otherwise it reads "host.norm"
                self._require_contents(position, v, v[1])
        if ins.op == NORM and not ins.lane:  # on the lane "host" it is the norm of one unit
            if missing := self.last.keys() - {v[1] for v in ins.reads}:
                why = f"does not read the gradient of {self.parameters(min(missing))}"
                raise self.refuse(position, why, "one NORM of all gradients")
            self.partial[ins.writes[0]] = frozenset(self.program.norm_axes)
        if ins.op == ALL_GATHER and ins.writes[0][0] == "w":
            self.stale.pop(ins.unit, None)
        if ins.op == UPDATE:
            self._require_contents(position, ins.reads[0], ins.unit)
            self._require_norm(position, ins)
            self.updated[ins.unit] += 1
        sharded = self.program.plan.zero_stage in (1, 2) and self.program.shards > 1
        if sharded and ("shard", ins.unit, 0) in ins.writes:  # an UPDATE's or a COPY's
            self.stale[ins.unit] = position

    def _require_copies(self) -> None:
        """What the host updates is copied to where it is kept; delayed parameters a step later."""
        tiers = self.program.plan.tiers
        last = {v: position for position, ins in enumerate(self.code) for v in ins.writes}
        for position, ins in enumerate(self.code):
            on_host = ins.op == UPDATE and ins.lane == "host"
            for state in ("shard", "opt")[: 1 + (rows(self.program) > 0)] if on_host else ():
                home = (tier_of(tiers, state) + state, ins.unit, 0)
                after = not tiers.delayed or state == "opt"
                if last.get(home, -1) < position * after:
                    why = f"what it updates is not copied to {self.names.value(home)}"
                    raise self.refuse(position, why, f"COPY to {home}{' after it' * after}")

    def _require_complete(self, position: int, v: Value) -> None:
        """The instruction at this position needs the sum of ``v`` over all ranks."""
        axes = self.partial.get(v)
        if not axes:
            return
        axis = min(axes, key=str)
        lane = _lane(axis)
        over_ranks = f"over the {RANKS.get(lane.partition(':')[0], 'ranks')} (axis {lane!r})"
        call = f"ALL_REDUCE over {lane!r}" + f" with at={axis}" * isinstance(axis, tuple)
        if not is_gradient(v):
            why = f"{self.names.value(v)} is a partial sum: it is not summed {over_ranks}"
            raise self.refuse(position, why, f"{call} before this position")
        at = self.last[v[1]]
        # tp ranks with a copy of one parameter process parts of the sequence, or of the micro-batch
        own = "tokens" if lane.startswith("tp") else "samples"
        then = f"every rank would train on its own {own} only"
        then = "its two copies would become different" if lane == "ends" else then
        why = f"the gradient of {self.parameters(v[1])} is never summed {over_ranks}, so {then}"
        legal = f"{call} after position {at}, {{!r}}, which adds to it last"
        if (scattered := self.scattered.get((v[1], axis), -1)) > at:
            at = scattered
            why = f"the gradient of {self.parameters(v[1])} is summed in parts only, one on each "
            why += f"of {over_ranks[5:]}, and this reads the gradient of one rank"
            legal = f"ALL_GATHER over {lane!r} after position {at}, {{!r}}"
        raise self.refuse(position, why, legal.format(self.names.instruction(self.code[at])))

    def _require_contents(self, position: int, v: Value, unit: int) -> None:
        """``v`` has to be the unit's gradient, with the summand of each micro-batch once."""
        contents, expected = self.contents.get(v, Counter()), self.whole.get(unit, Counter())
        if contents == expected or self.wrong_contents is not None:
            return
        name, foreign = self.names.value(v), [u for u, _, _ in contents if u != unit]
        if foreign:
            why = f"{name} holds the gradient of {self.parameters(foreign[0])}"
            legal = f"the gradient of {self.parameters(unit)}"
            self.wrong_contents = self.refuse(position, why, legal)
            return
        wrong = min((expected - contents) or (contents - expected), key=lambda added: added[2])
        why = f"{name} has to contain what each micro-batch adds to the gradient of "
        why += f"{self.parameters(unit)} once, but what micro-batch {wrong[2]} adds is in it "
        legal = f"a copy or sum after the last addition, at position {self.last[unit]}; or the sum "
        self.wrong_contents = self.refuse(
            position, f"{why}{contents[wrong]} times", legal + "of parts without overlap"
        )

    def _require_norm(self, position: int, ins: Instr) -> None:
        """An update has to read the norm if gradients are clipped or scaled."""
        scaled = self.program.plan.precision == "fp16"
        if (self.program.clips or scaled) and not any(v[0] in NORMS for v in ins.reads):
            why = "does not read the norm, so that its gradient would not be clipped"
            if not self.program.clips:
                why = "does not read the norm, so that it would not skip a step that overflows"
            raise self.refuse(position, why, "('norm', 0, 0) in its reads, after the NORM")

    def _computed(self, position: int, ins: Instr, v: Value) -> None:
        """Compute writes or adds to ``v``."""
        if v[0] != "grad":
            self.partial[v] = after_compute(self.program.model, ins, v)
            return
        unit = v[1]
        self.contents.setdefault(v, Counter())[unit, ins.at, ins.mb] += 1
        at_first = self.partial_at_first[unit]
        if self.partial.setdefault(v, at_first) != at_first:
            why = f"adds to the gradient of {self.parameters(unit)}, which is summed over "
            why += f"{_axes(at_first - self.partial[v])} already: a second sum would count "
            why += "that part once per rank"
            legal = f"a sum after position {self.last[unit]}, which adds to it last"
            raise self.refuse(position, why, legal)

    def _summed(self, position: int, ins: Instr, v: Value, target: Value) -> None:
        axis: Axis = ins.at if sums_shared(ins) else ins.lane
        axes = self.partial.get(v, frozenset())
        if axis in axes:
            self.partial[target] = axes - {axis}
            self.contents[target] = self.contents.get(v, Counter()).copy()
            if ins.op == REDUCE_SCATTER:
                self.scattered[v[1], axis] = position
            return
        name, legal = self.names.value(v), "one sum over each axis over which a value is partial"
        why = f"is not partial over {ins.lane!r}"
        if is_gradient(v):
            name = f"the gradient of {self.parameters(v[1])}"
            legal = f"one sum over each of its axes: {_axes(self.partial_at_first[v[1]])}"
            if axis in self.partial_at_first[v[1]]:
                why = f"is summed over {ins.lane!r} already: a second sum would count it "
                why += "once per rank"
        raise self.refuse(position, f"{name} {why}", legal)

    def _passed_on(self, position: int, ins: Instr) -> None:
        v, target = ins.reads[0], ins.writes[0]
        axes = self.partial.get(v, frozenset())
        target_axes = self.partial.get(target, axes) if ins.op == ADD else axes
        if target_axes != axes:
            why = f"one value is partial over {_axes(axes)}, the other over {_axes(target_axes)}"
            raise self.refuse(position, why, "two values summed over the same axes")
        self.partial[target] = axes
        contents = self.contents.get(v, Counter())
        if ins.op == KEEP:  # it renames the value: the old name no longer exists
            self.contents.pop(v, None)
        if ins.op == ADD:
            self.contents.setdefault(target, Counter()).update(contents)
        else:
            self.contents[target] = contents.copy()


def after_backward(program: Program, pp: int) -> list[frozenset[Axis]]:
    """Per unit of a pipeline rank the axes over which its gradient is partial after backward."""
    plan = program.plan
    sizes = {"dp": plan.shard_degree, "replica": plan.dp // plan.shard_degree}
    everywhere: set[Axis] = {axis for axis, size in sizes.items() if size > 1}
    partial_over = [set(everywhere) for _ in program.units[pp]]
    for key, shares in program.shared(pp, None).items():
        for share in shares:
            partial_over[share.unit].add(key)
    return [frozenset(axes) for axes in partial_over]


def after_compute(model: Model, ins: Instr, v: Value) -> frozenset[Axis]:
    """The axes over which a state is partial that ``ins`` computes over ops (i, j). In forward it
    is partial if the range ends with g or g-bar follows; in backward if the range begins with f or
    f-bar precedes it.
    """
    (i, j), ops, sums = ins.at, model.ops, ("all_reduce", "reduce_scatter")
    way, nearby = "", ()
    if v[0] in ("x", "r") and ins.op in FORWARDS:
        way, nearby = "forward", ops[j - 1 : j + 1]
    elif v[0] == "g":
        way, nearby = "backward", ops[max(i - 1, 0) : i + 1][::-1]
    messages = [(op.message, call) for op, call in zip(nearby, sums, strict=False) if op.message]
    return frozenset(message.axis for message, call in messages if getattr(message, way) == call)


def is_gradient(v: Value) -> bool:
    """Whether a value is a gradient or a shard of one, on any tier."""
    return v[0].rpartition(".")[2] in GRADIENTS


def _lane(axis: Axis) -> str:
    return axis[0] if isinstance(axis, tuple) else str(axis)


def _axes(axes: frozenset[Axis]) -> str:
    return ", ".join(sorted(map(_lane, axes))) or "no axis"
