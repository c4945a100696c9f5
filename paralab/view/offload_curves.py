"""How fast a disk must be: the share of a step in which the device computes, over its bandwidth.

Three curves, of two formulas and of what is predicted (disk_bandwidth.py), and runs as points on
them. Next to the curves, what moves in a step over each link. Every device has a disk of its own
here; ranks of one machine share theirs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from paralab.checks import illegal, instance, real
from paralab.report.tables import Tables
from paralab.spec import Cluster, ModelSpec, Plan
from paralab.view import lanes, naming, theme
from paralab.view.chart import Chart, figure
from paralab.view.disk_bandwidth import FASTEST, FORMULAS, SLOWEST, Foreseen, Point, points
from paralab.view.marks import bars as mark
from paralab.view.marks import hover, note, upright
from paralab.view.marks.curves import HOLLOW, curve, log_axis

SHARE = 0.9
LEFT, RIGHT = (0.0, 0.6), (0.8, 1.0)  # of the figure's width
DASH = {"predicted": "dot", "no overlap": "solid", "perfect overlap": "dash"}
SERIES = (0, 4, 3)  # whose colours those are: none of them is near one of a category of bytes


def disk_needed(
    model: ModelSpec,
    plan: Plan,
    cluster: Cluster | None = None,
    *,
    at: float | None = None,
    share: float = SHARE,
    runs: Sequence[Tables] = (),
) -> Chart:
    """How busy a device is, over the bandwidth of its disk: two formulas, and what is predicted.

    plan     data-parallel, and offloads; its own limit of the disk is left out
    cluster  whose device, links and host they are; default ``Cluster.local()``
    at       bytes/s, marked and read off; default: the cluster's disk
    share    what the disk should make possible, above 0 and below 1
    runs     reports of this plan, drawn as points, each at its own plan's limit

    ``table``: a row per curve or point and bandwidth, then one per link and category, with bytes.
    Raises ValueError on what cannot be drawn.
    """
    given = {"model": (model, ModelSpec), "plan": (plan, Plan)}
    cluster = Cluster.local() if cluster is None else cluster
    for name, (value, kind) in (given | {"cluster": (cluster, Cluster)}).items():
        instance(name, value, kind, f"a pl.{kind.__name__}(...)", "description")
    foreseen = Foreseen(model, plan, cluster)
    if real("share", share, above=0.0) >= 1:
        raise illegal("share", share, "every transfer costs time", "a number above 0 and below 1")
    at = foreseen.own or math.sqrt(SLOWEST * FASTEST) if at is None else real("at", at, above=0.0)
    return chart(foreseen, at, share, [point for run in runs for point in points(run, foreseen)])


def chart(foreseen: Foreseen, at: float, share: float, found: Sequence[Point] = ()) -> Chart:
    """The picture of `disk_needed`."""
    low, high = (f(*foreseen.ends, at) for f in (min, max))
    now, names = foreseen.share("predicted", at), _links(foreseen, at)
    ticks = [m * 10.0**e for e in range(15) for m in (1, 5) if low <= m * 10.0**e <= high]
    across = log_axis("bandwidth of the disk (per second)", low, high, "B", pad=(0.04, 0.04))
    across |= {"tickvals": ticks, "ticktext": [theme.scaled(tick, "B") for tick in ticks]}
    rows = {"tickvals": list(range(len(names))), "ticktext": names, "tickfont": {"size": 13}}
    fig = figure(
        theme.text(_finding(foreseen, share, now)),
        theme.text(_below(foreseen, share)),
        height=400,
        margin={"b": 112},
        xaxis={**across, "domain": LEFT, "tickangle": 0},
        yaxis={"range": [0, 106], "ticksuffix": " %", "title": {"text": "device computes"}},
        xaxis2={"domain": RIGHT, "anchor": "y2", "tickformat": "~g", "nticks": 4}
        | {"rangemode": "tozero", "title": {"text": "MB per step and device"}},
        yaxis2=mark.labels(list(foreseen.moved), anchor="x2", ticksuffix="", **rows),
        legend={"y": -0.24, "yanchor": "top"},
        legend2={**theme.LEGEND, "x": 1, "y": 1.01, "xanchor": "right"},
    )
    sizes = [row for row in mark.rows_of(foreseen.moved) if row[2]]
    style = {"axes": ("x2", "y2"), "letter": 0, "legend": "legend2"}
    bars = mark.bars(sizes, per=1e6, end=1.0, **style)
    notes, shapes = _lines(foreseen, at, share, now)
    traces = [*_curves(foreseen, low, high), *_marks(foreseen, at, share, now, found), *bars]
    return fig.draw(traces, notes, shapes).explained(
        f"disk needed by {naming.plan_name(foreseen.plan)}: {len(foreseen.curve)} bandwidths "
        f"predicted, {len(found)} points of runs",
        lambda: _table(foreseen, at, found),
    )


def _curves(foreseen: Foreseen, low: float, high: float) -> list[dict[str, Any]]:
    corner = min(high, max(low, foreseen.on_disk / foreseen.work))
    grid = sorted([corner, *(low * (high / low) ** (n / 50) for n in range(51))])
    lines = {name: [(b, foreseen.share(name, b)) for b in grid] for name in FORMULAS}
    return [
        _trace(name, line, name=name, ink=_ink(name), dash=DASH[name], mode="lines")
        for name, line in {"predicted": foreseen.curve, **lines}.items()
    ]


def _ink(name: str) -> str:
    return theme.look().series[SERIES[list(DASH).index(name)]]


def _marks(
    foreseen: Foreseen, at: float, share: float, now: float, found: Sequence[Point]
) -> list[dict[str, Any]]:
    """What this disk gives, what the formula asks for, the disk that is there, and runs."""
    ink, need, (low, high) = theme.look().ink, foreseen.needed(share), foreseen.ends
    marks = [_trace("predicted", [(at, now)], ink=ink, symbol="circle" + HOLLOW, size=11)]
    if need is not None and low <= need <= high:
        marks.append(_trace("no overlap", [(need, share)], ink=_ink("no overlap"), size=9))
    if foreseen.own is not None:
        whose = "this machine's" if foreseen.cluster.name == "local" else "the cluster's"
        said = f"{whose} disk, {theme.scaled(foreseen.own, 'B/s')}"
        look = {"ink": ink, "symbol": "triangle-up", "size": 12}
        marks.append(_trace(said, [(foreseen.own, 0.0)], name=said, **look) | hover([said]))
    for clock, size in (("replayed", 15), ("measured", 8)):  # one within the other
        if mine := [(p.bandwidth, p.share) for p in found if p.clock == clock]:
            symbol = "diamond" + HOLLOW * theme.CLOCK_STYLE[clock][1]
            marks.append(_trace(clock, mine, name=clock, ink=ink, symbol=symbol, size=size))
    return marks


def _trace(
    whose: str, marks: Sequence[tuple[float, float]], *, name: str = "", **look: Any
) -> dict[str, Any]:
    """Marks at (bandwidth, share); in the legend by a name."""
    said = [
        f"{whose}, {theme.scaled(b, 'B/s')}: the device computes {100 * share:.1f} %"
        for b, share in marks
    ]
    look = {"mode": "markers", "cliponaxis": False, "showlegend": bool(name), **look}
    return curve(name, [(b, 100 * share) for b, share in marks], said, **look)


def _lines(
    foreseen: Foreseen, at: float, share: float, now: float
) -> tuple[list[dict], list[dict]]:
    """Through the bandwidth that is looked at, and, dotted, through that which is needed: notes
    and shapes.
    """
    look, need, (low, high) = theme.look(), foreseen.needed(share), foreseen.ends
    shapes, notes = [upright(at, width=1.5)], []

    def word(said: str, x: float, y: float, right: bool, **more: Any) -> None:
        side, shift = ("left", 5) if right else ("right", -5)
        more |= {"xanchor": side, "align": side, "xshift": shift, "bgcolor": look.paper}
        notes.append(note(said, math.log10(x), y, **more))

    if need is not None and low <= need <= high:
        shapes.append(upright(need, dash="dot", width=1.5, ink=look.faint))
        said = f"{theme.percent(share)}, formula:<br><b>{theme.scaled(need, 'B/s')}</b>"
        word(said, need, 0.05, need**2 < low * high, axes=("x", "y domain"), hold="bottom")
    right = at**3 < low * high**2  # to the left curves are lower
    said = f"<b>{theme.percent(now)}</b> at {theme.scaled(at, 'B/s')}"
    if now < 0.3:  # above the curves, for beneath them is the axis
        word(said, at, 100 * now, False, hold="bottom", yshift=8)
    else:
        word(said, at, 100 * now, right, hold="top", yshift=-5 if right else -28)
    return notes, shapes


def _links(foreseen: Foreseen, at: float) -> list[str]:
    """The links' names, with sizes and times."""
    names = []
    for link, parts in foreseen.moved.items():
        size, speed = sum(parts.values()), at if "disk" in link else foreseen.cluster.host.bandwidth
        took = theme.scaled(size / speed, "s", digits=2)
        names.append(f"{lanes.ROW_NAME[link]} <br><b>{theme.scaled(size, 'B')}</b>, {took} ")
    return names


