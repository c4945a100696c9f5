"""Time against memory of every plan that a search considered, and their Pareto front.

Both axes are logarithmic. Plans that fit are coloured by their degree of tensor parallelism: none,
within a node, across nodes. Plans that do not fit are faint; they are right of the line at the
device's memory, or close to it on the left, as their memory is an estimate. A simulated plan has
both times, with a line from the estimate to the simulation. Plans that are far slower than the best
or far beyond the memory are left out and the others thinned evenly, as the second line of the title
says; all simulated plans and, within that range, the whole front are drawn.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

from paralab.checks import count_of, instance
from paralab.programs.search import Search
from paralab.programs.search_words import brief
from paralab.view import theme
from paralab.view.chart import Chart, figure
from paralab.view.marks import note, upright
from paralab.view.marks.curves import curve, log_axis

MOST = 3000  # points: few enough for a browser, enough that no region becomes empty
SLOWER, LARGER = 20, 10  # drawn are plans up to so many times the best time, and the memory limit
SYMBOLS = ("circle", "diamond", "x")
CELLS = 60  # per axis, of a grid: thinning keeps about as many plans in each of its cells


def pareto(search: Search) -> Chart:
    """Step time over memory per device: a point per plan, the Pareto front as a line.

    The table has every plan that is drawn: the search's columns, and front. Raises ValueError on
    anything but a `Search`.
    """
    instance("search", search, Search, "what pl.plan_search(...) returns")
    shown = _drawn(search)
    total, fits = len(search.plans), search.fits
    devices = count_of(search.best.world_size, "device", ",")
    below = [f"estimates of {count_of(total, 'plan', ',')} on {devices}"]
    if len(shown) < total:
        below[0] += f", {len(shown):,} of them drawn, up to {SLOWER} times the best time and "
        below[0] += f"{LARGER} times the memory limit"
    below.append(f"{int(np.isfinite(search.simulated).sum())} simulated")
    look, memory, times = theme.look(), search.memory[shown], search.closed[shown]
    limits = [search.memory_limit] * int(search.memory_limit < LARGER * memory.max())
    ends = np.append(memory, limits)
    front = search.front[np.isin(search.front, shown)]
    line = [(search.memory[at], search.closed[at]) for at in front]
    misses = _points(search, shown[~fits[shown]], "does not fit", theme.shade(look.ink, 8, 8), 0.35)
    misses["showlegend"] = not limits  # otherwise the line at the limit is labelled
    traces = [misses]
    for number, (name, chosen, fill) in enumerate(_groups(search)):
        positions = shown[fits[shown] & chosen[shown]]
        traces.append(_points(search, positions, name, fill, 0.55, symbol=SYMBOLS[number]))
    traces = [trace for trace in traces if trace["x"]]
    step = curve("Pareto front", line, ink=look.ink, width=2)
    step["line"]["shape"] = "vh"
    note_best, star = _best(search)
    at = {"axes": ("x", "paper"), "anchor": "left top", "xshift": 6, "ink": look.faint}
    words = [note(f"does not fit in {theme.in_bytes(n)}", math.log10(n), 1, **at) for n in limits]
    shapes = [upright(n, dash="dash", ink=look.faint) for n in limits]
    fig = figure(
        _finding(search),
        " · ".join(below),
        height=520,
        xaxis=log_axis("peak memory per device", ends.min(), ends.max(), "B", pad=(0.04, 0.06)),
        # with room below for the best plan's name
        yaxis=log_axis("step time", times.min(), times.max(), "s", pad=(0.24, 0.06)),
        legend={"itemsizing": "constant"},
    )
    fig.draw([*traces, step, star, *_simulated(search)], [note_best, *words], shapes)
    return fig.tabled(lambda: search.rows(shown).assign(front=np.isin(shown, front)))


def _drawn(search: Search) -> np.ndarray:
    """Positions of the plans that are drawn: at most about the same number in each grid cell."""
    visible = search.closed <= SLOWER * search.closed[0]
    visible &= search.memory <= LARGER * search.memory_limit
    which = np.flatnonzero(visible)
    always = np.union1d(
        search.front[visible[search.front]], np.flatnonzero(np.isfinite(search.simulated))
    )
    if len(which) <= MOST:
        return np.union1d(which, always)
    cell = np.zeros(len(which), int)
    for values in (search.memory[which], search.closed[which]):
        scaled = np.log(values) - np.log(values.min())
        cell = cell * CELLS + np.minimum(scaled / scaled.max() * CELLS, CELLS - 1).astype(int)
    cell = cell * 2 + search.fits[which]
    index_in_cell = pd.Series(cell).groupby(cell).cumcount()
    # The first plan of every cell, then the second of every cell, and so on.
    chosen = np.lexsort((cell, index_in_cell))[: MOST - len(always)]
    return np.union1d(which[chosen], always)


def _groups(search: Search) -> list[tuple[str, np.ndarray, str]]:
    """(name, which plans, colour) by degree of tensor parallelism."""
    tp, node, (_, *inks) = search.plans.tp, search.cluster.devices_per_node, theme.look().series
    groups = [
        ("no tensor parallelism", tp == 1, inks[3]),
        (f"tp within a node of {node}", (tp > 1) & (tp <= node), inks[1]),
        ("tp across nodes", tp > node, inks[0]),
    ]
    return [group for group in groups if (group[1] & search.fits).any()]


def _points(
    search: Search, which: np.ndarray, name: str, fill: str, opacity: float, symbol: str = "circle"
) -> dict[str, Any]:
    pairs = list(zip(search.memory[which].tolist(), search.closed[which].tolist(), strict=True))
    hover_texts = [
        f"{brief(search.plans[at])}<br>{_costs(*pair)}"
        for at, pair in zip(which, pairs, strict=True)
    ]
    look = {"ink": fill, "size": 5, "symbol": symbol, "marker": {"opacity": opacity}}
    return {**curve(name, pairs, hover_texts, mode="markers", **look), "type": "scattergl"}


def _costs(memory: float, seconds: float) -> str:
    return f"{theme.in_seconds(seconds)}, {theme.in_bytes(memory)}"


def _simulated(search: Search) -> list[dict[str, Any]]:
    """Simulated plans: a ring at the simulated time, a line to it from the estimate."""
    look, positions = theme.look(), np.flatnonzero(np.isfinite(search.simulated) & search.fits)
    ends, pairs, hover_texts = [], [], []
    for at in positions:
        x, estimate, y = (float(v[at]) for v in (search.memory, search.closed, search.simulated))
        ends += [(x, estimate), (x, y), (None, None)]
        pairs.append((x, y))
        plan = brief(search.plans[at])
        serial = theme.in_seconds(search.serial[at])
        hover_texts.append(
            f"{plan}<br>simulated {_costs(x, y)}<br>estimated {theme.in_seconds(estimate)}"
            f"<br>without overlap {serial}"
        )
    ring = {"ink": look.ink, "symbol": "circle-open", "size": 9}
    ring |= {"marker": {"line": {"width": 1.5}}}
    line = curve("", ends, ink=look.faint, width=1, showlegend=False)
    return [line, curve("simulated", pairs, hover_texts, mode="markers", **ring)]


def _best(search: Search) -> tuple[dict[str, Any], dict[str, Any]]:
    """The best plan's name as a note, and a star at its simulated time."""
    look, x, y = theme.look(), float(search.memory[0]), float(search.simulated[0])
    edge = {"line": {"width": 1, "color": look.paper}}
    style = {"ink": look.ink, "symbol": "star", "size": 17, "marker": edge}
    star = curve("best", [(x, y)], mode="markers", showlegend=False, **style)
    words = brief(search.plans[0]).split()
    half = (len(words) + 1) // 2
    name = [theme.text(" ".join(half_words)) for half_words in (words[:half], words[half:])]
    right = x > math.sqrt(search.memory.min() * min(search.memory_limit, search.memory.max()))
    side = "right" if right else "left"
    arrow = {"showarrow": True, "arrowcolor": look.faint, "arrowwidth": 1, "ay": 44}
    arrow |= {"ax": -24 if right else 24, "xanchor": side, "align": side}
    text = f"<b>best</b>: {name[0]}<br>{name[1]}"
    return note(text, math.log10(x), math.log10(y), **arrow), star


def _finding(search: Search) -> str:
    """What the front shows: how much time more memory would save, or that it would save none."""
    first, estimate = search.front[0], theme.in_seconds(search.closed[0])
    if search.fits[first]:
        seconds = theme.in_seconds(search.simulated[0])
        return f"The fastest plan of all fits: {seconds} per step"
    less = theme.share(1 - search.closed[first] / search.closed[0])
    more = theme.in_bytes(search.memory[first])
    fits = f"The fastest plan that fits takes {estimate} by estimate"
    return f"{fits}; one of {more} takes {less} less"
