"""What a pipeline keeps in memory: live activations over time, rank by rank.

A forward saves a micro-batch's activations, and its backward (if split, the weight half W) frees
them. In between they are alive, and how many are alive at once decides whether a schedule fits:
GPipe keeps all m, 1F1B at most p - r on rank r, with the same bubble. A chunk, of which a rank has
v, counts as 1/v, its share of the rank's layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from paralab.checks import count_of, illegal
from paralab.report.tables import COMPUTE_KINDS, Tables
from paralab.view import boxes, naming, pipeline, theme
from paralab.view.chart import Chart, figure
from paralab.view.marks import column, line
from paralab.view.marks.areas import area
from paralab.view.marks.boxes import rows_axis

ROOM = 1.28  # height of a rank's row over the highest value of any curve


class _Source(NamedTuple):
    name: str
    clock: str  # "": a schedule without a report, whose unit of time is one forward
    curves: list[tuple[list[float], list[float]]]  # by rank: times, and the count from each on
    split: bool  # whether some backward is split into its halves I and W
    chunks: bool  # whether a rank has several

    @property
    def peaks(self) -> list[float]:
        return [max(counts) for _, counts in self.curves]


def live_activations(*sources: Any, labels: Sequence[str] | None = None) -> Chart:
    """How many micro-batches' activations each rank keeps, over the typical step.

    sources  reports of pipelines; or schedules (a list of actions per rank), whose F, I and W take
             one unit of time each, divided by the chunks per rank
    labels   names of the sources; default: the plan's name, or "schedule"

    Raises ValueError without sources, and if they differ in kind or number of pipeline ranks.
    """
    if not sources:
        raise illegal("sources", sources, "nothing to draw", "a report of a pipeline, a schedule")
    read = [_read(source) for source in sources]
    names = naming.told_apart([one.name for one in read])
    names = names if labels is None else naming.given(labels, sources, "sources")
    if len(set(names)) < len(names):
        names = [f"{i}: {name}" for i, name in enumerate(names, 1)]
    read = [one._replace(name=name) for one, name in zip(read, names, strict=True)]
    if len({bool(one.clock) for one in read}) > 1:
        why, legal = "reports have seconds, schedules units of time", "report.plan.actions()"
        raise illegal("sources", names, why, f"either alone; the schedule of a report is {legal}")
    ranks = {len(one.curves) for one in read}
    if len(ranks) > 1:
        why = "the pipelines differ in their numbers of ranks"
        raise illegal("sources", sorted(ranks), why, "as many ranks in each")
    return _drawn(read)


# ---- reading -------------------------------------------------------------------------------------
def _read(source: Any) -> _Source:
    """A micro-batch is alive on a stage from the start of its forward to the end of its backward,
    or of the weight half if backward is split.
    """
    report, name, clock = source, "schedule", ""
    if isinstance(source, Tables):
        name, clock = naming.subject(source), source.clock
    else:
        report = pipeline.timed(source, unit=1.0).report()
    plan = report.plan
    step, ranks = boxes.chosen(report, None, None)
    stage_of = {rank: plan.place(rank).pp for rank in ranks if not any(plan.place(rank)[1:])}
    spans = report.spans[(report.spans["step"] == step) & (report.spans["lane"] == "compute")]
    spans = spans[spans["rank"].isin(stage_of)]
    zero, end = spans["start"].min(), spans["end"].max()
    work = spans[spans["kind"].isin(COMPUTE_KINDS)]  # several spans if messages cut an action
    work = work.groupby([work["rank"].map(stage_of), "stage", "microbatch"])
    lives = (work.agg({"start": "min", "end": "max"}) - zero).reset_index("rank")
    lives_of = (lives[lives["rank"] == pp] for pp in range(plan.pp))
    v = plan.virtual_stages
    curves = [_curve(one["start"].tolist(), one["end"].tolist(), end - zero, v) for one in lives_of]
    return _Source(name, clock, curves, "weight_grad" in set(spans["kind"]), v > 1)


def _curve(starts: list[float], ends: list[float], total: float, v: int) -> tuple[list, list]:
    changes = Counter({0.0: 0})  # {time: the sum of all changes at that time}
    changes.update(starts)
    changes.subtract(ends)
    times = sorted(changes)
    counts = [n / v for n in accumulate(changes[time] for time in times)]
    return [*times, float(total)], [*counts, counts[-1]]


# ---- drawing -------------------------------------------------------------------------------------
def _drawn(sources: list[_Source]) -> Chart:
    first, several = sources[0], len(sources) > 1
    ranks = range(len(first.curves))
    highest = max(source.peaks[r] for source in sources for r in ranks) or 1
    in_ms, row = bool(first.clock), ROOM * highest
    base = [(len(ranks) - 1 - r) * row for r in ranks]
    chunks = any(source.chunks for source in sources)
    halves = " (I and W one each)" if any(source.split for source in sources) else ""
    costs = "a schedule: F takes one unit of time, B two" + halves
    costs += ", for all of a rank's layers" * chunks
    remarks = naming.clock_lines(source.clock for source in sources) if in_ms else [costs]
    remarks += ["a chunk counts as its share of the rank's layers"] * chunks
    styles = theme.series([source.name for source in sources])
    inks = [styles[source.name]["ink"] for source in sources]
    if not several:
        inks = [theme.category_colour("activations")]
    traces: list[dict[str, Any]] = []
    for source, ink in zip(sources, inks, strict=True):
        look: dict[str, Any] = {"opacity": 0.75, "edge": 1.5}
        if several:
            dash = {"shape": "hv", "width": 2.5, "color": ink, "dash": styles[source.name]["dash"]}
            look = {"opacity": 0.16, "line": dash}
        for r in ranks:
            (times, counts), name = source.curves[r], theme.text(source.name)
            hover_texts = [f"{name}, rank {r}: {n:g} alive" for n in counts]
            times = [round(t * (1e3 if in_ms else 1.0), 6) for t in times]
            where = {"base": base[r], "showlegend": several and r == 0}
            traces += area(source.name, ink, times, counts, hover_texts, **where, **look)
    inks_of_peaks = inks if several else [theme.look().ink]
    coloured = "<span style='color:{}'>{:g}</span>".format
    peaks = [" | ".join(map(coloured, inks_of_peaks, (s.peaks[r] for s in sources))) for r in ranks]
    middle = [y + 0.5 * highest for y in base]
    words = [(y, f"<b>{peak}</b>") for y, peak in zip(middle, peaks, strict=True)]
    notes = column("peak", words, size=15)
    grid = theme.look().grid
    ticks = [(y, f"<b>rank {r}</b>") for y, r in zip(middle, ranks, strict=True)]
    title = f"time from the first forward ({'ms' if in_ms else 'units'})"
    fig = figure(
        _finding(sources),
        " · ".join(remarks),
        height=int(190 + 62 * len(ranks)),
        xaxis={"title": title, "tickformat": "~g"},
        yaxis=rows_axis(ticks, -0.02 * row, (len(ranks) - 1) * row + 1.1 * highest),
        margin={"r": 40 + 20 * len(sources)},
    )
    fig.draw(traces, notes, [line((0, 1), (y, y), xref="paper", width=1, ink=grid) for y in base])
    rows = [
        (source.name, rank, time, count)
        for source in sources
        for rank, curve in enumerate(source.curves)
        for time, count in zip(*curve, strict=True)
    ]
    return fig.tabled(("source rank time live", rows))


def _finding(sources: list[_Source]) -> str:
    first, *others = sources
    most = count_of(first.peaks[0], "micro-batch", "g")
    if not others:
        last = f"{first.peaks[-1]:g} on the last"
        return f"{theme.text(first.name)} keeps at most {most} on the first rank, {last}"
    verb = "is" if first.peaks[0] == 1 else "are"
    rest = "".join(f", {s.peaks[0]:g} under {theme.text(s.name)}" for s in others)
    return f"On the first rank at most {most} {verb} alive under {theme.text(first.name)}{rest}"
