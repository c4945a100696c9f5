"""Chart: a plotly figure that also has its numbers as a table.

The picture is for looking at; `.table`, a DataFrame with one row per mark, is for checking the
numbers and for working on with them; the repr has the finding, for where no picture can be shown.

This module imports plotly, so modules outside this package import it inside functions only.
"""

from __future__ import annotations

import re
import webbrowser
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import pandas as pd
import plotly.graph_objects as go

import paralab.view.lazy_grammar  # noqa: F401  it has to be there before plotly shows a figure
from paralab.view import theme
from paralab.view.marks import Part

MAX_REPR = 110  # characters: one line of a notebook


class Chart(go.Figure):
    """A plotly Figure, with all of its methods and three attributes more.

    table    DataFrame of what is drawn, one row per mark; None for an empty chart. Times are in
             seconds, sizes in bytes, whatever unit the axis has
    finding, below   the two lines of the title: what the picture proves, and what it is about

    ``go.FigureWidget(chart)`` makes a live figure of it, without the table.
    """

    finding, below = "", ""
    _table: Any = None  # a DataFrame, or what one is made of, see `tabled`
    _frame = theme.ALONE
    _above: Mapping[str, float] = {}  # pixels that title and legend take beyond two lines and a row

    @property
    def table(self) -> pd.DataFrame | None:
        if callable(self._table):
            self._table = self._table()
        if isinstance(self._table, tuple):
            columns, rows = self._table
            self._table = pd.DataFrame(rows, columns=columns.split())
        return self._table

    def draw(
        self,
        traces: Iterable[Part],
        notes: Iterable[Part] = (),
        shapes: Iterable[Part] = (),
    ) -> Chart:
        """This chart with more marks, given as dicts and added all at once: with each one added,
        plotly would validate all earlier ones again, which is too slow for a slider. So is its
        check of every number of a trace, which is therefore made in the tests only.
        """
        validator = self._data_validator
        validator.validate_coerce = partial(validator.validate_coerce, _validate=False)
        self.add_traces(list(traces))
        del validator.validate_coerce
        for trace in self.data:
            trace._validate = True  # what a reader changes in it is checked
        self.layout.annotations = (*self.layout.annotations, *notes)
        self.layout.shapes = (*self.layout.shapes, *shapes)
        self._make_room()
        return self

    def _make_room(self) -> None:
        """Make room above the picture for the rows of a legend that stands there."""
        legend = self.layout.legend
        if legend.orientation != "h" or legend.yanchor != "bottom" or not self.layout.margin.t:
            return
        names = [t.name for t in self.data if t.name and t.showlegend is not False]
        if names and (len(self.data) > 1 or self.layout.showlegend):
            self._raise_top("legend", theme.LEGEND_ROW * (theme.legend_rows(names) - 1))

    def _raise_top(self, what: str, pixels: float) -> None:
        """So many pixels above the picture for the title or the legend: the figure is so much
        higher, unless it is in a frame.
        """
        more = pixels - self._above.get(what, 0)
        self._above = {**self._above, what: pixels}
        if more:
            self.layout.margin.t += more
            self.layout.height += 0 if self._frame.height else more

    def retitled(self, finding: str, below: str) -> Chart:
        """This chart under another title, which may take another number of lines."""
        if re.match("[a-z]{3,}[ ,:]", finding):  # a word, not a symbol like dp=4 or all_reduce
            finding = finding[0].upper() + finding[1:]
        self.finding, self.below = finding, below
        width, height, size, small = self._frame
        width -= 2 * theme.SIDE
        first = theme.broken(finding, width, size * theme.BOLD)
        second = theme.broken(below, width, small)
        style = f"font-size:{small}px;color:{theme.look().faint}"
        self.layout.title = {
            # Both lines are one text: plotly's own subtitle is drawn over the title if a figure is
            # drawn before it is on screen, or changes its width there.
            "text": f"<b>{first}</b><br><span style='{style}'>{second}</span>",
            "x": 0,
            "y": 1,
            "xref": "container",
            "yref": "container",
            "xanchor": "left",
            "yanchor": "top",
            "font": {"size": size},
            "pad": {"t": 18 if height else 24, "l": theme.SIDE},
        }
        lines = (size + 5) * first.count("<br>") + (small + 4) * second.count("<br>")
        self._raise_top("title", lines)
        return self

    def narrowed(self, width: int) -> Chart:
        """This chart with the lines of its title broken for a figure of this width."""
        self._frame = self._frame._replace(width=width)
        return self.retitled(self.finding, self.below)

    def titled(self, words: str | None) -> Chart:
        """This chart with the caller's words, if there are any, in place of its finding."""
        return self if words is None else self.retitled(theme.text(words), self.below)

    def said_below(self, more: str) -> Chart:
        """This chart with more words at the end of its title's second line."""
        return self.retitled(self.finding, " · ".join(filter(None, (self.below, more))))

    def tabled(self, table: Any) -> Chart:
        """This chart with its table: a DataFrame, the (columns, rows) of one, or a function that
        returns either, called when the table is first read. (While a slider moves, none is read.)
        """
        self._table = table
        return self

    def write_image(self, *args: Any, **how: Any) -> None:
        """Plotly's; without ``width=`` as wide as the lines of the title are broken for."""
        super().write_image(*args, **{"width": self.layout.width or self._frame.width} | how)

    def to_image(self, *args: Any, **how: Any) -> bytes:
        """As `write_image`, without a file."""
        return super().to_image(*args, **{"width": self.layout.width or self._frame.width} | how)

    def __repr__(self) -> str:
        text = f"Chart({self.finding})"
        return text if len(text) <= MAX_REPR else f"{text[: MAX_REPR - 2]}…)"

    def _ipython_display_(self) -> None:
        """In a console plotly shows a figure in the browser, which a server does not have."""
        try:
            super()._ipython_display_()
        except webbrowser.Error:
            print(f"{self!r}: no browser here; .write_html('chart.html') saves the picture")

    def __reduce__(self) -> tuple[Any, ...]:
        names = ("finding", "below", "_above", "_frame")
        kept = {name: getattr(self, name) for name in names}
        return *super().__reduce__(), {**kept, "_table": self.table}


