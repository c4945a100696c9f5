"""Throughput over ranks, against the line of ideal scaling.

Efficiency is the throughput per rank, divided by the throughput per rank of the smallest run of the
same form, which mostly has one rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from paralab.checks import choice, count_of, illegal, instance, real, whole
from paralab.view import naming, theme
from paralab.view.chart import Chart, figure
from paralab.view.marks import note
from paralab.view.marks.curves import HOLLOW, curve

NEAR = 0.065  # share of the axis: least distance of the words at the ends of lines


def scaling(rows: Sequence[Mapping[str, Any]]) -> Chart:
    """Samples per second over ranks, by form, with the efficiency at each line's end.

    rows   mappings with form ("weak", "strong", "naive", ...), ranks, step_time (seconds), samples
           (per step, all ranks together) and clock, the same in all rows

    Raises ValueError if there are no rows, if their clocks differ, and on a value that is missing
    or out of range, which it names.
    """
    table = _efficiency(_checked(rows))
    forms, ranks = table["form"].unique().tolist(), sorted(set(table["ranks"].tolist()))
    (clock,) = set(table["clock"])
    look = {"mode": "lines+markers", "dash": "dot", "symbol": "circle" + HOLLOW}
    style, traces, ends = theme.series(forms), [], []
    for form, own in table.groupby("form", sort=False):
        points = list(own[["ranks", "throughput", "efficiency"]].itertuples(index=False, name=None))
        texts = [
            f"{theme.text(form)}, {count_of(n, 'rank')}: {y:,.1f} samples per second, "
            f"{theme.percent(share)} of ideal"
            for n, y, share in points
        ]
        ink, per_rank = style[form]["ink"], points[0][1] / points[0][0]
        ideal = [(n, per_rank * n) for n in ranks]
        traces.append(curve("ideal", ideal, ink=ink, width=1.0, showlegend=False))
        traces.append(curve(form, [pair[:2] for pair in points], texts, ink=ink, **look))
        n, y, share = points[-1]
        ends.append((n, y, f"{theme.text(form)} {theme.percent(share)}", ink))
        if all(ideal[-1] != end[:2] for end in ends):  # once, if forms share it
            ends.append((*ideal[-1], "ideal", ink))
    last, gap = float("-inf"), NEAR * table["throughput"].max()
    notes = []
    for n, y, word, ink in sorted(ends):
        last = max(y, last + gap)
        notes.append(note(f"<b>{word}</b>", n, last, anchor="left", xshift=10, ink=ink, size=14))
    room = 0.03 * (ranks[-1] - ranks[0]) or 0.5
    fig = figure(
        _finding(table),
        naming.clock_lines([clock])[0],
        height=460,
        margin={"r": 24 + int(9 * max(theme.letters(n["text"]) for n in notes))},
        xaxis={"title": "ranks", "tickvals": ranks, "range": [ranks[0] - room, ranks[-1] + room]},
        yaxis={"title": "samples per second", "rangemode": "tozero", "tickformat": "~s"},
    )
    return fig.draw(traces, notes).tabled(table)


def _checked(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    legal = "form, ranks, step_time, samples, clock"
    if not isinstance(rows, Sequence) or not rows:
        raise illegal("rows", rows, "not a list of rows", f"one row per run: {legal}")
    for i, row in enumerate(rows):
        instance(f"rows[{i}]", row, (Mapping, pd.Series), legal, "mapping")
        whole(f"rows[{i}]['ranks']", row.get("ranks"), at_least=1)
        clocks = tuple(naming.CLOCK_MEANS) if i == 0 else (rows[0]["clock"],)
        choice(f"rows[{i}]['clock']", row.get("clock"), clocks)
        for name in ("step_time", "samples"):
            real(f"rows[{i}][{name!r}]", row.get(name), above=0.0)
        instance(f"rows[{i}]['form']", row.get("form"), str, "a text such as 'weak'", "name")
    return pd.DataFrame(list(rows))


def _efficiency(points: pd.DataFrame) -> pd.DataFrame:
    """Form, clock, ranks, throughput and efficiency of the points, from few ranks to many."""
    points = points.assign(throughput=points["samples"] / points["step_time"])
    points = points.sort_values("ranks", kind="stable")
    first = points.groupby("form")[["ranks", "throughput"]].transform("first")
    alone = first["throughput"] / first["ranks"]
    points["efficiency"] = points["throughput"] / (points["ranks"] * alone)
    return points[["form", "clock", "ranks", "throughput", "efficiency"]].reset_index(drop=True)


def _finding(table: pd.DataFrame) -> str:
    """The efficiency of each form on the largest number of ranks."""
    most = table[table["ranks"] == table["ranks"].max()]
    ends = most.sort_values("efficiency", ascending=False)
    kinds = {"weak": "weak scaling", "strong": "strong scaling"}
    names = [kinds.get(form) or theme.text(form) for form in ends["form"]]
    shares = [theme.share(share) for share in ends["efficiency"]]
    rest = [f"{name} {share}" for name, share in zip(names, shares, strict=True)][1:]
    keeps = f"{names[0]} keeps {shares[0]} of the ideal throughput"
    n = int(most["ranks"].iloc[0])
    return ", ".join([f"On {count_of(n, 'rank')} {keeps}", *rest])
