"""Seconds as stacked bars: the time of steps, divided into its parts, on one axis."""

from __future__ import annotations

from collections.abc import Mapping

from paralab.checks import count_of
from paralab.view import theme
from paralab.view.chart import Chart, figure
from paralab.view.marks import bars as mark

ROOM = 1.12  # length of the axis over that of the longest bar, for the total behind it


def seconds_bars(bars: Mapping[str, Mapping[str, float]], *, title: str) -> Chart:
    """One horizontal bar per entry, its seconds stacked by part.

    bars   {bar label: {part: seconds}}; "compute", "forward", "wait" and the like, and the axes
           "dp", "tp", "pp", have the colours that they have in timelines
    title  the finding

    Raises ValueError on seconds below 0, which it names.
    """
    rows = mark.rows_of(bars)
    totals = dict.fromkeys(bars, 0.0) | mark.totals(rows)
    end = ROOM * max(totals.values()) or 1.0
    unit, per = next(((u, p) for u, p in (("s", 1.0), ("ms", 1e-3)) if end >= p), ("µs", 1e-6))
    kinds, now = list(dict.fromkeys(part for _, part, _ in rows)), theme.look()
    known = theme.KIND_COLOUR | {axis: theme.axis_colour(axis) for axis in theme.AXIS_COLOUR}
    known |= {"wait": now.wait, "bubble": now.wait}
    known["measured"] = now.faint  # a whole next to parts
    plain = theme.series([kind for kind in kinds if kind not in known])

    def look(kind: str) -> tuple[str, str]:
        return theme.text(kind), known.get(kind) or plain[kind]["ink"]

    fig = figure(
        theme.text(title),
        "",
        height=170 + 46 * len(bars),
        showlegend=True,
        xaxis=mark.bytes_axis(f"time ({unit})", end, per),
        yaxis=mark.labels(list(bars)),
        **mark.FITTING,
    )
    traces = mark.bars(rows, per=per, end=end, look=look, kinds=kinds, unit="s")
    fig.draw(traces, mark.ends(totals, per, unit="s"))
    return fig.explained(
        f"seconds of {count_of(len(bars), 'bar')} by part: {' | '.join(map(str, bars))}",
        ("bar part seconds", rows),
    )
