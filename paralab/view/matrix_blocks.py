"""Y = X W, cut into blocks: which rank of a tp group holds which block of X, of W and of Y.

A block that one rank holds has that rank's colour and number; one that several hold is grey, with a
small square for each of them. A rank has the same colour in every figure: Paul Tol's eight light
colours (2021, "Colour schemes", SRON/EPS/TN/09-002), made for cells with words in them, and told
apart with any form of colour blindness; from the ninth rank on they come again.

What is drawn is the table of parallel/layouts.py; `Cell` and `picture` also draw the steps of
matrix_steps.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

from paralab.checks import choice, illegal
from paralab.parallel.layouts import Split, box, extents, kind_of, mode_of
from paralab.spec import Plan
from paralab.theory.tensor import OUTWARD, ROLES
from paralab.view import theme

if TYPE_CHECKING:
    import pandas as pd

    from paralab.view.chart import Chart

RANK_COLOUR = (
    "#77AADD",
    "#EE8866",
    "#EEDD88",
    "#FFAABB",
    "#44BB99",
    "#BBCC33",
    "#99DDFF",
    "#C8B6D9",
)
NAMES = ("X", "W", "Y")
SIDES = {  # of the matrices by role: what is behind the letters
    True: ("tokens × between the layers", "in × out", "tokens × residual stream"),
    False: ("tokens × residual stream", "in × out", "tokens × between the layers"),
}
MOST_RANKS = 64
PITCH, GAP = 1.36, 0.012  # from one matrix to the next, in sides; between two blocks
MODE_NAME = {"1d": "1D", "2d": "2D", "2.5d": "2.5D", "3d": "3D"}


class Cell(NamedTuple):
    """A block. rows, columns: (start, stop) as parts of the whole; ranks: who holds it.

    label  what stands in it; "": the rank's number. strong: in full colour
    """

    matrix: str
    rows: tuple[Fraction, Fraction]
    columns: tuple[Fraction, Fraction]
    ranks: tuple[int, ...]
    label: str = ""
    strong: bool = True

    @property
    def centre(self) -> tuple[float, float]:
        """(x, y) in the figure."""
        x, y = sum(self.columns) / 2, sum(self.rows) / 2
        return NAMES.index(self.matrix) * PITCH + float(x), float(y)


def blocks(plan: Plan, *, role: str = "up") -> Chart:
    """Who holds which block of X, W and Y in a linear layer under the plan's tensor parallelism.

    role  the layer: "qkv" and "up" lead out of the residual stream (1D: column-parallel), "proj"
          and "down" back into it (1D: row-parallel)

    X (tokens, features in), W (features in, features out), Y (tokens, features out), before and
    after the layer; what comes and goes in between is `view.multiplication`. ``table`` has a row
    for every block and rank: matrix, rank, and its ranges as parts of the whole. Raises ValueError
    on another role, on tp=1 and on more than 64 ranks.
    """
    check(plan)
    choice("role", role, tuple(ROLES))
    found = splits(plan, role)
    cells = [cell for name in NAMES for cell in lie(plan, name, found[name])]
    said = f"{MODE_NAME[plan.tp_mode]} on {plan.tp} ranks"
    fig = picture(
        cells,
        f"{said}: {finding(cells)}",
        f"layer «{role}» as it lies between products · a rank has one colour; grey: several ranks "
        "hold the same",
        sides=SIDES[role in OUTWARD],
    )
    return fig.explained(f"blocks of X, W, Y of «{role}», {said}, who holds which", table(cells))


# ---- where blocks lie ---------------------------------------------------------------------------
def check(plan: Any) -> None:
    """Refuse what has no blocks, and more of them than one can tell apart."""
    if not isinstance(plan, Plan):
        raise illegal("plan", plan, "not a plan", "a pl.Plan(tp=...)")
    if not 1 < plan.tp <= MOST_RANKS:
        raise illegal(
            "tp", plan.tp, "nothing is cut, or too much to be drawn", f"2 to {MOST_RANKS}"
        )


def splits(plan: Plan, role: str) -> dict[str, tuple[Split, Split]]:
    """{matrix: (coordinates its rows are dealt out over, its columns)}."""
    mode = mode_of(plan)
    batch, sequence, features = mode.residual
    stream, between = (batch + sequence, features), mode.scores[:2]
    out, inner = mode.weights[kind_of(f"{role}.weight")][-2:]  # as torch stores it
    x, y = (between, stream) if role in OUTWARD else (stream, between)
    return {"X": x, "W": (inner, out), "Y": y}


def lie(plan: Plan, matrix: str, cut: tuple[Split, Split]) -> list[Cell]:
    """The blocks of a matrix whose rows and columns are dealt out over these coordinates."""
    whole = math.prod(extents(plan).values())
    held: dict[tuple, list[int]] = {}
    for rank in range(plan.tp):
        rows, columns = box((whole, whole), cut, plan, rank)
        place = tuple(
            (Fraction(at.start, whole), Fraction(at.stop, whole)) for at in (rows, columns)
        )
        held.setdefault(place, []).append(rank)
    return [Cell(matrix, rows, columns, tuple(ranks)) for (rows, columns), ranks in held.items()]


def finding(cells: Sequence[Cell]) -> str:
    """ "every rank holds 1/4 of X, W and Y"; where they differ, the largest part first."""
    parts: dict[Fraction, list[str]] = {}
    for name in NAMES:
        cell = next(cell for cell in cells if cell.matrix == name)
        size = (cell.rows[1] - cell.rows[0]) * (cell.columns[1] - cell.columns[0])
        parts.setdefault(size, []).append(name)
    said = [
        f"{'all' if size == 1 else f'1/{size.denominator}'} of {_and(names)}"
        for size, names in sorted(parts.items(), reverse=True)
    ]
    return f"every rank holds {_and(said)}"


def _and(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def table(cells: Iterable[Cell]) -> pd.DataFrame:
    """A row for every block and every rank that holds it; parts of the whole, 0 to 1."""
    import pandas as pd

    rows = [
        (cell.matrix, rank, *map(float, (*cell.rows, *cell.columns)))
        for cell in cells
        for rank in cell.ranks
    ]
    return pd.DataFrame(
        rows, columns=["matrix", "rank", "row_start", "row_stop", "column_start", "column_stop"]
    )


# ---- drawing ------------------------------------------------------------------------------------
def picture(
    cells: Sequence[Cell], title: str, below: str, *, sides: Sequence[str], arrows: Sequence = ()
) -> Chart:
    """The three matrices side by side. arrows: ((x, y) from, (x, y) to) in the figure."""
    fig = theme.figure(theme.text(title), below, height=410)
    shapes, words = drawn(cells, sides, arrows)
    points = [cell.centre for cell in cells]
    fig.add_scatter(
        x=[x for x, _ in points],
        y=[y for _, y in points],
        mode="markers",
        showlegend=False,
        marker={"size": 18, "opacity": 0},
        hovertemplate="%{hovertext}<extra></extra>",
        hovertext=[_hover(cell) for cell in cells],
    )
    bare = {"visible": False, "fixedrange": True}
    fig.update_layout(
        shapes=shapes,
        annotations=words,
        margin={"l": 20, "r": 20, "b": 20, "t": 76},
        xaxis={**bare, "range": [-0.04, 2 * PITCH + 1.04]},
        yaxis={**bare, "range": [1.03, -0.15]},
    )
    return fig


def drawn(
    cells: Sequence[Cell], sides: Sequence[str], arrows: Sequence = ()
) -> tuple[list[dict], list[dict]]:
    """(shapes, annotations) of a picture."""
    shapes, words = [], []
    for number, (name, side) in enumerate(zip(NAMES, sides, strict=True)):
        start = number * PITCH
        shapes.append(_rect(start, 0.0, start + 1, 1.0, "rgba(0,0,0,0)", theme.look().hatch))
        words.append(
            _word(
                start + 0.5, -0.09, f"<b>{name}</b>  <span style='font-size:13px'>{side}</span>", 18
            )
        )
    words += [
        _word((PITCH + 1) / 2 + at * PITCH, 0.5, sign, 26) for at, sign in enumerate(("×", "="))
    ]
    for cell in cells:
        _draw(cell, shapes, words)
    for (x, y), (to_x, to_y) in arrows:
        words.append(
            {
                "x": to_x,
                "y": to_y,
                "ax": x,
                "ay": y,
                "xref": "x",
                "yref": "y",
                "axref": "x",
                "ayref": "y",
                "text": "",
                "showarrow": True,
                "arrowhead": 2,
                "arrowsize": 1.1,
                "arrowwidth": 2.5,
                "arrowcolor": theme.axis_colour("tp"),
            }
        )
    return shapes, words


def _draw(cell: Cell, shapes: list[dict], words: list[dict]) -> None:
    """One block: a rectangle and what stands in it."""
    left = NAMES.index(cell.matrix) * PITCH + float(cell.columns[0]) + GAP
    right = NAMES.index(cell.matrix) * PITCH + float(cell.columns[1]) - GAP
    top, bottom = float(cell.rows[0]) + GAP, float(cell.rows[1]) - GAP
    look, several = theme.look(), len(cell.ranks) > 1
    fill = look.wait if several else colour(cell.ranks[0], cell.strong)
    shapes.append(_rect(left, top, right, bottom, fill))
    ink = look.ink if several else theme.on(fill) if cell.strong else look.faint
    x, y = cell.centre
    size = 15 if min(right - left, 2 * (bottom - top)) > 0.2 else 11
    if not several:
        words.append(_word(x, y, cell.label or str(cell.ranks[0]), size, ink))
        return
    per_line = len(cell.ranks) if len(cell.ranks) * 0.11 < right - left else 2
    lines = -(-len(cell.ranks) // per_line)
    wide = min(0.1, (right - left) / per_line - GAP)
    high = min(0.13, (bottom - top) / (lines + 0.8 * bool(cell.label)) - GAP)
    first = y - (lines * (high + GAP)) / 2 + (0.07 if cell.label else 0)
    for n, rank in enumerate(cell.ranks):
        line, at = divmod(n, per_line)
        row = min(per_line, len(cell.ranks) - line * per_line)
        x0 = x + (at - row / 2) * (wide + GAP)
        y0 = first + line * (high + GAP)
        chip = colour(rank, cell.strong)
        shapes.append(_rect(x0, y0, x0 + wide, y0 + high, chip))
        words.append(
            _word(
                x0 + wide / 2,
                y0 + high / 2,
                str(rank),
                12,
                theme.on(chip) if cell.strong else look.faint,
            )
        )
    if cell.label:
        words.append(_word(x, first - 0.06, cell.label, 13, ink))


def colour(rank: int, strong: bool = True) -> str:
    """The rank's, the same in every figure; pale for what is not meant just now."""
    fill = RANK_COLOUR[rank % len(RANK_COLOUR)]
    return fill if strong else theme.shade(fill, 1, 2)


def _rect(x0: float, y0: float, x1: float, y1: float, fill: str, line: str = "") -> dict:
    border = {"width": 1 if line else 0, "color": line or fill}
    return {
        "type": "rect",
        "x0": x0,
        "y0": y0,
        "x1": x1,
        "y1": y1,
        "fillcolor": fill,
        "layer": "below",
        "line": border,
    }


def _word(x: float, y: float, text: str, size: int, ink: str = "") -> dict[str, Any]:
    return {
        "x": x,
        "y": y,
        "text": text,
        "showarrow": False,
        "font": {"size": size, "color": ink or theme.look().ink},
    }


def _hover(cell: Cell) -> str:
    rows, columns = (f"{start} to {stop}" for start, stop in (cell.rows, cell.columns))
    who = f"rank{'s' * (len(cell.ranks) > 1)} {', '.join(map(str, cell.ranks))}"
    return f"{cell.matrix}, rows {rows}, columns {columns}: {who}"
