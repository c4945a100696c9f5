"""Instructions and values in the model's terms: "FORWARD blocks.3 mb 0", "w blocks.3".

A range of ops is named after its part of the model, or after its first and last op; a unit after
its part or its only parameter, otherwise by number, "bucket 2". A micro-batch is "mb 5"; ranks are
global. The checks' errors, the printed program and program differences all use these names.
"""

from __future__ import annotations

from collections.abc import Sequence

from paralab.programs.instructions import (
    ALL_GATHER,
    COMPUTE,
    MESSAGES,
    NORM,
    RESCALE,
    SEND,
    STATES,
    UPDATE,
    WAIT,
    Instr,
    Value,
)
from paralab.programs.program import Program

USUAL = frozenset(("shard", "x", "g", "saved"))  # usual sources of an ALL_GATHER: not printed
NOWHERE = frozenset(("scale", "mask", "verdict"))  # kinds that belong to the whole rank


class Names:
    """The names in the list of one pipeline rank.

    rank   the global rank whose peers are named; default: the first with this list
    units  the names of the pipeline rank's units, by number
    """

    def __init__(self, program: Program, pp: int, rank: int | None = None) -> None:
        plan, self.model, self.held = program.plan, program.model, program.units[pp]
        self.pipeline = plan.ranks("pp", pp * plan.dp * plan.tp if rank is None else rank)
        self.begins = {i: part for part, i, _ in self.model.parts}
        self.units = [self._unit(number) for number in range(len(self.held))]

    def _unit(self, number: int) -> str:
        unit, parts = self.held[number], [unit.part for unit in self.held]
        if len(unit.names) == 1:
            return unit.names[0]
        return unit.part if parts.count(unit.part) == 1 and unit.part else f"bucket {number}"

    # ---- places in the model ---------------------------------------------------------------------
    def ops(self, i: int, j: int) -> str:
        """The name of ops (i, j)."""
        begin, last = self.model.ops[i].name, self.model.ops[j - 1].name
        for part, first, end in self.model.parts:
            if (first, end) == (i, j):
                return part
            if first <= i and j <= end:
                last = last.removeprefix(part + ".")
        return begin if j == i + 1 else f"{begin} … {last}"

    def boundary(self, at: int) -> str:
        """The name of the state at a boundary: the part, or the op, that reads it."""
        return self.begins.get(at) or self.model.ops[at].name

    def place(self, value: Value) -> str:
        """The place of a value in the model, without its kind and micro-batch."""
        kind, where, _ = value
        kind = kind.rpartition(".")[2]
        if kind == "sent":
            return f"{where[0]} {self.boundary(where[1])}"
        if kind in STATES:
            return self.boundary(where)
        if isinstance(where, tuple):
            return self.ops(*where)
        if kind in NOWHERE or value[0] == "norm":  # "host.norm" belongs to a unit
            return ""
        return self.units[where] if 0 <= where < len(self.units) else f"unit {where}"

    def about(self, ins: Instr) -> str:
        """The place of an instruction: that of its ops, or of the first value that it names."""
        if ins.op in COMPUTE:
            return self.ops(*ins.at)
        return "".join(map(self.place, (ins.reads or ins.writes)[:1]))

    def parameters(self, unit: int) -> str:
        """A unit by its first parameter and the number of others, with the unit's own name."""
        names = self.held[unit].names
        if len(names) == 1:
            return names[0]
        return f"{names[0]} and {len(names) - 1} more ({self.units[unit]})"

    # ---- values and instructions -----------------------------------------------------------------
    def value(self, value: Value) -> str:
        return f"{value[0]} {self.place(value)}".rstrip()

    def values(self, values: Sequence[Value]) -> str:
        """The first of several values, and how many more there are."""
        more = f" and {len(values) - 1} more" * (len(values) > 1)
        return self.value(values[0]) + more if values else ""

    def what(self, ins: Instr) -> str:
        """An instruction without its op: the value, micro-batch, group or peer."""
        text = self._what(ins) + f" mb {ins.mb}" * (ins.mb >= 0)
        if ins.op in MESSAGES and 0 <= ins.peer < len(self.pipeline):
            text += f" {'to' if ins.op == SEND else 'from'} rank {self.pipeline[ins.peer]}"
        elif ins.lane and ins.op != WAIT:
            text += f" {'on' if ins.lane == 'host' else 'over'} {ins.lane}"
        return text

    def _what(self, ins: Instr) -> str:
        """The value that is sent, reduced, kept ...: the source, of a gather the result."""
        source, target = (values[0][0] if values else "" for values in (ins.reads, ins.writes))
        if ins.op in COMPUTE:
            return self.about(ins)
        if ins.op == RESCALE:
            return "loss scale"
        if ins.op == UPDATE:
            return self.units[ins.unit]
        if ins.op == ALL_GATHER and source:
            return self.value(ins.writes[0]) + f" from {source}" * (source not in USUAL)
        moves = source and target not in ("", source, "sent") and ins.op != NORM
        return self.values(ins.reads or ins.writes) + (f" → {target}" if moves else "")

    def instruction(self, ins: Instr) -> str:
        """An instruction as text: "ALL_GATHER w blocks.3 over dp"."""
        return f"{ins.op} {self.what(ins)}"

    def frees(self, ins: Instr) -> str:
        """The values that an instruction frees; only by kind if they are of its own place."""
        place, boundaries = self.about(ins), ins.at if ins.op in COMPUTE else ()
        return ", ".join(
            v[0]
            if (v[0] in STATES and v[1] in boundaries) or self.place(v) == place
            else self.value(v)
            for v in ins.frees
        )
