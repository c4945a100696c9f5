"""A timeline's figure: the rows of one section or several, on one time scale."""

from __future__ import annotations

from paralab.view import box_traces, boxes, naming, theme
from paralab.view.boxes import Section
from paralab.view.chart import Chart, figure
from paralab.view.marks import boxes as mark
from paralab.view.marks import column, line, note

MAX_BOXES = 4000  # more make a browser slow, and no screen has the pixels
AROUND = 140  # pixels of a figure's width that its rows' names and margins take


def drawn(sections: list[Section], finding: str, said: list[str], summary: str) -> Chart:
    """The figure of one section or several; ``said`` goes to its second line."""
    many, reports = len(sections) > 1, [one.report for one in sections]
    counts = [max(len(one.boxes), one.total) for one in sections]
    shown = [
        sorted(one.boxes, key=lambda b: (b["start"], b["id"]))[: MAX_BOXES // len(sections)]
        for one in sections
    ]
    window = max(
        one.seconds if len(some) == count else max((b["start"] for b in some), default=0.0)
        for one, some, count in zip(sections, shown, counts, strict=True)
    )
    if (drawn := sum(map(len, shown))) < sum(counts):
        said.append(
            f"the first {drawn:,} of {sum(counts):,} boxes ({window * 1e3:.1f} ms); choose ranks="
        )
    said += dict.fromkeys(
        f"{report.world_size} ranks shared {cores} cores, which stretches boxes"
        for report in reports
        if (cores := naming.shared_cores(report))
    )
    said += ["paler: a rank's later chunks"] * any(b["chunk"] for s in sections for b in s.boxes)
    said += ["framed: between nodes"] * any(one.two_levels for one in sections)
    clocks = naming.clock_lines(report.clock for report in reports)
    below = clocks if many else [naming.clock_line(reports[0])]
    ticks, bottom = boxes.place(sections, heads=many)
    idle = any(one.idle for one in sections)
    traced = any(r.model is None and r.steps["step"].nunique() < 2 for r in reports)
    rows = 28 if many else 34
    if idle:  # many ranks with one lane each: they may be lower
        said.append("idle: of T, the longest time from a rank's first action to its last")
        rows = max(14.0, min(30.0, 660 / bottom))
    of_step = ("each" if traced else "its step") if many else f"step {sections[0].step}"
    if traced and not many:
        of_step = "the function"
    if all(one.lanes == ("compute",) for one in sections):
        of_step = "the step"
    fig = figure(
        finding,
        " · ".join([*below, *said]),
        height=int(190 + rows * bottom),
        barmode="overlay",
        margin={"r": 68 if idle else 44},
        xaxis=mark.time_axis(f"time from the start of {of_step} (ms)", window * 1e3),
        yaxis=mark.rows_axis(ticks, bottom, -0.2),
    )
    notes, shapes = _heads(sections, window) if many else ([], [])
    for one in sections:
        if one.idle:  # in the right margin the share of its time that every rank is idle
            shares = [(one.rows[r, "compute"][0], theme.percent(n)) for r, n in one.idle.items()]
            notes += column("idle", shares, one.top + boxes.HEAD / 2 if many else None)
    fig.draw(box_traces.traces(sections, shown, window), notes, shapes)
    return fig.explained(summary, lambda: boxes.table(sections))


def _heads(sections: list[Section], window: float) -> tuple[list[dict], list[dict]]:
    """Above each section its name and duration, and a line where it ends. The duration stands at
    the line, or behind a name that may reach as far.
    """
    frame = theme.frame()
    share = theme.LETTER_WIDTH * theme.BOLD * 14 / (frame.width - AROUND)  # of the axis, a letter
    notes, shapes = [], []
    for one in sections:
        clock = "" if one.report.clock in one.label else f" ({one.report.clock})"
        name, middle = f"<b>{theme.text(one.label)}</b>{clock}", one.top + boxes.HEAD / 2
        ends = (one.seconds, one.duration) if one.mark is None else (one.mark, one.mark)
        end, took = (1e3 * seconds for seconds in ends)
        inside = end > 0.85 * window * 1e3
        side = {"anchor": "right", "xshift": -5} if inside else {"anchor": "left", "xshift": 5}
        said, took = one.head or name, f"<b>{f'{one.until} {took:.1f} ms'.lstrip()}</b>"
        free = end > share * (theme.letters(said) + 1) * window * 1e3
        if free:
            notes.append(note(took, end, middle, size=14, **side))
        said = said if free else f"{said}  {took}"
        notes.append(note(said, 0, middle, size=14, axes=("paper", "y"), anchor="left"))
        shapes.append(line((end, end), (one.top + (0.35 if free else boxes.HEAD), one.bottom)))
    return notes, shapes
