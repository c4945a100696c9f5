"""The traces of a timeline: the names, colours, edges and words of its boxes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paralab.report.tables import COMPUTE_KINDS, KINDS
from paralab.view import lanes, naming, theme
from paralab.view.boxes import Section
from paralab.view.lanes import Box
from paralab.view.marks import Part
from paralab.view.marks import boxes as mark

# Boxes that are thinner than this share of the time axis have no paper-coloured edge, which would
# hide them; the second share is for traces of more than MANY boxes.
THIN, MANY_THIN = 2e-3, 8e-3
MANY = 100
LETTER_SHARE = 0.010  # share of the time axis that one letter takes
FILLED = 0.92  # share of a row's height that boxes take


def traces(
    sections: Sequence[Section], shown: Sequence[Sequence[Box]], window: float
) -> list[Part]:
    """One trace per kind, row, chunk and copied category, even where no box has a length; ``shown``
    are the boxes drawn of each section, ``window`` the seconds of the time axis. Chunks share one
    legend entry, as do copies of a category on all rows and axes of one colour.
    """
    groups = {_group(b): [[] for _ in sections] for section in sections for b in section.boxes}
    for i, boxes in enumerate(shown):
        for b in boxes:
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
        if tiers and row in lanes.ROW_NAME:
            edge = _edges([_duration(b) < THIN * window for b in flat], 1, fill)
        elif kind == "comm" and framed:
            between_nodes = [any(c["level"] == "inter" for c in b["calls"]) for b in flat]
            edge = _edges(between_nodes, 2.5, theme.look().ink)
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
