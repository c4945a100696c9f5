"""Chart: a plotly figure that also carries its numbers and says in one line what it shows.

A picture is for looking; `.table` is for checking and for going on (a plain DataFrame, one row per
mark), and the repr is for reading where no picture can be shown. The repr holds no time: notebooks
compare it, and two runs of one cell must give the same line.

plotly is imported here, so modules outside this package import it inside functions only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go

import paralab.view.late_grammar  # noqa: F401  before a figure is shown
from paralab.view import theme

if TYPE_CHECKING:
    import pandas as pd

MAX_REPR = 110  # characters: one line of a notebook


class Chart(go.Figure):
    """A plotly Figure, with all of its methods and four attributes more.

    table    DataFrame of what is drawn, one row per mark; None for an empty chart. Times in
             seconds, sizes in bytes, whatever unit the axis has
    summary  one line: what is shown, on which clock, of how many marks
    finding, below   the two lines of the title: what the picture proves, and what it is about

    ``go.FigureWidget(chart)`` makes a live one of it (the table stays behind, with the chart).
    """

    summary, finding, below = "empty", "", ""
    _table: Any = None  # or what will make it, see `explained`
    _lines, _rows = 0, 1  # pixels that the title's lines take beyond the first two; legend's rows
    _frame = theme.ALONE

    @property
    def table(self) -> pd.DataFrame | None:
        if callable(self._table):
            self._table = self._table()
        if isinstance(self._table, tuple):
            import pandas as pd

            columns, rows = self._table
            self._table = pd.DataFrame(rows, columns=columns.split())
        return self._table

    def draw(
        self,
        traces: Iterable[dict[str, Any]],
        notes: Iterable[dict[str, Any]] = (),
        shapes: Iterable[dict[str, Any]] = (),
    ) -> Chart:
        """This chart with more marks, as dicts: one by one, each would check all before it again,
        and a slider is waiting.
        """
        self.add_traces(list(traces))
        self.layout.annotations = (*self.layout.annotations, *notes)
        self.layout.shapes = (*self.layout.shapes, *shapes)
        self._make_room()
        return self

    def _make_room(self) -> None:
        """Above the picture, for the lines of a legend that stands there."""
        legend = self.layout.legend
        if legend.orientation != "h" or legend.yanchor != "bottom" or not self.layout.margin.t:
            return
        names = [t.name for t in self.data if t.name and t.showlegend is not False]
        if not names or (len(self.data) == 1 and not self.layout.showlegend):
            return
        rows = theme.legend_rows(names)
        more, self._rows = theme.LEGEND_ROW * (rows - self._rows), rows
        self.layout.margin.t += more
        if not self._frame.height:
            self.layout.height += more

    def retitled(self, finding: str, below: str) -> Chart:
        """This chart under another title, of another number of lines maybe."""
        if re.match("[a-z]{3,}[ ,:]", finding):  # a word, and no symbol: dp=4, all_reduce
            finding = finding[0].upper() + finding[1:]
        self.finding, self.below = finding, below
        frame, before = self._frame, self._lines
        size, small, width = frame.large, frame.small, frame.width - 2 * theme.SIDE
        first = theme.broken(finding, width, size * theme.BOLD)
        second = theme.broken(below, width, small)
        self._lines = (size + 5) * first.count("<br>") + (small + 4) * second.count("<br>")
        style = f"font-size:{small}px;color:{theme.look().faint}"
        self.layout.title = {
            # One text: plotly's own subtitle falls on the title wherever a figure is drawn before
            # it is on screen, or changes its width there.
            "text": f"<b>{first}</b><br><span style='{style}'>{second}</span>",
            **{"x": 0, "xref": "container", "xanchor": "left", "font": {"size": size}},
            **{"y": 1, "yref": "container", "yanchor": "top"},
            "pad": {"t": 18 if frame.height else 24, "l": theme.SIDE},
        }
        if self._lines != before:
            self.layout.margin.t += self._lines - before
            self.layout.height += 0 if frame.height else self._lines - before
        return self

    def narrowed(self, width: int) -> Chart:
        """This chart with its title broken for a figure of this width."""
        self._frame = self._frame._replace(width=width)
        return self.retitled(self.finding, self.below)

    def titled(self, words: str | None) -> Chart:
        """This chart under a caller's own words, if there are any, in place of its finding."""
        return self if words is None else self.retitled(theme.text(words), self.below)

    def said_below(self, more: str) -> Chart:
        """This chart, with some more words at the end of its title's second line."""
        return self.retitled(self.finding, " · ".join(filter(None, (self.below, more))))

    def explained(self, summary: str, table: Any) -> Chart:
        """This chart, with its line of text and the numbers behind it: a DataFrame, (columns, rows)
        that will make one, or a function that returns either, for a slider's picture is gone
        before anybody asks for its table.
        """
        self._table, self.summary = table, summary
        return self

    def __repr__(self) -> str:
        said = f"Chart({self.summary})"
        return said if len(said) <= MAX_REPR else f"{said[: MAX_REPR - 2]}…)"

    def __reduce__(self) -> tuple[Any, ...]:
        names = ("summary", "finding", "below", "_lines", "_rows", "_frame")
        kept = {name: getattr(self, name) for name in names}
        return *super().__reduce__(), {**kept, "_table": self.table}


# ---- the empty figure ----------------------------------------------------------------------------
def figure(finding: str, below: str, *, height: int, **settings: Any) -> Chart:
    """An empty chart in the kit's look: the finding on top, what it is about beneath it, both as
    many lines as their words take, and one legend above the picture; ``settings`` go to its layout,
    all at once, for update_layout takes several times as long.
    """
    now, frame = theme.look(), theme.frame()
    axis = {"gridcolor": now.grid, "linecolor": now.grid, "zeroline": False, "automargin": True}
    axis |= {"ticks": "", "title": {"standoff": 8, "font": {"size": 13}}}
    layout = {
        "font": {"family": theme.FONT, "size": 13, "color": now.ink},
        "paper_bgcolor": now.paper,
        "plot_bgcolor": now.paper,
        "xaxis": axis,
        "yaxis": axis,
        "hoverlabel": {"font": {"family": theme.FONT, "size": 13}, "align": "left"},
        "barmode": "stack",
        "bargap": 0.3,
        # Next to the picture, not over its title; no button that sends a report to a cloud.
        "modebar": {
            "orientation": "v",
            "bgcolor": "rgba(0,0,0,0)",
            "color": now.faint,
            "activecolor": now.ink,
            "remove": ["sendChartToCloud", "lasso2d", "select2d"],
        },
        "barcornerradius": 2,
    }
    margin = {"t": 96, "l": 20, "r": 44, "b": 60} | settings.pop("margin", {})
    if frame.height:
        margin |= {"t": 88, "b": min(margin["b"], 110)}
    made = {
        "template": {"layout": layout},
        "height": height,
        "margin": margin,
        "uniformtext": {"mode": False},  # said by all: a figure on a page becomes any other chart
        "legend": theme.LEGEND | settings.pop("legend", {}) | {"font": {"size": frame.small}},
        **settings,
    }
    if frame.height:
        made |= {"width": frame.width, "height": frame.height}
    chart = Chart(layout=made)
    chart._frame = frame
    return chart.retitled(finding, below)
