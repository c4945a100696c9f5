"""Chart: a plotly figure that also carries its numbers and says in one line what it shows.

A picture is for looking; `.table` is for checking and for going on (a plain DataFrame, one row per
mark), and the repr is for reading where no picture can be shown. The repr holds no time: notebooks
compare it, and two runs of one cell must give the same line.

plotly is imported here and nowhere above, so this module is imported inside functions only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go

from paralab.view import late_grammar  # noqa: F401  before a figure is shown

if TYPE_CHECKING:
    import pandas as pd

MAX_REPR = 110  # characters: one line of a notebook


class Chart(go.Figure):
    """A plotly Figure, with everything that one can do, and four properties more.

    table    DataFrame of what is drawn, one row per mark; None for an empty chart. Times in
             seconds, sizes in bytes, whatever unit the axis has
    summary  one line: what is shown, on which clock, of how many marks
    finding, below   the two lines of the title: what the picture proves, and on which clock

    ``go.FigureWidget(chart)`` makes a live one of it (the table stays behind, with the chart).
    """

    def __init__(
        self, *args: Any, table: pd.DataFrame | None = None, summary: str = "empty", **settings: Any
    ) -> None:
        super().__init__(*args, **settings)
        self._table, self._summary = table, summary

    @property
    def table(self) -> pd.DataFrame | None:
        if callable(self._table):
            self._table = self._table()
        return self._table

    @property
    def summary(self) -> str:
        return self._summary

    @property
    def finding(self) -> str:
        first, _, _ = (self.layout.title.text or "").partition("<br>")
        return re.sub("</?b>", "", first)

    @property
    def below(self) -> str:
        _, _, second = (self.layout.title.text or "").partition("<br>")
        return re.sub("^<span[^>]*>|</span>$", "", second)

    def annotated(self, notes: Iterable[dict[str, Any]]) -> Chart:
        """This chart with these annotations; one by one, each would check all before it again."""
        self.layout.annotations = (*self.layout.annotations, *notes)
        return self

    def said_below(self, more: str) -> Chart:
        """This chart, with some more words at the end of its title's second line."""
        text = self.layout.title.text.removesuffix("</span>")
        self.layout.title.text = f"{text} · {more}</span>"
        return self

    def explained(self, summary: str, table: pd.DataFrame | Callable[[], pd.DataFrame]) -> Chart:
        """This chart, with its line of text and the numbers behind it, or what makes them.

        A slider's picture is gone before anybody asks for its table.
        """
        self._table, self._summary = table, summary
        return self

    def __repr__(self) -> str:
        said = f"Chart({self._summary})"
        return said if len(said) <= MAX_REPR else f"{said[: MAX_REPR - 2]}…)"

    def __reduce__(self) -> tuple[Any, ...]:
        rebuild, arguments = super().__reduce__()
        return rebuild, arguments, {"_table": self.table, "_summary": self._summary}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._table, self._summary = state["_table"], state["_summary"]
