"""What a rank sends and copies in a step, link by link: inside a node, between nodes, to its host.

A bar for every link, its bytes stacked by what they are for, and behind each bar the seconds that
they alone take at its bandwidth, through as many ports as their group has on a node: a link between
nodes may carry less and take longer. A call counts on the slowest link that its group crosses.
Bytes are the mean over the report's ranks.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from typing import Any, NamedTuple

from paralab.checks import illegal
from paralab.report import metrics
from paralab.report.metrics import once
from paralab.report.tables import LEVELS, Tables
from paralab.spec.tiers import WAYS
from paralab.theory.traffic import BOOKKEEPING
from paralab.view import lanes, naming, theme
from paralab.view.chart import Chart, figure
from paralab.view.marks import bars as mark

NAMES = {**naming.LEVEL_NAME, **{way: lanes.ROW_NAME[way] for way in WAYS}}  # by link
ROW = 46  # pixels
ROOM = 1.42  # of the longest bar: what is written behind it


class Flow(NamedTuple):
    """Bytes of one step and rank over one link, for one axis (or category, of copies)."""

    link: str
    what: str
    bytes: float
    seconds: float | None  # at the link's bandwidth; None where no cluster states it
    ops: str


@once
def flows(report: Tables) -> list[Flow]:
    """What the ranks of a report send and copy per step, on average; links from inside outwards.

    Bookkeeping is left out. Copies are those of plans that offload.
    """
    steps, cluster = metrics.measured_steps(report), report.cluster
    ranks = max(1, len(set(report.steps["rank"].tolist())))
    per = ranks * max(1, len(steps))
    sums: dict[tuple[str, str], float] = defaultdict(float)
    ops: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    seconds: dict[tuple[str, str], float] = defaultdict(float)

    def add(key: tuple[str, str], size: float, link: Any) -> None:
        sums[key] += size
        if link is not None:
            seconds[key] += size / link.bandwidth

    @cache
    def wire(op: str, *group: Any) -> Any:
        return next(iter(cluster.ways(op, metrics.reach(report, op, *group)).values()))

    columns = ("step", "phase", "axis", "level", "wire_bytes", "op", "rank", "peer", "ranks")
    for step, phase, axis, level, size, op, *group, others in zip(
        *(report.collectives[name].tolist() for name in columns), strict=True
    ):
        if step in steps and phase not in BOOKKEEPING and size:
            link = cluster and wire(op, *group, tuple(others))
            add((level, axis), size / per, link)
            ops[level, axis][op] = None
    if report.plan.tiers is not None:
        for row in metrics.copied(report, ("link", "category")).to_dict("records"):
            way = row["link"]
            link = cluster and (cluster.disk if way.startswith("disk") else cluster.host)
            add((way, row["category"]), row["bytes"] / ranks, link)
    order = sorted(sums, key=lambda key: ((*LEVELS, *WAYS).index(key[0]), key[1]))
    return [Flow(*key, sums[key], seconds.get(key), ", ".join(ops[key])) for key in order]


def link_traffic(*reports: Tables) -> Chart:
    """Bytes per rank and step over every link, by axis of parallelism; reports on one scale.

    Of a report that holds some ranks of many, the mean of these. Raises ValueError without reports.
    """
    if not reports:
        raise illegal("reports", reports, "nothing to draw", "one report or several")
    many = len(reports) > 1
    found = [
        (NAMES[flow.link] + f", {name}" * many, report, flow)
        for name, report in zip(naming.apart(reports), reports, strict=True)
        for flow in flows(report)
    ]
    found.sort(key=lambda one: (*LEVELS, *WAYS).index(one[2].link))
    rows = [(label, flow.what, flow.bytes) for label, _, flow in found]
    tops = mark.totals(rows)
    took = {
        label: None if None in each else sum(each)
        for label in tops
        if (each := [flow.seconds for name, _, flow in found if name == label])
    }
    biggest = max(tops.values(), default=0.0) or 1.0
    (unit, per), end = theme.unit_of(biggest), ROOM * biggest
    copies = any(flow.link in WAYS for *_, flow in found)
    own = [label for label, report, _ in found if report is reports[0]]
    fig = figure(
        _busiest(list(dict.fromkeys(own)), tops, took),
        "one step, mean of the ranks · seconds: the bytes alone, by their group's ports · a call "
        "counts on the slowest link of its group",
        height=150 + ROW * max(2, len(tops)),
        showlegend=True,
        xaxis=mark.bytes_axis(f"sent {'or copied ' * copies}per rank ({unit})", end, per),
        yaxis=mark.labels(list(tops), least=2, tickfont={"size": 13}),
    )
    said = {(label, flow.what): f"<br>{flow.ops}" * bool(flow.ops) for label, _, flow in found}
    kinds = list(dict.fromkeys(flow.what for *_, flow in found))
    words = {
        label: f"{theme.scaled(top, 'B')}"
        + ("" if took[label] is None else f", {theme.scaled(took[label], 's')}")
        for label, top in tops.items()
    }
    traces = mark.bars(rows, per=per, end=biggest, look=_look, kinds=kinds, letter=0, said=said)
    fig.draw(
        traces or [{"type": "bar", "showlegend": False}], mark.ends(tops, per, words=words, size=13)
    )
    clocks = " and ".join(dict.fromkeys(report.clock for report in reports))
    return fig.explained(
        f"traffic of {naming.subject(reports[0])} by link, {clocks}: {len(tops)} "
        f"bar{'s' * (len(tops) != 1)}",
        (" ".join(("clock", *Flow._fields)), [(report.clock, *flow) for _, report, flow in found]),
    )


def _look(kind: str) -> tuple[str, str]:
    """Name and colour of bytes: of an axis of parallelism, or of what is copied."""
    if kind in theme.CATEGORY_COLOUR:
        return f"copying {kind}", theme.category_colour(kind)
    return theme.text(kind), theme.axis_colour(kind)


def _busiest(own: list[str], tops: dict[str, float], took: dict[str, float | None]) -> str:
    """Which link is busy longest, and which carries most, if that is another; of these bars."""
    if not own:
        return "Nothing is sent"

    def where(bar: str) -> str:
        place = bar.partition(",")[0]
        return place if place in naming.LEVEL_NAME.values() else lanes.way(place)

    if any(took[bar] is None for bar in own):
        return f"A rank sends {theme.scaled(sum(tops[bar] for bar in own), 'B')} in a step"
    slow, most = max(own, key=took.__getitem__), max(own, key=tops.__getitem__)
    if len(own) == 1:
        return f"{theme.scaled(tops[slow], 'B')} {where(slow)} take {theme.scaled(took[slow], 's')}"
    said = f"Bytes take longest {where(slow)}: {theme.scaled(took[slow], 's')} for "
    said += theme.scaled(tops[slow], "B")
    if slow != most:
        said += f"; the {theme.scaled(tops[most], 'B')} {where(most)} take "
        said += theme.scaled(took[most], "s")
    return said
