"""A chart on a page, which becomes another one: only what differs is sent, in one message.

plotly's FigureWidget draws what is assigned to it. Assigning a whole figure sends every point and
flickers; here traces are matched by place, and of each only the properties that differ are set. So
the picture follows a slider while it is dragged.

The title is text above the figure: a page breaks it into as many lines as it needs, whereas plotly
cuts it off, or draws the legend over it. The figure is as wide as its place (figure.js).
"""

from __future__ import annotations

import functools
from itertools import takewhile
from pathlib import Path
from typing import Any
from uuid import uuid4

import ipywidgets as ipw
import plotly
import plotly.graph_objects as go
from traitlets import Unicode

from paralab.view import theme
from paralab.view.chart import Chart

HEAD = "paralab-head"  # the class of titles: the browser tests read them there
TITLE = 64  # pixels at the top of a chart that its title takes
ROOM = 28  # pixels that are left there at least
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
    loaded within two seconds; here they come with the first figure, once for a page (figure.js).

    _bundle  plotly's code, where this figure brings it        _own  the name of the page's model
    """

    _esm = _OURS.read_text(encoding="utf-8").replace("VERSION", plotly.__version__)
    _bundle = Unicode("").tag(sync=True)
    _own = Unicode("").tag(sync=True)
    _ready = False

    def __init__(self, chart: go.Figure, bundle: str) -> None:
        super().__init__(list(chart.data), layout_of(chart))
        self._config, self._bundle, self._ready = {"responsive": True}, bundle, True
        self._own = self._model_id = uuid4().hex
        self.open()

    def open(self) -> None:
        if self._ready:
            super().open()


class View(ipw.VBox):
    """A chart on a page, complete from its first moment on.

    chart   what it shows; `show` another one        figure  the FigureWidget
    first   whether it is the first of a widget's views, and brings plotly's code for all
    """

    def __init__(self, chart: Chart, *, first: bool = True) -> None:
        self.head = ipw.HTML(layout={"margin": "0", "height": "auto"})
        self.head.add_class(HEAD)
        self.figure = _Whole(chart, _plotly() if first else "")
        self.figure.on_msg(lambda *_: self._listens())
        self._first = chart
        self._remember(chart, _plain(chart))
        # A grid's column is as wide as its widest content, but for a column that may be narrower.
        super().__init__([self.head, self.figure], layout={"min_width": "0"})

    def _remember(self, chart: Chart, plain: Any) -> None:
        """What is shown is kept as plain data: to ask the figure costs as much as all the rest."""
        self.chart, self._shown, now = chart, plain, theme.look()
        font = f"font:15px/1.3 {theme.FONT};color:{now.ink};background:{now.paper}"
        below = f"font-size:12px;color:{now.faint};padding-top:3px"
        self.head.value = (
            f'<div style="{font};padding:10px 12px 0"><b>{chart.finding}</b>'
            f'<div style="{below}">{chart.below}</div></div>'
        )

    def _listens(self) -> None:
        """A page listens. All is said again: what was before may be lost (figure.js)."""
        if self.chart is not self._first:
            self.figure.data = []
            self.figure.add_traces(list(self.chart.data))
            self.figure.layout = {"annotations": (), "shapes": (), **self._shown[1]}

    def show(self, chart: Chart) -> None:
        """Become another chart."""
        if chart is self.chart:
            return
        figure, (had, layout), wants = self.figure, self._shown, _plain(chart)
        new, old = list(chart.data), list(figure.data)
        pairs = zip(new, old, strict=False)
        alike = sum(1 for _ in takewhile(lambda pair: pair[0].type == pair[1].type, pairs))
        if alike < len(old):
            figure.data = old[:alike]
        with figure.batch_update():
            for i, trace in enumerate(figure.data):
                for name, value in _changes(had[i], wants[0][i]).items():
                    if name not in _OWN:
                        trace[name] = value
            for name, value in _changes(layout, wants[1]).items():
                figure.layout[name] = value
        if alike < len(new):
            figure.add_traces(new[alike:])
        self._remember(chart, wants)


def _plain(chart: go.Figure) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    return [trace.to_plotly_json() for trace in chart.data], layout_of(chart)


def layout_of(chart: go.Figure) -> dict[str, Any]:
    """The chart's layout without its title and the room for it, and of no width of its own."""
    layout = {k: v for k, v in chart.layout.to_plotly_json().items() if k not in ("title", "width")}
    margin, height = layout.get("margin", {}), layout.get("height")
    top = max(ROOM, margin.get("t", 0) - TITLE)
    if height:
        layout["height"] = height - max(0, margin.get("t", 0) - top)
    return {**layout, "margin": {**margin, "t": top}}


def _changes(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """What to assign to get from ``old`` to ``new``; a property that has gone is None."""
    changed = {name: value for name, value in new.items() if not _same(old.get(name), value)}
    for name in old.keys() - new.keys():
        changed[name] = () if name in ("annotations", "shapes") else None
    return changed


def _same(a: Any, b: Any) -> bool:
    """Equality of plain values; what holds arrays is sent again."""
    try:
        return bool(a == b)
    except ValueError:
        return False
