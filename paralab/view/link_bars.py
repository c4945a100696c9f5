"""Bytes that a rank copies between memory tiers, a bar per link, in the colours of what is moved.

Beside what it sends, on the same scale; or alone, where nothing is sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paralab.report import metrics
from paralab.view import lanes, naming, theme

if TYPE_CHECKING:
    import pandas as pd

    from paralab.report.tables import Tables
    from paralab.view.chart import Chart


def copied(report: Tables) -> pd.DataFrame:
    """link, category, bytes per step, of all ranks; links from the device outwards.

    Of plans that offload: what messages pass through on their way is theirs already.
    """
    found = metrics.copied(report, by=("link", "category"))
    return found if report.plan.tiers is not None else found.head(0)


def tops(found: pd.DataFrame, n: int) -> dict[str, float]:
    """How high the bars are, in megabytes per rank."""
    sums = found.groupby("link", sort=False)["bytes"].sum()
    return {_broken(link): size / n / 1e6 for link, size in sums.items()}


def draw(fig: Chart, found: pd.DataFrame, n: int, *, unit: str, axes: tuple[str, str]) -> None:
    """The bars, one trace per category, with their heights written above."""
    there = set(found["category"])
    known = [name for name in theme.CATEGORY_COLOUR if name in there]
    for name in [*known, *sorted(there - set(known))]:
        mine, said = found[found["category"] == name], theme.text(name)
        fig.add_bar(
            name=said,
            x=[_broken(link) for link in mine["link"]],
            y=[size / n / 1e6 for size in mine["bytes"]],
            xaxis=axes[0],
            yaxis=axes[1],
            width=0.5,
            marker={"color": theme.CATEGORY_COLOUR.get(name, theme.OTHER_COLOUR)},
            hovertext=[
                f"{said}, {link}: {size / n:,.1f} bytes per rank and {unit}"
                for link, size in zip(mine["link"].map(_name), mine["bytes"], strict=True)
            ],
            hovertemplate="%{hovertext}<extra></extra>",
        )
    heights(fig, tops(found, n), axes)


def heights(fig: Chart, found: dict[str, float], axes: tuple[str, str]) -> None:
    """Megabytes above their bars."""
    for group, top in found.items():
        fig.add_annotation(
            x=group,
            y=top,
            xref=axes[0],
            yref=axes[1],
            showarrow=False,
            text=f"{theme.megabytes(top * 1e6)} MB",
            yanchor="bottom",
            yshift=2,
        )


def chart(report: Tables, found: pd.DataFrame) -> Chart:
    """The chart of traffic where nothing is sent."""
    n = len(metrics.reported_ranks(report))
    each = tops(found, n)
    subject = naming.subject(report)
    fig = theme.figure(
        f"{theme.text(subject)}: {_finding(found, n)}",
        naming.clock_line(report, "bytes of one step", "1 MB = 10<sup>6</sup> bytes"),
        height=420,
        barmode="stack",
        showlegend=True,
        legend={"x": 0, "y": 1, "yanchor": "bottom", "orientation": "h", "traceorder": "normal"},
        xaxis={
            "type": "category",
            "categoryarray": list(each),
            "showgrid": False,
            "range": [-0.5, len(each) - 0.5],
        },
        yaxis={
            "title": {"text": "MB copied per rank and step"},
            "tickformat": "~g",
            "range": [0, max(each.values()) * 1.15 or 1],
        },
    )
    draw(fig, found, n, unit="step", axes=("x", "y"))
    return fig.explained(
        f"traffic of {subject}, {report.clock}: {len(found)} rows by link and "
        "category, nothing sent",
        table(report),
    )


def table(report: Tables) -> pd.DataFrame:
    """What ranks send, edge by edge; and what they copy, from themselves to themselves: op names
    the link then, and one column more the category.
    """
    import pandas as pd

    sent = metrics.traffic(report, by=("edge", "axis", "level", "op"))
    own = metrics.copied(report).rename(columns={"rank": "sender", "link": "op"})
    if copied(report).empty:
        return sent
    own = own.assign(receiver=own["sender"], axis="", level="")
    both = [sent.assign(category="")] * (len(sent) > 0) + [own]
    columns = [*sent.columns.drop("bytes"), "category", "bytes"]
    return pd.concat([part[columns] for part in both], ignore_index=True)


def _finding(found: pd.DataFrame, n: int) -> str:
    total = float(found["bytes"].sum())
    disk = float(found["bytes"][found["link"].str.startswith("disk")].sum())
    who = "copies" if n == 1 else "every rank copies"
    said = f"{who} {theme.megabytes(total / n)} MB per step"
    return f"{said}, {100 * disk / total:.0f} % of it to and from disk" if disk else said


def _name(link: str) -> str:
    return theme.text(lanes.ROW_NAME.get(link, link))


def _broken(link: str) -> str:
    """On two lines: bars stand close together."""
    return _name(link).replace(" to ", " to<br>")
