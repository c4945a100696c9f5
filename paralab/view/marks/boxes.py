"""Boxes: what happens from when to when, on a row. Time to the right, rows downwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paralab.view import theme
from paralab.view.marks import AXES, hover, on

COLUMNS = ("base", "x", "y", "width", "text")


def boxes(rows: Sequence[tuple], style: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A trace. rows: (start, length, middle of the row, height, word, what it says)."""
    columns = list(zip(*rows, strict=True)) or [()] * 6
    values = {name: list(column) for name, column in zip(COLUMNS, columns, strict=False)}
    return {"type": "bar", **style, **values, **hover(columns[5]), **more}


def look(
    name: str, fill: str, *, hatched: bool = False, edge: Any = 0.5, axes: tuple[str, str] = AXES
) -> dict[str, Any]:
    """Name, colour and text of a trace; hatched: nothing is done there."""
    now = theme.look()
    line = edge if isinstance(edge, dict) else {"width": edge, "color": now.paper}
    marker: dict[str, Any] = {"color": fill, "line": line}
    if hatched:
        marker["pattern"] = {"shape": "/", "bgcolor": fill, "fgcolor": now.hatch, "size": 6}
        marker["pattern"] |= {"solidity": 0.2}
    return {
        "name": name,
        "orientation": "h",
        "marker": marker,
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "constraintext": "none",
        "textfont": {"size": 12, "color": theme.on(fill)},
        **on(axes),
    }


def rows_axis(ticks: Sequence[tuple[float, str]], bottom: float, top: float) -> dict[str, Any]:
    """The axis of the rows: a label at each, from ``top`` down to ``bottom``."""
    at, text = [y for y, _ in ticks], [label for _, label in ticks]
    return {"tickvals": at, "ticktext": text, "range": [bottom, top], "showgrid": False}


def time_axis(title: str, window: float) -> dict[str, Any]:
    """From 0 to ``window``, in the unit of the title, with a little room at both ends."""
    ends = [-0.005 * window, 1.005 * window]
    return {"title": {"text": title}, "range": ends, "tickformat": "~g"}
