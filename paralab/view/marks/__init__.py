"""Five marks, of which every figure is made: bars, curves, boxes, areas, cells.

A mark takes rows, which are also the figure's table, and returns plotly traces as dicts. Here is
what all of them share: one hover format, a word in the picture, a line through it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from paralab.view import theme

AXES = ("x", "y")


def hover(said: Iterable[str]) -> dict[str, Any]:
    """What every element of a trace says when pointed at."""
    return {"hovertext": list(said), "hovertemplate": "%{hovertext}<extra></extra>"}


def on(axes: tuple[str, str]) -> dict[str, str]:
    """Where a trace is drawn, of a figure with several pairs of axes."""
    return {"xaxis": axes[0], "yaxis": axes[1]}


def note(
    text: str,
    x: Any,
    y: Any,
    *,
    size: int = 13,
    ink: str = "",
    hold: str = "",
    axes: tuple[str, str] = AXES,
    above: bool = False,
    **more: Any,
) -> dict:
    """A word in the picture. hold: which of its sides are at x and y, "left bottom" for example;
    default: its middle. axes: what x and y are counted in. above: lines pass beneath it.
    """
    if above:
        more = {"bgcolor": theme.look().paper, "borderpad": 0} | more
    more |= {("xanchor" if side in ("left", "right") else "yanchor"): side for side in hold.split()}
    font = {"size": size, "color": ink or theme.look().ink}
    place = {"x": x, "y": y, "xref": axes[0], "yref": axes[1]}
    return {"text": text, **place, "showarrow": False, "font": font, **more}


def margin(text: str, y: Any, *, ref: str = "y", hold: str = "left", **more: Any) -> dict:
    """A word in the right margin."""
    return note(text, 1, y, axes=("paper", ref), hold=hold, xshift=8, **more)


def column(
    title: str, words: Iterable[tuple[float, str]], head: float | None = None, **style: Any
) -> list[dict]:
    """Words in the right margin, each at its y, and what they are: at y = ``head``, or on top."""
    at = {"ref": "paper", "hold": "left bottom"} if head is None else {}
    top = margin(title, 1 if head is None else head, ink=theme.look().faint, **at)
    return [*(margin(said, y, **style) for y, said in words), top]


def arrow(start: tuple[float, float], to: tuple[float, float], *, ink: str, **more: Any) -> dict:
    """An arrow between two places of the picture."""
    more |= {"showarrow": True, "arrowhead": 2, "arrowwidth": 2.5, "arrowcolor": ink}
    return note("", *to, ax=start[0], ay=start[1], axref="x", ayref="y", **more)


def line(
    x: tuple[Any, Any], y: tuple[Any, Any], *, dash: str = "solid", width: float = 2, **more: Any
) -> dict:
    """A line from (x[0], y[0]) to (x[1], y[1])."""
    ink = more.pop("ink", "") or theme.look().ink
    ends = dict(zip(("x0", "x1", "y0", "y1"), (*x, *y), strict=True))
    return {"type": "line", **ends, "line": {"dash": dash, "width": width, "color": ink}, **more}


def upright(x: Any, *, axis: str = "y domain", **more: Any) -> dict:
    """A line from bottom to top at ``x``."""
    return line((x, x), (0, 1), yref=axis, **more)
