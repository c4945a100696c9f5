"""Weigh a program: what is alive on a rank, and what for, instruction by instruction. Torch-free.

A value is alive from the instruction that writes it to the one that frees it, and the program says
how many bytes of what it has. So between two instructions memory is a sum over names, exact to the
byte; of storages that several values share programs/storages.py knows. *Inside* an instruction
there is more, and that is mostly where the peak is: ops one after the other (inside.py), gradients
once more in fp32, and until its WAIT what a call brings together or receives into. Over gloo a
reduce-scatter is an all-to-all and a sum, and receives n parts of S/n, another S.

    peak = max over instructions of (what is alive before + what is there inside)

ZeRO's table (Rajbhandari+ 2020, arXiv:1910.02054, sec. 5) is the sum of what lasts; what ops keep
is Korthikanti+ 2022 (arXiv:2205.05198), sec. 4, as they really do. Labs 05, 06, 09.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import NamedTuple

from paralab.interpret.inside import Inside, insides
from paralab.model.build import cuts
from paralab.programs.instructions import (
    ALL_GATHER,
    BACKWARDS,
    COMPUTE,
    FORWARD,
    KEEP,
    NORM,
    REDUCE_SCATTER,
    UPDATE,
    WAIT,
    Instr,
    Value,
    sums_shared,
)
from paralab.programs.program import Program
from paralab.programs.storages import SHARING, Name

Kind = tuple[str, str]  # (tier, category)
ACTIVATIONS, WORKSPACE = ("device", "activations"), ("device", "workspace")
BUFFERS, GRADIENTS = ("device", "buffers"), ("device", "gradients")
NOTHING = Inside()
POPPED = frozenset(("saved", "deferred", "g"))  # a backward lets go of these itself


class Memory(NamedTuple):
    """Bytes on one rank in a step.

    peak    most bytes on the device at once
    held    {(tier, category): bytes} at that moment
    most    {(tier, category): bytes}, of each its own most
    before  {(tier, category): bytes} before the first instruction
    """

    peak: int
    held: dict[Kind, int]
    most: dict[Kind, int]
    before: dict[Kind, int]


def memory(program: Program, rank: int = 0, *, index: int = 0, gloo: bool = True) -> Memory:
    """Follow the list of pipeline rank ``rank``.

    index  of the data-parallel rank among those that share the states
    gloo   messages are gloo's, as on processors; NCCL needs no buffers of its own
    """
    found = _Rank(program, rank, index, gloo)
    found.most, before = {}, dict(found.here)
    return Memory(found.whole(), found.held, found.most, before)


def peak(program: Program, rank: int = 0, *, gloo: bool = True) -> int:
    """`memory`'s ``peak`` alone, in less time."""
    found = _Rank(program, rank, 0, gloo)
    found.held = None
    return found.whole()


def moments(
    program: Program,
    rank: int = 0,
    *,
    index: int = 0,
    gloo: bool = True,
    ends: Iterable[bool] | None = None,
) -> Iterator[tuple[int, dict[Kind, int], dict[Kind, int]]]:
    """Yields (bytes on the device at the peak, {(tier, category): bytes} then, the same behind the
    instruction), first of the begin of the step, then of each instruction of a pipeline rank.

    ends  of every instruction whether it is the last of several that are taken together
    """
    found = _Rank(program, rank, index, gloo)
    yield found.total, dict(found.here), dict(found.here)
    for _, last in zip(found.walk(), repeat(True) if ends is None else ends, strict=False):
        if last:
            yield found.peak, found.held, dict(found.here)
            found.peak = -1


def on_device(held: dict[Kind, int]) -> int:
    """Bytes, of all categories."""
    return sum(size for (tier, _), size in held.items() if tier == "device")


