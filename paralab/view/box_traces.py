"""The traces of a timeline: what boxes are called, their colours, edges and words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paralab.report.tables import COMPUTE_KINDS, KINDS
from paralab.view import lanes, theme
from paralab.view.boxes import Box, Section
from paralab.view.marks import boxes as mark

THIN, MANY_THIN = 2e-3, 8e-3  # of the time axis: a box below that has its own colour as its edge,
MANY = 100  # the second share from so many boxes of a trace on: edges would hide them
LETTER_SHARE = 0.010  # of the time axis that one letter takes
FILLED = 0.92  # of a row's height
HALVES = {"backward": "backward, or its input half", "weight_grad": "backward, weight half"}


def traces(
    sections: Sequence[Section], shown: Sequence[Sequence[Box]], window: float
) -> list[dict[str, Any]]:
    """One per kind, row, chunk and what is copied, whatever the times; one legend entry for all
    chunks, for what is copied on any row, and for axes of one colour.
    """
    found = {_group(b) for one in sections for b in one.boxes}
    chunks = 1 + max((chunk for _, _, chunk, _ in found), default=0)
    tiers = any(category for *_, category in found)
    halves = any(kind == "weight_grad" for kind, *_ in found)
    framed = any(one.two_levels for one in sections)
    axes: dict[str, set[str]] = {}  # by colour: dp and the group of all ranks look alike
    for kind, row, *_ in found:
        if kind == "comm":
            axes.setdefault(theme.colour(kind, row), set()).add(theme.text(theme.axis_of(row)))
    of_group: list[dict[Any, list[Box]]] = [{} for _ in shown]
    for groups, boxes in zip(of_group, shown, strict=True):
        for b in boxes:
            groups.setdefault(_group(b), []).append(b)
    named: set[str] = set()
    made = []
    for group in sorted(found, key=lambda group: (KINDS.index(group[0]), *group[1:])):
        kind, row, chunk, category = group
        mine = [groups.get(group, []) for groups in of_group]
        flat = [b for own in mine for b in own]
        rows = [
            bar
            for one, own in zip(sections, mine, strict=True)
            for bar in _bars(kind, own, one, window)
        ]
        name, fill = name_and_fill(kind, row)
        works = kind in COMPUTE_KINDS
        alike = sorted(axes[fill]) if kind == "comm" else ()
        if len(alike) > 1:
            said = alike if len(alike) < 4 else [alike[0], f"{len(alike) - 1} other groups"]
            name = f"communication, {' and '.join(said)}"
        if tiers and kind not in ("comm", "wait"):
            name, fill = lanes.style(kind, row, category)
        if halves and kind in HALVES:
            name = HALVES[kind]
        if works and chunks > 1:  # a rank's later chunks are paler
            fill = theme.shade(theme.colour(kind), chunk, chunks)
        edge: Any = 0.5
        if works and len(rows) > MANY:
            edge = _edges([_duration(b) < MANY_THIN * window for b in flat], 1, fill)
        elif tiers and row in lanes.ROW_NAME:
            edge = _edges([_duration(b) < THIN * window for b in flat], 1, fill)
        elif kind == "comm" and framed:
            far = [any(c["level"] == "inter" for c in b["calls"]) for b in flat]
            edge = _edges(far, 2.5, theme.look().ink)
        elif kind in ("optimizer", "compute") and len(rows) > MANY:  # an edge would hide the other
            edge = _edges([_duration(b) < MANY_THIN * window for b in flat], 0, fill)
        style = mark.look(name, fill, hatched=kind == "wait", edge=edge)
        if tiers or len(alike) > 1 or (works and chunks > 1):
            style |= {"legendgroup": name, "showlegend": name not in named}
            named.add(name)
        made.append(mark.boxes(rows, style))
    return made


def name_and_fill(kind: str, lane: str) -> tuple[str, str]:
    """What spans are called in the legend, and their colour."""
    name = kind.replace("_", " ").replace("wait", "waiting")
    if kind == "comm":
        name = f"communication, {theme.text(theme.axis_of(lane))}"
    elif lane != "compute":
        name = f"{name}, {theme.text(lane)}"
    return name, theme.colour(kind, lane)


def _edges(meant: Sequence[bool], width: float, ink: str) -> dict[str, list[Any]]:
    """Lines of this width and colour around the boxes that are meant, of paper around others."""
    paper = theme.look().paper
    return {"width": [width if m else 0.5 for m in meant]} | {
        "color": [ink if m else paper for m in meant]
    }


def _group(box: Box) -> tuple[str, str, int, str]:
    """Boxes of one trace: kind, row, chunk of a rank, what is copied between tiers."""
    chunk = box["chunk"] if box["kind"] in COMPUTE_KINDS else 0
    return box["kind"], lanes.row(box), chunk, lanes.category(box)


def _bars(kind: str, boxes: list[Box], one: Section, window: float) -> list[tuple]:
    """Rows of the mark: tracks in use on a row share its height."""
    deepest = max((b["track"] + 1 for b in boxes), default=1)
    rows = []
    for b, word in zip(boxes, _labels(kind, boxes, window, deepest), strict=True):
        middle, height = one.rows[b["rank"], lanes.row(b)]
        y = middle + height * FILLED * ((b["track"] + 0.5) / deepest - 0.5)
        start, length = round(b["start"] * 1e3, 6), round(_duration(b) * 1e3, 6)
        thick = height * FILLED / deepest * (0.9 if deepest > 1 else 1.0)
        rows.append((start, length, y, thick, word, lanes.hover(b)))
    return rows


def _labels(kind: str, boxes: list[Box], window: float, deepest: int) -> list[str]:
    """What stands on a box, if it is wide enough.

    Work: the micro-batch number, once per micro-batch, on its widest piece. Point-to-point calls:
    to whom (→1) and from whom (←3). Collectives of a traced function: their name.
    """
    if kind == "comm":
        said = [_partners(b) if deepest == 1 else "" for b in boxes]
    else:
        widest: dict[tuple[int, ...], Box] = {}
        for b in boxes if kind in COMPUTE_KINDS else ():
            key = (b["rank"], b["stage"], b["chunk"], b["microbatch"])
            widest[key] = max(widest.get(key, b), b, key=_duration)
        named = {id(b) for b in widest.values() if b["microbatch"] >= 0}
        said = [str(b["microbatch"]) if id(b) in named else "" for b in boxes]
    return [
        word if _duration(b) >= LETTER_SHARE * max(len(word), 1.2) * window else ""
        for word, b in zip(said, boxes, strict=True)
    ]


def _partners(b: Box) -> str:
    arrows = {"send": "→", "recv": "←"}
    said = [f"{arrows[c['op']]}{c['peer']}" for c in b["calls"] if c["op"] in arrows]
    return " ".join(said) or (b["calls"][0]["op"] if b["traced"] and b["calls"] else "")


def _duration(box: Box) -> float:
    return box["end"] - box["start"]
