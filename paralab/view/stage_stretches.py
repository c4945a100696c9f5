"""How each pipeline stage spends a step that has more boxes than a screen has pixels.

The compute of a rank is cut into stretches: wherever it is idle for long, at its first backward,
after its last forward, and at the optimizer. Inside a stretch the same actions repeat, so it is
drawn as one column, in which the height of each colour is its share of the time: forward, backward,
waiting. Warm-up and cool-down of a pipeline are then as easy to see as with eight boxes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from paralab.report import facts, metrics
from paralab.report.intervals import Interval, union
from paralab.report.tables import COMPUTE_KINDS, KINDS, Tables
from paralab.view import boxes, lanes, naming, pipeline, theme
from paralab.view.chart import Chart, figure
from paralab.view.marks import Part, column
from paralab.view.marks import boxes as mark
from paralab.view.mesh_grid import spread
from paralab.view.rank_mesh import row_name

MAX_ROWS = 8
LONG = 0.015  # share of the step: a rank that is idle for longer starts a new stretch
SHOWN = 2e-3  # share of a stretch or of the step: anything shorter would be thinner than a pixel
HEIGHT = 0.84  # of the columns in a row, where no messages are drawn beneath them
MESSAGES = 0.18  # height of the messages
LANES = ("comm:dp", "comm:replica", "comm:secondary")  # whose calls are drawn as messages
IN_SECONDS = 10.0  # the axis of a longer step is in seconds, not milliseconds
ORDER = (*(kind for kind in KINDS if kind not in ("comm", "wait")), "within", "wait")
WITHIN = (  # what ranks wait for inside a forward or a backward, and under which plans
    ("messages of tp", lambda plan: plan.tp > 1),
    ("gathers of dp", lambda plan: plan.zero_stage == 3 and plan.dp > 1),
    ("loads from other tiers", lambda plan: plan.tiers is not None),
    # A backward begins with its recomputation and waits for its gradient only after that.
    ("gradients", lambda plan: plan.pp > 1 and plan.recompute == "full"),
)
WAITS = {"wait": "waiting between actions", "within": "waiting inside actions"}
PHASE = ("before the first backward", "forward and backward", "after the last forward")
PHASE += ("outside forward and backward",)  # before the first forward or after the last backward


class Stretch(NamedTuple):
    """A stretch of one rank's step. Times are seconds from the step's start.

    parts  {kind: seconds}; "within" is the time inside actions in which nothing is computed
           (`WITHIN`), "wait" the time between actions
    """

    rank: int
    phase: str
    start: float
    end: float
    parts: dict[str, float]


def stage_time(report: Tables) -> Chart:
    """The step of median duration of every stage as stretches, each divided into what its time was
    spent on. There is a row for the first rank of each stage, or for each rank if there is one
    stage; of more than eight, eight are drawn, evenly spaced.

    Beneath each row are the rank's calls of data parallelism. ``.table`` has a row for every
    stretch, in seconds. Raises ValueError if the report has no step.
    """
    facts.needs_tables(report)
    plan, (step, ranks) = report.plan, boxes.chosen(report, None, None)
    first = [r for r in ranks if plan.pp == 1 or not any(plan.place(r)[1:])]
    shown = spread(first, MAX_ROWS)
    stretches, calls, seconds = _read(report, step, shown)
    rows = {rank: float(i) for i, rank in enumerate(shown)}
    per, unit = (1.0, "s") if seconds >= IN_SECONDS else (1e3, "ms")
    remarks = [f"step {step}", "height of a colour: its share of the time"]
    if len(shown) < report.world_size:
        remarks.append(f"{len(shown)} of {report.world_size:,} ranks drawn")
    causes = [cause for cause, holds in WITHIN if holds(plan)]
    if any(stretch.parts.get("within", 0.0) > SHOWN * seconds for stretch in stretches):
        remarks.append(f"inside actions ranks wait for {' and '.join(causes)}")
    high = HEIGHT - MESSAGES if calls else HEIGHT
    names = [row_name(plan, plan.place(r).pp) if plan.pp > 1 else f"rank {r}" for r in shown]
    ticks = [(rows[r] + high / 2, f"<b>{name}</b>") for r, name in zip(shown, names, strict=True)]
    fig = figure(
        _finding(report, step),
        naming.clock_line(report, *remarks),
        height=int(220 + 36 * len(shown)),
        barmode="overlay",
        margin={"r": 68},
        xaxis=mark.time_axis(f"time from the start of step {step} ({unit})", seconds * per),
        yaxis=mark.rows_axis(ticks, len(shown), -0.1),
    )
    boxed: dict[str, list[tuple]] = {}
    for stretch in stretches:
        length, top = stretch.end - stretch.start, rows[stretch.rank]
        for kind in ORDER if length >= SHOWN * seconds else ():
            if (share := stretch.parts.get(kind, 0.0) / length) >= SHOWN:
                at = round(stretch.start * per, 6), round(length * per, 6), top + high * share / 2
                boxed.setdefault(kind, []).append((*at, high * share, "", _hover(stretch)))
                top += high * share
    drawn = [_columns(kind, boxed[kind], causes, plan.pp > 1) for kind in ORDER if kind in boxed]
    if calls:
        drawn.append(_messages(calls, rows, per))
    idle = metrics.idle_shares(report, step) if plan.pp > 1 else {}
    shares = [(rows[r] + high / 2, theme.percent(idle[r])) for r in shown if r in idle]
    return fig.draw(drawn, column("idle", shares) if idle else ()).tabled(
        lambda: (
            " ".join(["rank phase start end", *ORDER]),
            [(*one[:4], *(one.parts.get(kind, 0.0) for kind in ORDER)) for one in stretches],
        ),
    )


# ---- reading -------------------------------------------------------------------------------------
def _read(
    report: Tables, step: int, ranks: Sequence[int]
) -> tuple[list[Stretch], dict[int, list[Interval]], float]:
    """The stretches; {rank: intervals in which calls of dp were in flight}; seconds of the step."""
    spans, (zero, end) = report.spans, boxes.extent(report, step)
    spans = spans[spans["rank"].isin(ranks) & (spans["step"] == step)]
    work = spans[(spans["lane"] == "compute") & (spans["kind"] != "wait")]
    length = work["end"] - work["start"]
    computed = np.minimum(metrics.seconds_of(report, work), length)
    work = work.assign(start=work["start"] - zero, length=length, own=computed)
    work = work.sort_values("start", kind="stable")
    stretches = [s for r in ranks for s in _stretches_of(r, work[work["rank"] == r], end - zero)]
    calls = {
        rank: union((group[["start", "end"]] - zero).itertuples(index=False, name=None))
        for rank, group in spans[spans["lane"].isin(LANES)].groupby("rank")
    }
    return stretches, calls, end - zero


def _stretches_of(rank: int, work: Any, seconds: float) -> list[Stretch]:
    """The stretches of one rank, including those in which it is idle.

    work     its spans by start, with the columns length and own, the seconds that it computes
    seconds  of the step
    """
    kind, start, length, computed = (work[c].to_numpy() for c in ("kind", "start", "length", "own"))
    n, end = len(kind), start + length
    phase = np.full(n, len(PHASE) - 1)
    forward = np.flatnonzero(kind == "forward")
    backward = np.flatnonzero(np.isin(kind, COMPUTE_KINDS) & (kind != "forward"))
    if len(forward) and len(backward):
        place = np.arange(forward[0], max(forward[-1], backward[-1]) + 1)
        phase[place] = (place >= backward[0]).astype(int) + (place > forward[-1])
    idle = start - np.r_[0.0, end[:-1]]
    idle[np.abs(idle) < 1e-9 * seconds] = 0.0  # rounding errors of sums
    cut = (idle > LONG * seconds) | (np.diff(phase, prepend=-1) != 0)
    firsts = np.flatnonzero(cut).tolist()
    stretches, until = [], 0.0

    def idle_until(begin: float) -> list[Stretch]:
        return [Stretch(rank, "wait", until, begin, {"wait": begin - until})] * (begin > until)

    for low, high in zip(firsts, [*firsts[1:], n], strict=True):
        begin, stop = float(start[low]), float(end[high - 1])
        kinds, own = kind[low:high], computed[low:high]
        parts = {k: float(own[kinds == k].sum()) for k in ORDER if k in kinds}
        parts["within"] = float((length[low:high] - own).sum())
        parts["wait"] = max(0.0, stop - begin - sum(parts.values()))
        stretches += [*idle_until(begin), Stretch(rank, PHASE[phase[low]], begin, stop, parts)]
        until = stop
    return stretches + idle_until(seconds)


# ---- drawing -------------------------------------------------------------------------------------
def _finding(report: Tables, step: int) -> str:
    if report.plan.pp > 1:
        return pipeline.bubble_of(naming.subject(report), metrics.step_bubble(report, step))
    name = theme.text(naming.subject(report))
    work = metrics.shares(report, step)["work"]
    duration = metrics.step_durations(report, warmup=True)[step]
    return f"{name}: forward and backward take {boxes.of_step(work, duration)}"


def _columns(kind: str, rows: list[tuple], causes: list[str], several: bool) -> Part:
    """The boxes of one kind; ``several``: whether there are stages, which wait for each other."""
    name, fill = lanes.style(kind, "compute")
    if kind == "within" or (kind == "wait" and several and causes):
        name = WAITS[kind]
    if kind == "within" and causes == [WITHIN[0][0]]:
        name, fill = f"{name}: {causes[0]}", theme.axis_colour("tp")
    trace = mark.boxes(name, fill, rows, hatched=kind == "wait", edge=0)
    trace["marker"]["cornerradius"] = 0
    return trace


def _messages(calls: dict[int, list[Interval]], rows: dict[int, float], per: float) -> Part:
    name, fill = lanes.style("comm", LANES[0])
    flat = []
    for rank, intervals in calls.items():
        y = rows[rank] + HEIGHT - MESSAGES / 2
        for low, high in intervals:
            text = f"<b>{name}</b><br>rank {rank}, {theme.in_seconds(high - low)}"
            box = round(low * per, 6), round((high - low) * per, 6), y, MESSAGES * 0.8
            flat.append((*box, "", text))
    return mark.boxes(name, fill, flat, edge=0)


def _hover(stretch: Stretch) -> str:
    length = stretch.end - stretch.start
    times = [theme.in_seconds(seconds) for seconds in (length, stretch.start, stretch.end)]
    lines = [f"<b>rank {stretch.rank}</b>, {stretch.phase.replace('wait', 'idle')}"]
    lines.append(f"{times[0]}, from {times[1]} to {times[2]}")
    for kind, seconds in stretch.parts.items():
        if len(stretch.parts) > 1 and seconds >= SHOWN * length:
            name = WAITS.get(kind, naming.kind_name(kind))
            lines.append(f"{name}: {theme.percent(seconds / length)}")
    return "<br>".join(lines)
