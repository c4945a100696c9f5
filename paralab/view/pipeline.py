"""A pipeline's timeline: the ideal above, the real beneath, and every bubble seen as one.

One row per rank, one box per forward (F), backward (B, or its halves I and W), the micro-batch's
number on it; later chunks of a rank's model are paler. Whatever is hatched is the bubble: a rank
that waits for its neighbour, has not begun, or has nothing left to do while others still work. The
margin has every rank's total.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from paralab.report import metrics
from paralab.report.tables import COLUMNS
from paralab.theory.ideal import ideal as make_ideal
from paralab.view import boxes, naming, theme, timeline_rows

if TYPE_CHECKING:
    from paralab.report.tables import Tables
    from paralab.theory.pipeline import Simulation
    from paralab.view.boxes import Section
    from paralab.view.chart import Chart

LANES = ("compute",)
NO_ROWS = dict.fromkeys(COLUMNS)
GAP = 0.14  # of a row, between two ranks
ROOM = 16  # ranks that stand above their ideal
KIND = {"F": "forward", "B": "backward", "I": "backward", "W": "weight_grad"}
NOT_BEGUN, DONE = "nothing has arrived yet", "nothing left to do in this step"
WAITING = "waits for a neighbour"


def pipeline_timeline(
    report: Tables, *, step: int | None, ranks: Sequence[int] | None, ideal: bool | None
) -> Chart:
    """The step's boxes; above them, if ``ideal``, those of the same schedule with free links."""
    if ideal is None:  # where there is room, and where it is not theory already
        drawn = len(metrics.reported_ranks(report)) if ranks is None else len(ranks)
        ideal = drawn <= ROOM and report.model is not None
    real = section(report, step=step, ranks=ranks, lanes=LANES if ideal else None, marked=True)
    share, said = metrics.step_bubble(report, real.step), [f"step {real.step}"]
    sections, alone = [real], None
    real.label, real.head = report.clock, _head(report.clock, share)
    if ideal:
        made = make_ideal(report, step=real.step)
        alone = made.bubble_rate
        above = simulated(made, dataclasses.replace(report, **NO_ROWS), label="ideal")
        above.head = _head("ideal", alone)
        above.ranks = sorted({report.plan.place(rank)[0] for rank in real.ranks})
        above.boxes = [b for b in above.boxes if b["rank"] in above.ranks]
        sections.insert(0, above)
        said.append("ideal: the same costs, links free")
    fig = timeline_rows.drawn(sections, finding(report, share, alone), report.clock, said)
    count = sum(len(one.boxes) for one in sections)
    below = ", below its ideal" if ideal else ""
    return fig.explained(
        f"timeline of {naming.subject(report)}, {report.clock}{below}: {count} boxes on "
        f"{len(real.ranks)} ranks",
        lambda: boxes.table(sections),
    )


def finding(report: Tables, share: float, alone: float | None = None) -> str:
    """How large the bubble is, and the ideal's (``alone``), if it is drawn."""
    said = f"{theme.text(naming.subject(report))}: {percent(share)} of device time is bubble"
    if alone is None:
        return said
    if percent(alone) == percent(share):
        return f"{said}, all of it the schedule's"
    return f"{said}, {percent(alone)} in the ideal"


def section(
    report: Tables,
    *,
    label: str = "",
    step: int | None,
    ranks: Sequence[int] | None,
    lanes: tuple[str, ...] | None = LANES,
    marked: bool = False,
) -> Section:
    """One step of a pipeline, with what is idle before a rank's first box and after its last.

    marked  the line at the end stands where the pipeline ends, not the step
    """
    most = timeline_rows.MAX_BOXES
    one = boxes.section(report, label=label, step=step, ranks=ranks, lanes=lanes, most=most)
    one.gap = GAP if lanes == LANES else one.gap
    parts = metrics.pipeline_parts(report, one.step)
    if not parts:
        return one
    of = {rank: report.plan.place(rank)[1:] for rank in parts}
    zero = float(report.steps["start"][report.steps["step"] == one.step].min())
    ends = {p: max(parts[r][1] for r in parts if of[r] == p) for p in of.values()}
    starts = {p: min(parts[r][0] for r in parts if of[r] == p) for p in of.values()}
    idle = metrics.idle_shares(report, one.step)
    one.idle = {r: idle[r] for r in one.ranks if r in parts}
    if label:
        share = metrics.step_bubble(report, one.step)
        one.head = f"{_head(label, share)}{'' if report.clock in label else f', {report.clock}'}"
    if marked:
        one.mark = max(ends[of[r]] for r in one.ranks if r in of) - zero
    if all(b["kind"] != "wait" for b in one.boxes):  # nobody wrote waits down: gaps are waits
        fill(one, min(starts.values()) - zero, max(ends.values()) - zero)
        return one
    for rank in one.ranks:
        if rank in parts:
            edges = (starts[of[rank]] - zero, ends[of[rank]] - zero)
            busy = (parts[rank][0] - zero, parts[rank][1] - zero)
            one.boxes += _outside(one, rank, edges, busy)
    return one


