"""The difference of two programs: what one does that the other does not, folded.

    before = pl.program(model, pl.Plan(dp=4, zero_stage=2))
    before.diff(pl.program(model, pl.Plan(dp=4, zero_stage=3)))

    + ALL_GATHER  shard → w over dp, before FORWARD  6 times, 3.34 MB  embedding, blocks.0 … head

Instructions are equal if their printed lines are; an instruction has moved only if its order among
the common ones has changed. Instructions that are added, left out or moved, or that free other
values than before, are grouped by what they do and which compute they are for. So all blocks and
micro-batches for which the same happens share a line. Waits follow from the rest and are left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from itertools import count, groupby
from typing import Any, NamedTuple

from paralab.interpret.folding import Fold, Item, Line, fold
from paralab.programs.instructions import COLLECTIVES, COMPUTE, NORM, WAIT, Instr, sums_shared
from paralab.view.theme import in_bytes

SIGNS = {"+": "added", "-": "removed", "↕": "moved", "~": "keeps or frees other values"}


class Change(NamedTuple):
    """One line of a difference.

    sign   "+", "-", "↕" or "~"
    op     the operation of the instructions
    does   what each of them does: "w over dp, before FORWARD"
    of     their places in the model: "embedding, blocks.0 … blocks.3 (× 4 blocks), head"
    count  how many they are; ``bytes``: the payload of their calls together
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
        return times + (f", {in_bytes(self.bytes)}" if self.bytes else "")


class _Step(NamedTuple):
    """An instruction, and what a difference says about it.

    after  how many instructions of compute come before it
    does   what it does, and for which compute
    place  its place in the model; ``mb``: its micro-batch, or -1 if the plan has only one
    bytes  the payload of its call
    """

    ins: Instr
    after: int
    does: str
    place: str
    mb: int
    bytes: int


class Difference:
    """The difference from program ``before`` to program ``after``; printed, it shows itself.

    changes  a `Change` per line; ``same``: how many instructions both have
    """

    def __init__(self, before: Any, after: Any) -> None:
        self.before, self.after = before, after
        old, new = _steps(before), _steps(after)
        both, first = [key for key in new if key in old], [key for key in old if key in new]
        blocks = SequenceMatcher(None, first, both, autojunk=False).get_matching_blocks()
        in_order = {key for at, _, count in blocks for key in first[at : at + count]}
        self.same = len(both)
        changes = [("-", step.does, step) for key, step in old.items() if key not in new]
        changes += [("+", step.does, step) for key, step in new.items() if key not in old]
        changes += [("↕", new[key].does, new[key]) for key in both if key not in in_order]
        changes += [("~", _frees(old[key].ins, new[key].ins), new[key]) for key in both]
        alike: dict[tuple[str, str, str], list[_Step]] = defaultdict(list)
        for sign, does, step in changes:
            if does or sign != "~":
                alike[sign, step.ins.op, does].append(step)
        order = sorted(alike, key=lambda key: (alike[key][0].after, list(SIGNS).index(key[0])))
        self.changes = [Change(*key, *_together(alike[key])) for key in order]

    @property
    def nothing(self) -> str:
        """What to say if there are no changes: a pass of one's own may have moved only WAITs."""
        old, new = ([p.names.instruction(i) for _, i in p] for p in (self.before, self.after))
        return "no difference" + " but where ranks wait" * (old != new)

    @property
    def titles(self) -> list[str]:
        """Which programs they are, and how many instructions are the same."""
        return [
            f"from {self.before.title}",
            f"to   {self.after.title}; in both, without WAITs: {self.same}",
        ]

    def __repr__(self) -> str:
        rows = [(f"{c.sign} {c.op}", c.does, c.amount, c.of) for c in self.changes]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join(self.titles + (lines or [self.nothing]))

    def _repr_html_(self) -> str:
        from paralab.view.program_table import difference_table

        return difference_table(self, SIGNS)


def _steps(program: Any) -> dict[tuple, _Step]:
    """{(op, printed line, how often that line has come): step} of the instructions. An instruction
    is for the compute whose result it reads, else for the one that reads what it writes.
    """
    several = program.plan.microbatches > 1
    needed_by: dict[int, str] = {}
    reader: dict[Any, str] = {}
    for position, ins in reversed(list(program)):
        needed_by[position] = next((reader[v] for v in ins.writes if v in reader), "")
        if ins.op in COMPUTE:
            reader |= dict.fromkeys(ins.reads, ins.op)
    steps: dict[tuple, _Step] = {}
    times: dict[tuple, Iterator[int]] = defaultdict(count)
    maker: dict[Any, str] = {}
    after = 0
    for position, ins in program:
        if ins.op in COMPUTE:
            after += 1
            maker |= dict.fromkeys(ins.writes, ins.op)
        if ins.op != WAIT:
            made_by = next((maker[v] for v in ins.reads if v in maker), "")
            line = ins.op, program.names.what(ins)
            does, place = _does(ins, made_by, needed_by[position]), program.names.about(ins)
            if ins.op == NORM or sums_shared(ins):
                place = program.names.values(ins.reads).partition(" ")[2]
            mb, size = ins.mb if several else -1, program.bytes_of(ins)
            steps[*line, next(times[line])] = _Step(ins, after, does, place, mb, size)
    return steps


def _does(ins: Instr, made: str, needed: str) -> str:
    """ "shard → w over dp, before FORWARD"; "" for compute, whose op says it."""
    if ins.op in COMPUTE:
        return ""
    kinds = dict.fromkeys(values[0][0] for values in (ins.reads, ins.writes) if values)
    kinds.pop("sent", None)
    text = " → ".join(kinds) + f" over {ins.lane}" * (ins.op in COLLECTIVES)
    if made:
        return f"{text}, after {made}"
    return f"{text}, before {needed}" if needed else text


def _frees(old: Instr, new: Instr) -> str:
    """The kinds of values that a compute frees, or keeps, unlike before; as text."""
    before, after = ({v[0] for v in ins.frees} for ins in (old, new))
    more, less = (", ".join(sorted(kinds)) for kinds in (after - before, before - after))
    texts = [f"also frees {more}"] * bool(more) + [f"keeps {less}"] * bool(less)
    return ", ".join(texts) if new.op in COMPUTE else ""


def _together(steps: Sequence[_Step]) -> tuple[str, int, int, Instr]:
    """(places in the model, once for equal micro-batches; how many steps; bytes; the first)."""
    batches = [
        (mb, [step.place for step in same]) for mb, same in groupby(steps, lambda step: step.mb)
    ]
    texts = []
    for places, same in groupby(batches, lambda batch: batch[1]):
        numbers = [mb for mb, _ in same]
        text = _inline(fold(list(map(Line, places)), worth=1))
        if numbers[0] >= 0:
            text += f", mb {numbers[0]}" + f" … {numbers[-1]}" * (len(numbers) > 1)
        texts.append(text)
    return "; ".join(texts), len(steps), sum(step.bytes for step in steps), steps[0].ins


def _inline(items: Sequence[Item]) -> str:
    """Places on one line: "embedding, blocks.0 … blocks.3 (× 4 blocks), head"."""
    texts = []
    for item in items:
        if isinstance(item, Fold):
            end = _inline(item.last[-1:])
            texts.append(f"{_inline(item.body)} … {end} (× {item.count} {item.what})")
        else:
            texts.append(item.text)
    return ", ".join(texts)
