"""The boxes of a timeline: which spans, on which row, in which colour, saying what when pointed at.

A `Section` is one report's step, ready to draw: its boxes with times from the step's start. The
timeline of one report has one section; several reports stand under one another, on one time scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paralab.checks import choice, whole
from paralab.records import metrics
from paralab.records.tables import COMPUTE_KINDS, KINDS
from paralab.theory.traffic import POINT_TO_POINT
from paralab.view import theme
from paralab.view.tracks import tracks

if TYPE_CHECKING:
    import pandas as pd

    from paralab.report import Report
    from paralab.view.chart import Chart

MAX_TRACKS = 4
LABEL_SHARE = 0.018  # of the time axis that a box needs to hold a micro-batch number
LETTER_SHARE = 0.010  # of the time axis that one letter takes
LANE_HEIGHT = {"compute": 1.0}
OTHER_HEIGHT = 0.7
RANK_GAP = 0.45
HEAD = 1.15  # rows of room for the line above a section


@dataclass
class Section:
    """One step of one report. Times in seconds from the step's start; y grows downwards."""

    report: Report
    label: str
    step: int
    ranks: list[int]
    boxes: list[dict[str, Any]]
    seconds: float
    rows: dict[tuple[int, str], tuple[float, float]] = field(default_factory=dict)
    top: float = 0.0
    bottom: float = 0.0


def section(
    report: Report, *, label: str = "", step: int | None, ranks: Sequence[int] | None
) -> Section:
    """The step that was asked for. Raises ValueError if the report has no such step or rank."""
    steps = sorted(set(report.steps["step"].tolist()))
    if not steps:
        raise ValueError(
            "this report has no steps, so there is no timeline; pl.run(...) records them"
        )
    step = metrics.typical_step(report) if step is None else whole("step", step, at_least=0)
    choice("step", step, tuple(steps))
    known = sorted(set(report.steps["rank"].tolist()))
    chosen = known if ranks is None else [choice("ranks", r, tuple(known)) for r in ranks]
    if not chosen:
        choice("ranks", ranks, tuple(known))
    chosen = sorted(set(chosen))
    boxes, seconds = _boxes(report, step, chosen, label)
    return Section(report, label, step, chosen, boxes, seconds)


def _boxes(
    report: Report, step: int, ranks: list[int], label: str
) -> tuple[list[dict[str, Any]], float]:
    """Spans as dicts with times from the step's start and a track; how long the step took."""
    steps, spans = report.steps[report.steps["step"] == step], report.spans
    zero, end = float(steps["start"].min()), float(steps["end"].max())
    chosen = spans[(spans["step"] == step) & spans["rank"].isin(ranks) & (spans["end"] >= zero)]
    calls = report.collectives[report.collectives["step"] == step]
    of_span: dict[int, list[dict[str, Any]]] = {}
    for call in calls.to_dict("records"):
        of_span.setdefault(call["span"], []).append(call)
    boxes = chosen.to_dict("records")
    lanes: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for box in boxes:
        box["calls"], box["label"] = of_span.get(box["id"], []), label
        box["traced"] = report.model is None
        box["start"], box["end"] = box["start"] - zero, box["end"] - zero
        lanes.setdefault((box["rank"], box["lane"]), []).append(box)
    for own in lanes.values():
        for box, track in zip(
            own, tracks([(b["start"], b["end"]) for b in own], at_most=MAX_TRACKS), strict=True
        ):
            box["track"] = track
    return boxes, end - zero


def place(sections: Sequence[Section], *, heads: bool) -> tuple[list[tuple[float, str]], float]:
    """Give every (rank, lane) of every section its row. Tick labels, and where the last row ends.

    Every rank shows every lane, and track heights are the same, so that ranks compare at a glance.
    """
    ticks, y = [], 0.0
    for one in sections:
        one.top = y
        y += HEAD if heads else 0.0
        lanes = sorted(
            {b["lane"] for b in one.boxes} | {"compute"}, key=lambda lane: (lane != "compute", lane)
        )
        for rank in one.ranks:
            for lane in lanes:
                height = LANE_HEIGHT.get(lane, OTHER_HEIGHT)
                one.rows[rank, lane] = (y + height / 2, height)
                axis = theme.text(theme.axis_of(lane))
                ticks.append((y + height / 2, f"<b>rank {rank}</b>" if lane == "compute" else axis))
                y += height
            y += RANK_GAP
        one.bottom = y - RANK_GAP
    return ticks, y - RANK_GAP + 0.2


def two_levels(one: Section) -> bool:
    """Whether some of its messages cross nodes and others do not: then it shows which."""
    return len({call["level"] for b in one.boxes for call in b["calls"]}) > 1


def draw(fig: Chart, sections: Sequence[Section], shown: Sequence[Sequence[dict[str, Any]]],
         window: float) -> None:  # fmt: skip
    """One trace per kind and lane, whatever the times, over all sections: one legend entry each."""
    pairs = {(b["kind"], b["lane"]) for one in sections for b in one.boxes}
    for kind, lane in sorted(pairs, key=lambda pair: (KINDS.index(pair[0]), pair[1])):
        bars: dict[str, list[Any]] = {"base": [], "x": [], "y": [], "width": [], "text": [],
                                      "hovertext": []}  # fmt: skip
        for one, boxes in zip(sections, shown, strict=True):
            mine = [b for b in boxes if (b["kind"], b["lane"]) == (kind, lane)]
            for name, values in _bars(kind, mine, one, window).items():
                bars[name] += values
        style = _style(kind, lane)
        if kind == "comm" and any(two_levels(one) for one in sections):
            drawn = [b for boxes in shown for b in boxes if (b["kind"], b["lane"]) == (kind, lane)]
            far = [any(c["level"] == "inter" for c in b["calls"]) for b in drawn]
            ink, paper = theme.look().ink, theme.look().paper
            style["marker"]["line"] = {
                "width": [2.5 if f else 0.5 for f in far],
                "color": [ink if f else paper for f in far],
            }
        fig.add_bar(**style, **bars)


