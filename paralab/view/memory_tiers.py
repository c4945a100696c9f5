"""What a rank keeps elsewhere than on its device: thin bars beneath the panels of its memory.

A bar per tier, at the moment when that tier is fullest, all on one scale of bytes. What lies on the
host and in files hardly changes over a step, so a curve would say no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paralab.view import theme
from paralab.view.memory import LARGEST, WORD_SHARE
from paralab.view.memory_curves import Tier
from paralab.view.memory_panels import FRAME

if TYPE_CHECKING:
    from paralab.view.chart import Chart

TIER_NAME = {"device": "device", "host": "host", "file": "files"}
ABOVE, BAR = 88, 27  # pixels: of the time axis and the head, and of a bar


def room(found: Sequence[Tier]) -> int:
    """Pixels that the bars take beneath the panels."""
    return ABOVE + BAR * len(found) if found else 0


def draw_tiers(fig: Chart, found: Sequence[Tier], *, many: bool) -> None:
    """The bars, at the bottom of a figure that left `room` for them; nothing for no tiers.

    many  there are other ranks: say whose these are
    """
    if not found:
        return
    plot, biggest = fig.layout.height - FRAME, max(tier.total for tier in found)
    unit = next(u for u, size in LARGEST.items() if biggest >= size)
    per, end = LARGEST[unit], 1.13 * biggest
    labels = [TIER_NAME[tier.name] for tier in found]
    named = {trace.name for trace in fig.data if trace.showlegend}
    for category in _categories(found):
        name, sizes = theme.text(category), [tier.held.get(category, 0) for tier in found]
        fill, words = _fill(category), [theme.scaled(n, "B") for n in sizes]
        fig.add_bar(
            name=name,
            legendgroup=name,
            showlegend=name not in named,
            orientation="h",
            y=labels,
            x=[n / per for n in sizes],
            xaxis="x2",
            yaxis="y100",
            width=0.8,
            marker={"color": fill, "line": {"width": 1, "color": theme.look().paper}},
            text=[
                word if n >= WORD_SHARE * (len(word) + 1) * end else ""
                for n, word in zip(sizes, words, strict=True)
            ],
            textposition="inside",
            insidetextanchor="middle",
            constraintext="none",
            textangle=0,
            textfont={"size": 12, "color": theme.on(fill)},
            hovertext=[
                f"{label}, {name}: {n:,} bytes" for label, n in zip(labels, sizes, strict=True)
            ],
            hovertemplate="%{hovertext}<extra></extra>",
        )
    top = BAR * len(found) / plot
    notes: list[dict[str, Any]] = [
        {
            "x": tier.total / per,
            "y": label,
            "xref": "x2",
            "yref": "y100",
            "xanchor": "left",
            "text": f" <b>{theme.scaled(tier.total, 'B')}</b>",
            "font": {"size": 13},
        }
        for tier, label in zip(found, labels, strict=True)
    ]
    whose = f"rank {found[0].rank}: each" if many else "each"
    notes.append(
        {
            "x": 0,
            "y": top,
            "xref": "paper",
            "yref": "paper",
            "xanchor": "left",
            "yanchor": "bottom",
            "font": {"size": 14},
            "text": f"<b>{whose} tier at its fullest</b>",
        }
    )
    fig.annotated({"showarrow": False, **note} for note in notes)
    fig.update_layout(
        xaxis2={
            "anchor": "y100",
            "range": [0, end / per],
            "tickformat": "~g",
            "title": {"text": f"memory ({unit})"},
        },
        yaxis100={
            "anchor": "x2",
            "domain": [0, top],
            "type": "category",
            "categoryarray": labels,
            "autorange": "reversed",
            "showgrid": False,
            "fixedrange": True,
            "ticksuffix": " ",
        },
    )


def _categories(found: Sequence[Tier]) -> list[str]:
    there = {category for tier in found for category, size in tier.held.items() if size}
    known = [name for name in theme.CATEGORY_COLOUR if name in there]
    return [*known, *sorted(there - set(known))]


def _fill(category: str) -> str:
    return theme.CATEGORY_COLOUR.get(category, theme.OTHER_COLOUR)
