"""Boxes: events with a start and an end, on rows. Time goes to the right, rows downwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paralab.view import theme
from paralab.view.marks import AXES, hover, on

COLUMNS = ("base", "x", "y", "width", "text")


def boxes(rows: Sequence[tuple], style: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A trace. rows: (start, length, y of the middle, height, word on the box, hover text)."""
    columns = list(zip(*rows, strict=True)) or [()] * 6
    values = {name: list(column) for name, column in zip(COLUMNS, columns, strict=False)}
    return {"type": "bar", **style, **values, **hover(columns[5]), **more}


def look(
    name: str, fill: str, *, hatched: bool = False, edge: Any = 0.5, axes: tuple[str, str] = AXES
) -> dict[str, Any]:
    """Name, colour and text style of a trace; ``hatched``: for boxes in which nothing is done."""
    theme_look = theme.look()
    line = edge if isinstance(edge, dict) else {"width": edge, "color": theme_look.paper}
    marker: dict[str, Any] = {"color": fill, "line": line}
    if hatched:
        marker["pattern"] = {"shape": "/", "bgcolor": fill, "fgcolor": theme_look.hatch, "size": 6}
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
    """The axis of the rows, from ``top`` down to ``bottom``, with (y, label) pairs as ticks."""
    positions, labels = [y for y, _ in ticks], [label for _, label in ticks]
    return {"tickvals": positions, "ticktext": labels, "range": [bottom, top], "showgrid": False}


def time_axis(title: str, window: float) -> dict[str, Any]:
    """The time axis, from 0 to ``window`` in the title's unit, with a little room at both ends."""
    ends = [-0.005 * window, 1.005 * window]
    return {"title": {"text": title}, "range": ends, "tickformat": "~g"}
