"""Panels of memory over a step, one above the other on one scale of bytes.

A prediction has a sample after every instruction and one inside the instruction that has the peak;
in an outline (detail="actions"), after some actions and at the peak. The strip above a panel has
the phases of the step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from paralab.view import naming, theme
from paralab.view.chart import Chart, figure
from paralab.view.marks import Part, bars, line, note
from paralab.view.marks import boxes as mark
from paralab.view.marks.areas import area
from paralab.view.marks.curves import curve as points
from paralab.view.memory_curves import Curve, capacity, thinned

MAX_PANELS = 4
MAX_POINTS = 4000  # of a figure; beyond that samples are left out, but never a peak
MANY = 50  # boxes of a kind in the strip
NEAR = 3  # a device with more than so many times the highest peak is not drawn
HEAD, STRIP, GAP = 26, 17, 20  # pixels: of a heading, of the strip, between two panels
WORDS = 28  # pixels above the highest peak, for its label
ROOM = {1: 300, 2: 200, 3: 165, 4: 145}  # {number of panels: pixels that each is high}
FRAME = 152  # pixels of a figure above and below its panels
LETTER = 0.0095  # share of the step that one letter in the strip takes


def limits(curve: Curve, highest: int) -> dict[str, int]:
    """{label: bytes} of a curve's device, if it is near enough to the figure's ``highest`` peak to
    be drawn.
    """
    return {label: n for label, n in capacity(curve.report).items() if n <= NEAR * highest}


class _Scales:
    """What all panels of a figure share: the units of the axes, categories, and sizes in pixels.

    share   whether the time axis is in per cent of each curve's own step
    """

    def __init__(self, shown: Sequence[Curve], *, share: bool, heads: bool) -> None:
        self.peak = max(curve.peak for curve in shown)
        lines = [limits(curve, self.peak) | curve.reserved for curve in shown]
        self.highest = max(self.peak, 1, *(size for sizes in lines for size in sizes.values()))
        self.unit, self.per = theme.unit_of(self.highest)
        self.share, self.numbered = share, any(curve.numbered for curve in shown)
        self.seconds = 1.0 if self.numbered else 1e3
        self.width = 100.0 if share else self.seconds * max(curve.length for curve in shown)
        self.names = bars.by_category(c for one in shown for c in one.samples[0])
        self.most = MAX_POINTS // (len(shown) * max(1, len(self.names)))
        self.room = ROOM[min(len(shown), MAX_PANELS)]
        self.head = HEAD if heads else 6
        self.each = self.head + STRIP + 3 + self.room
        self.plot = len(shown) * self.each + (len(shown) - 1) * GAP

    def x(self, curve: Curve, seconds: float) -> float:
        """A time's place on the time axis, rounded to far less than a pixel."""
        scale = (100.0 / curve.length if self.share else self.seconds) if curve.length > 0 else 1.0
        return round(seconds * scale, 4)

    def title(self) -> str:
        if self.share:
            return "share of the step (%)"
        return "events of the step, in order" if self.numbered else "time in the step (ms)"


