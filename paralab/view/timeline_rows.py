"""The figure of a timeline: the rows of one section or several, on one time scale, and on them the
boxes with their names, colours, edges and words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paralab.checks import count_of
from paralab.report import facts
from paralab.report.tables import COMPUTE_KINDS, KINDS
from paralab.view import boxes, lanes, naming, theme
from paralab.view.boxes import Section
from paralab.view.chart import Chart, figure
from paralab.view.lanes import Box
from paralab.view.marks import Part, column, line, note
from paralab.view.marks import boxes as mark

MAX_BOXES = 4000  # more make a browser slow, and no screen has the pixels
AROUND = 140  # pixels of a figure's width that row names and margins take
# Boxes that are thinner than this share of the time axis have no paper-coloured edge, which would
# hide them; the second share is for traces of more than MANY boxes.
THIN, MANY_THIN = 2e-3, 8e-3
MANY = 100
LETTER_SHARE = 0.010  # share of the time axis that one letter takes
FILLED = 0.92  # share of a row's height that boxes take


def drawn(sections: list[Section], finding: str, remarks: list[str], window: float = 0.0) -> Chart:
    """The figure of sections, at least ``window`` seconds long; ``remarks`` go below its title."""
    many, reports = len(sections) > 1, [section.report for section in sections]
    shown = [sorted(section.boxes, key=lambda b: (b["start"], b["id"])) for section in sections]
    window = max(window, *(section.seconds for section in sections))
    starts = sorted(b["start"] for in_order in shown for b in in_order)
    if len(starts) > MAX_BOXES:  # then all sections are drawn up to the same moment
        window = starts[MAX_BOXES]
        shown = [[b for b in in_order if b["start"] < window] for in_order in shown]
        first = f"the first {sum(map(len, shown)):,} of {len(starts):,} boxes"
        fewer = "; ranks= selects fewer" * any(r.model or r.clock != "predicted" for r in reports)
        remarks.append(f"{first} ({window * 1e3:.1f} ms){fewer}")
    remarks += lanes.limited(reports)
    remarks += dict.fromkeys(
        f"{ranks} ranks shared {count_of(cores, 'core')}, so boxes are longer"
        for ranks, cores in map(facts.shared_cores, reports)
        if cores
    )
    if any(report.meta.get("shared_gpu") for report in reports):
        remarks.append("ranks shared a GPU, so boxes are longer")
    remarks += ["paler: a rank's later chunks"] * any(b["chunk"] for s in sections for b in s.boxes)
    remarks += ["framed: between nodes"] * any(section.two_levels for section in sections)
    clocks = naming.clock_lines(report.clock for report in reports)
    below = clocks if many else [naming.clock_line(reports[0])]
    ticks, bottom = boxes.place(sections, heads=many)
    idle = any(section.idle for section in sections)
    of_function = any(r.model is None and r.steps["step"].nunique() < 2 for r in reports)
    row_height = 28 if many else 34
    if idle:  # pipelines may have many ranks, so their rows may be lower
        plans = [section.report.plan for section in sections if section.idle]
        whose = "its pipeline's " * any(plan.dp * plan.tp > 1 for plan in plans)
        what = "the longest time from a rank's first action to its last"
        remarks.append(f"idle: share of {whose}T, {what}")
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
    fig.draw(_traces(sections, shown, window), notes, shapes)
    return fig.tabled(lambda: boxes.table(sections))


def _heads(sections: list[Section], window: float) -> tuple[list[Part], list[Part]]:
    """The heading above each section and a line at its end. The duration is written at the line, or
    directly after the heading if that may be as long, or the line is beyond the axis.
    """
    frame = theme.frame()
    letter = theme.LETTER_WIDTH * theme.BOLD * 14 / (frame.width - AROUND)  # share of the axis
    notes, shapes = [], []
    for section in sections:
        clock = "" if section.report.clock in section.label else f" ({section.report.clock})"
        name, middle = f"<b>{theme.text(section.label)}</b>{clock}", section.top + boxes.HEAD / 2
        end = 1e3 * (section.seconds if section.mark is None else section.mark)
        took, until = f"{end:.1f} ms", section.until
        if section.mark is None and took != f"{1e3 * section.duration:.1f} ms":
            until = "last rank"  # the first one began earlier, and none took as long
        inside = end > 0.85 * window * 1e3
        side = {"anchor": "right", "xshift": -5} if inside else {"anchor": "left", "xshift": 5}
        heading, label = section.head or name, f"<b>{f'{until} {took}'.lstrip()}</b>"
        words = letter * (theme.letters(heading + inside * label) + 1) * window * 1e3
        room_at_line = words < end <= 1e3 * window
        if room_at_line:
            notes.append(note(label, end, middle, size=14, **side))
        heading = heading if room_at_line else f"{heading}  {label}"
        notes.append(note(heading, 0, middle, size=14, axes=("paper", "y"), anchor="left"))
        top = section.top + (0.35 if room_at_line else boxes.HEAD)
        shapes.append(line((end, end), (top, section.bottom)))
    return notes, shapes


# ---- the boxes -----------------------------------------------------------------------------------
def _traces(
    sections: Sequence[Section], shown: Sequence[Sequence[Box]], window: float
) -> list[Part]:
    """One trace per kind, row, chunk and copied category, even where no box has a length; ``shown``
    are the boxes drawn of each section, ``window`` the seconds of the time axis. Chunks share one
    legend entry, as do copies of a category on all rows and axes of one colour.
    """
    groups = {_group(b): [[] for _ in sections] for section in sections for b in section.boxes}
    for i, first in enumerate(shown):
        for b in first:
            groups[_group(b)][i].append(b)
    chunks = 1 + max((chunk for _, _, chunk, _ in groups), default=0)
    tiers = any(category for *_, category in groups)
    split_backward = any(kind == "weight_grad" for kind, *_ in groups)
    framed = any(section.two_levels for section in sections)
    axes: dict[str, set[str]] = {}  # by colour, as dp and the group of all ranks have the same
    for kind, row, *_ in groups:
        if kind == "comm":
            axes.setdefault(theme.colour(kind, row), set()).add(theme.text(theme.axis_of(row)))
    in_legend: set[str] = set()
    result = []
    for group in sorted(groups, key=lambda group: (KINDS.index(group[0]), *group[1:])):
        kind, row, chunk, category = group
        flat = [b for own in groups[group] for b in own]
        rows = [
            bar
            for section, own in zip(sections, groups[group], strict=True)
            for bar in _bars(kind, own, section, window)
        ]
        name, fill = lanes.style(kind, row, category)
        computes = kind in COMPUTE_KINDS
        alike = sorted(axes[fill]) if kind == "comm" else ()
        if len(alike) > 1:
            named = alike if len(alike) < 4 else [alike[0], f"{len(alike) - 1} other groups"]
            name = f"communication, {' and '.join(named)}"
        if not tiers and kind != "comm" and row != "compute":  # an outline does not say what moves
            name = f"{naming.kind_name(kind)}, {theme.text(row)}"
        if tiers and (kind, row) == ("copy", "compute"):
            name = "copy on the device"
        if split_backward and kind == "backward":
            name = "backward, or its input half"
        if computes and chunks > 1:  # a rank's later chunks are paler
            fill = theme.shade(theme.colour(kind), chunk, chunks)
        edge: Any = 0.5
        if kind == "comm" or (tiers and row in lanes.ROW_NAME):
            edge = _edges([_duration(b) < THIN * window for b in flat], 1, fill)
            for i, b in enumerate(flat if framed else ()):
                if any(call["level"] == "inter" for call in b["calls"]):
                    edge["width"][i], edge["color"][i] = 2.5, theme.look().ink
        elif kind in (*COMPUTE_KINDS, "optimizer", "compute") and len(rows) > MANY:
            thin = [_duration(b) < MANY_THIN * window for b in flat]
            edge = _edges(thin, 1 if computes else 0, fill)  # without one, neighbours stay visible
        more: Part = {}
        if tiers or len(alike) > 1 or (computes and chunks > 1):
            more = {"legendgroup": name, "showlegend": name not in in_legend}
            in_legend.add(name)
        result.append(mark.boxes(name, fill, rows, hatched=kind == "wait", edge=edge, **more))
    return result


def _edges(highlighted: Sequence[bool], width: float, ink: str) -> dict[str, list[Any]]:
    """Edges of this width and colour for highlighted boxes; paper-coloured ones for the others."""
    paper = theme.look().paper
    return {"width": [width if bright else 0.5 for bright in highlighted]} | {
        "color": [ink if bright else paper for bright in highlighted]
    }


def _group(box: Box) -> tuple[str, str, int, str]:
    """The trace to which a box belongs: kind, row, chunk of a rank, copied category."""
    chunk = box["chunk"] if box["kind"] in COMPUTE_KINDS else 0
    return box["kind"], lanes.row(box), chunk, box["category"]


def _bars(kind: str, boxes: list[Box], section: Section, window: float) -> list[tuple]:
    """Rows for `marks.boxes`: the tracks of a row share its height.

    Boxes that are wide enough have words: work the number of its micro-batch, once per action, on
    its widest piece; point-to-point calls their peers (→1: to rank 1, ←3: from rank 3);
    collectives of a traced function their name.
    """
    depth = max((b["track"] + 1 for b in boxes), default=1)
    widest: dict[tuple[int, ...], Box] = {}
    for b in boxes if kind in COMPUTE_KINDS else ():
        key = (b["rank"], b["stage"], b["chunk"], b["microbatch"])
        widest[key] = max(widest.get(key, b), b, key=_duration)
    numbered = {id(b) for b in widest.values() if b["microbatch"] >= 0}
    rows = []
    for b in boxes:
        word = str(b["microbatch"]) if id(b) in numbered else ""
        if kind == "comm" and depth == 1:
            word = _partners(b)
        word *= _duration(b) >= LETTER_SHARE * max(len(word), 1.2) * window
        middle, height = section.rows[b["rank"], lanes.row(b)]
        y = middle + height * FILLED * ((b["track"] + 0.5) / depth - 0.5)
        start, length = round(b["start"] * 1e3, 6), round(_duration(b) * 1e3, 6)
        box_height = height * FILLED / depth * (0.9 if depth > 1 else 1.0)
        rows.append((start, length, y, box_height, word, lanes.hover(b)))
    return rows


def _partners(box: Box) -> str:
    arrows = {"send": "→", "recv": "←"}
    partners = [f"{arrows[c['op']]}{c['peer']}" for c in box["calls"] if c["op"] in arrows]
    return " ".join(partners) or (box["calls"][0]["op"] if box["traced"] and box["calls"] else "")


def _duration(box: Box) -> float:
    return box["end"] - box["start"]
