"""Several plans for one training, by the time of a step: what was predicted, and what came of it.

Does a prediction have to be right? To choose a plan it only has to put them in the right order: the
plans are sorted by what was found, so the predicted points should fall from top to bottom as well.
How far they do is Spearman's rank correlation: 1 where both orders are one, 0 where they have
nothing to do with each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from paralab.checks import illegal
from paralab.view import naming, theme

if TYPE_CHECKING:
    from paralab.report.tables import Tables
    from paralab.view.chart import Chart


def contest(
    expected: Mapping[str, Tables], found: Mapping[str, Tables], title: str | None = None
) -> Chart:
    """A row per plan, the fastest on top: predicted and replayed (or measured) time of a step.

    expected, found  {name of the plan: report}, the same names in both
    title            in place of the finding

    Raises ValueError if the names differ or are fewer than two.
    """
    import pandas as pd

    if set(expected) != set(found) or len(found) < 2:
        raise illegal(
            "found",
            sorted(found),
            "not the plans that were expected",
            f"at least two, and for each both reports: {sorted(expected)}",
        )
    names = sorted(found, key=lambda name: found[name].step_time)
    clocks = [one_clock(reports) for reports in (expected, found)]
    table = pd.DataFrame(
        {
            "plan": names,
            **{
                clock: [reports[name].step_time for name in names]
                for clock, reports in zip(clocks, (expected, found), strict=True)
            },
        }
    ).set_index("plan")
    order = rank_correlation(table[clocks[0]], table[clocks[1]])
    favourite = table[clocks[0]].idxmin()
    finding = (
        f"{theme.text(names[0])} wins, as predicted"
        if favourite == names[0]
        else (f"{theme.text(names[0])} wins, predicted was {theme.text(favourite)}")
    )
    finding += f"; rank correlation {order:.2f}"
    line = " · ".join(f"{clock}: {naming.CLOCK_BRIEF[clock]}" for clock in clocks)
    fig = theme.figure(
        theme.text(title) if title is not None else finding, line, height=150 + 34 * len(names)
    )
    now, rows = theme.look(), [theme.text(name) for name in names]
    ends = [
        value
        for pair in zip(*(1e3 * table[c] for c in clocks), strict=True)
        for value in (*pair, None)
    ]
    fig.add_scatter(
        x=ends,
        y=[row for row in rows for _ in range(3)],
        mode="lines",
        showlegend=False,
        hoverinfo="skip",
        line={"color": now.grid, "width": 6},
    )
    for clock, hollow in zip(clocks, (True, False), strict=True):
        fig.add_scatter(
            name=clock,
            x=(1e3 * table[clock]).tolist(),
            y=rows,
            mode="markers",
            hovertemplate=f"%{{y}}, {clock}: %{{x:.2f}} ms<extra></extra>",
            marker={
                "size": 13,
                "color": now.series[1 - hollow],
                "line": {"width": 2.5},
                "symbol": "circle" + "-open" * hollow,
            },
        )
    fig.update_layout(
        margin={"l": 24 + int(8 * max(map(len, names)))},
        legend={"orientation": "h", "y": 1, "yanchor": "bottom", "x": 0},
        xaxis={"title": {"text": "step (ms)"}, "rangemode": "tozero"},
        yaxis={"autorange": "reversed", "tickfont": {"size": 14}, "ticksuffix": "  "},
    )
    return fig.explained(f"{len(names)} plans, {' and '.join(clocks)} time of a step", table)


def one_clock(reports: Mapping[str, Any]) -> str:
    """The clock that all of these are on."""
    clocks = {report.clock for report in reports.values()}
    if len(clocks) > 1:
        raise illegal(
            "found",
            sorted(clocks),
            "times of different clocks in one row",
            "reports that are all predicted, all replayed or all measured",
        )
    return clocks.pop()


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's rho of two equally long columns, from -1 to 1; ties share their mean rank."""
    import pandas as pd

    return float(pd.Series(list(first)).rank().corr(pd.Series(list(second)).rank()))
