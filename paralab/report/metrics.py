"""What a report's tables say in numbers: times of a step, bytes moved, bytes held, FLOP/s.

Pure functions of `Tables`; measured, replayed and predicted reports are read alike, and a dry run
as far as it goes: what needs times refuses it in one sentence. Times in seconds, bytes per step.
Step 0 is warm-up and left out wherever there is another step. The bubble is 1 - sum(compute) /
(p T), with T from the first forward to the last backward; PTD-P (Narayanan+ 2021, arXiv:2104.04473,
sec. 2.2) divides by the ideal time instead (theory/ideal.py).
"""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from paralab.checks import choice, illegal, whole
from paralab.instruments.allocator import PEAKS
from paralab.instruments.samples import CATEGORIES
from paralab.interpret import quick
from paralab.report.tables import COMPUTE_KINDS, COPY_LANES, DRY
from paralab.spec import OWN_FORM
from paralab.spec.links import Reach
from paralab.spec.tiers import WAYS
from paralab.theory import training
from paralab.theory.traffic import BOOKKEEPING, POINT_TO_POINT, edges, ends, far_share, level

if TYPE_CHECKING:
    import pandas as pd

    from paralab.report.tables import Tables

Interval = tuple[float, float]
Row = tuple[str, float, str]  # of a summary: quantity, value, unit
NAN = float("nan")
BY = ("rank", "op", "axis", "level", "phase", "edge")
COPIED_BY = ("rank", "link", "category")
SHARES = ("work", "optimizer", "wait", "communication", "hidden")
COPIES_HIDDEN = "of the copies hidden behind compute"


# ---- what a report is ---------------------------------------------------------------------------
def needs_tables(report: Any) -> None:
    """Refuse what has no tables. What `pl.observe` yields is no report, and has those of one."""
    if not hasattr(report, "steps"):
        legal = "what pl.run(...) or pl.predict(...) returned"
        raise illegal("report", report, "not a report", legal)


def needs_times(report: Tables, what: str) -> None:
    """Refuse ``what`` for a dry run."""
    if report.clock == DRY:
        why = f"{what} needs times, and a dry run has none: "
        why += "it knows what happens and in which order"
        legal = "summary(), peaks(), traffic(), copied(), memory_chart(), traffic_chart() of this "
        legal += "report; times from pl.predict or pl.run"
        raise illegal("clock", DRY, why, legal)


def needs_own_devices(report: Tables, what: str) -> None:
    """Refuse ``what`` for a run whose ranks shared a GPU: no span there is one rank's alone."""
    if report.meta.get("shared_gpu"):
        why = f"{what} needs what each rank computed, and ranks shared this GPU: "
        why += "what one took has the others' in it"
        legal = "a run with device='cpu', or with a GPU for each rank"
        raise illegal("device", report.meta.get("device"), why, legal)


def device_of(report: Tables) -> str:
    """What a run was on, "cpu" or "cuda"; "cpu" of what no rank has run."""
    return str(report.meta.get("device") or "cpu").partition(":")[0]


def node_of(report: Tables, rank: int) -> int:
    """The node that ``rank`` ran on; one node where the report does not say."""
    nodes = report.meta.get("nodes") or []
    return nodes[rank] if rank < len(nodes) else 0


def reach(report: Tables, op: str, rank: int, peer: int, ranks: Sequence[int]) -> Reach:
    """Where the group of a call is, or the two ends of a message."""
    return Reach.of(ends(op, rank, peer, ranks), functools.partial(node_of, report))


def own_calls(report: Tables) -> pd.DataFrame:
    """The algorithm's calls: without those that carry a loss or a clock."""
    calls = report.collectives
    return calls[~calls["phase"].isin(BOOKKEEPING)]


def in_outline(report: Tables) -> bool:
    """Whether the report has one rank per pipeline stage and one box per action: see
    interpret/outline.py. A box's cost is what the rank computes in it; the rest of its length it
    is idle.
    """
    return report.meta.get("detail") == "actions"


def reported_ranks(report: Tables) -> list[int]:
    """The ranks that the tables have rows of: all, or in outline one per pipeline stage."""
    return sorted(set(report.steps["rank"].tolist())) or list(range(report.world_size))


