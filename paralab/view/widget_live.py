"""A live figure on a page: to show another chart, only the differences are sent, in one message.

plotly's FigureWidget draws what is assigned to it. Assigning a whole figure sends every point and
flickers. So `View` matches old and new traces by position and sets only the properties that differ;
the picture then follows a slider while it is dragged.

The title is HTML above the figure, which a page breaks into as many lines as it needs; plotly cuts
a long title off or draws the legend over it. The figure is as wide as its place (figure.js).
"""

from __future__ import annotations

import functools
import threading
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

HEAD = "paralab-head"  # the CSS class of titles, by which the browser tests find them
TITLE = 64  # pixels of the title at the top of a chart
ROOM = 28  # pixels of the margin that stay at the top at least
_FOLDER, _OURS = Path(plotly.__file__).parent, Path(__file__).with_name("figure.js")


@functools.cache
def _plotly() -> str:
    """plotly's JavaScript, which draws a FigureWidget on a page."""
    return (_FOLDER / "package_data" / "widgetbundle.js").read_text(encoding="utf-8")


class _Whole(go.FigureWidget):
    """A FigureWidget that is announced to the page only when it is complete.

    plotly announces its own before it has data and sends these afterwards: a slow page that draws
    it in between shows an empty figure and never corrects it. Also, plotly's 5 MB of code have to
    load within two seconds; here they come with the first figure, once per page (figure.js).

    _bundle  plotly's code, if this figure brings it        _own  the id of the page's model
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
    """A chart on a page, complete as soon as it appears.

    chart   the chart that it shows; `show` replaces it        figure  the FigureWidget
    first   whether it is the first of a widget's views, which brings plotly's code for all
    """

    def __init__(self, chart: Chart, *, first: bool = True) -> None:
        self.head = ipw.HTML(layout={"margin": "0", "height": "auto"})
        self.head.add_class(HEAD)
        self.figure = _Whole(chart, _plotly() if first else "")
        self.figure.on_msg(lambda *_: self._page_listens())
        self._first, self._lock = chart, threading.Lock()  # a cell may show one as a page begins
        self._remember(chart, _plain(chart))
        # Without min_width a grid's column is never narrower than its widest content.
        super().__init__([self.head, self.figure], layout={"min_width": "0"})

    def _remember(self, chart: Chart, plain: Any) -> None:
        """Keep what is shown as plain data: reading it from the figure would double the costs."""
        self.chart, self._shown, now = chart, plain, theme.look()
        font = f"font:15px/1.3 {theme.FONT};color:{now.ink};background:{now.paper}"
        below = f"font-size:12px;color:{now.faint};padding-top:3px"
        self.head.value = (
            f'<div style="{font};padding:10px 12px 0"><b>{chart.finding}</b>'
            f'<div style="{below}">{chart.below}</div></div>'
        )

    def _page_listens(self) -> None:
        """A page has begun to listen: send all again, as earlier messages may be lost."""
        with self._lock:
            if self.chart is not self._first:
                self.figure.data = []
                self.figure.add_traces(list(self.chart.data))
                self.figure.layout = {"annotations": (), "shapes": (), **self._shown[1]}

    def show(self, chart: Chart) -> None:
        """Show another chart."""
        with self._lock:
            if chart is not self.chart:
                self._become(chart)

    def _become(self, chart: Chart) -> None:
        figure, (shown_traces, layout), new_plain = self.figure, self._shown, _plain(chart)
        new, old = list(chart.data), list(figure.data)
        pairs = zip(new, old, strict=False)
        alike = sum(1 for _ in takewhile(lambda pair: pair[0].type == pair[1].type, pairs))
        if alike < len(old):
            figure.data = old[:alike]
        with figure.batch_update():
            for i, trace in enumerate(figure.data):
                for name, value in _changes(shown_traces[i], new_plain[0][i]).items():
                    trace[name] = value
            for name, value in _changes(layout, new_plain[1]).items():
                figure.layout[name] = value
        if alike < len(new):
            figure.add_traces(new[alike:])
        self._remember(chart, new_plain)


def _plain(chart: go.Figure) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    # Not copied by to_plotly_json, as nothing changes them.
    return [trace._props for trace in chart.data], layout_of(chart)


def layout_of(chart: go.Figure) -> dict[str, Any]:
    """The chart's layout without its title, the room for it, and its width."""
    layout = {k: v for k, v in chart.layout.to_plotly_json().items() if k not in ("title", "width")}
    margin, height = layout.get("margin", {}), layout.get("height")
    top = max(ROOM, margin.get("t", 0) - TITLE)
    if height:
        layout["height"] = height - max(0, margin.get("t", 0) - top)
    return {**layout, "margin": {**margin, "t": top}}


def _changes(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The properties to assign to get from ``old`` to ``new``; a removed one becomes None or ()."""
    changed = {name: value for name, value in new.items() if not _same(old.get(name), value)}
    for name in old.keys() - new.keys():
        changed[name] = () if name in ("annotations", "shapes") else None
    return changed


def _same(a: Any, b: Any) -> bool:
    """Whether two plain values are equal; those that contain arrays never are."""
    try:
        return bool(a == b)
    except ValueError:
        return False
