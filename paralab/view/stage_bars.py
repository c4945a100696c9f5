"""What every pipeline stage needs on its device at its peak, by category, against what there is.

A bar for the highest peak of each pipeline rank: ranks of one stage differ in nothing but what a
grid does not divide. What was offloaded is on the host or in files and has bars of its own. Of
many stages the highest peak, the first, the last, and the highest of the others are drawn.
"""

from __future__ import annotations

from paralab.checks import illegal
from paralab.report.metrics import Peak, once, peak
from paralab.report.tables import TIERS, Tables
from paralab.view import naming, theme
from paralab.view.chart import Chart
from paralab.view.memory import TIER_NAME, bytes_bars, share_of
from paralab.view.memory_curves import capacity, not_sampled
from paralab.view.rank_mesh import row_name

MAX_STAGES = 4


@once
def peaks(report: Tables) -> dict[tuple[int, str], Peak]:
    """{(pipeline rank, tier): highest peak of a rank there}, device first; from the memory table.

    Raises ValueError if no memory was sampled.
    """
    table = report.memory
    if table.empty:
        raise not_sampled(report)
    place = {rank: report.plan.place(rank).pp for rank in table["rank"].unique()}
    table = table[table["bytes"] > 0].assign(pp=table["rank"].map(place))
    key = ["pp", "tier", "rank", "step", "time"]
    held = table.pivot_table("bytes", key, "category", "sum", fill_value=0)
    worst = held.sum(axis=1).groupby(["pp", "tier"]).idxmax()
    order = sorted(worst, key=lambda at: (at[0], TIERS.index(at[1])))
    sizes = held.loc[order].to_dict("records")
    found = zip(order, sizes, strict=True)
    return {at[:2]: Peak(*at[2:], {k: n for k, n in one.items() if n}) for at, one in found}


def stage_memory(*reports: Tables) -> Chart:
    """Peaks by category: a bar per pipeline stage and tier, of one report or of several on one
    scale, with what a device holds (the run's memory limit, or the cluster's memory) as a line.

    Raises ValueError without reports, or on one without memory samples.
    """
    if not reports:
        raise illegal("reports", reports, "nothing to draw", "one report or several")
    bars: dict[str, dict[str, int]] = {}
    limits: dict[str, float] = {}
    drawn = 0
    names = naming.apart(reports)
    for name, report in zip(names, reports, strict=True):
        found = peaks(report)
        shown = _chosen({pp: one.total for (pp, tier), one in found.items() if tier == "device"})
        drawn = max(drawn, len(shown))
        for (pp, tier), one in found.items():
            if pp in shown:
                bars[_label(report, pp, tier, name * (len(reports) > 1))] = one.held
        if (limit := capacity(report)) is not None:
            limits[limit[0]] = limit[1]
    chart = bytes_bars(bars, limits, title=_finding(reports, names))
    said = ["peak of a step"]
    if drawn < reports[0].plan.pp:
        said.append(f"{drawn} of {reports[0].plan.pp} stages drawn")
    clocks = " and ".join(dict.fromkeys(report.clock for report in reports))
    chart.said_below(" · ".join(said))
    return chart.explained(f"{chart.summary} ({clocks})", chart.table)


def _chosen(totals: dict[int, int]) -> set[int]:
    """The first, the highest, the last, and of the others the highest."""
    order = sorted(totals)
    most = sorted(order, key=lambda pp: -totals[pp])
    wanted = dict.fromkeys([most[0], order[0], order[-1], *most])
    return set(list(wanted)[:MAX_STAGES])


def _label(report: Tables, pp: int, tier: str, name: str) -> str:
    parts = [row_name(report.plan, pp)] if report.plan.pp > 1 else []
    parts += [TIER_NAME[tier]] * (tier != "device" or not parts)
    return ", ".join([*parts, *[name] * bool(name)])


def _finding(reports: tuple[Tables, ...], names: list[str]) -> str:
    """Whether it fits, with the numbers; of several reports how far apart they are."""
    report, worst = reports[0], peak(reports[0])
    who = _who(report, worst) if report.plan.pp > 1 else "A device"
    said = f"{who} needs {theme.scaled(worst.total, 'B')}"
    for name, other in zip(names[1:], reports[1:], strict=True):
        said += f", {name} {theme.scaled(peak(other).total, 'B')}"
    if (limit := capacity(report)) is None:
        return said
    if worst.total > limit[1]:
        return f"{said} of {theme.scaled(limit[1], 'B')}: it does not fit"
    return f"{said}, {share_of(worst.total, limit[1])} what a device has"


def _who(report: Tables, worst: Peak) -> str:
    return row_name(report.plan, report.plan.place(worst.rank).pp)


def fits(report: Tables) -> str | None:
    """What stands in the way of a plan in terms of memory, with the numbers; None if it fits."""
    limit = capacity(report)
    if limit is None or report.memory.empty:
        return None
    worst = peak(report)
    if worst.total <= limit[1]:
        return None
    most = max(worst.held, key=worst.held.__getitem__)
    need, has, part = (theme.scaled(n, "B") for n in (worst.total, limit[1], worst.held[most]))
    said = f"It does not fit: a device of {_who(report, worst)} needs {need} and has {has}"
    return f"{said}; most of it, {part}, is {most}"