def measured_steps(report: Tables) -> list[int]:
    """The steps that count: all but step 0, or step 0 if there is no other."""
    steps = sorted(set(report.steps["step"].tolist()))
    return [s for s in steps if s >= 1] or steps


# ---- times of a step -----------------------------------------------------------------------------
def step_durations(report: Tables, *, warmup: bool = False) -> dict[int, float]:
    """Largest (end - start) over ranks, seconds, of every step that counts; of all with warmup."""
    needs_times(report, "the time of a step")
    steps = report.steps
    largest = (steps["end"] - steps["start"]).groupby(steps["step"]).max()
    return {s: float(t) for s, t in largest.items() if warmup or s in measured_steps(report)}


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
    is held against its own T.
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
    for pipeline, length in zip(of, (last - first).tolist(), strict=True):
        longest[pipeline] = max(longest.get(pipeline, 0.0), length)
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
    parts = [shares(report, step) for step in measured_steps(report)] or [defaultdict(lambda: NAN)]
    found = {name: median(part[name] for part in parts) for name in SHARES}
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
    return {name: sums[name] / _ranks_in(report, step) for name in ("copies", "hidden")}


def _by_rank(spans: pd.DataFrame, names: pd.Series) -> Iterable[dict[str, list[Interval]]]:
    """Of every rank {name: when the spans of this name ran}."""
    found: dict[int, dict[str, list[Interval]]] = defaultdict(lambda: defaultdict(list))
    columns = (spans[name].tolist() for name in ("rank", "start", "end"))
    for name, rank, start, end in zip(names, *columns, strict=True):
        found[rank][name].append((start, end))
    return found.values()


# ---- bytes moved --------------------------------------------------------------------------------
def traffic(
    report: Tables,
    by: str | Sequence[str] = "rank",
    *,
    bookkeeping: bool = False,
    warmup: bool = False,
) -> pd.DataFrame:
    """Bytes sent per step, summed over what is not named in ``by``.

    by           one or several of rank (the sender), op, axis, level, phase, edge; edge gives two
                 columns, sender and receiver. A level is each edge's own: intra if sender and
                 receiver share a node; of a report in outline, whose rank stands for the members of
                 its group, they are on the levels as those of all members
    bookkeeping  count phases control and setup too
    warmup       count step 0 too

    The column bytes is the mean over the counted steps: int64 whenever every row's mean is whole,
    float64 otherwise. Raises ValueError if a row's wire_bytes are not what its operation sends.
    """
    names, summed = _named(by, BY), in_outline(report)
    keys = [k for name in names for k in (("sender", "receiver") if name == "edge" else (name,))]
    calls = report.collectives if bookkeeping else own_calls(report)
    nodes, of_all = functools.partial(node_of, report), summed and "edge" not in names

    def moved() -> Iterator[tuple[dict[str, Any], int]]:
        for row in calls[calls["step"].isin(_counted(report, warmup))].itertuples(index=False):
            rank, payload, wire = row.rank, row.payload_bytes, row.wire_bytes
            sent = edges(row.op, row.ranks, rank, payload, row.peer, sent=wire if summed else None)
            if sum(sent.values()) != wire:
                raise ValueError(
                    f"collective {row.call} on rank {rank}: wire_bytes={wire}, but {row.op} of "
                    f"{payload} bytes among {len(row.ranks)} ranks sends {sum(sent.values())}; "
                    "traffic() counts only bytes that the formulas know"
                )
            labels = {"rank": rank, "op": row.op, "axis": row.axis, "phase": row.phase}
            if of_all and row.op not in POINT_TO_POINT:
                far = round(wire * far_share(row.op, row.ranks, payload, row.peer, nodes))
                parts = {"intra": wire - far, "inter": far}.items()
                yield from (({**labels, "level": which}, size) for which, size in parts if size)
                continue
            for receiver, size in sent.items():
                edge = {"sender": rank, "receiver": receiver}
                yield {**labels, **edge, "level": level((rank, receiver), nodes)}, size

    return _per_step(report, moved(), keys, warmup)


