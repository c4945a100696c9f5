"""A figure on screen becomes another one: only what differs is sent, in one message.

plotly's FigureWidget draws what is assigned to it. Assigning a whole figure sends every point and
flickers; here traces are matched by place, and of each only the properties that differ are set. So
the picture follows a slider while it is dragged.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any
from uuid import uuid4

import plotly
import plotly.graph_objects as go
from traitlets import Unicode

WIDTH = 800  # pixels, what a laptop shows beside the file list: a figure drawn before it is on
# the page cannot measure it
_FOLDER, _OURS = Path(plotly.__file__).parent, Path(__file__).with_name("figure.js")
_OWN = ("uid", "type")  # what makes a trace this trace


@functools.cache
def _plotly() -> str:
    """The code that draws a FigureWidget on a page."""
    return (_FOLDER / "package_data" / "widgetbundle.js").read_text(encoding="utf-8")


class _Whole(go.FigureWidget):
    """A FigureWidget that tells the page of itself when it is complete.

    plotly's own does so before it has its data, and sends these afterwards: a page that draws it in
    between, as a slow one does, draws an empty figure, for good. And its 5 MB of code must be
    loaded within two seconds; here they come beside the figure, and once for a page (figure.js).

    _bundle  plotly's code, where this figure brings it        _own  the name of the page's model
    """

    _esm = _OURS.read_text(encoding="utf-8").replace("VERSION", plotly.__version__)
    _bundle = Unicode("").tag(sync=True)
    _own = Unicode("").tag(sync=True)
    _ready = False

    def __init__(self, chart: go.Figure, bundle: str) -> None:
        super().__init__(list(chart.data), _layout(chart))
        self._bundle, self._ready = bundle, True
        self._own = self._model_id = uuid4().hex
        self.open()

    def open(self) -> None:
        if self._ready:
            super().open()


def live(chart: go.Figure, *, first: bool = True) -> go.FigureWidget:
    """A figure on screen that shows ``chart``, complete from its first moment on.

    first  whether it is the first of a widget's figures, and brings plotly's code for all
    """
    figure = _Whole(chart, _plotly() if first else "")
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
