"""Seconds and bytes of a model's parts, embedding, block and head, read off compiled programs.

For every combination of the settings that change a part (`LAYOUT`), a model of one block is
compiled for one micro-batch, and its predicted seconds and bytes are summed per part (`parts`).
Each figure grows linearly with the samples per micro-batch, or convexly where one wait replaces
another as the longest. So only the smallest and the largest micro-batch are compiled, and the
others interpolated (`part_table`). Each combination takes a few milliseconds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import namedtuple
from dataclasses import replace
from itertools import islice
from math import prod

import numpy as np

from paralab.interpret.costs import Compute, Costs
from paralab.interpret.memory import GRADIENTS, moments
from paralab.interpret.serial import Serial
from paralab.interpret.time import walked
from paralab.model.build import build
from paralab.parallel.buckets import units
from paralab.parallel.schedules import SPLIT
from paralab.programs.compile import compiled
from paralab.programs.instructions import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    COMPUTE,
    COPY,
    FORWARD,
    RECOMPUTE,
    UPDATE,
)
from paralab.programs.program import Program
from paralab.programs.space import Space, numbered
from paralab.spec import TIED, ModelSpec, Plan
from paralab.spec.cluster import Cluster
from paralab.spec.links import Link, Reach, furthest

LAYOUT = (
    *("tp", "tp_mode", "tp_depth", "sequence_parallel", "recompute", "partition_activations"),
    *("tp_overlap", "precision", "grad_dtype", "bucket_bytes", "grad_sync"),
)


NAMES = "forward back weight again sent hidden kept front behind aside over elements largest units"


class Part(namedtuple("Part", NAMES)):
    """The figures of one part for one micro-batch, on one tensor-parallel rank.

    forward, back, weight   seconds of forward, of backward or its input half, of the weight half
    again                   seconds of recomputation
    sent                    seconds of forward and backward that wait for tensor-parallel calls
    hidden                  seconds of tensor-parallel calls that overlap with compute
    kept                    bytes saved from forward to backward
    front, behind           peak bytes in forward, and in backward, above the bytes before forward
    aside, over             bytes held between input half and weight half; peak of the weight half
    elements, largest       elements of all its parameters, and of the largest one
    units                   flat buffers that its gradients fill
    """


class Parts(namedtuple("Parts", "embedding block head shared message token constant")):
    """The three parts, and figures that belong to none of them.

    shared   seconds per step to sum the gradients of parameters that tp ranks replicate
    message  bytes of a message between stages
    token    elements of the token embedding on one rank
    constant bytes that no step changes, on a rank with one block
    """


_FIELDS = {
    FORWARD: "forward",
    RECOMPUTE: "again",
    BACKWARD: "back",
    BACKWARD_INPUT: "back",
    BACKWARD_WEIGHT: "weight",
}


def parts(program: Program, cluster: Cluster) -> list[float]:
    """The numbers of `Parts`, one after the other, from a program of one block, one micro-batch."""
    code, model, plan = program.codes[0], program.model, program.plan
    costs, starts = Costs(program, cluster), [i for _, i, _ in model.parts]
    times, serial = walked(program, costs), walked(program, Serial(costs))
    seconds, serial_seconds = (
        [end - start for start, end in zip(*walk.of_program(0), strict=True)]
        for walk in (times, serial)
    )
    last = max(at for at, ins in enumerate(code) if ins.op in COMPUTE)
    figures = [dict.fromkeys(Part._fields, 0.0) for _ in starts]
    for at in reversed(range(last + 1)):  # calls and waits count for the compute that follows them
        ins, cost = code[at], costs.of(0, code[at])
        if ins.op in COMPUTE:
            part = figures[bisect_right(starts, ins.at[0]) - 1]
            # A weight half that was split off to hide a call belongs to its backward.
            field = _FIELDS[BACKWARD if ins.phase else ins.op]
        part[field] += seconds[at]
        part["hidden"] += serial_seconds[at] - seconds[at]
        if field != "again" and plan.tp > 1:
            part["sent"] += seconds[at] - (cost.seconds if type(cost) is Compute else 0.0)
    before: dict[int, int] = {}  # part -> bytes before its forward
    message_bytes = model.item * model.tokens * model.width  # a gradient received, or sent
    splits, gloo = plan.schedule in SPLIT, not cluster.gpus
    levels = [  # (bytes at the instruction's peak, gradient bytes among these, bytes after it)
        (peak, held.get(GRADIENTS, 0), sum(behind.values()))
        for peak, held, behind in islice(moments(program, gloo=gloo), last + 2)
    ]
    for ins, (_, gradients_before, total_before), (peak_bytes, gradients, total_after) in zip(
        code, levels, levels[1:], strict=False
    ):
        if ins.op in COMPUTE:
            number = bisect_right(starts, ins.at[0]) - 1
            part, base = figures[number], before.setdefault(number, total_before)
            later_aside = sum(later["aside"] for later in figures[number + 1 :])
            peak_field = "behind"
            if ins.op == FORWARD:
                peak_field, part["kept"] = "front", total_after - base
            elif ins.op == BACKWARD_INPUT and splits:
                part["aside"] = (
                    total_after - base - gradients - message_bytes * (number > 0) - later_aside
                )
        if ins.op != BACKWARD_WEIGHT or not splits:
            part[peak_field] = max(part[peak_field], peak_bytes - gradients - base - later_aside)
        else:
            part["over"] = max(
                part["over"], peak_bytes - total_before - (gradients - gradients_before)
            )
    replicated = plan.replace(dp=2)
    for part, (name, _, _) in zip(figures, model.parts, strict=True):
        sizes = model.numels[name]
        part["elements"], part["largest"] = sum(sizes.values()), max(sizes.values())
        part["units"] = len(units(sizes, program.spec, replicated))
    shared = sum(
        seconds[at] for at in range(last + 1, len(code)) if code[at].op not in (COPY, UPDATE)
    )
    numbers = [number for part in figures for number in part.values()]
    return [*numbers, shared, message_bytes, prod(model.shapes[TIED[0]]), program.constant_bytes(0)]


def part_table(space: Space, model: ModelSpec, cluster: Cluster) -> Parts:
    """The figures of every plan of a space, as columns."""
    one_block, width = model.replace(layers=1), len(Part._fields)
    layout_codes = numbered(space.splits, *(space.codes[name] for name in LAYOUT))
    table = np.empty((3 * width + len(Parts._fields) - 3, len(space)))
    for layout in np.unique(layout_codes):
        plans_of_layout = np.flatnonzero(layout_codes == layout)
        samples, example = space.microbatch_size[plans_of_layout], space[plans_of_layout[0]]
        plan = Plan(
            **{name: getattr(example, name) for name in LAYOUT},
            schedule=SPLIT[0] if space.splits[plans_of_layout[0]] else "1f1b",
            microbatch_size=example.microbatch_size,
        )
        program, figures = compiled(one_block, plan), []
        machine = _of_group(cluster, reach(cluster, plan.tp, 1, example.world_size))
        fewest, most = int(samples.min()), int(samples.max())
        for size in sorted({fewest, most}):
            plan = plan.replace(microbatch_size=size)
            program = replace(program, plan=plan, model=build(one_block, plan))
            figures.append(np.array(parts(program, machine))[:, None])
        share = (samples - fewest) / max(most - fewest, 1)
        table[:, plans_of_layout] = figures[0] + share * (figures[-1] - figures[0])
    three = (Part(*table[i * width : (i + 1) * width]) for i in range(3))
    return Parts(*three, *table[3 * width :])


def reach(cluster: Cluster, size: int, stride: int, world: int) -> Reach:
    """The `Reach` of the group that is spread over most nodes, among all groups of ``size`` ranks
    that are ``stride`` apart.
    """
    first = np.arange(world - (size - 1) * stride)
    first = first[first // stride % size == 0]
    groups = (first[:, None] + stride * np.arange(size)) // cluster.devices_per_node
    placements = np.unique(groups - groups[:, :1], axis=0).tolist()
    return furthest(Reach.of(group, int) for group in placements)


def _of_group(cluster: Cluster, reach: Reach) -> Cluster:
    """A cluster whose first devices are a tensor-parallel group with this reach."""
    size, ports = reach.members, cluster.ports or cluster.devices_per_node
    if reach.nodes > 1:
        size = size - reach.near if reach.nodes == 2 else reach.near
    port: Link = cluster.inter  # type: ignore[assignment]  # __post_init__ filled it
    inter = port.replace(bandwidth=port.bandwidth * ports / cluster.devices_per_node)
    nodes = -(-reach.members // size)
    return cluster.replace(devices_per_node=size, nodes=nodes, inter=inter, ports=None)
