"""What a report's spans say in seconds: how long a step takes, and where its time goes.

Pure functions of `Tables`; measured, replayed and predicted reports are read alike, and a dry run,
which has no times, is refused in one sentence. Step 0 is warm-up and left out wherever there is
another step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from statistics import median
from typing import TYPE_CHECKING

from paralab.checks import choice, whole
from paralab.report.about import in_outline, measured_steps, needs_times
from paralab.report.intervals import Interval, length, overlap, union
from paralab.report.tables import COMPUTE_KINDS, COPY_LANES, Tables
from paralab.theory.traffic import BOOKKEEPING

if TYPE_CHECKING:
    import pandas as pd

NAN = float("nan")
SHARES = ("work", "optimizer", "wait", "communication", "hidden")
COPIED, EXPOSED = ("copies", "hidden"), ("calls", "copies")


# ---- times of a step -----------------------------------------------------------------------------
def step_durations(report: Tables, *, warmup: bool = False) -> dict[int, float]:
    """Largest (end - start) over ranks, seconds, of every step that counts; of all with warmup."""
    needs_times(report, "the time of a step")
    steps = report.steps
    largest = (steps["end"] - steps["start"]).groupby(steps["step"]).max()
    counts = largest.index if warmup else measured_steps(report)
    return {step: float(seconds) for step, seconds in largest.items() if step in counts}


def step_time(report: Tables) -> float:
    """Seconds of a step, the median over all steps but step 0 where there are others: of the rank
    that takes longest, from its begin to its end. NaN without steps.
    """
    return median(step_durations(report).values() or [NAN])


def typical_step(report: Tables) -> int:
    """The step that counts whose duration is nearest the median; the earliest of equals."""
    durations, middle = step_durations(report), step_time(report)
    return min(durations, key=lambda s: (abs(durations[s] - middle), s))


def chosen_step(report: Tables, step: int | None) -> int:
    """The step that was asked for, or the typical one. Raises ValueError if the report has no such
    step, or none at all.
    """
    steps = sorted(set(report.steps["step"].tolist()))
    if not steps:
        raise ValueError("this report has no steps; pl.run(...) records them")
    if step is None:
        return typical_step(report)
    return choice("step", whole("step", step, at_least=0), tuple(steps))


def seconds_of(report: Tables, spans: pd.DataFrame) -> pd.Series:
    """What these spans of a compute lane took; of an outline's boxes, what was computed in them."""
    seconds = spans["end"] - spans["start"]
    if in_outline(report):
        seconds = seconds.where(~spans["kind"].isin(COMPUTE_KINDS), spans["cost"])
    return seconds


def bubble(report: Tables) -> float:
    """Idle share of the pipeline part: 1 - sum(compute) / (p T), median over the steps that count.

    Compute is forward, backward and weight_grad, and what a rank copies into gradient buckets
    between them; T is the longest of the ranks' times from first forward to last backward, of each
    pipeline where there are several. With one stage there is no pipeline to wait for, so each rank
    is held against its own T. PTD-P divides by the ideal time instead: theory/ideal.py.
    """
    return median([step_bubble(report, s) for s in measured_steps(report)] or [NAN])


def step_bubble(report: Tables, step: int) -> float:
    """``bubble`` of one step; NaN if nothing was computed in it."""
    needs_times(report, "a bubble")
    parts = pipeline_parts(report, step).values()
    room = sum(longest for *_, longest in parts)
    if room <= 0:
        return NAN
    return max(0.0, 1 - sum(busy for _, _, busy, _ in parts) / room)  # but for rounding


def idle_shares(report: Tables, step: int) -> dict[int, float]:
    """{rank: what it does not compute of the longest T in its pipeline}; their mean is the bubble
    where there is one pipeline. Of a step in which nothing takes time there are none.
    """
    parts = pipeline_parts(report, step).items()
    return {rank: 1 - busy / longest for rank, (_, _, busy, longest) in parts if longest > 0}