def _bars(
    kind: str, boxes: list[dict[str, Any]], one: Section, window: float
) -> dict[str, list[Any]]:
    depth: dict[int, int] = {}  # tracks in use on each row: they share its height
    for b in boxes:
        depth[b["rank"]] = max(depth.get(b["rank"], 1), b["track"] + 1)
    deepest = max(depth.values(), default=1)
    y, widths = [], []
    for b in boxes:
        middle, height = one.rows[b["rank"], b["lane"]]
        share = height * 0.92 / deepest
        y.append(middle + height * 0.92 * ((b["track"] + 0.5) / deepest - 0.5))
        widths.append(share * (0.9 if deepest > 1 else 1.0))
    return {
        "base": [round(b["start"] * 1e3, 6) for b in boxes],
        "x": [round((b["end"] - b["start"]) * 1e3, 6) for b in boxes],
        "y": y,
        "width": widths,
        "text": _labels(kind, boxes, window, deepest),
        "hovertext": [_hover(b) for b in boxes],
    }


def _style(kind: str, lane: str) -> dict[str, Any]:
    now, fill = theme.look(), theme.colour(kind, lane)
    name = kind.replace("_", " ")
    if kind == "comm":
        name = f"communication, {theme.text(theme.axis_of(lane))}"
    elif lane != "compute":
        name = f"{name}, {theme.text(lane)}"
    marker: dict[str, Any] = {"color": fill, "line": {"width": 0.5, "color": now.paper}}
    if kind == "wait":
        marker["pattern"] = {"shape": "/", "bgcolor": fill, "fgcolor": now.hatch,
                             "size": 6, "solidity": 0.2}  # fmt: skip
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
        return [_partners(b) if deepest == 1 and _fits(_partners(b), b, window) else ""
                for b in boxes]  # fmt: skip
    widest: dict[tuple[int, int, int, int], dict[str, Any]] = {}
    if kind in COMPUTE_KINDS:
        for b in boxes:
            key = (b["rank"], b["stage"], b["chunk"], b["microbatch"])
            if key not in widest or _duration(b) > _duration(widest[key]):
                widest[key] = b
    named = {id(b) for b in widest.values()
             if b["microbatch"] >= 0 and _duration(b) >= LABEL_SHARE * window}  # fmt: skip
    return [str(b["microbatch"]) if id(b) in named else "" for b in boxes]


def _fits(said: str, box: dict[str, Any], window: float) -> bool:
    return _duration(box) >= LETTER_SHARE * len(said) * window


def _partners(b: dict[str, Any]) -> str:
    arrows = {"send": "→", "recv": "←"}
    said = [f"{arrows[c['op']]}{c['peer']}" for c in b["calls"] if c["op"] in arrows]
    return " ".join(said) or (b["calls"][0]["op"] if b["traced"] and b["calls"] else "")


def _duration(box: dict[str, Any]) -> float:
    return box["end"] - box["start"]


def _hover(b: dict[str, Any]) -> str:
    """What a box says when pointed at: times in ms, bytes as they were counted."""
    head = f"<b>{b['kind'].replace('_', ' ')}</b>"
    if b["microbatch"] >= 0:
        head += f", micro-batch {b['microbatch']}"
    if b["label"]:
        head = f"{theme.text(b['label'])}: {head}"
    lines = [head, f"rank {b['rank']}, {theme.text(b['lane'])}",
             f"{_duration(b) * 1e3:.3f} ms, from {b['start'] * 1e3:.3f} to "
             f"{b['end'] * 1e3:.3f} ms"]  # fmt: skip
    if b["kind"] not in ("wait", "comm"):
        lines.append(f"cost {b['cost'] * 1e3:.3f} ms of device time")
    lines += [_call(call) for call in b["calls"]]
    return "<br>".join(lines)


def _call(call: dict[str, Any]) -> str:
    phase = theme.text(call["phase"])
    if call["op"] in POINT_TO_POINT:
        way = "send to" if call["op"] == "send" else "receive from"
        return f"{way} rank {call['peer']} ({phase}): {call['payload_bytes']:,} bytes"
    return (f"{call['op']} ({phase}): {call['payload_bytes']:,} bytes "
            f"in the buffer, {call['wire_bytes']:,} sent")  # fmt: skip


def table(sections: Sequence[Section]) -> pd.DataFrame:
    """Every box: report, clock, rank, lane, kind, microbatch, start, end (seconds), wire_bytes."""
    import pandas as pd

    columns = ("rank", "lane", "kind", "microbatch", "start", "end")
    rows = [
        {"report": one.label or theme.subject(one.report), "clock": one.report.clock,
         **{c: b[c] for c in columns}, "wire_bytes": sum(c["wire_bytes"] for c in b["calls"])}
        for one in sections for b in one.boxes
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=["report", "clock", *columns, "wire_bytes"])
