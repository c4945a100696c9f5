"""The boxes of a timeline: which spans, on which row, in which colour.

A `Section` is one report's step, ready to draw: its boxes with times from the step's start. The
timeline of one report has one section; several reports stand under one another, on one time scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paralab.checks import choice, illegal, whole
from paralab.report import metrics
from paralab.report.tables import COMPUTE_KINDS, KINDS
from paralab.view import lanes, marks, naming, theme
from paralab.view.marks import boxes as mark

if TYPE_CHECKING:
    import pandas as pd

    from paralab.report.tables import Tables

Box = dict[str, Any]

MAX_TRACKS = 4
THIN, MANY_THIN = 2e-3, 8e-3  # of the time axis: a box below that has its own colour as its edge,
MANY = 100  # the second share from so many boxes of a trace on: edges would hide them
LETTER_SHARE = 0.010  # of the time axis that one letter takes
LANE_HEIGHT = {"compute": 1.0, **dict.fromkeys(lanes.ROW_NAME, 0.55)}
OTHER_HEIGHT = 0.7
FILLED = 0.92  # of a row's height
RANK_GAP = 0.45
HEAD = 1.15  # rows of room for the line above a section
HALVES = {"backward": "backward, input half", "weight_grad": "backward, weight half"}


@dataclass
class Section:
    """One step of one report. Times in seconds from the step's start; y grows downwards."""

    report: Tables
    label: str
    step: int
    ranks: list[int]
    boxes: list[Box]
    seconds: float
    lanes: tuple[str, ...] | None = None  # what is drawn; None: every lane that has a box
    gap: float = RANK_GAP
    mark: float | None = None  # where a pipeline ends, if that is not where the step does
    total: int = 0  # boxes there are; maybe not all of them are here
    idle: dict[int, float] = field(default_factory=dict)  # share of a rank's time, for the margin
    head: str = ""  # in place of label and clock
    rows: dict[tuple[int, str], tuple[float, float]] = field(default_factory=dict)
    top: float = 0.0
    bottom: float = 0.0

    @property
    def two_levels(self) -> bool:
        """Whether some of its messages cross nodes and others do not: then it shows which."""
        return len({call["level"] for b in self.boxes for call in b["calls"]}) > 1


def section(
    report: Tables,
    *,
    label: str = "",
    step: int | None,
    ranks: Sequence[int] | None,
    lanes: tuple[str, ...] | None = None,
    most: int | None = None,
) -> Section:
    """The step that was asked for, of ``lanes`` (None: all), the first ``most`` boxes of it.

    What links between memory tiers and the host do meanwhile for another step belongs to it too.
    Raises ValueError if the report has no such step or rank.
    """
    step, shown = chosen(report, step, ranks)
    boxes, seconds, total = _boxes(report, step, shown, label, lanes, most)
    return Section(report, label, step, shown, boxes, seconds, lanes=lanes, total=total)


def chosen(report: Tables, step: int | None, ranks: Sequence[int] | None) -> tuple[int, list[int]]:
    """The step and the ranks that were asked for, or the typical step and all ranks there are.

    Raises ValueError if the report has no such step or rank, or no step at all.
    """
    steps = sorted(set(report.steps["step"].tolist()))
    if not steps:
        raise ValueError(
            "this report has no steps, so there is no timeline; pl.run(...) records them"
        )
    step = metrics.typical_step(report) if step is None else whole("step", step, at_least=0)
    choice("step", step, tuple(steps))
    known = metrics.reported_ranks(report)
    if ranks is not None and not len(ranks):
        raise illegal("ranks", ranks, "no rank", ", ".join(map(str, known)))
    asked = known if ranks is None else [choice("ranks", r, tuple(known)) for r in ranks]
    return step, sorted(set(asked))


def _boxes(
    report: Tables,
    step: int,
    ranks: list[int],
    label: str,
    only: tuple[str, ...] | None,
    most: int | None,
) -> tuple[list[Box], float, int]:
    """Spans as dicts with times from the step's start and a track; how long the step took, and how
    many spans there are.
    """
    steps, spans = report.steps[report.steps["step"] == step], report.spans
    spans = spans[spans["rank"].isin(ranks)]
    zero, end = float(steps["start"].min()), float(steps["end"].max())
    meanwhile = spans["lane"].isin(lanes.LANES) & (spans["start"] < end) & (spans["end"] > zero)
    spans = spans[(spans["step"] == step) & (spans["end"] >= zero) | meanwhile]
    if only is not None:
        spans = spans[spans["lane"].isin(only)]
    total = len(spans)
    if most is not None and total > most:
        spans = spans.sort_values(["start", "id"]).head(most)
    calls, copies = (of_span(t[t["rank"].isin(ranks)]) for t in (report.collectives, report.copies))
    boxes = spans.to_dict("records")
    rows: dict[tuple[int, str], list[Box]] = {}
    for box in boxes:
        box |= {
            "calls": [c for c in calls.get(box["id"], []) if c["step"] == step],
            "copies": copies.get(box["id"], []),
            "traced": report.model is None,
            "label": label,
            "late": box["step"] != step,
            "start": box["start"] - zero,
            "end": box["end"] - zero,
        }
        rows.setdefault((box["rank"], lanes.row(box)), []).append(box)
    for own in rows.values():
        found = lanes.tracks([(b["start"], b["end"]) for b in own], at_most=MAX_TRACKS)
        for box, track in zip(own, found, strict=True):
            box["track"] = track
    return boxes, end - zero, total


