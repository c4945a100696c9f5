"""Schematics of ZeRO: the shards of its stages and the life of a unit, from compiled programs."""

from __future__ import annotations

from itertools import product
from typing import Any

from paralab.checks import illegal, whole
from paralab.interpret import quick
from paralab.programs.compile import compiled
from paralab.programs.instructions import COMPUTE, KEEP, WAIT
from paralab.spec import ModelSpec, Plan
from paralab.view import naming, theme
from paralab.view.chart import Chart, figure
from paralab.view.marks import Part, margin, note
from paralab.view.marks import boxes as mark
from paralab.view.marks.cells import Cell
from paralab.view.program_table import meaning_of
from paralab.view.schematics import drawn

STATES = ("parameters", "gradients", "optimizer")
MOST_RANKS = 16
GAP = 0.06  # share of a cell that is left free on each side
HIGH, BETWEEN = 0.74, 0.02  # height of a stage's bars together and of a gap, over that of its row
KINDS = {  # kinds of a unit's values: name, category whose colour it has; in the order drawn
    "shard": ("own shard of the parameters", "parameters"),
    "second": ("second shard of the parameters", "parameters"),
    "w": ("gathered parameters", "buffers"),
    "grad": ("gradients of the whole unit", "gradients"),
    "gshard": ("own shard of the gradients", "gradients"),
    "opt": ("own shard of the optimizer states", "optimizer"),
}


def zero_shards(model: ModelSpec, dp: int = 4) -> Chart:
    """Which part of parameters, gradients and optimizer states each of ``dp`` ranks keeps between
    two micro-batches, under ZeRO 0 to 3 (Rajbhandari+ 2020, arXiv:1910.02054, figure 1).

    ``table``: stage, rank, category, bytes. Raises ValueError on fewer than 2 ranks or too many.
    """
    whole("dp", dp, at_least=2, at_most=MOST_RANKS)
    plans = [Plan(dp=dp, zero_stage=stage, microbatches=2) for stage in range(4)]
    plans[0].validate(model)
    kept = [quick.states(quick.program_of(model, plan, "adamw", 0), 0) for plan in plans]
    faint = theme.look().faint
    cells, rows, notes = [], [], [note("per rank", dp + 0.1, -0.12, anchor="left", ink=faint)]
    all_bytes, top = sum(kept[0].values()), 0.1
    tops: dict[str, tuple[float, float]] = {}  # {category: (where its bar begins, its height)}
    for category, size in kept[0].items():
        tops[category] = top, HIGH * size / all_bytes
        top += tops[category][1] + BETWEEN
    room = max(1.0, dp / 4)  # columns that a margin of one column among four ranks takes here
    notes += [note(f"{'rank ' * (dp <= 8)}{r}", r + 0.5, -0.12) for r in range(dp)]
    for stage, held in enumerate(kept):
        name, total = f"ZeRO-{stage}" if stage else "data parallelism", sum(held.values())
        notes.append(note(f"<b>{name}</b>", -0.1, stage + 0.5, anchor="right"))
        notes.append(note(theme.in_bytes(total), dp + 0.1, stage + 0.5, anchor="left"))
        for rank, (category, size) in product(range(dp), held.items()):
            parts = round(kept[0][category] / size)
            shard = rank if parts > 1 else 0
            x, wide, (begin, high) = rank + GAP, (1 - 2 * GAP) / parts, tops[category]
            y = stage + begin, stage + begin + high
            part = "all of them" if parts == 1 else f"shard {rank} of {parts}"
            text = f"rank {rank}, {name}<br>{category}: {part}, {theme.in_bytes(size)}"
            fill = theme.category_colour(category)
            cells.append(Cell((x, x + wide * parts), y, theme.look().wait))
            x_range = (x + wide * shard, x + wide * (shard + 1))
            cells.append(Cell(x_range, y, fill, hover_text=text))
            rows.append((stage, rank, category, size))
    share = sum(kept[3].values()) / sum(kept[0].values())
    return drawn(
        f"ZeRO-3 keeps {theme.share(share)} of the model states on each of {dp} ranks",
        f"{model.num_params:,} parameters, between two micro-batches · "
        "areas are bytes; grey: held by other ranks",
        cells,
        notes,
        height=430,
        x=(-1.35 * room, dp + 0.75 * room),
        y=(-0.3, 4.0),
        keys=[
            mark.boxes(name, theme.category_colour(name), [], x=[None], y=[None]) for name in STATES
        ],
    ).tabled(("stage rank category bytes", rows))


