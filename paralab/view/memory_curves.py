"""The memory table of a report as curves: what a rank had on its device, sample by sample.

A sample has the bytes of all categories at one moment and holds until the next one. The phases of
the step come from the spans. Times are seconds from the start of the step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from typing import Any

from paralab.checks import choice, illegal, whole
from paralab.report.tables import COMPUTE_KINDS, DRY, Tables
from paralab.spec import Cluster
from paralab.view import naming
from paralab.view.marks.bars import by_category

PHASES = (*COMPUTE_KINDS, "optimizer")
# How a title says in which phase the peak is.
PHASE_NAME = {"weight_grad": "the weight half of backward", "optimizer": "the optimizer"}


@dataclass(frozen=True)
class Curve:
    """What one rank had on its device in one step.

    times     seconds from the step's start, one per sample
    samples   {category: bytes}; each sample has all categories of the curve
    length    seconds of the step
    start     of the step, in seconds on the report's clock
    """

    report: Tables
    rank: int
    step: int
    times: list[float]
    samples: list[dict[str, int]]
    length: float
    start: float

    @property
    def numbered(self) -> bool:
        """Whether times are positions in the order of events, not seconds: in a dry run."""
        return self.report.clock == DRY

    @cached_property
    def phases(self) -> list[tuple[str, float, float]]:
        """(kind, start, end) of the parts of the step in which the rank did work of one kind, waits
        in between included; in order, seconds from the step's start.
        """
        spans = self.report.spans
        spans = spans[(spans["rank"] == self.rank) & (spans["step"] == self.step)]
        spans = spans[(spans["lane"] == "compute") & spans["kind"].isin(PHASES)]
        columns = (spans.sort_values("start")[c].tolist() for c in ("kind", "start", "end"))
        phases = []
        for kind, run in groupby(zip(*columns, strict=True), itemgetter(0)):
            _, starts, ends = zip(*run, strict=True)
            phases.append((kind, starts[0] - self.start, max(ends) - self.start))
        return phases

    @cached_property
    def totals(self) -> list[int]:
        """The sum of each sample, bytes."""
        return [sum(sample.values()) for sample in self.samples]

    @cached_property
    def peak_at(self) -> int:
        """The index of the sample with the most bytes, the first of several."""
        return self.totals.index(max(self.totals))

    @property
    def peak(self) -> int:
        return self.totals[self.peak_at]

    @property
    def reserved(self) -> dict[str, int]:
        """{"allocated", "reserved": bytes}: the step's peaks by a GPU's allocator; {} on CPUs."""
        table = self.report.allocator
        mine = table[(table["rank"] == self.rank) & (table["step"] == self.step)]
        return {name: int(mine[name].iloc[0]) for name in ("allocated", "reserved") if len(mine)}

    @property
    def held(self) -> dict[str, int]:
        """{category: bytes} at the peak."""
        return self.samples[self.peak_at]

    def phase(self, index: int) -> str:
        """ "in backward", "after backward": where in the step a sample is."""
        time, before = self.times[index], ""
        for kind, start, end in self.phases:  # a sample between two phases belongs to the first
            if start < time <= end:
                return f"in {PHASE_NAME.get(kind, kind)}"
            if end < time:
                before = f"after {PHASE_NAME.get(kind, kind)}"
        return before or "before forward"


# ---- reading -------------------------------------------------------------------------------------
def curves(report: Tables, rank: int | None = None) -> list[Curve]:
    """The memory of ``rank`` (default: of all that were sampled, a curve each) in one step.

    The step is the one with the highest peak, the last of several, as a program's first steps also
    set things up. Raises ValueError if nothing was sampled, or nothing of the rank.
    """
    table = report.memory[report.memory["tier"] == "device"]
    if table.empty:
        legal = "what pl.run(...) or pl.predict(...) returned for a model"
        raise illegal("report", report, "no memory was sampled in it", legal)
    if rank is not None:
        known = tuple(sorted(set(table["rank"].tolist())))
        table = table[table["rank"] == choice("rank", whole("rank", rank, at_least=0), known)]
    steps = report.steps.groupby(["rank", "step"]).agg({"start": "min", "end": "max"})
    edges = {key: (start, end) for key, start, end in steps.itertuples()}
    samples: dict[tuple[int, int], list[Any]] = defaultdict(list)
    columns = ("rank", "step", "time", "category", "bytes")
    for rank, at, *sample in zip(*(table[column].tolist() for column in columns), strict=True):
        samples[rank, at].append(sample)
    by_key = {key: _curve(report, *key, samples[key], edges.get(key)) for key in sorted(samples)}
    _, step = max(by_key, key=lambda key: (by_key[key].peak, key[1]))
    return [curve for (_, at), curve in by_key.items() if at == step]


def _curve(
    report: Tables, rank: int, step: int, rows: list[Any], edges: tuple[float, float] | None
) -> Curve:
    """The curve of one rank and step; ``edges``: start and end of the step, if known."""
    times: list[float] = []
    samples: list[dict[str, int]] = []
    for time, category, count in rows:
        if not times or time != times[-1] or category in samples[-1]:
            times.append(time)
            samples.append({})
        samples[-1][category] = count
    names = by_category(c for sample in samples for c in sample)
    order = sorted(range(len(times)), key=times.__getitem__)
    samples = [{c: samples[i].get(c, 0) for c in names} for i in order]
    times.sort()
    zero, end = edges or (times[0], times[0])
    at = [time - zero for time in times]
    return Curve(report, rank, step, at, samples, max(end, times[-1]) - zero, zero)


def fullest(curves: Sequence[Curve]) -> Curve:
    """The curve with the highest peak, the one of the lowest rank if several have it."""
    return max(curves, key=lambda curve: (curve.peak, -curve.rank))


def thinned(totals: Sequence[int], most: int) -> list[int]:
    """Indices of about ``most`` samples: the first, the highest and the lowest of every stretch."""
    count = len(totals)
    if count <= most:
        return list(range(count))
    size = -(-count // max(1, most // 3))
    kept = {count - 1}
    for low in range(0, count, size):
        stretch = range(low, min(low + size, count))
        kept |= {low, max(stretch, key=totals.__getitem__), min(stretch, key=totals.__getitem__)}
    return sorted(kept)


def capacity(report: Tables) -> dict[str, int]:
    """{label: bytes} of the device: the run's memory limit, or what its cluster states; else {}."""
    cluster = report.cluster
    if limit := report.meta.get("memory_limit"):
        return {"the memory limit": int(limit)}
    if cluster is not None and cluster.memory < Cluster.memory:
        return {f"a device of {naming.cluster_name(cluster)}": cluster.memory}
    return {}
