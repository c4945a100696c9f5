"""Y = X W, cut into blocks: which rank of a tp group holds which block of X, of W and of Y.

A block that one rank holds has that rank's colour and number; a replicated block is grey, with a
small square for each rank that holds it. A rank has the same colour in every figure: one of Paul
Tol's eight light colours (2021, "Colour schemes", SRON/EPS/TN/09-002), which are made for cells
with words in them and differ for any form of colour blindness. So at most eight ranks are drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from paralab.checks import choice, illegal, instance
from paralab.parallel.layouts import Split, box, extents, kind_of, mode_of
from paralab.spec import Plan
from paralab.theory.tensor import OUTWARD, ROLES
from paralab.view import theme
from paralab.view.chart import Chart
from paralab.view.marks import arrow, note
from paralab.view.marks.cells import Cell
from paralab.view.schematics import drawn

RANK_COLOUR = ("#77AADD", "#EE8866", "#EEDD88", "#FFAABB")
RANK_COLOUR += ("#44BB99", "#BBCC33", "#99DDFF", "#C8B6D9")
NAMES = ("X", "W", "Y")
SIDES = ("tokens × in", "in × out", "tokens × out")  # rows × columns of X, W and Y
PITCH, GAP = 1.36, 0.012  # from one matrix to the next, between two blocks; in sides of a matrix
COLUMNS = "matrix rank row_start row_stop column_start column_stop"
MODE_NAME = {"1d": "1D", "2d": "2D", "2.5d": "2.5D", "3d": "3D"}


class Block(NamedTuple):
    """A block of one matrix.

    rows, columns  (start, stop) as parts of the matrix, 0 to 1
    ranks          the ranks that hold it
    label          the word in it; "": the rank's number
    strong         whether it is drawn in full colour, not pale
    """

    matrix: str
    rows: tuple[Fraction, Fraction]
    columns: tuple[Fraction, Fraction]
    ranks: tuple[int, ...]
    label: str = ""
    strong: bool = True

    @property
    def left(self) -> float:
        """The left edge of its matrix in the figure."""
        return NAMES.index(self.matrix) * PITCH

    @property
    def centre(self) -> tuple[float, float]:
        """(x, y) in the figure."""
        return self.left + float(sum(self.columns)) / 2, float(sum(self.rows)) / 2


def blocks(plan: Plan, *, role: str = "up") -> Chart:
    """Which rank holds which block of X, W and Y in a linear layer under the plan's tensor
    parallelism.

    role  the layer: "qkv" and "up" lead out of the residual stream (1D: column-parallel), "proj"
          and "down" lead back into it (1D: row-parallel)

    X (tokens, features in) and W (features in, features out) are drawn as they are before the
    layer, Y (tokens, features out) as it is after it; `view.multiplication` has the messages in
    between. ``table`` has a row for every block and rank: matrix, rank, and ranges as parts of the
    matrix. Raises ValueError on another role, on tp=1 and on more than eight ranks.
    """
    check(plan)
    choice("role", role, tuple(ROLES))
    found = splits(plan, role)
    cells = [cell for name in NAMES for cell in held(plan, name, found[name])]
    parallel = ", sequence parallel," * plan.sequence_parallel
    title = f"{MODE_NAME[plan.tp_mode]}{parallel} on {plan.tp} ranks"
    below = f"layer “{role}”: X before communication, Y after it · one colour per rank"
    fig = picture(cells, f"{title}: {finding(cells)}", below)
    return fig.tabled((COLUMNS, table(cells)))


# ---- which rank holds what ----------------------------------------------------------------------
def check(plan: Any) -> None:
    """Raise ValueError if the plan has no tp, or more ranks in it than there are colours."""
    instance("plan", plan, Plan, "a pl.Plan(tp=...)")
    if not 1 < plan.tp <= len(RANK_COLOUR):
        why = "one rank holds all" if plan.tp == 1 else "too many ranks to be drawn"
        raise illegal("tp", plan.tp, why, f"2 to {len(RANK_COLOUR)}")


def splits(plan: Plan, role: str) -> dict[str, tuple[Split, Split]]:
    """{matrix: (coordinates over which its rows are sharded, those of its columns)}."""
    mode = mode_of(plan)
    batch, sequence, features = mode.residual
    stream, between = (batch + sequence, features), mode.scores[:2]
    out, inner = mode.weights[kind_of(f"{role}.weight")][-2:]  # torch stores weights as (out, in)
    x, y = (between, stream) if role in OUTWARD else (stream, between)
    return {"X": x, "W": (inner, out), "Y": y}


def held(plan: Plan, matrix: str, cut: tuple[Split, Split]) -> list[Block]:
    """The blocks of a matrix whose rows and columns are sharded over the coordinates ``cut``."""
    total = math.prod(extents(plan).values())
    ranks_of: dict[tuple, list[int]] = {}
    for rank in range(plan.tp):
        rows, columns = box((total, total), cut, plan, rank)
        place = tuple(
            (Fraction(at.start, total), Fraction(at.stop, total)) for at in (rows, columns)
        )
        ranks_of.setdefault(place, []).append(rank)
    return [Block(matrix, *place, tuple(ranks)) for place, ranks in ranks_of.items()]


def finding(cells: Sequence[Block]) -> str:
    """ "every rank holds 1/4 of X, W and Y"; if the parts differ, the largest comes first."""
    parts: dict[Fraction, list[str]] = {}
    for name in NAMES:
        cell = next(cell for cell in cells if cell.matrix == name)
        size = (cell.rows[1] - cell.rows[0]) * (cell.columns[1] - cell.columns[0])
        parts.setdefault(size, []).append(name)
    texts = [
        f"{'all' if size == 1 else f'1/{size.denominator}'} of {theme.listed(names)}"
        for size, names in sorted(parts.items(), reverse=True)
    ]
    return f"every rank holds {theme.listed(texts)}"


def table(cells: Iterable[Block]) -> list[tuple]:
    """A row for every block and every rank that holds it; ranges are parts of the matrix."""
    return [
        (cell.matrix, rank, *map(float, (*cell.rows, *cell.columns)))
        for cell in cells
        for rank in cell.ranks
    ]


# ---- drawing ------------------------------------------------------------------------------------
def picture(cells: Sequence[Block], title: str, below: str, arrows: Sequence = ()) -> Chart:
    """The three matrices side by side; ``arrows``: pairs of (x, y), from and to, in the figure."""
    marks, notes = [], []
    for number, (name, side) in enumerate(zip(NAMES, SIDES, strict=True)):
        x = number * PITCH
        marks.append(Cell((x, x + 1), (0.0, 1.0), "rgba(0,0,0,0)", edge=theme.look().hatch))
        head = f"<b>{name}</b>  <span style='font-size:13px'>{side}</span>"
        notes.append(note(head, x + 0.5, -0.09, size=18))
        if number:
            notes.append(note("×="[number - 1], x - (PITCH - 1) / 2, 0.5, size=26))
    marks += [mark for cell in cells for mark in _marks(cell)]
    notes += [arrow(*ends, ink=theme.axis_colour("tp"), arrowsize=1.1) for ends in arrows]
    below += "; grey: held by several ranks" * any(len(cell.ranks) > 1 for cell in cells)
    size = {"height": 410, "x": (-0.04, 2 * PITCH + 1.04), "y": (-0.15, 1.03)}
    return drawn(theme.text(title), below, marks, notes, **size)


def _marks(cell: Block) -> list[Cell]:
    """One block as cells: its rectangle, and the squares of its ranks if it is replicated."""
    (left, right), (top, bottom) = (map(float, ends) for ends in (cell.columns, cell.rows))
    x, y = (cell.left + left + GAP, cell.left + right - GAP), (top + GAP, bottom - GAP)
    wide, high, look = x[1] - x[0], y[1] - y[0], theme.look()
    ink = "" if cell.strong else look.faint
    if len(cell.ranks) == 1:
        fill, size = colour(cell.ranks[0], cell.strong), 15 if min(wide, 2 * high) > 0.2 else 11
        return [Cell(x, y, fill, cell.label or str(cell.ranks[0]), _hover(cell), size, ink)]
    per_line = len(cell.ranks) if len(cell.ranks) * 0.11 < wide else 2
    lines = -(-len(cell.ranks) // per_line)
    side = min(0.1, wide / per_line - GAP)
    tall = min(0.13, high / (lines + 0.8 * bool(cell.label)) - GAP)
    (middle, first), marks = cell.centre, [Cell(x, y, look.wait, "", _hover(cell))]
    first -= lines * (tall + GAP) / 2 - 0.07 * bool(cell.label)
    for n, rank in enumerate(cell.ranks):
        line, at = divmod(n, per_line)
        row = min(per_line, len(cell.ranks) - line * per_line)
        x0, y0 = middle + (at - row / 2) * (side + GAP), first + line * (tall + GAP)
        fill = colour(rank, cell.strong)
        marks.append(Cell((x0, x0 + side), (y0, y0 + tall), fill, str(rank), "", 12, ink))
    if cell.label:
        marks.append(Cell((middle, middle), (first - 0.06,) * 2, look.wait, cell.label))
    return marks


def colour(rank: int, strong: bool = True) -> str:
    """The rank's colour, the same in every figure; pale if not ``strong``."""
    return RANK_COLOUR[rank] if strong else theme.shade(RANK_COLOUR[rank], 1, 2)


def _hover(cell: Block) -> str:
    rows, columns = (f"{start} to {stop}" for start, stop in (cell.rows, cell.columns))
    ranks = f"rank{'s' * (len(cell.ranks) > 1)} {', '.join(map(str, cell.ranks))}"
    return f"{cell.matrix}, rows {rows}, columns {columns}: {ranks}"
