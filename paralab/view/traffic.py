"""The traffic chart: who sends how much to whom, over which axis and level, and over which link.

Left, a matrix: sender rows, receiver columns, bytes of one step. An all-reduce on a ring is its
off-diagonal band. Right, the same bytes per rank by axis and level, one pattern per operation,
with the line 2(N-1)/N Psi that no all-reduce gets below; and beside them what a rank copies between
memory tiers, link by link. Megabytes are decimal, 10^6 bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paralab.report import metrics
from paralab.report.tables import DRY, LEVELS
from paralab.view import link_bars, naming, theme

if TYPE_CHECKING:
    import pandas as pd

    from paralab.report.tables import Tables
    from paralab.view.chart import Chart

MAX_WRITTEN = 12  # ranks up to which every cell of the matrix shows its number


def traffic_chart(report: Tables) -> Chart:
    """Bytes per step: rank x rank, and per rank by axis and level, and by link between tiers."""
    one = report.clock == DRY  # rows of one rank: whom it sends to is no matrix
    n = len(metrics.reported_ranks(report))
    by_edge = metrics.traffic(report, by="edge")
    per_op = metrics.traffic(report, by=("axis", "level", "op"))
    total, copied = per_op["bytes"].sum(), link_bars.copied(report)
    if copied["bytes"].any() and not total:
        return link_bars.chart(report, copied)
    ideal = None
    if report.model is not None and report.plan.dp == report.world_size > 1 and copied.empty:
        ideal = metrics.ring_optimum(report) * n // report.world_size
    unit = "call" if report.model is None else "step"
    fig = theme.figure(
        _finding(report, per_op, ideal, copied),
        naming.clock_line(
            report, f"bytes of one {unit}, bookkeeping left out", "1 MB = 10<sup>6</sup> bytes"
        ),
        height=max(400, min(40 * n, 560) + 180),
    )
    senders, receivers = _ends(report, by_edge)
    if not one:
        fig.add_heatmap(**_matrix(by_edge, senders, receivers))
    nothing = {"axis": "", "level": "intra", "op": "none", "bytes": 0}
    rows = sorted(
        per_op.to_dict("records") or [nothing],
        key=lambda r: (r["axis"], LEVELS.index(r["level"]), r["op"]),
    )
    many = len(copied) > 0  # narrower bars, and two things that they mean
    apart = ",<br>" if many else ", "
    groups = [
        theme.text(r["axis"]) + apart + naming.LEVEL_NAME[r["level"]] for r in rows if r["axis"]
    ]
    groups = groups or ["nothing sent"]
    for op in sorted({row["op"] for row in rows}):
        mine = [(g, r) for g, r in zip(groups, rows, strict=True) if r["op"] == op]
        fig.add_bar(**_bars(op, mine, n))
    tops: dict[str, float] = {}
    for group, row in zip(groups, rows, strict=True):
        tops[group] = tops.get(group, 0.0) + row["bytes"] / n / 1e6
    links = link_bars.tops(copied, n)
    highest = max(*tops.values(), *links.values(), 0.0)
    left, right = (0.31, 0.44) if many else (0.46, 0.62)
    right = 0 if one else right
    fig.update_layout(
        barmode="stack",
        showlegend=many or len({row["op"] for row in rows}) > 1,
        legend={
            "x": 1,
            "xanchor": "right",
            "y": 1.0,
            "yanchor": "bottom",
            "orientation": "h",
            **({"traceorder": "normal"} if many else {}),
        },
        xaxis={
            "domain": [0, left],
            "type": "category",
            "showgrid": False,
            "visible": not one,
            "categoryarray": [str(r) for r in receivers],
            "title": {"text": f"receiving rank (in the cells: MB per {unit})"},
            "constrain": "domain",
        },
        yaxis={
            "title": {"text": "sending rank"},
            "type": "category",
            "visible": not one,
            "categoryarray": [str(r) for r in senders],
            "autorange": "reversed",
            "showgrid": False,
            "scaleanchor": "x",
            "constrain": "domain",
        },
        xaxis2={"domain": [right, 1], "anchor": "y2", "type": "category", "showgrid": False}
        | ({"categoryarray": [*tops, *links]} if many else {}),
        yaxis2={
            "anchor": "x2",
            "title": {"text": f"MB sent{' or copied' * many} per rank and {unit}"},
            "range": [0, max(highest, (ideal or 0) / n / 1e6) * 1.25 or 1],
            "tickformat": "~g",
        },
    )
    link_bars.heights(fig, tops, ("x2", "y2"))
    link_bars.draw(fig, copied, n, unit=unit, axes=("x2", "y2"))
    if ideal is not None:
        y = ideal / n / 1e6
        fig.add_shape(
            type="line",
            xref="x2 domain",
            x0=0,
            x1=1,
            yref="y2",
            y0=y,
            y1=y,
            line={"dash": "dash", "width": 2, "color": theme.look().ink},
        )
        fig.add_annotation(
            xref="x2 domain",
            x=1,
            yref="y2",
            y=y,
            showarrow=False,
            xanchor="right",
            yanchor="bottom",
            yshift=2,
            text="2(N−1)/N·Ψ" + ", levels together" * (len(tops) > 1),
        )
    rows_said = f"{len(by_edge)} pairs of ranks, {len(per_op)} rows by axis, level and op"
    rows_said += f", {len(copied)} by link" * many
    return fig.explained(
        f"traffic of {naming.subject(report)}, {report.clock}: {rows_said}", link_bars.table(report)
    )


def _ends(report: Tables, by_edge: pd.DataFrame) -> tuple[list[int], list[int]]:
    """The ranks of the matrix's rows, and of its columns: in outline, whoever they send to too."""
    ranks = metrics.reported_ranks(report)
    return ranks, sorted({*ranks, *by_edge["receiver"].tolist()})


