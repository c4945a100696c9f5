"""What a report's times say in one number: step time, bubble, waiting, hidden; and peak memory.

Pure functions of a `Tables`; measured, replayed and predicted reports are read alike. Times in
seconds; bytes sent and copied are in moved.py. Step 0 is warm-up and left out wherever there is
another step. Definitions: the docstrings below; the bubble is 1 - sum(compute) / (p T) as in PTD-P
(Narayanan+ 2021, arXiv:2104.04473, sec. 2.2), with T from the first forward to the last backward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median
from typing import TYPE_CHECKING

from paralab.report import dry
from paralab.report.once import once
from paralab.report.tables import COMPUTE_KINDS, COPY_LANES
from paralab.theory.traffic import BOOKKEEPING

if TYPE_CHECKING:
    import pandas as pd

    from paralab.report.tables import Tables

Interval = tuple[float, float]
NAN = float("nan")


def in_outline(report: Tables) -> bool:
    """Whether the report has one rank per pipeline stage and one box per action: see
    interpret/outline.py. A box's cost is what the rank computes in it; the rest of its length it
    stands still.
    """
    return report.meta.get("detail") == "actions"


def seconds_of(report: Tables, spans: pd.DataFrame) -> pd.Series:
    """What these spans of a compute lane took; of an outline's boxes, what was computed in them."""
    seconds = spans["end"] - spans["start"]
    if in_outline(report):
        seconds = seconds.where(~spans["kind"].isin(COMPUTE_KINDS), spans["cost"])
    return seconds


def reported_ranks(report: Tables) -> list[int]:
    """The ranks that the tables have rows of: all, or in outline one per pipeline stage."""
    return sorted(set(report.steps["rank"].tolist())) or list(range(report.world_size))


def measured_steps(report: Tables) -> list[int]:
    """The steps that count: all but step 0, or step 0 if there is no other."""
    steps = sorted(set(report.steps["step"].tolist()))
    return [s for s in steps if s >= 1] or steps


def step_durations(report: Tables, *, warmup: bool = False) -> dict[int, float]:
    """Largest (end - start) over ranks, seconds, of every step that counts; of all with warmup."""
    dry.needs_times(report, "the time of a step")
    steps = report.steps
    largest = (steps["end"] - steps["start"]).groupby(steps["step"]).max()
    return {s: float(t) for s, t in largest.items() if warmup or s in measured_steps(report)}


def step_time(report: Tables) -> float:
    """Median of ``step_durations``, seconds; NaN without steps."""
    return median(step_durations(report).values() or [NAN])


def typical_step(report: Tables) -> int:
    """The step that counts whose duration is nearest the median; the earliest of equals."""
    durations, middle = step_durations(report), step_time(report)
    return min(durations, key=lambda s: (abs(durations[s] - middle), s))


def bubble(report: Tables) -> float:
    """Idle share of the pipeline part: 1 - sum(compute) / (p T), median over the steps that count.

    Compute is forward, backward and weight_grad, and what a rank copies into gradient buckets
    between them; T is the longest of the ranks' times from first forward to last backward, of each
    pipeline where there are several. With one stage there is no pipeline to wait for, so each rank
    is held against its own T.
    """
    return median([step_bubble(report, s) for s in measured_steps(report)] or [NAN])


def step_bubble(report: Tables, step: int) -> float:
    """``bubble`` of one step; NaN if nothing was computed in it."""
    dry.needs_times(report, "a bubble")
    parts = pipeline_parts(report, step)
    room = sum(_longest(report, step).values())
    return 1 - sum(busy for _, _, busy in parts.values()) / room if room > 0 else NAN


def idle_shares(report: Tables, step: int) -> dict[int, float]:
    """{rank: what it does not compute of the longest T in its pipeline}; their mean is the bubble
    where there is one pipeline.
    """
    longest = _longest(report, step)
    return {
        rank: 1 - part[2] / longest[rank] for rank, part in pipeline_parts(report, step).items()
    }


def _longest(report: Tables, step: int) -> dict[int, float]:
    """{rank: the longest time from first forward to last backward in its pipeline}"""
    parts, longest = pipeline_parts(report, step), {}
    of = {rank: report.plan.place(rank)[1:] for rank in parts}
    for rank, (start, end, _) in parts.items():
        longest[of[rank]] = max(longest.get(of[rank], 0.0), end - start)
    return {rank: longest[of[rank]] for rank in parts}


