"""The cost of every instruction of a program on a cluster, in seconds. Torch-free.

    compute   from the `Work` of its ops (theory/work.py); other instructions on the device, like
              the optimizer's, by the bytes that they move (`small`)
    calls     alpha for each message that has to follow another + bytes / bandwidth, with the bytes
              of the member that sends most: spec/links.py
    waits     after one the rank goes on slower (resumed.py), except after a SEND's, which is over
              long before. Over gloo the rank then adds up what a reduce-scatter received, and parts
              that were packed into one message are unpacked
    tiers     alpha + bytes / bandwidth of the link, no faster than the plan's limit
    host      its processor makes the same calls as a device would (`small`), on its own bytes

Data-parallel and tensor-parallel ranks of a pipeline rank do the same, so one pipeline stands for
all of them, with the costs of the slowest: those of the group that is spread furthest over nodes.
Each kind of instruction is worked out once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from paralab.interpret import resumed
from paralab.interpret.traffic import Calls, Member, alike
from paralab.model.ops import METHODS, Call
from paralab.programs.instructions import (
    ADD,
    ALL_GATHER,
    BACKWARDS,
    CALL,
    COMPUTE,
    COPY,
    METHODS_OF,
    NORM,
    REDUCE_SCATTER,
    RESCALE,
    SEND,
    STATES,
    UPDATE,
    WAIT,
    WORKERS,
    Instr,
    Value,
    sums_shared,
    wait,
)
from paralab.programs.program import Program
from paralab.programs.tiers import moved
from paralab.spec import Cluster
from paralab.spec.links import Reach, furthest
from paralab.theory.traffic import POINT_TO_POINT, most_sent
from paralab.theory.work import ITEM, Work

INDEX = {method: number for number, method in enumerate(METHODS)}  # in `Op.work`


class Compute(NamedTuple):
    """Work on the rank's own lane.

    inside  if its ops make calls themselves, its parts in order, each with its cost: a CALL of each
            `Call`, its WAIT, and the instruction itself for each piece of work in between
    """

    seconds: float
    inside: tuple[tuple[Instr, Cost], ...] = ()


class Posted(NamedTuple):
    """A call of a group of ranks.

    lane     of the group; of a message (the pipeline rank that sends it, the one that receives it)
    seconds  on that lane, once all members have launched the call; ``late``: more of them until a
             message has arrived, during which its lane is free and its sender goes on
    members  how many pipeline ranks make the call together; 0: it stays within one
    packed   seconds on the rank's own lane before the call, to pack what is sent
    summed   seconds after the wait, to add up what was received; ``unpacked``: to unpack it;
             ``slower``: how much longer a long stretch of work takes there, see resumed.py
    other    another member adds up, and the rank whose costs these are is idle meanwhile
    """

    lane: Any
    seconds: float
    members: int = 0
    packed: float = 0.0
    summed: float = 0.0
    unpacked: float = 0.0
    slower: float = 0.0
    other: bool = False
    late: float = 0.0

    def after(self, share: float = 1.0) -> float:
        """Seconds of work after the wait, with this share of ``slower``."""
        return self.unpacked + self.slower * share + self.summed

    def late_for(self, ins: Instr) -> float:
        """``late`` for the member that makes the call by this instruction."""
        return 0.0 if ins.op == SEND else self.late


class Job(NamedTuple):
    """A job on a worker's lane; ``slower`` and ``after`` as for a call."""

    lane: str
    seconds: float
    slower: float = 0.0

    def after(self, share: float = 1.0) -> float:
        return self.slower * share


class Awaited(NamedTuple):
    """A WAIT: the rank is idle until its call is over."""


Cost = Compute | Posted | Job | Awaited
NOTHING, AWAITED = Work(), Awaited()


