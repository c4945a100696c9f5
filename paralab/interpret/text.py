"""Print a program: one line per instruction, in the model's terms; repetitions are folded.

    pl.program(model, pl.Plan(dp=4, zero_stage=3))

       4  × 3 blocks, i = 0 … 2
       4    ALL_GATHER       w blocks.i+1 mb 0 over dp, 793 kB
       5    WAIT             w blocks.i mb 0
       6    FORWARD          blocks.i mb 0                               frees w, x

A line has the position, the operation, its value (by its kind and its place in the model), the
group and the bytes of a call, and the values whose memory ends there. `instructions.py` explains
the kinds. Nothing runs, and no torch is needed. Lab 05 reads ZeRO this way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

from paralab.checks import choice, count_of, illegal, instance, real, whole
from paralab.instruments.calibrate import device_of_run
from paralab.interpret.differences import Difference
from paralab.interpret.folding import Fold, Item, Line, fold
from paralab.interpret.memory import Memory, memory
from paralab.interpret.quick import on, states
from paralab.interpret.traffic import Calls
from paralab.programs.checks import check
from paralab.programs.compile import compiled
from paralab.programs.derive import derived
from paralab.programs.instructions import COLLECTIVES, MESSAGES, Code, Instr
from paralab.programs.names import Names
from paralab.programs.own import OPS, RankProgram
from paralab.programs.program import Program
from paralab.report.tables import TIERS
from paralab.spec import ModelSpec, Plan
from paralab.view.theme import in_bytes

BUCKETS = 4  # how many buckets the notes list the parameters of
WIDTH = 60  # the most columns of ``what``, before what an instruction frees


class Row(NamedTuple):
    """One printed line. A fold has a headline, in ``what``, and no instruction."""

    depth: int
    position: int
    what: str
    frees: str = ""
    ins: Instr | None = None


class ProgramText(RankProgram):
    """One rank's program to read; printed, it shows itself.

    code   the instructions as passes see them, without waits and frees; `replace` derives these
           again
    lines  the instructions in order, with waits and frees
    shown  (position, instruction) of the printed lines: all of them, or those that a filter chose
    """

    @cached_property
    def lines(self) -> Code:
        return derived(list(self.code))

    @cached_property
    def shown(self) -> list[tuple[int, Instr]]:
        return list(enumerate(self.lines))

    @cached_property
    def names(self) -> Names:
        return Names(self.program, self.pp, self.rank)

    # ---- parts of it -----------------------------------------------------------------------------
    def filter(
        self,
        *,
        op: str | Iterable[str] | None = None,
        lane: str | Iterable[str] | None = None,
        microbatch: int | Iterable[int] | None = None,
    ) -> ProgramText:
        """The program with only those lines that have one of these ops, lanes and micro-batches.

        op    such as "all_gather"
        lane  "compute" for the rank's own thread, else the axis of a group, or "h2d", "d2h",
              "disk", "host"
        """
        for name in _several(op):
            if str(name).upper() not in OPS:
                choice("op", name, tuple(sorted(OPS)))  # refuses the name as the caller wrote it
        ops = {str(name).upper() for name in _several(op)}
        lanes, known = set(_several(lane)), {ins.lane or "compute" for ins in self.lines}
        for name in lanes - known:
            raise illegal(
                "lane", name, "no instruction of this program runs there", ", ".join(sorted(known))
            )
        last = self.plan.microbatches - 1
        batches = {whole("microbatch", k, at_least=0, at_most=last) for k in _several(microbatch)}
        chosen = copy(self)
        chosen.shown = [
            (position, ins)
            for position, ins in self
            if (op is None or ins.op in ops)
            and (lane is None or (ins.lane or "compute") in lanes)
            and (microbatch is None or ins.mb in batches)
        ]
        return chosen

    def __iter__(self) -> Iterator[tuple[int, Instr]]:
        """(position, instruction) of every line."""
        return iter(self.shown)

    def __len__(self) -> int:
        return len(self.shown)

    def count(self) -> Counter[tuple[str, str]]:
        """{(op, lane): number of lines}."""
        return Counter((ins.op, ins.lane or "compute") for _, ins in self)

    def diff(self, other: ProgramText) -> Difference:
        """What ``other`` does that this program does not, and what it leaves out."""
        instance("other", other, ProgramText, "pl.program(model, plan)", "program to read")
        return Difference(self, other)

    # ---- what it holds ---------------------------------------------------------------------------
    def peak(self, tier: str = "device") -> dict[str, int]:
        """{category: bytes} that the rank holds on a tier at the peak of its device; on a 2D or
        2.5D grid, the bytes of the rank with the highest peak.
        """
        return on(choice("tier", tier, TIERS), self._weighed.held)

    def most(self, tier: str = "device") -> dict[str, int]:
        """{category: bytes} on a tier, each category at its own peak."""
        return on(choice("tier", tier, TIERS), self._weighed.most)

    def states(self) -> dict[str, int]:
        """{category: bytes} of the rank's parameters, gradients (as kept until the update) and
        optimizer states, on all tiers together.
        """
        return states(self.program, self.pp)

    @cached_property
    def _weighed(self) -> Memory:
        index = self.plan.place(self.rank).dp % self.program.shards
        gloo = device_of_run(self.plan.world_size) != "cuda"
        return memory(self._alone, self.pp, index=index, gloo=gloo)

    @property
    def _alone(self) -> Program:
        codes = [self.lines if pp == self.pp else [] for pp in range(self.plan.pp)]
        return replace(self.program, codes=codes)

    # ---- as text ---------------------------------------------------------------------------------
    def bytes_of(self, ins: Instr) -> int:
        """Bytes of the full buffer of a call; 0 for other instructions."""
        if ins.op in COLLECTIVES or ins.op in MESSAGES:
            return self._calls.payload(self.pp, ins) or 0
        return 0

    @cached_property
    def _calls(self) -> Calls:
        return Calls(self.program)

    def rows(self, *, folded: bool = True) -> Iterator[Row]:
        """The lines as they are printed."""
        lines = [Line(self._line(ins), position) for position, ins in self]
        return self._rows(fold(lines) if folded else lines, 0, {})

    def _line(self, ins: Instr) -> str:
        size = self.bytes_of(ins)
        what = self.names.what(ins) + (f", {in_bytes(size)}" if size else "")
        return f"{ins.op}\t{what}\t{self.names.frees(ins)}"

    def _rows(self, items: Iterable[Item], depth: int, letters: dict) -> Iterator[Row]:
        for item in items:
            if isinstance(item, Fold):
                yield Row(depth, item.position, item.head)
                yield from self._rows(item.body, depth + 1, letters | item.letters)
            else:
                _, what, frees = item.lettered(letters).split("\t")
                yield Row(depth, item.position, what, frees, self.lines[item.position])

    @property
    def title(self) -> str:
        """Whose program this is."""
        part = f"{len(self)} of " * (len(self) < len(self.lines))
        size = f"{part}{count_of(len(self.lines), 'instruction')}"
        plan = ", ".join(f"{name}={value}" for name, value in self.plan.changed().items())
        return f"rank {self.rank} of {self.plan.world_size}: {plan or 'one device'}, {size}"

    @cached_property
    def notes(self) -> list[str]:
        """What the lines do not say: the parameters of buckets, and why the program is refused."""
        buckets = [
            f"{name}: {' … '.join(dict.fromkeys((unit.names[0], unit.names[-1])))}, "
            + count_of(len(unit.names), "parameter")
            for name, unit in zip(self.names.units, self.units, strict=True)
            if name.startswith("bucket")
        ]
        more = f"… and {count_of(len(buckets) - BUCKETS, 'more bucket')}"
        notes = buckets[:BUCKETS] + [more] * (len(buckets) > BUCKETS)
        return notes + [f"refused: {self.refusal}"] * bool(self.refusal)

    @cached_property
    def refusal(self) -> str:
        """Why the program cannot run, or ""."""
        try:
            check(self._alone)
        except ValueError as error:
            return str(error)
        return ""

    def text(self, *, folded: bool = True) -> str:
        """As text; ``folded=False`` shows every instruction."""
        text_lines, rows = [self.title], list(self.rows(folded=folded))
        width = min(max((len(row.what) + 2 * row.depth for row in rows), default=0), WIDTH) + 17
        for row in rows:
            indent = "  " * row.depth
            line = f"{indent}{row.ins.op:<15}  {row.what}" if row.ins else indent + row.what
            frees = f"{line:<{width}}  frees {row.frees}" if row.frees else line
            text_lines.append(f"{row.position:>5}  {frees}")
        return "\n".join(text_lines + self.notes)

    def __repr__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        from paralab.view.program_table import program_table

        return program_table(self)


def program(
    model: ModelSpec,
    plan: Plan | None = None,
    rank: int = 0,
    *,
    optimizer: str = "adamw",
    clip_norm: float | None = None,
) -> ProgramText:
    """The step of one rank as a list of instructions to read, on the device that `pl.run` would
    take; nothing runs.

    model, plan  what to train and how to split it (default: one device)
    rank         global
    optimizer    "adamw" or "sgd"; with ``clip_norm`` the gradients' norm is taken

    A program that the checks refuse, because of a pass of your own, is shown too: its last line
    says why. Raises ``ValueError`` on a plan that cannot train the model.
    """
    plan = instance("plan", Plan() if plan is None else plan, Plan, "a pl.Plan(...)")
    plan.validate(model)
    model = model.resolved(gpus=device_of_run(plan.world_size) == "cuda")
    rank = whole("rank", rank, at_least=0, at_most=plan.world_size - 1)
    if clip_norm is not None:
        real("clip_norm", clip_norm, above=0.0)
    at, clips = plan.place(rank).pp, clip_norm is not None
    step = compiled(model, plan, optimizer=optimizer, clips=clips, only=at, final=False)
    return ProgramText(step, rank, step.codes[at])


def _several(value: Any) -> list:
    if value is None:
        return []
    return [value] if isinstance(value, str) or not isinstance(value, Iterable) else list(value)


__all__ = ["ProgramText", "program"]
