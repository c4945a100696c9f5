"""Replay: a measured run on one virtual device per rank.

Ranks that share processor cores wait for cores, not only for each other, and the wall clock shows
both. What a rank computed is known apart from that: every span on the compute lane carries the CPU
seconds of its own thread. So the recorded order, the recorded dependencies and those costs go
through the walk that times programs (interpret/walk.py), with a stated link model, and out comes
the timeline that devices of their own would have given.

    cost of a span   median over steps >= 1 and ranks that hold the same stages, of spans of the
                     same stage and kind at the same place: a backward that launches collectives is
                     cut there, and every part has its own; its input half is a kind of its own
    collective       alpha + wire bytes / bandwidth, from its row in the traffic table
    copy             the same between memory tiers, if the cluster states these links; no faster
                     than the plan's ``bandwidth``. Else as long as it took
    wait             as long as the walk says, whatever it took in the run

Its one assumption: a computation costs the same alone as next to others. Shared caches and memory
bandwidth break it by a few per cent. What ran outside spans (reading data, Python between spans)
takes no time here.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from paralab.checks import illegal, instance, real
from paralab.interpret.walk import CALL, JOB, WAIT, WORK, Item, moments
from paralab.programs.instructions import Instr
from paralab.report.about import device_of, in_outline, node_of, reach
from paralab.report.tables import Tables, letters
from paralab.spec import Cluster
from paralab.spec.links import Reach
from paralab.theory.traffic import POINT_TO_POINT, ends, level

if TYPE_CHECKING:
    import pandas as pd

IDLE = ("wait", "comm")  # kinds of spans that cost a rank nothing of its own
PROCESSORS = ("compute", "host")  # lanes whose spans cost processor time, not time on a link


def replay(report: Tables, cluster: Cluster | None = None, *, compute: float = 1.0) -> Tables:
    """The same run with its recorded costs on ``cluster``, one device per rank; ``report`` stays as
    it is.

    report   measured; or predicted, or replayed before, whose costs are taken as they are
    cluster  whose links carry the collectives, and on whose nodes the ranks of a plan are; default
             ``Cluster.local`` of the kind of device that the run was on, with the run's own nodes.
             Its device speed is not used: compute costs are the recorded ones
    compute  scales those costs, and those of copies between host and device; 0.0 leaves the links
             alone. Of a device that computes at another speed no FLOP/s are reported

    Span ids, rows and bytes are those of ``report``; start, end and cost are new, all steps of one
    kind cost the same, and every step starts on all ranks at once. Raises ValueError if the report
    holds collectives that a rank of their group never launched, if the cluster has fewer devices
    than the plan has ranks, or if a run on GPUs is replayed where there is none and no cluster is
    given.
    """
    if in_outline(report):
        why = "an outline has its calls summed up, without the time of each"
        legal = "pl.predict(..., detail='calls'), or pl.predict on the other cluster"
        raise illegal("detail", "actions", why, legal)
    instance("cluster", cluster, Cluster | None, "a pl.Cluster(...) or None")
    if cluster is None:
        cluster = Cluster.local(device=device_of(report))
    elif report.model is not None:
        report = _placed(report, cluster)
    compute = real("compute", compute, at_least=0.0)
    setup = _setup_spans(report)
    costs = _typical_costs(report, setup, scale=compute)
    calls, copies = _calls(report, cluster), _copies(report, cluster)
    by_step: dict[tuple[int, bool], list[list[Any]]] = defaultdict(
        lambda: [[] for _ in range(report.world_size)]
    )
    # In order of id: the order in which each rank wrote its spans down.
    for span in report.spans.sort_values("id").itertuples(index=False):
        by_step[span.step, span.id not in setup][span.rank].append(span)
    for step in set(report.steps["step"].tolist()):
        by_step[step, True]  # a step without spans still has a start and an end
    now = 0.0
    start: dict[int, float] = {}  # of every span
    end: dict[int, float] = {}
    steps: dict[tuple[int, int], tuple[float, float]] = {}
    for (step, inside), ranks in sorted(by_step.items()):
        programs = [_program(spans, calls, costs, copies) for spans in ranks]
        times = moments([items for items, _ in programs])
        latest = now
        for rank, (_, places) in enumerate(programs):
            over = free = now  # all that this rank does; its compute lane
            for span, mine in zip(ranks[rank], places, strict=True):
                parts = times[rank][mine]
                start[span.id] = now + min(parts)[0]
                end[span.id] = now + max([ended for _, ended in parts])
                if span.kind == "wait":
                    start[span.id] = free
                if span.lane == "compute":
                    free = end[span.id]
                over = max(over, end[span.id])
            latest = max(latest, over)
            if inside:
                steps[step, rank] = (now, over)
        now = latest
    zero = min((begun for begun, _ in steps.values()), default=0.0)
    start, end = ({span: t - zero for span, t in side.items()} for side in (start, end))
    spans, keys = report.spans, list(zip(report.steps["step"], report.steps["rank"], strict=True))
    own = spans["id"].map(costs).where(spans["lane"].isin(PROCESSORS)).fillna(spans["cost"])
    meta = dict(report.meta)
    if report.clock == "predicted":
        meta["costs"] = "predicted"
    # Of a replay that is replayed again, what its costs are of those recorded.
    if (scale := compute * meta.pop("compute", 1.0)) != 1.0:
        meta["compute"] = scale
    return dataclasses.replace(
        report,
        clock="replayed",
        meta=meta,
        cluster=cluster,
        spans=_retimed(spans, "id", start, end).assign(cost=own),
        collectives=_retimed(report.collectives, "span", start, end),
        copies=_retimed(report.copies, "span", start, end),
        memory=_retimed_memory(report, start, end),
        steps=report.steps.assign(
            start=[steps[key][0] - zero for key in keys],
            end=[steps[key][1] - zero for key in keys],
        ),
    )


def _placed(report: Tables, cluster: Cluster) -> Tables:
    """The report with its ranks on the cluster's nodes; on which links calls were is said anew."""
    if (ranks := report.world_size) > cluster.num_devices:
        why = f"it has {cluster.num_devices} devices, and the run {ranks} ranks, one on each"
        raise illegal("cluster", cluster.name, why, "one with more nodes, or None for this machine")
    nodes = list(map(cluster.node_of, range(ranks)))
    if nodes == [node_of(report, rank) for rank in range(ranks)]:
        return report
    calls, names = report.collectives, ("op", "rank", "peer", "ranks")
    rows = zip(*(calls[name] for name in names), strict=True)
    levels = [level(ends(*row), cluster.node_of) for row in rows]
    meta = {**report.meta, "nodes": nodes}
    return dataclasses.replace(report, meta=meta, collectives=calls.assign(level=levels))


