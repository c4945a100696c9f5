"""Replay: a measured run on one virtual device per rank.

Ranks that share processor cores wait for cores, not only for each other, and the wall clock shows
both. What a rank computed is known apart from that: every span on the compute lane carries the CPU
seconds of its own thread. So the recorded order, the recorded dependencies and those costs go
through the event engine, with a stated link model, and out comes the timeline that devices of their
own would have given.

    cost of a span   median over steps >= 1 and ranks that hold the same stages, of spans of the
                     same stage and kind at the same place: a backward that launches collectives is
                     cut there, and every part has its own
    collective       alpha + wire bytes / bandwidth, from its row in the traffic table
    copy             the same between memory tiers, if the cluster states these links; no faster
                     than the plan's ``bandwidth``. Else as long as it took
    wait             as long as the engine says, whatever it took in the run

Its one assumption: a computation costs the same alone as beside others. Shared caches and memory
bandwidth break it by a few per cent. What ran outside spans (reading data, Python between spans)
takes no time here.
"""

from __future__ import annotations

from collections import defaultdict
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from paralab.checks import illegal, real
from paralab.spec import Cluster
from paralab.theory.engine import (
    Collective,
    Compute,
    Copy,
    Item,
    Wait,
    link_cost,
    simulate,
)
from paralab.theory.traffic import POINT_TO_POINT

if TYPE_CHECKING:
    from paralab.report import Report

Key = tuple[Any, ...]
PROCESSORS = ("compute", "host")  # lanes whose spans cost processor time, not time on a link


class _Span(NamedTuple):
    id: int
    rank: int
    step: int
    lane: str
    kind: str
    stage: int
    chunk: int
    microbatch: int
    start: float
    end: float
    cost: float
    after: tuple[int, ...]

    @property
    def idle(self) -> bool:
        return self.kind in ("wait", "comm")


def replay(report: Report, cluster: Cluster | None = None, *, compute: float = 1.0) -> Report:
    """The same run with its recorded costs on ``cluster``, one device per rank; ``report`` stays as
    it is.

    report   measured, or replayed before (then only the links can change)
    cluster  whose links carry the collectives; default ``Cluster.local()``. Its device speed is not
             used: compute costs are the recorded ones
    compute  scales those costs, and those of copies between host and device; 0.0 leaves the links
             alone

    Span ids, rows and bytes are those of ``report``; start, end and cost are new, all steps of one
    kind cost the same, and every step starts on all ranks at once. Raises ValueError if the report
    holds collectives that a rank of their group never launched.
    """
    from paralab.records.metrics import in_outline
    from paralab.report import Report

    if in_outline(report):
        raise illegal("detail", "actions", "an outline has its calls summed up, and nobody can "
                      "say when each of them came", "pl.predict(..., detail='calls'), or "
                      "pl.predict on the other cluster")  # fmt: skip
    cluster = Cluster.local() if cluster is None else cluster
    if not isinstance(cluster, Cluster):
        raise illegal("cluster", cluster, "not a cluster", "a pl.Cluster(...) or None")
    compute = real("compute", compute, at_least=0.0)
    spans = sorted(_Span(*row) for row in report.spans.itertuples(index=False))
    setup = _setup_spans(report, spans)
    role = {rank: rank if report.model is None else report.plan.place(rank)[0]
            for rank in range(report.world_size)}  # fmt: skip
    costs = _typical_costs([s for s in spans if s.id not in setup], scale=compute, role=role)
    calls, copies = _collectives(report), _copies(report, cluster)
    by_step: dict[tuple[int, bool], list[list[_Span]]] = defaultdict(
        lambda: [[] for _ in range(report.world_size)]
    )
    for span in spans:  # in order of id: the order in which each rank wrote them down
        by_step[span.step, span.id not in setup][span.rank].append(span)
    for step in set(report.steps["step"].tolist()):
        by_step[step, True]  # a step without spans still has a start and an end
    cost, now = link_cost(cluster), 0.0
    when: dict[int, tuple[float, float]] = {}
    steps: dict[tuple[int, int], tuple[float, float]] = {}
    for (step, inside), ranks in sorted(by_step.items()):
        programs = [_program(rank, calls, costs, copies) for rank in ranks]
        times = simulate([items for items, _ in programs], cost)
        latest = now
        for rank, (_, places) in enumerate(programs):
            end = now
            for span, positions in zip(ranks[rank], places, strict=True):
                began = now + min(times.start[rank][p] for p in positions)
                ended = now + max(times.end[rank][p] for p in positions)
                when[span.id] = (began, ended)
                end = max(end, ended)
            latest = max(latest, end)
            if inside:
                steps[step, rank] = (now, end)
        now = latest
    zero = min((start for start, _ in steps.values()), default=0.0)
    return Report(
        clock="replayed",
        model=report.model,
        plan=report.plan,
        cluster=cluster,
        meta=report.meta,
        losses=report.losses,
        spans=_retimed(report.spans, "id", when, zero).assign(
            cost=[_cost(_Span(*row), costs) for row in report.spans.itertuples(index=False)]
        ),
        collectives=_retimed(report.collectives, "span", when, zero),
        copies=_retimed(report.copies, "span", when, zero),
        memory=_retimed_memory(report, spans, when, zero),
        steps=report.steps.assign(
            start=[steps[key][0] - zero for key in _step_keys(report)],
            end=[steps[key][1] - zero for key in _step_keys(report)],
        ),
        weights=report.weights,
        gradients=report.gradients,
        results=report.results,
    )


