"""A pipeline's timeline: the ideal schedule above, what the report has beneath.

There is one row per rank, and one box per forward (F) and backward (B, or its halves I and W) with
the micro-batch's number on it; later chunks of a rank's model are paler. A hatched box is a rank
that waits, has not begun, or has nothing left to do while others still work. The margin has every
rank's idle share of T, the longest time of a rank from its first forward to its last backward
(`metrics.idle_shares`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from paralab.report import facts, metrics
from paralab.report.intervals import Interval, union
from paralab.report.tables import Tables
from paralab.theory.ideal import ideal as make_ideal
from paralab.theory.pipeline import Simulation, simulate
from paralab.theory.schedule_check import checked
from paralab.view import boxes, naming, theme, timeline_rows
from paralab.view.boxes import Section
from paralab.view.chart import Chart
from paralab.view.theme import percent

ROOM = 16  # ranks: up to so many are drawn together with their ideal schedule
NOT_BEGUN, DONE = "nothing has arrived yet", "nothing left to do in this step"
WAITING = "waits for a neighbouring stage"


def pipeline_timeline(
    report: Tables, *, step: int | None, ranks: Sequence[int] | None, ideal: bool
) -> Chart:
    """The step's boxes; above them, if ``ideal`` and if there is room, those of the same schedule
    with free links.
    """
    drawn = len(boxes.chosen(report, step, ranks)[1])
    ideal = ideal and drawn <= ROOM and report.model is not None  # None: of a bare schedule
    real = section(report, step=step, ranks=ranks, compute_only=ideal, marked=True)
    bubble, remarks = metrics.step_bubble(report, real.step), [f"step {real.step}"]
    sections, text = [real], bubble_of(naming.subject(report), bubble)
    real.label, real.head = report.clock, head(report.clock, bubble)
    if ideal:
        ideal_run, place = make_ideal(report, step=real.step), report.plan.place
        first = {place(r)[0]: r for r in reversed(real.ranks)}  # of each pipeline rank, for its row
        above = simulated(ideal_run, "", label="ideal", ranks=sorted(first))
        above.ranks = [first[pp] for pp in above.ranks]
        above.idle = {first[pp]: share for pp, share in above.idle.items()}
        above.boxes = [{**box, "rank": first[box["rank"]]} for box in above.boxes]
        above.report = report  # its costs are on this clock
        sections.insert(0, above)
        waits = report.clock == "measured" and facts.device_of(report) == "cpu"  # also for a core
        alone = "every rank {} a device of its own and " * waits
        remarks.append(f"ideal: the same costs, but {alone.format('has')}links take no time")
        text += f", {theme.share(ideal_run.bubble_rate)} if {alone.format('had')}links took no time"
    return timeline_rows.drawn(sections, text, remarks)


def section(report: Tables, *, label: str = "", marked: bool = False, **asked: Any) -> Section:
    """One step of a pipeline as a section, with a waiting box wherever a rank is idle.

    marked  whether the line at the end stands where the pipeline ends instead of the step
    asked   compute_only, step and ranks, as `boxes.section` takes them
    """
    result = boxes.section(report, label=label, **{"compute_only": True} | asked)
    zero, _ = boxes.extent(report, result.step)
    parts = {
        rank: (start - zero, end - zero)
        for rank, (start, end, *_) in metrics.pipeline_parts(report, result.step).items()
    }
    if not parts:
        return result
    edges_of: dict[tuple[int, ...], Interval] = {}  # by pipeline
    for rank, (start, end) in parts.items():
        pipeline = report.plan.place(rank)[1:]
        low, high = edges_of.get(pipeline, (start, end))
        edges_of[pipeline] = min(low, start), max(high, end)
    idle = metrics.idle_shares(report, result.step)
    result.idle = {r: idle[r] for r in result.ranks if r in idle}
    if label:
        result.head = head(label, metrics.step_bubble(report, result.step))
        result.head += "" if report.clock in label else f", {report.clock}"
    edges = {r: edges_of[report.plan.place(r)[1:]] for r in result.ranks if r in parts}
    if marked:
        result.mark = max(end for _, end in edges.values())
    # Where no waits are recorded, every gap is one; a bare schedule has those of its last actions.
    if report.model is None or all(b["kind"] != "wait" for b in result.boxes):
        low, high = min(start for start, _ in parts.values()), max(end for _, end in parts.values())
        fill(result, dict.fromkeys(result.ranks, (low, high)))
    else:
        fill(result, edges, parts)
    return result


def fill(
    section: Section, edges: Mapping[int, Interval], busy: Mapping[int, Interval] | None = None
) -> None:
    """Add a waiting box for every gap of a rank between its ``edges``, {rank: (start, end)}.

    busy  {rank: (start, end)} of its own work, if the waits in between are recorded already: then
          only gaps before and after it are filled
    """
    blank = {"id": -1, "step": section.step, "lane": "compute", "kind": "wait", "microbatch": -1}
    blank |= {"calls": [], "copies": [], "op": "", "category": "", "label": section.label}
    blank |= dict.fromkeys(("stage", "chunk", "track", "late"), 0)
    waits = []
    for rank, (low, high) in edges.items():
        own_boxes = [b for b in section.boxes if b["rank"] == rank and b["lane"] == "compute"]
        work = union((b["start"], b["end"]) for b in own_boxes)
        begin, done = busy[rank] if busy else (work[0][0], work[-1][1]) if work else (high, low)
        for (_, start), (end, _) in pairwise([(low, low), *work, (high, high)]):
            start, end = max(start, low), min(end, high)
            why = NOT_BEGUN if end <= begin else DONE if start >= done else WAITING
            long = end - start > 1e-9 * (high - low)  # else a rounding error
            if long and not (busy and why == WAITING):
                waits.append({**blank, "rank": rank, "start": start, "end": end, "why": why})
    section.boxes += waits


def head(name: str, bubble: float) -> str:
    """The heading of a section."""
    return f"<b>{theme.text(name)}</b> · bubble {percent(bubble)}"


# ---- simulated schedules -------------------------------------------------------------------------
def schedules(named: Mapping[str, Any], *, title: str | None = None) -> Chart:
    """Several schedules, {name: lists of actions or a simulation}, under one another on one time
    axis: what its bubble costs each of them.

    title  replaces the finding, which compares the slowest with the fastest

    In lists, forward, backward and each half of a split backward take 1, 2, 1 and 1 ms for all of a
    rank's layers; each of v chunks takes 1/v of that. Raises ValueError without schedules, and on
    something that is no schedule.
    """
    naming.labelled("named", named, "{name: a schedule}")
    by_name = {
        str(name): schedule if isinstance(schedule, Simulation) else timed(schedule)
        for name, schedule in named.items()
    }
    lengths = {name: schedule.makespan for name, schedule in by_name.items()}
    best = min(lengths, key=lengths.__getitem__)
    sections = [simulated(schedule, name, label=name) for name, schedule in by_name.items()]
    slowest, fastest = (
        [theme.text(name) for name, length in lengths.items() if math.isclose(length, extreme)]
        for extreme in (max(lengths.values()), lengths[best])
    )
    times = max(lengths.values()) / lengths[best]
    longer = f"{theme.share(times - 1)} longer than"
    if times >= 2:
        longer = f"{theme.times(times)} as long as"
    verb = "takes" if len(slowest) == 1 else "take"
    finding = f"{theme.listed(slowest)} {verb} {longer} {theme.listed(fastest)}"
    if math.isclose(times, 1.0):
        finding = f"{theme.listed(fastest)} take the same time"
    if len(sections) == 1:
        finding = bubble_of(best, by_name[best].bubble_rate)
    return timeline_rows.drawn(sections, finding, []).titled(title)


def timed(lists: Sequence[Sequence[Any]], unit: float = 1e-3) -> Simulation:
    """A schedule simulated with the costs that `schedules` states, in these seconds for its ms."""
    lists, order = checked(lists)
    each = unit * order.ranks / order.stages
    return simulate(lists, forward=each, backward=each, weight_grad=each)


def bubble_of(name: str, bubble: float) -> str:
    """The finding of one pipeline."""
    return f"{theme.text(name)}: the bubble is {theme.share(bubble)} of device time"


def simulated_timeline(simulation: Simulation, name: str = "schedule") -> Chart:
    """The timeline of a simulated schedule."""
    section, order = simulated(simulation, name), simulation.order
    remarks, v = [f"p={order.ranks}, m={order.microbatches}"], section.report.plan.virtual_stages
    remarks += [f"v={v}"] * (v > 1)
    finding = bubble_of(name, simulation.bubble_rate)
    return timeline_rows.drawn([section], finding, remarks)


def simulated(
    simulation: Simulation, name: str, *, label: str = "", ranks: Sequence[int] | None = None
) -> Section:
    """A simulated schedule as a section, with its bubble in the heading."""
    result = section(simulation.report(name), label=label, ranks=ranks, marked=True)
    result.head = head(label, simulation.bubble_rate)
    return result
