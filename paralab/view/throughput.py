"""Throughput over ranks, against the line that perfect scaling would follow.

Efficiency is a rank's throughput divided by what one rank reaches alone, in the same form and by
the same clock (the smallest number of ranks, where one rank was not run). Measured points are
filled and their line is solid, replayed ones hollow and dashed, predicted ones hollow and dotted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from paralab.checks import choice, illegal, real, whole
from paralab.view import naming, theme
from paralab.view.chart import Chart, figure
from paralab.view.marks import note
from paralab.view.marks.curves import HOLLOW, curve, log_axis

LOG_FROM = 10  # times as many ranks: from there on both axes are logarithmic


def scaling(rows: pd.DataFrame | Iterable[Mapping[str, Any]]) -> Chart:
    """Samples per second over ranks, by form and clock, with the efficiency at each line's end.

    rows   mappings or a DataFrame with ranks, clock, form (may be left out if there is one), and
           either samples_per_second or step_time (seconds) with samples (per step, all ranks
           together). Without samples a step counts as one: steps per second, for strong scaling

    Raises ValueError naming what a row lacks.
    """
    points = _checked(rows)
    whole_steps = not all("samples_per_second" in p or "samples" in p for p in points)
    unit = "steps per second" if whole_steps else "samples per second"
    table, bases = _efficiency(points)
    forms, ranks = list(dict.fromkeys(table["form"])), sorted(set(table["ranks"].tolist()))
    clocks = [c for c in naming.CLOCK_MEANS if c in set(table["clock"])]
    style, now = theme.series(forms), theme.look()
    judged = _judged(table)
    ideals = {form: bases[form, judged] for form in forms if (form, judged) in bases}
    apart = len({f"{each:.1e}" for each in ideals.values()}) > 1
    traces = []
    for i, (form, each) in enumerate(ideals.items()):  # equal ones lie on one another
        ink, width = (style[form]["ink"], 1.0) if apart else (now.faint, 1.5)
        line = [(n, each * n) for n in ranks]
        shown = {"showlegend": i == 0, "legendgroup": "ideal"}
        traces.append(curve("ideal", line, ink=ink, width=width, **shown))
    looks = {
        clock: {"mode": "lines+markers", "dash": dash, "symbol": "circle" + HOLLOW * hollow}
        for clock, (dash, hollow) in theme.CLOCK_STYLE.items()
    }
    traces += [curve(clock, [(None, None)], ink=now.ink, **looks[clock]) for clock in clocks]
    log, ends = ranks[-1] >= LOG_FROM * ranks[0], {}
    for (form, clock), mine in table.groupby(["form", "clock"], sort=False):
        label = ", ".join(filter(None, (form, clock)))
        found = list(mine[["ranks", "throughput", "efficiency"]].itertuples(index=False, name=None))
        said = [
            f"{theme.text(label)}, {n} rank{'s' * (n > 1)}: {y:,.1f} {unit}, "
            f"{theme.percent(share)} of ideal"
            for n, y, share in found
        ]
        pairs, look = [(n, y) for n, y, _ in found], {"ink": style[form]["ink"], **looks[clock]}
        traces.append(curve(label, pairs, said, showlegend=False, **look))
        ends[form, clock] = found[-1]
    notes = _ends(ends, table["throughput"].tolist(), style, log=log)
    heights = {"title": {"text": unit}, "rangemode": "tozero", "tickformat": "~s"}
    if log:
        high = 1.4 * max(bases.values()) * ranks[-1]
        heights = log_axis(unit, 0.7 * float(table["throughput"].min()), high, "")
    fig = figure(
        _finding(table),
        " · ".join(naming.clock_lines(clocks)),
        height=460,
        margin={"r": 24 + int(9 * max(theme.letters(n["text"]) for n in notes))},
        xaxis={"title": {"text": "ranks"}, "tickvals": ranks if log else _apart(ranks)}
        | _range(ranks[0], ranks[-1], log),
        yaxis=heights,
    )
    said = f"scaling of {' | '.join(forms)} to {ranks[-1]} ranks, {' and '.join(clocks)}"
    return fig.draw(traces, notes).explained(f"{said}: {len(table)} points", table)


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
        steps = 1 / row["step_time"] if "step_time" in row else 0.0
        speed = row.get("samples_per_second", row.get("samples", 1) * steps)
        points.append({**row, "form": str(row.get("form", "")), "throughput": speed})
    return points


def _efficiency(
    points: list[dict[str, Any]],
) -> tuple[pd.DataFrame, dict[tuple[str, str], float]]:
    """form, ranks, clock, throughput, efficiency; and what one rank of each (form, clock) reaches.

    A form that was not run on so few ranks as another is held against the best of those that were.
    """
    bases = {}
    for form, clock in {(p["form"], p["clock"]) for p in points}:
        mine = [p for p in points if p["clock"] == clock]
        least = min(p["ranks"] for p in mine)
        first = [p for p in mine if p["ranks"] == least]
        own = [p for p in first if p["form"] == form]
        bases[form, clock] = max(p["throughput"] / least for p in own or first)
    forms, clocks = list(dict.fromkeys(p["form"] for p in points)), list(naming.CLOCK_MEANS)
    points.sort(key=lambda p: (forms.index(p["form"]), clocks.index(p["clock"]), p["ranks"]))
    frame = pd.DataFrame(points, columns=["form", "clock", "ranks", "throughput"])
    base = [bases[key] for key in zip(frame["form"], frame["clock"], strict=True)]
    frame["efficiency"] = frame["throughput"] / (frame["ranks"] * base)
    return frame, bases


def _ends(
    ends: Mapping[tuple[str, str], tuple[int, float, float]],
    heights: Sequence[float],
    style: Mapping[str, Mapping[str, str]],
    *,
    log: bool,
) -> list[dict[str, Any]]:
    """The efficiency at the end of every line, moved apart where two collide."""
    scale = math.log10 if log else float
    gap = 0.065 * (scale(max(heights)) - (scale(min(heights)) if log else 0.0))
    longest = {form: max(n for (f, _), (n, *_) in ends.items() if f == form) for form, _ in ends}
    words = []
    for (form, clock), (n, y, share) in ends.items():
        if n == longest[form]:
            rivals = sum(f == form and m == n for (f, _), (m, *_) in ends.items()) > 1
            name = ", ".join(filter(None, (form, clock * rivals)))
            words.append((scale(y), n, form, f"{name} {theme.percent(share)}".strip()))
    written: dict[int, float] = {}
    notes = []
    for y, n, form, word in sorted(words):
        written[n] = max(y, written.get(n, -math.inf) + gap)
        at = {"hold": "left", "xshift": 10, "ink": style[form]["ink"], "size": 14}
        notes.append(note(f"<b>{theme.text(word)}</b>", scale(n), written[n], **at))
    return notes


def _judged(table: pd.DataFrame) -> str:
    """The clock at the largest scale that is judged: replayed before predicted before measured."""
    there = set(table["clock"][table["ranks"] == table["ranks"].max()])
    return next(c for c in ("replayed", "predicted", "measured") if c in there)


def _finding(table: pd.DataFrame) -> str:
    """What is left of ideal at the largest scale."""
    most, clock = table[table["ranks"] == table["ranks"].max()], _judged(table)
    ends = most[most["clock"] == clock].sort_values("efficiency", ascending=False)
    kinds = {"": "training", "weak": "weak scaling", "strong": "strong scaling"}
    names = [kinds.get(form) or theme.text(form) for form in ends["form"]]
    shares = [theme.percent(share) for share in ends["efficiency"]]
    said = [f"{name} {share}" for name, share in zip(names, shares, strict=True)][1:]
    keeps = f"{names[0]} keeps {shares[0]} of the ideal throughput"
    return ", ".join([f"On {int(most['ranks'].iloc[0])} ranks {keeps}", *said]) + f" ({clock})"


def _apart(ranks: list[int]) -> list[int]:
    """Ticks at the numbers that were run, less those too close to be written side by side."""
    kept = [ranks[-1]]
    for n in reversed(ranks[:-1]):
        if kept[-1] - n >= 0.035 * (ranks[-1] - ranks[0]):
            kept.append(n)
    return kept[::-1]


def _range(least: int, most: int, log: bool) -> dict[str, Any]:
    low, high = (math.log10(least), math.log10(most)) if log else (least, most)
    room = 0.03 * (high - low) or 0.5
    return {"type": "log" if log else "linear", "range": [low - room, high + room]}
