"""What each pipeline stage does with its step, where there are more boxes than a screen has pixels.

A rank's compute is cut into stretches: where it stands still for long, at its first backward, after
its last forward, and at the optimizer. Inside a stretch actions repeat each other, so it is one
column, whose height is shared out as its time is: so much of it forward, so much backward, so much
of it nobody computed. The fill and the drain of a pipeline are then as plain as with eight boxes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from paralab.report import metrics
from paralab.report.tables import COMPUTE_KINDS, KINDS
from paralab.view import boxes, naming, pipeline, theme, timeline_rows
from paralab.view.rank_mesh import row_name
from paralab.view.sampling import spread

if TYPE_CHECKING:
    import pandas as pd

    from paralab.report.tables import Tables
    from paralab.view.chart import Chart

MAX_ROWS = 8
LONG = 0.015  # of a step: a rank that stands still that long is seen to
SHOWN = 2e-3  # of a stretch or of a step: less than that has no pixel
HEIGHT = 0.84  # of a row, or less where its messages stand beneath
MESSAGES = 0.18
LANE = "comm:dp"  # whose calls those are
IN_SECONDS = 10.0  # a step from which on the axis is in seconds
ORDER = (*(kind for kind in KINDS if kind not in ("comm", "wait")), "within", "wait")
OTHER = 3  # of the phases
BARS = ("base", "x", "y", "width", "hovertext")
PHASE = ("before the first backward", "forward and backward", "after the last forward", "then")


class Stretch(NamedTuple):
    """Of one rank. Times in seconds from the step's start; ``parts`` are seconds by kind.

    "within" is what actions took and nobody computed in: calls of tp, gathers, loads. "wait" is
    what no action took.
    """

    rank: int
    phase: str
    start: float
    end: float
    parts: dict[str, float]


def stage_time(
    report: Tables, *, step: int | None = None, ranks: Sequence[int] | None = None
) -> Chart:
    """A step of every stage as stretches, each shared out by what its time went to.

    step   default: the step of median duration
    ranks  default: of each stage the first rank, of one stage all; of many some, evenly spaced

    Beneath a row are the rank's calls of data parallelism. ``.table`` has a row for every stretch,
    in seconds. Raises ValueError if the report has no such step or rank, or no step at all.
    """
    step, shown = boxes.chosen(report, step, ranks)
    if ranks is None:
        place = report.plan.place
        first = [r for r in shown if report.plan.pp == 1 or not any(place(r)[1:])]
        shown = spread(first, MAX_ROWS)
    found, calls, seconds = _read(report, step, shown)
    return _drawn(report, step, shown, found, calls, seconds)


# ---- reading -------------------------------------------------------------------------------------
def _read(
    report: Tables, step: int, ranks: Sequence[int]
) -> tuple[list[Stretch], dict[int, list[metrics.Interval]], float]:
    """Stretches, when calls of dp were under way by rank, and the seconds of the step."""
    steps = report.steps[report.steps["step"] == step]
    zero, end = float(steps["start"].min()), float(steps["end"].max())
    spans = report.spans
    spans = spans[spans["rank"].isin(ranks) & (spans["step"] == step)]
    work = spans[(spans["lane"] == "compute") & (spans["kind"] != "wait")]
    length = (work["end"] - work["start"]).to_numpy()
    own = np.minimum(metrics.seconds_of(report, work).to_numpy(), length)
    rank, kind = work["rank"].to_numpy(), work["kind"].to_numpy()
    start = work["start"].to_numpy() - zero
    found: list[Stretch] = []
    for one in ranks:
        here = np.flatnonzero(rank == one)
        here = here[np.argsort(start[here], kind="stable")]
        found += _of_rank(one, kind[here], start[here], length[here], own[here], end - zero)
    sent = spans[spans["lane"] == LANE]
    calls: dict[int, list[metrics.Interval]] = {}
    for one, low, high in zip(*(sent[c].tolist() for c in ("rank", "start", "end")), strict=True):
        calls.setdefault(one, []).append((low - zero, high - zero))
    joined = {one: metrics.union(some) for one, some in calls.items()}
    return found, joined, end - zero


def _of_rank(
    rank: int,
    kind: np.ndarray,
    start: np.ndarray,
    length: np.ndarray,
    own: np.ndarray,
    seconds: float,
) -> list[Stretch]:
    """One rank's stretches, those among them in which it stands still."""
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
def _drawn(
    report: Tables,
    step: int,
    ranks: Sequence[int],
    found: list[Stretch],
    calls: dict[int, list[metrics.Interval]],
    seconds: float,
) -> Chart:
    plan = report.plan
    per, unit = (1.0, "s") if seconds >= IN_SECONDS else (1e3, "ms")
    finding, said = _finding(report, step), [f"step {step}", "height: share of time"]
    if len(ranks) < report.world_size:
        said.append(f"{len(ranks)} of {report.world_size} ranks")
    rows = {rank: float(i) for i, rank in enumerate(ranks)}
    high = HEIGHT - MESSAGES if calls else HEIGHT
    names = [
        f"<b>{row_name(plan, plan.place(r).pp) if plan.pp > 1 else f'rank {r}'}</b>" for r in ranks
    ]
    fig = theme.figure(
        finding,
        naming.clock_line(report, *said),
        height=int(220 + 36 * len(ranks)),
        barmode="overlay",
        margin={"r": 68},
        legend={"orientation": "h", "y": 1, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
        xaxis={
            "title": {"text": f"time from the start of step {step} ({unit})"},
            "range": [-0.005 * seconds * per, 1.005 * seconds * per],
            "tickformat": "~g",
        },
        yaxis={
            "tickvals": [rows[r] + high / 2 for r in ranks],
            "ticktext": names,
            "range": [len(ranks), -0.1],
            "showgrid": False,
        },
    )
    traces: dict[str, dict[str, list[Any]]] = {}
    for one in found:
        whole_of, top = one.end - one.start, rows[one.rank]
        if whole_of < SHOWN * seconds:
            continue
        hover = _hover(one)
        for kind in ORDER:
            share = one.parts.get(kind, 0.0) / whole_of
            if share < SHOWN:
                continue
            bars = traces.setdefault(kind, {name: [] for name in BARS})
            bars["base"].append(round(one.start * per, 6))
            bars["x"].append(round(whole_of * per, 6))
            bars["y"].append(top + high * share / 2)
            bars["width"].append(high * share)
            bars["hovertext"].append(hover)
            top += high * share
    drawn = [_trace(report, kind, traces[kind]) for kind in ORDER if kind in traces]
    if calls:
        drawn.append(_messages(calls, rows, per))
    fig.add_traces(drawn)
    idle = metrics.idle_shares(report, step) if plan.pp > 1 else {}
    if idle:
        shares = [(rows[r] + high / 2, idle[r]) for r in ranks if r in idle]
        fig.annotated(timeline_rows.idle_notes(shares, None))
    return fig.explained(
        f"stage time of {naming.subject(report)}, {report.clock}: {len(found)} stretches on "
        f"{len(ranks)} rank{'s' * (len(ranks) != 1)}",
        lambda: _table(found),
    )


def _finding(report: Tables, step: int) -> str:
    if report.plan.pp > 1:
        return pipeline.finding(report, metrics.step_bubble(report, step))
    name = theme.text(naming.subject(report))
    work = metrics.shares(report, step)["work"]
    length = metrics.step_durations(report, warmup=True)[step] or 1.0
    return f"{name}: {100 * work / length:.0f} % of the step is forward and backward"


def _trace(report: Tables, kind: str, bars: dict[str, list[Any]]) -> dict[str, Any]:
    style = boxes.bar_style(kind, "compute")
    name, marker = style["name"], style["marker"] | {"cornerradius": 0, "line": {"width": 0}}
    if kind == "wait" and report.plan.pp > 1:
        name = "waiting: the bubble"
    if kind == "within":
        causes = within(report)
        name = "inside actions, " + (" and ".join(causes) or "not computing")
        if causes == ["tp"]:
            marker["color"] = theme.axis_colour("tp")
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "marker": marker,
        "hovertemplate": "%{hovertext}<extra></extra>",
        **bars,
    }


