"""What a report's tables say in one number: step time, bubble, waiting, hidden, bytes by x.

Pure functions of a ``Report``; measured, replayed and predicted reports are read alike. Times in
seconds, traffic in bytes. Step 0 is warm-up and left out wherever there is another step.
Definitions: the docstrings below; the bubble is 1 - sum(compute) / (p T) as in PTD-P (Narayanan+
2021, arXiv:2104.04473, sec. 2.2), with T from the first forward to the last backward.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from paralab.checks import choice, illegal
from paralab.records import dry
from paralab.records.once import once
from paralab.records.tables import COMPUTE_KINDS, COPY_LANES
from paralab.spec import BYTES_PER_ELEMENT
from paralab.theory.traffic import BOOKKEEPING, edges
from paralab.tiers import WAYS

if TYPE_CHECKING:
    import pandas as pd

    from paralab.report import Report

Interval = tuple[float, float]
BY = ("rank", "op", "axis", "level", "phase", "edge")
COPIED_BY = ("rank", "link", "category")
COPIES_HIDDEN = "of the copies hidden behind compute"
NAN = float("nan")


def in_outline(report: Report) -> bool:
    """Whether the report has one rank per pipeline stage and one box per action: see
    theory/outline.py. A box's cost is what the rank computes in it; the rest of its length it
    stands still.
    """
    return report.meta.get("detail") == "actions"


def seconds_of(report: Report, spans: pd.DataFrame) -> pd.Series:
    """What these spans of a compute lane took; of an outline's boxes, what was computed in them."""
    seconds = spans["end"] - spans["start"]
    if in_outline(report):
        seconds = seconds.where(~spans["kind"].isin(COMPUTE_KINDS), spans["cost"])
    return seconds


def reported_ranks(report: Report) -> list[int]:
    """The ranks that the tables have rows of: all, or in outline one per pipeline stage."""
    return sorted(set(report.steps["rank"].tolist())) or list(range(report.world_size))


def measured_steps(report: Report) -> list[int]:
    """The steps that count: all but step 0, or step 0 if there is no other."""
    steps = sorted(set(report.steps["step"].tolist()))
    return [s for s in steps if s >= 1] or steps


def step_durations(report: Report, *, warmup: bool = False) -> dict[int, float]:
    """Largest (end - start) over ranks, seconds, of every step that counts; of all with warmup."""
    dry.needs_times(report, "the time of a step")
    steps = report.steps
    largest = (steps["end"] - steps["start"]).groupby(steps["step"]).max()
    return {s: float(t) for s, t in largest.items() if warmup or s in measured_steps(report)}


def step_time(report: Report) -> float:
    """Median of ``step_durations``, seconds; NaN without steps."""
    return median(step_durations(report).values() or [NAN])


def typical_step(report: Report) -> int:
    """The step that counts whose duration is nearest the median; the earliest of equals."""
    durations, middle = step_durations(report), step_time(report)
    return min(durations, key=lambda s: (abs(durations[s] - middle), s))


def bubble(report: Report) -> float:
    """Idle share of the pipeline part: 1 - sum(compute) / (p T), median over the steps that count.

    Compute is forward, backward and weight_grad, and what a rank copies into gradient buckets
    between them; T is the longest of the ranks' times from first forward to last backward, of each
    pipeline where there are several. With one stage there is no pipeline to wait for, so each rank
    is held against its own T.
    """
    return median([step_bubble(report, s) for s in measured_steps(report)] or [NAN])


def step_bubble(report: Report, step: int) -> float:
    """``bubble`` of one step; NaN if nothing was computed in it."""
    dry.needs_times(report, "a bubble")
    parts = pipeline_parts(report, step)
    longest: dict[tuple[int, ...], float] = {}
    for rank, (start, end, _) in parts.items():
        pipeline = report.plan.place(rank)[1:]
        longest[pipeline] = max(longest.get(pipeline, 0.0), end - start)
    room = sum(longest[report.plan.place(rank)[1:]] for rank in parts)
    return 1 - sum(busy for _, _, busy in parts.values()) / room if room > 0 else NAN


@once
def pipeline_parts(report: Report, step: int) -> dict[int, tuple[float, float, float]]:
    """{rank: (start of its first forward, end of its last backward, seconds of compute between)}"""
    spans = report.spans[(report.spans["step"] == step) & (report.spans["lane"] == "compute")]
    kinds, copies = set(COMPUTE_KINDS), []
    found: dict[int, list[float]] = {}
    busy: dict[int, list[float]] = defaultdict(list)
    columns = [spans[name].tolist() for name in ("rank", "kind", "start", "end")]
    seconds = seconds_of(report, spans).tolist()
    for rank, kind, start, end, lasts in zip(*columns, seconds, strict=True):
        if kind == "copy":
            copies.append((rank, start, end))
        elif kind in kinds:
            part = found.setdefault(rank, [start, end])
            part[0], part[1] = min(part[0], start), max(part[1], end)
            busy[rank].append(lasts)
    for rank, start, end in copies:
        if rank in found and found[rank][0] <= start and end <= found[rank][1]:
            busy[rank].append(end - start)
    return {rank: (*found[rank], math.fsum(busy[rank])) for rank in sorted(found)}


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


