"""How fast a disk must be: the share of a step in which the device computes, over its bandwidth.

Three curves, of two formulas and of what is predicted (disk_bandwidth.py), and runs as points on
them. Beside the curves, what moves in a step over each link. Every device has a disk of its own
here; ranks of one machine share theirs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paralab.checks import illegal, real
from paralab.spec import Cluster, ModelSpec, Plan
from paralab.view import lanes, naming, theme
from paralab.view.disk_bandwidth import FASTEST, FORMULAS, SLOWEST, Foreseen, Point, points

if TYPE_CHECKING:
    from paralab.report.tables import Tables
    from paralab.view.chart import Chart

SHARE = 0.9
LEFT, RIGHT = (0.0, 0.6), (0.8, 1.0)  # of the figure's width
DASH = {
    "predicted": theme.CLOCK_STYLE["predicted"][0],
    "no overlap": "solid",
    "perfect overlap": "dash",
}


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
    cluster = Cluster.local() if cluster is None else cluster
    for name, value, kind in (
        ("model", model, ModelSpec),
        ("plan", plan, Plan),
        ("cluster", cluster, Cluster),
    ):
        if not isinstance(value, kind):
            raise illegal(name, value, "not a description", f"a pl.{kind.__name__}(...)")
    foreseen = Foreseen(model, plan, cluster)
    if real("share", share, above=0.0) >= 1:
        raise illegal("share", share, "every transfer costs time", "a number above 0 and below 1")
    at = foreseen.own or math.sqrt(SLOWEST * FASTEST) if at is None else real("at", at, above=0.0)
    return chart(foreseen, at, share, [point for run in runs for point in points(run, foreseen)])


def chart(foreseen: Foreseen, at: float, share: float, found: Sequence[Point] = ()) -> Chart:
    """The picture of `disk_needed`."""
    low, high = (f(*foreseen.ends, at) for f in (min, max))
    ticks = [m * 10.0**e for e in range(15) for m in (1, 5) if low <= m * 10.0**e <= high]
    pad, now = 0.04 * math.log10(high / low), foreseen.share("predicted", at)
    bars, names = _bars(foreseen, at)
    fig = theme.figure(
        theme.text(_finding(foreseen, share, now)),
        theme.text(_below(foreseen, share)),
        height=400,
        margin={"b": 112},
        barmode="stack",
        bargap=0.35,
        **_lines(foreseen, at, share, now),
        xaxis={
            "type": "log",
            "domain": LEFT,
            "tickvals": ticks,
            "tickangle": 0,
            "range": [math.log10(low) - pad, math.log10(high) + pad],
            "ticktext": [theme.scaled(tick, "B") for tick in ticks],
            "title": {"text": "bandwidth of the disk (per second)"},
        },
        yaxis={"range": [0, 106], "ticksuffix": " %", "title": {"text": "device computes"}},
        xaxis2={
            "domain": RIGHT,
            "anchor": "y2",
            "tickformat": "~g",
            "nticks": 4,
            "rangemode": "tozero",
            "title": {"text": "MB per step and device"},
        },
        yaxis2={
            "anchor": "x2",
            "type": "category",
            "range": [len(names) - 0.5, -0.5],
            "showgrid": False,
            "tickvals": list(range(len(names))),
            "ticktext": names,
        },
        legend={"orientation": "h", "x": 0, "y": -0.24, "yanchor": "top"},
        legend2={
            "orientation": "h",
            "x": 1,
            "y": 1.01,
            "yanchor": "bottom",
            "xanchor": "right",
            "traceorder": "normal",
        },
    )
    fig.add_traces([*_curves(foreseen, low, high), *_marks(foreseen, at, share, now, found), *bars])
    return fig.explained(
        f"disk needed by {naming.plan_name(foreseen.plan)}: {len(foreseen.curve)} bandwidths "
        f"predicted, {len(found)} points of runs",
        lambda: _table(foreseen, at, found),
    )


def _curves(foreseen: Foreseen, low: float, high: float) -> list[dict[str, Any]]:
    looks = theme.series(list(DASH))
    corner = min(high, max(low, foreseen.on_disk / foreseen.work))
    grid = sorted([corner, *(low * (high / low) ** (n / 50) for n in range(51))])
    lines = {name: [(b, foreseen.share(name, b)) for b in grid] for name in FORMULAS}
    lines = {"predicted": foreseen.curve, **lines}
    return [
        _trace(
            name,
            line,
            name=name,
            mode="lines",
            line={"color": looks[name]["colour"], "width": 2.5, "dash": DASH[name]},
        )
        for name, line in lines.items()
    ]


def _marks(
    foreseen: Foreseen, at: float, share: float, now: float, found: Sequence[Point]
) -> list[dict[str, Any]]:
    """What this disk gives, what the formula asks for, the disk that is there, and runs."""
    ink, need, (low, high) = theme.look().ink, foreseen.needed(share), foreseen.ends

    def marker(clock: str, symbol: str, size: int) -> dict[str, Any]:
        hollow = theme.CLOCK_STYLE[clock][1]
        return {
            "size": size,
            "symbol": symbol + "-open" * hollow,
            "color": ink,
            "line": {"width": 2.5 * hollow},
        }

    marks = [_trace("predicted", [(at, now)], marker=marker("predicted", "circle", 11))]
    if need is not None and low <= need <= high:
        dot = {"size": 9, "color": theme.series(list(DASH))["no overlap"]["colour"]}
        marks.append(_trace("no overlap", [(need, share)], marker=dot))
    if foreseen.own is not None:
        whose = "this machine's" if foreseen.cluster.name == "local" else "the cluster's"
        said = f"{whose} disk, {theme.scaled(foreseen.own, 'B/s')}"
        marks.append(
            _trace(
                said,
                [(foreseen.own, 0.0)],
                name=said,
                hovertext=[said],
                marker={"size": 12, "color": ink, "symbol": "triangle-up"},
            )
        )
    for clock, size in (("replayed", 15), ("measured", 8)):  # one within the other
        if mine := [(p.bandwidth, p.share) for p in found if p.clock == clock]:
            marks.append(_trace(clock, mine, name=clock, marker=marker(clock, "diamond", size)))
    return marks


def _trace(whose: str, marks: Sequence[tuple[float, float]], **more: Any) -> dict[str, Any]:
    """Marks at (bandwidth, share), and what they say when pointed at; in the legend by a name."""
    return {
        "type": "scatter",
        "mode": "markers",
        "cliponaxis": False,
        "showlegend": "name" in more,
        "x": [b for b, _ in marks],
        "y": [100 * share for _, share in marks],
        "hovertext": [
            f"{whose}, {theme.scaled(b, 'B/s')}: the device computes {100 * share:.1f} %"
            for b, share in marks
        ],
        "hovertemplate": "%{hovertext}<extra></extra>",
        **more,
    }


def _lines(foreseen: Foreseen, at: float, share: float, now: float) -> dict[str, Any]:
    """Through the bandwidth that is looked at, and, dotted, through that which is needed."""
    look, need, (low, high) = theme.look(), foreseen.needed(share), foreseen.ends
    lines, notes = [(at, {"color": look.ink, "width": 1.5})], []

    def note(x: float, right: bool, text: str, **more: Any) -> None:
        side, shift = ("left", 5) if right else ("right", -5)
        notes.append(
            {
                "x": math.log10(x),
                "xanchor": side,
                "xshift": shift,
                "align": side,
                "text": text,
                "showarrow": False,
                "bgcolor": look.paper,
                **more,
            }
        )

    if need is not None and low <= need <= high:
        lines.append((need, {"color": look.faint, "width": 1.5, "dash": "dot"}))
        note(
            need,
            need**2 < low * high,
            f"{100 * share:.0f} %, formula:<br><b>{theme.scaled(need, 'B/s')}</b>",
            y=0.05,
            yref="y domain",
            yanchor="bottom",
        )
    right = at**3 < low * high**2  # to the left curves lie lower
    note(
        at,
        right,
        f"<b>{100 * now:.0f} %</b> at {theme.scaled(at, 'B/s')}",
        y=100 * now,
        yanchor="top",
        yshift=-5 if right else -28,
    )
    shapes = [
        {"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "y domain", "line": line}
        for x, line in lines
    ]
    return {"shapes": shapes, "annotations": notes}


def _bars(foreseen: Foreseen, at: float) -> tuple[list[dict[str, Any]], list[str]]:
    """Traces of bytes by link and category; and the links' names, with sizes and times."""
    names, bars, moved = [], [], foreseen.moved
    for link, parts in moved.items():
        size, speed = sum(parts.values()), at if "disk" in link else foreseen.cluster.host.bandwidth
        names.append(
            f"{lanes.ROW_NAME[link]} <br><b>{theme.scaled(size, 'B')}</b>, "
            f"{theme.scaled(size / speed, 's', digits=2)} "
        )
    for category in theme.CATEGORY_COLOUR:
        sizes = {lanes.ROW_NAME[link]: parts.get(category, 0) for link, parts in moved.items()}
        if any(sizes.values()):
            bars.append(
                {
                    "type": "bar",
                    "orientation": "h",
                    "name": category,
                    "xaxis": "x2",
                    "yaxis": "y2",
                    "x": [size / 1e6 for size in sizes.values()],
                    "y": list(range(len(sizes))),
                    "legend": "legend2",
                    "marker": {"color": theme.CATEGORY_COLOUR[category]},
                    "hovertext": [f"{category}, {link}: {n:,} bytes" for link, n in sizes.items()],
                    "hovertemplate": "%{hovertext}<extra></extra>",
                }
            )
    return bars, names