def zero_unit(model: ModelSpec, plan: Plan, unit: int = 1) -> Chart:
    """The life of one of ZeRO-3's units in a step: when its parameters are gathered and freed, when
    its gradients are reduced, as the compiled program has it, instruction by instruction.

    unit  its number: 0 is the embedding, then come the blocks, then the head

    ``table``: value, from, until (positions of instructions), bytes. Raises ValueError on a plan
    without ZeRO-3 or with pp or tp, and on a unit out of range.
    """
    if not isinstance(plan, Plan) or plan.zero_stage != 3 or plan.pp * plan.tp > 1:
        why = "units are gathered under ZeRO-3"
        raise illegal("plan", plan, why, "pl.Plan(dp=4, zero_stage=3)")
    program = compiled(model, plan)
    code, units = program.codes[0], program.units[0]
    whole("unit", unit, at_least=0, at_most=len(units) - 1)
    rows = [
        (KINDS[value[0]][0], start, end, program.size(value, 0).bytes)
        for value, start, end in _lives(code, unit)
    ]
    fills = {name: theme.category_colour(category) for name, category in KINDS.values()}
    names, words = list(dict.fromkeys(name for name, *_ in rows)), []
    traces = _instructions(code, unit)
    for i, name in enumerate(names):
        boxes = []
        for start, end, size in (row[1:] for row in rows if row[0] == name):
            text = f"{name}<br>{size:,} bytes, instructions {start} to {end - 1}"
            boxes.append((start, end - start, 1.0 + i, 0.6, "", text))
        traces.append(mark.boxes(name, fills[name], boxes, showlegend=False))
        words.append(margin(theme.in_bytes(size), 1.0 + i))
    held = sum(end - start for name, start, end, _ in rows if name == KINDS["w"][0]) / len(code)
    fig = figure(
        f"A rank holds all of {units[unit].part} during {theme.share(held)} of the instructions"
        + ", its own shard during all" * (KINDS["shard"][0] in names),
        f"{naming.plan_name(plan)} · one rank, one step · the axis counts instructions, not time",
        height=194 + 44 * len(names),
        barmode="overlay",
        margin={"r": 80},
        xaxis=mark.time_axis("instruction", len(code)),
        yaxis=mark.rows_axis(list(enumerate(["instructions", *names])), len(names) + 0.6, -0.6),
    )
    return fig.draw(traces, words).tabled(("value from until bytes", rows))


def _lives(code: Any, unit: int) -> list[tuple[tuple, int, int]]:
    """(value, from, until) of a unit's values, as positions in the code. A value that is read
    before it is written lives from the start, one that is never freed until the end.
    """
    born: dict[tuple, int] = {}
    lives = []
    for position, ins in enumerate(code):
        for value in (*ins.reads, *ins.writes):
            if value[0] in KINDS and value[1] == unit:
                born.setdefault(value, 0 if value in ins.reads else position)
        for value in ins.frees:
            if value in born:
                lives.append((value, born.pop(value), position + 1))
    lives += [(value, start, len(code)) for value, start in born.items()]
    return sorted(lives, key=lambda life: (list(KINDS).index(life[0][0]), life[1]))


def _instructions(code: Any, unit: int) -> list[Part]:
    """The instructions that use a unit, a box for each, in the colours of program tables."""
    boxes_of: dict[tuple[str, str], list[tuple]] = {}
    for at, ins in enumerate(code):
        uses = ins.unit == unit or any(v[1:2] == (unit,) for v in (*ins.reads, *ins.writes))
        if ins.op in COMPUTE:
            uses = any(v[:2] == ("w", unit) for v in ins.reads)
        if uses and ins.op not in (WAIT, KEEP):
            text = f"instruction {at}: {ins.op}"
            boxes_of.setdefault(meaning_of(ins), []).append((at, 1, 0.0, 0.8, "", text))
    return [mark.boxes(*key, rows) for key, rows in boxes_of.items()]