def copied(
    report: Tables, by: str | Sequence[str] = COPIED_BY, *, warmup: bool = False
) -> pd.DataFrame:
    """Bytes copied between memory tiers per step, summed over what is not named in ``by``.

    by      one or several of rank, link (h2d, d2h, disk read, disk write), category
    warmup  count step 0 too

    The column bytes is the mean over the counted steps, as in ``traffic``.
    """
    copies = report.copies[report.copies["step"].isin(_counted(report, warmup))]

    def moved() -> Iterator[tuple[dict[str, Any], int]]:
        for row in copies.itertuples(index=False):
            link = row.lane if row.op == "copy" else f"{row.lane} {row.op}"
            yield {"rank": row.rank, "link": link, "category": row.category}, row.bytes

    return _per_step(report, moved(), _named(by, COPIED_BY), warmup)


def _named(by: str | Sequence[str], legal: Sequence[str]) -> list[str]:
    several = isinstance(by, Iterable) and not isinstance(by, str)
    names = [choice("by", name, legal) for name in (by if several else [by])]
    if not names:
        raise illegal("by", by, "nothing to split by", " | ".join(legal))
    return names


def _counted(report: Tables, warmup: bool) -> set[int]:
    """The steps whose bytes are added up."""
    return set(report.steps["step"].tolist() if warmup else measured_steps(report))


def _per_step(
    report: Tables, moved: Iterable[tuple[dict[str, Any], int]], keys: Sequence[str], warmup: bool
) -> pd.DataFrame:
    """The bytes of one step by ``keys``; moved: (labels, bytes) of all steps that count. Links are
    in order from the device outwards.
    """
    import pandas as pd

    keys, place = list(dict.fromkeys(keys)), {link: str(at) for at, link in enumerate(WAYS)}
    n, totals = max(len(_counted(report, warmup)), 1), Counter()  # there may be no steps
    if keys == ["rank"]:  # one that moves nothing is worth a row
        totals.update({(rank,): 0 for rank in reported_ranks(report)})
    for labels, size in moved:
        totals[tuple([labels[key] for key in keys])] += size
    rows = sorted(totals.items(), key=lambda row: [place.get(label, label) for label in row[0]])
    numbers, whole = ("rank", "sender", "receiver"), all(size % n == 0 for _, size in rows)
    columns = {
        key: pd.Series([row[i] for row, _ in rows], dtype="int64" if key in numbers else "object")
        for i, key in enumerate(keys)
    }
    sizes = [size // n if whole else size / n for _, size in rows]
    return pd.DataFrame(columns | {"bytes": pd.Series(sizes, dtype=None if rows else "int64")})


# ---- bytes held ---------------------------------------------------------------------------------
class Peak(NamedTuple):
    """The sample with most bytes on a tier; held: {category: bytes}."""

    rank: int
    step: int
    time: float
    held: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.held.values())


def peak(report: Tables, *, tier: str = "device", rank: int | None = None) -> Peak | None:
    """The moment at which ``rank``, by default the worst rank, holds most; None without samples.

    Of several moments with as many bytes it is the first rank's first in a step that counts: an
    observation learns in step 0 what some bytes are for.
    """
    memory = report.memory[report.memory["tier"] == tier]
    if rank is not None:
        memory = memory[memory["rank"] == rank]
    if memory.empty:
        return None
    totals = memory.groupby(["rank", "step", "time"])["bytes"].sum()
    most = totals[totals == totals.max()]
    counts = most.index.get_level_values("step").isin(measured_steps(report))
    at = (most[counts] if counts.any() else most).index[0]
    moment = memory[(memory["rank"] == at[0]) & (memory["step"] == at[1])]
    moment = moment[moment["time"] == at[2]]
    held = moment.groupby("category", sort=False)["bytes"].sum().to_dict()
    return Peak(int(at[0]), int(at[1]), float(at[2]), held)


def peak_memory(report: Tables) -> int | None:
    """Bytes of all tensors on the device, workspace included, at the worst sample of the worst
    rank; None if memory was not sampled. A GPU's context, and what its allocator has reserved and
    does not use, are not counted.
    """
    found = peak(report)
    return None if found is None else found.total