def pipeline_parts(report: Tables, step: int) -> dict[int, tuple[float, float, float, float]]:
    """{rank: (start of its first forward, end of its last backward, seconds of compute between,
    the longest such time of a rank in its pipeline)}
    """
    known = vars(report).setdefault("_parts", {})  # tables never change, and pictures ask again
    if step not in known:
        known[step] = _parts(report, step)
    return known[step]


def _parts(report: Tables, step: int) -> dict[int, tuple[float, float, float, float]]:
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
    longest: dict[tuple, float] = {}
    of = [report.plan.place(rank)[1:] for rank in ranks.tolist()]
    for pipeline, took in zip(of, (last - first).tolist(), strict=True):
        longest[pipeline] = max(longest.get(pipeline, 0.0), took)
    columns = (column.tolist() for column in (ranks, first, last, busy))
    parts = zip(*columns, map(longest.get, of), strict=True)
    return {rank: tuple(part) for rank, *part in parts}


def pipeline_times(report: Tables, step: int | None = None) -> pd.DataFrame:
    """Where each rank's T of one pipeline step goes, in seconds: forward + backward + p2p + idle.

    p2p   the rank waits for a message that is in flight: communication that nothing hides. In a
          replay a message is in flight once its sender has sent it. On the wall clock it is so from
          the moment its receiver is ready, as a profiler's receive kernel is, and p2p holds idle
          time too
    idle  what is left of T, which is that of the bubble: the longest over the ranks, from a rank's
          first forward to its last backward

    An outline has no messages by themselves: of it p2p is NaN, and lies in idle.
    """
    import pandas as pd

    needs_times(report, "the times of a pipeline")
    step = chosen_step(report, step)
    spans = report.spans[report.spans["step"] == step]
    sent = spans[spans["kind"] == "comm"]
    flights = dict(zip(sent["id"], zip(sent["start"], sent["end"], strict=True), strict=True))
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
def middle(steps: Sequence[Mapping[str, float]], names: Iterable[str]) -> dict[str, float]:
    """Each of these quantities of several steps, its median; NaN without steps."""
    return {name: median([step[name] for step in steps] or [NAN]) for name in names}


def _ranks_in(report: Tables, step: int) -> int:
    """How many ranks took this step; those of an observed program may end at different ones."""
    return max(report.steps["rank"][report.steps["step"] == step].nunique(), 1)


def shares(report: Tables, step: int) -> dict[str, float]:
    """Where one step's time went: seconds, mean over the ranks that took it.

    work           forward, backward, weight_grad spans
    optimizer      optimizer spans of the rank itself; an offloaded step is its host's
    wait           the compute lane waited for a collective
    communication  at least one collective in flight (bookkeeping left out)
    hidden         of that, while the rank's compute lane did work of any kind, and no waiting

    In outline a box is an action, and what is waited for inside it is a wait too.
    """
    sums, ranks = defaultdict(float), _ranks_in(report, step)
    spans = report.spans[report.spans["step"] == step]
    if in_outline(report):
        spans = spans[spans["lane"] == "compute"]
        seconds, boxes = spans["end"] - spans["start"], spans["kind"].isin(COMPUTE_KINDS)
        sums["work"] = spans["cost"][boxes].sum()
        sums["optimizer"] = seconds[spans["kind"] == "optimizer"].sum()
        sums["wait"] = seconds[spans["kind"] == "wait"].sum()
        sums["wait"] += (seconds - spans["cost"])[boxes].sum()
        moving = report.meta["in flight"]  # sums have no moments; said when they were made
        here = {"communication": moving["communication"], "hidden": moving["communication hidden"]}
        return {name: float(sums[name]) / ranks for name in SHARES[:3]} | here
    calls = report.collectives  # those that carry a loss or a clock are none of the algorithm's
    bookkeeping = spans["id"].isin(calls["span"][calls["phase"].isin(BOOKKEEPING)])
    spans = spans[~bookkeeping & (spans["lane"].eq("compute") | spans["kind"].eq("comm"))]
    for at in _by_rank(spans, spans["kind"].mask(spans["kind"].isin(COMPUTE_KINDS), "work")):
        comm, waits = union(at.pop("comm", ())), at.pop("wait", ())
        sums["wait"] += length(waits)
        sums["optimizer"] += length(at["optimizer"])
        sums["work"] += length(union(at["work"]))
        sums["communication"] += length(comm)
        sums["hidden"] += overlap(comm, union(chain.from_iterable(at.values())))
    return {name: float(sums[name]) / ranks for name in SHARES}