def _matrix(by_edge: pd.DataFrame, senders: list[int], receivers: list[int]) -> dict[str, Any]:
    n, row = max(len(senders), len(receivers)), {rank: i for i, rank in enumerate(senders)}
    column = {rank: i for i, rank in enumerate(receivers)}
    sent: list[list[float | None]] = [[0.0] * len(receivers) for _ in senders]
    for edge in by_edge.to_dict("records"):
        sent[row[edge["sender"]]][column[edge["receiver"]]] = edge["bytes"] / 1e6
    for rank in senders if n > 1 else ():  # plotly cannot draw a matrix of nothing but holes
        sent[row[rank]][column[rank]] = None  # a rank sends itself nothing
    return {
        "name": "sender to receiver",
        "x": [str(r) for r in receivers],
        "y": [str(r) for r in senders],
        "z": sent,
        "zmin": 0,
        "zmax": max((v for row in sent for v in row if v is not None), default=0.0) or 1.0,
        "colorscale": [[0.0, theme.look().scale[0]], [1.0, theme.look().scale[1]]],
        "xgap": 2,
        "ygap": 2,
        "text": [["" if v is None else theme.megabytes(v * 1e6) for v in row] for row in sent],
        "texttemplate": "%{text}" if n <= MAX_WRITTEN else "",
        "showscale": n > MAX_WRITTEN,  # written numbers need no scale
        "colorbar": {"title": {"text": "MB"}, "x": 0.47, "thickness": 12, "len": 0.9},
        "hoverongaps": False,
        "hovertemplate": "rank %{y} sends rank %{x}<br>%{text} MB per step<extra></extra>",
    }


def _bars(op: str, rows: list[tuple[str, dict[str, Any]]], n: int) -> dict[str, Any]:
    return {
        "name": op,
        "x": [group for group, _ in rows],
        "y": [row["bytes"] / n / 1e6 for _, row in rows],
        "xaxis": "x2",
        "yaxis": "y2",
        "width": 0.5,
        "marker": {
            "color": [theme.axis_colour(r["axis"]) for _, r in rows],
            # "overlay" draws the colour beneath the pattern; without it there is paper on paper.
            "pattern": {
                "shape": theme.OP_PATTERN.get(op, ""),
                "size": 7,
                "fillmode": "overlay",
                "fgcolor": theme.look().paper,
            },
        },
        "hovertext": [f"{op}, {g}: {r['bytes'] / n:,.1f} bytes per rank and step" for g, r in rows],
        "hovertemplate": "%{hovertext}<extra></extra>",
    }


def _finding(report: Tables, sent: pd.DataFrame, ideal: int | None, copied: pd.DataFrame) -> str:
    n, name = len(metrics.reported_ranks(report)), theme.text(naming.subject(report))
    total, size = float(sent["bytes"].sum()), float(copied["bytes"].sum())
    if report.clock == DRY:
        said = f"{name}: rank {report.meta.get('rank')} sends {theme.scaled(total, 'B')}"
        return said + f" and copies {theme.scaled(size, 'B')}" * (size > 0) + " per step"
    if total == 0:
        return f"{name}: nothing is sent"
    by_rank = metrics.traffic(report)["bytes"]
    alike = by_rank.max() - by_rank.min() <= 1e-3 * by_rank.mean()  # a byte that n does not divide
    said = f"{name}: {'each rank sends' if alike else 'ranks send on average'} "
    said += f"{theme.megabytes(total / n)} MB"
    if size:
        said += f" and copies {theme.megabytes(size / n)} MB"
    said += " per step" * (report.model is not None)
    if ideal is not None and total == ideal:
        said += " = 2(N−1)/N·Ψ, exactly"
    elif ideal is not None:
        gap = 100 * (total - ideal) / ideal
        said += f", {abs(gap):.2f} % {'above' if gap > 0 else 'below'} 2(N−1)/N·Ψ"
    far = sent.loc[sent["level"] == "inter", "bytes"].sum()
    return f"{said}; {100 * far / total:.0f} % of it between nodes" if 0 < far < total else said
