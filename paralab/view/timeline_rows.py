"""The figure of a timeline: the rows of one section or several, on one time scale."""

from __future__ import annotations

from paralab.checks import count_of
from paralab.view import box_traces, boxes, naming, theme
from paralab.view.boxes import Section
from paralab.view.chart import Chart, figure
from paralab.view.marks import Part, column, line, note
from paralab.view.marks import boxes as mark

MAX_BOXES = 4000  # more make a browser slow, and no screen has the pixels
AROUND = 140  # pixels of a figure's width that row names and margins take


def drawn(sections: list[Section], finding: str, remarks: list[str], summary: str) -> Chart:
    """The figure of one section or several; ``remarks`` go into the second line of its title."""
    many, reports = len(sections) > 1, [section.report for section in sections]
    shown, window, n_boxes = [], 0.0, 0
    for section in sections:
        in_order = sorted(section.boxes, key=lambda b: (b["start"], b["id"]))
        first, n = in_order[: MAX_BOXES // len(sections)], max(len(in_order), section.total)
        until = (
            section.seconds if len(first) == n else max((b["start"] for b in first), default=0.0)
        )
        shown, window, n_boxes = [*shown, first], max(window, until), n_boxes + n
    if (n_drawn := sum(map(len, shown))) < n_boxes:
        remarks.append(
            f"the first {n_drawn:,} of {n_boxes:,} boxes ({window * 1e3:.1f} ms); "
            "ranks= selects fewer"
        )
    remarks += dict.fromkeys(
        f"{report.world_size} ranks shared {count_of(cores, 'core')}, so boxes are longer"
        for report in reports
        if (cores := naming.shared_cores(report))
    )
    remarks += ["paler: a rank's later chunks"] * any(b["chunk"] for s in sections for b in s.boxes)
    remarks += ["framed: between nodes"] * any(section.two_levels for section in sections)
    clocks = naming.clock_lines(report.clock for report in reports)
    below = clocks if many else [naming.clock_line(reports[0])]
    ticks, bottom = boxes.place(sections, heads=many)
    idle = any(section.idle for section in sections)
    of_function = any(r.model is None and r.steps["step"].nunique() < 2 for r in reports)
    row_height = 28 if many else 34
    if idle:  # pipelines may have many ranks, so their rows may be lower
        remarks.append("idle: share of T, the longest time from a rank's first action to its last")
        row_height = max(14.0, min(30.0, 660 / bottom))
    origin = "the function" if of_function else f"step {sections[0].step}"
    if many:
        origin = "each call" if of_function else "each step"
    if all(section.compute_only for section in sections):
        origin = "the step"
    fig = figure(
        finding,
        " · ".join([*below, *remarks]),
        height=int(190 + row_height * bottom),
        barmode="overlay",
        margin={"r": 68 if idle else 44},
        xaxis=mark.time_axis(f"time from the start of {origin} (ms)", window * 1e3),
        yaxis=mark.rows_axis(ticks, bottom, -0.2),
    )
    notes, shapes = _heads(sections, window) if many else ([], [])
    for section in sections:
        if section.idle:  # the right margin has the idle share of every rank
            rows = section.rows
            shares = [(rows[r, "compute"][0], theme.percent(n)) for r, n in section.idle.items()]
            notes += column("idle", shares, section.top + boxes.HEAD / 2 if many else None)
    fig.draw(box_traces.traces(sections, shown, window), notes, shapes)
    return fig.explained(summary, lambda: boxes.table(sections))


def _heads(sections: list[Section], window: float) -> tuple[list[Part], list[Part]]:
    """The heading above each section and a line at its end. The duration is written at the line, or
    directly after the heading if that may be as long.
    """
    frame = theme.frame()
    letter = theme.LETTER_WIDTH * theme.BOLD * 14 / (frame.width - AROUND)  # share of the axis
    notes, shapes = [], []
    for section in sections:
        clock = "" if section.report.clock in section.label else f" ({section.report.clock})"
        name, middle = f"<b>{theme.text(section.label)}</b>{clock}", section.top + boxes.HEAD / 2
        end, took = section.seconds, section.duration
        if section.mark is not None:
            end = took = section.mark
        end, took = 1e3 * end, 1e3 * took
        inside = end > 0.85 * window * 1e3
        side = {"anchor": "right", "xshift": -5} if inside else {"anchor": "left", "xshift": 5}
        heading, label = section.head or name, f"<b>{f'{section.until} {took:.1f} ms'.lstrip()}</b>"
        room_at_line = end > letter * (theme.letters(heading) + 1) * window * 1e3
        if room_at_line:
            notes.append(note(label, end, middle, size=14, **side))
        heading = heading if room_at_line else f"{heading}  {label}"
        notes.append(note(heading, 0, middle, size=14, axes=("paper", "y"), anchor="left"))
        top = section.top + (0.35 if room_at_line else boxes.HEAD)
        shapes.append(line((end, end), (top, section.bottom)))
    return notes, shapes
