"""The traffic chart: who sends how much to whom, over which link, and for what.

Left is a matrix, sender rows and receiver columns, of the bytes of one step: an all-reduce on a
ring is its off-diagonal band. Right are the same bytes per rank, a bar for every link: a colour per
axis, a pattern per operation, with the line 2(N-1)/N Psi that no all-reduce gets below; and what a
rank copies between memory tiers. Behind a bar stand the seconds that its bytes alone take, if all
ranks use their links and their share of a node's ports evenly: a link between nodes may carry less
and take longer.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from paralab.report import about, amounts
from paralab.report.tables import DRY, LEVELS, Tables
from paralab.spec import BYTES_PER_ELEMENT, Cluster
from paralab.view import lanes, naming, theme
from paralab.view.chart import Chart, figure
from paralab.view.marks import bars as mark
from paralab.view.marks import cells, line, note, upright

MAX_WRITTEN = 12  # ranks up to which every cell of the matrix shows its number
ROW = 46  # pixels of a bar, where there is no matrix
NAMES = naming.LEVEL_NAME | lanes.ROW_NAME  # by link


def traffic_chart(report: Tables, *, matrix: bool = True) -> Chart:
    """Bytes per step: rank x rank, and per rank and link by axis and operation.

    matrix  False: the bars alone
    """
    dry = report.clock == DRY  # rows of one rank: whom it sends to is no matrix
    steps = report.model is not None or "observed" in report.meta  # else one call of a function
    n, unit = len(about.reported_ranks(report)), "step" if steps else "call"
    sent = amounts.traffic(report, by=("level", "axis", "op"))
    copied = amounts.copied(report, by=("link", "category"))
    if report.plan.tiers is None:  # what messages pass through on their way is theirs already
        copied = copied.head(0)
    sends, copies = sent["bytes"].sum() > 0, len(copied) > 0
    alone = dry or not matrix or (copies and not sends)
    optimum = None
    if report.model is not None and report.plan.dp == report.world_size > 1 and not copies:
        psi = report.model.num_params * BYTES_PER_ELEMENT[report.plan.grad_precision]
        optimum = 2 * (report.plan.dp - 1) * psi / report.world_size
    found = sent.to_dict("records")
    found.sort(key=lambda r: (LEVELS.index(r["level"]), r["axis"], r["op"]))
    flows = [(r["level"], (r["axis"], r["op"]), r["bytes"] / n) for r in found]
    flows += [(r["link"], r["category"], r["bytes"] / n) for r in copied.to_dict("records")]
    links = list(dict.fromkeys(link for link, *_ in flows))
    rows = [(NAMES[link], kind, size) for link, kind, size in flows] or [("nothing sent", "", 0.0)]
    tops, kinds = mark.totals(rows), list(dict.fromkeys(kind for _, kind, _ in rows))
    words = {NAMES[link]: _took(link, flows, report.cluster) for link in links}
    timed = report.cluster is not None and bool(links)
    most = max(*tops.values(), optimum or 0.0, 1.0)
    (name, per), end = theme.unit_of(most), (1.42 if alone else 1.7 if timed else 1.3) * most
    where = {"domain": [0.0 if alone else 0.6, 1], "anchor": "y2"}
    verb = "sent or copied" if sends and copies else "copied" if copies else "sent"
    traces, shapes, both = ([], [], {}) if alone else _matrix(report, unit)
    borders = " · lines: where a node ends" * bool(shapes)
    seconds = " · seconds: the bytes alone, links and ports used evenly" * timed
    fig = figure(
        _finding(report, sent, optimum, copied, " per step" * steps),
        f"bytes of one {unit}, bookkeeping left out{borders}{seconds}",
        height=170 + ROW * max(3, len(tops)) if alone else max(400, min(40 * n, 560) + 180),
        showlegend=len(kinds) > 1,
        xaxis2=mark.bytes_axis(f"{verb} per rank and {unit} ({name})", end, per, **where),
        yaxis2=mark.labels(list(tops), least=2, above=0.3 * (optimum is not None), anchor="x2"),
        **both,
    )
    axes = ("x2", "y2")
    bars = mark.bars(rows, per=per, end=end, look=_look, kinds=kinds, letter=0, axes=axes)
    for kind, bar in zip(kinds, bars, strict=True):
        op = kind[1] if isinstance(kind, tuple) else ""
        # "overlay" draws the colour beneath the pattern, else there is paper on paper.
        look = {"shape": theme.OP_PATTERN.get(op, ""), "size": 7, "fillmode": "overlay"}
        bar["marker"]["pattern"] = look | {"fgcolor": theme.look().paper}
    notes = mark.ends(tops, per, words=words, axes=axes, size=13)
    if optimum is not None:
        shapes.append(upright(optimum / per, axis="y2 domain", dash="dash", xref="x2"))
        said = "2(N−1)/N of the gradients" + ", levels together" * (len(tops) > 1)
        at = {"axes": ("x2", "y2 domain"), "hold": "right top", "xshift": -4}
        notes.append(note(said, optimum / per, 1, **at))
    return fig.draw([*traces, *bars], notes, shapes).explained(
        f"traffic of {naming.subject(report)}, {report.clock}: {len(flows)} parts of "
        f"{len(links)} link{'s' * (len(links) != 1)}",
        lambda: _moved(report, copies),
    )


def _look(kind: tuple[str, str] | str) -> tuple[str, str]:
    """Name and colour of bytes: of an axis and operation, or of a category that is copied."""
    if not isinstance(kind, tuple):
        return mark.category_look(kind)
    return theme.text(", ".join(kind)), theme.axis_colour(kind[0])


def _took(link: str, flows: list[tuple], cluster: Cluster | None) -> str:
    """What stands behind a bar: its bytes and, where a cluster states the link, their seconds. A
    cluster may state the link of an operation by itself.
    """
    mine = [(kind, size) for over, kind, size in flows if over == link]
    said, part = theme.scaled(sum(size for _, size in mine), "B"), link
    if link not in LEVELS:
        part = "disk" if link.startswith("disk") else "host"
    stated = getattr(cluster, part, None)
    if stated is None:
        return said
    own, share = cluster.collectives if link == "intra" else {}, 1.0
    if link == "inter" and cluster.ports is not None:
        share = cluster.ports / cluster.devices_per_node
    ops = [(kind[1] if link in LEVELS else "", size) for kind, size in mine]
    took = sum(size / (own.get(op, stated).bandwidth * share) for op, size in ops)
    return f"{said}, {theme.scaled(took, 's')}"


def _matrix(
    report: Tables, unit: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
    """Trace, lines where a node ends, and axes. In outline ranks have a column that have no row."""
    by_edge, senders = amounts.traffic(report, by="edge"), about.reported_ranks(report)
    receivers = sorted({*senders, *by_edge["receiver"].tolist()})
    most = max(by_edge["bytes"].max() if len(by_edge) else 0.0, 1.0)
    name, per = theme.unit_of(most)
    digits = max(0, 3 - len(f"{most / per:.0f}"))  # of all alike: three in the largest
    edges = by_edge.to_dict("records")
    sent = {(edge["sender"], edge["receiver"]): edge["bytes"] / per for edge in edges}
    if max(len(senders), len(receivers)) > 1:  # plotly cannot draw a matrix of nothing but holes
        sent |= {(rank, rank): None for rank in senders}  # a rank sends itself nothing
    z = [[sent.get((a, b), 0.0) for b in receivers] for a in senders]
    words = [["" if n is None else f"{n:.{digits}f}" if n else "0" for n in row] for row in z]
    said = [
        [
            f"rank {a} sends rank {b}<br>{theme.scaled((n or 0) * per, 'B')} per {unit}"
            for b, n in zip(receivers, row, strict=True)
        ]
        for a, row in zip(senders, z, strict=True)
    ]
    rows, columns = list(map(str, senders)), list(map(str, receivers))
    few = max(len(rows), len(columns)) <= MAX_WRITTEN  # written numbers need no scale
    colours = {"colours": theme.look().scale, "most": most / per, "showscale": not few}
    bar = {"title": {"text": name}, "x": 0.34, "thickness": 10, "len": 0.9}
    style = {"ygap": 2, "texttemplate": "%{text}" if few else "", "colorbar": bar, **colours}
    trace = cells.heat(columns, rows, z, words, said, name="sender to receiver", **style)
    node = [[about.node_of(report, r) for r in ranks] for ranks in (senders, receivers)]
    down, across = ([i - 0.5 for i in range(1, len(n)) if n[i - 1] != n[i]] for n in node)
    borders = [line((-0.5, len(columns) - 0.5), (at, at), width=1.5) for at in down]
    borders += [line((at, at), (-0.5, len(rows) - 0.5), width=1.5) for at in across]
    each = {"type": "category", "showgrid": False, "constrain": "domain"}
    title = {"text": f"receiving rank (in the cells: {name} per {unit})"}
    xaxis = {**each, "domain": [0, 0.4 if few else 0.33], "title": title, "categoryarray": columns}
    yaxis = {**each, "title": {"text": "sending rank"}, "categoryarray": rows}
    yaxis |= {"autorange": "reversed", "scaleanchor": "x"}
    return [trace], borders, {"xaxis": xaxis, "yaxis": yaxis}


def _finding(
    report: Tables, sent: pd.DataFrame, optimum: float | None, copied: pd.DataFrame, often: str
) -> str:
    n, name = len(about.reported_ranks(report)), theme.text(naming.subject(report))
    total, size = float(sent["bytes"].sum()), float(copied["bytes"].sum())
    does = [f"sends {theme.scaled(total / n, 'B')}"] if total else []
    does += [f"copies {theme.scaled(size / n, 'B')}"] if size else []
    if not does:
        return f"{name}: nothing is sent"
    by_rank = amounts.traffic(report)["bytes"]
    alike = total == 0 or by_rank.max() - by_rank.min() <= 1e-3 * by_rank.mean()
    who = "a rank" if alike else "a rank, on average,"  # a byte may be left that n cannot divide
    if report.clock == DRY:
        who = f"rank {report.meta.get('rank')}"
    said = f"{name}: {'it' if report.world_size == 1 else who} {' and '.join(does)}{often}"
    if optimum is not None and total:
        off = total / n / optimum - 1
        side = f"{abs(100 * off):.2f} % {'above' if off > 0 else 'below'}" if off else "exactly"
        said += f", {side} 2(N−1)/N of the gradients"
    disk = float(copied["bytes"][copied["link"].str.startswith("disk")].sum())
    if disk and not total:
        said += f", {theme.percent(disk / size)} of it to and from disk"
    far = sent.loc[sent["level"] == "inter", "bytes"].sum()
    return f"{said}; {theme.percent(far / total)} of it between nodes" if 0 < far < total else said


def _moved(report: Tables, copies: bool) -> pd.DataFrame:
    """What ranks send, edge by edge; and what they copy, from themselves to themselves: op names
    the link then, and one column more the category.
    """
    sent = amounts.traffic(report, by=("edge", "axis", "level", "op"))
    if not copies:
        return sent
    own = amounts.copied(report).rename(columns={"rank": "sender", "link": "op"})
    own = own.assign(receiver=own["sender"], axis="", level="")
    both = [sent.assign(category="")] * (len(sent) > 0) + [own]
    columns = [*sent.columns.drop("bytes"), "category", "bytes"]
    return pd.concat([part[columns] for part in both], ignore_index=True)
