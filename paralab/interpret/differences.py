"""What one program does that another does not: the difference of two lists, folded.

    before = pl.program(model, pl.Plan(dp=4, zero_stage=2))
    before.diff(pl.program(model, pl.Plan(dp=4, zero_stage=3)))

    + ALL_GATHER  shard → w over dp, before FORWARD  6 times, 3.34 MB  embedding, blocks.0 … head

Instructions are equal if their lines are; where they stand matters only if equal ones have changed
places. What is added, left out or moved, and what keeps or frees other values than before, is put
together by what it does and which compute it is for: all blocks and micro-batches that it happens
for share a line, in the order of the lists. Waits follow from the rest and are left out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from difflib import SequenceMatcher
from itertools import groupby
from typing import Any, NamedTuple

from paralab.interpret.folding import Fold, Item, Line, fold
from paralab.programs.instructions import COLLECTIVES, COMPUTE, WAIT, Instr
from paralab.view.theme import scaled

SIGNS = {"+": "added", "-": "left out", "↕": "at another place", "~": "keeps or frees other values"}


class Change(NamedTuple):
    """One line of a difference.

    sign   "+", "-", "↕" or "~"
    op     of the instructions
    does   what each of them does: "w over dp, before FORWARD"
    of     what they are for: "embedding, blocks.0 … blocks.3 (× 4 blocks), head"
    count  how many there are; ``bytes``: of their messages together
    example  the first of them
    """

    sign: str
    op: str
    does: str
    of: str
    count: int
    bytes: int
    example: Instr

    @property
    def amount(self) -> str:
        """ "6 times, 3.34 MB"."""
        times = "once" if self.count == 1 else f"{self.count} times"
        return times + (f", {scaled(self.bytes, 'B')}" if self.bytes else "")


class _Step(NamedTuple):
    """An instruction of a program with what a difference says of it.

    after  actions of compute before it
    does   what it does, and for which compute
    place  in the model; ``mb``: the micro-batch, or -1 if there is one alone
    bytes  of its message
    """

    ins: Instr
    after: int
    does: str
    place: str
    mb: int
    bytes: int


class Difference:
    """Of two programs to read, from ``before`` to ``after``; printed, it shows itself.

    changes  a `Change` each; ``same``: instructions that both have
    """

    def __init__(self, before: Any, after: Any) -> None:
        self.before, self.after = before, after
        old, new = _steps(before), _steps(after)
        both, first = [key for key in new if key in old], [key for key in old if key in new]
        blocks = SequenceMatcher(None, first, both, autojunk=False).get_matching_blocks()
        kept = {key for at, _, count in blocks for key in first[at : at + count]}  # in one order
        self.same = len(both)
        found = [("-", step.does, step) for key, step in old.items() if key not in new]
        found += [("+", step.does, step) for key, step in new.items() if key not in old]
        found += [("↕", new[key].does, new[key]) for key in both if key not in kept]
        found += [("~", _frees(old[key].ins, new[key].ins), new[key]) for key in both]
        alike: dict[tuple[str, str, str], list[_Step]] = defaultdict(list)
        for sign, does, step in found:
            if does or sign != "~":
                alike[sign, step.ins.op, does].append(step)
        order = sorted(alike, key=lambda key: (alike[key][0].after, list(SIGNS).index(key[0])))
        self.changes = [Change(*key, *_together(alike[key])) for key in order]

    @property
    def titles(self) -> list[str]:
        """Which programs, and how much of them is the same."""
        return [
            f"from {self.before.title}",
            f"to   {self.after.title}; {self.same} of both are the same, waits left out",
        ]

    def __repr__(self) -> str:
        rows = [(f"{c.sign} {c.op}", c.does, c.amount, c.of) for c in self.changes]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join(self.titles + (lines or ["no difference"]))

    def _repr_html_(self) -> str:
        from paralab.view.program_table import difference_table

        return difference_table(self, SIGNS)


def _steps(program: Any) -> dict[tuple, _Step]:
    """The instructions of a program by what identifies them: their line, and the how-manieth such
    line it is. They are for the compute whose result they read, else for the one that reads what
    they write.
    """
    several = program.plan.microbatches > 1
    needed: dict[int, str] = {}
    reader: dict[Any, str] = {}
    for position, ins in reversed(list(program)):
        needed[position] = next((reader[v] for v in ins.writes if v in reader), "")
        if ins.op in COMPUTE:
            reader |= dict.fromkeys(ins.reads, ins.op)
    found: dict[tuple, _Step] = {}
    times: Counter[tuple] = Counter()
    maker: dict[Any, str] = {}
    after = 0
    for position, ins in program:
        if ins.op in COMPUTE:
            after += 1
            maker |= dict.fromkeys(ins.writes, ins.op)
        if ins.op != WAIT:
            made = next((maker[v] for v in ins.reads if v in maker), "")
            line = ins.op, program.names.what(ins)
            times[line] += 1
            does, place = _does(ins, made, needed[position]), program.names.about(ins)
            mb, size = ins.mb if several else -1, program.bytes_of(ins)
            found[*line, times[line]] = _Step(ins, after, does, place, mb, size)
    return found


def _does(ins: Instr, made: str, needed: str) -> str:
    """ "shard → w over dp, before FORWARD"; of compute its name says it."""
    if ins.op in COMPUTE:
        return ""
    kinds = dict.fromkeys(values[0][0] for values in (ins.reads, ins.writes) if values)
    kinds.pop("sent", None)
    text = " → ".join(kinds) + f" over {ins.lane}" * (ins.op in COLLECTIVES)
    if made:
        return f"{text}, after {made}"
    return f"{text}, before {needed}" if needed else text


def _frees(old: Instr, new: Instr) -> str:
    """What a compute frees, or keeps, that it did not before."""
    before, after = ({v[0] for v in ins.frees} for ins in (old, new))
    more, less = (", ".join(sorted(kinds)) for kinds in (after - before, before - after))
    found = [f"frees {more} too"] * bool(more) + [f"keeps {less}"] * bool(less)
    return ", ".join(found) if new.op in COMPUTE else ""


def _together(steps: Sequence[_Step]) -> tuple[str, int, int, Instr]:
    """Their places in the model, those of equal micro-batches once; how many; bytes; the first."""
    batches = [
        (mb, [step.place for step in some]) for mb, some in groupby(steps, lambda step: step.mb)
    ]
    found = []
    for places, some in groupby(batches, lambda batch: batch[1]):
        numbers = [mb for mb, _ in some]
        text = _inline(fold(list(map(Line, places)), worth=1))
        if numbers[0] >= 0:
            text += f", mb {numbers[0]}" + f" … {numbers[-1]}" * (len(numbers) > 1)
        found.append(text)
    return "; ".join(found), len(steps), sum(step.bytes for step in steps), steps[0].ins


def _inline(items: Sequence[Item]) -> str:
    """Places on one line: "embedding, blocks.0 … blocks.3 (× 4 blocks), head"."""
    found = []
    for item in items:
        if isinstance(item, Fold):
            end = item.repeated(item.count - 1)[-1]
            found.append(f"{_inline(item.body)} … {_inline([end])} (× {item.count} {item.what})")
        else:
            found.append(item.text)
    return ", ".join(found)
