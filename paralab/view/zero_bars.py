"""Two prices side by side: bars of memory by category, and next to each what is sent for it.

Decimal units: 1 MB = 10^6 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paralab.view import theme
from paralab.view.chart import Chart, figure
from paralab.view.marks import bars as mark

MEMORY, TRAFFIC = (0.0, 0.62), (0.68, 1.0)  # of the figure's width


def memory_and_traffic(
    bars: Mapping[str, Mapping[str, int]],
    sent: Mapping[str, int],
    *,
    bright: Sequence[str],
    title: str,
    below: str,
    axis: str,
    summary: str,
) -> Chart:
    """Two prices side by side: bytes on a device by category, {label: {category: bytes}}, and next
    to each bar what is sent for it, {label: bytes}.

    bright  labels whose bars are in full colour
    axis    along which they are sent
    """
    rows = mark.rows_of(bars)
    totals, pale = mark.totals(rows), [label for label in bars if label not in bright]
    end, far = 1.22 * max([*totals.values(), 1]), 1.45 * max(*sent.values(), 1)
    names = [theme.text(label) for label in bars]
    bold = [theme.text(n) if n in pale else f"<b>{theme.text(n)}</b>" for n in bars]
    held_on = {"domain": MEMORY, "showgrid": False}
    sent_on = {"domain": TRAFFIC, "showgrid": False, "anchor": "y", "nticks": 5}
    fig = figure(
        theme.text(title),
        below,
        height=150 + 52 * len(bars),
        xaxis=mark.bytes_axis("peak of memory (MB)", end, 1e6, **held_on),
        xaxis2=mark.bytes_axis("sent per step (MB)", far, 1e6, **sent_on),
        yaxis=mark.labels(list(bars), tickvals=names, ticktext=bold),
    )
    look = lambda _: ("sent per device and step", theme.axis_colour(axis))  # noqa: E731
    moved = [(label, "sent", n) for label, n in sent.items()]
    style = {"axes": ("x2", "y"), "letter": 0, "pale": pale, "showlegend": False}
    (sums,) = mark.bars(moved, per=1e6, end=far, look=look, kinds=["sent"], **style)
    held = mark.bars(rows, per=1e6, end=end, letter=mark.LETTER / MEMORY[1], pale=pale)
    there = {kind for _, kind, n in rows if n}
    for trace in held:
        trace["showlegend"] = trace["name"] in there
    notes = mark.ends(totals, 1e6, size=13) + mark.ends(sent, 1e6, axes=("x2", "y"), size=13)
    fig.draw([*held, {**sums, "name": "sent"}], notes)
    return fig.explained(summary, ("bar category bytes", rows + moved))