@once
def pipeline_parts(report: Tables, step: int) -> dict[int, tuple[float, float, float]]:
    """{rank: (start of its first forward, end of its last backward, seconds of compute between)}"""
    import numpy as np  # `import paralab` does without

    columns = ["rank", "kind", "start", "end", "cost"]
    here = (report.spans["step"] == step) & (report.spans["lane"] == "compute")
    spans = report.spans.loc[here, columns]
    rank, start, end = (spans[name].to_numpy() for name in ("rank", "start", "end"))
    work = spans["kind"].isin(COMPUTE_KINDS).to_numpy()
    ranks = np.unique(rank[work])
    if not len(ranks):
        return {}
    at = np.searchsorted(ranks, rank).clip(max=len(ranks) - 1)  # of another rank: some of these
    first, last = np.full(len(ranks), np.inf), np.full(len(ranks), -np.inf)
    np.minimum.at(first, at[work], start[work])
    np.maximum.at(last, at[work], end[work])
    packs = (spans["kind"] == "copy").to_numpy() & (ranks[at] == rank)
    counts = work | packs & (start >= first[at]) & (end <= last[at])
    seconds = seconds_of(report, spans).to_numpy()
    busy = np.bincount(at[counts], seconds[counts], len(ranks))
    parts = zip(ranks.tolist(), first.tolist(), last.tolist(), busy.tolist(), strict=True)
    return {rank: tuple(part) for rank, *part in parts}


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same stretch of time as disjoint intervals in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def length(intervals: Sequence[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def overlap(a: Sequence[Interval], b: Sequence[Interval]) -> float:
    """Seconds in which both of two unions run."""
    total, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        total += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total


def bookkeeping_spans(report: Tables) -> set[int]:
    """Ids of comm spans that carry a loss or a clock, not the algorithm's bytes."""
    calls = report.collectives
    return set(calls["span"][calls["phase"].isin(BOOKKEEPING)].tolist())


def shares(report: Tables, step: int) -> dict[str, float]:
    """Where one step's time went: seconds, mean over ranks.

    work           forward, backward, weight_grad spans
    optimizer      optimizer spans of the rank itself; an offloaded step is its host's
    wait           the compute lane stood still for a collective
    communication  at least one collective in flight (bookkeeping left out)
    hidden         of that, while the rank's compute lane did forward or backward work
    """
    if in_outline(report):
        return _shares_in_outline(report, step)
    spans = report.spans[report.spans["step"] == step]
    control, sums = bookkeeping_spans(report), defaultdict(float)
    ranks = reported_ranks(report)
    for rank in ranks:
        mine = spans[spans["rank"] == rank]
        by_kind: dict[str, list[Interval]] = defaultdict(list)
        for id_, lane, kind, start, end in zip(
            mine["id"].tolist(), mine["lane"], mine["kind"], mine["start"], mine["end"], strict=True
        ):
            if id_ not in control and lane != "host":
                by_kind["work" if kind in COMPUTE_KINDS else kind].append((start, end))
        work, comm = union(by_kind["work"]), union(by_kind["comm"])
        sums["work"] += length(work)
        sums["optimizer"] += length(by_kind["optimizer"])
        sums["wait"] += length(by_kind["wait"])
        sums["communication"] += length(comm)
        sums["hidden"] += overlap(comm, work)
    parts = ("work", "optimizer", "wait", "communication", "hidden")
    return {part: float(sums[part]) / max(len(ranks), 1) for part in parts}


def _shares_in_outline(report: Tables, step: int) -> dict[str, float]:
    """``shares`` where a box is an action: what is waited for inside it is a wait too."""
    spans = report.spans[(report.spans["step"] == step) & (report.spans["lane"] == "compute")]
    seconds = spans["end"] - spans["start"]
    boxes = spans["kind"].isin(COMPUTE_KINDS)
    inside = float((seconds - spans["cost"])[boxes].sum())
    found = {
        "work": float(spans["cost"][boxes].sum()),
        "optimizer": float(seconds[spans["kind"] == "optimizer"].sum()),
        "wait": float(seconds[spans["kind"] == "wait"].sum()) + inside,
    }
    moving = report.meta["in flight"]  # sums have no moments; said when they were made
    here = {"communication": moving["communication"], "hidden": moving["communication hidden"]}
    each = max(len(reported_ranks(report)), 1)
    return {part: value / each for part, value in found.items()} | here


def copy_shares(report: Tables, step: int) -> dict[str, float]:
    """Copies between memory tiers in one step: seconds, mean over ranks.

    copies   at least one of them under way
    hidden   of that, while the rank's compute lane did work of any kind, and no waiting; of any
             step, for a copy may end in the one after its own
    """
    if in_outline(report):
        moving = report.meta["in flight"]
        return {"copies": moving["copies"], "hidden": moving["copies hidden"]}
    spans, sums = report.spans, defaultdict(float)
    ranks = reported_ranks(report)
    for rank in ranks:
        mine = spans[spans["rank"] == rank]
        copies = mine[(mine["step"] == step) & mine["lane"].isin(COPY_LANES)]
        work = mine[(mine["lane"] == "compute") & (mine["kind"] != "wait")]
        under_way, busy = (union(zip(t["start"], t["end"], strict=True)) for t in (copies, work))
        sums["copies"] += length(under_way)
        sums["hidden"] += overlap(under_way, busy)
    return {part: float(sums[part]) / max(len(ranks), 1) for part in ("copies", "hidden")}


def peak_memory(report: Tables) -> int | None:
    """Bytes on the device at the worst sample of the worst rank; None if memory was not sampled."""
    memory = report.memory[report.memory["tier"] == "device"]
    if memory.empty:
        return None
    return int(memory.groupby(["rank", "step", "time"])["bytes"].sum().max())
