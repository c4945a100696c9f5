"""Y = X W step by step under "2d", "2.5d" and "3d": which blocks are sent, what each rank adds.

"2d" and "2.5d" are SUMMA (van de Geijn & Watts 1997) in q steps: in step l, column l of X's blocks
is broadcast along the rows, row l of W's blocks along the columns, and every rank adds one product
to its block of Y. "3d" (Agarwal+ 1995; Bian+ 2021, arXiv:2105.14450) gathers X along one side of
the cube and W along another, multiplies once, and sums Y along the third. The calls are those of
model/grid_ops.py; blocks and colours are those of matrix_blocks.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from paralab.checks import illegal, whole
from paralab.parallel.layouts import coordinates
from paralab.spec import Plan
from paralab.view import theme
from paralab.view.chart import Chart
from paralab.view.matrix_blocks import (
    COLUMNS,
    Block,
    check,
    held,
    picture,
    splits,
    table,
)

LOW = "₀₁"  # a grid of at most eight ranks is 2 × 2


class Step(NamedTuple):
    """One step. title: what happens in it; brief: its label on the slider; arrows: (from, to)."""

    title: str
    brief: str
    cells: list[Block]
    arrows: Sequence = ()


def multiplication(plan: Plan, step: int | None = None) -> Chart:
    """One product Y = X W of a linear layer under "2d", "2.5d" or "3d", step by step.

    step  only this step, from 0, as a plain picture. Default: all steps, with a slider and a
          button; a static view shows the first

    ``table`` has the blocks of every step that is drawn: step, and the columns of `view.blocks`.
    Raises ValueError on "1d", which has one product and one collective, and on a step out of range.
    """
    check(plan)
    if plan.tp_mode == "1d":
        why = "1D has one product and one collective, so there are no steps"
        raise illegal("tp_mode", "1d", why, "'2d', '2.5d', '3d'; view.blocks(plan) shows 1D")
    steps = cube(plan) if plan.tp_mode == "3d" else summa(plan)
    if step is not None:
        step = whole("step", step, at_least=0, at_most=len(steps) - 1)
    q, depth = plan.tp_grid
    grids = f"{depth} grids of " * (depth > 1)
    what = f"SUMMA on {grids}{q} × {q} ranks · arrows: broadcasts"
    if plan.tp_mode == "3d":
        what = f"a cube of {q} × {q} × {q} ranks"
    below = f"{what} · colour: the rank that holds a block"
    pictures = [picture(s.cells, s.title, below, s.arrows) for s in steps]
    fig, shown = pictures[step or 0], range(len(steps)) if step is None else (step,)
    if step is None:
        _animate(fig, steps, pictures)
    return fig.tabled(
        (f"step {COLUMNS}", [(n, *row) for n in shown for row in table(steps[n].cells)])
    )


# ---- the steps ----------------------------------------------------------------------------------
def summa(plan: Plan) -> list[Step]:
    """SUMMA's q steps, each with its broadcasts along rows and columns."""
    q, depth = plan.tp_grid
    parts = {name: held(plan, name, cut) for name, cut in splits(plan, "up").items()}
    steps = []
    for step in range(q):
        cells, arrows = [], []
        for name, axis in (("X", "j"), ("W", "i")):
            for cell in parts[name]:
                place = coordinates(plan, cell.ranks[0])
                label = _block(name, place["i"], place["j"], place.get("z", 0))
                sent = place[axis] == step
                cells.append(cell._replace(label=label, strong=sent))
                if sent:
                    arrows += _arrows_along(cell, axis, q, depth if name == "X" else 1)
        for cell in parts["Y"]:
            place = coordinates(plan, cell.ranks[0])
            i, j, z = place["i"], place["j"], place.get("z", 0)
            terms = [f"{_block('X', i, k, z)}{_block('W', k, j)}" for k in range(step + 1)]
            text = "<br>+ ".join([*terms[:-1], f"<b>{terms[-1]}</b>"])
            cells.append(cell._replace(label=text))
        title = f"Step {step + 1} of {q}: column {step} of X goes along the rows, row {step} of W "
        title += "along the columns; each rank adds a product"
        steps.append(Step(title, f"{step + 1}", cells, arrows))
    return steps


