"""Time against memory of every plan that a search looked at, and the front that no plan beats.

Both axes are logarithmic. Plans that fit are coloured by their degree of tensor parallelism, from
one device's to beyond a node; those that do not fit are faint, right of the line where memory ends
or, being estimates, hardly left of it. Of the simulated plans both times are there, with a line
from the estimate to the simulation. Many thousand points say no more than a few: what is far slower
than the best, or far beyond the memory, is left out and the rest thinned evenly, as the title's
second line says; front and simulated plans are always all there.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from paralab.checks import illegal
from paralab.programs.search import Search
from paralab.programs.search_words import brief, size
from paralab.view import theme

if TYPE_CHECKING:
    from paralab.view.chart import Chart

MOST = 3000  # points of plans; a browser stays quick, and no place that has some is left empty
SLOWER, LARGER = 20, 10  # times the best plan's time, and the memory: what is drawn
CELLS = 60  # of a grid over both axes: thinning takes the same number from each


def pareto(search: Search) -> Chart:
    """Step time over memory per device: a point per plan, the Pareto front as a line.

    The table has every plan that is drawn: the search's columns, and front. Raises ValueError on
    anything but a `Search`.
    """
    if not isinstance(search, Search):
        raise illegal("search", search, "not a search", "what pl.plan_search(...) returns")
    shown = _drawn(search)
    total, fits = len(search.plans), search.fits
    below = [f"estimates of {total:,} plans on {search.devices:,} devices"]
    if len(shown) < total:
        below[0] += (
            f", {len(shown):,} drawn: thinned, up to {SLOWER} times the best's time and "
            f"{LARGER} times the memory"
        )
    below.append(f"{int(np.isfinite(search.simulated).sum())} simulated")
    fig = theme.figure(_finding(search), " · ".join(below), height=520)
    now = theme.look()
    _points(fig, search, shown[~fits[shown]], "does not fit", theme.shade(now.ink, 8, 8), 0.35)
    for number, (name, chosen, fill) in enumerate(_groups(search)):
        mine = shown[fits[shown] & chosen[shown]]
        _points(fig, search, mine, name, fill, 0.55, rank=number)
    front = search.front[np.isin(search.front, shown)]
    fig.add_scatter(
        name="Pareto front",
        mode="lines",
        x=search.memory[front].tolist(),
        y=search.closed[front].tolist(),
        hoverinfo="skip",
        line={"color": now.ink, "width": 2, "shape": "vh"},
    )
    _simulated(fig, search)
    _best(fig, search)
    low, high = search.memory[shown].min(), search.memory[shown].max()
    if search.memory_limit < LARGER * high:
        low, high = min(low, search.memory_limit), max(high, search.memory_limit)
        fig.add_vline(x=search.memory_limit, line={"color": now.faint, "dash": "dash"})
        fig.annotated(
            [
                {
                    "x": math.log10(search.memory_limit),
                    "xref": "x",
                    "y": 1,
                    "yref": "paper",
                    "text": f"{size(search.memory_limit)} per device",
                    "showarrow": False,
                    "xanchor": "left",
                    "yanchor": "top",
                    "xshift": 6,
                    "font": {"color": now.faint},
                }
            ]
        )
    fig.update_layout(
        xaxis=_axis("peak memory per device", low, high, "B"),
        yaxis=_axis(
            "step time", search.closed[shown].min(), search.closed[shown].max(), "s", below=0.24
        ),  # room for the best one's name
        legend={"orientation": "h", "y": 1, "yanchor": "bottom", "x": 0, "itemsizing": "constant"},
        margin={"t": 108},
    )

    def table():
        made = search.rows(shown)
        made["front"] = np.isin(shown, front)
        return made

    said = f"{total:,} plans, {int(fits.sum()):,} fit, {len(front)} on the front"
    return fig.explained(f"time against memory of {said}", table)


def _drawn(search: Search) -> np.ndarray:
    """Positions of the plans that are drawn: of every cell of a grid the same number, at most."""
    near = search.closed <= SLOWER * search.closed[0]
    near &= search.memory <= LARGER * search.memory_limit
    which = np.flatnonzero(near)
    always = np.union1d(
        search.front[near[search.front]], np.flatnonzero(np.isfinite(search.simulated))
    )
    if len(which) <= MOST:
        return np.union1d(which, always)
    cell = np.zeros(len(which), int)
    for values in (search.memory[which], search.closed[which]):
        scaled = np.log(values) - np.log(values.min())
        cell = cell * CELLS + np.minimum(scaled / scaled.max() * CELLS, CELLS - 1).astype(int)
    cell = cell * 2 + search.fits[which]
    order, places = np.argsort(cell, kind="stable"), np.arange(len(which))
    starts = np.r_[True, np.diff(cell[order]) > 0]
    turn = places - np.maximum.accumulate(np.where(starts, places, 0))
    chosen = order[np.argsort(turn, kind="stable")][: MOST - len(always)]
    return np.union1d(which[chosen], always)


def _groups(search: Search) -> list[tuple[str, np.ndarray, str]]:
    """(name, which plans, colour) by degree of tensor parallelism."""
    tp, node = search.plans.tp, search.cluster.devices_per_node
    within = theme.KIND_COLOUR["forward"]
    found = [
        ("no tensor parallelism", tp == 1, theme.KIND_COLOUR["copy"]),
        (f"tp within a node of {node}", (tp > 1) & (tp <= node), within),
        ("tp across nodes", tp > node, theme.KIND_COLOUR["optimizer"]),
    ]
    return [group for group in found if (group[1] & search.fits).any()]


def _points(
    fig: Chart,
    search: Search,
    which: np.ndarray,
    name: str,
    fill: str,
    opacity: float,
    *,
    rank: int = 0,
) -> None:
    if not len(which):
        return
    fig.add_scattergl(
        name=name,
        mode="markers",
        x=search.memory[which].tolist(),
        y=search.closed[which].tolist(),
        marker={
            "color": fill,
            "size": 5,
            "opacity": opacity,
            "symbol": ("circle", "diamond", "x")[rank],
        },
        hovertext=[brief(search.plans[at]) for at in which],
        hovertemplate="%{hovertext}<br>%{y:.4g} s, %{x:.3s}B<extra></extra>",
    )


def _simulated(fig: Chart, search: Search) -> None:
    """Simulated plans: a ring at the simulated time, a line to it from the estimate."""
    now, which = theme.look(), np.flatnonzero(np.isfinite(search.simulated) & search.fits)
    x, y = [], []
    for at in which:
        x += [search.memory[at], search.memory[at], None]
        y += [search.closed[at], search.simulated[at], None]
    fig.add_scatter(
        mode="lines",
        x=x,
        y=y,
        hoverinfo="skip",
        showlegend=False,
        line={"color": now.faint, "width": 1},
    )
    fig.add_scatter(
        name="simulated",
        mode="markers",
        x=search.memory[which].tolist(),
        y=search.simulated[which].tolist(),
        marker={"symbol": "circle-open", "size": 9, "color": now.ink, "line": {"width": 1.5}},
        hovertext=[
            f"{brief(search.plans[at])}<br>estimated {search.closed[at]:.4g} s" for at in which
        ],
        hovertemplate="%{hovertext}<br>simulated %{y:.4g} s, %{x:.3s}B<extra></extra>",
    )


def _best(fig: Chart, search: Search) -> None:
    at, now = 0, theme.look()
    x, y = float(search.memory[at]), float(search.simulated[at])
    fig.add_scatter(
        name="best",
        mode="markers",
        x=[x],
        y=[y],
        showlegend=False,
        hoverinfo="skip",
        marker={
            "symbol": "star",
            "size": 17,
            "color": "#D55E00",
            "line": {"width": 1, "color": now.paper},
        },
    )
    words = brief(search.plans[at]).split()
    half = (len(words) + 1) // 2
    name = [theme.text(" ".join(some)) for some in (words[:half], words[half:])]
    right = x > math.sqrt(search.memory.min() * min(search.memory_limit, search.memory.max()))
    fig.annotated(
        [
            {
                "x": math.log10(x),
                "y": math.log10(y),
                "ax": -24 if right else 24,
                "ay": 44,
                "xanchor": "right" if right else "left",
                "text": f"<b>best</b>: {name[0]}<br>{name[1]}",
                "align": "right" if right else "left",
                "showarrow": True,
                "arrowcolor": now.faint,
                "arrowwidth": 1,
                "font": {"color": now.ink},
            }
        ]
    )


def _finding(search: Search) -> str:
    """What the front says: what memory buys, or that it buys nothing."""
    best, front = 0, search.front
    seconds = f"{theme.scaled(float(search.simulated[best]), 's')} per step"
    first = front[0]
    if search.fits[first]:
        return f"{seconds} is the best there is: the fastest plan of all fits"
    less = search.closed[best] / search.closed[first]
    return (
        f"{seconds} is the best that fits; {search.memory[first] / search.memory_limit:,.3g} "
        f"times the memory would make it {less:.2f} times faster"
    )


def _axis(title: str, low: float, high: float, unit: str, *, below: float = 0.04) -> dict[str, Any]:
    """Logarithmic. below: room before the lowest, as a share of all."""
    ticks = theme.log_ticks(low / 1.05, high * 1.05)
    length = math.log10(high / low) or 1.0
    return {
        "type": "log",
        "title": {"text": title},
        "tickvals": ticks,
        "ticktext": [theme.scaled(float(tick), unit) for tick in ticks],
        "range": [math.log10(low) - below * length, math.log10(high) + 0.06 * length],
    }
