"""Areas: what is held over time. A value holds until the next one: edges are steps, not slopes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paralab.view import theme
from paralab.view.marks import AXES, Part, hover, on


def area(
    name: str,
    fill: str,
    times: Sequence[float],
    values: Sequence[float],
    hover_texts: Sequence[str],
    *,
    base: float | None = None,
    opacity: float = 1.0,
    edge: float = 0.0,
    axes: tuple[str, str] = AXES,
    **more: Any,
) -> list[Part]:
    """The traces of one area: from ``base`` up to base + value; without a base it is stacked on the
    areas drawn before it on the same axes.
    """
    upper = {
        "type": "scatter",
        "mode": "lines",
        "name": theme.text(name),
        "legendgroup": theme.text(name),
        "x": list(times),
        "y": [value + (base or 0.0) for value in values],
        "line": {"shape": "hv", "width": edge, "color": fill},
        "fillcolor": fill if opacity == 1 else theme.clear(fill, opacity),
        **hover(hover_texts),
        **on(axes),
        **more,
    }
    if base is None:
        return [upper | {"stackgroup": axes[1]}]
    lower = {"type": "scatter", "mode": "lines", "x": [times[0], times[-1]], "y": [base, base]}
    lower |= {"line": {"width": 0}, "showlegend": False, "hoverinfo": "skip", **on(axes)}
    return [lower, upper | {"fill": "tonexty"}]
