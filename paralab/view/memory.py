"""Bytes by category as stacked bars: what needs memory, and whether it fits.

Decimal units, as data sheets of devices have them: 1 GB = 10^9 bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from paralab.checks import choice, illegal, real
from paralab.view import theme

if TYPE_CHECKING:
    from paralab.view.chart import Chart

WORD_SHARE = 0.0105  # of the axis that one letter takes
ROW = 0.42  # of a bar's row that a line of text above the bars takes
LARGEST = {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1.0}


def bytes_bars(
    bars: Mapping[str, Mapping[str, float]],
    capacity: Mapping[str, float] | None = None,
    *,
    title: str | None = None,
) -> Chart:
    """One horizontal bar per entry, its bytes stacked by category, and what devices hold as lines.

    bars      {bar label: {category: bytes}}; categories: parameters, gradients, optimizer (or its
              parts master, moments), activations, buffers, workspace, other
    capacity  {label: bytes} of devices, drawn as lines
    title     in place of the finding that the bars themselves give

    Raises ValueError naming a category that has no colour, or bytes below 0.
    """
    totals = _checked(bars, capacity)
    size = {label: float(n) for label, n in (capacity or {}).items()}
    biggest = max(totals.values()) or 1.0
    # A device far larger than every bar would leave the bars no room: it is named, not drawn.
    drawn = {label: n for label, n in size.items() if n <= 3 * biggest}
    end = 1.14 * max([biggest, *drawn.values()])
    unit = next(u for u, n in LARGEST.items() if max([biggest, *drawn.values()]) >= n or n == 1)
    per = LARGEST[unit]
    said = [f"1 {unit} = 10<sup>{len(str(int(per))) - 1}</sup> bytes"] if unit != "B" else ["bytes"]
    said += [
        f"{theme.text(label)}: {theme.scaled(n, 'B')}, far beyond this axis"
        for label, n in size.items()
        if label not in drawn
    ]
    rows = _rows(drawn, end)
    totals_said = [
        {
            "x": total / per,
            "y": theme.text(label),
            "text": f" {theme.scaled(total, 'B')}",
            "xanchor": "left",
            "showarrow": False,
            "font": {"size": 14},
            "bgcolor": theme.look().paper,
            "borderpad": 0,
        }  # a capacity's line passes behind it
        for label, total in totals.items()
    ]
    # All at once: each add_ and update_ checks the whole figure again, and a slider is waiting.
    fig = theme.figure(
        theme.text(title) if title is not None else _finding(totals, size),
        " · ".join(said),
        height=170 + int(58 * (len(bars) + ROW * rows)),
        barmode="stack",
        bargap=0.3,
        legend={"orientation": "h", "y": 1, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
        xaxis={"title": {"text": f"memory ({unit})"}, "range": [0, end / per], "tickformat": "~g"},
        yaxis={
            "type": "category",
            "showgrid": False,
            "range": [len(bars) - 0.45, -0.55 - ROW * rows],
            "categoryarray": [theme.text(label) for label in bars],
            "tickfont": {"size": 14},
            "ticksuffix": " ",
        },
        annotations=[*totals_said, *_capacity_names(drawn, per, end)],
        shapes=[
            {
                "type": "line",
                "x0": count / per,
                "x1": count / per,
                "yref": "paper",
                "y0": 0,
                "y1": 1,
                "line": {"dash": "dash", "width": 2, "color": theme.look().ink},
            }
            for count in drawn.values()
        ],
    )
    fig.add_traces(
        [
            {"type": "bar", **_trace(category, bars, drawn.values(), per, end)}
            for category in theme.CATEGORY_COLOUR
            if any(category in parts for parts in bars.values())
        ]
    )
    names = " | ".join(map(str, bars))
    return fig.explained(
        f"memory of {len(bars)} bar{'s' * (len(bars) != 1)} by category: {names}", _table(bars)
    )


def _checked(
    bars: Mapping[str, Mapping[str, float]], capacity: Mapping[str, float] | None
) -> dict[str, float]:
    if not isinstance(bars, Mapping) or not bars:
        raise illegal("bars", bars, "nothing to draw", "{label: {category: bytes}}")
    totals = {}
    for label, parts in bars.items():
        for category, count in parts.items():
            choice("category", category, tuple(theme.CATEGORY_COLOUR))
            real(f"bars[{label!r}][{category!r}]", count, at_least=0.0)
        totals[label] = float(sum(parts.values()))
    for label, count in (capacity or {}).items():
        real(f"capacity[{label!r}]", count, above=0.0)
    return totals


def _trace(
    category: str,
    bars: Mapping[str, Mapping[str, float]],
    lines: Collection[float],
    per: float,
    end: float,
) -> dict[str, Any]:
    fill = theme.CATEGORY_COLOUR[category]
    name = {"master": "master weights"}.get(category, category)
    letter = WORD_SHARE * theme.letter_scale()
    counts = [float(parts.get(category, 0.0)) for parts in bars.values()]
    words = [theme.scaled(n, "B") for n in counts]
    order = list(theme.CATEGORY_COLOUR)
    below = [
        sum(parts.get(name, 0.0) for name in order[: order.index(category)])
        for parts in bars.values()
    ]
    crossed = any(
        abs(first + n / 2 - line) < letter * (len(word) + 1) / 2 * end
        for first, n, word in zip(below, counts, words, strict=True)
        for line in lines
    )
    return {
        "name": name,
        "orientation": "h",
        "y": [theme.text(label) for label in bars],
        "x": [n / per for n in counts],
        "marker": {"color": fill, "line": {"width": 1, "color": theme.look().paper}},
        "text": [
            word if n >= letter * (len(word) + 1) * end else ""
            for n, word in zip(counts, words, strict=True)
        ],
        "textposition": "inside",
        "insidetextanchor": "start" if crossed else "middle",
        "constraintext": "none",
        "textangle": 0,
        "textfont": {"size": 13, "color": theme.on(fill)},
        "hovertext": [
            f"{theme.text(label)}, {name}: {word} ({n:,.0f} bytes)"
            for label, word, n in zip(bars, words, counts, strict=True)
        ],
        "hovertemplate": "%{hovertext}<extra></extra>",
    }


def _capacity_names(drawn: Mapping[str, float], per: float, end: float) -> list[dict[str, Any]]:
    """What devices are called, at the upper end of their lines, above the bars."""
    levels, notes = _levels(drawn, end), []
    for label, count in drawn.items():
        left = count > 0.6 * end
        notes.append(
            {
                "x": count / per,
                "y": -0.55 - ROW * (levels[label] + 0.5),
                "showarrow": False,
                "xanchor": "right" if left else "left",
                "xshift": -4 if left else 4,
                "text": f"<b>{theme.text(label)}</b>: {theme.scaled(count, 'B')}",
                "font": {"size": 13},
            }
        )
    return notes


def _levels(drawn: Mapping[str, float], end: float) -> dict[str, int]:
    """The line of text that each capacity is named on: names that would collide get one each."""
    taken: list[list[tuple[float, float]]] = []
    levels = {}
    for label, count in sorted(drawn.items(), key=lambda pair: pair[1]):
        width = 0.85 * WORD_SHARE * (len(f"{label}: {theme.scaled(count, 'B')}") + 2) * end
        mine = (count - width, count) if count > 0.6 * end else (count, count + width)
        free = (
            i for i, line in enumerate(taken) if all(mine[1] <= a or b <= mine[0] for a, b in line)
        )
        level = next(free, len(taken))
        if level == len(taken):
            taken.append([])
        taken[level].append(mine)
        levels[label] = level
    return levels


def _rows(drawn: Mapping[str, float], end: float) -> int:
    return max(_levels(drawn, end).values(), default=-1) + 1


def _finding(totals: Mapping[str, float], capacity: Mapping[str, float]) -> str:
    worst = max(totals, key=lambda label: totals[label])
    said = f"{theme.text(worst)} needs {theme.scaled(totals[worst], 'B')}"
    if not capacity:
        return said
    device = max(capacity, key=lambda label: capacity[label])
    share = totals[worst] / capacity[device]
    if share > 1:
        times = f"{share:.1f}" if share < 10 else f"{share:,.0f}"
        return f"{said}: {times} times what {theme.text(device)} holds"
    return f"{said}: {100 * share:.0f} % of {theme.text(device)}"


def _table(bars: Mapping[str, Mapping[str, float]]) -> Any:
    import pandas as pd

    rows = [
        (label, category, count)
        for label, parts in bars.items()
        for category, count in parts.items()
    ]
    return pd.DataFrame(rows, columns=["bar", "category", "bytes"])