def _block(name: str, i: int, j: int, z: int = 0) -> str:
    """ "X₀₁"; a block of X with as many primes as its grid's number, of several, has."""
    return f"{name}{LOW[i]}{LOW[j]}" + "′" * (z if name == "X" else 0)


def _arrows_along(cell: Block, axis: str, q: int, depth: int) -> list[tuple]:
    """Arrows from a block to both ends of its row (axis j) or column (axis i)."""
    (x, y), first, side = cell.centre, 0.5 / q, 0.26 / q
    home = (x, y + side / depth) if axis == "j" else (x + side, y)
    ends = (first, 1 - first)
    targets = [(cell.left + end, home[1]) if axis == "j" else (home[0], end) for end in ends]
    return [(home, to) for to in targets if math.dist(home, to) > 1e-6]


def cube(plan: Plan) -> list[Step]:
    """The steps of 3D: the sharded start, X gathered, W gathered, the product, the sum of Y."""
    q, _ = plan.tp_grid
    cuts = splits(plan, "up")
    x_part, w_part, y_part = (held(plan, name, cut) for name, cut in cuts.items())
    (x_rows, x_columns), (w_rows, w_columns), (y_rows, y_columns) = cuts.values()
    x = held(plan, "X", (x_rows[:1], x_columns))
    w = held(plan, "W", (w_rows, w_columns[:1]))
    sums = held(plan, "Y", (y_rows[:1], y_columns))
    sums = [cell._replace(label="partial sums") for cell in sums]
    part = f"1/{q**3}"
    gathered = f"X is gathered along {x_rows[1]}; {q} ranks then hold the same block"
    product = f"each rank multiplies once; a block of Y is the sum of {q} such products"
    scattered = f"Y is summed along {y_rows[1]} and scattered: {part} for each rank"
    stages = [  # title; label on the slider; blocks of X, W, Y; matrices in full colour
        (f"every rank has {part} of X and {part} of W", "start", x_part + w_part, "XW"),
        (gathered, "gather X", x + w_part, "X"),
        (f"W is gathered along {w_columns[1]}", "gather W", x + w, "W"),
        (product, "multiply", x + w + sums, "XWY"),
        (scattered, "sum Y", x_part + w_part + y_part, "Y"),
    ]
    steps = []
    for number, (title, brief, cells, strong) in enumerate(stages, 1):
        cells = [cell._replace(strong=cell.matrix in strong) for cell in cells]
        steps.append(Step(f"Step {number} of {len(stages)}: {title}", brief, cells))
    return steps


# ---- the slider ---------------------------------------------------------------------------------
def _animate(fig: Chart, steps: Sequence[Step], pictures: Sequence[Chart]) -> None:
    """Frames, a slider that goes to each, and a button that plays them."""
    fig.frames = [
        {
            "name": str(number),
            "layout": {name: picture.layout[name] for name in ("shapes", "annotations")}
            | {"title": {"text": picture.layout.title.text}},
        }
        for number, picture in enumerate(pictures)
    ]
    top = max(picture.layout.margin.t for picture in pictures)  # some titles have a line more
    now, wait = ({"duration": duration, "redraw": True} for duration in (0, 1500))
    at_once = {"mode": "immediate", "transition": {"duration": 0}, "frame": now}
    slow = {**at_once, "frame": wait, "fromcurrent": True}
    look, low = theme.look(), {"y": 0, "yanchor": "top"}
    choices = [
        {"label": step.brief, "method": "animate", "args": [[str(n)], at_once]}
        for n, step in enumerate(steps)
    ]
    slider = {**low, "x": 0.12, "len": 0.85, "pad": {"t": 12}, "active": 0, "steps": choices}
    slider |= {"currentvalue": {"visible": False}, "bgcolor": look.grid, "bordercolor": look.grid}
    play = {"label": "▶ play", "method": "animate", "args": [None, slow]}
    button = {**low, "type": "buttons", "x": 0, "xanchor": "left", "pad": {"t": 20}}
    button |= {"showactive": False, "bgcolor": look.paper, "buttons": [play]}
    margin = {"t": top, "b": 86}
    fig.update_layout(height=394 + top, margin=margin, sliders=[slider], updatemenus=[button])