def of_span(table: pd.DataFrame) -> dict[int, list[dict[str, Any]]]:
    """The rows of collectives or copies by the span that carried them."""
    found: dict[int, list[dict[str, Any]]] = {}
    for row in table.to_dict("records"):
        found.setdefault(row["span"], []).append(row)
    return found


def place(sections: Sequence[Section], *, heads: bool) -> tuple[list[tuple[float, str]], float]:
    """Give every (rank, lane) of every section its row. Tick labels, and where the last row ends.

    Every rank shows every lane, and track heights are the same, so that ranks compare at a glance.
    """
    ticks, y = [], 0.0
    for one in sections:
        one.top = y
        y += HEAD if heads else 0.0
        found = {lanes.row(b) for b in one.boxes} | {"compute"}
        rows = one.lanes or sorted(found, key=lanes.order)
        for rank in one.ranks:
            for row in rows:
                height = LANE_HEIGHT.get(row, OTHER_HEIGHT)
                one.rows[rank, row] = (y + height / 2, height)
                name = lanes.ROW_NAME.get(row) or theme.text(theme.axis_of(row))
                ticks.append((y + height / 2, f"<b>rank {rank}</b>" if row == "compute" else name))
                y += height
            y += one.gap
        one.bottom = y - one.gap
        y = one.bottom + RANK_GAP
    return ticks, y - RANK_GAP + 0.2


# ---- traces --------------------------------------------------------------------------------------
def traces(
    sections: Sequence[Section], shown: Sequence[Sequence[Box]], window: float
) -> list[dict[str, Any]]:
    """One per kind, row, chunk and what is copied, whatever the times; one legend entry for all
    chunks, and for what is copied on any row.
    """
    found = {_group(b) for one in sections for b in one.boxes}
    chunks = 1 + max((chunk for _, _, chunk, _ in found), default=0)
    tiers = any(category for *_, category in found)
    halves = any(kind == "weight_grad" for kind, *_ in found)
    idle = any(one.idle for one in sections)
    framed = any(one.two_levels for one in sections)
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
        if tiers and kind not in ("comm", "wait"):
            name, fill = lanes.style(kind, row, category)
        if halves and kind in HALVES:
            name = HALVES[kind]
        if kind == "wait" and idle:
            name = "waiting: the bubble"
        if works and chunks > 1:  # a rank's later chunks are paler
            fill = theme.shade(theme.colour(kind), chunk, chunks)
        edge: Any = 0.5
        if works and len(rows) > MANY:
            edge = _edges(flat, window, fill, MANY_THIN)
        elif tiers and row in lanes.ROW_NAME:
            edge = _edges(flat, window, fill, THIN)
        elif kind == "comm" and framed:
            far = [any(c["level"] == "inter" for c in b["calls"]) for b in flat]
            ink, paper = theme.look().ink, theme.look().paper
            edge = {"width": [2.5 if f else 0.5 for f in far]}
            edge |= {"color": [ink if f else paper for f in far]}
        style = mark.look(name, fill, hatched=kind == "wait", edge=edge)
        if tiers or (works and chunks > 1):
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


def _edges(boxes: Sequence[Box], window: float, fill: str, least: float) -> dict[str, list[Any]]:
    """Lines of paper around boxes of at least a share ``least`` of the window, of their own colour
    around others.
    """
    thin = [_duration(b) < least * window for b in boxes]
    paper = theme.look().paper
    return {"width": [1 if t else 0.5 for t in thin], "color": [fill if t else paper for t in thin]}


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


def table(sections: Sequence[Section]) -> pd.DataFrame:
    """Every box: report, clock, rank, lane, kind, microbatch, start, end (seconds), wire_bytes.

    Of pipelines the stage too; with copies between tiers op, category and bytes of each.
    """
    import pandas as pd

    staged = ("stage",) if any(one.report.plan.pp > 1 for one in sections) else ()
    copied = any(b.get("copies") for one in sections for b in one.boxes)
    columns = ["report", "clock", "rank", "lane", "kind", *staged, "microbatch", "start", "end"]
    columns += ["wire_bytes", *["op", "category", "bytes"] * copied]
    rows = []
    for one in sections:
        label = one.label or naming.subject(one.report)
        for b in one.boxes:
            copies = b.get("copies") or [{"op": "", "category": "", "bytes": 0}]
            sent = sum(c["wire_bytes"] for c in b["calls"])
            more = {"op": copies[0]["op"], "category": copies[0]["category"]}
            more |= {"report": label, "clock": one.report.clock, "wire_bytes": sent}
            rows.append({**b, **more, "bytes": sum(copy["bytes"] for copy in copies)})
    return pd.DataFrame(rows, columns=columns)


def idle_notes(shares: Sequence[tuple[float, float]], head: float | None) -> list[dict[str, Any]]:
    """Notes for the right margin: each share at its y, and what they are, at y = ``head`` or, if
    that is None, on top.
    """
    at = {"yref": "paper", "yanchor": "bottom"} if head is None else {}
    title = marks.margin("idle", 1 if head is None else head, ink=theme.look().faint, **at)
    return [marks.margin(theme.percent(share), y) for y, share in shares] + [title]
