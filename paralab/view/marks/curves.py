"""Curves: lines and points on linear or logarithmic axes, and rings around points of interest."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from paralab.view import theme
from paralab.view.marks import AXES, Part, hover, line, note, on

HOLLOW = "-open"
LETTER = 0.0105  # share of the x axis that a bold letter of a label takes
PREFIXED = ("B", "B/s", "s")  # units that are written with a decimal prefix


def curve(
    name: str,
    points: Iterable[tuple[Any, Any]],
    hover_texts: Sequence[str] | None = None,
    *,
    ink: str,
    width: float = 2.5,
    dash: str = "solid",
    symbol: str = "circle",
    size: float = 10,
    axes: tuple[str, str] = AXES,
    mode: str = "lines",
    **more: Any,
) -> Part:
    """A trace with a line, markers or both, as ``mode`` says."""
    pairs = list(points)
    marks: Part = {"color": ink, "symbol": symbol, "size": size}
    marks |= {"line": {"width": 2 if symbol.endswith(HOLLOW) else 0}}
    return {
        "type": "scatter",
        "name": theme.text(name),
        "mode": mode,
        "x": [x for x, _ in pairs],
        "y": [y for _, y in pairs],
        **({"line": {"color": ink, "width": width, "dash": dash}} if "lines" in mode else {}),
        **({"marker": marks | more.pop("marker", {})} if "markers" in mode else {}),
        **({"hoverinfo": "skip"} if hover_texts is None else hover(hover_texts)),
        **on(axes),
        **more,
    }


def rings(name: str, places: Sequence[tuple[float, float]]) -> Part:
    """Rings around points of curves. One trace however many points there are, so that a figure has
    the same traces after a slider has moved.
    """
    return curve(
        name,
        places or [(None, None)],
        ink=theme.look().ink,
        symbol="circle-open",
        size=15,
        mode="markers",
        showlegend=False,
        marker={"line": {"width": 2.5}},
    )


def drop(
    x: float, low: float, high: float, label: str, ends: tuple[float, float]
) -> tuple[Part, Part]:
    """A label and a dotted line from ``low``, on the x axis, up to ``high``, on a curve; both axes
    are logarithmic. ends: of the x axis, at whose right end the label is left of the line
    """
    shift = {"xshift": 6, "yshift": 6, "anchor": "left bottom"}
    if math.log(x / ends[0]) > (1.05 - LETTER * len(label)) * math.log(ends[1] / ends[0]):
        shift |= {"xshift": -6, "anchor": "right bottom"}
    text = note(f"<b>{label}</b>", math.log10(x), math.log10(low), **shift)
    return text, line((x, x), (low, high), dash="dot")


def log_axis(
    title: str, low: float, high: float, unit: str, *, pad: tuple[float, float] = (0.0, 0.0)
) -> Part:
    """A logarithmic axis with ticks like "10 kB"; pad: room before and after, as shares of it."""
    ticks, length = theme.log_ticks(low, high), math.log10(high / low) or 1.0
    return {
        "type": "log",
        "title": title,
        "range": [math.log10(low) - pad[0] * length, math.log10(high) + pad[1] * length],
        "tickvals": ticks,
        "ticktext": [
            theme.scaled(tick, unit) if unit in PREFIXED else f"{tick:,.7g}" for tick in ticks
        ],
    }