class _Rank:
    """What is alive on a rank at the moment, and what there was at the peak.

    here   {(tier, category): bytes}; ``total``: of them on the device
    held   {(tier, category): bytes} at the peak; None: not asked for
    most   {(tier, category): bytes}, of each its own most; None: not asked for
    alive  {value: what it holds}
    refs   {(name, micro-batch): [holders, bytes, category]} of storages that values share
    """

    def __init__(self, program: Program, rank: int, index: int, gloo: bool) -> None:
        self.program, self.rank, self.index, self.gloo = program, rank, index, gloo
        self.item, self.storages = program.model.item, program.storages(rank)
        self.insides = insides(program.model, cuts(program.plan), gloo)
        self.here: dict[Kind, int] = {}
        self.total, self.peak = 0, -1
        self.held: dict[Kind, int] | None = {}
        self.most: dict[Kind, int] | None = None
        self.alive: dict[Value, tuple[Kind, int, tuple[tuple[Name, int], ...]]] = {}
        self.refs: dict[tuple[Name, int], list] = {}
        self.in_flight: dict[tuple[Value, ...], int] = {}  # a call's writes: bytes of its own
        for value in program.lasting(rank):
            self.born(value)

    # ---- values ----------------------------------------------------------------------------------
    def add(self, kind: Kind, size: int) -> None:
        if not size:
            return
        self.here[kind] = self.here.get(kind, 0) + size
        if kind[0] == "device":
            self.total += size

    def born(self, value: Value) -> None:
        if value in self.alive:  # it is written over
            return
        if value[0] not in SHARING:
            tier, category, size = self.program.size(value, self.rank)
            self.alive[value] = (tier, category), size, ()
            self.add((tier, category), size)
            return
        held, refs = self.storages.held(value), self.refs
        kind, names = ("device", held.category), held.shared + held.passed
        self.add(kind, held.own)
        for number, (name, size) in enumerate(names):
            ref = refs.get((name, value[2]))
            if ref is None:
                refs[name, value[2]] = [1, size, kind]
                self.add(kind, size)
                continue
            ref[0] += 1
            if ref[2] != kind and number < len(held.shared):
                self.add(ref[2], -size)
                self.add(kind, size)
                ref[2] = kind
        self.alive[value] = kind, held.own, names

    def died(self, value: Value) -> None:
        kind, own, names = self.alive.pop(value, (BUFFERS, 0, ()))
        self.add(kind, -own)
        for name, _ in names:
            ref = self.refs[name, value[2]]
            ref[0] -= 1
            if not ref[0]:
                self.add(ref[2], -ref[1])
                del self.refs[name, value[2]]

    # ---- instructions ----------------------------------------------------------------------------
    def whole(self) -> int:
        """The peak of the step, its begin included."""
        self.look(NOTHING)
        for _ in self.walk():
            pass
        return self.peak

    def walk(self) -> Iterator[None]:
        """To behind one instruction after the other."""
        for ins in self.program.codes[self.rank]:
            self.step(ins)
            for value in ins.frees:
                self.died(value)
            yield

    def step(self, ins: Instr) -> None:
        """What an instruction does, but for what it frees."""
        op = ins.op
        if op in COMPUTE:
            for value in ins.writes:
                if value[0] == "grad":
                    self.born(value)
            self.look(self.insides.of(ins, self.stays(ins)))
            if op == FORWARD and ins.at[1] == len(self.program.model.ops):
                self.born(("loss", 0, ins.mb))
            for value in ins.writes:
                self.born(value)
            for value in ins.reads if op in BACKWARDS else ():
                if value[0] in POPPED:
                    self.died(value)
            return
        inside = NOTHING
        if op == KEEP:  # a new name
            self.died(ins.reads[0])
        for value in ins.writes:
            self.born(value)
        if op == WAIT:
            inside = Inside(buffers=self.reordered(ins))
        elif ins.lane:
            more = self.in_flight[ins.writes] = self.carried(ins)
            self.add(BUFFERS, more)
        elif op == UPDATE:
            inside = Inside(workspace=self.widened(ins.unit))
        elif op == NORM:
            inside = Inside(workspace=self.measured())
        self.look(inside)
        if op == WAIT:
            self.add(BUFFERS, -self.in_flight.pop(ins.reads, 0))

    def stays(self, ins: Instr) -> tuple[Name, ...]:
        """Storages of what a backward lets go of, and others still hold."""
        if ins.op not in BACKWARDS:
            return ()
        return tuple(
            ("x", name[1]) if name[0] == "r" else name
            for value in ins.reads
            if value[0] in POPPED
            for name, _ in self.alive[value][2]
            if self.refs[name, value[2]][0] > 1
        )

    def look(self, inside: Inside) -> None:
        """Is this the most there was? With what an instruction has besides."""
        here, most = self.here, self.most
        top = self.total + inside.activations + inside.workspace + inside.buffers
        if top > self.peak:
            self.peak = top
            if self.held is not None:
                self.held = dict(here)
                for kind, size in zip((ACTIVATIONS, WORKSPACE, BUFFERS), inside, strict=False):
                    self.held[kind] = here.get(kind, 0) + size
        if most is None:
            return
        for kind, size in here.items():
            if size > most.get(kind, 0):
                most[kind] = size
        if inside is not NOTHING:
            for kind, more in zip((ACTIVATIONS, WORKSPACE), inside.most, strict=True):
                size = here.get(kind, 0) + more
                if size > most.get(kind, 0):
                    most[kind] = size

    def widened(self, unit: int) -> int:
        """fp32 copies of 16-bit gradients."""
        program = self.program
        if not program.widens:
            return 0
        return 4 * program.elements(program.units[self.rank][unit]) // program.shards

    def measured(self) -> int:
        """A norm of each slice that is counted, these and a zero in one tensor, and its squares. Of
        the tp ranks the first or the last has most slices.
        """
        program, ends = self.program, {0, self.program.plan.tp - 1}
        counted = [program.counted(self.rank, self.index, tp).values() for tp in ends]
        return 4 * (3 * max(sum(map(len, slices)) for slices in counted) + 2)

    def reordered(self, ins: Instr) -> int:
        """A sequence that came in parts, of more than one sample: a copy of it in order."""
        value, several = ins.reads[0], self.program.plan.microbatch_size > 1
        gathered = ins.at == ALL_GATHER and value[0] in SHARING
        return self.state(value) if gathered and several else 0

    def carried(self, ins: Instr) -> int:
        """Bytes that a call needs until its WAIT besides what it reads and writes."""
        if sums_shared(ins):  # copied together
            shares: Iterable = self.program.shared(self.rank, self.index).get(ins.at, ())
            return self.program.item_of("grad") * sum(share.count for share in shares)
        if ins.op != REDUCE_SCATTER:
            return 0
        value = ins.reads[0]
        if value[0] not in SHARING:
            return self.program.size(value, self.rank).bytes * self.gloo
        by_rank = self.program.plan.microbatch_size > 1
        return self.state(value) * (self.gloo + by_rank)

    def state(self, value: Value) -> int:
        """The last entry of a state."""
        return self.item * self.program.state_elements(value[1])
