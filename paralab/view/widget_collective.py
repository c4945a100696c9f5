"""One all-reduce, two algorithms, one link: what the alpha-beta model says, and real sends.

The lines are the formulas of theory/collectives.py for the ranks and the link of the sliders, over
message size. «Run it» sends the message for real, by the algorithm's own sends and receives
(parallel/collectives.py), and replays what was sent on the link of the sliders: a marker, which
belongs on its line. A new link needs no new run.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

from paralab.report import metrics
from paralab.report.report import Report
from paralab.spec import Cluster, Link
from paralab.theory import collectives
from paralab.view import theme
from paralab.view.chart import Chart
from paralab.view.links import algorithms
from paralab.view.widget_bench import Bench, Progress
from paralab.view.widget_parts import Knob, Sketch

FORMS = {"ring": "ring_all_reduce", "tree": "tree_all_reduce"}
RANKS = (2, 3, 4, 6, 8)
SIZES = tuple(m * 10**e for e in (3, 4, 5, 6) for m in (1, 2, 5)) + (10**7,)  # 1 kB to 10 MB
LATENCIES = tuple(m * 10**-e for e in (6, 5, 4, 3) for m in (1, 3))[:-1]  # 1 µs to 1 ms
BANDWIDTHS = tuple(m * 10**e for e in range(7, 12) for m in (1, 3))[:-1]  # 10 MB/s to 100 GB/s


class Collective(Bench):
    """Algorithm, ranks, message size, latency and bandwidth of the link."""

    name = "collective"
    counts = False

    def __init__(self) -> None:
        self._decades: tuple[int, int] | None = None
        super().__init__(
            {
                "algorithm": Knob(
                    label="algorithm",
                    value="ring",
                    buttons=True,
                    options=[(name, name) for name in FORMS],
                ),
                "ranks": Knob(label="ranks", value=4, options=[(f"{n} ranks", n) for n in RANKS]),
                "nbytes": Knob(
                    label="message",
                    value=200_000,
                    options=[(theme.scaled(n, "B"), n) for n in SIZES],
                ),
                "alpha": Knob(
                    label="latency α",
                    value=1e-4,
                    tip="seconds before the first byte",
                    options=[(theme.scaled(a, "s"), a) for a in LATENCIES],
                ),
                "bandwidth": Knob(
                    label="bandwidth",
                    value=10**9,
                    options=[(theme.scaled(b, "B/s"), b) for b in BANDWIDTHS],
                ),
            }
        )

    # ---- the bench ----------------------------------------------------------------------------
    def _predict(self, knobs: dict[str, Any]) -> Sketch:
        return self._sketched(knobs, "")

    def _compare(self, knobs: dict[str, Any], found: Report) -> Sketch:
        seconds, replayed = self._seconds(knobs, knobs["algorithm"]), self._replay(knobs, found)
        right = "every rank holds the sum" if _right(found) else "the sums are wrong"
        gap = abs(replayed / seconds - 1)
        said = "exactly what the formula says" if gap < 1e-6 else f"{100 * gap:.1f} % off"
        return self._sketched(
            knobs,
            f"{knobs['ranks']} processes sent for real: {right}. Replayed on this link: "
            f"{theme.scaled(replayed, 's')}, {said}.",
        )

    def _measure(
        self, knobs: dict[str, Any], *, stop: threading.Event, progress: Progress
    ) -> Report:
        from paralab.trace import trace

        function = _sender(FORMS[knobs["algorithm"]])
        return trace(function, ranks=knobs["ranks"], args=(knobs["nbytes"],), stop=stop)

    def _needs(self, knobs: dict[str, Any]) -> Any:
        return knobs["algorithm"], knobs["ranks"], knobs["nbytes"]

    def _hint(self, knobs: dict[str, Any]) -> str:
        return f"«Run it» sends the message between {knobs['ranks']} real processes."

    def _starting(self, knobs: dict[str, Any]) -> str:
        return f"{knobs['ranks']} processes: {knobs['algorithm']} all-reduce …"

    # ---- pictures -----------------------------------------------------------------------------
    def _seconds(self, knobs: dict[str, Any], form: str, nbytes: int | None = None) -> float:
        link = Link(alpha=knobs["alpha"], bandwidth=knobs["bandwidth"])
        size = knobs["nbytes"] if nbytes is None else nbytes
        return collectives.seconds(FORMS[form], knobs["ranks"], size, link)

    def _replay(self, knobs: dict[str, Any], found: Report) -> float:
        link = Link(alpha=knobs["alpha"], bandwidth=knobs["bandwidth"])
        cluster = Cluster(devices_per_node=64, flops=1e12, memory_bandwidth=1e12, intra=link)
        return found.replay(cluster, compute=0.0).step_time

    def _sketched(self, knobs: dict[str, Any], said: str) -> Sketch:
        n, size, chosen = knobs["ranks"], knobs["nbytes"], knobs["algorithm"]
        curves = {form: [(s, self._seconds(knobs, form, s)) for s in SIZES] for form in FORMS}
        runs: dict[str, list[tuple[int, float]]] = {}
        for (form, ranks, nbytes), found in list(self._results.items()):
            if ranks == n:
                runs.setdefault(form, []).append((nbytes, self._replay(knobs, found)))
        ring, tree = (self._seconds(knobs, form) for form in FORMS)
        fast, slow = ("ring", "tree") if ring < tree else ("tree", "ring")
        times = max(ring, tree) / min(ring, tree)
        finding = f"{n} ranks, {theme.scaled(size, 'B')}: " + (
            f"{fast} is {times:.1f} times as fast as {slow}"
            if times >= 1.05
            else "ring and tree take the same time"
        )
        chart = algorithms(curves, runs, title=finding)
        here = self._seconds(knobs, chosen)
        chart.add_scatter(
            name=f"chosen: {chosen}, {theme.scaled(size, 'B')}",
            x=[size],
            y=[here],
            mode="markers",
            marker={
                "size": 18,
                "symbol": "circle-open",
                "color": theme.axis_colour("dp"),
                "line": {"width": 3},
            },
            hovertext=[f"{theme.scaled(here, 's')}"],
            hovertemplate="%{hovertext}<extra></extra>",
        )
        rows = [self._row(knobs, form, form == chosen) for form in FORMS]
        return Sketch(chart=chart, rows=rows, said=said)

    def _row(self, knobs: dict[str, Any], form: str, chosen: bool) -> dict[str, str]:
        n, size = knobs["ranks"], knobs["nbytes"]
        found = self._results.get((form, n, size))
        sent = [collectives.wire_bytes(FORMS[form], n, size, rank) for rank in range(n)]
        counted = "" if found is None else int(metrics.traffic(found, warmup=True)["bytes"].max())
        return {
            "algorithm": f"{form} ◂" if chosen else form,
            "messages in a row": str(collectives.steps(FORMS[form], n)),
            "busiest rank sends": theme.scaled(max(sent), "B"),
            "counted": theme.scaled(counted, "B") if counted != "" else "not run",
            "predicted": theme.scaled(self._seconds(knobs, form), "s"),
            "replayed": theme.scaled(self._replay(knobs, found), "s") if found else "not run",
            "measured here": theme.scaled(found.step_time, "s") if found else "not run",
        }

    def _steady(self, chart: Chart) -> Chart:
        """Whole decades that stay while they can: a slider moves the lines, not the axis."""
        low, high = chart.layout.yaxis.range
        need = math.floor(low + 0.15), math.ceil(high - 0.15)
        held = self._decades or need
        fits = held[0] <= need[0] and need[1] <= held[1]
        if not fits or held[1] - held[0] > need[1] - need[0] + 2:
            held = need
        self._decades = held
        ticks = [10.0**k for k in range(held[0], held[1] + 1)]
        chart.layout.yaxis.update(
            range=list(held), tickvals=ticks, ticktext=[theme.scaled(t, "s") for t in ticks]
        )
        return chart


def _sender(name: str) -> Callable[..., list[float]]:
    """The algorithm as a function for `pl.trace`. It travels by value: ranks need no widgets."""

    def all_reduce(group: Any, nbytes: int) -> list[float]:
        import torch

        from paralab.parallel import collectives

        tensor = torch.full((nbytes // 4,), float(group.index + 1), device=group.context.device)
        getattr(collectives, name)(group, tensor)
        return [float(tensor.min()), float(tensor.max())]

    all_reduce.__name__ = name
    return all_reduce


def _right(found: Report) -> bool:
    n = found.world_size
    return all(list(bounds) == [n * (n + 1) / 2] * 2 for bounds in found.results)