def _outside(
    one: Section, rank: int, edges: tuple[float, float], busy: tuple[float, float]
) -> list[dict[str, Any]]:
    """What is idle between the pipeline's ``edges`` before and after this rank's work."""
    taken = metrics.union(
        (b["start"], b["end"]) for b in one.boxes if b["rank"] == rank and b["lane"] == "compute"
    )
    found = []
    for low, high, why in ((edges[0], busy[0], NOT_BEGUN), (busy[1], edges[1], DONE)):
        found += [
            {**_box(one, rank, "wait", start, end), "why": why}
            for start, end in _free(taken, low, high)
        ]
    return found


def _free(taken: Sequence[tuple[float, float]], low: float, high: float) -> list[Any]:
    """The stretches of (low, high) that none of the disjoint intervals in order covers."""
    found, now, least = [], low, 1e-9 * (high - low)  # sums of floats leave cracks
    for start, end in [*taken, (high, high)]:
        if start - now > least and start <= high:
            found.append((now, start))
        now = max(now, end)
    return found


# ---- simulated schedules -------------------------------------------------------------------------
def simulated_timeline(simulation: Simulation, name: str = "a schedule") -> Chart:
    """The picture of a schedule that was simulated: no report of thousands of rows is made."""
    from paralab.report.tables import Tables
    from paralab.spec import Plan

    order = simulation.order
    plan = Plan(
        pp=order.ranks, microbatches=order.microbatches, virtual_stages=order.stages // order.ranks
    )
    stub = Tables(clock="predicted", model=None, plan=plan, meta={"function": name})
    one = simulated(simulation, stub, label="")
    said = [f"p={order.ranks}, m={order.microbatches}"]
    said += [f"v={plan.virtual_stages}"] * (plan.virtual_stages > 1)
    finding = f"{theme.text(name)}: {percent(simulation.bubble_rate)} of device time is bubble"
    fig = timeline_rows.drawn([one], finding, "predicted", said)
    return fig.explained(
        f"timeline of {name}: {one.total} actions on {order.ranks} ranks",
        lambda: boxes.table([one]),
    )


def simulated(simulation: Simulation, stub: Tables, *, label: str) -> Section:
    """A simulated schedule as a section: its first boxes, and every gap between them as bubble.

    stub  a report that says what plan and clock it is about; its tables are not read
    """
    order, most = simulation.order, timeline_rows.MAX_BOXES
    zero = float(simulation.start.min())
    first = np.argsort(simulation.start, kind="stable")[:most].tolist()
    one = boxes.Section(
        stub, label, 0, list(range(order.ranks)), [], simulation.makespan, lanes=LANES, gap=GAP
    )
    for node in sorted(first):  # rank by rank, in the order of the lists
        action, rank = order.action(node), int(order.rank[node])
        start, end = float(simulation.start[node]) - zero, float(simulation.end[node]) - zero
        box = _box(one, rank, KIND[action.kind], start, end)
        chunk = action.stage // order.ranks
        one.boxes.append(
            {
                **box,
                "stage": action.stage,
                "chunk": chunk,
                "cost": end - start,
                "microbatch": action.microbatch,
            }
        )
    seen = max((b["start"] for b in one.boxes), default=0.0)
    whole = len(first) == len(order.rank)
    one.total = len(order.rank) + fill(one, 0.0, one.seconds if whole else seen)
    one.idle = {r: 1 - busy / simulation.cost for r, busy in enumerate(simulation.busy)}
    return one


def fill(one: Section, low: float, high: float) -> int:
    """Make every gap of every rank between ``low`` and ``high`` a box; how many there were."""
    found = []
    for rank in one.ranks:
        taken = metrics.union((b["start"], b["end"]) for b in one.boxes if b["rank"] == rank)
        work = [b for b in one.boxes if b["rank"] == rank]
        begin = min((b["start"] for b in work), default=high)
        done = max((b["end"] for b in work), default=low)
        for start, end in _free(taken, low, high):
            why = NOT_BEGUN if end <= begin else DONE if start >= done else WAITING
            found.append({**_box(one, rank, "wait", start, end), "why": why})
    one.boxes += found
    return len(found)


def _box(one: Section, rank: int, kind: str, start: float, end: float) -> dict[str, Any]:
    return {
        "id": -1,
        "rank": rank,
        "step": one.step,
        "lane": "compute",
        "kind": kind,
        "stage": 0,
        "chunk": 0,
        "microbatch": -1,
        "start": start,
        "end": end,
        "cost": 0.0,
        "after": (),
        "calls": [],
        "label": one.label,
        "traced": False,
        "track": 0,
    }


def _head(name: str, share: float) -> str:
    return f"<b>{theme.text(name)}</b> · bubble {percent(share)}"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"