def typical_shares(report: Tables) -> dict[str, float]:
    """Each of ``shares``, the median over the steps that count; NaN without steps. Where most of
    them have no calls, as with local SGD, that says nothing of its calls: then these are means.
    """
    parts = [shares(report, step) for step in measured_steps(report)]
    found = middle(parts, SHARES)
    if found["communication"] == 0 < max(part["communication"] for part in parts):
        for name in ("wait", "communication", "hidden"):
            found[name] = sum(part[name] for part in parts) / len(parts)
    return found


def exposed(report: Tables, step: int) -> dict[str, float]:
    """What ``shares`` calls wait: for "calls", and for "copies" and what the host does between
    them. Of an outline with copies NaN: what a rank is idle for inside a box is not said.
    """
    wait = shares(report, step)["wait"]
    if not len(report.copies):
        return {"calls": wait, "copies": 0.0}
    if in_outline(report):
        return {"calls": NAN, "copies": NAN}
    spans = report.spans
    calls = set(spans["id"][spans["kind"] == "comm"].tolist())
    waits = spans[(spans["step"] == step) & (spans["kind"] == "wait")]
    jobs = waits[[calls.isdisjoint(after) for after in waits["after"]]]
    copies = float((jobs["end"] - jobs["start"]).sum()) / _ranks_in(report, step)
    return {"calls": max(0.0, wait - copies), "copies": copies}  # but for rounding


def host_seconds(report: Tables, step: int) -> float:
    """For how long the hosts' processors worked, of an offloaded optimizer, as in ``shares``."""
    spans = report.spans[(report.spans["step"] == step) & (report.spans["lane"] == "host")]
    seconds = spans["cost"] if in_outline(report) else spans["end"] - spans["start"]
    return float(seconds.sum()) / _ranks_in(report, step)


def copy_shares(report: Tables, step: int) -> dict[str, float]:
    """Copies between memory tiers in one step: seconds, mean over the ranks that took it.

    copies   at least one of them in flight
    hidden   of that, while the rank's compute lane did work of any kind, and no waiting; of any
             step, for a copy may end in the one after its own
    """
    if in_outline(report):
        moving = report.meta["in flight"]
        return {"copies": moving["copies"], "hidden": moving["copies hidden"]}
    sums: dict[str, float] = defaultdict(float)
    spans = report.spans
    here = spans["lane"].isin(COPY_LANES) & (spans["step"] == step)
    busy = (spans["lane"] == "compute") & (spans["kind"] != "wait")
    spans = spans[here | busy]
    for at in _by_rank(spans, spans["lane"].mask(here, "copies")):
        in_flight, worked = union(at["copies"]), union(at["compute"])
        sums["copies"] += length(in_flight)
        sums["hidden"] += overlap(in_flight, worked)
    return {name: sums[name] / _ranks_in(report, step) for name in COPIED}


def _by_rank(spans: pd.DataFrame, names: pd.Series) -> Iterable[dict[str, list[Interval]]]:
    """Of every rank {name: when the spans of this name ran}."""
    found: dict[int, dict[str, list[Interval]]] = defaultdict(lambda: defaultdict(list))
    columns = (spans[name].tolist() for name in ("rank", "start", "end"))
    for name, rank, start, end in zip(names, *columns, strict=True):
        found[rank][name].append((start, end))
    return found.values()
