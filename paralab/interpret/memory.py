"""Weigh a program: the bytes alive on a rank, by category, instruction by instruction. Torch-free.

A value is alive from the instruction that writes it to the one that frees it, and the program knows
its category and size. So the memory between two instructions is a sum over values, exact to the
byte; programs/storages.py says which values share a storage. *Inside* an instruction there is more,
and mostly the peak is there: the temporary tensors of ops (inside.py), fp32 copies of gradients,
and, until its WAIT, the buffers of a call. Over gloo a reduce-scatter of S bytes is an all-to-all
and a sum: it receives n parts of S/n, another S.

    peak = max over instructions of (bytes alive before it + bytes that it needs in addition)

ZeRO's table (Rajbhandari+ 2020, arXiv:1910.02054, sec. 5) is the sum of the values that last from
step to step. What ops keep for backward is that of Korthikanti+ 2022 (arXiv:2205.05198), sec. 4,
as these kernels really keep it. Labs 05, 06, 09.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import NamedTuple

from paralab.interpret.inside import Inside, insides
from paralab.model.build import plan_of_ops
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
POPPED = frozenset(("saved", "deferred", "g"))  # a backward frees these while it runs


class Memory(NamedTuple):
    """Bytes on one rank in a step.

    peak    most bytes on the device at once
    held    {(tier, category): bytes} at that moment
    most    {(tier, category): bytes} at each category's own peak
    """

    peak: int
    held: dict[Kind, int]
    most: dict[Kind, int]


def memory(program: Program, rank: int = 0, *, index: int = 0, gloo: bool = True) -> Memory:
    """The memory of pipeline rank ``rank`` in a step.

    index  of the data-parallel rank among those that share the states
    gloo   whether calls are gloo's, as on processors; NCCL's need no buffers here
    """
    weighed = _Rank(program, rank, index, gloo)
    weighed.most = {}
    return Memory(weighed.whole(), weighed.held, weighed.most)


def peak(program: Program, rank: int = 0, *, gloo: bool = True) -> int:
    """`memory`'s ``peak`` alone, in less time."""
    return _Rank(program, rank, 0, gloo).whole()


def moments(
    program: Program,
    rank: int = 0,
    *,
    index: int = 0,
    gloo: bool = True,
    ends: Iterable[bool] | None = None,
) -> Iterator[tuple[int, dict[Kind, int], dict[Kind, int]]]:
    """Yields (bytes on the device at the peak, {(tier, category): bytes} at that moment, the same
    after the instruction): first for the begin of the step, then for each instruction.

    ends  per instruction whether it is the last of a group; yields once per group
    """
    weighed = _Rank(program, rank, index, gloo)
    yield weighed.total, dict(weighed.now), dict(weighed.now)
    last_of_group = repeat(True) if ends is None else ends
    for ins, last in zip(program.codes[rank], last_of_group, strict=False):
        weighed.step(ins)
        if last:
            yield weighed.peak, weighed.held, dict(weighed.now)
            weighed.peak = -1


def on_device(held: dict[Kind, int]) -> int:
    """Bytes on the device, summed over categories."""
    return sum(size for (tier, _), size in held.items() if tier == "device")


class _Rank:
    """The memory of a rank while its list is followed, and at the peak so far.

    now    {(tier, category): bytes}; ``total``: bytes of these on the device
    held   {(tier, category): bytes} at the peak
    most   {(tier, category): bytes} at each category's own peak; None: not recorded
    alive  {value: (kind, bytes of its own, names and bytes of the storages that it shares)}
    refs   {(name, micro-batch): [holders, bytes, kind]} of the shared storages
    """

    def __init__(self, program: Program, rank: int, index: int, gloo: bool) -> None:
        self.program, self.rank, self.index, self.gloo = program, rank, index, gloo
        self.item, self.storages = program.model.item, program.storages(rank)
        self.insides = insides(program.model, plan_of_ops(program.plan), gloo)
        self.now: dict[Kind, int] = {}
        self.total, self.peak = 0, -1
        self.held: dict[Kind, int] = {}
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
        self.now[kind] = self.now.get(kind, 0) + size
        if kind[0] == "device":
            self.total += size

    def born(self, value: Value) -> None:
        if value in self.alive:  # overwritten in place
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
        """Go through the step. Returns its peak, which may be at its begin."""
        self.look(NOTHING)
        for ins in self.program.codes[self.rank]:
            self.step(ins)
        return self.peak

    def step(self, ins: Instr) -> None:
        """Follow an instruction, and its frees."""
        self.enter(ins)
        for value in ins.frees:
            self.died(value)

    def enter(self, ins: Instr) -> None:
        """Everything that an instruction does, except for its frees."""
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
        if op == KEEP:  # gives the same memory a new name
            self.died(ins.reads[0])
        for value in ins.writes:
            self.born(value)
        if op == WAIT:
            inside = Inside(buffers=self.reordered(ins))
        elif ins.lane:
            extra = self.in_flight[ins.writes] = self.carried(ins)
            self.add(BUFFERS, extra)
        elif op == UPDATE:
            inside = Inside(workspace=self.widened(ins.unit))
        elif op == NORM:
            inside = Inside(workspace=self.measured())
        self.look(inside)
        if op == WAIT:
            self.add(BUFFERS, -self.in_flight.pop(ins.reads, 0))

    def stays(self, ins: Instr) -> tuple[Name, ...]:
        """Storages of values that a backward frees, but which other values still hold."""
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
        """Update the peaks with the memory of now and what an instruction needs in addition."""
        now, most = self.now, self.most
        top = self.total + inside.activations + inside.workspace + inside.buffers
        if top > self.peak:
            self.peak, self.held = top, dict(now)
            for kind, size in zip((ACTIVATIONS, WORKSPACE, BUFFERS), inside, strict=False):
                self.held[kind] = now.get(kind, 0) + size
        if most is None:
            return
        for kind, size in now.items():
            if size > most.get(kind, 0):
                most[kind] = size
        if inside is not NOTHING:
            for kind, extra in zip((ACTIVATIONS, WORKSPACE), inside.most, strict=True):
                size = now.get(kind, 0) + extra
                if size > most.get(kind, 0):
                    most[kind] = size

    def widened(self, unit: int) -> int:
        """Bytes of the fp32 copies that an UPDATE makes of 16-bit gradients."""
        program = self.program
        if not program.update_widens:
            return 0
        return 4 * program.elements(program.units[self.rank][unit]) // program.shards

    def measured(self) -> int:
        """Bytes that a NORM needs: the norm of each slice, a tensor of these and a zero, and its
        squares. The first or the last tp rank has most slices.
        """
        program, ends = self.program, {0, self.program.plan.tp - 1}
        counted = [program.counted(self.rank, self.index, tp).values() for tp in ends]
        return 4 * (3 * max(sum(map(len, slices)) for slices in counted) + 2)

    def reordered(self, ins: Instr) -> int:
        """Bytes of a copy in order, of a gathered sequence of more than one sample."""
        value, several = ins.reads[0], self.program.plan.microbatch_size > 1
        gathered = ins.at == ALL_GATHER and value[0] in SHARING
        return self.state(value) if gathered and several else 0

    def carried(self, ins: Instr) -> int:
        """Bytes that a call needs until its WAIT, in addition to the values it reads and writes."""
        if sums_shared(ins):  # packed into one buffer
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
        """Bytes of the last entry of a state."""
        return self.item * self.program.state_elements(value[1])