def _finding(foreseen: Foreseen, share: float, now: float) -> str:
    need, n = foreseen.needed(share), foreseen.plan.microbatches * foreseen.plan.microbatch_size
    if need is None:
        return f"Nothing lies in files: whatever the disk, the device computes {100 * now:.0f} %"
    who, asked = f"With {n} sample{'s' * (n > 1)}", theme.scaled(need, "B/s")
    if foreseen.reaches(share) is None:
        return (
            f"{who} {100 * share:.0f} % busy takes {asked} by the formula; predicted: "
            f"{100 * foreseen.most:.0f} % at most"
        )
    mine = "" if foreseen.own is None else f"; yours has {theme.scaled(foreseen.own, 'B/s')}"
    return f"{who} a disk of {asked} keeps the device {100 * share:.0f} % busy{mine}"


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
    import pandas as pd

    where = sorted({at, *(b for b, _ in foreseen.curve)})
    marks = [(name, b, foreseen.share(name, b)) for name in DASH for b in where]
    marks += [(point.clock, point.bandwidth, point.share) for point in found]
    moved = [
        (link, category, size)
        for link, parts in foreseen.moved.items()
        for category, size in parts.items()
    ]
    return pd.concat(
        [
            pd.DataFrame(marks, columns=["curve", "bandwidth", "share"]),
            pd.DataFrame(moved, columns=["link", "category", "bytes"]).astype({"bytes": "Int64"}),
        ],
        ignore_index=True,
    )
