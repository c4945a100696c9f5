"""What a rank sends and copies in a step, link by link: inside a node, between nodes, to its host.

A bar for every link, its bytes stacked by what they are for: the axes of parallelism in their
colours, what moves between memory tiers in that of its category. Behind each bar stand its bytes
and the seconds that they alone take at the link's bandwidth: a link between nodes may carry less
and take longer. A call counts on the slowest link that its group crosses. Bytes are the mean over
the report's ranks; 1 MB = 10^6 bytes.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

from paralab.checks import illegal
from paralab.report import metrics
from paralab.report.metrics import once
from paralab.report.tables import LEVELS
from paralab.spec.tiers import WAYS
from paralab.theory.traffic import BOOKKEEPING
from paralab.view import lanes, naming, theme
from paralab.view.memory import LARGEST

if TYPE_CHECKING:
    from paralab.report.tables import Tables
    from paralab.view.chart import Chart

NAMES = {**naming.LEVEL_NAME, **{way: lanes.ROW_NAME[way] for way in WAYS}}  # by link
ROW = 46  # pixels
ROOM = 1.42  # of the longest bar: what stands behind it


class Flow(NamedTuple):
    """Bytes of one step and rank over one link, for one axis (or category, of copies)."""

    link: str
    what: str
    bytes: float
    seconds: float | None  # at the link's bandwidth; None where no cluster states it
    ops: str


@once
def flows(report: Tables) -> list[Flow]:
    """What the ranks of a report send and copy per step, on average; links as they lie outwards.

    Bookkeeping is left out. Copies are those of plans that offload.
    """
    steps = metrics.measured_steps(report)
    ranks = max(1, len(set(report.steps["rank"].tolist())))
    per = ranks * max(1, len(steps))
    sums: dict[tuple[str, str], float] = defaultdict(float)
    ops: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    calls, cluster = report.collectives, report.cluster
    columns = ("step", "phase", "op", "axis", "level", "wire_bytes")
    for step, phase, op, axis, level, size in zip(
        *(calls[name].tolist() for name in columns), strict=True
    ):
        if step in steps and phase not in BOOKKEEPING and size:
            key = (level, axis)
            sums[key] += size / per
            ops[key][op] = None
            if cluster is not None:
                seconds[key] += size / per / cluster.link(op, level).bandwidth
    if report.plan.tiers is not None:
        for row in metrics.copied(report, ("link", "category")).to_dict("records"):
            key = (row["link"], row["category"])
            sums[key] += row["bytes"] / ranks
            link = None if cluster is None else _tier_link(cluster, row["link"])
            if link is not None:
                seconds[key] += row["bytes"] / ranks / link.bandwidth
    place = {name: i for i, name in enumerate((*LEVELS, *WAYS))}
    order = sorted(sums, key=lambda key: (place[key[0]], key[1]))
    return [Flow(*key, sums[key], seconds.get(key), ", ".join(ops[key])) for key in order]


def _tier_link(cluster: Any, way: str) -> Any:
    return cluster.disk if way.startswith("disk") else cluster.host


def link_traffic(*reports: Tables) -> Chart:
    """Bytes per rank and step over every link, by axis of parallelism; reports on one scale.

    Of a report that holds some ranks of many, the mean of these. Raises ValueError without reports.
    """
    if not reports:
        raise illegal("reports", reports, "nothing to draw", "one report or several")
    many = len(reports) > 1
    rows = [(report, flow) for report in reports for flow in flows(report)]
    label = lambda r, f: NAMES[f.link] + f", {r.clock}" * many  # noqa: E731
    links = {name: i for i, name in enumerate((*LEVELS, *WAYS))}
    bars = list(
        dict.fromkeys(label(r, f) for r, f in sorted(rows, key=lambda one: links[one[1].link]))
    )
    tops = {bar: sum(f.bytes for r, f in rows if label(r, f) == bar) for bar in bars}
    took: dict[str, float | None] = {}
    for bar in bars:
        each = [f.seconds for r, f in rows if label(r, f) == bar]
        took[bar] = None if None in each else sum(each)  # type: ignore[arg-type]
    biggest = max(tops.values(), default=0.0) or 1.0
    unit = next(u for u, size in LARGEST.items() if biggest >= size or size == 1)
    per = LARGEST[unit]
    clocks = " and ".join(dict.fromkeys(report.clock for report in reports))
    fig = theme.figure(
        _finding(list(dict.fromkeys(label(r, f) for r, f in rows if r is reports[0])), tops, took),
        f"{clocks}, mean of the ranks, one step · a call counts on the slowest link of its group",
        height=150 + ROW * max(2, len(bars)),
        barmode="stack",
        bargap=0.35,
        showlegend=True,
        legend={"orientation": "h", "y": 1, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
        xaxis={
            "title": {"text": f"sent or copied ({unit})"},
            "range": [0, ROOM * biggest / per],
            "tickformat": "~g",
        },  # the seconds behind a bar: its bytes / bandwidth
        yaxis={
            "type": "category",
            "showgrid": False,
            "categoryarray": bars,
            "ticksuffix": " ",
            "range": [max(2, len(bars)) - 0.45, -0.55],
        },
        annotations=[
            {
                "x": top / per,
                "y": bar,
                "xanchor": "left",
                "showarrow": False,
                "text": f" {theme.scaled(top, 'B')}{_time(took[bar])}",
            }
            for bar, top in tops.items()
        ],
    )
    kinds = list(dict.fromkeys(flow.what for _, flow in rows))
    fig.add_traces(
        [_trace(kind, [(label(r, f), f) for r, f in rows if f.what == kind], per) for kind in kinds]
        or [_trace("", [], per)]
    )
    drawn = f"{len(bars)} bar{'s' * (len(bars) != 1)}"
    said = f"traffic of {naming.subject(reports[0])} by link, {clocks}: {drawn}"
    return fig.explained(said, lambda: _table(rows))


def _time(seconds: float | None) -> str:
    return "" if seconds is None else f", {theme.scaled(seconds, 's')}"


def _trace(kind: str, mine: list[tuple[str, Flow]], per: float) -> dict[str, Any]:
    axis = kind in ("world", "replica") or kind.split(":")[0] in theme.AXIS_COLOUR
    fill = theme.axis_colour("dp" if kind == "replica" else kind)
    if kind == "replica":
        fill = theme.shade(fill, 1, 2)
    if not axis:
        fill = theme.CATEGORY_COLOUR.get(kind, theme.OTHER_COLOUR)
    return {
        "type": "bar",
        "orientation": "h",
        "name": theme.text(kind if axis else f"copying {kind}"),
        "y": [bar for bar, _ in mine],
        "x": [flow.bytes / per for _, flow in mine],
        "marker": {"color": fill, "line": {"width": 1, "color": theme.look().paper}},
        "hovertext": [
            f"{theme.text(kind)}, {bar}: {flow.bytes:,.0f} bytes"
            + f" ({flow.ops})" * bool(flow.ops)
            for bar, flow in mine
        ],
        "hovertemplate": "%{hovertext}<extra></extra>",
        "showlegend": bool(kind),
    }


def _finding(bars: list[str], tops: dict[str, float], took: dict[str, float | None]) -> str:
    """What is sent, and which link is busy longest; of these bars, those of the first report."""
    if not bars:
        return "Nothing is sent"
    if any(took[bar] is None for bar in bars):
        return f"A rank sends {theme.scaled(sum(tops[bar] for bar in bars), 'B')} in a step"
    slow = max(bars, key=lambda bar: took[bar])  # type: ignore[arg-type,return-value]
    where = slow.partition(",")[0]
    where = where if where in naming.LEVEL_NAME.values() else f"on the link {where}"
    return (
        f"Bytes take longest {where}: {theme.scaled(tops[slow], 'B')}, "
        f"{theme.scaled(took[slow], 's')}"
    )


def _table(rows: list[tuple[Tables, Flow]]) -> Any:
    import pandas as pd

    made = [(report.clock, *flow) for report, flow in rows]
    return pd.DataFrame(made, columns=["clock", *Flow._fields])
