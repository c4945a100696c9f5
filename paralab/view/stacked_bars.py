"""Stacked bars: bytes by category, next to the memory of devices, and seconds by part.

Units of bytes are decimal, as in the data sheets of devices: 1 GB = 10^9 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping

from paralab.checks import choice, real
from paralab.view import naming, theme
from paralab.view.chart import Chart, figure
from paralab.view.lanes import tracks
from paralab.view.marks import Part, note, upright
from paralab.view.marks import bars as mark

ROW = 0.42  # height of a line of text above the bars, in rows of bars
ROOM = 1.12  # length of an axis of seconds over the longest bar, for the total behind it
NEAR = 3  # a device with more than so many times the longest bar is named, not drawn


def bytes_bars(
    bars: Mapping[str, Mapping[str, float]],
    capacity: Mapping[str, float] | None = None,
    *,
    title: str | None = None,
) -> Chart:
    """One horizontal bar per entry, its bytes stacked by category; the devices' memory as lines.

    bars      {bar label: {category: bytes}}: parameters, gradients, optimizer (or its parts master,
              moments), activations, buffers, workspace, other; any else is grey, "total" left out
    capacity  {label: bytes} of devices, drawn as lines
    title     replaces the finding, which is made from the bars

    Raises ValueError on bytes below 0, which it names.
    """
    rows, size = mark.rows_of(bars), capacity or {}
    rows = [row for row in rows if row[1] != "total" or len(bars[row[0]]) == 1]
    size = {label: real(f"capacity[{label!r}]", n, above=0.0) for label, n in size.items()}
    totals = dict.fromkeys(bars, 0.0) | mark.totals(rows)
    biggest = max(totals.values()) or 1.0
    drawn = {label: n for label, n in size.items() if n <= NEAR * biggest}
    most = max([biggest, *drawn.values()])
    unit, per = theme.unit_of(most)
    label_share = theme.LETTER_WIDTH * 14 / theme.ALONE.width * max(map(theme.letters, bars))
    letter = mark.LETTER / (1 - min(label_share, 0.5))  # the axis is the figure without the labels
    total_share = letter * (2 + max(len(theme.in_bytes(n)) for n in totals.values()))
    end = most * max(1.14, 1 / (1 - total_share))
    # A line through a total looks like the bar's end: then all totals stand in a column instead.
    crossed = any(n < at < n + total_share * end for n in totals.values() for at in drawn.values())
    names, lines = _capacity_names(drawn, per, end, 0.85 * letter)  # the names have smaller letters
    above = ROW * lines
    far = [
        f"{theme.text(n)}: {theme.in_bytes(size[n])}, far beyond this axis"
        for n in size
        if n not in drawn
    ]
    words = "bytes" if unit == "B" else f"1 {unit} = 10<sup>{len(str(int(per))) - 1}</sup> bytes"
    fig = figure(
        _finding(totals, size),
        " · ".join([words, *far]),
        height=170 + int(58 * (len(bars) + above)),
        xaxis=mark.bytes_axis(f"memory ({unit})", end, per),
        yaxis=mark.labels(list(bars), above=above),
        **mark.FITTING,
    )
    notes = [*mark.ends(totals, per, column=end if crossed else None), *names]
    edge, dashes = {"width": 5, "ink": theme.look().paper}, {"dash": "dash"}  # visible on dark bars
    shapes = [upright(n / per, axis="paper", **s) for n in drawn.values() for s in (edge, dashes)]
    look = {"per": per, "end": end, "lines": drawn.values(), "letter": letter}
    fig.titled(title).draw(mark.bars(rows, **look), notes, shapes)
    return fig.tabled(("bar category bytes", rows))


def seconds_bars(
    bars: Mapping[str, Mapping[str, float]], *, title: str, clock: str | None = None
) -> Chart:
    """One horizontal bar per entry, its seconds stacked by part.

    bars   {bar label: {part: seconds}}; "compute", "forward", "wait" and the like, and the axes
           "dp", "tp", "pp", have the colours that they have in timelines
    title  the finding
    clock  of all these seconds, "measured", "replayed" or "predicted", for the line below the title

    Raises ValueError on seconds below 0, which it names.
    """
    clock = choice("clock", clock, (*naming.CLOCK_BRIEF, None))
    rows = mark.rows_of(bars)
    totals = dict.fromkeys(bars, 0.0) | mark.totals(rows)
    end = ROOM * max(totals.values()) or 1.0
    unit, per = next(((u, p) for u, p in (("s", 1.0), ("ms", 1e-3)) if end >= p), ("µs", 1e-6))
    kinds, now = list(dict.fromkeys(part for _, part, _ in rows)), theme.look()
    known = theme.KIND_COLOUR | {axis: theme.axis_colour(axis) for axis in theme.AXIS_COLOUR}
    known |= {"wait": now.wait, "bubble": now.wait}
    known["measured"] = now.faint  # a whole next to parts
    plain = theme.series([kind for kind in kinds if kind not in known])

    def look(kind: str) -> tuple[str, str]:
        return theme.text(kind), known.get(kind) or plain[kind]["ink"]

    fig = figure(
        theme.text(title),
        "".join(naming.clock_lines([clock] if clock else [])),
        height=170 + 46 * len(bars),
        showlegend=True,
        xaxis=mark.bytes_axis(f"time ({unit})", end, per),
        yaxis=mark.labels(list(bars)),
        **mark.FITTING,
    )
    traces = mark.bars(rows, per=per, end=end, look=look, kinds=kinds, unit="s")
    return fig.draw(traces, mark.ends(totals, per, unit="s")).tabled(("bar part seconds", rows))


# ---- words ---------------------------------------------------------------------------------------
def _capacity_names(
    drawn: Mapping[str, float], per: float, end: float, letter: float
) -> tuple[list[Part], int]:
    """The devices' names, above the bars at the upper ends of their lines, and how many lines of
    text they take: names that would overlap are on different lines of text.

    letter  share of the axis that a letter takes
    """
    words, places = [], []
    for label, count in sorted(drawn.items(), key=lambda pair: pair[1]):
        text = f"<b>{theme.text(label)}</b>: {theme.in_bytes(count)}"
        width = letter * (theme.letters(text) + 2) * end
        left = count > 0.6 * end or count + 1.1 * width > end  # bold letters are wider
        places.append((count - width, count) if left else (count, count + width))
        side = {"anchor": "right", "xshift": -4} if left else {"anchor": "left", "xshift": 4}
        words.append((text, count / per, side))
    levels = tracks(places, at_most=len(places))
    notes = [
        note(text, x, -0.55 - ROW * (level + 0.5), above=True, **side)
        for (text, x, side), level in zip(words, levels, strict=True)
    ]
    return notes, 1 + max(levels, default=-1)


def _finding(totals: Mapping[str, float], capacity: Mapping[str, float]) -> str:
    most = max(totals.values())
    worst = [theme.text(label) for label, total in totals.items() if total == most]
    verb = "needs" if len(worst) == 1 else "each need"
    text = f"{theme.listed(worst)} {verb} {theme.in_bytes(most)}"
    if not capacity:
        return text
    device = max(capacity, key=capacity.__getitem__)
    size = f"the {theme.in_bytes(capacity[device])} of {theme.text(device)}"
    return f"{text}, {share_of(most, capacity[device])} {size}"


def share_of(need: float, size: float) -> str:
    """ "62 % of", "1.6 times", "2 % more than", "less than 1 % of": the need as a part of it."""
    share = need / size
    if 1 < share < 1.05:
        return f"{100 * (share - 1):.1g} % more than"
    if share > 1:
        return f"{share:,.{int(share < 10)}f} times"
    return f"{theme.share(share)} of"