class Costs:
    """The costs of a program's instructions on a cluster."""

    def __init__(self, program: Program, cluster: Cluster) -> None:
        self.program, self.plan, self.model = program, program.plan, program.model
        self.cluster, self.item = cluster, program.model.item
        self.calls = Calls(program)
        # How many times longer matrix products take than with infinitely many tokens.
        tokens = self.plan.microbatch_size * program.spec.seq_len
        self.slower = 1 + cluster.half_rate_tokens / tokens
        self.precision = self.plan.product_precision
        self._known: dict[tuple, Cost] = {}
        self._reaches: dict[tuple, Reach] = {}

    def of(self, pp: int, ins: Instr) -> Cost:
        """The cost of an instruction of pipeline rank ``pp``; worked out once for all blocks."""
        offsets = self.model.offset  # of ops from the same ones of the first block
        if ins.op in COMPUTE:
            (i, j), offset = ins.at, offsets.get(ins.at[0], 0)
            key: tuple = (pp, ins.op, i - offset, j - offset)
        else:
            key = alike(pp, ins)
            if ins.unit < 0 and ins.at in offsets:  # moves a state between two ops of a block
                key = (*key[:2], ins.at - offsets[ins.at], *key[3:])
        cost = self._known.get(key)
        if cost is None:
            cost = self._known[key] = self._of(pp, ins)
        return cost

    def _of(self, pp: int, ins: Instr) -> Cost:
        if ins.op == WAIT:
            return AWAITED
        if ins.op in COMPUTE:
            return self._compute(pp, ins)
        if ins.lane in WORKERS:
            return Job(ins.lane, self._job(pp, ins), self.cluster.wait_overhead)
        if ins.lane:
            return self._message(pp, ins)
        precision = "fp32" if ins.op == UPDATE else self.precision
        return Compute(self.seconds(small(self.program, pp, ins), precision))

    # ---- the device ------------------------------------------------------------------------------
    def seconds(self, work: Work, precision: str = "") -> float:
        """How long work takes on the device; ``precision``: by default the plan's."""
        if self.slower > 1:
            products = tuple(flops * self.slower for flops in work.products)
            work = replace(work, flops=work.flops * self.slower, products=products)
        return work.seconds(self.cluster, precision or self.precision)

    def _compute(self, pp: int, ins: Instr) -> Compute:
        ops = self.model.ops[slice(*ins.at)]
        methods = METHODS_OF[ins.op]
        works = [op.work[INDEX[method]] for op in ops for method in methods]
        whole = self.seconds(sum(works, NOTHING))
        if not self.calls.of(pp, ins):
            return Compute(whole)
        inside: list[tuple[Instr, Cost]] = []
        alone = sum(map(self.seconds, works))
        # The host launches while the device computes, so the whole takes at most the sum of
        # its works: see `Work.seconds`.
        ratio = whole / alone if alone else 1.0
        for op in reversed(ops) if ins.op in BACKWARDS else ops:
            late = []  # WAITs for calls that are in flight while the op's weight half is computed
            for method in methods:
                calls = op.calls.get(method, ())
                seconds = ratio * self.seconds(op.work[INDEX[method]]) / (len(calls) + 1)
                piece = ins, Compute(seconds)
                inside.append(piece)
                for call in calls:
                    name = "inside", len(inside), 0
                    begun = Instr(CALL, call, writes=(name,), lane=call.axis, phase=call.phase)
                    inside.append((begun, self.posted(pp, call)))
                    (late if call.overlapped else inside).append((wait(begun), AWAITED))
                    inside.append(piece)
            inside += late
        if late:  # what their waits cost belongs to this instruction
            inside.append((ins, Compute(0.0)))
        took = sum(cost.seconds for _, cost in inside if type(cost) is Compute)
        return Compute(took, tuple(resumed.inside(self.cluster, inside)))

    # ---- links -----------------------------------------------------------------------------------
    def _message(self, pp: int, ins: Instr) -> Posted:
        """A call of the program; where shards differ in size, the one with the largest payload."""
        shared = sums_shared(ins)
        indexes = range(self.program.shards if shared else 1)
        call = max((c for i in indexes for c in self.calls.of(pp, ins, i)), key=lambda c: c.payload)
        posted, elements = self.posted(pp, call), call.payload / self.item
        split = ins.op in (ALL_GATHER, REDUCE_SCATTER) and (ins.reads + ins.writes)[0][0] in STATES
        # Parts are cut along each sample's sequence; fused kernels have the sequence outermost.
        split = split and self.plan.microbatch_size > 1 and not self.cluster.fused
        if not (shared or split):
            return posted
        moved = self.seconds(Work(0, ITEM * 2 * elements, 3 if shared else 1))
        packed, unpacked = moved * (ins.op != ALL_GATHER), moved * (ins.op != REDUCE_SCATTER)
        return posted._replace(packed=packed, unpacked=posted.unpacked + unpacked)

    def posted(self, pp: int, call: Call) -> Posted:
        """A call of pipeline rank ``pp``, and what follows its wait."""
        op, lane, root = call.op, call.axis, call.root
        slower = self.cluster.wait_overhead
        if op in POINT_TO_POINT:
            took, late = self.cluster.message(call.payload, self.reach(pp, lane, root))
            if op == "send":  # its wait is over long before: the rank goes on at full speed
                return Posted((pp, root), took, 2, late=late)
            return Posted((root, pp), took, 2, slower=slower, late=late)
        first = pp * self.plan.dp * self.plan.tp
        group = Member(self.program, first).group(lane)
        n = len(group)
        _, took = self.cluster.call(op, most_sent(op, call.payload, n), self.reach(pp, lane))
        summed, elements = 0.0, ITEM * call.payload / self.item
        adds = n > 1 and not self.cluster.gpus  # NCCL adds up while it receives
        if adds and op == "reduce_scatter":
            summed = self.seconds(Work(0, elements * (1 + 1 / n), 2))
        elif adds and op == "reduce":  # by the root, and the others' next call waits for it
            summed = self.seconds(Work(0, elements * 3 * (n - 1), n - 1))
        slower *= n > 1  # alone in its group a rank copies, and waits for no other rank
        members = {"pp": self.plan.pp, "ends": 2}.get(lane, 0)
        other = op == "reduce" and group[root] != first
        return Posted(lane, took, members, summed=summed, slower=slower, other=other)

    def reach(self, pp: int, lane: str, peer: int = -1) -> Reach:
        """The `Reach` of a call: that of the group on this lane, among those of pipeline rank
        ``pp``, that is spread furthest; for a message, of the pair of ranks.
        """
        width = self.plan.dp * self.plan.tp
        first, apart = pp * width, (peer - pp) * width if peer >= 0 else 0
        key = (lane, first % self.cluster.devices_per_node, apart)  # nodes repeat themselves
        if key not in self._reaches:
            reaches = set()
            seen: set[int] = set()
            for rank in range(first, first + width):
                if rank not in seen:
                    pair = (rank, rank + apart)
                    group = pair if apart else Member(self.program, rank).group(lane)
                    seen.update(group)
                    reaches.add(self.cluster.reach(group))
            self._reaches[key] = furthest(reaches)
        return self._reaches[key]

    # ---- tiers -----------------------------------------------------------------------------------
    def _job(self, pp: int, ins: Instr) -> float:
        size = moved(self.program, ins, pp).bytes
        if ins.lane == "host":
            return self.cluster.host_seconds(size, small(self.program, pp, ins).kernels)
        return self.cluster.copy_seconds(ins.lane, size, self.plan.tiers.limits.get(ins.lane))


