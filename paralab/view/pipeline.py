"""A pipeline's timeline: the ideal above, the real beneath.

One row per rank, one box per forward (F), backward (B, or its halves I and W), the micro-batch's
number on it; later chunks of a rank's model are paler. Where it is hatched a rank waits, has not
begun, or has nothing left to do while others still work. The margin has every rank's idle share of
T, the longest time of a rank from its first forward to its last backward (`metrics.idle_shares`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from paralab.checks import choice, illegal, instance
from paralab.report import metrics
from paralab.report.intervals import union
from paralab.report.tables import Tables
from paralab.theory.ideal import ideal as make_ideal
from paralab.theory.order import W
from paralab.theory.pipeline import Simulation, simulate
from paralab.theory.schedule_check import checked
from paralab.view import boxes, naming, theme, timeline_rows
from paralab.view.boxes import Section
from paralab.view.chart import Chart
from paralab.view.theme import percent

Interval = tuple[float, float]

LANES = ("compute",)
GAP = 0.14  # of a row, between two ranks
ROOM = 16  # ranks that stand above their ideal
NOT_BEGUN, DONE = "nothing has arrived yet", "nothing left to do in this step"
WAITING = "waits for a neighbour"


def pipeline_timeline(
    report: Tables, *, step: int | None, ranks: Sequence[int] | None, ideal: bool | None
) -> Chart:
    """The step's boxes; above them, if ``ideal``, those of the same schedule with free links."""
    if ideal is None:  # where there is room, and where it is not theory already
        drawn = len(boxes.chosen(report, step, ranks)[1])
        ideal = drawn <= ROOM and report.model is not None
    real = section(report, step=step, ranks=ranks, only=LANES if ideal else None, marked=True)
    share, said = metrics.step_bubble(report, real.step), [f"step {real.step}"]
    sections, alone = [real], None
    real.label, real.head = report.clock, head(report.clock, share)
    if ideal:
        made, place = make_ideal(report, step=real.step), report.plan.place
        above = simulated(made, "", label="ideal", ranks=sorted({place(r)[0] for r in real.ranks}))
        alone, above.report = made.bubble_rate, report  # its clock is the costs'
        sections.insert(0, above)
        said.append("ideal: the same costs, links free")
    summary = f"timeline of {naming.subject(report)}, {report.clock}{', below its ideal' * ideal}: "
    summary += f"{sum(len(one.boxes) for one in sections)} boxes on {len(real.ranks)} ranks"
    return timeline_rows.drawn(sections, finding(report, share, alone), said, summary)


def finding(report: Tables, share: float, alone: float | None = None) -> str:
    """How large the bubble is, and the ideal's (``alone``), if it is drawn."""
    said = _bubble_of(naming.subject(report), share)
    if alone is None:
        return said
    if percent(alone) == percent(share):
        return f"{said}, as with free links"
    return f"{said}, {percent(alone)} with free links"


def section(
    report: Tables,
    *,
    label: str = "",
    only: tuple[str, ...] | None = LANES,
    marked: bool = False,
    **asked: Any,
) -> Section:
    """One step of a pipeline, with what is idle before a rank's first box and after its last.

    marked  the line at the end stands where the pipeline ends, not the step
    asked   step and ranks, as `boxes.section` has them
    """
    most = timeline_rows.MAX_BOXES
    one = boxes.section(report, label=label, only=only, most=most, **asked)
    one.gap = GAP if only == LANES else one.gap
    zero = float(report.steps["start"][report.steps["step"] == one.step].min())
    parts = {
        rank: (start - zero, end - zero)
        for rank, (start, end, *_) in metrics.pipeline_parts(report, one.step).items()
    }
    if not parts:
        return one
    of: dict[tuple[int, ...], list[Interval]] = {}  # by pipeline
    for rank, part in parts.items():
        of.setdefault(report.plan.place(rank)[1:], []).append(part)
    around = {p: (min(a for a, _ in some), max(b for _, b in some)) for p, some in of.items()}
    idle = metrics.idle_shares(report, one.step)
    one.idle = {r: idle[r] for r in one.ranks if r in idle}
    if label:
        one.head = head(label, metrics.step_bubble(report, one.step))
        one.head += "" if report.clock in label else f", {report.clock}"
    edges = {r: around[report.plan.place(r)[1:]] for r in one.ranks if r in parts}
    if marked:
        one.mark = max(end for _, end in edges.values())
    if all(b["kind"] != "wait" for b in one.boxes):  # no waits are recorded: gaps are waits
        low, high = min(a for a, _ in around.values()), max(b for _, b in around.values())
        if one.total > len(one.boxes):  # later boxes are not here: what they leave is no gap
            high = max(b["start"] for b in one.boxes)
        fill(one, dict.fromkeys(one.ranks, (low, high)))
    else:
        fill(one, edges, parts)
    return one


