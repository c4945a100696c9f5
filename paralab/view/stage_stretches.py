"""What each pipeline stage does with its step, where there are more boxes than a screen has pixels.

A rank's compute is cut into stretches: where it is idle for long, at its first backward, after
its last forward, and at the optimizer. Inside a stretch actions repeat each other, so it is one
column, in which the height of each colour is its share of the time: forward, backward, waiting. The
fill and the drain of a pipeline are then as plain as with eight boxes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from paralab.report import about, metrics
from paralab.report.intervals import Interval, union
from paralab.report.tables import COMPUTE_KINDS, KINDS, Tables
from paralab.view import box_traces, boxes, naming, pipeline, theme
from paralab.view.chart import Chart, figure
from paralab.view.marks import boxes as mark
from paralab.view.marks import column
from paralab.view.rank_mesh import row_name
from paralab.view.sampling import spread
from paralab.view.timeline import of_step

MAX_ROWS = 8
LONG = 0.015  # of a step: a rank that is idle that long is seen to be
SHOWN = 2e-3  # of a stretch or of a step: less than that has no pixel
HEIGHT = 0.84  # of a row, or less where its messages stand beneath
MESSAGES = 0.18
LANES = ("comm:dp", "comm:replica", "comm:secondary")  # whose calls those are
IN_SECONDS = 10.0  # a step from which on the axis is in seconds
ORDER = (*(kind for kind in KINDS if kind not in ("comm", "wait")), "within", "wait")
OTHER = 3  # of the phases
WITHIN = (  # what ranks wait for inside a forward or a backward, and under which plans
    ("messages of tp", lambda plan: plan.tp > 1),
    ("gathers of dp", lambda plan: plan.zero_stage == 3 and plan.dp > 1),
    ("loads from other tiers", lambda plan: plan.tiers is not None),
    # A backward begins with what it computes again, and needs its gradient only after that.
    ("gradients", lambda plan: plan.pp > 1 and plan.recompute == "full"),
)
WAITS = {"wait": "waiting between actions", "within": "waiting in actions"}
PHASE = ("before the first backward", "forward and backward", "after the last forward", "then")


class Stretch(NamedTuple):
    """Of one rank. Times in seconds from the step's start; ``parts`` are seconds by kind.

    "within" is the time inside actions in which nothing is computed (`WITHIN`), "wait" that outside
    actions.
    """

    rank: int
    phase: str
    start: float
    end: float
    parts: dict[str, float]


def stage_time(
    report: Tables, *, step: int | None = None, ranks: Sequence[int] | None = None
) -> Chart:
    """A step of every stage as stretches, each divided by what its time went to.

    step   default: the step of median duration
    ranks  default: of each stage the first rank, of one stage all; of many some, evenly spaced

    Beneath a row are the rank's calls of data parallelism. ``.table`` has a row for every stretch,
    in seconds. Raises ValueError if the report has no such step or rank, or no step at all.
    """
    about.needs_tables(report)
    step, shown = boxes.chosen(report, step, ranks)
    if ranks is None:
        place = report.plan.place
        first = [r for r in shown if report.plan.pp == 1 or not any(place(r)[1:])]
        shown = spread(first, MAX_ROWS)
    found, calls, seconds = _read(report, step, shown)
    plan, rows = report.plan, {rank: float(i) for i, rank in enumerate(shown)}
    per, unit = (1.0, "s") if seconds >= IN_SECONDS else (1e3, "ms")
    said = [f"step {step}", "height of a colour: its share of the time"]
    if len(shown) < report.world_size:
        said.append(f"{len(shown)} of {report.world_size:,} ranks")
    if any(one.parts.get("within", 0.0) > SHOWN * seconds for one in found):
        said.append(f"in actions ranks wait for {' and '.join(_causes(report))}")
    high = HEIGHT - MESSAGES if calls else HEIGHT
    names = [row_name(plan, plan.place(r).pp) if plan.pp > 1 else f"rank {r}" for r in shown]
    ticks = [(rows[r] + high / 2, f"<b>{name}</b>") for r, name in zip(shown, names, strict=True)]
    fig = figure(
        _finding(report, step),
        naming.clock_line(report, *said),
        height=int(220 + 36 * len(shown)),
        barmode="overlay",
        margin={"r": 68},
        xaxis=mark.time_axis(f"time from the start of step {step} ({unit})", seconds * per),
        yaxis=mark.rows_axis(ticks, len(shown), -0.1),
    )
    boxed: dict[str, list[tuple]] = {}
    for one in found:
        length, top = one.end - one.start, rows[one.rank]
        for kind in ORDER if length >= SHOWN * seconds else ():
            share = one.parts.get(kind, 0.0) / length
            if share >= SHOWN:
                at = (round(one.start * per, 6), round(length * per, 6), top + high * share / 2)
                boxed.setdefault(kind, []).append((*at, high * share, "", _hover(one)))
                top += high * share
    drawn = [mark.boxes(boxed[kind], _style(report, kind)) for kind in ORDER if kind in boxed]
    if calls:
        drawn.append(_messages(calls, rows, per))
    idle = metrics.idle_shares(report, step) if plan.pp > 1 else {}
    shares = [(rows[r] + high / 2, theme.percent(idle[r])) for r in shown if r in idle]
    kinds = [kind for kind in ORDER if any(kind in one.parts for one in found)]
    said = f"{len(found)} stretches on {len(shown)} rank{'s' * (len(shown) != 1)}"
    return fig.draw(drawn, column("idle", shares) if idle else ()).explained(
        f"stage time of {naming.subject(report)}, {report.clock}: {said}",
        lambda: (
            " ".join(["rank phase start end", *kinds]),
            [(*one[:4], *(one.parts.get(kind, 0.0) for kind in kinds)) for one in found],
        ),
    )


# ---- reading -------------------------------------------------------------------------------------
def _read(
    report: Tables, step: int, ranks: Sequence[int]
) -> tuple[list[Stretch], dict[int, list[Interval]], float]:
    """Stretches, when calls of dp were in flight by rank, and the seconds of the step."""
    steps = report.steps[report.steps["step"] == step]
    zero, end = float(steps["start"].min()), float(steps["end"].max())
    spans = report.spans
    spans = spans[spans["rank"].isin(ranks) & (spans["step"] == step)]
    work = spans[(spans["lane"] == "compute") & (spans["kind"] != "wait")]
    length = work["end"] - work["start"]
    own = np.minimum(metrics.seconds_of(report, work), length)
    work = work.assign(start=work["start"] - zero, length=length, own=own)
    work = work.sort_values("start", kind="stable")
    found = [s for r in ranks for s in _of_rank(r, work[work["rank"] == r], end - zero)]
    calls = {
        rank: union((mine[["start", "end"]] - zero).itertuples(index=False, name=None))
        for rank, mine in spans[spans["lane"].isin(LANES)].groupby("rank")
    }
    return found, calls, end - zero


def _of_rank(rank: int, work: Any, seconds: float) -> list[Stretch]:
    """One rank's stretches, those in which it is idle among them. work: its spans by start, with
    their lengths, and how much of that it computes.
    """
    kind, start, length, own = (work[c].to_numpy() for c in ("kind", "start", "length", "own"))
    n, end = len(kind), start + length
    phase = np.full(n, OTHER)
    trains = np.isin(kind, COMPUTE_KINDS)
    forward = np.flatnonzero(kind == "forward")
    backward = np.flatnonzero(trains & (kind != "forward"))
    if len(forward) and len(backward):
        train = slice(forward[0], max(forward[-1], backward[-1]) + 1)
        place = np.arange(n)
        among = (place >= backward[0]).astype(int) + (place > forward[-1])
        phase[train] = among[train]
    idle = start - np.r_[0.0, end[:-1]]
    idle[np.abs(idle) < 1e-9 * seconds] = 0.0  # sums of floats leave cracks
    cut = (idle > LONG * seconds) | (np.diff(phase, prepend=-1) != 0)
    firsts = np.flatnonzero(cut).tolist()
    found, now = [], 0.0
    for low, high in zip(firsts, [*firsts[1:], n], strict=True):
        begin, stop = float(start[low]), float(end[high - 1])
        if begin > now:
            found.append(Stretch(rank, "wait", now, begin, {"wait": begin - now}))
        mine = slice(low, high)
        parts = {k: float(own[mine][kind[mine] == k].sum()) for k in ORDER if k in kind[mine]}
        parts["within"] = float((length[mine] - own[mine]).sum())
        parts["wait"] = max(0.0, stop - begin - sum(parts.values()))
        found.append(Stretch(rank, PHASE[phase[low]], begin, stop, parts))
        now = stop
    if seconds > now:
        found.append(Stretch(rank, "wait", now, seconds, {"wait": seconds - now}))
    return found


# ---- drawing -------------------------------------------------------------------------------------
def _finding(report: Tables, step: int) -> str:
    if report.plan.pp > 1:
        return pipeline.finding(report, metrics.step_bubble(report, step))
    name = theme.text(naming.subject(report))
    return f"{name}: {of_step(report, step, 'work')} is forward and backward"


def _style(report: Tables, kind: str) -> dict[str, Any]:
    name, fill = box_traces.name_and_fill(kind, "compute")
    causes = _causes(report)
    if kind == "within" or (kind == "wait" and report.plan.pp > 1 and causes):
        name = WAITS[kind]
    if kind == "within" and causes == [WITHIN[0][0]]:
        name, fill = f"{name}: {causes[0]}", theme.axis_colour("tp")
    style = mark.look(name, fill, hatched=kind == "wait", edge=0)
    style["marker"]["cornerradius"] = 0
    return style


def _causes(report: Tables) -> list[str]:
    return [cause for cause, holds in WITHIN if holds(report.plan)]


def _messages(
    calls: dict[int, list[Interval]], rows: dict[int, float], per: float
) -> dict[str, Any]:
    name, fill = box_traces.name_and_fill("comm", LANES[0])
    flat = []
    for rank, low, high in ((rank, *one) for rank, some in calls.items() for one in some):
        said = f"<b>{name}</b><br>rank {rank}, {theme.scaled(high - low, 's')}"
        at = round(low * per, 6), round((high - low) * per, 6), rows[rank] + HEIGHT - MESSAGES / 2
        flat.append((*at, MESSAGES * 0.8, "", said))
    return mark.boxes(flat, mark.look(name, fill, edge=0))


def _hover(one: Stretch) -> str:
    length = one.end - one.start
    times = [theme.scaled(seconds, "s") for seconds in (length, one.start, one.end)]
    lines = [f"<b>rank {one.rank}</b>, {one.phase.replace('wait', 'nothing to do')}"]
    lines.append(f"{times[0]}, from {times[1]} to {times[2]}")
    for kind, seconds in one.parts.items():
        if len(one.parts) > 1 and seconds >= SHOWN * length:
            name = WAITS.get(kind, kind.replace("_", " "))
            lines.append(f"{name}: {theme.percent(seconds / length)}")
    return "<br>".join(lines)
