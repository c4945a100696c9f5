"""The five marks of which every figure is made: bars, curves, boxes, areas, cells.

The function of a mark takes rows, which are also the figure's table, and returns plotly traces as
dicts. This file has what all marks share: the hover text, words in the picture, lines and arrows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from paralab.view import theme

AXES = ("x", "y")
Part = dict[str, Any]  # of a figure, as plotly takes it: a trace, a note, a shape or an axis


def hover(texts: Iterable[str]) -> Part:
    """The text that each element of a trace shows under the mouse pointer."""
    return {"hovertext": list(texts), "hovertemplate": "%{hovertext}<extra></extra>"}


def on(axes: tuple[str, str]) -> dict[str, str]:
    """The pair of axes on which a trace is drawn, for a figure that has several pairs."""
    return {"xaxis": axes[0], "yaxis": axes[1]}


def note(
    text: str,
    x: Any,
    y: Any,
    *,
    size: int = 13,
    ink: str = "",
    anchor: str = "",
    axes: tuple[str, str] = AXES,
    above: bool = False,
    **more: Any,
) -> Part:
    """A word in the picture, as a plotly annotation.

    anchor  sides of the word that are at x and y, for example "left bottom"; default: its middle
    axes    what x and y are measured in: axes of the figure or "paper"
    above   whether the word has a background, so that lines seem to pass beneath it
    """
    if above:
        more = {"bgcolor": theme.look().paper, "borderpad": 0} | more
    more |= {
        ("xanchor" if side in ("left", "right") else "yanchor"): side for side in anchor.split()
    }
    font = {"size": size, "color": ink or theme.look().ink}
    place = {"x": x, "y": y, "xref": axes[0], "yref": axes[1]}
    return {"text": text, **place, "showarrow": False, "font": font, **more}


def margin(text: str, y: Any, *, ref: str = "y", anchor: str = "left", **more: Any) -> Part:
    """A word in the right margin; ``ref``: what y is measured in."""
    return note(text, 1, y, axes=("paper", ref), anchor=anchor, xshift=8, **more)


def column(
    title: str, words: Iterable[tuple[float, str]], head: float | None = None, **style: Any
) -> list[Part]:
    """A column in the right margin: (y, word) pairs below a heading, which stands at y = ``head``
    or, by default, on top.
    """
    at = {"ref": "paper", "anchor": "left bottom"} if head is None else {}
    heading = margin(title, 1 if head is None else head, ink=theme.look().faint, **at)
    return [*(margin(word, y, **style) for y, word in words), heading]


def arrow(start: tuple[float, float], to: tuple[float, float], *, ink: str, **more: Any) -> Part:
    """An arrow from one place (x, y) of the picture to another."""
    more |= {"showarrow": True, "arrowhead": 2, "arrowwidth": 2.5, "arrowcolor": ink}
    return note("", *to, ax=start[0], ay=start[1], axref="x", ayref="y", **more)


def line(
    x: tuple[Any, Any], y: tuple[Any, Any], *, dash: str = "solid", width: float = 2, **more: Any
) -> Part:
    """A line from (x[0], y[0]) to (x[1], y[1])."""
    ink = more.pop("ink", "") or theme.look().ink
    ends = dict(zip(("x0", "x1", "y0", "y1"), (*x, *y), strict=True))
    return {"type": "line", **ends, "line": {"dash": dash, "width": width, "color": ink}, **more}


def upright(x: Any, *, axis: str = "y domain", **more: Any) -> Part:
    """A vertical line at ``x`` through the whole ``axis``."""
    return line((x, x), (0, 1), yref=axis, **more)