# ---- the empty figure ----------------------------------------------------------------------------
def figure(finding: str, below: str, *, height: int, **settings: Any) -> Chart:
    """An empty chart in the library's look: the finding on top, what the picture is about beneath
    it, both broken into as many lines as they need, and one legend above the picture. ``settings``
    go into the layout when it is made, as update_layout takes several times as long.
    """
    look, frame = theme.look(), theme.frame()
    axis = {"gridcolor": look.grid, "linecolor": look.grid, "zeroline": False, "automargin": True}
    axis |= {"ticks": "", "title": {"standoff": 8, "font": {"size": 13}}}
    layout = {
        "font": {"family": theme.FONT, "size": 13, "color": look.ink},
        "paper_bgcolor": look.paper,
        "plot_bgcolor": look.paper,
        "xaxis": axis,
        "yaxis": axis,
        "hoverlabel": {"font": {"family": theme.FONT, "size": 13}, "align": "left"},
        "barmode": "stack",
        "bargap": 0.3,
        # Plotly's buttons are next to the picture, not over its title; none sends data to a cloud.
        "modebar": {
            "orientation": "v",
            "bgcolor": "rgba(0,0,0,0)",
            "color": look.faint,
            "activecolor": look.ink,
            "remove": ["sendChartToCloud", "lasso2d", "select2d"],
        },
        "barcornerradius": 2,
    }
    margin = {"t": 96, "l": 20, "r": 44, "b": 60} | settings.pop("margin", {})
    if frame.height:
        margin |= {"t": 88, "b": min(margin["b"], 110)}
    options = {
        "template": {"layout": layout},
        "height": height,
        "margin": margin,
        "uniformtext": {"mode": False},  # explicit, as a live figure may go on to any other chart
        "legend": theme.LEGEND | settings.pop("legend", {}) | {"font": {"size": frame.small}},
        **settings,
    }
    if frame.height:
        options |= {"width": frame.width, "height": frame.height}
    chart = Chart(layout=options)
    chart._frame = frame
    return chart.retitled(finding, below)
