"""What benches of real ranks share: a knob for the links, the limits of one machine, some words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paralab.checks import illegal
from paralab.spec import Cluster, Link
from paralab.view import theme
from paralab.view.chart import Chart
from paralab.view.widget_parts import Knob

if TYPE_CHECKING:
    from paralab.report.report import Report

MOST_RANKS = 8  # real processes; more are for theory


def count(n: int, what: str, plural: str = "s") -> str:
    """ "1 rank", "4 ranks"."""
    return f"{n} {what}{plural if n != 1 else ''}"


def crowd(report: Report) -> str:
    """ "measured", and how many ranks shared how many cores, if they did."""
    cores = report.meta.get("cores")
    shared = isinstance(cores, int) and cores < report.world_size
    return f"measured ({report.world_size} ranks on {cores} cores)" if shared else "measured"


def few(chart: Chart, shown: int, ranks: int) -> Chart:
    """The chart, which says so if it does not show all ranks."""
    return chart.said_below(f"{shown} of {ranks} ranks drawn") if ranks > shown else chart


def beside_replay(expect: Report, replayed: Report) -> str:
    """How a predicted step compares: "is 4 % above the replay of that run"."""
    gap = expect.step_time / replayed.step_time - 1
    if abs(gap) < 0.01:
        return "equals the replay of that run"
    return f"is {abs(100 * gap):.0f} % {'above' if gap > 0 else 'below'} the replay of that run"


def link_knob(link: Link, usual: Sequence[float]) -> Knob:
    """Bandwidths to choose from, bytes/s; the link's own is where the knob starts."""
    own = link.bandwidth
    speeds = sorted({b for b in usual if not 0.7 < b / own < 1.4} | {own})
    return Knob(
        label="link speed",
        value=own,
        options=[(theme.scaled(b, "B/s") + ", own" * (b == own), b) for b in speeds],
        tip=f"a call also costs {theme.scaled(link.alpha, 's')}",
        brief={own: "own link"},
    )


def at_speed(cluster: Cluster, link: Link, bandwidth: float) -> Cluster:
    """The cluster with its links at the chosen speed; ``link``'s latency stays."""
    if bandwidth == link.bandwidth:
        return cluster
    inter = cluster.inter.replace(bandwidth=bandwidth)
    return cluster.replace(
        intra=Link(alpha=link.alpha, bandwidth=bandwidth), inter=inter, collectives={}
    )


def check_real(ranks: int, each: int, fewer: str) -> None:
    """Refuse a run of more processes than make sense, or of more bytes than are there.

    each   bytes that one rank needs
    fewer  what there should be fewer of
    """
    if ranks > MOST_RANKS:
        raise illegal(
            "ranks",
            ranks,
            "real processes on one machine: they would only wait for one another",
            f"up to {MOST_RANKS}; the prediction holds for any number",
        )
    need, there = ranks * each, Cluster.local().memory
    if need > there // 2:
        raise ValueError(
            f"{ranks} ranks need {theme.scaled(need, 'B')}, and this machine has "
            f"{theme.scaled(there, 'B')}: fewer {fewer} or a smaller hidden size would fit"
        )
