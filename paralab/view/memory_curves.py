"""The memory table of a report as curves: what a rank had on its device, sample by sample.

A sample is a state of all categories at one moment; it holds until the next one. Phases of the step
come from the spans. Bytes, and seconds from the start of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

from paralab.checks import illegal, whole
from paralab.report.tables import COMPUTE_KINDS, DRY, Tables
from paralab.view.marks.bars import by_category

PHASES = (*COMPUTE_KINDS, "optimizer")


class Phase(NamedTuple):
    """A stretch of the step in which a rank did work of one kind, seconds from the step's start."""

    kind: str
    start: float
    end: float


@dataclass(frozen=True)
class Curve:
    """What one rank had on its device in one step.

    times     seconds from the step's start
    samples   {category: bytes} at each, every category of the curve in each; totals: their sums
    length    of the step, seconds; start on the report's clock
    """

    report: Tables
    rank: int
    step: int
    times: list[float]
    samples: list[dict[str, int]]
    totals: list[int]
    length: float
    start: float

    @property
    def numbered(self) -> bool:
        """Whether times are numbers of what happens, in order, and no seconds."""
        return self.report.clock == DRY

    @cached_property
    def phases(self) -> list[Phase]:
        """Work of a kind that follows work of its kind is one, whatever was waited between."""
        spans = self.report.spans
        spans = spans[(spans["rank"] == self.rank) & (spans["step"] == self.step)]
        spans = spans[(spans["lane"] == "compute") & spans["kind"].isin(PHASES)]
        columns = (spans.sort_values("start")[c].tolist() for c in ("kind", "start", "end"))
        phases = []
        for kind, run in groupby(zip(*columns, strict=True), itemgetter(0)):
            _, starts, ends = zip(*run, strict=True)
            phases.append(Phase(kind, starts[0] - self.start, max(ends) - self.start))
        return phases

    @cached_property
    def peak_at(self) -> int:
        """The sample with the most bytes, the first of equals."""
        return max(range(len(self.samples)), key=lambda i: (self.totals[i], -i))

    @property
    def peak(self) -> int:
        return self.totals[self.peak_at]

    @property
    def reserved(self) -> dict[str, int]:
        """{name: bytes} of the step's peaks that a GPU's allocator says, to be drawn as lines."""
        table = self.report.allocator
        mine = table[(table["rank"] == self.rank) & (table["step"] == self.step)]
        return {name: int(mine[name].iloc[0]) for name in ("allocated", "reserved") if len(mine)}

    @property
    def held(self) -> dict[str, int]:
        """{category: bytes} at the peak."""
        return self.samples[self.peak_at]

    def phase(self, index: int) -> str:
        """ "in backward", "after backward": where a sample lies."""
        time, before = self.times[index], ""
        for phase in self.phases:  # a sample at the border of two ends the first
            if phase.start < time <= phase.end:
                return f"in {phase.kind.replace('_', ' ')}"
            if phase.end < time:
                before = f"after {phase.kind.replace('_', ' ')}"
        return before or "before forward"


# ---- reading -------------------------------------------------------------------------------------
def curves(
    report: Tables, *, ranks: Sequence[int] | None = None, step: int | None = None
) -> list[Curve]:
    """The memory of ``ranks`` (default all that were sampled) in ``step``.

    The default step is the one with the highest peak, of equals the last: a program's first steps
    also set things up. Raises ValueError if nothing was sampled, or naming a rank or step that was
    not.
    """
    table = report.memory[report.memory["tier"] == "device"]
    if table.empty:
        legal = "what pl.run(...) or pl.predict(...) returned for a model"
        raise illegal("report", report, "no memory was sampled in it", legal)
    table = _chosen(table, "rank", ranks)
    table = _chosen(table, "step", None if step is None else [step])
    steps = report.steps.groupby(["rank", "step"]).agg({"start": "min", "end": "max"})
    edges = {at: (start, end) for at, start, end in steps.itertuples()}
    found = {
        at: _curve(report, *map(int, at), mine, edges.get(at))
        for at, mine in table.groupby(["rank", "step"])
    }
    if step is None:
        step = max(found, key=lambda at: (found[at].peak, at[1]))[1]
    return [curve for (_, at), curve in found.items() if at == step]


def _chosen(table: Any, column: str, wanted: Sequence[int] | None) -> Any:
    if wanted is None:
        return table
    there = sorted(set(table[column].tolist()))
    for value in wanted:
        if whole(column, value, at_least=0) not in there:
            raise illegal(column, value, "no memory was sampled there", ", ".join(map(str, there)))
    return table[table[column].isin(list(wanted))]


def _curve(
    report: Tables, rank: int, step: int, rows: Any, edges: tuple[float, float] | None
) -> Curve:
    """edges: where the step begins and ends, if that is known."""
    times: list[float] = []
    samples: list[dict[str, int]] = []
    columns = (rows[c].tolist() for c in ("time", "category", "bytes"))
    for time, category, count in zip(*columns, strict=True):
        if not times or time != times[-1] or category in samples[-1]:
            times.append(time)
            samples.append({})
        samples[-1][category] = count
    names = by_category(c for sample in samples for c in sample)
    order = sorted(range(len(times)), key=times.__getitem__)
    samples = [{c: samples[i].get(c, 0) for c in names} for i in order]
    totals = [sum(sample.values()) for sample in samples]
    times.sort()
    zero, end = edges or (times[0], times[0])
    at = [time - zero for time in times]
    return Curve(report, rank, step, at, samples, totals, max(end, times[-1]) - zero, zero)


def fullest(found: Sequence[Curve]) -> Curve:
    """The curve with the highest peak, of equals that of the first rank."""
    return max(found, key=lambda curve: (curve.peak, -curve.rank))


def thinned(totals: Sequence[int], most: int) -> list[int]:
    """Indices of at most about ``most`` samples: of every stretch first, highest and lowest."""
    count = len(totals)
    if count <= most:
        return list(range(count))
    size = -(-count // max(1, most // 3))
    kept = {count - 1}
    for low in range(0, count, size):
        part = range(low, min(low + size, count))
        kept |= {low, max(part, key=totals.__getitem__), min(part, key=totals.__getitem__)}
    return sorted(kept)


def capacity(report: Tables) -> dict[str, int]:
    """{label: bytes} of the device: the run's own limit, or what its cluster states, if it does."""
    if limit := report.meta.get("memory_limit"):
        return {"memory limit": int(limit)}
    if report.cluster is not None and report.cluster.memory:
        return {f"memory of {report.cluster.name}": report.cluster.memory}
    return {}