def drawn(
    shown: list[Curve],
    heads: list[str],
    finding: str,
    below: str,
    *,
    against: str | None = None,
) -> Chart:
    """A panel for each curve, with its heading above it.

    against  the name of the first curve, if others are compared with it: then the time axis is in
             per cent of each curve's own step, and the other panels have a line at its peak
    """
    scales = _Scales(shown, share=against is not None, heads=any(heads))
    plot, per, width = scales.plot, scales.per, scales.width
    traces, notes, shapes, axes = [], [], [], {}
    for i, curve in enumerate(shown):
        top = plot - i * (scales.each + GAP)
        panel, strip = "y" if i == 0 else f"y{2 * i + 1}", f"y{2 * i + 2}"
        traces += [*_strip(curve, strip, scales), *_stack(curve, panel, scales)]
        for marks, more in zip((traces, notes, shapes), _peak(curve, panel, scales), strict=True):
            marks += more
        low, high = (top - scales.each) / plot, (top - scales.head - STRIP - 3) / plot
        axes[f"yaxis{panel[1:]}"] = {
            "domain": [max(low, 0.0), high],
            "range": [0, scales.highest / per * scales.room / (scales.room - WORDS)],
            "title": scales.unit if len(shown) > 2 else f"memory ({scales.unit})",
            "tickformat": "~g",
            "nticks": max(3, scales.room // 45),
            "anchor": "x",
        }
        axes[f"yaxis{strip[1:]}"] = {
            "domain": [high + 3 / plot, min(high + (3 + STRIP) / plot, 1.0)],
            "range": [-0.5, 0.5],
            "visible": False,
            "anchor": "x",
            "fixedrange": True,
        }
        if against is not None and i:
            first, faint = shown[0].peak / per, {"ink": theme.look().faint}
            at = {"dash": "dot", "width": 1.5, "yref": panel}
            shapes.append(line((0, width), (first, first), **at, **faint))
            right = scales.x(curve, curve.times[curve.peak_at]) <= width / 2  # away from its peak
            under = any(n >= shown[0].peak for n in limits(curve, scales.peak).values())
            anchor = f"{'right' if right else 'left'} {'top' if under else 'bottom'}"
            at, text = ("paper", panel), f"peak of {theme.text(against)}"
            more = {"size": 12, "anchor": anchor, "axes": at, "above": True, **faint}
            notes.append(note(text, int(right), first, **more))
        if heads[i]:
            at = {"axes": ("paper", "paper"), "anchor": "left bottom"}
            notes.append(note(heads[i], 0, (top - scales.head) / plot, size=14, **at))
    fig = figure(
        finding,
        below,
        height=plot + FRAME,
        hovermode="closest",
        margin={"t": 100, "b": 52},
        xaxis=mark.time_axis(scales.title(), width)
        | {"dtick": _dtick(width), "showgrid": False, "anchor": panel},
        **axes,
    )
    return fig.draw(traces, notes, shapes)


def _strip(curve: Curve, axis: str, scales: _Scales) -> list[Part]:
    """The phases of the step, with their names if there is room, else their first letters."""
    traces = []
    for kind in theme.KIND_COLOUR:
        name, rows = naming.kind_name(kind), []
        for of_kind, begin, stop in curve.phases:
            if of_kind == kind:
                start, end = scales.x(curve, begin), scales.x(curve, stop)
                room = (end - start) / (LETTER * scales.width)
                word = next((w for w in (name, kind[:1].upper()) if len(w) + 1 <= room), "")
                took = f": {theme.in_seconds(stop - begin)}" * (not curve.numbered)
                rows.append((start, round(end - start, 4), 0, 1, word, name + took))
        if rows:
            at = {"axes": ("x", axis), "showlegend": False}
            edge = int(len(rows) <= MANY)  # wider than thin boxes, it would hide them
            traces.append(mark.boxes(name, theme.colour(kind), rows, edge=edge, **at))
    return traces


def _stack(curve: Curve, axis: str, scales: _Scales) -> list[Part]:
    """The areas of the categories, stacked."""
    kept = thinned(curve.totals, scales.most)
    kept += kept[-1:]  # the last sample again, for the end of the step
    times = [scales.x(curve, curve.times[i]) for i in kept[:-1]] + [scales.x(curve, curve.length)]
    traces = []
    for name in scales.names:
        sizes = [curve.samples[i].get(name, 0) for i in kept]
        hover_texts = [f"{theme.text(name)}: {theme.in_bytes(n)} ({n:,} bytes)" for n in sizes]
        heights, fill = [n / scales.per for n in sizes], theme.category_colour(name)
        place = {"axes": ("x", axis), "showlegend": axis == "y"}
        traces += area(name, fill, times, heights, hover_texts, **place)
    return traces


def _peak(curve: Curve, axis: str, scales: _Scales) -> tuple[list, list, list]:
    """Traces, notes and shapes: the peak, the device's memory, the peaks by a GPU's allocator."""
    look, per = theme.look(), scales.per
    x, y = scales.x(curve, curve.times[curve.peak_at]), curve.peak
    side = "left" if x < 0.08 * scales.width else "right" if x > 0.92 * scales.width else "center"
    style: Part = {"ink": look.ink, "size": 9, "axes": ("x", axis), "mode": "markers"}
    style |= {"showlegend": False, "marker": {"line": {"width": 1.5, "color": look.paper}}}
    text = f"peak: {y:,} bytes, {curve.phase(curve.peak_at)}"
    dot = points("peak", [(x, y / per)], [text], **style)
    head = f"<b>peak {theme.in_bytes(y)}</b>"
    at = {"axes": ("x", axis), "yshift": 5, "above": True}  # above the line at the first run's peak
    notes, shapes = [note(head, x, y / per, anchor="bottom", xanchor=side, **at)], []
    for label, size in (limits(curve, scales.peak) | curve.reserved).items():
        height = size / per  # a device's word is away from the peak, whose own it might cover
        right = label != "allocated" if label in curve.reserved else x <= scales.width / 2
        dash = "dot" if label in curve.reserved else "dash"
        shapes.append(line((0, 1), (height, height), dash=dash, xref="x domain", yref=axis))
        at = {"axes": ("paper", axis), "anchor": "right bottom" if right else "left bottom"}
        text = f"{theme.text(label)}: {theme.in_bytes(size)}"
        notes.append(note(text, float(right), height, above=True, **at))
    return [dot], notes, shapes


def _dtick(width: float) -> float:
    """The distance of ticks on the time axis: 1, 2 or 5 times a power of ten; 4 to 10 ticks."""
    power = 10.0 ** math.floor(math.log10(width / 4)) if width > 0 else 1.0
    return max(step * power for step in (1, 2, 5) if 4 * step * power <= width or step == 1)
