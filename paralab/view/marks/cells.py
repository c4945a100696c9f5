"""Cells: a matrix drawn as colours with numbers, or rectangles of any size with words in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from paralab.view import theme
from paralab.view.marks import Part, hover, note


def heat(
    x: Sequence[Any],
    y: Sequence[Any],
    rows: Sequence[Sequence[tuple[float | None, str, str]]],
    *,
    colours: Sequence[str],
    most: float,
    **more: Any,
) -> Part:
    """A cell for every (number, word written in it, hover text), coloured from ``colours[0]`` at 0
    to the last one at ``most``; None is a hole.
    """
    z, words, hover_texts = ([[cell[i] for cell in row] for row in rows] for i in range(3))
    return {
        "type": "heatmap",
        "x": x,
        "y": y,
        "z": z,
        "zmin": 0,
        "zmax": most,
        "colorscale": [[i / (len(colours) - 1), c] for i, c in enumerate(colours)],
        "text": words,
        "texttemplate": "%{text}",
        **hover(hover_texts),
        "hoverongaps": False,
        "showscale": False,
        "xgap": 2,
        **more,
    }


class Cell(NamedTuple):
    """A rectangle with a word in it. x, y: (from, to); y grows downwards."""

    x: tuple[float, float]
    y: tuple[float, float]
    fill: str
    word: str = ""
    hover_text: str = ""
    size: int = 13
    ink: str = ""
    edge: str = ""


def rectangles(cells: Sequence[Cell]) -> tuple[Part, list[Part], list[Part]]:
    """(trace, notes, shapes) of the cells; the trace is invisible and carries hover texts."""
    shapes, notes, points = [], [], []
    for cell in cells:
        corners = dict(zip(("x0", "x1", "y0", "y1"), (*cell.x, *cell.y), strict=True))
        edge = {"width": 1 if cell.edge else 0, "color": cell.edge or cell.fill}
        look = {"fillcolor": cell.fill, "layer": "below", "line": edge}  # below words and marks
        shapes.append({"type": "rect", **corners, **look})
        middle = (sum(cell.x) / 2, sum(cell.y) / 2)
        if cell.word:  # without an ink of its own: black or white, as reads better on the fill
            ink = cell.ink or theme.on(cell.fill)
            notes.append(note(cell.word, *middle, size=cell.size, ink=ink))
        if cell.hover_text:
            points.append((*middle, cell.hover_text))
    marks = {
        "type": "scatter",
        "mode": "markers",
        "showlegend": False,
        "x": [x for x, _, _ in points],
        "y": [y for _, y, _ in points],
        "marker": {"size": 18, "opacity": 0},
        **hover(text for *_, text in points),
    }
    return marks, notes, shapes
