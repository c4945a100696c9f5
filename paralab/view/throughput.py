"""Throughput over ranks, against the line that perfect scaling would follow.

Efficiency is a rank's throughput divided by what one rank reaches alone, in the same form and by
the same clock (the smallest number of ranks, where one rank was not run). Measured points are
filled and their line is solid, replayed ones hollow and dashed, predicted ones hollow and dotted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from paralab.checks import choice, illegal, real, whole
from paralab.view import naming, theme

if TYPE_CHECKING:
    import pandas as pd

    from paralab.view.chart import Chart

LOG_FROM = 10  # times as many ranks: from there on both axes are logarithmic


def scaling(rows: pd.DataFrame | Iterable[Mapping[str, Any]], title: str | None = None) -> Chart:
    """Samples per second over ranks, by form and clock, with the efficiency at each line's end.

    rows   mappings or a DataFrame with ranks, clock, form (may be left out if there is one), and
           either samples_per_second or step_time (seconds) with samples (per step, all ranks
           together). Without samples a step counts as one: steps per second, for strong scaling
    title  in place of the finding

    Raises ValueError naming what a row lacks.
    """
    points = _checked(rows)
    unit = "samples per second"
    if not all("samples_per_second" in p or "samples" in p for p in points):
        unit = "steps per second"
    table, bases = _efficiency(points)
    curves = list(dict.fromkeys(zip(table["form"], table["clock"], strict=True)))
    clocks = [c for c in naming.CLOCK_MEANS if c in set(table["clock"])]
    line = " · ".join(f"{c}: {naming.CLOCK_BRIEF[c]}" for c in clocks)
    finding = theme.text(title) if title is not None else _finding(table)
    fig = theme.figure(finding, line, height=460)
    most, now = int(table["ranks"].max()), theme.look()
    least = int(table["ranks"].min())
    ranks = sorted(set(table["ranks"].tolist()))
    style = theme.series(list(dict.fromkeys(table["form"])))
    judged = {form: bases[form, clock] for form, clock in curves if clock == _judged(table)}
    apart = len({f"{each:.1e}" for each in judged.values()}) > 1
    for i, (form, each) in enumerate(judged.items()):  # where they agree these lie on one another
        fig.add_scatter(
            name="ideal",
            mode="lines",
            hoverinfo="skip",
            showlegend=i == 0,
            legendgroup="ideal",
            x=ranks,
            y=[each * n for n in ranks],
            line={
                "color": style[form]["colour"] if apart else now.faint,
                "width": 1 if apart else 1.5,
            },
        )
    for clock in clocks:
        dash, hollow = theme.CLOCK_STYLE[clock]
        fig.add_scatter(
            name=clock,
            x=[None],
            y=[None],
            mode="lines+markers",
            line={"color": now.ink, "width": 2.5, "dash": dash},
            marker={"size": 10, "line": {"width": 2}, "symbol": "circle" + "-open" * hollow},
        )
    for form, clock in curves:
        mine = table[(table["form"] == form) & (table["clock"] == clock)]
        fig.add_scatter(**_curve(form, clock, mine, style[form], unit))
    log = most >= LOG_FROM * least
    words = _ends(fig, table, curves, style, log=log)
    fig.update_layout(
        margin={"r": 24 + int(8 * max(map(len, words)))},
        legend={"orientation": "h", "y": 1, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
        xaxis={
            "title": {"text": "ranks"},
            "tickvals": ranks if log else _apart(ranks),
            "type": "log" if log else "linear",
            "range": _range(least, most, log),
        },
        yaxis={"title": {"text": unit}, **_heights(table, bases, log)},
    )
    return fig.explained(
        f"scaling of {' | '.join(dict.fromkeys(table['form']))} to {most} ranks, "
        f"{' and '.join(clocks)}: {len(table)} points",
        table,
    )


def _checked(rows: Any) -> list[dict[str, Any]]:
    listed = rows.to_dict("records") if hasattr(rows, "to_dict") else [dict(row) for row in rows]
    if not listed:
        raise illegal("rows", rows, "nothing to draw", "one row per run: ranks, clock, step_time")
    points = []
    for i, row in enumerate(listed):
        # A DataFrame fills what a row does not have with NaN, which is not there either.
        row = {k: v for k, v in row.items() if v is not None and v == v}
        whole(f"rows[{i}]['ranks']", row.get("ranks"), at_least=1)
        choice(f"rows[{i}]['clock']", row.get("clock"), tuple(naming.CLOCK_MEANS))
        if "samples_per_second" not in row and "step_time" not in row:
            raise illegal(f"rows[{i}]", row, "no speed", "samples_per_second, or step_time")
        for name in ("samples_per_second", "step_time", "samples"):
            if name in row:
                real(f"rows[{i}][{name!r}]", row[name], above=0.0)
        points.append({"form": "", **row})
    return points


def _efficiency(
    points: list[dict[str, Any]],
) -> tuple[pd.DataFrame, dict[tuple[str, str], float]]:
    """form, ranks, clock, throughput, efficiency; and what one rank of each (form, clock) reaches.

    A form that was not run on so few ranks as another is held against the best of those that were.
    """
    import pandas as pd

    for p in points:
        steps = 1 / p["step_time"] if "step_time" in p else 0.0
        p["throughput"] = p.get("samples_per_second", p.get("samples", 1) * steps)
    bases = {}
    for form, clock in {(str(p["form"]), p["clock"]) for p in points}:
        mine = [p for p in points if p["clock"] == clock]
        least = min(p["ranks"] for p in mine)
        first = [p for p in mine if p["ranks"] == least]
        own = [p for p in first if str(p["form"]) == form]
        bases[form, clock] = max(p["throughput"] / least for p in own or first)
    rows = sorted(
        (
            str(p["form"]),
            list(naming.CLOCK_MEANS).index(p["clock"]),
            int(p["ranks"]),
            float(p["throughput"]),
        )
        for p in points
    )
    forms = list(dict.fromkeys(str(p["form"]) for p in points))
    rows.sort(key=lambda row: (forms.index(row[0]), row[1], row[2]))
    clocks = list(naming.CLOCK_MEANS)
    frame = pd.DataFrame(rows, columns=["form", "clock", "ranks", "throughput"])
    frame["clock"] = [clocks[i] for i in frame["clock"]]
    base = [bases[key] for key in zip(frame["form"], frame["clock"], strict=True)]
    frame["efficiency"] = frame["throughput"] / (frame["ranks"] * base)
    return frame, bases


def _curve(form: str, clock: str, mine: pd.DataFrame, style: Mapping[str, str], unit: str) -> dict:
    dash, hollow = theme.CLOCK_STYLE[clock]
    name = ", ".join(filter(None, (theme.text(form), clock)))
    return {
        "name": name,
        "x": mine["ranks"].tolist(),
        "y": mine["throughput"].tolist(),
        "mode": "lines+markers",
        "showlegend": False,
        "line": {"color": style["colour"], "width": 2.5, "dash": dash},
        "marker": {
            "size": 10,
            "color": style["colour"],
            "line": {"width": 2},
            "symbol": style["symbol"] + "-open" * hollow,
        },
        "hovertext": [
            f"{name}, {n} ranks: {v:,.1f} {unit}, {100 * e:.0f} % of ideal"
            for n, v, e in zip(mine["ranks"], mine["throughput"], mine["efficiency"], strict=True)
        ],
        "hovertemplate": "%{hovertext}<extra></extra>",
    }


def _ends(
    fig: Chart,
    table: pd.DataFrame,
    curves: list[tuple[str, str]],
    style: Mapping[str, Mapping[str, str]],
    *,
    log: bool,
) -> list[str]:
    """Name and efficiency where each form's longest curve ends, moved apart where two collide."""
    scale = math.log10 if log else float
    heights = [scale(v) for v in table["throughput"]]
    gap = 0.065 * (max(heights) - (min(heights) if log else 0.0))
    ends = []
    for form, clock in curves:
        mine = table[table["form"] == form]
        last = mine[mine["clock"] == clock].iloc[-1]
        if last["ranks"] == mine["ranks"].max():
            rivals = mine["clock"][mine["ranks"] == mine["ranks"].max()].nunique() > 1
            name = ", ".join(filter(None, (form, clock if rivals else "")))
            word = f"{name} {100 * last['efficiency']:.0f} %".strip()
            ends.append((scale(last["throughput"]), int(last["ranks"]), form, word))
    written: dict[int, float] = {}
    for y, n, form, word in sorted(ends):
        written[n] = max(y, written.get(n, -math.inf) + gap)
        fig.add_annotation(
            x=scale(n),
            y=written[n],
            text=f"<b>{theme.text(word)}</b>",
            showarrow=False,
            xanchor="left",
            xshift=10,
            font={"color": style[form]["colour"], "size": 14},
        )
    return [word for *_, word in ends]