def bookkeeping_spans(report: Report) -> set[int]:
    """Ids of comm spans that carry a loss or a clock, not the algorithm's bytes."""
    calls = report.collectives
    return set(calls["span"][calls["phase"].isin(BOOKKEEPING)].tolist())


def shares(report: Report, step: int) -> dict[str, float]:
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


def _shares_in_outline(report: Report, step: int) -> dict[str, float]:
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


def copy_shares(report: Report, step: int) -> dict[str, float]:
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


def peak_memory(report: Report) -> int | None:
    """Bytes on the device at the worst sample of the worst rank; None if memory was not sampled."""
    memory = report.memory[report.memory["tier"] == "device"]
    if memory.empty:
        return None
    return int(memory.groupby(["rank", "step", "time"])["bytes"].sum().max())


def node_of(report: Report, rank: int) -> int:
    """The node that ``rank`` ran on; one node where the report does not say."""
    nodes = report.meta.get("nodes") or []
    return nodes[rank] if rank < len(nodes) else 0


def traffic(
    report: Report,
    by: str | Sequence[str] = "rank",
    *,
    bookkeeping: bool = False,
    warmup: bool = False,
) -> pd.DataFrame:
    """Bytes sent per step, summed over what is not named in ``by``.

    by           one or several of rank (the sender), op, axis, level, phase, edge; edge gives two
                 columns, sender and receiver. A level is each edge's own: intra if sender and
                 receiver share a node
    bookkeeping  count phases control and setup too
    warmup       count step 0 too

    The column bytes is the mean over the counted steps: int64 whenever every row's mean is whole,
    float64 otherwise. Raises ValueError if a row's wire_bytes are not what its operation sends.
    """
    names = [choice("by", b, BY) for b in ([by] if isinstance(by, str) else by)]
    if not names:
        raise illegal("by", by, "nothing to split by", " | ".join(BY))
    keys = [k for b in names for k in (("sender", "receiver") if b == "edge" else (b,))]
    steps = set(report.steps["step"].tolist() if warmup else measured_steps(report))
    calls, sums = report.collectives, in_outline(report)
    calls = calls[calls["step"].isin(steps)]
    if not bookkeeping:
        calls = calls[~calls["phase"].isin(BOOKKEEPING)]
    totals: dict[tuple[Any, ...], int] = defaultdict(int)
    if keys == ["rank"]:  # a rank that sends nothing is worth a row
        totals |= {(rank,): 0 for rank in reported_ranks(report)}
    for row in calls.to_dict("records"):
        sent = edges(row["op"], row["ranks"], row["rank"], row["payload_bytes"], row["peer"],
                     sent=row["wire_bytes"] if sums else None)  # fmt: skip
        if sum(sent.values()) != row["wire_bytes"]:
            raise ValueError(
                f"collective {row['call']} on rank {row['rank']}: wire_bytes={row['wire_bytes']}, "
                f"but {row['op']} of {row['payload_bytes']} bytes among {len(row['ranks'])} ranks "
                f"sends {sum(sent.values())}; traffic() counts only bytes that the formulas know"
            )
        for receiver, count in sent.items():
            apart = node_of(report, row["rank"]) != node_of(report, receiver)
            row |= {
                "level": "inter" if apart else "intra",
                "sender": row["rank"],
                "receiver": receiver,
            }
            totals[tuple(row[k] for k in keys)] += count
    return _per_step(sorted(totals.items()), keys, len(steps))


def copied(
    report: Report, by: str | Sequence[str] = COPIED_BY, *, warmup: bool = False
) -> pd.DataFrame:
    """Bytes copied between memory tiers per step, summed over what is not named in ``by``.

    by      one or several of rank, link (h2d, d2h, disk read, disk write), category
    warmup  count step 0 too

    The column bytes is the mean over the counted steps, as in ``traffic``.
    """
    names = [choice("by", b, COPIED_BY) for b in ([by] if isinstance(by, str) else by)]
    if not names:
        raise illegal("by", by, "nothing to split by", " | ".join(COPIED_BY))
    steps = set(report.steps["step"].tolist() if warmup else measured_steps(report))
    totals: dict[tuple[Any, ...], int] = defaultdict(int)
    if names == ["rank"]:  # a rank that copies nothing is worth a row
        totals |= {(rank,): 0 for rank in reported_ranks(report)}
    for row in report.copies[report.copies["step"].isin(steps)].to_dict("records"):
        lane, op = row["lane"], row["op"]
        row["link"] = lane if op == "copy" else f"{lane} {op}"
        totals[tuple(row[k] for k in names)] += row["bytes"]
    place = {link: f"{i}" for i, link in enumerate(WAYS)}  # from the device outwards
    rows = sorted(totals.items(), key=lambda r: [place.get(label, label) for label in r[0]])
    return _per_step(rows, names, len(steps))


