"""Step times of several plans for one training, predicted next to replayed or measured.

To choose a plan, a prediction only has to put the plans in the right order. The rows are sorted by
the replayed or measured time, so the predicted points should move to the right from top to bottom
as well. Spearman's rank correlation says how far they do: it is 1 if both orders are the same, and
0 if they are unrelated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from paralab.checks import illegal
from paralab.report.tables import Tables
from paralab.view import naming, theme
from paralab.view.chart import Chart, figure
from paralab.view.marks.curves import HOLLOW, curve


def contest(expected: Mapping[str, Tables], found: Mapping[str, Tables]) -> Chart:
    """A row per plan, the fastest on top: its predicted and its replayed or measured step time.

    expected  {name of a plan: its predicted report}
    found     {name of a plan: its replayed or measured report}

    Raises ValueError if the names differ or are fewer than two, if the reports of one mapping have
    several clocks, or if both mappings have the same clock.
    """
    for what, reports in (("expected", expected), ("found", found)):
        naming.labelled(what, reports, "{name of a plan: its report}")
    if set(expected) != set(found) or len(found) < 2:
        legal = f"at least two, each with a report in both: {sorted(expected)}"
        raise illegal("found", sorted(found), "not the plans in expected, or too few", legal)
    names, both = sorted(found, key=lambda name: found[name].step_time), (expected, found)
    clocks = [clock for one in both for clock in sorted({r.clock for r in one.values()})]
    if len(clocks) != 2 or clocks[0] == clocks[1]:
        legal = "one clock for all in expected, another one for all in found"
        raise illegal("clocks", clocks, "not one for each mapping", legal)
    times = {
        clock: [reports[name].step_time for name in names]
        for clock, reports in zip(clocks, both, strict=True)
    }
    table = pd.DataFrame(times, index=pd.Index(names, name="plan"))
    look = theme.look()
    rows = [theme.text(name) for name in names]
    favourite, came_in = int(table[clocks[0]].argmin()), times[clocks[1]]
    if came_in[favourite] == came_in[0]:  # it need not be the only one that is the fastest
        finding = f"The fastest plan is {rows[favourite]}, as {clocks[0]}"
    else:
        finding = f"The fastest plan is {rows[0]}; {rows[favourite]} was {clocks[0]} as the fastest"
    order = f"{rank_correlation(*times.values()):.2f}"
    below = [*naming.clock_lines(clocks), f"rank correlation of the two orders: {order}"]
    ends = [
        (time and 1e3 * time, row)
        for row, *both in zip(rows, *times.values(), strict=True)
        for time in (*both, None)
    ]
    traces = [curve("", ends, ink=look.grid, width=6, showlegend=False)]
    for clock, hollow in zip(clocks, (HOLLOW, ""), strict=True):
        points = [(1e3 * time, row) for time, row in zip(times[clock], rows, strict=True)]
        texts = [f"{row}, {clock}: {ms:.2f} ms" for ms, row in points]
        ink = look.series[bool(hollow) ^ 1]
        style = {"ink": ink, "symbol": "circle" + hollow, "size": 13, "mode": "markers"}
        traces.append(curve(clock, points, texts, **style))
    fig = figure(
        finding,
        " · ".join(below),
        height=150 + 34 * len(names),
        margin={"l": 24 + int(8 * max(map(len, names)))},
        xaxis={"title": "step (ms)", "rangemode": "tozero"},
        yaxis={"autorange": "reversed", "tickfont": {"size": 14}, "ticksuffix": "  "},
    )
    return fig.draw(traces).tabled(table)


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's rho of two equally long columns, from -1 to 1; ties share their mean rank."""
    return float(pd.Series(list(first)).rank().corr(pd.Series(list(second)).rank()))
