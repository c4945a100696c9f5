"""The traffic chart: which rank sends how much to which, over which link, and for what.

On the left is a matrix of the bytes of one step, with a row per sender and a column per receiver:
an all-reduce on a ring is a band next to its diagonal. On the right are the same bytes per rank, a
bar per link, with a colour per axis, a pattern per operation and a line at 2(N-1)/N Psi, the least
that an all-reduce sends; and the bytes that a rank copies between memory tiers. Behind a bar are
the seconds that its bytes alone take, if all ranks use their links and their shares of a node's
ports evenly. If they do not, a link between nodes may carry fewer bytes and yet take longer.
"""

from __future__ import annotations

import math

import pandas as pd

from paralab.report import amounts, facts
from paralab.report.tables import DRY, LEVELS, Tables
from paralab.spec import BYTES_PER_ELEMENT
from paralab.view import lanes, naming, theme
from paralab.view.chart import Chart, figure
from paralab.view.marks import Part, cells, line, note, upright
from paralab.view.marks import bars as mark

MAX_RANKS = 128  # with more, a row of the matrix has no pixels, and borders of nodes cover all
MAX_GAPS = 32  # ranks up to which the cells are apart; gaps between smaller ones would hide them
MAX_WRITTEN = 12  # ranks up to which every cell of the matrix shows its number
ROW = 46  # pixels of a bar, where there is no matrix
NAMES = naming.LEVEL_NAME | lanes.ROW_NAME  # by link


