"""Y = X W step by step: what goes where, and what each rank adds; under "2d", "2.5d" and "3d".

"2d" and "2.5d" are SUMMA (van de Geijn & Watts 1997), q steps: column l of X's blocks goes along
the rows, row l of W's along the columns, and every rank adds one product to its block of Y. "3d"
(Agarwal+ 1995; Bian+ 2021, arXiv:2105.14450) gathers X along one side of the cube and W along
another, multiplies once, and sums Y along the third. The same calls as in
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
    COLUMNS,
    MODE_NAME,
    NAMES,
    PITCH,
    Block,
    check,
    held,
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
    cells: list[Block]
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
    pictures = [picture(s.cells, s.title, _below(plan), SIDES, s.arrows) for s in steps]
    fig, said = pictures[step or 0], f"{len(steps)} steps"
    if step is None:
        _animate(fig, steps, pictures)
    else:
        said = f"step {step} of {len(steps)}"
    shown = range(len(steps)) if step is None else (step,)
    return fig.explained(
        f"Y = X W under {MODE_NAME[plan.tp_mode]} on {plan.tp} ranks, {said}",
        (f"step {COLUMNS}", [(n, *row) for n in shown for row in table(steps[n].cells)]),
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
    parts = {name: held(plan, name, cut) for name, cut in splits(plan, "up").items()}
    steps = []
    for now in range(q):
        cells, arrows = [], []
        for name, axis in (("X", "j"), ("W", "i")):
            for cell in parts[name]:
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
        for cell in parts["Y"]:
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


def _along(cell: Block, axis: str, q: int, depth: int) -> list[tuple]:
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
    """As it parts, X together, W together, the product, the sum."""
    q, _ = plan.tp_grid
    cuts = splits(plan, "up")
    parts = {name: held(plan, name, cut) for name, cut in cuts.items()}
    (x_rows, x_columns), (w_rows, w_columns) = cuts["X"], cuts["W"]
    y_rows, y_columns = cuts["Y"]
    together = {
        "X": held(plan, "X", (x_rows[:1], x_columns)),
        "W": held(plan, "W", (w_rows, w_columns[:1])),
        "Y": [
            cell._replace(label="partial sums") for cell in held(plan, "Y", (y_rows[:1], y_columns))
        ],
    }
    x_along, w_along, y_along = x_rows[1], w_columns[1], y_rows[1]

    def shown(where: dict[str, list[Block]], strong: str) -> list[Block]:
        return [
            cell._replace(strong=cell.matrix in strong)
            for name in NAMES
            for cell in where.get(name, [])
        ]

    x_there, w_there = {**parts, "X": together["X"]}, {**together}
    parts_xw = {name: parts[name] for name in ("X", "W")}
    count = 5
    return [
        Step(
            f"Step 1 of {count}: every rank has 1/{q**3} of X and 1/{q**3} of W",
            "start",
            shown(parts_xw, "XW"),
        ),
        Step(
            f"Step 2 of {count}: X is gathered along {x_along}, {q} ranks then hold the same block",
            "gather X",
            shown({"X": x_there["X"], "W": parts["W"]}, "X"),
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
            f"Step 5 of {count}: Y is summed along {y_along} and scattered, 1/{q**3} for each rank",
            "sum Y",
            shown(parts, "Y"),
        ),
    ]


# ---- the slider ---------------------------------------------------------------------------------
def _animate(fig: Chart, steps: Sequence[Step], pictures: Sequence[Chart]) -> None:
    """Frames, a slider that goes to each, and a button that plays them."""
    fig.frames = [
        {
            "name": str(number),
            "layout": {
                "shapes": one.layout.shapes,
                "annotations": one.layout.annotations,
                "title": {"text": one.layout.title.text},
            },
        }
        for number, one in enumerate(pictures)
    ]
    top = max(one.layout.margin.t for one in pictures)  # some titles have a line more
    at_once = {
        "mode": "immediate",
        "frame": {"duration": 0, "redraw": True},
        "transition": {"duration": 0},
    }
    slow = {**at_once, "frame": {"duration": 1500, "redraw": True}, "fromcurrent": True}
    look, low = theme.look(), {"y": 0, "yanchor": "top"}
    choices = [
        {"label": step.brief, "method": "animate", "args": [[str(n)], at_once]}
        for n, step in enumerate(steps)
    ]
    slider = {**low, "x": 0.12, "len": 0.88, "pad": {"t": 12}, "active": 0, "steps": choices}
    slider |= {"currentvalue": {"visible": False}, "bgcolor": look.grid, "bordercolor": look.grid}
    play = {"label": "▶ play", "method": "animate", "args": [None, slow]}
    button = {**low, "type": "buttons", "x": 0, "xanchor": "left", "pad": {"t": 20}}
    button |= {"showactive": False, "bgcolor": look.paper, "buttons": [play]}
    fig.update_layout(
        height=394 + top, margin={"t": top, "b": 86}, sliders=[slider], updatemenus=[button]
    )