# ---- what everything costs --------------------------------------------------------------------
class _Costs(NamedTuple):
    key_of: dict[int, Key]  # by span id
    seconds: dict[Key, float]


def _typical_costs(spans: list[_Span], *, scale: float, role: dict[int, int]) -> _Costs:
    """The median cost of every kind of span, warm-up left out where there is anything else.

    role  ranks of one role do the same: those of a data-parallel group. The ranks of a traced
          function may do different things, so each has a role of its own
    """
    groups: dict[Key, list[_Span]] = defaultdict(list)
    for span in spans:
        if not span.idle:
            place = (
                span.rank,
                span.step,
                span.lane,
                span.kind,
                span.stage,
                span.chunk,
                span.microbatch,
            )
            groups[place].append(span)
    key_of, warm, cold = {}, defaultdict(list), defaultdict(list)
    for (rank, step, lane, kind, stage, chunk, _), parts in groups.items():
        for part, span in enumerate(parts):
            key = (role[rank], stage, chunk, lane, kind, len(parts), part)
            key_of[span.id] = key
            (warm if step >= 1 else cold)[key].append(_own_seconds(span))
    samples = {**cold, **warm}
    return _Costs(key_of, {key: scale * median(values) for key, values in samples.items()})


def _own_seconds(span: _Span) -> float:
    """What a span costs by itself: its thread's CPU time, or on a link how long it took."""
    return max(span.cost, 0.0) if span.lane in PROCESSORS else span.end - span.start


def _cost(span: _Span, costs: _Costs) -> float:
    key = costs.key_of.get(span.id)
    if key is None or span.lane not in PROCESSORS:
        return span.cost
    return costs.seconds[key]


# ---- programs ---------------------------------------------------------------------------------
def _collectives(report: Report) -> dict[int, list[tuple[Key, dict[str, Any]]]]:
    """By comm span: its rows, each with the key under which the members of the call meet.

    Collectives of a group are matched in order, and so are the sends and receives of a pair, as
    NCCL does. A group's own numbers count both: a pipeline's ranks, which send more or less often,
    would not agree on them.
    """
    found: dict[int, list[tuple[Key, dict[str, Any]]]] = defaultdict(list)
    count: dict[Key, int] = defaultdict(int)
    rows = report.collectives.sort_values(["rank", "step", "span"], kind="stable")
    for row in rows.to_dict("records"):
        if row["op"] not in POINT_TO_POINT:
            of = (row["rank"], row["axis"], row["ranks"], row["phase"])
            key: Key = (*of[1:], count[of])
            count[of] += 1
        else:
            pair = (row["rank"], row["peer"])
            way = pair if row["op"] == "send" else pair[::-1]
            side = (row["op"], row["axis"], *way)
            key = ("pair", row["axis"], *way, count[side])
            count[side] += 1
        found[row["span"]].append((key, row))
    return found


