"""ZeRO as schematics, drawn from the compiled programs of its stages.

zero_shards   what every rank keeps under ZeRO 0-3
zero_unit     the life of a unit under ZeRO-3: sharded, gathered, computed, freed, reduced
"""

from __future__ import annotations

from typing import Any

from paralab.checks import illegal, whole
from paralab.programs.compile import compiled
from paralab.programs.instructions import COMPUTE, KEEP, WAIT
from paralab.spec import ModelSpec, Plan
from paralab.view import naming, theme
from paralab.view.chart import Chart, figure
from paralab.view.marks import boxes as mark
from paralab.view.marks import margin, note
from paralab.view.marks.cells import Cell, rectangles

STATES = ("parameters", "gradients", "optimizer")
MOST_RANKS = 16
BARE = {"visible": False, "fixedrange": True}
GAP = 0.06  # of a cell
KINDS = {  # of a unit's values: what they are called, in the order they are drawn
    "shard": "own shard of the parameters",
    "w": "gathered parameters",
    "grad": "gradients of the whole unit",
    "gshard": "own shard of the gradients",
    "opt": "own shard of the optimizer states",
}


def zero_shards(model: ModelSpec, dp: int = 4) -> Chart:
    """Which part of parameters, gradients and optimizer states every one of ``dp`` ranks keeps
    between two micro-batches, under ZeRO 0 to 3 (Rajbhandari+ 2020, arXiv:1910.02054, figure 1).

    ``table``: stage, rank, category, bytes. Raises ValueError on fewer than 2 ranks or too many.
    """
    whole("dp", dp, at_least=2, at_most=MOST_RANKS)
    kept = {
        stage: _kept(model, Plan(dp=dp, zero_stage=stage, microbatches=2)) for stage in range(4)
    }
    names = ["data parallelism", "ZeRO-1", "ZeRO-2", "ZeRO-3"]
    cells, notes, rows = [], [], []
    for stage, held in kept.items():
        notes.append(note(f"<b>{names[stage]}</b>", -0.1, stage + 0.5, xanchor="right"))
        total = sum(held.values())
        notes.append(note(theme.scaled(total, "B"), dp + 0.1, stage + 0.5, xanchor="left"))
        for rank in range(dp):
            for i, category in enumerate(STATES):
                parts = round(kept[0][category] / held[category])
                x0, high = rank + GAP, 0.24
                y0, wide = stage + 0.1 + i * 0.27, 1 - 2 * GAP
                at = (
                    (x0, x0 + wide)
                    if parts == 1
                    else (x0 + wide * rank / parts, x0 + wide * (rank + 1) / parts)
                )
                said = f"rank {rank}, {names[stage]}<br>{category}: "
                said += "all of them" if parts == 1 else f"shard {rank} of {parts}"
                said += f", {theme.scaled(held[category], 'B')}"
                cells.append(Cell((x0, x0 + wide), (y0, y0 + high), theme.look().wait))
                fill = theme.category_colour(category)
                cells.append(Cell(at, (y0, y0 + high), fill, said=said))
                rows.append((stage, rank, category, held[category]))
    notes += [note(f"rank {rank}", rank + 0.5, -0.12) for rank in range(dp)]
    notes.append(note("per rank", dp + 0.1, -0.12, xanchor="left", ink=theme.look().faint))
    share = sum(kept[3].values()) / sum(kept[0].values())
    fig = figure(
        f"ZeRO-3 keeps {theme.percent(share)} of the model states on each of {dp} ranks",
        f"{model.num_params:,} parameters, between two micro-batches · grey: on other ranks",
        height=430,
        margin={"l": 10, "r": 10, "b": 10},
        xaxis={**BARE, "range": [-1.35, dp + 0.75]},
        yaxis={**BARE, "range": [4.0, -0.3]},
    )
    traces, words, shapes = rectangles(cells)
    fig.draw([*_keys(STATES), *traces], [*notes, *words], shapes)
    return fig.explained(
        f"ZeRO 0 to 3 on {dp} ranks: the states of each", ("stage rank category bytes", rows)
    )


def _kept(model: ModelSpec, plan: Plan) -> dict[str, int]:
    """{category: bytes} of the states of a rank: what lasts, and the gradients in which the two
    micro-batches are added up.
    """
    program = compiled(model, plan)
    written: dict[tuple, set[int]] = {}
    freed: set[tuple] = set()  # after the first: it is written anew for the second
    for ins in program.codes[0]:
        for value in ins.writes:
            written.setdefault(value, set()).add(ins.mb)
        freed |= set(ins.frees) if ins.mb == 0 else set()
    both = {value for value, mbs in written.items() if {0, 1} <= mbs} - freed
    found = dict.fromkeys(STATES, 0)
    for value in both | set(program.lasting(0)):
        size = program.size(value, 0)
        if size.category in found:
            found[size.category] += size.bytes
    return found


