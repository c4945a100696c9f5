"""Where the memory goes over one step: bytes by category, stacked, rank by rank or run by run.

What is drawn comes from memory_curves.py, how from memory_panels.py; here is which ranks and runs
a figure has, and the sentence that it proves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paralab.checks import illegal
from paralab.report.about import needs_tables
from paralab.report.amounts import peak
from paralab.report.tables import Tables
from paralab.view import naming, theme
from paralab.view.chart import Chart
from paralab.view.memory import bytes_bars
from paralab.view.memory_curves import Curve, capacity, curves, fullest
from paralab.view.memory_panels import MAX_PANELS, drawn, limits
from paralab.view.rank_mesh import row_name
from paralab.view.sampling import spread

ALIKE = 0.01  # peaks that differ by less are one peak to the eye


def memory_chart(report: Tables, *, rank: int | None = None, step: int | None = None) -> Chart:
    """Bytes on the device by category over one step, a panel for every rank. What the rank with the
    highest peak keeps on the host and in files at most, if anything, stands in the second line.

    rank  one rank only; default all, of more than four the highest peak and others evenly spaced
    step  default the one with the highest peak, of equals the last

    Raises ValueError if the report has no memory samples, or none of that rank or step.
    """
    found = curves(report, ranks=None if rank is None else [rank], step=step)
    shown = _spaced(found)
    worst = fullest(found)
    said = [f"step {worst.step}"]
    if len(shown) < len(found):
        said.append(f"{len(shown)} of {len(found)} ranks drawn, the highest peak among them")
    for tier, where in (("host", "on the host"), ("file", "in files")):
        if (away := peak(report, tier=tier, rank=worst.rank)) is not None and away.total:
            said.append(f"at most {theme.scaled(away.total, 'B')} {where}")
    heads = [f"<b>rank {c.rank}</b>" * (report.world_size > 1) for c in shown]
    fig = drawn(shown, heads, _finding(found, worst), naming.clock_line(report, *said))
    ranks = f"rank {rank}" if rank is not None else f"{len(shown)} of {len(found)} ranks"
    return fig.explained(
        f"memory of {naming.subject(report)}, {report.clock}: {ranks}, by category",
        _table([(f"rank {c.rank}", c) for c in shown]),
    )


def memory_charts(
    runs: Mapping[str, Tables],
    *,
    rank: int = 0,
    step: int | None = None,
    title: str | None = None,
) -> Chart:
    """One rank of several runs, {label: report}, one above the other on one scale of bytes.

    title  in place of the finding that the peaks give

    Every run's step is as wide as the figure: what differs is how much, not how long. Raises
    ValueError without runs, or naming the run that has no memory samples of that rank or step.
    """
    found = _each(runs, lambda report: curves(report, ranks=[rank], step=step)[0])
    peaks = {label: curve.peak for label, curve in found.items()}
    several, first = len({report.clock for report in runs.values()}) > 1, next(iter(found))
    heads = [f"<b>{theme.text(n)}</b>{f' ({c.report.clock})' * several}" for n, c in found.items()]
    for i, size in enumerate(peaks.values()):
        if i and peaks[first]:
            heads[i] += f": {theme.percent(size / peaks[first])} of {theme.text(first)}"
    many = any(report.world_size > 1 for report in runs.values())
    below = f"{f'rank {rank}, ' * many}one step of each, on one scale of bytes"
    fig = drawn(list(found.values()), heads, _verdict(peaks), below, against=first)
    return fig.titled(title).explained(
        f"memory of {len(found)} runs on rank {rank}, by category: {' | '.join(found)}",
        _table(list(found.items())),
    )


def memory_bars(runs: Mapping[str, Tables], *, title: str | None = None) -> Chart:
    """The peaks of several runs, {label: report}, by category: a bar for the highest rank of each.

    title  in place of the finding that the peaks give. Raises ValueError as `memory_charts`
    """
    found = _each(runs, lambda report: fullest(curves(report)))
    bars = {label: curve.held for label, curve in found.items()}
    finding = title or _verdict({label: curve.peak for label, curve in found.items()})
    chart = bytes_bars(bars, limits(found.values()), title=finding)
    return chart.said_below("the rank with the highest peak")


def stage_memory(report: Tables) -> Chart:
    """The peaks of a pipeline's stages by category: a bar for the rank of each that has its highest
    peak; of more than four stages the highest, and others evenly spaced. Without a pipeline there
    is one bar. Raises ValueError as `memory_chart`.
    """
    needs_tables(report)
    worst: dict[int, Curve] = {}  # by stage: ranks of one differ in what a grid does not divide
    for curve in curves(report):
        stage = report.plan.place(curve.rank).pp
        worst[stage] = fullest([worst.get(stage, curve), curve])
    shown = _spaced([worst[stage] for stage in sorted(worst)])
    bars = {stage_of(report, c.rank): c.held for c in shown}
    chart = bytes_bars(bars, capacity(report))
    some = f"{len(shown)} of {len(worst)} stages drawn" * (len(shown) < len(worst))
    return chart.said_below(some).explained(f"{chart.summary} ({report.clock})", chart.table)


def stage_of(report: Tables, rank: int) -> str:
    """What stands for a rank among stages; "one rank" where there is no pipeline."""
    plan = report.plan
    return row_name(plan, plan.place(rank).pp) if plan.pp > 1 else "one rank"


def _each(runs: Any, read: Callable[[Tables], Curve]) -> dict[str, Curve]:
    """{label: curve} of all runs; an error names the run."""
    if not isinstance(runs, Mapping) or not runs:
        raise illegal("runs", runs, "nothing to draw", "{label: report}")
    found = {}
    for label, report in runs.items():
        if not hasattr(report, "memory"):
            raise illegal(f"runs[{label!r}]", report, "not a report", "{label: report}")
        try:
            found[str(label)] = read(report)
        except ValueError as error:
            raise ValueError(f"{label}: {error}") from None
    return found


# ---- words ---------------------------------------------------------------------------------------
def _finding(found: Sequence[Curve], worst: Curve) -> str:
    report, category = worst.report, max(worst.held, key=worst.held.__getitem__)
    share = worst.held[category] / worst.peak if worst.peak else 0.0
    said = f"{theme.text(naming.subject(report))}: memory peaks at {theme.scaled(worst.peak, 'B')}"
    if limit := report.meta.get("memory_limit"):
        said += f" of {theme.scaled(limit, 'B')}"
    said += f" {worst.phase(worst.peak_at)}"
    if len(found) > 1 and worst.peak - min(c.peak for c in found) <= ALIKE * worst.peak:
        said += " on every rank"
    elif report.world_size > 1:
        said += f" on rank {worst.rank}"
    return f"{said}; {theme.percent(share)} is {theme.text(category)}"


def _verdict(peaks: Mapping[str, float]) -> str:
    """Which run needs least, which most, and how far apart they are."""
    least, most = min(peaks, key=peaks.__getitem__), max(peaks, key=peaks.__getitem__)
    low, high = theme.scaled(peaks[least], "B"), theme.scaled(peaks[most], "B")
    if len(peaks) == 1:
        return f"{theme.text(most)}: memory peaks at {high}"
    if peaks[most] - peaks[least] <= ALIKE * peaks[most]:
        return f"All need the same memory, to {theme.percent(ALIKE)}: {high} at the peak"
    said = f"{theme.percent(peaks[least] / peaks[most])} of the {high} of “{theme.text(most)}”"
    return f"“{theme.text(least)}” needs {low} at its peak, {said}"


def _spaced(found: list[Curve]) -> list[Curve]:
    """At most ``MAX_PANELS`` of them: the highest peak, and others evenly spaced."""
    n = len(found)
    if n <= MAX_PANELS:
        return found
    places = spread(range(n), MAX_PANELS)
    worst = max(range(n), key=lambda i: (found[i].peak, -i))
    if worst not in places:
        places[min(range(MAX_PANELS), key=lambda i: abs(places[i] - worst))] = worst
    return [found[i] for i in sorted(places)]


def _table(shown: Sequence[tuple[str, Curve]]) -> Any:
    """Every sample drawn."""
    rows = [
        (label, curve.rank, curve.step, curve.times[i], phase, category, size)
        for label, curve in shown
        for i, phase in enumerate(map(curve.phase, range(len(curve.samples))))
        for category, size in curve.samples[i].items()
    ]
    return "panel rank step time phase category bytes", rows