def fill(
    one: Section, edges: Mapping[int, Interval], busy: Mapping[int, Interval] | None = None
) -> None:
    """Make every gap of a rank between its ``edges`` a box.

    busy  from when to when a rank has its own work: gaps in between are recorded then
    """
    blank = {"id": -1, "step": one.step, "lane": "compute", "kind": "wait", "stage": 0, "chunk": 0}
    blank |= {"microbatch": -1, "cost": 0.0, "calls": [], "copies": [], "label": one.label}
    blank |= {"traced": False, "late": False, "track": 0}
    found = []
    for rank, (low, high) in edges.items():
        mine = [b for b in one.boxes if b["rank"] == rank and b["lane"] == "compute"]
        taken = union((b["start"], b["end"]) for b in mine)
        begin, done = (taken[0][0], taken[-1][1]) if taken else (high, low)
        if busy is not None:
            begin, done = busy[rank]
        starts, ends = [start for start, _ in taken] + [high], [low] + [end for _, end in taken]
        for start, end in zip(ends, starts, strict=True):
            start, end = max(start, low), min(end, high)
            why = NOT_BEGUN if end <= begin else DONE if start >= done else WAITING
            long = end - start > 1e-9 * (high - low)  # sums of floats leave cracks
            if long and (busy is None or why != WAITING):
                found.append({**blank, "rank": rank, "start": start, "end": end, "why": why})
    one.boxes += found


def head(name: str, share: float) -> str:
    """What stands above a section."""
    return f"<b>{theme.text(name)}</b> · bubble {percent(share)}"


# ---- simulated schedules -------------------------------------------------------------------------
def schedules(named: Mapping[str, Any], *, title: str | None = None, **seconds: float) -> Chart:
    """Several schedules, {name: lists of actions or a simulation}, under one another on one axis:
    what a bubble costs each of them.

    title    in place of the finding, by how much the slowest takes longer than the fastest
    seconds  of ``forward``, ``backward`` and ``weight_grad`` of a rank's whole share of the layers;
             default 1, 2 (or 1 where backward is in halves) and 1 ms. A rank's chunks take a part
             of them each. Raises ValueError without schedules, on one that is none, and if one
             takes no time
    """
    if not isinstance(named, Mapping) or not named:
        raise illegal("named", named, "nothing to draw", "{name: a schedule}")
    for name in seconds:
        choice("seconds of", name, ("forward", "backward", "weight_grad"))
    made = {
        str(name): one if hasattr(one, "makespan") else _timed(one, seconds)
        for name, one in named.items()
    }
    best, worst = (f(made, key=lambda name: made[name].makespan) for f in (min, max))
    if not made[best].makespan:
        raise illegal("named", best, "it takes no time at all", "forward= or backward= above 0")
    sections = [simulated(one, name, label=name) for name, one in made.items()]
    times = made[worst].makespan / made[best].makespan
    longer = (
        f"{theme.times(times)} as long as" if times >= 2 else f"{percent(times - 1)} longer than"
    )
    said = f"{theme.text(worst)} takes {longer} {theme.text(best)}"
    if len(made) > 1 and math.isclose(times, 1.0):
        *others, last = map(theme.text, made)
        said = f"{', '.join(others)} and {last} take the same time"
    if len(sections) == 1:
        said = _bubble_of(best, made[best].bubble_rate)
    summary = f"schedules on one axis: {' | '.join(made)}"
    return timeline_rows.drawn(sections, said, [], summary).titled(title)


def _timed(lists: Sequence[Sequence[Any]], seconds: Mapping[str, float]) -> Simulation:
    """A schedule with the default costs; a chunk of v takes 1/v of the rank's time."""
    lists, order = checked(lists)
    halves = W in order.kind
    cost = {"forward": 1e-3, "backward": 1e-3 if halves else 2e-3, **seconds}
    cost = {"weight_grad": 1e-3, **cost} if halves else cost
    return simulate(lists, **{k: t * order.ranks / order.stages for k, t in cost.items()})


def _bubble_of(name: str, share: float) -> str:
    return f"{theme.text(name)}: the bubble is {percent(share)} of device time"


def simulated_timeline(simulation: Simulation, name: str = "a schedule") -> Chart:
    """The picture of a schedule that was simulated."""
    instance("simulation", simulation, Simulation, "what theory.pipeline.simulate(...) returned")
    one, order = simulated(simulation, name), simulation.order
    said, v = [f"p={order.ranks}, m={order.microbatches}"], one.report.plan.virtual_stages
    said += [f"v={v}"] * (v > 1)
    summary = f"timeline of {name}: {one.total} actions on {order.ranks} ranks"
    return timeline_rows.drawn([one], _bubble_of(name, simulation.bubble_rate), said, summary)


def simulated(
    simulation: Simulation, name: str, *, label: str = "", ranks: Sequence[int] | None = None
) -> Section:
    """A simulated schedule as a section, every gap of it as bubble."""
    one = section(simulation.report(name), label=label, ranks=ranks)
    one.head = head(label, simulation.bubble_rate)
    return one
