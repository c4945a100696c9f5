"""Where the memory goes over one step: bytes by category, stacked, rank by rank or run by run.

memory_curves.py reads the data and memory_panels.py draws it; this file chooses the ranks and runs
of a figure and writes its finding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import groupby
from typing import Any

from paralab.report.amounts import peak
from paralab.report.facts import needs_tables
from paralab.report.tables import Tables
from paralab.view import naming, theme
from paralab.view.chart import Chart
from paralab.view.memory_curves import Curve, capacity, curves, fullest
from paralab.view.memory_panels import MAX_PANELS, drawn
from paralab.view.mesh_grid import spread
from paralab.view.rank_mesh import row_name
from paralab.view.stacked_bars import bytes_bars

ALIKE = 0.01  # peaks that differ by less are one peak to the eye


def memory_chart(report: Tables, *, rank: int | None = None) -> Chart:
    """Bytes on the device by category over the step with the highest peak, the last of several, a
    panel for every rank. If the rank with the highest peak also keeps data on the host or in files,
    the title's second line says how much.

    rank  one rank only. Default: all; of more than four, the one with the highest peak and others
          evenly spaced

    Raises ValueError if the report has no memory samples, or none of that rank.
    """
    by_rank = curves(report, rank)
    shown = _spaced(by_rank)
    worst = fullest(by_rank)
    remarks = [f"step {worst.step}"]
    if len(shown) < len(by_rank):
        remarks.append(f"{len(shown)} of {len(by_rank)} ranks drawn, the highest peak among them")
    for tier, where in (("host", "on the host"), ("file", "in files")):
        if (offloaded := peak(report, tier=tier, rank=worst.rank)) is not None and offloaded.total:
            remarks.append(f"at most {theme.in_bytes(offloaded.total)} {where}")
    heads = [f"<b>rank {c.rank}</b>" * (report.world_size > 1) for c in shown]
    fig = drawn(shown, heads, _finding(worst), naming.clock_line(report, *remarks))
    return fig.tabled(_table({f"rank {c.rank}": c for c in shown}))


def memory_charts(runs: Mapping[str, Tables], *, title: str | None = None) -> Chart:
    """Rank 0 of several runs, {label: report}, one above the other on one scale of bytes.

    title  replaces the finding, which compares the peaks

    The step of every run is as wide as the figure, as runs are compared in bytes, not in time.
    Raises ValueError without runs, and on a run without memory samples of rank 0, which it names.
    """
    by_run = _curve_of_each(runs, lambda report: curves(report, 0)[0])
    peaks = {label: curve.peak for label, curve in by_run.items()}
    several, first = len({report.clock for report in runs.values()}) > 1, next(iter(by_run))
    heads = [f"<b>{theme.text(n)}</b>{f' ({c.report.clock})' * several}" for n, c in by_run.items()]
    for i, size in enumerate(peaks.values()):
        if i and peaks[first]:
            heads[i] += f": {theme.percent(size / peaks[first])} of {theme.text(first)}"
    many = any(report.world_size > 1 for report in runs.values())
    below = f"{'rank 0, ' * many}one step of each run, all on one scale of bytes"
    finding = _verdict(peaks, " on rank 0" * many)
    fig = drawn(list(by_run.values()), heads, finding, below, against=first)
    return fig.titled(title).tabled(_table(by_run))


def memory_bars(runs: Mapping[str, Tables], *, title: str | None = None) -> Chart:
    """The peaks of several runs, {label: report}, by category: for each run a bar of the rank with
    the highest peak. ``title`` replaces the finding. Raises ValueError as `memory_charts` does.
    """
    by_run = _curve_of_each(runs, lambda report: fullest(curves(report)))
    peaks = {name: curve.peak for name, curve in by_run.items()}
    held = {name: curve.held for name, curve in by_run.items()}
    chart = bytes_bars(held).said_below("of each run, the rank with the highest peak")
    return chart.retitled(_verdict(peaks), chart.below).titled(title)


def stage_memory(report: Tables) -> Chart:
    """The peaks of a pipeline's stages by category: for each stage a bar of its rank with the
    highest peak; of more than four stages, the highest one and others evenly spaced. Without a
    pipeline there is one bar. Raises ValueError as `memory_chart` does.
    """
    needs_tables(report)
    # By stage, whose ranks are neighbours, but may have unequal shards on a grid.
    stages = groupby(curves(report), lambda curve: report.plan.place(curve.rank).pp)
    peaks = [fullest(list(of_stage)) for _, of_stage in stages]
    shown = _spaced(peaks)
    chart = bytes_bars({stage_of(report, c.rank): c.held for c in shown}, capacity(report))
    return chart.said_below(
        f"{len(shown)} of {len(peaks)} stages drawn" * (len(shown) < len(peaks))
    )


def fits(report: Tables) -> str | None:
    """Why a plan does not fit into the memory of a device, with the numbers; None if it fits."""
    worst, room = peak(report), max(capacity(report).values(), default=math.inf)
    if worst is None or worst.total <= room:
        return None
    most = max(worst.held, key=worst.held.__getitem__)
    need, available, part = (theme.in_bytes(n) for n in (worst.total, room, worst.held[most]))
    stage = stage_of(report, worst.rank)
    text = f"It does not fit: {stage} needs {need} on a device that has {available}"
    return f"{text}; the largest category is {most}, {part}"


def stage_of(report: Tables, rank: int) -> str:
    """ "stage 2", "one rank with stages 2, 6" or, if there is no pipeline, "one rank"."""
    plan = report.plan
    if plan.pp == 1:
        return "one rank"
    name = row_name(plan, plan.place(rank).pp)
    return name if plan.virtual_stages == 1 else f"one rank with {name}"


def _curve_of_each(runs: Any, read: Callable[[Tables], Curve]) -> dict[str, Curve]:
    """{label: the curve that ``read`` makes of the run}; an error names the run."""
    by_run = {}
    for label, report in naming.labelled("runs", runs, "{label: report}").items():
        needs_tables(report, f"runs[{label!r}]")
        try:
            by_run[str(label)] = read(report)
        except ValueError as error:
            raise ValueError(f"{label}: {error}") from None
    return by_run


# ---- words ---------------------------------------------------------------------------------------
def _finding(worst: Curve) -> str:
    report, category = worst.report, max(worst.held, key=worst.held.__getitem__)
    share = worst.held[category] / worst.peak if worst.peak else 0.0
    text = f"{theme.text(naming.subject(report))}: memory peaks at {theme.in_bytes(worst.peak)}"
    if limit := report.meta.get("memory_limit"):
        text += f" of {theme.in_bytes(limit)}"
    text += f" {worst.phase(worst.peak_at)}"
    text += f" on rank {worst.rank}" * (report.world_size > 1)
    verb = "takes" if category == "workspace" else "take"
    return f"{text}; {theme.text(naming.category_name(category))} {verb} {theme.share(share)}"


def _verdict(peaks: Mapping[str, float], where: str = "") -> str:
    """Which run needs the least memory, which the most, and their ratio."""
    least, most = min(peaks, key=peaks.__getitem__), max(peaks, key=peaks.__getitem__)
    low, high = theme.in_bytes(peaks[least]), theme.in_bytes(peaks[most])
    if peaks[most] - peaks[least] <= ALIKE * peaks[most]:
        return f"Memory peaks at {high}{where}"
    share = f"{theme.share(peaks[least] / peaks[most])} of the {high} of “{theme.text(most)}”"
    return f"“{theme.text(least)}” needs {low} at its peak{where}, {share}"


def _spaced(curves: list[Curve]) -> list[Curve]:
    """At most ``MAX_PANELS`` curves: the one with the highest peak, and others evenly spaced."""
    n, peaks = len(curves), [curve.peak for curve in curves]
    places, worst = spread(range(n), MAX_PANELS), peaks.index(max(peaks))
    if worst not in places:
        places[min(range(MAX_PANELS), key=lambda i: abs(places[i] - worst))] = worst
    return [curves[i] for i in sorted(places)]


def _table(shown: Mapping[str, Curve]) -> Any:
    """(columns, rows) of all samples of these curves."""
    rows = [
        (label, curve.rank, curve.step, curve.times[i], phase, category, size)
        for label, curve in shown.items()
        for i, phase in enumerate(map(curve.phase, range(len(curve.samples))))
        for category, size in curve.samples[i].items()
    ]
    return "panel rank step time phase category bytes", rows