def _finding(foreseen: Foreseen, share: float, now: float) -> str:
    need, n = foreseen.needed(share), foreseen.plan.microbatches * foreseen.plan.microbatch_size
    if need is None:
        return f"Nothing is kept in files: with any disk the device computes {100 * now:.0f} %"
    who, asked = f"With {n} sample{'s' * (n > 1)}", theme.scaled(need, "B/s")
    said = f"{who} the formula asks for a disk of {asked} to keep the device "
    said += f"{100 * share:.0f} % busy"
    if foreseen.reaches(share) is None:
        return f"{said}; at most {100 * foreseen.most:.0f} % is predicted"
    mine = "" if foreseen.own is None else f"; this one has {theme.scaled(foreseen.own, 'B/s')}"
    return said + mine


def _below(foreseen: Foreseen, share: float) -> str:
    said = ["predicted (theory alone)"]
    if foreseen.on_disk:
        if reached := foreseen.reaches(share):
            said[0] += f": {100 * share:.0f} % from about {theme.scaled(reached, 'B/s', digits=2)}"
        said.append(
            f"no overlap: ZeRO-Infinity, eq. 6, {foreseen.flops / foreseen.on_disk:,.0f}"
            " FLOP per byte on disk"
        )
    return " · ".join(said + ["such a disk for each device"] * (foreseen.plan.dp > 1))


def _table(foreseen: Foreseen, at: float, found: Sequence[Point]) -> Any:
    where = sorted({at, *(b for b, _ in foreseen.curve)})
    marks = [(name, b, foreseen.share(name, b)) for name in DASH for b in where]
    marks += [(point.clock, point.bandwidth, point.share) for point in found]
    shares = pd.DataFrame(marks, columns=["curve", "bandwidth", "share"])
    moved = pd.DataFrame(mark.rows_of(foreseen.moved), columns=["link", "category", "bytes"])
    return pd.concat([shares, moved.astype({"bytes": "Int64"})], ignore_index=True)
