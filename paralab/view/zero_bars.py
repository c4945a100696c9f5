"""Two prices side by side: bars of memory by category, and beside each what is sent for it.

Decimal units: 1 MB = 10^6 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from paralab.view import theme

if TYPE_CHECKING:
    from paralab.view.chart import Chart

PALE = 0.45  # how opaque bars are that are not meant
MEMORY, TRAFFIC = (0.0, 0.62), (0.68, 1.0)  # of the figure's width
LETTER = 0.017  # of the memory axis that one letter takes


def memory_and_traffic(
    bars: Mapping[str, Mapping[str, int]],
    sent: Mapping[str, int],
    *,
    bright: Sequence[str],
    title: str,
    below: str,
    axis: str = "dp",
) -> Chart:
    """Bytes on a device by category, {label: {category: bytes}}, and bytes sent, {label: bytes}.

    bright  labels whose bars are in full colour
    axis    along which they are sent
    """
    totals = {label: sum(parts.values()) for label, parts in bars.items()}
    opaque = [1.0 if label in bright else PALE for label in bars]
    end = 1.22 * max([*totals.values(), 1])
    traces, notes = [], []
    for category in theme.CATEGORY_COLOUR:
        if any(category in parts for parts in bars.values()):
            traces.append(_trace(category, bars, opaque, end))
    fig = theme.figure(
        theme.text(title),
        below,
        height=150 + 52 * len(bars),
        barmode="stack",
        bargap=0.3,
        legend={"orientation": "h", "y": 1, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
        xaxis={
            "domain": MEMORY,
            "showgrid": False,
            "range": [0, end / 1e6],
            "tickformat": "~g",
            "title": {"text": "peak of memory (MB)"},
        },
        xaxis2={
            "domain": TRAFFIC,
            "anchor": "y",
            "tickformat": "~g",
            "nticks": 5,
            "showgrid": False,
            "range": [0, 1.45 * max(sent.values()) / 1e6 or 1.0],
            "title": {"text": "sent per step (MB)"},
        },
        yaxis={
            "type": "category",
            "showgrid": False,
            "range": [len(bars) - 0.45, -0.55],
            "categoryarray": [theme.text(label) for label in bars],
            "ticksuffix": " ",
            "tickvals": [theme.text(label) for label in bars],
            "tickfont": {"size": 14},
            "ticktext": [
                f"<b>{theme.text(label)}</b>" if label in bright else theme.text(label)
                for label in bars
            ],
        },
    )
    fig.add_traces([{"type": "bar", **one} for one in [*traces, _traffic(sent, opaque, axis)]])
    for label, total in totals.items():
        for scale, size in (("x", total), ("x2", sent[label])):
            said = theme.scaled(size, "B")
            notes.append(
                {
                    "x": size / 1e6,
                    "y": theme.text(label),
                    "xref": scale,
                    "xanchor": "left",
                    "text": f" <b>{said}</b>" if label in bright else f" {said}",
                    "font": {"size": 13},
                    "showarrow": False,
                }
            )
    fig.annotated(notes)
    return fig


def _trace(
    category: str, bars: Mapping[str, Mapping[str, int]], opaque: list[float], end: float
) -> dict[str, Any]:
    fill = theme.CATEGORY_COLOUR[category]
    counts = [parts.get(category, 0) for parts in bars.values()]
    words = [theme.scaled(n, "B") for n in counts]
    return {
        "name": category,
        "orientation": "h",
        "y": [theme.text(label) for label in bars],
        "x": [n / 1e6 for n in counts],
        "marker": {
            "color": fill,
            "opacity": opaque,
            "line": {"width": 1, "color": theme.look().paper},
        },
        "text": [
            word if n >= LETTER * (len(word) + 1) * end else ""
            for n, word in zip(counts, words, strict=True)
        ],
        "textposition": "inside",
        "insidetextanchor": "middle",
        "constraintext": "none",
        "textangle": 0,
        "textfont": {
            "size": 12,
            "color": [theme.on(fill) if full == 1 else theme.look().ink for full in opaque],
        },
        "hovertext": [
            f"{theme.text(label)}, {category}: {word} ({n:,} bytes)"
            for label, word, n in zip(bars, words, counts, strict=True)
        ],
        "hovertemplate": "%{hovertext}<extra></extra>",
        "showlegend": any(counts),
    }


def _traffic(sent: Mapping[str, int], opaque: list[float], axis: str) -> dict[str, Any]:
    return {
        "name": "sent",
        "orientation": "h",
        "y": [theme.text(label) for label in sent],
        "x": [n / 1e6 for n in sent.values()],
        "xaxis": "x2",
        "marker": {"color": theme.axis_colour(axis), "opacity": opaque},
        "showlegend": False,
        "hovertext": [
            f"{theme.text(label)}: {n:,} bytes per device and step" for label, n in sent.items()
        ],
        "hovertemplate": "%{hovertext}<extra></extra>",
    }


def table(bars: Mapping[str, Mapping[str, int]], sent: Mapping[str, int]) -> Any:
    """A row for every category of every bar, and one for what is sent; bytes."""
    import pandas as pd

    rows = [
        (label, category, count)
        for label, parts in bars.items()
        for category, count in parts.items()
    ]
    rows += [(label, "sent", count) for label, count in sent.items()]
    return pd.DataFrame(rows, columns=["bar", "category", "bytes"])
