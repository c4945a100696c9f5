"""Replay: a measured run on one virtual device per rank.

Ranks that share processor cores wait for a core as well as for each other, and the wall clock shows
both. But every span on the compute lane also has a cost, the CPU seconds of its own thread. A
replay takes the recorded order and dependencies, these costs and a link model, and times them with
the walk that also times predictions (interpret/walk.py).

    compute span     the median cost of all spans at the same place of the program: over steps >= 1
                     and the ranks with the same stages. The pieces of a backward that launches
                     collectives have costs of their own, as has the input half of a split one
    collective       alpha + wire bytes / bandwidth, with the bytes of its row in the ledger; of
                     messages in flight at once the alphas may overlap (spec/links.py)
    copy             the same for the link between two memory tiers, but no faster than the plan's
                     ``bandwidth``; without such a link in the cluster, as long as in the run
    wait             as long as the walk says, whatever it took in the run

This assumes that a computation costs the same alone as next to others. Shared caches and memory
bandwidth break the assumption by a few per cent. What ran outside spans (reading data, Python
between spans) takes no time in a replay.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from itertools import count
from typing import TYPE_CHECKING, Any

from paralab.checks import illegal, instance, real
from paralab.interpret.walk import CALL, JOB, WAIT, WORK, Item, moments
from paralab.programs.instructions import Instr
from paralab.report.facts import device_of, in_outline, node_of, reach
from paralab.report.tables import Tables, letters
from paralab.spec import Cluster
from paralab.spec.cluster import check_devices
from paralab.theory.traffic import POINT_TO_POINT, ends, level

if TYPE_CHECKING:
    import pandas as pd

NO_COST = ("wait", "comm")  # kinds of spans in which the rank itself computes nothing
COMPUTE_LANES = ("compute", "host")  # on other lanes spans take the time of a link


def replay(report: Tables, cluster: Cluster | None = None, *, compute: float = 1.0) -> Tables:
    """The run on one device per rank of ``cluster``, with the recorded costs, as a new report.

    report   a measured run; or a prediction or a replay, whose costs are used as they are
    cluster  its links carry the collectives, and its nodes hold the ranks; default
             ``Cluster.local`` for the run's kind of device, with the nodes of the run. Its device
             speed is not used, because the compute costs are the recorded ones
    compute  scales these costs, and those of copies between host and device; with 0.0 links alone
             take time. With a scale other than 1.0 the report gives no FLOP/s

    Span ids, rows and bytes are those of ``report``. Start, end and cost are new, and each step
    starts at the same moment on all ranks. Raises ValueError if a rank of a group never launched
    one of its collectives, if the cluster has fewer devices than the plan has ranks, or if no
    cluster is given for a run on GPUs on a machine without.
    """
    if in_outline(report):
        why = "in an outline, calls are summed up, without the time of each"
        legal = "a report of pl.predict(..., detail='calls'), or pl.predict for the other cluster"
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
    # {(step, whether inside it, not its setup): the spans of each rank}
    by_step = defaultdict(lambda: [[] for _ in range(report.world_size)])
    # By id: the order in which each rank recorded its spans.
    for span in report.spans.sort_values("id").itertuples(index=False):
        by_step[span.step, span.id not in setup][span.rank].append(span)
    for step in set(report.steps["step"].tolist()):
        by_step[step, True]  # a step without spans still has a start and an end
    now = 0.0
    start = {}  # by span id
    end = {}
    steps = {}  # {(step, rank): (start, end)}
    for (step, inside), ranks in sorted(by_step.items()):
        programs = [_program(spans, calls, costs, copies) for spans in ranks]
        times = moments([items for items, _ in programs])
        latest = now
        for rank, (_, places) in enumerate(programs):
            rank_end = lane_end = now  # of all lanes of the rank; of its compute lane
            for span, place in zip(ranks[rank], places, strict=True):
                item_times = times[rank][place]
                start[span.id] = now + min(item_times)[0]
                end[span.id] = now + max([item_end for _, item_end in item_times])
                if span.kind == "wait":
                    start[span.id] = lane_end
                if span.lane == "compute":
                    lane_end = end[span.id]
                rank_end = max(rank_end, end[span.id])
            latest = max(latest, rank_end)
            if inside:
                steps[step, rank] = (now, rank_end)
        now = latest
    zero = min((step_start for step_start, _ in steps.values()), default=0.0)
    start, end = ({span: t - zero for span, t in times.items()} for times in (start, end))
    spans, keys = report.spans, list(zip(report.steps["step"], report.steps["rank"], strict=True))
    cost = spans["id"].map(costs).where(spans["lane"].isin(COMPUTE_LANES)).fillna(spans["cost"])
    meta = dict(report.meta)
    if report.clock == "predicted":
        meta["costs"] = "predicted"
    # A replay that is replayed again has scaled the recorded costs before.
    if (scale := compute * meta.pop("compute", 1.0)) != 1.0:
        meta["compute"] = scale
    return dataclasses.replace(
        report,
        clock="replayed",
        meta=meta,
        cluster=cluster,
        spans=_retimed(spans, "id", start, end).assign(cost=cost),
        collectives=_retimed(report.collectives, "span", start, end),
        copies=_retimed(report.copies, "span", start, end),
        memory=_retimed_memory(report, start, end),
        steps=report.steps.assign(
            start=[steps[key][0] - zero for key in keys],
            end=[steps[key][1] - zero for key in keys],
        ),
    )


def _placed(report: Tables, cluster: Cluster) -> Tables:
    """The report with its ranks on the cluster's nodes, and each call's level as it is there."""
    check_devices(cluster, ranks := report.world_size)
    nodes = list(map(cluster.node_of, range(ranks)))
    if nodes == [node_of(report, rank) for rank in range(ranks)]:
        return report
    calls, names = report.collectives, ("op", "rank", "peer", "ranks")
    rows = zip(*(calls[name] for name in names), strict=True)
    levels = [level(ends(*row), cluster.node_of) for row in rows]
    meta = {**report.meta, "nodes": nodes}
    return dataclasses.replace(report, meta=meta, collectives=calls.assign(level=levels))


# ---- costs ------------------------------------------------------------------------------------
def _typical_costs(report: Tables, setup: set[int], *, scale: float) -> dict[int, float]:
    """{span id: the median cost of the spans at its place}; step 0 counts only where it is alone.

    Ranks of the same pipeline stage do the same work, so the median is over them too; not if the
    report is of a traced function, in which every rank may do something else.
    """
    spans = report.spans[~report.spans["kind"].isin(NO_COST) & ~report.spans["id"].isin(setup)]
    spans = spans.sort_values("id")
    action = ["stage", "chunk", "lane", "kind"]
    parts = spans.groupby(["rank", "step", "microbatch", *action])["id"]  # spans of a cut action
    role = spans["rank"]
    if report.model is not None:
        role = role.map(lambda rank: report.plan.place(rank).pp)
    columns = (spans[name] for name in action[:-1])
    place = [role, *columns, letters(spans), parts.transform("size"), parts.cumcount()]
    on_link = ~spans["lane"].isin(COMPUTE_LANES)  # its cost is its duration, not CPU seconds
    cost = spans["cost"].clip(lower=0.0).mask(on_link, spans["end"] - spans["start"])
    warm = cost.where(spans["step"] >= 1)
    typical, cold = (seconds.groupby(place).transform("median") for seconds in (warm, cost))
    return dict(zip(spans["id"], scale * typical.fillna(cold), strict=True))


# ---- programs ---------------------------------------------------------------------------------
def _calls(report: Tables, cluster: Cluster) -> dict[int, list[Item]]:
    """{id of a comm span: its calls as items}. All members give a call the same name.

    Names are numbered, as NCCL matches the collectives of a group in order, and the sends of one
    rank to another with their receives. The column "call" counts both kinds together, so its
    numbers differ between the ranks of a pipeline, which send different numbers of messages.

    Calls that other threads of an observed program make (control, launched after no span) are left
    out: ranks make them in different steps, or in another order than those of the first thread.
    """
    items = defaultdict(list)
    seconds = defaultdict(float)  # of the slowest member; of a sender
    numbers = defaultdict(count)
    reaches = {}
    columns = (report.spans[name] for name in ("id", "lane", "after"))
    spans = {span: of_span for span, *of_span in zip(*columns, strict=True)}
    rows = report.collectives.sort_values(["rank", "step", "span"], kind="stable")
    for row in rows.itertuples(index=False):
        lane, after = spans.get(row.span, ("", True))
        if row.phase == "control" and not after:
            continue
        group, message = tuple(row.ranks), row.op in POINT_TO_POINT
        members, name = group, f"{row.op} {{}} ({row.phase}) of {row.axis} ranks {group}"
        if message:  # each direction of each pair is a link of its own
            members = (row.rank, row.peer) if row.op == "send" else (row.peer, row.rank)
            name = f"message {{}} from rank {members[0]} to rank {members[1]} ({row.axis})"
        name = name.format(next(numbers[row.rank, row.op == "recv", name]))
        if members not in reaches:
            reaches[members] = reach(report, row.op, row.rank, row.peer, row.ranks)
        call = Item(CALL, 0.0, name, (lane, message, members), len(members))
        if message:
            needed, late = cluster.message(row.wire_bytes, reaches[members])
            call = call._replace(late=late * (row.op == "recv"))
        else:
            _, needed = cluster.call(row.op, row.wire_bytes, reaches[members])
        if row.op != "recv":
            seconds[name] = max(seconds[name], needed)
        items[row.span].append(call)
    return {
        span: [call._replace(takes=seconds[call.name]) for call in calls]
        for span, calls in items.items()
    }


def _copies(report: Tables, cluster: Cluster) -> dict[int, float]:
    """{span id: seconds} of the copies over links that ``cluster`` has."""
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
    """(the items of one rank's step for the walk, the slice of them that belongs to each span).

    A call or a job starts when the rank comes to it, a job not before the jobs in the ``after`` of
    its span. The rank waits where a compute span has a call or a job in its ``after``.
    """
    items = []
    places = []
    unwaited = {}  # {id of a call's or job's span: names for a WAIT}
    for span in spans:
        if span.lane == "compute":
            names = [name for other in span.after for name in unwaited.pop(other, ())]
            items += [Item(WAIT, name=name) for name in names]
            new = [Item(WORK, costs.get(span.id, 0.0))]
        elif span.id in calls:
            new = calls[span.id]
            unwaited[span.id] = [call.name for call in new]
        else:
            seconds = copies.get(span.id, costs.get(span.id, 0.0))
            after = tuple(("", other, 0) for other in span.after if other in unwaited)
            job = Instr("", reads=after, writes=(("", span.id, 0),))  # span ids in place of values
            new = [Item(JOB, seconds, job, span.lane)]
            unwaited[span.id] = [job.writes]
        places.append(slice(len(items), len(items) + len(new)))
        items += new
    return items, places


def _setup_spans(report: Tables) -> set[int]:
    """Ids of the spans that are no part of a step: first handshakes, and the waits for them."""
    calls, spans = report.collectives, report.spans
    setup = set(calls["span"][calls["phase"] == "setup"].tolist())
    waits = spans[spans["kind"] == "wait"]
    for_setup = [bool(after) and setup.issuperset(after) for after in waits["after"]]
    return setup | set(waits["id"][for_setup].tolist())


# ---- tables -----------------------------------------------------------------------------------
def _retimed(
    table: pd.DataFrame, column: str, start: dict[int, float], end: dict[int, float]
) -> pd.DataFrame:
    """A copy of ``table`` with new times for the rows whose span, in ``column``, has some."""
    sides = {"start": start, "end": end}
    new = {side: table[column].map(times).fillna(table[side]) for side, times in sides.items()}
    return table.assign(**new)


def _retimed_memory(report: Tables, start: dict[int, float], end: dict[int, float]) -> pd.DataFrame:
    """Memory samples, moved with the spans of their rank's compute lane, or between two of them."""
    table = report.memory
    if table.empty:
        return table.copy()
    import numpy as np

    new = table["time"].to_numpy().copy()
    spans = report.spans.sort_values("id")
    for rank, lane in spans[spans["lane"] == "compute"].groupby("rank"):
        old = lane[["start", "end"]].to_numpy().ravel()
        moved = [side[span] for span in lane["id"] for side in (start, end)]
        of_rank = (table["rank"] == rank).to_numpy()
        times, place = np.unique(new[of_rank], return_inverse=True)
        times = np.interp(times, old, moved)
        for i in range(1, len(times)):  # keep samples apart where the new span has no length
            times[i] = max(times[i], times[i - 1] + 1e-9)
        new[of_rank] = times[place]
    return table.assign(time=new)