def small(program: Program, pp: int, ins: Instr) -> Work:
    """The `Work` of an instruction that runs no ops, such as the optimizer's or a copy: no FLOPs,
    the bytes that it moves, and its kernels.
    """
    item = program.model.item

    def moved(*values: Value) -> float:
        return ITEM * sum(program.size(v, pp).bytes for v in values) / item

    if ins.op == UPDATE:
        unit, zero = program.units[pp][ins.unit], program.plan.zero_stage > 0
        count, tensors = unit.numel // program.shards, 1 if zero else len(unit.names)
        what = program.optimizer == "adamw", program.update_rounds, program.update_widens
        return Work(0, program.update_bytes * count, update_calls(1, tensors, *what))
    if ins.op == NORM:
        return Work(0, moved(*ins.reads), len(ins.reads) + 4)
    if ins.op == ADD:
        return Work(0, 3 * moved(ins.writes[0]), 1)
    if ins.op == COPY:
        return Work(0, 2 * moved(*ins.writes), 1)  # reads a part as large as what it writes
    return Work(0, 0, 8 * (ins.op == RESCALE))


def update_calls(units: Any, tensors: Any, adamw: bool, rounds: Any, widens: Any) -> Any:
    """Kernels of the UPDATEs of so many units with so many tensors; numbers or arrays.

    rounds, widens  whether masters are rounded, and gradients widened
    """
    return (5 + rounds) * units + (1.0 if adamw else 0.5) * tensors + widens * tensors