def _keys(categories: Any) -> list[dict[str, Any]]:
    """Entries of the legend."""
    return [
        mark.boxes([], mark.look(name, theme.category_colour(name))) | {"x": [None], "y": [None]}
        for name in categories
    ]


def zero_unit(model: ModelSpec, plan: Plan, unit: int = 1) -> Chart:
    """The life of one of ZeRO-3's units in a step: when its parameters are gathered and freed, when
    its gradients are reduced, as the compiled program has it, instruction by instruction.

    unit  its number: 0 is the embedding, then block after block, then the head

    ``table``: value, from, until (instructions), bytes. Raises ValueError on another stage, and on
    a unit that there is not.
    """
    if not isinstance(plan, Plan) or plan.zero_stage != 3 or plan.pp * plan.tp > 1:
        raise illegal(
            "plan", plan, "units are gathered under ZeRO-3", "pl.Plan(dp=4, zero_stage=3)"
        )
    program = compiled(model, plan)
    code, units = program.codes[0], program.units[0]
    whole("unit", unit, at_least=0, at_most=len(units) - 1)
    lives = _lives(code, unit, len(code))
    rows = [
        (KINDS[kind], start, end, program.size((kind, unit, version), 0).bytes)
        for kind, version, start, end in lives
    ]
    lanes_of = {"what is done": 0.0} | {
        n: 1.0 + i for i, n in enumerate(dict.fromkeys(r[0] for r in rows))
    }
    traces = [
        _row(program, [r for r in rows if r[0] == name], name, y)
        for name, y in lanes_of.items()
        if y
    ]
    traces = [*_work(code, unit), *traces]
    held = sum(end - start for name, start, end, _ in rows if name == KINDS["w"]) / len(code)
    sizes = {name: size for name, _, _, size in rows}
    words = [
        margin(theme.scaled(sizes[name], "B"), y) for name, y in lanes_of.items() if name in sizes
    ]
    ticks = [(y, name) for name, y in lanes_of.items()]
    fig = figure(
        f"Unit {unit} is gathered for {theme.percent(held)} of the step's instructions; "
        "its shards stay",
        f"{naming.plan_name(plan)} · one rank, one step · not a clock: instructions in order",
        height=150 + 44 * len(lanes_of),
        barmode="overlay",
        margin={"r": 80},
        xaxis=mark.time_axis("instruction", len(code)),
        yaxis=mark.rows_axis(ticks, len(lanes_of) - 0.4, -0.6),
    )
    return fig.draw(traces, words).explained(
        f"life of unit {unit} under {naming.plan_name(plan)}", ("value from until bytes", rows)
    )


def _lives(code: Any, unit: int, end: int) -> list[tuple[str, int, int, int]]:
    """(kind, version, from, until) of the values of a unit; until its last use where none frees."""
    born: dict[tuple, int] = {}
    found = []
    for at, ins in enumerate(code):
        for value in (*ins.reads, *ins.writes):
            if value[0] in KINDS and value[1] == unit:
                born.setdefault(value, 0 if value in ins.reads else at)
        for value in ins.frees:
            if value in born:
                found.append((value[0], value[2], born.pop(value), at + 1))
    found += [(kind, version, start, end) for (kind, _, version), start in born.items()]
    return sorted(found, key=lambda one: (list(KINDS).index(one[0]), one[2]))


def _row(program: Any, rows: list[tuple], name: str, y: float) -> dict[str, Any]:
    category = "gradients" if "gradients" in name else "parameters"
    category = "optimizer" if "optimizer" in name else category
    category = "buffers" if name == KINDS["w"] else category
    boxes = [
        (start, end - start, y, 0.6, "", f"{name}<br>{size:,} bytes, instructions {start} to {end}")
        for _, start, end, size in rows
    ]
    return mark.boxes(boxes, mark.look(name, theme.category_colour(category)), showlegend=False)


def _work(code: Any, unit: int) -> list[dict[str, Any]]:
    """What is done with a unit, as boxes of one instruction each, in a timeline's colours."""
    from paralab.view.program_table import meaning_of

    found: dict[tuple[str, str], list[tuple]] = {}
    for at, ins in enumerate(code):
        touches = ins.unit == unit or any(v[1:2] == (unit,) for v in (*ins.reads, *ins.writes))
        computes = ins.op in COMPUTE and any(v == ("w", unit, v[2]) for v in ins.reads)
        if ins.op in (WAIT, KEEP) or not (computes or (ins.op not in COMPUTE and touches)):
            continue
        said = f"instruction {at}: {ins.op}"
        found.setdefault(meaning_of(ins), []).append((at, 1, 0.0, 0.8, "", said))
    return [mark.boxes(rows, mark.look(*key)) for key, rows in found.items()]
