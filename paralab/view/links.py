"""Time over message size: the alpha-beta model of one link, and algorithms against each other.

Both axes are logarithmic. The model t = alpha + n / bandwidth (Hockney 1994) is a floor on the left
and a slope on the right; they meet at alpha * bandwidth bytes, where half of the time is latency.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from paralab.checks import choice, illegal, real
from paralab.theory.fit import fit_link
from paralab.view import naming, theme

if TYPE_CHECKING:
    from paralab.view.chart import Chart

Pairs = list[tuple[float, float]]  # (bytes, seconds), by size


def link_fit(points: Sequence[Mapping[str, Any]] | None = None, op: str = "all_reduce") -> Chart:
    """Measured seconds of one operation over the bytes a rank sends, and the line fitted to them.

    points  rows with op, ranks, wire_bytes, seconds; by default those that this machine's
            links were calibrated with, measured now if they never were

    Raises ValueError if there are fewer than two points of ``op``.
    """
    if points is None:
        from paralab.instruments.calibrate import calibration_points

        points = calibration_points()["links"]
    choice("op", op, tuple(dict.fromkeys(row["op"] for row in points)))
    rows = sorted((dict(row) for row in points if row["op"] == op), key=lambda r: r["wire_bytes"])
    if len(rows) < 2:
        raise illegal("points", rows, "a line needs two", f"at least two sizes of {op}")
    link, accuracy = fit_link(rows)
    sizes, seconds = [r["wire_bytes"] for r in rows], [r["seconds"] for r in rows]
    slope = theme.scaled(link.bandwidth, "B/s")
    knee = link.alpha * link.bandwidth
    ranks = rows[0].get("ranks")
    who = f"{theme.text(op)} on {ranks} ranks" if ranks else theme.text(op)
    title = f"{who}: α = {theme.scaled(link.alpha, 's')}, bandwidth {slope}"
    inside = sizes[0] < knee < sizes[-1]
    if inside:
        title += f"; below {theme.scaled(knee, 'B', digits=2)} latency costs most"
    fig = theme.figure(
        title,
        f"measured clock ({naming.CLOCK_MEANS['measured']}) · line: α + bytes / bandwidth, off by "
        f"{100 * accuracy['median']:.0f} % in the middle, {100 * accuracy['worst']:.0f} % at worst",
        height=440,
    )
    now, style = theme.look(), theme.series(["measured"])["measured"]
    grid = _steps(sizes[0] / 1.5, sizes[-1] * 1.5, 60)
    low = 0.6 * min(min(seconds), link.alpha or math.inf)
    floor = {"color": now.faint, "width": 1.5, "dash": "dot"}
    slanted = [n for n in grid if n / link.bandwidth >= low]
    fig.add_scatter(
        name="latency alone: α",
        x=[grid[0], grid[-1]],
        y=[link.alpha or None] * 2,
        mode="lines",
        line=floor,
        hoverinfo="skip",
    )
    fig.add_scatter(
        name="bytes alone: bytes / bandwidth",
        x=slanted,
        mode="lines",
        y=[n / link.bandwidth for n in slanted],
        hoverinfo="skip",
        line={**floor, "dash": "dash"},
    )
    fig.add_scatter(
        name="fit: α + bytes / bandwidth",
        x=grid,
        y=[link.seconds(n) for n in grid],
        mode="lines",
        line={"color": theme.axis_colour("dp"), "width": 3},
        hoverinfo="skip",
    )
    fig.add_scatter(
        name="measured",
        x=sizes,
        y=seconds,
        mode="markers",
        marker={"size": 11, "color": style["colour"], "line": {"width": 1.5, "color": now.paper}},
        hovertext=[
            f"{theme.scaled(n, 'B')}: {theme.scaled(s, 's')}, fit "
            f"{theme.scaled(link.seconds(n), 's')}"
            for n, s in zip(sizes, seconds, strict=True)
        ],
        hovertemplate="%{hovertext}<extra></extra>",
    )
    if link.alpha > 0:
        _note(fig, grid[-1], link.alpha, f"α = {theme.scaled(link.alpha, 's')}", "bottom")
    middle = math.sqrt(max(knee, grid[0]) * grid[-1])
    _note(fig, middle, middle / link.bandwidth, slope, "top")
    _rings(fig, "half is latency", [(knee, link.seconds(knee))] if inside else [])
    if inside:
        _mark(
            fig,
            knee,
            low,
            link.seconds(knee),
            f"{theme.scaled(knee, 'B', digits=2)}: half is latency",
        )
    _log_axes(
        fig, grid, [low, 1.4 * max(link.seconds(grid[-1]), *seconds)], "bytes that one rank sends"
    )
    return fig.explained(
        f"alpha-beta fit of {op}: {len(rows)} measured points, 1 line", _table(rows)
    )


def algorithms(
    curves: Mapping[str, Any],
    points: Mapping[str, Any] | None = None,
    *,
    clock: str = "predicted",
    points_clock: str = "replayed",
    title: str | None = None,
) -> Chart:
    """Time over message size for several algorithms, and where the fastest changes.

    curves   {algorithm: {bytes: seconds} or [(bytes, seconds), ...]}, drawn as lines
    points   the same for runs, drawn as markers in the algorithm's colour
    clock, points_clock   what the lines and the markers are: measured | replayed | predicted

    Raises ValueError if there is nothing to draw or a size or time is not above 0.
    """
    choice("clock", clock, tuple(naming.CLOCK_MEANS))
    choice("points_clock", points_clock, tuple(naming.CLOCK_MEANS))
    lines = {str(name): _pairs(str(name), curve) for name, curve in curves.items()}
    marks = {str(name): _pairs(str(name), curve) for name, curve in (points or {}).items()}
    if not lines:
        raise illegal("curves", curves, "nothing to draw", "{algorithm: {bytes: seconds}}")
    changes = _changes(lines)
    said = [f"lines: {clock} clock ({naming.CLOCK_MEANS[clock]})"]
    if marks:
        said.append(f"markers: {points_clock}")
    finding = theme.text(title) if title is not None else _finding(lines, changes)
    fig = theme.figure(finding, " · ".join(said), height=440)
    style = theme.series(list(dict.fromkeys([*lines, *marks])))
    for name, pairs in lines.items():
        fig.add_scatter(
            name=theme.text(name),
            x=[n for n, _ in pairs],
            y=[s for _, s in pairs],
            mode="lines",
            line={"color": style[name]["colour"], "width": 3, "dash": style[name]["dash"]},
            **_hover(name, pairs, clock),
        )
    hollow = "-open" * theme.CLOCK_STYLE[points_clock][1]
    for name, pairs in marks.items():
        fig.add_scatter(
            name=f"{theme.text(name)}, {points_clock}",
            x=[n for n, _ in pairs],
            y=[s for _, s in pairs],
            mode="markers",
            marker={
                "size": 10,
                "color": style[name]["colour"],
                "line": {"width": 2},
                "symbol": style[name]["symbol"] + hollow,
            },
            **_hover(name, pairs, points_clock),
        )
    seen = [pair for pairs in [*lines.values(), *marks.values()] for pair in pairs]
    bottom, top = min(s for _, s in seen) / 1.6, max(s for _, s in seen) * 1.6
    _rings(fig, "crossover", [(size, at) for size, at, _, _ in changes])
    for size, seconds, _, _ in changes:
        _mark(fig, size, bottom, seconds, theme.scaled(size, "B", digits=2))
    sizes = [n for n, _ in seen]
    _log_axes(fig, [min(sizes) / 1.3, max(sizes) * 1.3], [bottom, top], "message size")
    return fig.explained(
        f"time over message size of {' | '.join(lines)}, {clock}: {sum(map(len, lines.values()))} "
        f"sizes, {len(changes)} crossover{'s' * (len(changes) != 1)}",
        _long_table(lines, clock, marks, points_clock),
    )


# ---- crossovers ----------------------------------------------------------------------------------
def _pairs(name: str, curve: Any) -> Pairs:
    found = curve.items() if isinstance(curve, Mapping) else curve
    if not isinstance(found, Iterable):
        raise illegal(f"curves[{name!r}]", curve, "not a curve", "{bytes: seconds}")
    pairs = sorted(
        (real(f"bytes of {name}", n, above=0.0), real(f"seconds of {name}", s, above=0.0))
        for n, s in found
    )
    if not pairs:
        raise illegal(f"curves[{name!r}]", curve, "no sizes", "{bytes: seconds}")
    return pairs


def _at(pairs: Pairs, size: float) -> float:
    """log seconds at ``size``, between the neighbours on log-log paper."""
    for (n0, s0), (n1, s1) in zip(pairs, pairs[1:], strict=False):
        if n0 <= size <= n1:
            share = math.log(size / n0) / math.log(n1 / n0) if n1 > n0 else 0.0
            return (1 - share) * math.log(s0) + share * math.log(s1)
    return math.log(pairs[0][1] if size <= pairs[0][0] else pairs[-1][1])


def _changes(lines: Mapping[str, Pairs]) -> list[tuple[float, float, str, str]]:
    """(bytes, seconds, fastest below, fastest above) wherever another line becomes the fastest."""
    low = max(pairs[0][0] for pairs in lines.values())
    high = min(pairs[-1][0] for pairs in lines.values())
    sizes = sorted({n for pairs in lines.values() for n, _ in pairs if low <= n <= high})
    changes = []
    for n0, n1 in zip(sizes, sizes[1:], strict=False):
        here = min(lines, key=lambda name, n=n0: _at(lines[name], n))
        there = min(lines, key=lambda name, n=n1: _at(lines[name], n))
        if here != there:
            before = _at(lines[here], n0) - _at(lines[there], n0)
            after = _at(lines[here], n1) - _at(lines[there], n1)
            share = before / (before - after) if before != after else 0.0
            size = n0 * (n1 / n0) ** share
            changes.append((size, math.exp(_at(lines[here], size)), here, there))
    return changes


def _finding(lines: Mapping[str, Pairs], changes: list[tuple[float, float, str, str]]) -> str:
    names = {name: theme.text(name) for name in lines}
    if len(lines) == 1:
        name, pairs = next(iter(lines.items()))
        (n0, s0), (n1, s1) = pairs[0], pairs[-1]
        return (
            f"{names[name]}: {theme.scaled(n0, 'B')} take {theme.scaled(s0, 's')}, "
            f"{theme.scaled(n1, 'B')} {theme.scaled(s1, 's')}"
        )
    if changes:
        parts = [f"{names[changes[0][2]]} is fastest below {_rounded(changes[0][0])}"]
        parts += [
            f"{names[there]} up to {_rounded(following[0])}"
            for (_, _, _, there), following in zip(changes, changes[1:], strict=False)
        ]
        return f"{', '.join(parts)}, {names[changes[-1][3]]} above"
    end = min(pairs[-1][0] for pairs in lines.values())
    ranked = sorted(lines, key=lambda name: _at(lines[name], end))
    times = math.exp(_at(lines[ranked[-1]], end) - _at(lines[ranked[0]], end))
    return (
        f"{names[ranked[0]]} is fastest at every size: at {theme.scaled(end, 'B')} "
        f"{times:.1f} times as fast as {names[ranked[-1]]}"
    )


def _rounded(size: float) -> str:
    return theme.scaled(size, "B", digits=2)  # a crossover is no sharper than that


# ---- axes and tables -----------------------------------------------------------------------------
def _steps(low: float, high: float, count: int) -> list[float]:
    return [low * (high / low) ** (i / (count - 1)) for i in range(count)]


def _mark(fig: Chart, size: float, low: float, high: float, label: str) -> None:
    """A vertical line from the axis up to the curve, and what it means."""
    fig.add_shape(
        type="line",
        x0=size,
        x1=size,
        y0=low,
        y1=high,
        line={"dash": "dot", "width": 2, "color": theme.look().ink},
    )
    fig.add_annotation(
        x=math.log10(size),
        y=math.log10(low),
        yshift=6,
        xshift=6,
        xanchor="left",
        yanchor="bottom",
        text=f"<b>{label}</b>",
        showarrow=False,
    )


def _rings(fig: Chart, name: str, places: Sequence[tuple[float, float]]) -> None:
    """A ring around points of a curve; one trace however many, so that structure is stable."""
    fig.add_scatter(
        name=name,
        x=[n for n, _ in places] or [None],
        y=[s for _, s in places] or [None],
        mode="markers",
        showlegend=False,
        hoverinfo="skip",
        marker={
            "size": 15,
            "symbol": "circle-open",
            "color": theme.look().ink,
            "line": {"width": 2.5},
        },
    )


def _note(fig: Chart, size: float, seconds: float, label: str, anchor: str) -> None:
    """A word at a line, above it or below."""
    fig.add_annotation(
        x=math.log10(size),
        y=math.log10(seconds),
        text=label,
        showarrow=False,
        xanchor="right" if anchor == "bottom" else "left",
        yanchor=anchor,
        xshift=-4 if anchor == "bottom" else 6,
        font={"color": theme.look().faint},
    )


def _log_axes(fig: Chart, sizes: Sequence[float], seconds: Sequence[float], what: str) -> None:
    def axis(values: Sequence[float], unit: str, title: str) -> dict[str, Any]:
        low, high = math.log10(min(values)), math.log10(max(values))
        ticks = theme.log_ticks(min(values), max(values))
        return {
            "type": "log",
            "range": [low, high],
            "tickvals": ticks,
            "ticktext": [theme.scaled(t, unit) for t in ticks],
            "title": {"text": title},
        }

    fig.update_layout(
        xaxis=axis(sizes, "B", f"{what} (bytes; 1 kB = 10<sup>3</sup>)"),
        yaxis=axis(seconds, "s", "time (seconds)"),
        legend={"orientation": "h", "y": 1, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
    )


def _hover(name: str, pairs: Pairs, clock: str) -> dict[str, Any]:
    return {
        "hovertext": [
            f"{theme.text(name)}, {clock}: {theme.scaled(n, 'B')} in {theme.scaled(s, 's')}"
            for n, s in pairs
        ],
        "hovertemplate": "%{hovertext}<extra></extra>",
    }


def _table(rows: Sequence[Mapping[str, Any]]) -> Any:
    import pandas as pd

    columns = ["op", "ranks", "payload_bytes", "wire_bytes", "seconds", "fitted"]
    return pd.DataFrame(rows).reindex(columns=columns)


def _long_table(
    lines: Mapping[str, Pairs], clock: str, marks: Mapping[str, Pairs], points_clock: str
) -> Any:
    import pandas as pd

    rows = [
        (name, which, n, s)
        for curves, which in ((lines, clock), (marks, points_clock))
        for name, pairs in curves.items()
        for n, s in pairs
    ]
    return pd.DataFrame(rows, columns=["algorithm", "clock", "bytes", "seconds"])
