"""A step in outline: one rank per pipeline stage, one box per action, at any scale.

`predict` in full writes down every call of every rank, rows that grow with world size times
micro-batches times layers. But the ranks of a stage do the same, all micro-batches but the first
and the last repeat each other, and so do stages with equally many blocks. So here

    a program   of each *kind* of rank (its stages' parts, and which of its groups cross nodes) the
                rows of a step with two to four micro-batches, from the very code that writes them
                in full (predict_step.py), played on one rank: `Program`
    actions     what an action takes is read off there: its work, and what of its messages, gathers
                and copies the rank stands still for. Prefetches and reduce-scatters run on beside,
                in their lanes, into the next action, as they do in full
    a pipeline  the actions of the whole schedule and the messages between stages as one graph:
                `Timetable`. A message leaves when it is made, its receive is posted one action
                before it is needed, and each direction of a pair is one wire
    the end     per rank, from when its last micro-batch really came: what is left of gradient sync,
                the tied embedding's sum, the optimizer, what is gathered afterwards: `Tail`

Simulated are the ranks with data-parallel and tensor-parallel index 0, with their real numbers.
Bytes are exact. Time is that of the full simulation but for a lane that an action before a wait
has left busy, and for receives that could be posted earlier. tests/test_outline.py says what that
comes to. Cost: about 10 microseconds per action and step, whatever the number of layers and ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from paralab.parallel.schedules import relay
from paralab.spec import Cluster, ModelSpec, Plan
from paralab.theory import memory
from paralab.theory.engine import link_cost
from paralab.theory.outline_program import Program, pipeline_ranks
from paralab.theory.outline_tables import tables
from paralab.theory.outline_tail import Tail, tails
from paralab.theory.outline_times import Timetable, schedule_order, timetable
from paralab.theory.parameters import like
from paralab.theory.predict_step import activation_bytes_sent


def outline(
    model: ModelSpec, plan: Plan, cluster: Cluster, *, optimizer: str, steps: int
) -> tuple[dict[str, dict[str, Any]], dict[str, float]]:
    """The tables of ``steps`` steps; and what was under way in one, seconds per rank: see
    ``in_flight``.
    """
    times, ends = played(model, plan, cluster, optimizer)
    made_of = tables(model, plan, times, ends, size=activation_bytes_sent(model, plan),
                     level=levels(plan, cluster), optimizer=optimizer, steps=steps)  # fmt: skip
    return made_of, in_flight(plan, times, ends)


def totals(model: ModelSpec, plan: Plan, cluster: Cluster, *, optimizer: str) -> tuple[float, int]:
    """Of a step in outline without its tables: its seconds, and the fullest device's bytes."""
    _, ends = played(model, plan, cluster, optimizer)
    peaks = [
        sum(held.values())
        for rank in pipeline_ranks(plan)
        for held in memory.moments(model, plan, optimizer=optimizer, rank=rank).values()
    ]
    return max(tail.now for tail in ends), max(peaks)


def levels(plan: Plan, cluster: Cluster) -> Callable[..., str]:
    """(a, b, beside) -> what a message from one pipeline rank to another crosses, of the pipeline
    that is ``beside`` ranks further on: by default the first.
    """
    ranks = pipeline_ranks(plan)

    def level(a: int, b: int, beside: int = 0) -> str:
        apart = cluster.node_of(ranks[a] + beside) != cluster.node_of(ranks[b] + beside)
        return "inter" if apart else "intra"

    return level


def played(
    model: ModelSpec, plan: Plan, cluster: Cluster, optimizer: str
) -> tuple[Timetable, list[Tail]]:
    """When everything happens in a step: its actions and messages, and its end on every rank."""
    made = programs(model, plan, cluster, optimizer)
    size = activation_bytes_sent(model, plan)
    cost, level = link_cost(cluster), levels(plan, cluster)
    # Pipelines beside each other; what they cross repeats itself from node to node.
    apart = range(min(plan.dp * plan.tp, cluster.devices_per_node))

    def message(a: int, b: int) -> float:
        """Of the slowest of the pipelines that run beside each other."""
        return max(cost("send", where, size) for where in {level(a, b, at) for at in apart})

    times = timetable(plan, schedule_order(model, plan), made, message, cluster)
    return times, tails(plan, made, times)


def in_flight(plan: Plan, times: Timetable, ends: Sequence[Tail]) -> dict[str, float]:
    """Seconds of a step that calls and copies are under way, and how many of these are hidden
    behind computing: mean over the ranks of the outline. What `metrics.shares` reads off spans in
    full. Messages between stages count on both sides.
    """
    programs = {id(tail.program): tail.program for tail in ends}
    each = {name: one.in_flight(plan.microbatches) for name, one in programs.items()}
    total = sum(each[id(tail.program)] for tail in ends)
    done = np.cumsum(times.cost)
    done = np.stack([done - times.cost, done], 1).ravel()  # work until an action starts, and ends
    # The ranks' times one behind the other: one interpolation for all of them.
    length = max(times.end.max(), times.came.max(initial=0.0))
    shift = 2 * length * times.order.rank
    at = (np.stack([times.start, times.end], 1) + shift[:, None]).ravel()
    for side in (times.maker, times.user):
        left, came = times.left + shift[side], times.came + shift[side]
        total[0] += (came - left).sum()
        total[1] += (np.interp(came, at, done) - np.interp(left, at, done)).sum()
    names = ("communication", "communication hidden", "copies", "copies hidden")
    return {name: float(value) / len(ends) for name, value in zip(names, total, strict=True)}


def programs(model: ModelSpec, plan: Plan, cluster: Cluster, optimizer: str) -> list[Program]:
    """The program of every pipeline rank's kind; ranks of one kind share it."""
    made: dict[Any, Program] = {}
    by_rank, lists = [], plan.actions()
    if plan.relays:
        lists = [relay(len(memory.stage_parts(model, plan, 0)[0]), plan.microbatches)]
    for rank, actions in zip(pipeline_ranks(plan), lists, strict=True):
        key = _kind(model, plan, cluster, rank)
        if key not in made:
            made[key] = Program(model, plan, cluster, rank, optimizer, actions)
        by_rank.append(made[key])
    return by_rank


def _kind(model: ModelSpec, plan: Plan, cluster: Cluster, rank: int) -> Any:
    """Equal for ranks that do the same: parts alike, and groups alike within and between nodes."""
    alike = like(model, plan, rank)
    if plan.world_size <= cluster.devices_per_node:
        return alike, 0
    return alike, rank % cluster.devices_per_node
