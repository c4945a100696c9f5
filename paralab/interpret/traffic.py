"""Count a program's bytes: every call that a rank makes, in order, and how much it sends.

An instruction whose lane is a group's axis is one call. An op may make calls of its own inside an
instruction of compute; it lists them as data (`model.ops.Call`). The payload of a call, S bytes of
the full buffer, follows from the sizes of values (`Calls.payload`); theory/traffic.py says how many
of these bytes a rank sends.

The data-parallel and tensor-parallel ranks of a pipeline rank make the same calls, each in its own
groups. A group may lie inside a node or reach over several: the *level* of its calls (PTD-P,
Narayanan+ 2021, arXiv:2104.04473, sec. 3 argues by the two levels).

What is counted equals what a run records, row by row. Labs 01, 02, 05, 07.
"""

from __future__ import annotations

from collections.abc import Callable

from paralab.model.ops import Call
from paralab.programs.instructions import (
    ALL_GATHER,
    BACKWARDS,
    CALL,
    COLLECTIVES,
    COMPUTE,
    METHODS_OF,
    PARTS,
    RECEIVE,
    SEND,
    STATES,
    Instr,
    sums_shared,
)
from paralab.programs.program import Program
from paralab.theory.traffic import Row, row

OPS = {op: op.lower() for op in (SEND, *COLLECTIVES)} | {RECEIVE: "recv"}


class Calls:
    """The calls of a program's instructions, the same for all groups on a lane; cached.

    The ``axis`` of such a `Call` is the instruction's lane. Its ``root`` is the position in the
    group of the root or, for a message, of the other end.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self._known: dict[tuple, tuple[Call, ...]] = {}

    def of(self, pp: int, ins: Instr, index: int = 0) -> tuple[Call, ...]:
        """The calls of an instruction of pipeline rank ``pp``, on the rank with this index among
        those that share the states.
        """
        if ins.op in COMPUTE:
            key: tuple = (ins.op, ins.at)
        elif ins.op in OPS:
            key = (*alike(pp, ins), index if sums_shared(ins) else 0)
        else:  # in predictions a CALL is an op's own call; other instructions make none
            return (ins.at,) if ins.op == CALL else ()
        known = self._known.get(key)
        if known is not None:
            return known
        calls: list[Call] = []
        if ins.op in COMPUTE:  # calls of ops' methods; a BACKWARD runs two of each op
            ops = self.program.model.ops[slice(*ins.at)]
            methods = METHODS_OF[ins.op]
            for op in reversed(ops) if ins.op in BACKWARDS else ops:
                calls += (call for method in methods for call in op.calls.get(method, ()))
        elif (payload := self.payload(pp, ins, index)) is not None:
            calls.append(Call(OPS[ins.op], ins.lane, payload, ins.phase, ins.peer))
        return self._known.setdefault(key, tuple(calls))

    def own(self, pp: int, index: int) -> list[tuple[Call, ...]]:
        """The only calls that differ between the ranks that share the states: sums of their parts
        of some gradients, of which a rank may have none.
        """
        return [self.of(pp, ins, index) for ins in self.program.codes[pp] if sums_shared(ins)]

    def payload(self, pp: int, ins: Instr, index: int = 0) -> int | None:
        """Bytes of the full buffer: of the value that is gathered or received, else of the one that
        is read; of a state its last entry, or a tp rank's part. None if the rank makes no call.
        """
        program, model = self.program, self.program.model
        if sums_shared(ins):
            shares = program.shared(pp, index).get(ins.at, ())
            return program.item_of("grad") * sum(s.count for s in shares) if shares else None
        value = (ins.writes if ins.op in (ALL_GATHER, RECEIVE) else ins.reads)[0]
        if value[0] in STATES - PARTS:
            return model.item * model.ops[value[1] - 1].out
        return program.size(value, pp).bytes


def alike(pp: int, ins: Instr) -> tuple:
    """A key: equal for instructions, other than compute, with equal bytes and costs."""
    value = (ins.reads or ins.writes or [("",)])[0]
    what = value[0] if value[0].rpartition(".")[2] in STATES else value[:2]
    return pp, ins.op, ins.at, ins.unit, ins.lane, ins.peer, ins.phase, what


class Member:
    """A global rank as a member of its groups.

    at     its coordinates in the plan
    index  among the ranks that share a copy of the states
    """

    def __init__(
        self, program: Program, rank: int, node_of: Callable[[int], int] = lambda rank: 0
    ) -> None:
        self.plan, self.rank, self.node_of = program.plan, rank, node_of
        self.at = program.plan.place(rank)
        self.index = self.at.dp % program.shards
        self._groups: dict[str, tuple[int, ...]] = {}
        self._rows: dict[Call, Row] = {}

    def group(self, lane: str) -> tuple[int, ...]:
        """Global ranks of the group whose calls are made on this lane."""
        ranks = self._groups.get(lane)
        if ranks is None:
            ranks = self.plan.ranks({"ends": "pp", "dp": "shard"}.get(lane, lane), self.rank)
            if lane == "ends":
                ranks = (ranks[0], ranks[-1])
            self._groups[lane] = ranks
        return ranks

    def row(self, call: Call) -> Row:
        """The row of traffic that this rank records for the call."""
        if call in self._rows:
            return self._rows[call]
        ranks = self.group(call.axis)
        axis = "pp" if call.axis == "ends" else call.axis
        peer = ranks[call.root] if call.root >= 0 else -1
        about = {"peer": peer, "phase": call.phase, "payload": call.payload}
        recorded = row(call.op, axis, ranks, self.rank, **about, node_of=self.node_of)
        return self._rows.setdefault(call, recorded)
