"""The boxes of a timeline: which spans, on which row, in which colour, saying what when pointed at.

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
from paralab.view import lanes, naming, theme
from paralab.view.hover import hover
from paralab.view.tracks import tracks

if TYPE_CHECKING:
    import pandas as pd

    from paralab.report.tables import Tables
    from paralab.view.chart import Chart

MAX_TRACKS = 4
MANY = 100  # boxes of a trace, from which on some may be hidden by the lines around them:
EDGED = 8e-3  # those below this share of the time axis
LETTER_SHARE = 0.010  # of the time axis that one letter takes
LANE_HEIGHT = {"compute": 1.0, **dict.fromkeys(lanes.ROW_NAME, lanes.HEIGHT)}
OTHER_HEIGHT = 0.7
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
    boxes: list[dict[str, Any]]
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
) -> tuple[list[dict[str, Any]], float, int]:
    """Spans as dicts with times from the step's start and a track; how long the step took, and how
    many spans there are.
    """
    steps, spans = report.steps[report.steps["step"] == step], report.spans
    spans = spans[spans["rank"].isin(ranks)]
    zero, end = float(steps["start"].min()), float(steps["end"].max())
    beside = spans["lane"].isin(lanes.LANES) & (spans["start"] < end) & (spans["end"] > zero)
    chosen = spans[(spans["step"] == step) & (spans["end"] >= zero) | beside]
    if only is not None:
        chosen = chosen[chosen["lane"].isin(only)]
    total = len(chosen)
    if most is not None and total > most:
        chosen = chosen.sort_values(["start", "id"]).head(most)
    mine = [table[table["rank"].isin(ranks)] for table in (report.collectives, report.copies)]
    calls, copies = of_span(mine[0], step), of_span(mine[1])
    boxes = chosen.to_dict("records")
    rows: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for box in boxes:
        box["calls"], box["copies"] = calls.get(box["id"], []), copies.get(box["id"], [])
        box["traced"], box["label"] = report.model is None, label
        box["late"] = box["step"] != step
        box["start"], box["end"] = box["start"] - zero, box["end"] - zero
        rows.setdefault((box["rank"], lanes.row(box)), []).append(box)
    for own in rows.values():
        for box, track in zip(
            own, tracks([(b["start"], b["end"]) for b in own], at_most=MAX_TRACKS), strict=True
        ):
            box["track"] = track
    return boxes, end - zero, total


def of_span(table: pd.DataFrame, step: int | None = None) -> dict[int, list[dict[str, Any]]]:
    """The rows of collectives or copies by the span that carried them."""
    found: dict[int, list[dict[str, Any]]] = {}
    for row in (table if step is None else table[table["step"] == step]).to_dict("records"):
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


def two_levels(one: Section) -> bool:
    """Whether some of its messages cross nodes and others do not: then it shows which."""
    return len({call["level"] for b in one.boxes for call in b["calls"]}) > 1


def draw(
    fig: Chart,
    sections: Sequence[Section],
    shown: Sequence[Sequence[dict[str, Any]]],
    window: float,
) -> None:
    """One trace per kind, row, chunk and what is copied, whatever the times; one legend entry for
    all chunks, and for what is copied on any row.
    """
    found = {_group(b) for one in sections for b in one.boxes}
    chunks = 1 + max((chunk for _, _, chunk, _ in found), default=0)
    tiers = any(category for *_, category in found)
    halves = any(kind == "weight_grad" for kind, *_ in found)
    of_group: list[dict[Any, list[dict[str, Any]]]] = [{} for _ in shown]
    for dealt, boxes in zip(of_group, shown, strict=True):
        for b in boxes:
            dealt.setdefault(_group(b), []).append(b)
    named: set[str] = set()
    traces = []
    for group in sorted(found, key=lambda group: (KINDS.index(group[0]), *group[1:])):
        kind, row, chunk, category = group
        mine = [dealt.get(group, []) for dealt in of_group]
        bars: dict[str, list[Any]] = {
            "base": [],
            "x": [],
            "y": [],
            "width": [],
            "text": [],
            "hovertext": [],
        }
        for one, boxes in zip(sections, mine, strict=True):
            for name, values in _bars(kind, boxes, one, window).items():
                bars[name] += values
        style = bar_style(kind, row)
        if tiers and kind not in ("comm", "wait"):
            style["name"], fill = lanes.style(kind, row, category).values()
            style["marker"]["color"] = fill
            if row in lanes.ROW_NAME:
                flat = [b for own in mine for b in own]
                style["marker"]["line"] = lanes.edges(flat, window, fill)
        if halves and kind in HALVES:
            style["name"] = HALVES[kind]
        if kind == "wait" and any(one.idle for one in sections):
            style["name"] = "waiting: the bubble"
        if kind in COMPUTE_KINDS and chunks > 1:  # a rank's later chunks are paler
            fill = theme.shade(theme.colour(kind), chunk, chunks)
            style["marker"]["color"], style["textfont"]["color"] = fill, theme.on(fill)
        if kind in COMPUTE_KINDS and len(bars["x"]) > MANY:  # lines between them would hide them
            flat = [b for own in mine for b in own]
            fill = style["marker"]["color"]
            style["marker"]["line"] = lanes.edges(flat, window, fill, least=EDGED)
        if tiers or kind in COMPUTE_KINDS and chunks > 1:
            style |= {"legendgroup": style["name"], "showlegend": style["name"] not in named}
            named.add(style["name"])
        if kind == "comm" and any(two_levels(one) for one in sections):
            far = [any(c["level"] == "inter" for c in b["calls"]) for own in mine for b in own]
            ink, paper = theme.look().ink, theme.look().paper
            style["marker"]["line"] = {
                "width": [2.5 if f else 0.5 for f in far],
                "color": [ink if f else paper for f in far],
            }
        traces.append({"type": "bar", **style, **bars})
    fig.add_traces(traces)  # as dicts: a Bar would be checked here a second time, box by box


def _group(box: dict[str, Any]) -> tuple[str, str, int, str]:
    """Boxes of one trace: kind, row, chunk of a rank, what is copied between tiers."""
    chunk = box["chunk"] if box["kind"] in COMPUTE_KINDS else 0
    return box["kind"], lanes.row(box), chunk, lanes.category(box)


def _bars(
    kind: str, boxes: list[dict[str, Any]], one: Section, window: float
) -> dict[str, list[Any]]:
    depth: dict[int, int] = {}  # tracks in use on each row: they share its height
    for b in boxes:
        depth[b["rank"]] = max(depth.get(b["rank"], 1), b["track"] + 1)
    deepest = max(depth.values(), default=1)
    y, widths = [], []
    for b in boxes:
        middle, height = one.rows[b["rank"], lanes.row(b)]
        share = height * 0.92 / deepest
        y.append(middle + height * 0.92 * ((b["track"] + 0.5) / deepest - 0.5))
        widths.append(share * (0.9 if deepest > 1 else 1.0))
    return {
        "base": [round(b["start"] * 1e3, 6) for b in boxes],
        "x": [round((b["end"] - b["start"]) * 1e3, 6) for b in boxes],
        "y": y,
        "width": widths,
        "text": _labels(kind, boxes, window, deepest),
        "hovertext": [hover(b) for b in boxes],
    }


def bar_style(kind: str, lane: str) -> dict[str, Any]:
    """Name, colour and text of a trace of spans."""
    now, fill = theme.look(), theme.colour(kind, lane)
    name = kind.replace("_", " ")
    if kind == "comm":
        name = f"communication, {theme.text(theme.axis_of(lane))}"
    elif lane != "compute":
        name = f"{name}, {theme.text(lane)}"
    marker: dict[str, Any] = {"color": fill, "line": {"width": 0.5, "color": now.paper}}
    if kind == "wait":
        marker["pattern"] = {
            "shape": "/",
            "bgcolor": fill,
            "fgcolor": now.hatch,
            "size": 6,
            "solidity": 0.2,
        }
    return {
        "name": name if kind != "wait" else "waiting",
        "orientation": "h",
        "marker": marker,
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "constraintext": "none",
        "textfont": {"size": 12, "color": theme.on(fill)},
        "hovertemplate": "%{hovertext}<extra></extra>",
    }


def _labels(kind: str, boxes: list[dict[str, Any]], window: float, deepest: int) -> list[str]:
    """What stands on a box, if it is wide enough.

    Work: the micro-batch number, once per micro-batch, on its widest piece. Point-to-point calls:
    to whom (→1) and from whom (←3). Collectives of a traced function: their name.
    """
    if kind == "comm":
        return [
            _partners(b) if deepest == 1 and _fits(_partners(b), b, window) else "" for b in boxes
        ]
    widest: dict[tuple[int, int, int, int], dict[str, Any]] = {}
    if kind in COMPUTE_KINDS:
        for b in boxes:
            key = (b["rank"], b["stage"], b["chunk"], b["microbatch"])
            if key not in widest or _duration(b) > _duration(widest[key]):
                widest[key] = b
    named = {
        id(b)
        for b in widest.values()
        if b["microbatch"] >= 0 and _fits(str(b["microbatch"]), b, window)
    }
    return [str(b["microbatch"]) if id(b) in named else "" for b in boxes]


def _fits(said: str, box: dict[str, Any], window: float) -> bool:
    return _duration(box) >= LETTER_SHARE * max(len(said), 1.2) * window


def _partners(b: dict[str, Any]) -> str:
    arrows = {"send": "→", "recv": "←"}
    said = [f"{arrows[c['op']]}{c['peer']}" for c in b["calls"] if c["op"] in arrows]
    return " ".join(said) or (b["calls"][0]["op"] if b["traced"] and b["calls"] else "")


def _duration(box: dict[str, Any]) -> float:
    return box["end"] - box["start"]


def table(sections: Sequence[Section]) -> pd.DataFrame:
    """Every box: report, clock, rank, lane, kind, microbatch, start, end (seconds), wire_bytes.

    Of pipelines the stage too; with copies between tiers op, category and bytes of each.
    """
    import pandas as pd

    staged = ("stage",) if any(one.report.plan.pp > 1 for one in sections) else ()
    columns = ("rank", "lane", "kind", *staged, "microbatch", "start", "end")
    rows = [
        {
            "report": one.label or naming.subject(one.report),
            "clock": one.report.clock,
            **{c: b[c] for c in columns},
            "wire_bytes": sum(c["wire_bytes"] for c in b["calls"]),
            **_copied(b),
        }
        for one in sections
        for b in one.boxes
    ]
    copied = [*_copied({})] if any(b.get("copies") for one in sections for b in one.boxes) else []
    return pd.DataFrame(rows, columns=["report", "clock", *columns, "wire_bytes", *copied])


def _copied(box: dict[str, Any]) -> dict[str, Any]:
    copies = box.get("copies") or [{"op": "", "category": "", "bytes": 0}]
    return {
        "op": copies[0]["op"],
        "category": copies[0]["category"],
        "bytes": sum(copy["bytes"] for copy in copies),
    }
