"""The boxes of a timeline: which spans, and on which row; box_traces.py draws them.

A `Section` is one report's step, ready to draw: its boxes with times from the step's start. The
timeline of one report has one section; several reports stand under one another, on one time scale.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from paralab.checks import choice, illegal
from paralab.report import about, metrics
from paralab.report.tables import Tables
from paralab.view import lanes, naming, theme

Box = dict[str, Any]

MAX_TRACKS = 4
LANE_HEIGHT = {"compute": 1.0, **dict.fromkeys(lanes.ROW_NAME, 0.55)}
OTHER_HEIGHT = 0.7
RANK_GAP = 0.45
HEAD = 1.15  # rows of room for the line above a section


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
    until: str = ""  # what ends there, where a number next to the picture is of the whole step
    total: int = 0  # boxes there are; maybe not all of them are here
    idle: dict[int, float] = field(default_factory=dict)  # share of a rank's time, for the margin
    head: str = ""  # in place of label and clock
    rows: dict[tuple[int, str], tuple[float, float]] = field(default_factory=dict)
    top: float = 0.0
    bottom: float = 0.0

    @property
    def duration(self) -> float:
        """Of the step: that of the rank that takes longest, which may begin after another one."""
        return metrics.step_durations(self.report, warmup=True)[self.step]

    @property
    def two_levels(self) -> bool:
        """Whether some of its messages cross nodes and others do not: then it shows which."""
        return len({call["level"] for b in self.boxes for call in b["calls"]}) > 1


def section(
    report: Tables,
    *,
    label: str = "",
    step: int | None = None,
    ranks: Sequence[int] | None = None,
    only: tuple[str, ...] | None = None,
    most: int | None = None,
) -> Section:
    """The step that was asked for, of the lanes ``only`` (None: all), the first ``most`` boxes.

    What links between memory tiers and the host do meanwhile for another step belongs to it too.
    Every box is a span, with times from the step's start and a track. Raises ValueError if the
    report has no such step or rank.
    """
    step, shown = chosen(report, step, ranks)
    steps, spans = report.steps[report.steps["step"] == step], report.spans
    spans = spans[spans["rank"].isin(shown)]
    zero, end = float(steps["start"].min()), float(steps["end"].max())
    meanwhile = spans["lane"].isin(lanes.LANES) & (spans["start"] < end) & (spans["end"] > zero)
    spans = spans[(spans["step"] == step) & (spans["end"] >= zero) | meanwhile]
    if only is not None:
        spans = spans[spans["lane"].isin(only)]
    one = Section(report, label, step, shown, [], end - zero, lanes=only, total=len(spans))
    if most is not None and one.total > most:
        spans = spans.sort_values(["start", "id"]).head(most)
    calls, copies = (of_span(t[t["rank"].isin(shown)]) for t in (report.collectives, report.copies))
    one.boxes, rows = spans.to_dict("records"), defaultdict(list)
    for box in one.boxes:
        box |= {
            "calls": [c for c in calls[box["id"]] if c["step"] == step],
            "copies": copies[box["id"]],
            "traced": report.model is None,
            "label": label,
            "late": box["step"] != step,
            "start": box["start"] - zero,
            "end": box["end"] - zero,
        }
        rows[box["rank"], lanes.row(box)].append(box)
    for own in rows.values():
        found = lanes.tracks([(b["start"], b["end"]) for b in own], at_most=MAX_TRACKS)
        for box, track in zip(own, found, strict=True):
            box["track"] = track
    return one


def chosen(report: Tables, step: int | None, ranks: Sequence[int] | None) -> tuple[int, list[int]]:
    """The step and the ranks that were asked for, or the typical step and all ranks there are.

    Raises ValueError if the report has no such step or rank, or no step at all.
    """
    step = metrics.chosen_step(report, step)
    known = about.reported_ranks(report)
    if ranks is not None and not (isinstance(ranks, Collection) and len(ranks)):
        raise illegal("ranks", ranks, "not a list of ranks", ", ".join(map(str, known)))
    asked = known if ranks is None else [choice("ranks", r, tuple(known)) for r in ranks]
    return step, sorted(set(asked))


def of_span(table: Any) -> dict[int, list[dict[str, Any]]]:
    """The rows of collectives or copies by the span that carried them; none for any other."""
    found = defaultdict(list)
    for row in table.to_dict("records"):
        found[row["span"]].append(row)
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


def table(sections: Sequence[Section]) -> tuple[str, list[Box]]:
    """Every box: report, clock, rank, lane, kind, microbatch, start, end (seconds), wire_bytes.

    Of pipelines the stage too; with copies between tiers op, category and bytes of each.
    """
    staged = ("stage",) if any(one.report.plan.pp > 1 for one in sections) else ()
    copied = any(b["copies"] for one in sections for b in one.boxes)
    columns = ["report", "clock", "rank", "lane", "kind", *staged, "microbatch", "start", "end"]
    columns += ["wire_bytes", *["op", "category", "bytes"] * copied]
    rows = []
    for one in sections:
        label = one.label or naming.subject(one.report)
        for b in one.boxes:
            copies = b["copies"] or [{"op": "", "category": "", "bytes": 0}]
            sent = sum(c["wire_bytes"] for c in b["calls"])
            more = {"op": copies[0]["op"], "category": copies[0]["category"]}
            more |= {"report": label, "clock": one.report.clock, "wire_bytes": sent}
            rows.append({**b, **more, "bytes": sum(copy["bytes"] for copy in copies)})
    return " ".join(columns), rows
