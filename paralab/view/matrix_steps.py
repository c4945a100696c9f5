"""Y = X W step by step: what goes where, and what each rank adds; under "2d", "2.5d" and "3d".

"2d" and "2.5d" are SUMMA (van de Geijn & Watts 1997), q steps: column l of X's blocks goes along
the rows, row l of W's along the columns, and every rank adds one product to its block of Y. "3d"
(Agarwal+ 1995; Bian+ 2021, arXiv:2105.14450) brings together X along one side of the cube and W
along another, multiplies once, and sums Y along the third. The same calls as in
parallel/tensor_2d.py and tensor_3d.py; blocks and colours as in matrix_blocks.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from paralab.checks import illegal, whole
from paralab.parallel.layouts import coordinates
from paralab.spec import Plan
from paralab.view import theme
from paralab.view.matrix_blocks import (
    MODE_NAME,
    NAMES,
    PITCH,
    Cell,
    check,
    drawn,
    lie,
    picture,
    splits,
    table,
)

if TYPE_CHECKING:
    from paralab.view.chart import Chart

SIDES = ("tokens × in", "in × out", "tokens × out")
LOW = "₀₁₂₃₄₅₆₇₈₉"
MOST_TERMS = 3  # that are written out in a block of Y


class Step(NamedTuple):
    """title: what happens; brief: on the slider; arrows: from, to."""

    title: str
    brief: str
    cells: list[Cell]
    arrows: Sequence = ()


def multiplication(plan: Plan, step: int | None = None) -> Chart:
    """One product Y = X W of a linear layer under "2d", "2.5d" or "3d", step by step.

    step  only this step, from 0: a plain picture. Default: all of them, with a slider and a button,
          and the first one on show where nothing moves

    ``table`` has the blocks of every step drawn: column step, then those of `view.blocks`. Raises
    ValueError on "1d", which has one product and one collective, and on a step that there is not.
    """
    check(plan)
    if plan.tp_mode == "1d":
        raise illegal(
            "tp_mode",
            "1d",
            "a product of 1D is one product, with nothing on the way",
            "'2d', '2.5d', '3d'; view.blocks(plan) shows 1D",
        )
    steps = cube(plan) if plan.tp_mode == "3d" else summa(plan)
    if step is not None:
        step = whole("step", step, at_least=0, at_most=len(steps) - 1)
    below = _below(plan)
    fig = picture(
        steps[step or 0].cells,
        steps[step or 0].title,
        below,
        sides=SIDES,
        arrows=steps[step or 0].arrows,
    )
    shown = list(enumerate(steps)) if step is None else [(step, steps[step])]
    tables = []
    for number, one in shown:
        rows = table(one.cells)
        rows.insert(0, "step", number)
        tables.append(rows)
    if step is None:
        _animate(fig, steps, below)
    import pandas as pd

    said = f"{len(steps)} steps" if step is None else f"step {step} of {len(steps)}"
    return fig.explained(
        f"Y = X W under {MODE_NAME[plan.tp_mode]} on {plan.tp} ranks, {said}",
        pd.concat(tables, ignore_index=True),
    )


def _below(plan: Plan) -> str:
    q, depth = plan.tp_grid
    if plan.tp_mode == "3d":
        return f"a cube of {q} × {q} × {q} ranks · colour: the rank that holds a block"
    grids = f"{depth} grids of " * (depth > 1)
    return (
        f"SUMMA on {grids}{q} × {q} ranks · colour: the rank that holds a block; arrows: broadcasts"
    )


# ---- the steps ----------------------------------------------------------------------------------
def summa(plan: Plan) -> list[Step]:
    """q steps of broadcasts along rows and columns."""
    q, depth = plan.tp_grid
    lies = {name: lie(plan, name, cut) for name, cut in splits(plan, "up").items()}
    steps = []
    for now in range(q):
        cells, arrows = [], []
        for name, axis in (("X", "j"), ("W", "i")):
            for cell in lies[name]:
                at = coordinates(plan, cell.ranks[0])
                sent = at[axis] == now
                row = at["i"]
                cells.append(
                    cell._replace(
                        label=_block(name, row, at["j"], at.get("z", 0), depth), strong=sent
                    )
                )
                if sent:
                    arrows += _along(cell, axis, q, depth if name == "X" else 1)
        for cell in lies["Y"]:
            at = coordinates(plan, cell.ranks[0])
            terms = [
                f"{_block('X', at['i'], k, at.get('z', 0), depth)}{_block('W', k, at['j'])}"
                for k in range(now + 1)
            ]
            terms[-1] = f"<b>{terms[-1]}</b>"
            said = (
                "<br>+ ".join(terms)
                if len(terms) <= MOST_TERMS and q <= MOST_TERMS
                else f"{now + 1} of {q}"
            )
            cells.append(cell._replace(label=said))
        steps.append(
            Step(
                f"Step {now + 1} of {q}: column {now} of X goes along the rows, row {now} of W "
                "along the columns, each rank adds a product",
                f"{now + 1}",
                cells,
                arrows,
            )
        )
    return steps


def _block(name: str, i: int, j: int, z: int = 0, depth: int = 1) -> str:
    """ "X₀₁", with the grid's number as a mark where there are several."""
    return f"{name}{LOW[i]}{LOW[j]}" + "′" * (z if depth > 1 and name == "X" else 0)


