"""Areas: what is held over time. A value holds until the next one, so steps and no slopes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paralab.view import theme
from paralab.view.marks import AXES, hover, on


def area(
    name: str,
    fill: str,
    times: Sequence[float],
    values: Sequence[float],
    said: Sequence[str],
    *,
    base: float | None = None,
    opacity: float = 1.0,
    edge: float = 0.0,
    axes: tuple[str, str] = AXES,
    **more: Any,
) -> list[dict[str, Any]]:
    """From ``base`` up; without one it is stacked on those before it on the same axes."""
    top = {
        "type": "scatter",
        "mode": "lines",
        "name": theme.text(name),
        "legendgroup": theme.text(name),
        "x": list(times),
        "y": [value + (base or 0.0) for value in values],
        "line": {"shape": "hv", "width": edge, "color": fill},
        "fillcolor": fill if opacity == 1 else theme.clear(fill, opacity),
        **hover(said),
        **on(axes),
        **more,
    }
    if base is None:
        return [top | {"stackgroup": axes[1]}]
    bottom = {"type": "scatter", "mode": "lines", "x": [times[0], times[-1]], "y": [base, base]}
    bottom |= {"line": {"width": 0}, "showlegend": False, "hoverinfo": "skip", **on(axes)}
    return [bottom, top | {"fill": "tonexty"}]
