"""What a pipeline keeps in memory: live activations over time, rank by rank.

A forward makes a micro-batch's activations, its backward (split: the weight half) frees them. In
between they are alive, and their number decides whether a schedule fits: GPipe keeps all m, 1F1B
never more than p - r on rank r, for the very same bubble. They are counted in chunks where a rank
has several stages; each holds 1/v of the rank's layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from paralab.checks import illegal
from paralab.report.tables import COMPUTE_KINDS, Tables
from paralab.view import boxes, naming, theme
from paralab.view.chart import Chart, figure
from paralab.view.marks import column, line
from paralab.view.marks.areas import area
from paralab.view.marks.boxes import rows_axis

MAX_RANKS = 16
ROOM = 1.28  # of a curve's highest value: the height of a rank's row


class _Source(NamedTuple):
    name: str
    clock: str  # empty: a bare schedule, times are in forwards
    chunks: int
    curves: list[tuple[list[float], list[float]]]  # by rank: times and counts, a step each
    split: bool  # some backwards, into the halves I and W

    @property
    def peaks(self) -> list[float]:
        return [max(counts) for _, counts in self.curves]


def live_activations(
    *sources: Any, labels: Sequence[str] | None = None, step: int | None = None
) -> Chart:
    """How many micro-batches' activations every rank keeps, over one step.

    sources  reports of pipelines; schedules (a list of actions per rank), whose forward, input and
             weight half take one unit of time each; or simulations of them
    labels   what to call each; default: the plan's name, or "schedule"
    step     of a report; default the typical one

    Raises ValueError without sources, if they do not have equally many pipeline ranks, and for one
    micro-batch on one stage.
    """
    if not sources:
        raise illegal("sources", sources, "nothing to draw", "a report of a pipeline, a schedule")
    if labels is not None and len(labels) != len(sources):
        raise illegal("labels", labels, f"there are {len(sources)} sources", "one label for each")
    found = [_read(source, step) for source in sources]
    names = labels or naming.told_apart([one.name for one in found])
    if len(set(names)) < len(names):
        names = [f"{i}: {name}" for i, name in enumerate(names, 1)]
    found = [one._replace(name=str(name)) for one, name in zip(found, names, strict=True)]
    if len({one.chunks for one in found}) > 1:  # a chunk of v is 1/v of what a rank holds
        for i, one in enumerate(found):
            shares = [(times, [n / one.chunks for n in counts]) for times, counts in one.curves]
            found[i] = one._replace(curves=shares)
    ranks = {len(one.curves) for one in found}
    if len(ranks) > 1:
        why = "pipelines of different length"
        raise illegal("sources", sorted(ranks), why, "as many ranks in each")
    return _drawn(found)


# ---- reading -------------------------------------------------------------------------------------
def _read(source: Any, step: int | None) -> _Source:
    """A micro-batch is alive on a stage from the start of its forward to the end of its backward,
    or of its weight half.
    """
    from paralab.theory.pipeline import Simulation, simulate

    report, name, clock = source, "schedule", ""
    if isinstance(source, Tables):
        name, clock = naming.subject(source), source.clock
    elif isinstance(source, Simulation):
        report = source.report()
    else:
        report = simulate(source, forward=1.0, backward=1.0, weight_grad=1.0).report()
    plan = report.plan
    if plan.pp == 1 and plan.microbatches == 1:
        raise illegal("sources", report, "one micro-batch on one stage", "a pipeline's report")
    step, ranks = boxes.chosen(report, step, None)
    first = {rank: plan.place(rank).pp for rank in ranks if not any(plan.place(rank)[1:])}
    spans = report.spans[(report.spans["step"] == step) & (report.spans["lane"] == "compute")]
    spans = spans[spans["rank"].isin(first)]
    zero, end = spans["start"].min(), spans["end"].max()
    work = spans[spans["kind"].isin(COMPUTE_KINDS)]  # messages may cut an action into pieces
    work = work.groupby([work["rank"].map(first), "stage", "microbatch"])
    lives = (work.agg({"start": "min", "end": "max"}) - zero).reset_index("rank")
    mine = (lives[lives["rank"] == pp] for pp in range(plan.pp))
    curves = [_curve(one["start"].tolist(), one["end"].tolist(), end - zero) for one in mine]
    split = "weight_grad" in set(spans["kind"])
    return _Source(name, clock, plan.virtual_stages, curves, split)


def _curve(starts: list[float], ends: list[float], total: float) -> tuple[list, list]:
    changes = Counter({0.0: 0})  # of one moment, all together
    changes.update(starts)
    changes.subtract(ends)
    times = sorted(changes)
    counts = list(accumulate(changes[time] for time in times))
    return [*times, float(total)], [*counts, counts[-1]]


# ---- drawing -------------------------------------------------------------------------------------
def _drawn(found: list[_Source]) -> Chart:
    first, many = found[0], len(found) > 1
    ranks = range(min(len(first.curves), MAX_RANKS))
    highest = max(one.peaks[r] for one in found for r in ranks) or 1
    timed, row = all(one.clock for one in found), ROOM * highest
    base = [(len(ranks) - 1 - r) * row for r in ranks]
    said = naming.clock_lines(one.clock for one in found if one.clock)
    halves = " (I and W one each)" if any(one.split for one in found) else ""
    said += [f"a schedule: F takes one unit of time, B two{halves}"] * (not timed)
    if len({one.chunks for one in found}) > 1:
        said.append("a chunk counts as its share of the rank's layers")
    elif first.chunks > 1:
        said.append(f"counted in chunks, 1/{first.chunks} of a rank's layers each")
    if len(first.curves) > len(ranks):
        said.append(f"the first {len(ranks)} of {len(first.curves)} ranks")
    styles = theme.series([one.name for one in found])
    inks = [styles[one.name]["ink"] for one in found]
    if not many:
        inks = [theme.category_colour("activations")]
    traces: list[dict[str, Any]] = []
    for one, ink in zip(found, inks, strict=True):
        look: dict[str, Any] = {"opacity": 0.75, "edge": 1.5}
        if many:
            dash = {"shape": "hv", "width": 2.5, "color": ink, "dash": styles[one.name]["dash"]}
            look = {"opacity": 0.16, "line": dash}
        for r in ranks:
            (times, counts), name = one.curves[r], theme.text(one.name)
            told = [f"{name}, rank {r}: {n:g} alive" for n in counts]
            times = [round(t * (1e3 if timed else 1.0), 6) for t in times]
            place = {"base": base[r], "showlegend": many and r == 0}
            traces += area(one.name, ink, times, counts, told, **place, **look)
    written = inks if many else [theme.look().ink]
    each = "<span style='color:{}'>{:g}</span>".format
    peaks = [" | ".join(map(each, written, (one.peaks[r] for one in found))) for r in ranks]
    middle = [y + 0.5 * highest for y in base]
    words = [(y, f"<b>{peak}</b>") for y, peak in zip(middle, peaks, strict=True)]
    notes = column("peak", words, size=15)
    grid = theme.look().grid
    ticks = [(y, f"<b>rank {r}</b>") for y, r in zip(middle, ranks, strict=True)]
    title = f"time from the first forward ({'ms' if timed else 'units'})"
    fig = figure(
        _finding(found),
        " · ".join(said),
        height=int(190 + 62 * len(ranks)),
        xaxis={"title": {"text": title}, "tickformat": "~g"},
        yaxis=rows_axis(ticks, -0.02 * row, (len(ranks) - 1) * row + 1.1 * highest),
        margin={"r": 40 + 20 * len(found)},
    )
    fig.draw(traces, notes, [line((0, 1), (y, y), xref="paper", width=1, ink=grid) for y in base])
    rows = [
        (one.name, rank, time, count)
        for one in found
        for rank, curve in enumerate(one.curves)
        for time, count in zip(*curve, strict=True)
    ]
    said = f"{' | '.join(one.name for one in found)} on {len(first.curves)} ranks"
    return fig.explained(f"live activations of {said}", ("source rank time live", rows))


def _finding(found: list[_Source]) -> str:
    def peaks(one: _Source) -> str:
        counts = [f"{peak:g}" for peak in one.peaks]
        what = "chunks" if one.chunks > 1 else "micro-batches"
        if len(set(counts)) == 1:
            return f"{counts[0]} {what} on every rank"
        return f"{counts[0]} {what} on the first rank, {counts[-1]} on the last"

    if len(found) == 1:
        return f"{theme.text(found[0].name)} keeps at most {peaks(found[0])}"
    first, *others = (f"{one.peaks[0]:g}{{}} under {theme.text(one.name)}" for one in found)
    first = first.format(" micro-batches are alive")
    return ", ".join([f"On the first rank at most {first}", *(one.format("") for one in others)])
