"""What a report's spans say in seconds: how long a step takes, and where its time goes.

Pure functions of `Tables`, alike for measured, replayed and predicted reports; a dry run has no
times and is refused. Step 0 is warm-up and is left out wherever there is another step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import chain
from statistics import fmean, median
from typing import TYPE_CHECKING

from paralab.checks import choice, whole
from paralab.report.facts import in_outline, measured_steps, needs_times, remembered
from paralab.report.intervals import Interval, length, overlap, union
from paralab.report.tables import COMPUTE_KINDS, COPY_LANES, Tables
from paralab.theory.traffic import BOOKKEEPING

if TYPE_CHECKING:
    import pandas as pd

NAN = float("nan")
SHARES = ("work", "optimizer", "host", "wait", "for calls", "for copies")
SHARES += ("communication", "hidden", "copies", "copies hidden")


# ---- times of a step -----------------------------------------------------------------------------
def step_durations(report: Tables, *, warmup: bool = False) -> dict[int, float]:
    """{step: seconds that its slowest rank took}, without warm-up steps unless ``warmup``."""
    needs_times(report, "the time of a step")
    largest: dict[int, float] = {}
    names = ("step", "start", "end")
    for step, start, end in zip(*(report.steps[c].tolist() for c in names), strict=True):
        largest[step] = max(end - start, largest.get(step, 0.0))
    return {step: largest[step] for step in (sorted(largest) if warmup else measured_steps(report))}


def step_time(report: Tables) -> float:
    """Seconds of a step on its slowest rank, median over the measured steps; NaN without steps."""
    return median(step_durations(report).values() or [NAN])


def typical_step(report: Tables) -> int:
    """The measured step whose duration is nearest the median; of several, the earliest."""
    durations, median_time = step_durations(report), step_time(report)
    return min(durations, key=lambda s: (abs(durations[s] - median_time), s))


def chosen_step(report: Tables, step: int | None) -> int:
    """``step``; None: the typical one. Raises ValueError if the report has no such step."""
    steps = sorted(set(report.steps["step"].tolist()))
    if not steps:
        raise ValueError("this report has no steps; pl.run(...) records them")
    if step is None:
        return typical_step(report)
    return choice("step", whole("step", step, at_least=0), tuple(steps))


def seconds_of(report: Tables, spans: pd.DataFrame) -> pd.Series:
    """Seconds of spans of a compute lane; in outline the compute, as boxes contain waiting."""
    seconds = spans["end"] - spans["start"]
    if in_outline(report):
        seconds = seconds.where(~spans["kind"].isin(COMPUTE_KINDS), spans["cost"])
    return seconds


def bubble(report: Tables) -> float:
    """Idle share of a pipeline's p ranks: 1 - sum(compute) / (p T), median over measured steps.

    Compute is forward, backward and weight_grad, and the copies into gradient buckets between them.
    T is the longest time from a rank's first forward to its last backward, over the ranks of a
    pipeline; every pipeline has its own T. With one stage a rank has no pipeline to wait for, so T
    is its own time. PTD-P divides by the ideal time instead: theory/ideal.py.
    """
    return median([step_bubble(report, s) for s in measured_steps(report)] or [NAN])


def step_bubble(report: Tables, step: int) -> float:
    """``bubble`` of one step; NaN if nothing was computed in it."""
    needs_times(report, "a bubble")
    parts = pipeline_parts(report, step).values()
    device_time = sum(longest for *_, longest in parts)
    if device_time <= 0:
        return NAN
    # Rounding may give a share just below 0.
    return max(0.0, 1 - sum(busy for _, _, busy, _ in parts) / device_time)


def idle_shares(report: Tables, step: int) -> dict[int, float]:
    """{rank: share of its pipeline's T in which it does not compute}; with one pipeline, the mean
    is the bubble. Empty if nothing in the step takes time.
    """
    parts = pipeline_parts(report, step).items()
    return {rank: 1 - busy / longest for rank, (_, _, busy, longest) in parts if longest > 0}


@remembered
def pipeline_parts(report: Tables, step: int) -> dict[int, tuple[float, float, float, float]]:
    """{rank: (start of its first forward, end of its last backward, seconds of compute between
    them, T of its pipeline as in `bubble`)}
    """
    on_lane = (report.spans["step"] == step) & report.spans["lane"].isin(["compute"])
    spans = report.spans.loc[on_lane, ["rank", "kind", "start", "end", "cost"]]
    work = spans["kind"].isin(COMPUTE_KINDS)
    by_rank = spans[work].groupby("rank")
    first, last = by_rank["start"].min(), by_rank["end"].max()
    copies = spans[spans["kind"].isin(["copy"])]  # into gradient buckets
    begun, over = (copies["rank"].map(edge) for edge in (first, last))
    inside = copies.index[(copies["start"] >= begun) & (copies["end"] <= over)]
    counted = spans[work | spans.index.isin(inside)]
    busy = seconds_of(report, counted).groupby(counted["rank"]).sum()
    longest: dict[tuple, float] = defaultdict(float)
    pipelines = {rank: report.plan.place(rank)[1:] for rank in first.index.tolist()}
    for rank, took in (last - first).items():
        longest[pipelines[rank]] = max(longest[pipelines[rank]], took)
    return {
        rank: (float(first[rank]), float(last[rank]), float(busy[rank]), longest[pipeline])
        for rank, pipeline in pipelines.items()
    }


def pipeline_times(report: Tables, step: int | None = None) -> pd.DataFrame:
    """The parts of each rank's T in one step, in seconds: T = forward + backward + p2p + idle.

    p2p   the rank waits for a message in flight: communication that nothing hides. In a replay a
          message is in flight once its sender has sent it. On the wall clock it already is when its
          receiver is ready, as in a profiler's receive kernel, so that p2p includes idle time
    idle  the rest of T, which is the T of `bubble`: the longest time from a rank's first forward to
          its last backward, over the ranks of its pipeline

    An outline has no spans of messages: its p2p is NaN, and idle includes it.
    """
    import pandas as pd

    needs_times(report, "the timing of a pipeline")
    step = chosen_step(report, step)
    spans = report.spans[report.spans["step"] == step]
    calls = spans[spans["kind"] == "comm"]
    flights = dict(zip(calls["id"], zip(calls["start"], calls["end"], strict=True), strict=True))
    rows = {}
    for rank, (start, end, busy, longest) in pipeline_parts(report, step).items():
        own = spans[(spans["rank"] == rank) & (spans["lane"] == "compute")]
        own = own[(own["start"] >= start) & (own["end"] <= end)]
        forward = float(seconds_of(report, own[own["kind"] == "forward"]).sum())
        waits = own[own["kind"] == "wait"]
        p2p = sum(
            overlap([(a, b)], union(flights[call] for call in after if call in flights))
            for a, b, after in zip(waits["start"], waits["end"], waits["after"], strict=True)
        )
        idle = longest - busy - p2p
        rows[rank] = forward, busy - forward, NAN if in_outline(report) else p2p, idle, longest
    names = ["forward", "backward", "p2p", "idle", "T"]
    return pd.DataFrame.from_dict(rows, orient="index", columns=names).rename_axis("rank")


# ---- where the time went -------------------------------------------------------------------------
@remembered
def shares(report: Tables, step: int) -> dict[str, float]:
    """Where the time of one step went: seconds, mean over the ranks that took it.

    work           forward, backward, weight_grad spans
    optimizer      optimizer spans on the rank's compute lane
    host           the host's processor worked on an offloaded optimizer
    wait           the compute lane waited
    for copies     the part of wait for copies, which includes the host's work between copies
    for calls      the part of wait for collectives. Both are NaN for an outline with copies: a box
                   does not say what its rank waits for
    communication  at least one collective was in flight (bookkeeping left out)
    hidden         the part of communication in which the compute lane did work of any kind
    copies         at least one copy between memory tiers was in flight
    copies hidden  the part of it in which the compute lane did work of any kind, of this step or of
                   another one: a copy may end in the next step

    In outline a box is an action, and the waiting inside it counts as wait.
    """
    spans = report.spans[report.spans["step"] == step]
    took = report.steps["rank"][report.steps["step"] == step]  # observed ranks may differ in steps
    ranks, outline = max(took.nunique(), 1), in_outline(report)
    sums = (_sums_in_outline if outline else _sums)(report, spans)
    part = {name: float(sums[name]) / ranks for name in SHARES}
    if outline:  # its rows are sums and do not overlap; what was in flight is in its meta
        moving = report.meta["in flight"]
        part |= {name: moving[name] for name in ("communication", "copies", "copies hidden")}
        part["hidden"] = moving["communication hidden"]
    # Rounding may leave less than 0 for calls; a NaN stays one, as the first argument of max.
    return part | {"for calls": max(part["wait"] - part["for copies"], 0.0)}


def _sums(report: Tables, spans: pd.DataFrame) -> dict[str, float]:
    """The seconds of `shares`, summed over the ranks, of the spans of a step."""
    sums: dict[str, float] = defaultdict(float)
    host = spans[spans["lane"] == "host"]
    sums["host"] = (host["end"] - host["start"]).sum()
    calls = report.collectives  # bookkeeping calls, of a loss or a clock, are not the algorithm's
    bookkeeping = spans["id"].isin(calls["span"][calls["phase"].isin(BOOKKEEPING)])
    own = spans[~bookkeeping & (spans["lane"].eq("compute") | spans["kind"].eq("comm"))]
    for intervals in _by_rank(own, own["kind"].mask(own["kind"].isin(COMPUTE_KINDS), "work")):
        comm, waits = union(intervals.pop("comm", ())), intervals.pop("wait", ())
        sums["wait"] += length(waits)
        sums["optimizer"] += length(intervals["optimizer"])
        sums["work"] += length(union(intervals["work"]))
        sums["communication"] += length(comm)
        sums["hidden"] += overlap(comm, union(chain.from_iterable(intervals.values())))
    if len(report.copies):
        every = set(report.spans["id"][report.spans["kind"] == "comm"].tolist())
        waits = spans[spans["kind"] == "wait"]
        waits = waits[[every.isdisjoint(after) for after in waits["after"]]]
        sums["for copies"] = (waits["end"] - waits["start"]).sum()
    lane, copying = report.spans["lane"], spans["lane"].isin(COPY_LANES)
    if copying.any():
        copies = report.spans.index.isin(spans.index[copying])
        both = report.spans[copies | (lane.eq("compute") & report.spans["kind"].ne("wait"))]
        for intervals in _by_rank(both, both["lane"].mask(both["lane"] != "compute", "copies")):
            in_flight = union(intervals["copies"])
            sums["copies"] += length(in_flight)
            sums["copies hidden"] += overlap(in_flight, union(intervals["compute"]))
    return sums


def _sums_in_outline(report: Tables, spans: pd.DataFrame) -> dict[str, float]:
    """`_sums` of an outline; without what was in flight."""
    lane = spans[spans["lane"] == "compute"]
    seconds, boxes = lane["end"] - lane["start"], lane["kind"].isin(COMPUTE_KINDS)
    sums: dict[str, float] = defaultdict(float)
    sums["host"] = spans["cost"][spans["lane"] == "host"].sum()
    sums["work"] = lane["cost"][boxes].sum()
    sums["optimizer"] = seconds[lane["kind"] == "optimizer"].sum()
    sums["wait"] = seconds[lane["kind"] == "wait"].sum() + (seconds - lane["cost"])[boxes].sum()
    if len(report.copies):
        sums["for copies"] = NAN
    return sums


def typical_shares(report: Tables) -> dict[str, float]:
    """Medians of ``shares`` over the measured steps; means if most do not communicate; or NaN."""
    parts = [shares(report, step) for step in measured_steps(report)]
    moving = [part["communication"] for part in parts]
    typical = fmean if any(moving) and not median(moving) else median
    return {name: typical([part[name] for part in parts] or [NAN]) for name in SHARES}


def _by_rank(spans: pd.DataFrame, names: pd.Series) -> Iterable[dict[str, list[Interval]]]:
    """For every rank {name: intervals of the spans that ``names`` gives this name}."""
    by_rank: dict[int, dict[str, list[Interval]]] = defaultdict(lambda: defaultdict(list))
    columns = (spans[name].tolist() for name in ("rank", "start", "end"))
    for name, rank, start, end in zip(names, *columns, strict=True):
        by_rank[rank][name].append((start, end))
    return by_rank.values()
