"""Bars: one per label, stacked by kind, with words where they fit and totals behind.

Rows are (label, kind, value, ...): bytes, mostly. Bars lie, for their labels are words.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from paralab.checks import illegal, real
from paralab.view import theme
from paralab.view.marks import AXES, hover, note, on

LETTER = 0.0105  # of the axis that one letter takes, of a figure alone that is as wide as its axis
VISIBLE = 0.002  # share of the axis: what is smaller in every bar has no entry in the legend
PALE = 0.45  # how opaque bars are that are not meant
SIZE = 13  # of the words in bars
# Of a figure's layout: `bars` knows where words fit in a frame; a page may be narrower than that.
FITTING = {"uniformtext": {"mode": "hide", "minsize": SIZE}}


def category_look(kind: str) -> tuple[str, str]:
    """Name and colour of a category of bytes."""
    name = {"master": "master weights"}.get(kind, theme.text(kind))
    return name, theme.category_colour(kind)


def by_category(kinds: Iterable[str]) -> list[str]:
    """Categories in the order they are stacked; those without a colour of their own last."""
    there = set(kinds)
    known = [name for name in theme.CATEGORY_COLOUR if name in there]
    return [*known, *sorted(there - set(known))]


def rows_of(bars: Mapping[str, Mapping[str, float]]) -> list[tuple[str, str, float]]:
    """(bar, kind, value): the rows of the mark, and of the table.

    Raises ValueError without bars, and naming a value below 0.
    """
    if not isinstance(bars, Mapping) or not bars:
        raise illegal("bars", bars, "nothing to draw", "{label: {kind: value}}")
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
) -> list[dict[str, Any]]:
    """A trace for every kind.

    per, end  bytes of the axis' unit, and at its right end
    look      kind -> (name, colour); kinds: in the order they are stacked
    letter    share of the axis that a letter takes; 0: no words in the bars
    pale      labels whose bars are not meant
    lines     values that lines stand at: words step aside, or are left out
    unit      "B", or "s" of seconds
    """
    labels = list(dict.fromkeys(row[0] for row in rows))
    value = {(row[0], row[1]): float(row[2]) for row in rows}
    start, traces, whole = dict.fromkeys(labels, 0.0), [], totals(rows)
    letter *= theme.letter_scale()
    for kind in by_category(row[1] for row in rows) if kinds is None else kinds:
        name, fill = look(kind)
        mine = [label for label in labels if (label, kind) in value]
        sizes = [value[label, kind] for label in mine]
        words = [theme.scaled(n, unit) for n in sizes]
        room = [letter * (len(word) + 1) * end for word in words]
        begins = [start[label] for label in mine]
        places = {  # where words begin that are in the middle of their bar, or at its start
            "middle": [a + (n - r) / 2 for a, n, r in zip(begins, sizes, room, strict=True)],
            "start": begins,
        }
        crossed = {
            anchor: [any(a < at < a + r for at in lines) for a, r in zip(place, room, strict=True)]
            for anchor, place in places.items()
        }
        anchor = min(crossed, key=lambda anchor: sum(crossed[anchor]))
        fits = [  # a bar of one kind has its number behind it
            whole[label] > n >= r and not hit
            for label, n, r, hit in zip(mine, sizes, room, crossed[anchor], strict=True)
        ]
        ink = [theme.look().ink if label in pale else theme.on(fill) for label in mine]
        edge = {"width": 1, "color": theme.look().paper}
        trace = {
            "type": "bar",
            "name": name,
            "showlegend": max(sizes, default=0.0) >= VISIBLE * end,
            "orientation": "h",
            "y": [theme.text(label) for label in mine],
            "x": [n / per for n in sizes],
            "marker": {"color": fill, "line": edge}
            | ({"opacity": [PALE if b in pale else 1.0 for b in mine]} if pale else {}),
            **hover(
                f"{theme.text(label)}<br>{name}: {word}" + f" ({n:,.0f} bytes)" * (unit == "B")
                for label, word, n in zip(mine, words, sizes, strict=True)
            ),
            **on(axes),
        }
        if letter:
            trace |= {
                "text": [word * fit for word, fit in zip(words, fits, strict=True)],
                "textposition": "inside",
                "insidetextanchor": anchor,
                "constraintext": "inside",
                "textangle": 0,
                "textfont": {"size": SIZE, "color": ink if pale else theme.on(fill)},
            }
        traces.append({**trace, **style})
        for label, n in zip(mine, sizes, strict=True):
            start[label] += n
    return traces


def totals(rows: Iterable[tuple]) -> dict[str, float]:
    """{label: the length of its bar}."""
    found: dict[str, float] = {}
    for row in rows:
        found[row[0]] = found.get(row[0], 0.0) + float(row[2])
    return found


def ends(
    tops: Mapping[str, float],
    per: float,
    *,
    words: Mapping[str, str] | None = None,
    column: float | None = None,
    axes: tuple[str, str] = AXES,
    size: int = 14,
    unit: str = "B",
) -> list[dict[str, Any]]:
    """What stands behind every bar: its bytes, or ``words``. With a ``column`` all of them stand
    under one another instead, and end at that value.
    """
    said = {label: theme.scaled(n, unit) for label, n in tops.items()} | dict(words or {})
    style = {"size": size, "hold": "left" if column is None else "right", "axes": axes}
    style |= {"above": True}
    return [
        note(
            f" {said[label]}",
            (top if column is None else column) / per,
            _place(theme.text(label), number),
            **style,
        )
        for number, (label, top) in enumerate(tops.items())
    ]


def _place(label: str, number: int) -> str | int:
    """Where a note on this label stands: of one like "46" plotly would go to the 46th."""
    try:
        float(label)
    except ValueError:
        return label
    return number


def bytes_axis(title: str, end: float, per: float, **more: Any) -> dict[str, Any]:
    """The axis of the bytes, from 0 to ``end``; ``per``: bytes of its unit."""
    return {"title": {"text": title}, "range": [0, end / per], "tickformat": "~g", **more}


def labels(
    names: Sequence[str], *, above: float = 0.0, least: int = 1, **settings: Any
) -> dict[str, Any]:
    """The axis that labels stand on, the first on top; ``above``: rows of room above it."""
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