# ---- what everything costs --------------------------------------------------------------------
def _typical_costs(report: Tables, setup: set[int], *, scale: float) -> dict[int, float]:
    """{span: the median cost of its kind}, warm-up left out where there is anything else.

    Data-parallel ranks do the same, so they count as one. The ranks of a traced function may do
    different things.
    """
    spans = report.spans[~report.spans["kind"].isin(IDLE) & ~report.spans["id"].isin(setup)]
    spans = spans.sort_values("id")
    place = ["stage", "chunk", "lane", "kind"]
    parts = spans.groupby(["rank", "step", "microbatch", *place])["id"]
    role = spans["rank"]
    if report.model is not None:
        role = role.map(lambda rank: report.plan.place(rank)[0])
    columns = (spans[name] for name in place[:-1])
    alike = [role, *columns, letters(spans), parts.transform("size"), parts.cumcount()]
    on_link = ~spans["lane"].isin(PROCESSORS)  # what it took there; else its thread's CPU seconds
    own = spans["cost"].clip(lower=0.0).mask(on_link, spans["end"] - spans["start"])
    warm = own.where(spans["step"] >= 1)
    typical, cold = (seconds.groupby(alike).transform("median") for seconds in (warm, own))
    return dict(zip(spans["id"], scale * typical.fillna(cold), strict=True))


# ---- programs ---------------------------------------------------------------------------------
def _calls(report: Tables, cluster: Cluster) -> dict[int, list[Item]]:
    """By comm span: its calls, each under the name that its members give it.

    Collectives of a group are matched in order, and so are the sends and receives of a pair, as
    NCCL does. A group's own numbers count both: a pipeline's ranks, which send more or less often,
    would not agree on them.
    """
    found: dict[int, list[Item]] = defaultdict(list)
    took: dict[str, float] = defaultdict(float)  # of its slowest member; of a message, the sender
    count: Counter[tuple[Any, ...]] = Counter()
    reaches: dict[tuple[int, ...], Reach] = {}
    lanes = dict(zip(report.spans["id"], report.spans["lane"], strict=True))
    rows = report.collectives.sort_values(["rank", "step", "span"], kind="stable")
    for row in rows.itertuples(index=False):
        group, message = tuple(row.ranks), row.op in POINT_TO_POINT
        members, name = group, f"{row.op} {{}} ({row.phase}) of {row.axis} ranks {group}"
        if message:  # each direction of each pair is a link of its own
            members = (row.rank, row.peer) if row.op == "send" else (row.peer, row.rank)
            name = f"message {{}} from rank {members[0]} to rank {members[1]} ({row.axis})"
        side = (row.rank, row.op == "recv", name)
        name = name.format(count[side])
        count[side] += 1
        if row.op != "recv":
            if members not in reaches:
                reaches[members] = reach(report, row.op, row.rank, row.peer, row.ranks)
            seconds = cluster.call(row.op, row.wire_bytes, reaches[members])[1]
            took[name] = max(took[name], seconds)
        lane = lanes.get(row.span, ""), message, members
        found[row.span].append(Item(CALL, 0.0, name, lane, len(members)))
    return {
        span: [item._replace(takes=took[item.name]) for item in items]
        for span, items in found.items()
    }