def peaks(report: Tables, rank: int | None = None) -> pd.DataFrame:
    """What fills the device of ``rank`` (default: the worst rank) at its worst sample, in bytes.

    One row per category, always in the same order, and one "total". Columns: "program", what
    interpret/memory.py says of the moment at which the rank holds most, workspace included; and the
    report's clock. There is no program of a traced function, nor of a saved one with a block,
    schedule or passes of the user's own; then its column is 0. On a 2D or 2.5D grid it is that of
    the rank that holds most; others hold up to a few per cent less. A dry run is the program, and
    has no second column of it. Raises ValueError if memory was not sampled.
    """
    import pandas as pd

    worst = peak(report, rank=rank)
    if worst is None:
        ranks = sorted(set(report.memory["rank"][report.memory["tier"] == "device"].tolist()))
        if rank is not None:
            legal = f"one of {ranks}" if ranks else "-"
            raise illegal("rank", rank, "has no samples of memory", legal)
        raise illegal("memory", None, "memory was not sampled", "a report of pl.run or pl.predict")
    columns, plan = {report.clock: worst.held}, report.plan
    if report.clock != DRY:
        program = {}
        forms = (plan.schedule, *plan.passes, report.model and report.model.block)
        own = any(str(form).startswith(OWN_FORM) for form in forms)
        if report.model is not None and not own:
            optimizer = report.meta.get("optimizer", "adamw")
            how = {"optimizer": optimizer, "rank": worst.rank, "gloo": _gloo(report)}
            program = quick.peak(report.model, plan, **how)
        columns = {"program": program, **columns}
    known = dict.fromkeys([*CATEGORIES, *worst.held, *columns.get("program", ())])
    table = pd.DataFrame(
        {clock: [found.get(name, 0) for name in known] for clock, found in columns.items()},
        index=pd.Index(list(known), name="category"),
        dtype="int64",
    )
    table.loc["total"] = table.sum()
    return table


def _gloo(report: Tables) -> bool:
    """Whether messages are gloo's: those of ranks, else those of the cluster's devices."""
    usual = "gloo" if report.cluster is None or not report.cluster.gpus else "nccl"
    return report.meta.get("backend", usual) != "nccl"


# ---- FLOP/s -------------------------------------------------------------------------------------
def achieved(report: Tables) -> dict[str, float]:
    """{"model", "hardware"}: FLOP/s per device. Model FLOPs are what a step has to compute, forward
    and backward, however it is done; hardware FLOPs have recomputation on top (Korthikanti+ 2022,
    arXiv:2205.05198, sec. 6; "achieved teraFLOP/s" in PTD-P is these). Matrix products alone, 2
    FLOPs per multiply-add. Empty where no model was trained, for a model with a block of one's own,
    of a replay with other costs of compute than the run's, and where no time is known.
    """
    seconds, plan = step_time(report), report.plan
    model, scaled = report.model, "compute" in report.meta
    if model is None or model.block is not None or scaled or not seconds > 0:
        return {}
    how = {"seconds": seconds, "devices": plan.world_size, "recompute": plan.recompute}
    return training.utilisation(model, plan.global_batch, peak=1.0, **how)._asdict()


def utilisation(report: Tables) -> dict[str, float]:
    """``achieved`` as shares of the peak that the report's cluster states; empty if none."""
    peak_flops = report.cluster.peak_flops if report.cluster is not None else None
    return {name: rate / peak_flops for name, rate in achieved(report).items() if peak_flops}


# ---- on one screen ------------------------------------------------------------------------------
def summary(report: Tables) -> pd.DataFrame:
    """The report on one screen: index quantity; columns value and unit."""
    import pandas as pd

    rows = _of_a_dry_run(report) if report.clock == DRY else _of_a_run(report)
    frame = pd.DataFrame(rows, columns=["quantity", "value", "unit"])
    return frame.round({"value": 4}).set_index("quantity")


def readable(value: float) -> str:
    """A value of `summary` for people: counts and what is large as whole numbers, four digits of
    the rest, and "–" where there is none.
    """
    if not math.isfinite(value):
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"


