"""Where the memory goes over one step: bytes by category, stacked, rank by rank or run by run.

What is drawn comes from memory_curves.py, how from memory_panels.py; here is which ranks and runs
stand in a figure, and the sentence that it proves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from paralab.checks import illegal
from paralab.view import naming, theme
from paralab.view.memory import bytes_bars
from paralab.view.memory_curves import Curve, Tier, curves, fullest, tiers
from paralab.view.memory_panels import MAX_PANELS, drawn, limits
from paralab.view.memory_tiers import TIER_NAME, draw_tiers, room
from paralab.view.sampling import spread

if TYPE_CHECKING:
    from paralab.report.tables import Tables
    from paralab.view.chart import Chart

ALIKE = 0.01  # peaks that differ by less are one peak to the eye


def memory_chart(report: Tables, *, rank: int | None = None, step: int | None = None) -> Chart:
    """Bytes on the device by category over one step, a panel for every rank; and beneath, of the
    fullest rank, what it keeps on the host and in files, if anything.

    rank  one rank only; default all, of more than four the fullest and others evenly spaced
    step  default the one with the highest peak

    Raises ValueError if the report has no memory samples, or none of that rank or step.
    """
    found = curves(report, ranks=None if rank is None else [rank], step=step)
    shown = _spaced(found)
    worst = max(found, key=lambda curve: (curve.peak, -curve.rank))
    said = [f"step {worst.step}"]
    if len(shown) < len(found):
        said.append(f"{len(shown)} of {len(found)} ranks drawn, the fullest among them")
    heads = [f"<b>rank {c.rank}</b>" if report.world_size > 1 else "" for c in shown]
    away = tiers(worst)
    finding = _spread(worst, away) if away else _finding(found, worst)
    below = naming.clock_line(report, *said)
    fig = drawn(shown, heads, finding, below, room_below=room(away))
    draw_tiers(fig, away, many=report.world_size > 1)
    ranks = f"rank {rank}" if rank is not None else f"{len(shown)} of {len(found)} ranks"
    return fig.explained(
        f"memory of {naming.subject(report)}, {report.clock}: {ranks}, by category",
        _table([(f"rank {c.rank}", c) for c in shown], away),
    )


def memory_charts(runs: Mapping[str, Tables], *, rank: int = 0, step: int | None = None) -> Chart:
    """One rank of several runs, {label: report}, one above the other on one scale of bytes.

    Every run's step is as wide as the figure: what differs is how much, not how long. Raises
    ValueError without runs, or naming the run that has no memory samples of that rank or step.
    """
    _several(runs)
    found = {}
    for label, report in runs.items():
        try:
            (found[str(label)],) = curves(report, ranks=[rank], step=step)
        except ValueError as error:
            raise ValueError(f"{label}: {error}") from None
    peaks = {label: curve.peak for label, curve in found.items()}
    shown, clocks = list(found.values()), {report.clock for report in runs.values()}
    heads = [
        f"<b>{theme.text(label)}</b>"
        + f" ({c.report.clock})" * (len(clocks) > 1)
        + _against(label, peaks)
        for label, c in found.items()
    ]
    many = any(report.world_size > 1 for report in runs.values())
    below = _clocks(runs.values(), *[f"rank {rank}"] * many)
    fig = drawn(shown, heads, _verdict(peaks), below, against=next(iter(found)))
    return fig.explained(
        f"memory of {len(found)} runs on rank {rank}, by category: {' | '.join(found)}",
        _table(list(found.items())),
    )


def memory_bars(runs: Mapping[str, Tables], *, title: str | None = None) -> Chart:
    """The peaks of several runs, {label: report}, by category: a bar for the fullest rank of each.

    title  in place of the finding that the peaks give. Raises ValueError as `memory_charts`
    """
    _several(runs)
    found = {}
    for label, report in runs.items():
        try:
            found[str(label)] = fullest(report)
        except ValueError as error:
            raise ValueError(f"{label}: {error}") from None
    bars = {label: curve.samples[curve.peak_at] for label, curve in found.items()}
    chart = bytes_bars(
        bars,
        limits(found.values()),
        title=title or _verdict({label: curve.peak for label, curve in found.items()}),
    )
    return chart.said_below(_clocks(runs.values(), "at the peak of the fullest rank"))


# ---- words ---------------------------------------------------------------------------------------
def _several(runs: Any) -> None:
    if not isinstance(runs, Mapping) or not runs:
        raise illegal("runs", runs, "nothing to draw", "{label: report}")
    for label, report in runs.items():
        if not hasattr(report, "memory"):
            raise illegal(f"runs[{label!r}]", report, "not a report", "{label: report}")


def _finding(found: Sequence[Curve], worst: Curve) -> str:
    report, (category, share) = worst.report, worst.largest
    said = f"{theme.text(naming.subject(report))}: peak {theme.scaled(worst.peak, 'B')}"
    if limit := report.meta.get("memory_limit"):
        said += f" of {theme.scaled(limit, 'B')}"
    if len(found) > 1 and worst.peak - min(c.peak for c in found) <= ALIKE * worst.peak:
        said += " on every rank"
    elif report.world_size > 1:
        said += f" on rank {worst.rank}"
    return f"{said} {worst.phase(worst.peak_at)}, {100 * share:.0f} % {theme.text(category)}"


def _spread(worst: Curve, away: Sequence[Tier]) -> str:
    """How much lies where at most; for the device also how much may."""
    parts = [
        f"{TIER_NAME[tier.name]}{' peaks' * (tier is away[0])} at {theme.scaled(tier.total, 'B')}"
        for tier in away
    ]
    if limit := worst.report.meta.get("memory_limit"):
        parts[0] += f" of {theme.scaled(limit, 'B')}"
    return f"{theme.text(naming.subject(worst.report))}: {', '.join(parts)}"


def _verdict(peaks: Mapping[str, float]) -> str:
    """Who needs least, who most, and how far apart they are."""
    least, most = min(peaks, key=peaks.__getitem__), max(peaks, key=peaks.__getitem__)
    low, high = peaks[least], peaks[most]
    if len(peaks) == 1:
        return f"{theme.text(most)} peaks at {theme.scaled(high, 'B')}"
    if high - low <= ALIKE * high:
        return f"All peak alike, to {100 * ALIKE:.0f} %: {theme.scaled(high, 'B')}"
    times = f", {high / low:.2g} times that" if low and high >= 1.1 * low else ""
    return (
        f"{theme.text(least)} peaks at {theme.scaled(low, 'B')}, {theme.text(most)} at "
        f"{theme.scaled(high, 'B')}{times}"
    )


def _against(label: str, peaks: Mapping[str, float]) -> str:
    """How much of the first run's peak another one has."""
    first = next(iter(peaks))
    if label == first or not peaks[first]:
        return ""
    return f": {100 * peaks[label] / peaks[first]:.0f} % of {theme.text(first)}"


