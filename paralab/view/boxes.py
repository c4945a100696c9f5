"""The boxes of a timeline: which spans are drawn, and on which row; timeline_rows.py draws them.

A `Section` is one step of one report, ready to draw: its boxes have times from the step's start.
The timeline of several reports has one section for each, under one another on one time scale.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from paralab.checks import choice, illegal, whole
from paralab.report import facts, metrics
from paralab.report.tables import Tables
from paralab.view import lanes, naming, theme
from paralab.view.lanes import Box

MAX_TRACKS = 4
LANE_HEIGHT = {"compute": 1.0, **dict.fromkeys(lanes.ROW_NAME, 0.55)}
OTHER_HEIGHT = 0.7
RANK_GAP, COMPUTE_GAP = 0.45, 0.14  # in rows; the second between ranks of one row each
HEAD = 1.15  # height of the heading above a section, in rows


@dataclass
class Section:
    """One step of one report. Times in seconds from the step's start; y grows downwards."""

    report: Tables
    label: str
    step: int
    ranks: list[int]
    boxes: list[Box]
    seconds: float  # from the first rank's start of the step to the last rank's end of it
    compute_only: bool = False  # whether only the compute lane is drawn, not all that have a box
    mark: float | None = None  # where the line at the end stands; None: at the step's end
    until: str = ""  # what ends at ``mark``, written before its time; "": the time alone
    idle: dict[int, float] = field(default_factory=dict)  # {rank: idle share}, for the margin
    head: str = ""  # the heading; "": label and clock
    rows: dict[tuple[int, str], tuple[float, float]] = field(default_factory=dict)  # y and height
    top: float = 0.0
    bottom: float = 0.0

    @property
    def duration(self) -> float:
        """Seconds of the step on the rank that takes longest; ranks may begin it at other times."""
        return metrics.step_durations(self.report, warmup=True)[self.step]

    @cached_property
    def shares(self) -> dict[str, float]:
        """Where the time of the step went: `metrics.shares`, which are means over ranks."""
        return metrics.shares(self.report, self.step)

    def share(self, part: str) -> str:
        """A part of ``shares`` as text, see `of_step`."""
        return of_step(self.shares[part], self.duration)

    @property
    def two_levels(self) -> bool:
        """Whether some calls cross nodes and others do not: then those that do are framed."""
        return len({call["level"] for b in self.boxes for call in b["calls"]}) > 1


def of_step(seconds: float, duration: float) -> str:
    """ "31 % of the step": these seconds of a step of this duration."""
    return f"{theme.share(seconds / (duration or 1.0))} of the step"


def section(
    report: Tables,
    *,
    label: str = "",
    step: int | None = None,
    ranks: Sequence[int] | None = None,
    compute_only: bool = False,
) -> Section:
    """One step (default: the typical one) as a section; ``compute_only``: whether only the boxes of
    the compute lane are drawn.

    The section also has what the links between memory tiers and the host's CPU do for another step
    during this one. A box is a span with times from the step's start and a track. Raises ValueError
    if the report has no such step or rank.
    """
    step, shown = chosen(report, step, ranks)
    spans, (zero, end) = report.spans[report.spans["rank"].isin(shown)], extent(report, step)
    meanwhile = spans["lane"].isin(lanes.LANES) & (spans["start"] < end) & (spans["end"] > zero)
    spans = spans[(spans["step"] == step) & (spans["end"] >= zero) | meanwhile]
    if compute_only:
        spans = spans[spans["lane"] == "compute"]
    result = Section(report, label, step, shown, [], end - zero, compute_only)
    calls, copies = (of_span(t[t["rank"].isin(shown)]) for t in (report.collectives, report.copies))
    result.boxes, rows = spans.to_dict("records"), defaultdict(list)
    for box in result.boxes:
        own_copies = copies[box["id"]]
        box |= {
            "calls": [c for c in calls[box["id"]] if c["step"] == step],
            "copies": own_copies,
            **{name: own_copies[0][name] if own_copies else "" for name in ("op", "category")},
            "traced": report.model is None,
            "label": label,
            "late": box["step"] != step,
            "start": box["start"] - zero,
            "end": box["end"] - zero,
        }
        rows[box["rank"], lanes.row(box)].append(box)
    for row_boxes in rows.values():
        tracks = lanes.tracks([(b["start"], b["end"]) for b in row_boxes], at_most=MAX_TRACKS)
        for box, track in zip(row_boxes, tracks, strict=True):
            box["track"] = track
    return result


def chosen(report: Tables, step: int | None, ranks: Sequence[int] | None) -> tuple[int, list[int]]:
    """The given step and ranks, sorted; for None the typical step and all ranks of the report.

    Raises ValueError if the report has no such step or rank, or no step at all.
    """
    step = metrics.chosen_step(report, step)
    reported = facts.reported_ranks(report)
    if ranks is not None and not (isinstance(ranks, Collection) and len(ranks)):
        raise illegal("ranks", ranks, "not a list of ranks", ", ".join(map(str, reported)))
    wanted = reported if ranks is None else [whole("ranks", r, at_least=0) for r in ranks]
    return step, sorted({choice("ranks", rank, tuple(reported)) for rank in wanted})


def extent(report: Tables, step: int) -> tuple[float, float]:
    """When the first rank begins the step, and when the last one ends it, on the report's clock."""
    steps = report.steps[report.steps["step"] == step]
    return float(steps["start"].min()), float(steps["end"].max())


def of_span(table: Any) -> dict[int, list[Box]]:
    """{id of a span: the rows of the table, collectives or copies, that belong to it, or []}."""
    rows_of = defaultdict(list)
    for row in table.to_dict("records"):
        rows_of[row["span"]].append(row)
    return rows_of


def place(sections: Sequence[Section], *, heads: bool) -> tuple[list[tuple[float, str]], float]:
    """Give every (rank, row) of every section its place in the picture; ``heads``: whether sections
    have headings. Returns (y, label) ticks and the y at which the last row ends.

    Every rank has a row for every lane, of the same height, so that ranks are easy to compare.
    """
    ticks, y = [], 0.0
    for section in sections:
        section.top = y
        y += HEAD if heads else 0.0
        present = {lanes.row(b) for b in section.boxes} | {"compute"}
        rows = ["compute"] if section.compute_only else sorted(present, key=lanes.order)
        gap = COMPUTE_GAP if section.compute_only else RANK_GAP
        for rank in section.ranks:
            for row in rows:
                height = LANE_HEIGHT.get(row, OTHER_HEIGHT)
                section.rows[rank, row] = (y + height / 2, height)
                name = f"<b>rank {rank}</b>" if row == "compute" else lanes.row_name(row)
                ticks.append((y + height / 2, name))
                y += height
            y += gap
        section.bottom = y - gap
        y = section.bottom + RANK_GAP
    return ticks, y - RANK_GAP + 0.2


def table(sections: Sequence[Section]) -> tuple[str, list[Box]]:
    """(columns, rows) of all boxes; start and end in seconds, and op, category and bytes are those
    of copies between tiers.
    """
    columns = "report clock rank lane kind stage microbatch start end wire_bytes op category bytes"
    rows = []
    for section in sections:
        label = section.label or naming.subject(section.report)
        for box in section.boxes:
            sent = sum(call["wire_bytes"] for call in box["calls"])
            copied = sum(copy["bytes"] for copy in box["copies"])
            more = {"report": label, "clock": section.report.clock}
            rows.append({**box, **more, "wire_bytes": sent, "bytes": copied})
    return columns, rows