def _copies(report: Tables, cluster: Cluster) -> dict[int, float]:
    """Seconds by span of copies over links that ``cluster`` states."""
    tiers, rows = report.plan.tiers, report.copies
    limits = {} if tiers is None else tiers.limits
    links = {"h2d": cluster.host, "d2h": cluster.host, "disk": cluster.disk}
    return {
        span: cluster.copy_seconds(lane, size, limits.get(lane))
        for span, lane, size in zip(rows["span"], rows["lane"], rows["bytes"], strict=True)
        if links[lane] is not None
    }


def _program(
    spans: list[Any],
    calls: dict[int, list[Item]],
    costs: dict[int, float],
    copies: dict[int, float],
) -> tuple[list[Item], list[slice]]:
    """One rank's step as the walk reads it, and for every span where its items are.

    A call comes after what the rank has computed, a job also after jobs; the rank waits for both.
    """
    items: list[Item] = []
    places: list[slice] = []
    begun: dict[int, list[Any]] = {}  # span that nothing has waited for: what it is waited for by
    for span in spans:
        if span.lane == "compute":
            names = [name for other in span.after for name in begun.pop(other, ())]
            items += [Item(WAIT, name=name) for name in names]
            new = [Item(WORK, costs.get(span.id, 0.0))]
        elif span.id in calls:
            new = calls[span.id]
            begun[span.id] = [call.name for call in new]
        else:
            seconds = copies.get(span.id, costs.get(span.id, 0.0))
            after = tuple(("", other, 0) for other in span.after if other in begun)
            job = Instr("", reads=after, writes=(("", span.id, 0),))  # which read what these wrote
            new = [Item(JOB, seconds, job, span.lane)]
            begun[span.id] = [job.writes]
        places.append(slice(len(items), len(items) + len(new)))
        items += new
    return items, places


def _setup_spans(report: Tables) -> set[int]:
    """Handshakes before the first step, and what waited for them: no part of any step."""
    calls, spans = report.collectives, report.spans
    setup = set(calls["span"][calls["phase"] == "setup"].tolist())
    waits = spans[spans["kind"] == "wait"]
    mine = [bool(after) and setup.issuperset(after) for after in waits["after"]]
    return setup | set(waits["id"][mine].tolist())


# ---- tables -----------------------------------------------------------------------------------
def _retimed(
    table: pd.DataFrame, column: str, start: dict[int, float], end: dict[int, float]
) -> pd.DataFrame:
    """A copy of ``table`` with the times of the spans that ``column`` names; others keep theirs."""
    sides = {"start": start, "end": end}
    new = {side: table[column].map(times).fillna(table[side]) for side, times in sides.items()}
    return table.assign(**new)


def _retimed_memory(report: Tables, start: dict[int, float], end: dict[int, float]) -> pd.DataFrame:
    """Memory samples at the same place between the same spans of their rank's compute lane."""
    table = report.memory
    if table.empty:
        return table.copy()
    import numpy as np

    new = table["time"].to_numpy().copy()
    spans = report.spans.sort_values("id")
    for rank, lane in spans[spans["lane"] == "compute"].groupby("rank"):
        old = lane[["start", "end"]].to_numpy().ravel()
        moved = [side[span] for span in lane["id"] for side in (start, end)]
        mine = (table["rank"] == rank).to_numpy()
        times, place = np.unique(new[mine], return_inverse=True)
        times = np.interp(times, old, moved)
        for i in range(1, len(times)):  # what was no time apart is still one after the other
            times[i] = max(times[i], times[i - 1] + 1e-9)
        new[mine] = times[place]
    return table.assign(time=new)