def _of_a_run(report: Tables) -> Iterable[Row]:
    steps = measured_steps(report)
    part, n = typical_shares(report), max(len(reported_ranks(report)), 1)
    comm = part["communication"]
    yield "step time", step_time(report) * 1e3, "ms"
    yield "forward and backward", part["work"] * 1e3, "ms"
    yield "optimizer", part["optimizer"] * 1e3, "ms"
    yield "waiting", part["wait"] * 1e3, "ms"
    yield "communication in flight", comm * 1e3, "ms"
    yield "of it hidden behind compute", 100 * part["hidden"] / comm if comm > 0 else 0.0, "%"
    yield "sent per rank and step", traffic(report)["bytes"].sum() / n / 1e6, "MB"
    yield from _of_copies(report, steps, n)
    if len(table := report.allocator):
        # What the ledger counts, then the worst of what GPUs' allocators say of a rank's step.
        if (held := peak_memory(report)) is not None:
            yield "peak memory: bytes of tensors", held / 1e6, "MB"
        for name in (*PEAKS, "largest_free"):
            words = name.replace("largest_free", "largest free block")
            yield f"of the allocator: {words}", float(table[name].max()) / 1e6, "MB"
    if rates := achieved(report):
        yield "model FLOP/s per device", rates["model"] / 1e9, "GFLOP/s"
    for name, share in utilisation(report).items():
        yield f"{name} FLOPs utilisation", 100 * share, "% of peak"
    if report.plan.pp > 1:
        yield "bubble", 100 * bubble(report), "% of device time"
    if report.losses:
        unit = "nats" if report.model is not None else ""  # what a program returns may be any loss
        yield "loss, first step", report.losses[0], unit
        yield "loss, last step", report.losses[-1], unit
    if skipped := report.meta.get("skipped_steps"):
        yield "left out: a gradient overflowed", skipped, f"of {report.meta['steps']} steps"


def _of_copies(report: Tables, steps: Sequence[int], n: int) -> Iterable[Row]:
    """Copies between memory tiers: nothing where there are none."""
    unit = "MB" + " per rank" * (report.world_size > 1)
    sizes = copied(report, "link").set_index("link")["bytes"]
    for name, links in (
        ("host to device", WAYS[:1]),
        ("device to host", WAYS[1:2]),
        ("disk, read and written", WAYS[2:]),
    ):
        if size := sum(sizes.get(link, 0) for link in links):
            yield f"{name} per step", float(size) / n / 1e6, unit
    spans = report.spans[report.spans["lane"] == "host"]
    seconds = spans["cost"] if in_outline(report) else spans["end"] - spans["start"]
    host = seconds.groupby(spans["step"]).sum()
    if len(host):
        busy = median(float(host.get(step, 0.0)) / _ranks_in(report, step) for step in steps)
        yield "host's processor at work", busy * 1e3, "ms"
    if not (in_outline(report) or report.spans["lane"].isin(COPY_LANES).any()):
        return
    parts = [copy_shares(report, step) for step in steps]
    if middle := median([part["copies"] for part in parts] or [0.0]):
        yield COPIES_HIDDEN, 100 * median(part["hidden"] for part in parts) / middle, "%"


def _of_a_dry_run(report: Tables) -> Iterable[Row]:
    """What the rank holds, sends and copies."""
    yield "parameters", report.meta.get("num_params", NAN), "of this rank"
    table = peaks(report)[DRY]
    yield "peak memory", table["total"] / 1e6, "MB"
    for name, size in table.items():
        if size and name != "total":
            yield f"of it {name}", size / 1e6, "MB"
    for tier in ("host", "file"):
        if found := peak(report, tier=tier):
            yield f"on the host{' in files' * (tier == 'file')}", found.total / 1e6, "MB"
    yield "sent per step", traffic(report)["bytes"].sum() / 1e6, "MB"
    copies = copied(report, "link")
    for link, size in zip(copies["link"], copies["bytes"], strict=True):
        yield f"copied, {link}, per step", size / 1e6, "MB"
