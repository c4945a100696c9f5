"""What the parts of a model take, embedding, block and head: read off compiled programs.

For every way to cut and run a layer that a space of plans has (`LAYOUT`) a model of one block is
compiled for one micro-batch, timed and weighed; what each part takes is summed up over its
instructions (`parts`). In the samples of a micro-batch every figure is a straight line, or bends
upward where a wait takes over from another, so the fewest and the most samples are weighed and the
others lie between them (`part_table`). A few milliseconds for each way.
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
    """One part on one micro-batch, on one tensor-parallel rank.

    forward, back, weight   seconds; back is all of backward, or its input half
    again                   seconds of recomputation
    sent                    seconds of forward and backward that tensor parallelism is waited for
    hidden                  seconds of calls of tensor parallelism that are not
    kept                    bytes from forward to backward
    front, behind           bytes in forward, and in backward, beyond what there was before forward
    aside, over             bytes from an input half to its weight half, and meanwhile in that
    elements, largest       of all its parameters, and of the one that has most
    units                   flat buffers that their gradients make
    """


class Parts(namedtuple("Parts", "embedding block head shared message token constant")):
    """The three parts, and what belongs to none of them.

    shared   seconds, once per step, to add up what tp ranks share
    message  bytes of what goes from stage to stage
    token    elements of the embedding's rows for tokens, on one rank
    constant bytes that no step changes, of a rank with one block
    """


_WAYS = {
    FORWARD: "forward",
    RECOMPUTE: "again",
    BACKWARD: "back",
    BACKWARD_INPUT: "back",
    BACKWARD_WEIGHT: "weight",
}


def parts(program: Program, cluster: Cluster) -> list[float]:
    """The numbers of `Parts`, one after the other, of a program of one block, one micro-batch."""
    code, model, plan = program.codes[0], program.model, program.plan
    costs, starts = Costs(program, cluster), [i for _, i, _ in model.parts]
    times, serial = walked(program, costs), walked(program, Serial(costs))
    took, alone = (
        [left - came for came, left in zip(*some.of_program(0), strict=True)]
        for some in (times, serial)
    )
    last = max(at for at, ins in enumerate(code) if ins.op in COMPUTE)
    found = [dict.fromkeys(Part._fields, 0.0) for _ in starts]
    for at in reversed(range(last + 1)):  # a rank waits for the sake of what it computes next
        ins, cost = code[at], costs.of(0, code[at])
        if ins.op in COMPUTE:
            part = found[bisect_right(starts, ins.at[0]) - 1]
            way = _WAYS[BACKWARD if ins.phase else ins.op]  # a half split off to hide a call
        part[way] += took[at]
        part["hidden"] += alone[at] - took[at]
        if way != "again" and plan.tp > 1:
            part["sent"] += took[at] - (cost.seconds if type(cost) is Compute else 0.0)
    before: dict[int, int] = {}
    there = model.item * model.tokens * model.width  # the gradient that comes in, or goes out
    halves, gloo = plan.schedule in SPLIT, not cluster.gpus
    levels = [
        (peak, held.get(GRADIENTS, 0), sum(behind.values()))
        for peak, held, behind in islice(moments(program, gloo=gloo), last + 2)
    ]
    for ins, (_, made, came), (most, gradients, left) in zip(
        code, levels, levels[1:], strict=False
    ):
        if ins.op in COMPUTE:
            number = bisect_right(starts, ins.at[0]) - 1
            part, began = found[number], before.setdefault(number, came)
            above, side = sum(other["aside"] for other in found[number + 1 :]), "behind"
            if ins.op == FORWARD:
                side, part["kept"] = "front", left - began
            elif ins.op == BACKWARD_INPUT and halves:
                part["aside"] = left - began - gradients - there * (number > 0) - above
        if ins.op != BACKWARD_WEIGHT or not halves:
            part[side] = max(part[side], most - gradients - began - above)
        else:
            part["over"] = max(part["over"], most - came - (gradients - made))
    several = plan.replace(dp=2)
    for part, (name, _, _) in zip(found, model.parts, strict=True):
        sizes = model.numels[name]
        part["elements"], part["largest"] = sum(sizes.values()), max(sizes.values())
        part["units"] = len(units(sizes, program.spec, several))
    shared = sum(took[at] for at in range(last + 1, len(code)) if code[at].op not in (COPY, UPDATE))
    numbers = [number for part in found for number in part.values()]
    return [*numbers, shared, there, prod(model.shapes[TIED[0]]), program.constant_bytes(0)]


def part_table(space: Space, model: ModelSpec, cluster: Cluster) -> Parts:
    """Of every plan of a space."""
    one, width = model.replace(layers=1), len(Part._fields)
    code = numbered(space.splits, *(space.codes[name] for name in LAYOUT))
    table = np.empty((3 * width + len(Parts._fields) - 3, len(space)))
    for way in np.unique(code):
        those = np.flatnonzero(code == way)
        samples, at = space.microbatch_size[those], space[those[0]]
        plan = Plan(
            **{name: getattr(at, name) for name in LAYOUT},
            schedule=SPLIT[0] if space.splits[those[0]] else "1f1b",
            microbatch_size=at.microbatch_size,
        )
        program, known = compiled(one, plan), []
        machine = _of_group(cluster, reach(cluster, plan.tp, 1, at.world_size))
        few, most = int(samples.min()), int(samples.max())
        for size in sorted({few, most}):
            plan = plan.replace(microbatch_size=size)
            program = replace(program, plan=plan, model=build(one, plan))
            known.append(np.array(parts(program, machine))[:, None])
        share = (samples - few) / max(most - few, 1)
        table[:, those] = known[0] + share * (known[-1] - known[0])
    three = (Part(*table[i * width : (i + 1) * width]) for i in range(3))
    return Parts(*three, *table[3 * width :])


def reach(cluster: Cluster, size: int, stride: int, world: int) -> Reach:
    """Where the ranks of that group are, of all of ``size`` ranks ``stride`` apart, that is spread
    furthest.
    """
    first = np.arange(world - (size - 1) * stride)
    first = first[first // stride % size == 0]
    groups = (first[:, None] + stride * np.arange(size)) // cluster.devices_per_node
    unlike = np.unique(groups - groups[:, :1], axis=0).tolist()
    return furthest(Reach.of(group, int) for group in unlike)


def _of_group(cluster: Cluster, reach: Reach) -> Cluster:
    """A cluster whose first devices are a tensor-parallel group with this reach."""
    size, ports = reach.members, cluster.ports or cluster.devices_per_node
    if reach.nodes > 1:
        size = size - reach.near if reach.nodes == 2 else reach.near
    port: Link = cluster.inter  # type: ignore[assignment]  # filled at its birth
    inter = port.replace(bandwidth=port.bandwidth * ports / cluster.devices_per_node)
    nodes = -(-reach.members // size)
    return cluster.replace(devices_per_node=size, nodes=nodes, inter=inter, ports=None)
