"""The timeline: one step, every rank, every span. Compute on top, communication beneath.

Reading it: a coloured box is work, a hatched grey one is a rank standing still until a collective
has ended. Communication under a backward box is hidden; communication over a hatched box is what
the step paid for. One trace per kind and lane, whatever the times, so two runs have the same
structure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paralab.checks import choice, whole
from paralab.records import metrics
from paralab.records.tables import COMPUTE_KINDS, KINDS
from paralab.view import theme
from paralab.view.tracks import tracks

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from paralab.report import Report

MAX_BOXES = 4000  # more make a browser slow, and no screen has the pixels
MAX_TRACKS = 4
LABEL_SHARE = 0.018  # of the time axis that a box needs to hold a micro-batch number
LANE_HEIGHT = {"compute": 1.0}
OTHER_HEIGHT = 0.7
RANK_GAP = 0.45


def timeline(
    report: Report, *, step: int | None = None, ranks: Sequence[int] | None = None
) -> go.Figure:
    """One bar per span of ``step`` (default: of median duration) on ``ranks`` (default: all).

    Milliseconds from the step's start. Raises ValueError if the report has no such step or rank.
    """
    step, ranks = _asked(report, step, ranks)
    boxes, zero, end = _boxes(report, step, ranks)
    shown = sorted(boxes, key=lambda b: (b["start"], b["id"]))[:MAX_BOXES]
    window = (
        max((b["start"] for b in shown), default=0.0) if len(shown) < len(boxes) else end - zero
    )
    rows, ticks, bottom = _rows(boxes, ranks)
    said = [f"step {step}", f"{(end - zero) * 1e3:.1f} ms"]
    if len(shown) < len(boxes):
        said.append(
            f"the first {len(shown)} of {len(boxes)} boxes ({window * 1e3:.1f} ms); choose ranks="
        )
    cores = report.meta.get("cores")
    if report.clock == "measured" and isinstance(cores, int) and cores < report.world_size:
        said.append(f"{report.world_size} ranks shared {cores} cores, which stretches boxes")
    fig = theme.figure(
        _finding(report, step),
        theme.clock_line(report, *said),
        height=int(190 + 34 * bottom),
    )
    for kind, lane in sorted({(b["kind"], b["lane"]) for b in boxes}, key=_legend_order):
        mine = [b for b in shown if (b["kind"], b["lane"]) == (kind, lane)]
        fig.add_bar(**_trace(kind, lane, mine, rows, window))
    fig.update_layout(
        barmode="overlay",
        legend={"orientation": "h", "y": 1, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
        xaxis={"title": {"text": f"time from the start of step {step} (ms)"},
               "range": [-0.005 * window * 1e3, 1.005 * window * 1e3], "tickformat": "~g"},
        yaxis={"tickvals": [y for y, _ in ticks], "ticktext": [label for _, label in ticks],
               "range": [bottom, -0.2], "showgrid": False},
    )  # fmt: skip
    return fig


def _asked(report: Report, step: int | None, ranks: Sequence[int] | None) -> tuple[int, list[int]]:
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
    return step, sorted(set(chosen))


def _boxes(
    report: Report, step: int, ranks: list[int]
) -> tuple[list[dict[str, Any]], float, float]:
    """Spans as dicts with times from the step's start and a track; the step's start and end."""
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
        box["calls"] = of_span.get(box["id"], [])
        box["start"], box["end"] = box["start"] - zero, box["end"] - zero
        lanes.setdefault((box["rank"], box["lane"]), []).append(box)
    for own in lanes.values():
        for box, track in zip(
            own, tracks([(b["start"], b["end"]) for b in own], at_most=MAX_TRACKS), strict=True
        ):
            box["track"] = track
    return boxes, zero, end


def _rows(
    boxes: list[dict[str, Any]], ranks: list[int]
) -> tuple[dict[tuple[int, str], tuple[float, float]], list[tuple[float, str]], float]:
    """Middle and height of every (rank, lane), tick labels, and where the last row ends.

    Every rank shows every lane, and track heights are the same, so that ranks compare at a glance.
    """
    lanes = sorted(
        {b["lane"] for b in boxes} | {"compute"}, key=lambda lane: (lane != "compute", lane)
    )
    rows, ticks, y = {}, [], 0.0
    for rank in ranks:
        for lane in lanes:
            height = LANE_HEIGHT.get(lane, OTHER_HEIGHT)
            rows[rank, lane] = (y + height / 2, height)
            label = f"<b>rank {rank}</b>" if lane == "compute" else theme.text(theme.axis_of(lane))
            ticks.append((y + height / 2, label))
            y += height
        y += RANK_GAP
    return rows, ticks, y - RANK_GAP + 0.2


def _legend_order(pair: tuple[str, str]) -> tuple[int, str]:
    return KINDS.index(pair[0]), pair[1]


def _trace(
    kind: str, lane: str, boxes: list[dict[str, Any]],
    rows: dict[tuple[int, str], tuple[float, float]], window: float,
) -> dict[str, Any]:  # fmt: skip
    depth = {}  # tracks in use on each row: they share its height
    for b in boxes:
        depth[b["rank"]] = max(depth.get(b["rank"], 1), b["track"] + 1)
    deepest = max(depth.values(), default=1)
    y, widths = [], []
    for b in boxes:
        middle, height = rows[b["rank"], b["lane"]]
        share = height * 0.92 / deepest
        y.append(middle + height * 0.92 * ((b["track"] + 0.5) / deepest - 0.5))
        widths.append(share * (0.9 if deepest > 1 else 1.0))
    name = kind.replace("_", " ")
    if kind == "comm":
        name = f"communication, {theme.text(theme.axis_of(lane))}"
    elif lane != "compute":
        name = f"{name}, {theme.text(lane)}"
    marker: dict[str, Any] = {"color": theme.colour(kind, lane),
                              "line": {"width": 0.5, "color": "#FFFFFF"}}  # fmt: skip
    if kind == "wait":
        marker["pattern"] = {"shape": "/", "bgcolor": marker["color"], "fgcolor": theme.FAINT,
                             "size": 6, "solidity": 0.2}  # fmt: skip
    return {
        "name": name if kind != "wait" else "waiting",
        "orientation": "h",
        "base": [round(b["start"] * 1e3, 6) for b in boxes],
        "x": [round((b["end"] - b["start"]) * 1e3, 6) for b in boxes],
        "y": y,
        "width": widths,
        "marker": marker,
        "text": _labels(kind, boxes, window),
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "constraintext": "none",
        "textfont": {"size": 12, "color": "#000000"},
        "hovertext": [_hover(b) for b in boxes],
        "hovertemplate": "%{hovertext}<extra></extra>",
    }


def _labels(kind: str, boxes: list[dict[str, Any]], window: float) -> list[str]:
    """The micro-batch number, once per micro-batch: on its widest piece, if that is wide enough."""
    widest: dict[tuple[int, int, int, int], dict[str, Any]] = {}
    if kind in COMPUTE_KINDS:
        for b in boxes:
            key = (b["rank"], b["stage"], b["chunk"], b["microbatch"])
            if key not in widest or _duration(b) > _duration(widest[key]):
                widest[key] = b
    named = {id(b) for b in widest.values()
             if b["microbatch"] >= 0 and _duration(b) >= LABEL_SHARE * window}  # fmt: skip
    return [str(b["microbatch"]) if id(b) in named else "" for b in boxes]


def _duration(box: dict[str, Any]) -> float:
    return box["end"] - box["start"]


def _hover(b: dict[str, Any]) -> str:
    """What a box says when pointed at: times in ms, bytes as they were counted."""
    head = f"<b>{b['kind'].replace('_', ' ')}</b>"
    if b["microbatch"] >= 0:
        head += f", micro-batch {b['microbatch']}"
    lines = [head, f"rank {b['rank']}, {theme.text(b['lane'])}",
             f"{_duration(b) * 1e3:.3f} ms, from {b['start'] * 1e3:.3f} to "
             f"{b['end'] * 1e3:.3f} ms"]  # fmt: skip
    if b["kind"] not in ("wait", "comm"):
        lines.append(f"cost {b['cost'] * 1e3:.3f} ms of device time")
    for call in b["calls"]:
        lines.append(f"{call['op']} ({theme.text(call['phase'])}): {call['payload_bytes']:,} bytes "
                     f"in the buffer, {call['wire_bytes']:,} sent")  # fmt: skip
    return "<br>".join(lines)


def _finding(report: Report, step: int) -> str:
    """The one sentence that the picture proves."""
    part, name = metrics.shares(report, step), theme.plan_name(report.plan)
    duration = metrics.step_durations(report, warmup=True)[step]
    if duration <= 0:
        return name
    if part["communication"] > 0:
        hidden = 100 * part["hidden"] / part["communication"]
        waiting = 100 * part["wait"] / duration
        return (f"{name}: {hidden:.0f} % of communication hidden, "
                f"ranks wait {waiting:.0f} % of the step")  # fmt: skip
    return f"{name}: {100 * part['work'] / duration:.0f} % of the step is forward and backward"