def _per_step(rows: Sequence[Any], keys: Sequence[str], steps: int) -> pd.DataFrame:
    """Rows (labels, bytes of all steps) as a table of bytes of one step."""
    import pandas as pd

    steps = max(steps, 1)  # a report may have none
    whole = all(count % steps == 0 for _, count in rows)
    values = [count // steps if whole else count / steps for _, count in rows]
    columns: dict[str, Any] = {}
    for i, key in enumerate(keys):
        dtype = "int64" if key in ("rank", "sender", "receiver") else "object"
        columns[key] = pd.Series([labels[i] for labels, _ in rows], dtype=dtype)
    columns["bytes"] = pd.Series(values, dtype="int64" if whole else "float64")
    return pd.DataFrame(columns)


def ring_optimum(report: Report) -> int:
    """Bytes all ranks together send per step in pure data parallelism: N times 2(N-1)/N Psi.

    Psi in bytes of the plan's precision (Patarasuk & Yuan 2009, the bandwidth-optimal all-reduce).
    """
    if report.model is None:
        raise illegal("model", None, "a traced function has no gradients to sum", "a training run")
    psi = report.model.num_trainable * BYTES_PER_ELEMENT[report.plan.precision]
    return 2 * (report.plan.dp - 1) * psi


def summary(report: Report) -> pd.DataFrame:
    """The report on one screen: index quantity; columns value and unit."""
    if report.clock == dry.CLOCK:
        return dry.summary(report)
    import pandas as pd

    steps = measured_steps(report)
    parts = [shares(report, s) for s in steps] or [dict.fromkeys(
        ("work", "optimizer", "wait", "communication", "hidden"), NAN)]  # fmt: skip
    typical = {name: median(p[name] for p in parts) for name in parts[0]}
    comm = typical["communication"]
    sent = traffic(report)["bytes"].sum() / max(len(reported_ranks(report)), 1)
    rows: list[tuple[str, float, str]] = [
        ("step time", step_time(report) * 1e3, "ms"),
        ("forward and backward", typical["work"] * 1e3, "ms"),
        ("optimizer", typical["optimizer"] * 1e3, "ms"),
        ("waiting", typical["wait"] * 1e3, "ms"),
        ("communication in flight", comm * 1e3, "ms"),
        ("of it hidden behind compute", 100 * typical["hidden"] / comm if comm > 0 else 0.0, "%"),
        ("sent per rank and step", sent / 1e6, "MB"),
    ]
    rows += _copy_rows(report)
    rows += _flops_rows(report)
    if report.plan.pp > 1:
        rows.append(("bubble", 100 * bubble(report), "% of device time"))
    if report.losses:
        rows += [("loss, first step", report.losses[0], "nats")]
        rows += [("loss, last step", report.losses[-1], "nats")]
    frame = pd.DataFrame({"quantity": [r[0] for r in rows], "value": [r[1] for r in rows],
                          "unit": [r[2] for r in rows]})  # fmt: skip
    return frame.round({"value": 4}).set_index("quantity")


def _flops_rows(report: Report) -> list[tuple[str, float, str]]:
    """What a step computes per second, and of a stated peak how much: theory/utilisation.py."""
    from paralab.theory.utilisation import achieved, utilisation

    seconds = step_time(report)
    if report.model is None or not seconds > 0:
        return []
    rate = achieved(report.model, report.plan, seconds)["model"]
    rows = [("model FLOP/s per device", rate / 1e9, "GFLOP/s")]
    return rows + [(f"{name} FLOPs utilisation", 100 * share, "% of peak")
                   for name, share in utilisation(report).items()]  # fmt: skip


def _copy_rows(report: Report) -> list[tuple[str, float, str]]:
    """What summary says of copies between memory tiers: nothing where there are none."""
    n, unit = len(reported_ranks(report)), "MB" + " per rank" * (report.world_size > 1)
    moved = copied(report, "link").set_index("link")["bytes"]
    names = {"host to device per step": WAYS[:1], "device to host per step": WAYS[1:2],
             "disk, read and written per step": WAYS[2:]}  # fmt: skip
    mega = {name: float(sum(moved.get(link, 0) for link in links)) / n / 1e6
            for name, links in names.items()}  # fmt: skip
    rows = [(name, size, unit) for name, size in mega.items() if size]
    steps = measured_steps(report)
    spans = report.spans[report.spans["lane"] == "host"]
    seconds = spans["cost"] if in_outline(report) else spans["end"] - spans["start"]
    host = seconds.groupby(spans["step"]).sum()
    if len(host):
        busy = median(float(host.get(step, 0.0)) for step in steps) / n
        rows.append(("host's processor at work", busy * 1e3, "ms"))
    parts = [copy_shares(report, step) for step in steps]
    if middle := median([part["copies"] for part in parts] or [0.0]):
        hidden = 100 * median(part["hidden"] for part in parts) / middle
        rows.append((COPIES_HIDDEN, hidden, "%"))
    return rows