def traffic_chart(report: Tables, *, matrix: bool = True) -> Chart:
    """Bytes per step: rank x rank, and per rank and link by axis and operation.

    matrix  False: only the bars, as always with more than 128 ranks
    """
    dry = report.clock == DRY  # a dry run has the rows of one rank, which make no matrix
    steps = report.model is not None or "observed" in report.meta  # else calls of a function
    n, unit = len(facts.reported_ranks(report)), "step" if steps else "call"
    sent = amounts.traffic(report, by=("level", "axis", "op"))
    copied = amounts.copied(report, by=("link", "category"))
    if report.plan.tiers is None:  # then copies only stage messages, whose bytes are counted
        copied = copied.head(0)
    sends, copies = sent["bytes"].sum() > 0, len(copied) > 0
    alone = dry or not matrix or not sends or report.world_size > MAX_RANKS
    optimum = None
    psi = facts.num_params(report)
    if psi and report.plan.dp == report.world_size > 1 and not copies:
        size = psi * BYTES_PER_ELEMENT[report.plan.grad_precision]
        optimum = 2 * (report.plan.dp - 1) * size / report.world_size
    flows = [
        (level, (axis, op), size / n) for level, axis, op, size in sent.itertuples(index=False)
    ]
    flows.sort(key=lambda flow: (LEVELS.index(flow[0]), flow[1]))
    flows += [(link, kind, size / n) for link, kind, size in copied.itertuples(index=False)]
    links = list(dict.fromkeys(link for link, *_ in flows))
    rows = [(NAMES[link], kind, size) for link, kind, size in flows] or [("nothing sent", "", 0.0)]
    tops, kinds = mark.totals(rows), list(dict.fromkeys(kind for _, kind, _ in rows))
    words = {NAMES[link]: _bar_label(link, flows, report) for link in links}
    timed = report.cluster is not None and bool(links)
    most = max(*tops.values(), optimum or 0.0, 1.0)
    (name, per), end = theme.unit_of(most), (1.42 if alone else 1.7 if timed else 1.3) * most
    place = {"domain": [0.0 if alone else 0.6, 1], "anchor": "y2"}
    verb = "sent or copied" if sends and copies else "copied" if copies else "sent"
    traces, shapes, matrix_axes = ([], [], {}) if alone else _matrix(report, unit)
    remarks = [f"bytes of one {unit}, without control messages"]
    remarks += ["lines: borders of nodes"] * bool(shapes)
    remarks += ["seconds: for the bytes alone, links and ports used evenly"] * timed
    fig = figure(
        _finding(report, sent, optimum, copied, " per step" * steps),
        " · ".join([*remarks, *lanes.limited([report])]),
        height=170 + ROW * max(3, len(tops)) if alone else max(400, min(40 * n, 560) + 180),
        showlegend=len(kinds) > 1,
        xaxis2=mark.bytes_axis(f"{verb} per rank and {unit} ({name})", end, per, **place),
        yaxis2=mark.labels(list(tops), least=2, above=0.3 * (optimum is not None), anchor="x2"),
        **matrix_axes,
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
        said = "2(N−1)/N times the gradients" + ", both levels together" * (len(tops) > 1)
        at = {"axes": ("x2", "y2 domain"), "anchor": "right top", "xshift": -4}
        notes.append(note(said, optimum / per, 1, **at))
    return fig.draw([*traces, *bars], notes, shapes).tabled(lambda: _moved(report))


def _look(kind: tuple[str, str] | str) -> tuple[str, str]:
    """Name and colour of bytes: sent over an axis by an operation, or copied, by category."""
    if not isinstance(kind, tuple):
        return mark.category_look(kind)
    return theme.text(", ".join(kind)), theme.axis_colour(kind[0])


def _bar_label(link: str, flows: list[tuple], report: Tables) -> str:
    """The words behind a bar: its bytes and, if the cluster states the link, their seconds. The
    cluster may state another link for a single operation, and the plan may limit one.
    """
    cluster, tiers = report.cluster, report.plan.tiers
    parts = [(kind, size) for over, kind, size in flows if over == link]
    text = theme.in_bytes(sum(size for _, size in parts))
    part = link if link in LEVELS else "disk" if link.startswith("disk") else "host"
    stated = getattr(cluster, part, None)
    if stated is None:
        return text
    by_op, share = cluster.collectives if link == "intra" else {}, 1.0
    if link == "inter" and cluster.ports is not None:
        share = cluster.ports / cluster.devices_per_node
    most = tiers.limits.get(link.partition(" ")[0], math.inf) if tiers else math.inf
    ops = [(kind[1] if link in LEVELS else "", n) for kind, n in parts]  # copies have no operation
    seconds = sum(n / min(by_op.get(op, stated).bandwidth * share, most) for op, n in ops)
    return f"{text}, {theme.in_seconds(seconds)}"


def _matrix(report: Tables, unit: str) -> tuple[list[Part], list[Part], Part]:
    """Trace, lines where a node ends, and axes. In an outline (detail="actions") some receivers are
    no reported ranks: they have a column but no row.
    """
    by_edge, senders = amounts.traffic(report, by="edge"), facts.reported_ranks(report)
    receivers = sorted({*senders, *by_edge["receiver"].tolist()})
    most = max(by_edge["bytes"].max(), 1.0)
    name, per = theme.unit_of(most)
    digits = max(0, 3 - len(f"{most / per:.0f}"))  # decimals of all cells: the largest has 3 digits
    sent = {(a, b): size / per for a, b, size in by_edge.itertuples(index=False)}
    sent |= {(rank, rank): None for rank in senders}  # a rank sends itself nothing

    def cell(a: int, b: int) -> tuple[float | None, str, str]:
        n = sent.get((a, b), 0.0)
        text = f"rank {a} sends rank {b}<br>{theme.in_bytes((n or 0) * per)} per {unit}"
        return n, "" if n is None else f"{n:.{digits}f}" if n else "0", text

    rows, columns = list(map(str, senders)), list(map(str, receivers))
    few = max(len(rows), len(columns)) <= MAX_WRITTEN  # written numbers need no scale
    colours = {"colours": theme.look().scale, "most": most / per, "showscale": not few}
    bar = {"title": {"text": name}, "x": 0.34, "thickness": 10, "len": 0.9}
    gap = {"xgap": 2, "ygap": 2} if len(columns) <= MAX_GAPS else {"xgap": 0, "ygap": 0}
    style = {**gap, "texttemplate": "%{text}" if few else "", "colorbar": bar, **colours}
    matrix = [[cell(a, b) for b in receivers] for a in senders]
    trace = cells.heat(columns, rows, matrix, name="sender to receiver", **style)
    node = [[facts.node_of(report, r) for r in ranks] for ranks in (senders, receivers)]
    down, across = ([i - 0.5 for i in range(1, len(n)) if n[i - 1] != n[i]] for n in node)
    width = 1.5 if gap["xgap"] else 0.5
    borders = [line((-0.5, len(columns) - 0.5), (at, at), width=width) for at in down]
    borders += [line((at, at), (-0.5, len(rows) - 0.5), width=width) for at in across]
    each = {"type": "category", "showgrid": False, "constrain": "domain"}
    title = {"text": "receiving rank" + f" (in the cells: {name} per {unit})" * few}
    xaxis = {"domain": [0, 0.4 if few else 0.33], "title": title, "categoryarray": columns}
    yaxis = {"title": "sending rank", "categoryarray": rows}
    yaxis |= {"autorange": "reversed", "scaleanchor": "x"}
    return [trace], borders, {"xaxis": each | xaxis, "yaxis": each | yaxis}


def _finding(
    report: Tables, sent: pd.DataFrame, optimum: float | None, copied: pd.DataFrame, per_step: str
) -> str:
    n, name = len(facts.reported_ranks(report)), theme.text(naming.subject(report))
    total, size = float(sent["bytes"].sum()), float(copied["bytes"].sum())
    does = [f"sends {theme.in_bytes(total / n)}"] if total else []
    does += [f"copies {theme.in_bytes(size / n)}"] if size else []
    if not does:
        return f"{name}: nothing is sent"
    by_rank = amounts.traffic(report)["bytes"]
    alike = total == 0 or by_rank.max() - by_rank.min() <= 1e-3 * by_rank.mean()
    who = "a rank" if alike else "a rank, on average,"  # equal but for a remainder
    if report.clock == DRY:
        who = f"rank {report.meta.get('rank')}"
    text = f"{name}: {'the rank' if report.world_size == 1 else who} {' and '.join(does)}{per_step}"
    if optimum is not None and total:
        off = total / n / optimum - 1
        apart = f"{abs(100 * off):.3g} %" if abs(off) < 0.1 else theme.percent(abs(off))
        side = f"{apart} {'above' if off > 0 else 'below'}" if off else "exactly"
        text += f", {side} 2(N−1)/N times the gradients"
    disk = float(copied["bytes"][copied["link"].str.startswith("disk")].sum())
    if disk and not total:
        text += f", {theme.share(disk / size)} of it to and from disk"
    far = sent.loc[sent["level"] == "inter", "bytes"].sum()
    return f"{text}; {theme.share(far / total)} of it between nodes" if 0 < far < total else text


def _moved(report: Tables) -> pd.DataFrame:
    """The bytes that ranks send, edge by edge, and those that an offload copies, as sent to
    themselves: for these op is the link, and category says what is copied.
    """
    sent = amounts.traffic(report, by=("edge", "axis", "level", "op")).assign(category="")
    if report.plan.tiers is None:
        return sent
    copied = amounts.copied(report).rename(columns={"rank": "sender", "link": "op"})
    copied = copied.assign(receiver=copied["sender"], axis="", level="")
    return pd.concat([sent] * (len(sent) > 0) + [copied[sent.columns]], ignore_index=True)