def _along(cell: Cell, axis: str, q: int, depth: int) -> list[tuple]:
    """Arrows from a block to both ends of its row (axis j) or column (axis i)."""
    start, first, side = NAMES.index(cell.matrix) * PITCH, 0.5 / q, 0.26 / q
    x, y = cell.centre
    found = []
    for end in (first, 1 - first):
        to = (start + end, y + side / depth) if axis == "j" else (x + side, end)
        home = (x, y + side / depth) if axis == "j" else (x + side, y)
        if abs(to[0] - home[0]) + abs(to[1] - home[1]) > 1e-6:
            found.append((home, to))
    return found


def cube(plan: Plan) -> list[Step]:
    """As it lies, X together, W together, the product, the sum."""
    q, _ = plan.tp_grid
    cuts = splits(plan, "up")
    lies = {name: lie(plan, name, cut) for name, cut in cuts.items()}
    (x_rows, x_columns), (w_rows, w_columns) = cuts["X"], cuts["W"]
    y_rows, y_columns = cuts["Y"]
    together = {
        "X": lie(plan, "X", (x_rows[:1], x_columns)),
        "W": lie(plan, "W", (w_rows, w_columns[:1])),
        "Y": [
            cell._replace(label="partial sums") for cell in lie(plan, "Y", (y_rows[:1], y_columns))
        ],
    }
    x_along, w_along, y_along = x_rows[1], w_columns[1], y_rows[1]

    def shown(where: dict[str, list[Cell]], strong: str) -> list[Cell]:
        return [
            cell._replace(strong=cell.matrix in strong)
            for name in NAMES
            for cell in where.get(name, [])
        ]

    x_there, w_there = {**lies, "X": together["X"]}, {**together}
    lies_xw = {name: lies[name] for name in ("X", "W")}
    count = 5
    return [
        Step(
            f"Step 1 of {count}: every rank has 1/{q**3} of X and 1/{q**3} of W",
            "start",
            shown(lies_xw, "XW"),
        ),
        Step(
            f"Step 2 of {count}: X is gathered along {x_along}, {q} ranks then hold the same block",
            "gather X",
            shown({"X": x_there["X"], "W": lies["W"]}, "X"),
        ),
        Step(
            f"Step 3 of {count}: W is gathered along {w_along}",
            "gather W",
            shown({"X": together["X"], "W": w_there["W"]}, "W"),
        ),
        Step(
            f"Step 4 of {count}: each rank multiplies once; a block of Y is the sum of {q} such",
            "multiply",
            shown(together, "XWY"),
        ),
        Step(
            f"Step 5 of {count}: Y is summed along {y_along} and dealt out, 1/{q**3} for each",
            "sum Y",
            shown(lies, "Y"),
        ),
    ]


# ---- the slider ---------------------------------------------------------------------------------
def _animate(fig: Chart, steps: Sequence[Step], below: str) -> None:
    """Frames, a slider that goes to each, and a button that plays them."""
    import plotly.graph_objects as go

    title = fig.layout.title.text
    frames = []
    for number, step in enumerate(steps):
        shapes, words = drawn(step.cells, SIDES, step.arrows)
        text = title.replace(theme.text(steps[0].title), theme.text(step.title))
        frames.append(
            go.Frame(
                name=str(number),
                layout={
                    "shapes": shapes,
                    "annotations": words,
                    "title": {"text": text},
                },
            )
        )
    fig.frames = frames
    at_once = {
        "mode": "immediate",
        "frame": {"duration": 0, "redraw": True},
        "transition": {"duration": 0},
    }
    slow = {**at_once, "frame": {"duration": 1500, "redraw": True}, "fromcurrent": True}
    look = theme.look()
    fig.update_layout(
        height=470,
        margin={"b": 86},
        sliders=[
            {
                "x": 0.12,
                "len": 0.88,
                "y": 0,
                "yanchor": "top",
                "pad": {"t": 12},
                "active": 0,
                "currentvalue": {"visible": False},
                "bgcolor": look.grid,
                "bordercolor": look.grid,
                "steps": [
                    {"label": step.brief, "method": "animate", "args": [[str(n)], at_once]}
                    for n, step in enumerate(steps)
                ],
            }
        ],
        updatemenus=[
            {
                "type": "buttons",
                "x": 0,
                "xanchor": "left",
                "y": 0,
                "yanchor": "top",
                "pad": {"t": 20},
                "showactive": False,
                "bgcolor": look.paper,
                "buttons": [{"label": "▶ play", "method": "animate", "args": [None, slow]}],
            }
        ],
    )
