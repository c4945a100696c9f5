"""A figure on screen becomes another one: only what differs is sent, in one message.

plotly's FigureWidget draws what is assigned to it. Assigning a whole figure sends every point and
flickers; here traces are matched by place, and of each only the properties that differ are set. So
the picture follows a slider while it is dragged.
"""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

WIDTH = 800  # pixels, what a laptop shows beside the file list: a figure drawn before it is on
# the page cannot measure it
_OWN = ("uid", "type")  # what makes a trace this trace


def live(chart: go.Figure) -> go.FigureWidget:
    """A figure on screen that shows ``chart``, complete from its first moment on."""
    figure = go.FigureWidget(list(chart.data), _layout(chart))
    figure._shown = chart, *_plain(chart)
    return figure


def show(figure: go.FigureWidget, chart: go.Figure) -> None:
    """Make ``figure``, which `live` made, look like ``chart``.

    What it showed last is kept as plain data: to ask the figure costs as much as all the rest.
    """
    before, had, layout = figure._shown
    if before is chart:
        return
    new, old = list(chart.data), list(figure.data)
    wants, wanted_layout = _plain(chart)
    alike = 0
    while alike < min(len(new), len(old)) and new[alike].type == old[alike].type:
        alike += 1
    if alike < len(old):
        figure.data = old[:alike]
    with figure.batch_update():
        for i, trace in enumerate(figure.data):
            for name, value in _changes(had[i], wants[i]).items():
                if name not in _OWN:
                    trace[name] = value
        changes = _changes(layout, wanted_layout)
        for name, value in changes.items():
            figure.layout[name] = value
    if alike < len(new):
        figure.add_traces(new[alike:])
    figure._shown = chart, wants, wanted_layout


def _plain(chart: go.Figure) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    return [trace.to_plotly_json() for trace in chart.data], _layout(chart)


def _layout(chart: go.Figure) -> dict[str, Any]:
    """The chart's layout, of one width unless it has its own."""
    return {"width": WIDTH, **chart.layout.to_plotly_json()}


def _changes(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """What to assign to get from ``old`` to ``new``; a property that has gone is None."""
    changed = {name: value for name, value in new.items() if not _same(old.get(name), value)}
    for name in old.keys() - new.keys():
        changed[name] = () if name in ("annotations", "shapes") else None
    return changed


def _same(a: Any, b: Any) -> bool:
    """Equality of plain values and of arrays, and of containers that hold either."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    if hasattr(a, "shape") or hasattr(b, "shape"):
        import numpy as np

        return np.array_equal(a, b)
    return type(a) is type(b) and a == b