def within(report: Tables) -> list[str]:
    """Whom ranks wait for inside a forward or a backward, under this plan."""
    plan = report.plan
    causes = {
        "tp": plan.tp > 1,
        "dp": plan.zero_stage == 3 and plan.dp > 1,
        "other tiers": plan.tiers is not None,
    }
    return [name for name, is_one in causes.items() if is_one]


def _messages(
    calls: dict[int, list[metrics.Interval]], rows: dict[int, float], per: float
) -> dict[str, Any]:
    flat = [(rank, *when) for rank, some in calls.items() for when in some]
    style = boxes.bar_style("comm", LANE)
    said = [
        f"<b>{style['name']}</b><br>rank {rank}, {theme.scaled(high - low, 's')}"
        for rank, low, high in flat
    ]
    return {
        "type": "bar",
        "orientation": "h",
        "name": style["name"],
        "hovertext": said,
        "hovertemplate": "%{hovertext}<extra></extra>",
        "marker": style["marker"] | {"line": {"width": 0}},
        "base": [round(low * per, 6) for _, low, _ in flat],
        "x": [round((high - low) * per, 6) for _, low, high in flat],
        "y": [rows[rank] + HEIGHT - MESSAGES / 2 for rank, _, _ in flat],
        "width": [MESSAGES * 0.8] * len(flat),
    }


def _hover(one: Stretch) -> str:
    length = one.end - one.start
    lines = [
        f"<b>rank {one.rank}</b>, {one.phase.replace('wait', 'nothing to do')}",
        f"{theme.scaled(length, 's')}, from {theme.scaled(one.start, 's')} to "
        f"{theme.scaled(one.end, 's')}",
    ]
    for kind, seconds in one.parts.items():
        if len(one.parts) > 1 and seconds >= SHOWN * length:
            name = {"wait": "waiting", "within": "inside actions, not computing"}.get(
                kind, kind.replace("_", " ")
            )
            lines.append(f"{name}: {100 * seconds / length:.0f} %")
    return "<br>".join(lines)


def _table(found: Sequence[Stretch]) -> pd.DataFrame:
    """rank, phase, start, end, and the seconds of every kind there is."""
    import pandas as pd

    kinds = [kind for kind in ORDER if any(kind in s.parts for s in found)]
    rows = [
        {
            "rank": s.rank,
            "phase": s.phase,
            "start": s.start,
            "end": s.end,
            **{kind: s.parts.get(kind, 0.0) for kind in kinds},
        }
        for s in found
    ]
    return pd.DataFrame(rows, columns=["rank", "phase", "start", "end", *kinds])
