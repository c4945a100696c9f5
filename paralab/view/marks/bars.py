"""Bars: one per label, stacked by kind, with each part's number where it fits and totals behind.

Rows are (label, kind, value, ...); values are mostly bytes. The bars are horizontal, because their
labels are words.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from paralab.checks import illegal, real
from paralab.view import naming, theme
from paralab.view.marks import AXES, Part, hover, note, on

LETTER = 0.0105  # share of the axis that one letter takes, if the axis is as wide as the figure
VISIBLE = 0.002  # share of the axis: a kind that is smaller in every bar is not in the legend
PALE = 0.45  # opacity of bars that are not highlighted
SIZE = 13  # of the letters in bars
# For the layout: `bars` writes words that fit its frame; on a narrower page plotly hides them.
FITTING = {"uniformtext": {"mode": "hide", "minsize": SIZE}}


def category_look(kind: str) -> tuple[str, str]:
    """Name and colour of a category of bytes."""
    name = {"master": "master weights"}.get(kind, theme.text(kind))
    return name, theme.category_colour(kind)


def by_category(kinds: Iterable[str]) -> list[str]:
    """The categories in the order in which they are stacked; those without a colour last."""
    order = list(theme.CATEGORY_COLOUR)
    last = len(order)
    return sorted(set(kinds), key=lambda kind: (order.index(kind) if kind in order else last, kind))


def rows_of(bars: Mapping[str, Mapping[str, float]]) -> list[tuple[str, str, float]]:
    """(bar, kind, value) rows, for the mark and for the figure's table.

    Raises ValueError if there are no bars, and on what is no mapping or a value below 0, by name.
    """
    for label, parts in naming.labelled("bars", bars, "{label: {kind: value}}").items():
        if not hasattr(parts, "items"):  # a pandas Series of a table has them too
            raise illegal(f"bars[{label!r}]", parts, "not a mapping", "{kind: value}")
    rows = [(label, kind, n) for label, parts in bars.items() for kind, n in parts.items()]
    for label, kind, n in rows:
        real(f"bars[{label!r}][{kind!r}]", n, at_least=0.0)
    return rows


def bars(
    rows: Sequence[tuple],
    *,
    per: float,
    end: float,
    look: Callable[[str], tuple[str, str]] = category_look,
    kinds: Sequence[str] | None = None,
    axes: tuple[str, str] = AXES,
    letter: float = LETTER,
    pale: Collection[str] = (),
    lines: Collection[float] = (),
    unit: str = "B",
    **style: Any,
) -> list[Part]:
    """The traces, one per kind.

    per, end  bytes in one unit of the axis, and bytes at its right end
    look      kind -> (name, colour)
    kinds     the order in which kinds are stacked; default: that of the categories
    letter    share of the axis that a letter takes; 0: no words in the bars
    pale      labels whose bars are drawn pale, because others are highlighted
    lines     values at which the figure has vertical lines: words avoid them, or are left out
    unit      of the values: "B" or "s"
    """
    value = {(label, kind): float(size) for label, kind, size, *_ in rows}
    bar_totals, traces = totals(rows), []
    filled = dict.fromkeys(bar_totals, 0.0)
    letter *= theme.letter_scale()
    for kind in by_category(row[1] for row in rows) if kinds is None else kinds:
        name, fill = look(kind)
        parts = []  # (label, size, the word in it, its width)
        for label in filled:
            if (size := value.get((label, kind))) is not None:
                word = theme.scaled(size, unit)
                parts.append((label, size, word, letter * (len(word) + 1) * end))
        crossed = {  # {anchor: whether a line goes through the word of each part, if it is there}
            anchor: [
                any(0 < at - filled[label] - before * (size - wide) < wide for at in lines)
                for label, size, _, wide in parts
            ]
            for anchor, before in (("middle", 0.5), ("start", 0.0))
        }
        anchor = min(crossed, key=lambda anchor: sum(crossed[anchor]))
        marker = {"color": fill, "line": {"width": 1, "color": theme.look().paper}}
        ink: Any = theme.on(fill)
        if pale:
            marker["opacity"] = [PALE if label in pale else 1.0 for label, *_ in parts]
            ink = [theme.look().ink if label in pale else ink for label, *_ in parts]
        trace = {
            "type": "bar",
            "name": name,
            "showlegend": max((size for _, size, *_ in parts), default=0.0) >= VISIBLE * end,
            "orientation": "h",
            "y": [theme.text(label) for label, *_ in parts],
            "x": [size / per for _, size, *_ in parts],
            "marker": marker,
            **hover(
                f"{theme.text(label)}<br>{name}: {word}" + f" ({size:,.0f} bytes)" * (unit == "B")
                for label, size, word, _ in parts
            ),
            **on(axes),
        }
        if letter:
            trace |= {
                "text": [  # a bar of a single kind has its number behind it, as its total
                    word * (bar_totals[label] > size >= wide and not hit)
                    for (label, size, word, wide), hit in zip(parts, crossed[anchor], strict=True)
                ],
                "textposition": "inside",
                "insidetextanchor": anchor,
                "constraintext": "inside",
                "textangle": 0,
                "textfont": {"size": SIZE, "color": ink},
            }
        traces.append(trace | style)
        for label, size, *_ in parts:
            filled[label] += size
    return traces


def totals(rows: Iterable[tuple]) -> dict[str, float]:
    """{label: the length of its bar}."""
    sums: dict[str, float] = {}
    for row in rows:
        sums[row[0]] = sums.get(row[0], 0.0) + float(row[2])
    return sums


def ends(
    tops: Mapping[str, float],
    per: float,
    *,
    words: Mapping[str, str] | None = None,
    column: float | None = None,
    axes: tuple[str, str] = AXES,
    size: int = 14,
    unit: str = "B",
) -> list[Part]:
    """The note behind every bar: its bytes, or what ``words`` has for it. With a ``column`` the
    notes stand under one another and end at that value.
    """
    texts = {label: theme.scaled(n, unit) for label, n in tops.items()} | dict(words or {})
    return [
        note(
            f" {texts[label]}",
            (total if column is None else column) / per,
            _note_position(theme.text(label), number),
            size=size,
            anchor="left" if column is None else "right",
            axes=axes,
            above=True,
        )
        for number, (label, total) in enumerate(tops.items())
    ]


def _note_position(label: str, number: int) -> str | int:
    """A note's place on the axis of labels: a label like "46" plotly would read as the 46th bar."""
    try:
        float(label)
    except ValueError:
        return label
    return number


def bytes_axis(title: str, end: float, per: float, **more: Any) -> Part:
    """The axis of the bytes, from 0 to ``end``; ``per``: bytes in one of its units."""
    return {"title": title, "range": [0, end / per], "tickformat": "~g", **more}


def labels(names: Sequence[str], *, above: float = 0.0, least: int = 1, **settings: Any) -> Part:
    """The axis with the bars' labels, the first on top; ``above``: rows of room above the first."""
    shown = [theme.text(name) for name in names]
    return {
        "type": "category",
        "showgrid": False,
        "categoryarray": shown,
        "range": [max(least, len(shown)) - 0.45, -0.55 - above],
        "tickfont": {"size": 14},
        "ticksuffix": " ",
        **settings,
    }
