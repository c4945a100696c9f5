"""Boxes: events with a start and an end, on rows. Time goes to the right, rows downwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paralab.view import theme
from paralab.view.marks import AXES, Part, hover, on


def boxes(
    name: str,
    fill: str,
    rows: Sequence[tuple],
    *,
    hatched: bool = False,
    edge: Any = 0.5,
    axes: tuple[str, str] = AXES,
    **more: Any,
) -> Part:
    """A trace. rows: (start, length, y of the middle, height, word on the box, hover text).

    hatched  for boxes in which nothing is done
    edge     the width of paper-coloured edges, or the widths and colours of all
    """
    look = theme.look()
    line = edge if isinstance(edge, dict) else {"width": edge, "color": look.paper}
    marker: Part = {"color": fill, "line": line}
    if hatched:
        hatch = {"bgcolor": fill, "fgcolor": look.hatch, "size": 6, "solidity": 0.2}
        marker["pattern"] = {"shape": "/", **hatch}
    columns = ("base", "x", "y", "width", "text")
    return {
        "type": "bar",
        "name": name,
        "orientation": "h",
        "marker": marker,
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "constraintext": "none",
        "textfont": {"size": 12, "color": theme.on(fill)},
        **{column: [row[i] for row in rows] for i, column in enumerate(columns)},
        **hover(row[5] for row in rows),
        **on(axes),
        **more,
    }


def rows_axis(ticks: Sequence[tuple[float, str]], bottom: float, top: float) -> Part:
    """The axis of the rows, from ``top`` down to ``bottom``, with (y, label) pairs as ticks."""
    positions, labels = [y for y, _ in ticks], [label for _, label in ticks]
    return {"tickvals": positions, "ticktext": labels, "range": [bottom, top], "showgrid": False}


def time_axis(title: str, window: float) -> Part:
    """The time axis, from 0 to ``window`` in the title's unit, with a little room at both ends."""
    ends = [-0.005 * window, 1.005 * window]
    return {"title": title, "range": ends, "tickformat": "~g"}
