"""Time over message size: the alpha-beta model of one link, and algorithms compared.

Both axes are logarithmic. The model t = alpha + n / bandwidth (Hockney 1994) is flat on the left
and a slope on the right; the two lines meet at alpha * bandwidth bytes, where half of the time is
latency.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from paralab.checks import choice, illegal, instance, real, whole
from paralab.spec.links import messages
from paralab.theory.fit import fit_link
from paralab.view import theme
from paralab.view.chart import Chart, figure
from paralab.view.marks import note
from paralab.view.marks.curves import HOLLOW, PREFIXED, curve, drop, log_axis, rings

Pairs = list[tuple[float, float]]  # (x, y) by x: (bytes, seconds), unless `Axes` says otherwise
POINT = ("op", "ranks", "wire_bytes", "seconds")  # of a point of `link_fit`
STEPS = 60  # points of the fitted line
UNSEEN = 0.01  # share of a call's latency that bytes have to take for a bandwidth to be named
EQUAL = 1e-9  # curves whose logarithms differ by less are equal, but for rounding errors


class Axes(NamedTuple):
    """The axes of curves: titles, units ("B", "B/s", "s" or the noun of what is counted), and in
    ``best`` what the finding says of the lowest curve.
    """

    x: str
    x_unit: str
    y: str
    y_unit: str
    best: str

    def describe(self, x: float, y: float) -> str:
        return f"{_worded(y, self.y_unit)} at {_worded(x, self.x_unit)}"


TIME = Axes("bytes of the tensor", "B", "time", "s", "is fastest")


def link_fit(points: Iterable[Mapping[str, Any]], op: str = "all_reduce") -> Chart:
    """Measured seconds of one operation over the bytes a rank sends, and the line fitted to them.

    points  rows with op, ranks, wire_bytes, seconds

    Raises ValueError for fewer than two points of ``op``, several sizes of groups, and a bad row.
    """
    points = list(points)
    for i, row in enumerate(points):
        if not {*POINT} <= {*getattr(row, "keys", tuple)()}:  # a row of pandas's has keys, too
            raise illegal(f"points[{i}]", row, "not a point", f"a row with {', '.join(POINT)}")
    if points:
        choice("op", op, tuple(dict.fromkeys(row["op"] for row in points)))
    rows = [dict(p, ranks=whole("ranks", p["ranks"], at_least=2)) for p in points if p["op"] == op]
    rows.sort(key=lambda row: real("wire_bytes", row["wire_bytes"], above=0.0))
    if len(rows) < 2:
        raise illegal("points", rows, "a line needs two points", f"at least two sizes of {op}")
    ranks, *others = sorted({row["ranks"] for row in rows})
    if others:
        raise illegal("ranks", [ranks, *others], "each has its own line", "one number of ranks")
    link, accuracy = fit_link(rows)
    rounds = messages(op, ranks)
    link = link.replace(alpha=rounds * link.alpha)  # the latency of a whole call
    pairs = [(row["wire_bytes"], row["seconds"]) for row in rows]
    sizes, seconds = zip(*pairs, strict=True)
    slope, latency = theme.in_speed(link.bandwidth), theme.in_seconds(link.alpha)
    knee = link.alpha * link.bandwidth
    inside, half = sizes[0] < knee < sizes[-1], theme.in_bytes(knee, digits=2)
    rate = f"{slope}; below {half} latency dominates" if inside else f"a bandwidth of {slope}"
    if sizes[-1] < UNSEEN * knee:  # then the bandwidth is that of rounding errors and noise
        rate = f"no more for the bytes, up to {theme.in_bytes(sizes[-1])}"
    times = f"{rounds} α" if rounds > 1 else "α"  # one per message in a row
    formula = f"{times} + bytes / bandwidth"
    median, worst = (theme.share(accuracy[name]) for name in ("median", "worst"))
    off = f"the points are {median} off in the median, {worst} at worst"
    low, span = 0.6 * min(*seconds, link.alpha or math.inf), 2.25 * sizes[-1] / sizes[0]
    grid = [sizes[0] / 1.5 * span ** (i / (STEPS - 1)) for i in range(STEPS)]
    high = 1.4 * max(link.seconds(grid[-1]), *seconds)
    look, floor = theme.look(), {"ink": theme.look().faint, "width": 1.5}
    slanted = [(n, n / link.bandwidth) for n in grid if n / link.bandwidth >= low]
    flat = [(n, link.alpha or None) for n in (grid[0], grid[-1])]
    hover_texts = [
        f"{theme.in_bytes(n)}: {theme.in_seconds(s)}, fit {theme.in_seconds(link.seconds(n))}"
        for n, s in pairs
    ]
    fitted = [(n, link.seconds(n)) for n in grid]
    dots = {"ink": look.series[0], "marker": {"line": {"width": 1.5, "color": look.paper}}}
    traces = [
        curve(f"latency alone: {times}", flat, dash="dot", **floor),
        curve("bytes alone: bytes / bandwidth", slanted, dash="dash", **floor),
        curve(f"fit: {formula}", fitted, ink=look.series[1], width=3),
        curve("measured", pairs, hover_texts, mode="markers", size=11, **dots),
        rings("half is latency", [(knee, link.seconds(knee))] if inside else []),
    ]
    middle = math.sqrt(max(knee, grid[0]) * grid[-1])
    notes, shapes = [_line_label(slope, middle, middle / link.bandwidth, below=True)], []
    if link.alpha > 0:
        notes.append(_line_label(f"{times} = {latency}", grid[-1], link.alpha))
    if inside:
        label, ends = f"{half}: half the time is latency", (grid[0], grid[-1])
        word, dropped = drop(knee, low, link.seconds(knee), label, ends)
        notes, shapes = [*notes, word], [dropped]
    fig = figure(
        f"{theme.text(op)} on {ranks} ranks: {latency} of latency and {rate}",
        f"measured (wall clock) · line: {formula}, fitted; {off}",
        height=440,
        xaxis=log_axis("bytes that one rank sends", grid[0], grid[-1], "B"),
        yaxis=log_axis("time", low, high, "s"),
    )
    columns = ("op", "ranks", "payload_bytes", "wire_bytes", "seconds", "fitted")
    return fig.draw(traces, notes, shapes).tabled(
        (" ".join(columns), [[row.get(name) for name in columns] for row in rows])
    )


def algorithms(
    curves: Mapping[str, Any],
    points: Mapping[str, Any] | None = None,
    *,
    title: str | None = None,
    axes: Axes = TIME,
) -> Chart:
    """Time over tensor size for several algorithms, and where the fastest changes.

    curves   {algorithm: {bytes: seconds} or [(bytes, seconds), ...]}, predicted, drawn as lines
    points   the same for replayed runs, drawn as markers in the algorithm's colour
    title    replaces the finding
    axes     titles and units, if the curves are not seconds over bytes

    Raises ValueError if a size or time is not above 0.
    """
    for what, given in (("curves", curves), ("points", points or {})):
        instance(what, given, Mapping, "{algorithm: {bytes: seconds}}", "mapping")
    lines = {str(name): _pairs(str(name), line) for name, line in curves.items()}
    marks = {str(name): _pairs(str(name), line) for name, line in (points or {}).items()}
    (best, changes), traces, rows = _fastest(lines), [], []
    style = theme.series(list(dict.fromkeys([*lines, *marks])))
    for by_name, clock in ((lines, "predicted"), (marks, "replayed")):
        for name, pairs in by_name.items():
            who = theme.text(", ".join(dict.fromkeys((name, clock))))  # a curve may be "predicted"
            texts = [f"{who}: {axes.describe(*pair)}" for pair in pairs]
            called, look = name, style[name] | {"width": 3}
            if by_name is marks:
                called, hollow = f"{name}, replayed", style[name]["symbol"] + HOLLOW
                look = {"ink": style[name]["ink"], "symbol": hollow, "mode": "markers"}
            traces.append(curve(called, pairs, texts, **look))
            rows += [(name, clock, *pair) for pair in pairs]
    traces.append(rings("crossover", changes))
    sizes, seconds = ([row[i] for row in rows] for i in (2, 3))
    low, high = min(seconds) / 1.6, max(seconds) * 1.6
    # A ring at a crossover looks like a marker of a run; next to markers its label explains it.
    equal, ends = "equal at " * bool(marks), (min(sizes) / 1.3, max(sizes) * 1.3)
    drops = [drop(n, low, s, equal + _worded(n, axes.x_unit, digits=2), ends) for n, s in changes]
    fig = figure(
        _finding(lines, best, changes, axes),
        "lines: predicted (theory alone)" + " · markers: replayed" * bool(marks),
        height=440,
        xaxis=log_axis(axes.x, *ends, axes.x_unit),
        yaxis=log_axis(axes.y, low, high, axes.y_unit),
    )
    fig.titled(title).draw(traces, [word for word, _ in drops], [shape for _, shape in drops])
    return fig.tabled(("algorithm clock bytes seconds", rows))


def _line_label(said: str, size: float, seconds: float, *, below: bool = False) -> dict:
    """A word at a point of a line: above the line and to the left, or below it and to the right."""
    at = {"anchor": "left top", "xshift": 6} if below else {"anchor": "right bottom", "xshift": -4}
    return note(said, math.log10(size), math.log10(seconds), ink=theme.look().faint, **at)


# ---- crossovers ----------------------------------------------------------------------------------
def _pairs(name: str, curve: Any) -> Pairs:
    return sorted(
        (real(f"bytes of {name}", n, above=0.0), real(f"seconds of {name}", s, above=0.0))
        for n, s in (curve.items() if isinstance(curve, Mapping) else curve)
    )


def _logs(lines: Mapping[str, Pairs], size: float) -> dict[str, float]:
    """The logarithms of all seconds at ``size``, interpolated linearly on the logarithmic axes."""
    at = math.log(size)
    return {name: float(np.interp(at, *np.log(pairs).T)) for name, pairs in lines.items()}


def _common_range(lines: Mapping[str, Pairs]) -> tuple[float, float]:
    """The range of sizes that all lines have: (first, last), with first > last if there is none."""
    firsts, lasts = zip(*((pairs[0][0], pairs[-1][0]) for pairs in lines.values()), strict=True)
    return max(firsts), min(lasts)


def _fastest(lines: Mapping[str, Pairs]) -> tuple[list[str], Pairs]:
    """The fastest line of every range of the common sizes, and the (bytes, seconds) at which one
    range ends and the next begins.
    """
    low, high = _common_range(lines)
    sizes = sorted({n for pairs in lines.values() for n, _ in pairs if low <= n <= high})
    at, changes = _logs(lines, low), []
    best = [min(at, key=at.__getitem__)]
    for last, size in pairwise(sizes):
        before, at = at, _logs(lines, size)
        one, other = best[-1], min(at, key=at.__getitem__)
        if at[one] - at[other] < EQUAL:
            continue
        gap = before[one] - before[other]
        if last == low and abs(gap) < EQUAL:  # they begin together
            best = [other]
            continue
        crossing = last * (size / last) ** (gap / (gap - (at[one] - at[other])))
        best.append(other)
        changes.append((crossing, math.exp(_logs(lines, crossing)[one])))
    return best, changes


def _finding(lines: Mapping[str, Pairs], fastest: list[str], changes: Pairs, axes: Axes) -> str:
    if len(lines) == 1:
        name, pairs = next(iter(lines.items()))
        ends = dict.fromkeys(axes.describe(*pair) for pair in (pairs[0], pairs[-1]))
        return f"{theme.text(name)}: {', '.join(ends)}"
    best = [*map(theme.text, fastest)]
    if changes:
        sizes = [_worded(size, axes.x_unit, digits=2) for size, _ in changes]
        parts = [f"{best[0]} {axes.best} below {sizes[0]}"]
        parts += [f"{name} up to {end}" for name, end in zip(best[1:], sizes[1:], strict=False)]
        return f"{', '.join(parts)}, {best[-1]} above"
    begin, end = _common_range(lines)
    first, last = _logs(lines, begin), _logs(lines, end)
    if all(max(at.values()) - min(at.values()) < EQUAL for at in (first, last)):
        return f"{theme.listed([*map(theme.text, lines)])} are equal everywhere"
    slowest = max(last, key=last.__getitem__)
    times = math.exp(last[slowest] - last[fastest[0]])
    more = f"{times:,.{int(times < 100)}f} times as much"
    if times < 1.05:
        more = f"{100 * (times - 1):.2g} % more"
    said = f"{_worded(end, axes.x_unit)} {theme.text(slowest)} needs {more}"
    return f"{best[0]} {axes.best} everywhere: at {said}"


def _worded(value: float, unit: str, *, digits: int = 3) -> str:
    """The value with its unit; counted values have three digits, whatever ``digits`` says."""
    if unit in PREFIXED:
        return theme.scaled(value, unit, digits=digits)
    return f"{float(f'{value:.3g}'):,.7g} {unit}"