def _clocks(reports: Any, *more: str) -> str:
    reports = list(reports)
    if len({report.clock for report in reports}) == 1:
        return naming.clock_line(reports[0], *more)
    return " · ".join([f"clocks: {', '.join(sorted({r.clock for r in reports}))}", *more])


def _spaced(found: list[Curve]) -> list[Curve]:
    """At most ``MAX_PANELS`` of them: the fullest, and others evenly spaced."""
    n = len(found)
    if n <= MAX_PANELS:
        return found
    places = spread(range(n), MAX_PANELS)
    worst = max(range(n), key=lambda i: (found[i].peak, -i))
    if worst not in places:
        places[min(range(MAX_PANELS), key=lambda i: abs(places[i] - worst))] = worst
    return [found[i] for i in sorted(places)]


def _table(shown: Sequence[tuple[str, Curve]], away: Sequence[Tier] = ()) -> Any:
    """Every sample drawn; with other tiers their peaks too, and a column more."""
    import pandas as pd

    rows = [
        (label, curve.rank, curve.step, curve.times[i], curve.phase(i), category, size)
        for label, curve in shown
        for i in range(len(curve.samples))
        for category, size in curve.samples[i].items()
    ]
    columns = ["panel", "rank", "step", "time", "phase", "category", "bytes"]
    table = pd.DataFrame(rows, columns=columns)
    if not away:
        return table
    more = [
        (
            f"peaks of rank {tier.rank}",
            tier.rank,
            tier.step,
            tier.time,
            "",
            category,
            size,
            tier.name,
        )
        for tier in away
        for category, size in tier.held.items()
    ]
    return pd.concat(
        [table.assign(tier="device"), pd.DataFrame(more, columns=[*columns, "tier"])],
        ignore_index=True,
    )
