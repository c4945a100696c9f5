"""Bytes by category as stacked bars: what needs memory, and whether it fits.

Decimal units, as data sheets of devices have them: 1 GB = 10^9 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paralab.checks import choice, real
from paralab.view import theme
from paralab.view.chart import Chart, figure
from paralab.view.lanes import tracks
from paralab.view.marks import bars as mark
from paralab.view.marks import note, upright

ROW = 0.42  # of a bar's row that a line of text above the bars takes
NEAR = 3  # times the longest bar: a device beyond that is named, not drawn


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
    rows, size = mark.rows_of(bars), capacity or {}
    for _, category, _ in rows:
        choice("category", category, tuple(theme.CATEGORY_COLOUR))
    size = {label: real(f"capacity[{label!r}]", n, above=0.0) for label, n in size.items()}
    totals = dict.fromkeys(bars, 0.0) | mark.totals(rows)
    biggest = max(totals.values()) or 1.0
    drawn = {label: n for label, n in size.items() if n <= NEAR * biggest}
    most = max([biggest, *drawn.values()])
    unit, per = theme.unit_of(most)
    wide = theme.LETTER_WIDTH * 14 / theme.ALONE.width * max(map(theme.letters, bars))
    letter = mark.LETTER / (1 - min(wide, 0.5))  # labels leave the axis less than the figure
    room = letter * (2 + max(len(theme.scaled(n, "B")) for n in totals.values()))
    end = most * max(1.14, 1 / (1 - room))
    # A total that a line would cross reads as if the bar were longer: then all stand in a column.
    crossed = any(n < at < n + room * end for n in totals.values() for at in drawn.values())
    names, lines = _capacity_names(drawn, per, end, 0.85 * letter)  # in smaller letters
    above = ROW * lines
    far = [
        f"{theme.text(n)}: {theme.scaled(size[n], 'B')}, far beyond this axis"
        for n in size
        if n not in drawn
    ]
    said = "bytes" if unit == "B" else f"1 {unit} = 10<sup>{len(str(int(per))) - 1}</sup> bytes"
    fig = figure(
        _finding(totals, size),
        " · ".join([said, *far]),
        height=170 + int(58 * (len(bars) + above)),
        xaxis=mark.bytes_axis(f"memory ({unit})", end, per),
        yaxis=mark.labels(list(bars), above=above),
        **mark.FITTING,
    )
    notes = [*mark.ends(totals, per, column=end if crossed else None), *names]
    edge, dashes = {"width": 5, "ink": theme.look().paper}, {"dash": "dash"}  # seen on a dark bar
    shapes = [upright(n / per, axis="paper", **h) for n in drawn.values() for h in (edge, dashes)]
    look = {"per": per, "end": end, "lines": drawn.values(), "letter": letter}
    fig.titled(title).draw(mark.bars(rows, **look), notes, shapes)
    return fig.explained(
        f"memory of {len(bars)} bar{'s' * (len(bars) != 1)} by category: "
        f"{' | '.join(map(str, bars))}",
        ("bar category bytes", rows),
    )


# ---- words ---------------------------------------------------------------------------------------
def _capacity_names(
    drawn: Mapping[str, float], per: float, end: float, letter: float
) -> tuple[list[dict[str, Any]], int]:
    """What devices are called, at the upper end of their lines, above the bars, and the lines of
    text that this takes: names that would collide get one each.

    letter  share of the axis that a letter takes
    """
    words, places = [], []
    for label, count in sorted(drawn.items(), key=lambda pair: pair[1]):
        named = f"<b>{theme.text(label)}</b>: {theme.scaled(count, 'B')}"
        width = letter * (theme.letters(named) + 2) * end
        left = count > 0.6 * end or count + 1.1 * width > end  # bold letters are wider
        places.append((count - width, count) if left else (count, count + width))
        side = {"anchor": "right", "xshift": -4} if left else {"anchor": "left", "xshift": 4}
        words.append((named, count / per, side))
    levels = tracks(places, at_most=len(places))
    notes = [
        note(named, x, -0.55 - ROW * (level + 0.5), above=True, **side)
        for (named, x, side), level in zip(words, levels, strict=True)
    ]
    return notes, 1 + max(levels, default=-1)


def _finding(totals: Mapping[str, float], capacity: Mapping[str, float]) -> str:
    worst = max(totals, key=totals.__getitem__)
    said = f"{theme.text(worst)} needs {theme.scaled(totals[worst], 'B')}"
    if not capacity:
        return said
    device = max(capacity, key=capacity.__getitem__)
    most = f"the {theme.scaled(capacity[device], 'B')} of {theme.text(device)}"
    return f"{said}, {share_of(totals[worst], capacity[device])} {most}"


def share_of(need: float, size: float) -> str:
    """ "62 % of", "1.6 times" or "less than 1 % of": how a need stands to what there is."""
    share = need / size
    if share > 1:
        return f"{share:,.{int(share < 10)}f} times"
    return f"{theme.percent(share)} of" if share >= 0.01 else "less than 1 % of"