def _copies(report: Report, cluster: Cluster) -> dict[int, float]:
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
    spans: list[_Span],
    calls: dict[int, list[tuple[Key, dict[str, Any]]]],
    costs: _Costs,
    copies: dict[int, float],
) -> tuple[list[Item], list[list[int]]]:
    """One rank's step as engine items, and for every span the positions of its items."""
    items: list[Item] = []
    places: list[list[int]] = []
    at: dict[int, list[int]] = {}
    on_compute: set[int] = set()
    for span in spans:
        first = len(items)
        awaited = tuple(
            p for other in span.after if other not in on_compute for p in at.get(other, ())
        )
        if span.kind == "wait":
            items.append(Wait(awaited))
        elif span.lane == "compute":
            if awaited:
                items.append(Wait(awaited))
                first += 1
            items.append(Compute(costs.seconds[costs.key_of[span.id]]
                                 if span.id in costs.key_of else 0.0))  # fmt: skip
        elif span.kind == "comm" and span.id in calls:
            items += [_collective(key, row, span, awaited) for key, row in calls[span.id]]
        else:
            key = costs.key_of.get(span.id)
            seconds = 0.0 if key is None else costs.seconds[key]
            items.append(Copy(span.lane, copies.get(span.id, seconds), awaited))
        at[span.id] = list(range(first, len(items)))
        places.append(at[span.id])
        if span.lane == "compute":
            on_compute.add(span.id)
    return items, places


def _collective(key: Key, row: dict[str, Any], span: _Span, awaited: tuple[int, ...]) -> Collective:
    ranks, lane = row["ranks"], span.lane
    if key[0] == "pair":  # each direction of each pair is a wire of its own
        ranks = key[2:4]
        lane = f"{lane}:{ranks[0]}>{ranks[1]}"
    return Collective(key, lane, ranks, row["op"], row["wire_bytes"], row["level"], awaited)


def _setup_spans(report: Report, spans: list[_Span]) -> set[int]:
    """Handshakes before the first step, and what waited for them: no part of any step."""
    calls = report.collectives
    setup = set(calls["span"][calls["phase"] == "setup"].tolist())
    waits = {s.id for s in spans if s.kind == "wait" and s.after and setup.issuperset(s.after)}
    return setup | waits


# ---- tables -----------------------------------------------------------------------------------
def _retimed(table: Any, column: str, when: dict[int, tuple[float, float]], zero: float) -> Any:
    """A copy of ``table`` with the times of the spans that ``column`` names; others keep theirs."""
    old = zip(table[column], table["start"], table["end"], strict=True)
    new = [
        tuple(t - zero for t in when[span]) if span in when else (start, end)
        for span, start, end in old
    ]
    return table.assign(start=[start for start, _ in new], end=[end for _, end in new])


def _step_keys(report: Report) -> list[tuple[int, int]]:
    return list(zip(report.steps["step"].tolist(), report.steps["rank"].tolist(), strict=True))


def _retimed_memory(
    report: Report, spans: list[_Span], when: dict[int, tuple[float, float]], zero: float
) -> Any:
    """Memory samples at the same place between the same spans of their rank's compute lane."""
    table = report.memory
    if table.empty:
        return table.copy()
    import numpy as np

    new = table["time"].to_numpy().copy()
    for rank in set(table["rank"].tolist()):
        lane = [s for s in spans if s.rank == rank and s.lane == "compute"]
        if lane:
            old = [t for s in lane for t in (s.start, s.end)]
            moved = [t - zero for s in lane for t in when[s.id]]
            mine = (table["rank"] == rank).to_numpy()
            times, place = np.unique(new[mine], return_inverse=True)
            times = np.interp(times, old, moved)
            for i in range(1, len(times)):  # what was no time apart is still one after the other
                times[i] = max(times[i], times[i - 1] + 1e-9)
            new[mine] = times[place]
    return table.assign(time=new)
