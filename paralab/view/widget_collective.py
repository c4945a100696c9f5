"""One all-reduce, two algorithms, one link: the alpha-beta model next to real sends.

The lines are the formulas of theory/collectives.py over the bytes of the tensor, for the ranks and
the link of the sliders. “Run it” sums a tensor with the algorithm's own sends and receives
(parallel/collectives.py) and replays them on the link of the sliders: the marker of that run should
be on its line. Another link needs no new run.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

from paralab.report import amounts
from paralab.report.tables import Tables
from paralab.spec import Cluster, Link
from paralab.theory import collectives
from paralab.view import theme
from paralab.view.chart import Chart
from paralab.view.links import algorithms
from paralab.view.marks.curves import curve
from paralab.view.theme import in_bytes, in_seconds, in_speed
from paralab.view.widget import At, Widget
from paralab.view.widget_parts import buttons, cluster_of, slider

FORMS = {"ring": "ring_all_reduce", "tree": "tree_all_reduce"}
SIZES = tuple(m * 10**e for e in (3, 4, 5, 6) for m in (1, 2, 5)) + (10**7,)  # 1 kB to 10 MB
LINE = tuple(4 * round(10 ** (3 + i / 12) / 4) for i in range(49))  # bytes at which lines are drawn
LATENCIES = tuple(m * 10**-e for e in (6, 5, 4, 3) for m in (1, 3))[:-1]  # 1 µs to 1 ms
BANDWIDTHS = tuple(m * 10**e for e in range(7, 12) for m in (1, 3))[:-1]  # 10 MB/s to 100 GB/s
WAITING = "time before the first byte of a message arrives"


class Collective(Widget):
    """Knobs: algorithm, ranks, bytes of the tensor, latency and bandwidth of the link."""

    name, replays = "collective", {"compute": 0.0}
    board = {
        "algorithm": buttons("algorithm", tuple(FORMS), start="ring"),
        "ranks": slider("ranks", (2, 3, 4, 6, 8), "rank", start=4),
        "nbytes": slider("tensor", SIZES, in_bytes, start=200_000),
        "alpha": slider("latency α", LATENCIES, in_seconds, start=1e-4, tip=WAITING),
        "bandwidth": slider("bandwidth", BANDWIDTHS, in_speed, start=10**9),
    }
    _decades: tuple[int, int] | None = None

    def _measure(self, at: At, *, stop: threading.Event, **_: Any) -> Tables:
        from paralab.trace import trace

        function = _traced_function(FORMS[at["algorithm"]])
        return trace(function, ranks=at["ranks"], args=(at["nbytes"],), stop=stop)

    def _depends_on(self, at: At) -> Any:
        return at["algorithm"], at["ranks"], at["nbytes"]

    def _refused(self, at: At) -> str:
        return ""  # nothing is trained, and no tensor on the slider is large

    def _hint(self, at: At) -> str:
        return f"“Run it” sums the tensor over {at['ranks']} real processes."

    def _cluster(self, at: At) -> Cluster:
        return cluster_of(Link(alpha=at["alpha"], bandwidth=at["bandwidth"]))

    def _seconds(self, at: At, form: str, nbytes: int) -> float:
        return collectives.seconds(FORMS[form], at["ranks"], nbytes, at.cluster.intra)

    def _charts(self, at: At) -> list[Chart]:
        n, size, chosen = at["ranks"], at["nbytes"], at["algorithm"]
        curves = {form: [(s, self._seconds(at, form, s)) for s in LINE] for form in FORMS}
        runs: dict[str, list[tuple[int, float]]] = {}
        for (form, ranks, nbytes), run in list(self._results.items()):
            if ranks == n:
                replayed = At(self, at, run).replayed.step_time
                runs.setdefault(form, []).append((nbytes, replayed))
        time_of = {form: self._seconds(at, form, size) for form in FORMS}
        fast, slow = sorted(FORMS, key=time_of.__getitem__)
        times = time_of[slow] / time_of[fast]
        finding = "ring and tree take the same time within 5 %"
        if times >= 1.05:
            finding = f"{fast} is {times:.1f} times as fast as {slow}"
        chart = algorithms(curves, runs, title=f"{n} ranks, {in_bytes(size)}: {finding}")
        seconds, name = time_of[chosen], f"chosen: {chosen}, {in_bytes(size)}"
        ring = {"ink": theme.axis_colour("dp"), "symbol": "circle-open", "size": 18}
        ring |= {"mode": "markers", "marker": {"line": {"width": 3}}}
        chart.add_trace(curve(name, [(size, seconds)], [in_seconds(seconds)], **ring))
        return [chart]

    def _rows(self, at: At) -> list[dict[str, str]]:
        n, size, rows = at["ranks"], at["nbytes"], []
        for form, algorithm in FORMS.items():
            busiest = max(collectives.wire_bytes(algorithm, n, size, rank) for rank in range(n))
            run, run_cells = self._results.get((form, n, size)), ["not run"] * 3
            if run is not None:
                counted = int(amounts.traffic(run, warmup=True)["bytes"].max())
                times = At(self, at, run).replayed.step_time, run.step_time
                run_cells = [in_bytes(counted), *map(in_seconds, times)]
            rows.append(
                {
                    "algorithm": form + " ◂" * (form == at["algorithm"]),
                    "messages one after another": str(collectives.steps(algorithm, n)),
                    "most that a rank sends": in_bytes(busiest),
                    "counted": run_cells[0],
                    "predicted": in_seconds(self._seconds(at, form, size)),
                    "replayed": run_cells[1],
                    "measured": run_cells[2],
                }
            )
        return rows

    def _outcome(self, at: At) -> str:
        n, replayed = at["ranks"], at.replayed.step_time
        right = all(list(bounds) == [n * (n + 1) / 2] * 2 for bounds in at.measured.results)
        off = abs(replayed / self._seconds(at, at["algorithm"], at["nbytes"]) - 1)
        sums = "every rank holds the sum" if right else "the sums are wrong"
        exact = (
            "exactly what the formula says" if off < 1e-6 else f"{100 * off:.1f} % off the formula"
        )
        return f"{sums}. Replayed on this link: {in_seconds(replayed)}, {exact}"

    def _steadied(self, chart: Chart) -> Chart:
        """The chart with a time axis of whole decades, which stays while the curves fit: then a
        slider moves the lines, not the axis.
        """
        low, high = chart.layout.yaxis.range
        need = math.floor(low + 0.15), math.ceil(high - 0.15)
        low, high = self._decades or need
        if not low <= need[0] <= need[1] <= high <= low + need[1] - need[0] + 2:
            low, high = need
        self._decades = low, high
        ticks = [10.0**k for k in range(low, high + 1)]
        words = [in_seconds(t) for t in ticks]
        chart.layout.yaxis.update(range=[low, high], tickvals=ticks, ticktext=words)
        return chart


def _traced_function(name: str) -> Callable[..., list[float]]:
    """The algorithm as a function for `pl.trace`; pickled by value, so ranks import no widgets."""

    def all_reduce(group: Any, nbytes: int) -> list[float]:
        import torch

        from paralab.parallel import collectives

        tensor = torch.full((nbytes // 4,), float(group.index + 1), device=group.context.device)
        getattr(collectives, name)(group, tensor)
        return [float(tensor.min()), float(tensor.max())]

    all_reduce.__name__ = name
    return all_reduce