def _judged(table: pd.DataFrame) -> str:
    """The clock at the largest scale that is judged: replayed before predicted before measured."""
    there = set(table["clock"][table["ranks"] == table["ranks"].max()])
    return next(c for c in ("replayed", "predicted", "measured") if c in there)


def _finding(table: pd.DataFrame) -> str:
    """What is left of ideal at the largest scale."""
    most, clock = table[table["ranks"] == table["ranks"].max()], _judged(table)
    ends = most[most["clock"] == clock].sort_values("efficiency", ascending=False)
    said = [
        f"{theme.text(form)} {100 * share:.0f} %".strip()
        for form, share in zip(ends["form"], ends["efficiency"], strict=True)
    ]
    n = int(most["ranks"].iloc[0])
    best, share = theme.text(ends["form"].iloc[0]), ends["efficiency"].iloc[0]
    keeps = f"{best} keeps" if best else "training keeps"
    return (
        ", ".join([f"At {n} ranks {keeps} {100 * share:.0f} % of ideal", *said[1:]]) + f" ({clock})"
    )


def _apart(ranks: list[int]) -> list[int]:
    """Ticks at the numbers that were run, less those too close to be written side by side."""
    kept = [ranks[-1]]
    for n in reversed(ranks[:-1]):
        if kept[-1] - n >= 0.035 * (ranks[-1] - ranks[0]):
            kept.append(n)
    return kept[::-1]


def _heights(
    table: pd.DataFrame, bases: Mapping[tuple[str, str], float], log: bool
) -> dict[str, Any]:
    if not log:
        return {"rangemode": "tozero", "tickformat": "~s"}
    low = 0.7 * float(table["throughput"].min())
    high = 1.4 * max(bases.values()) * float(table["ranks"].max())
    ticks = theme.log_ticks(low, high)
    return {
        "type": "log",
        "range": [math.log10(low), math.log10(high)],
        "tickvals": ticks,
        "ticktext": [f"{t:,g}" for t in ticks],
    }


def _range(least: int, most: int, log: bool) -> list[float]:
    low, high = (math.log10(least), math.log10(most)) if log else (least, most)
    room = 0.03 * (high - low) or 0.5
    return [low - room, high + room]
