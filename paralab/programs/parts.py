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
from functools import lru_cache
from itertools import islice
from math import prod

import numpy as np

from paralab.interpret.costs import Compute, Costs
from paralab.interpret.memory import GRADIENTS, moments
from paralab.interpret.serial import Serial
from paralab.interpret.time import walked
from paralab.parallel.buckets import units
from paralab.parallel.schedules import SPLIT
from paralab.programs.compile import compiled, laid_out
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
from paralab.spec import BYTES_PER_ELEMENT, TIED, ModelSpec, Plan
from paralab.spec.cluster import Cluster
from paralab.spec.links import Link, Reach, furthest

LAYOUT = (
    *("tp", "tp_mode", "tp_depth", "sequence_parallel", "recompute", "partition_activations"),
    *("tp_overlap", "precision", "grad_dtype", "bucket_bytes"),
)


SECONDS = "forward backward weight recompute tp_wait tp_hidden"
BYTES = "saved forward_peak backward_peak deferred weight_peak"
SIZES = "elements largest units tensors"


class PartFigures(namedtuple("PartFigures", f"{SECONDS} {BYTES} {SIZES}")):
    """The figures of one part for one micro-batch, on one tensor-parallel rank.

    forward            seconds of forward
    backward, weight   seconds of backward, or of its input half; of the weight half
    recompute          seconds of recomputation
    tp_wait            seconds of forward and backward that wait for tensor-parallel calls
    tp_hidden          seconds of tensor-parallel calls that overlap with compute
    saved              bytes saved from forward to backward
    forward_peak, backward_peak  peak bytes in each, above the bytes before forward
    deferred           bytes held between input half and weight half
    weight_peak        peak bytes of the weight half, above the bytes before it
    elements, largest  elements of all its parameters, and of the largest one
    units              buckets that its gradients fill, a share of the last; ``tensors``: parameters
    """


class Parts(namedtuple("Parts", "embedding block head shared message token constant")):
    """The `PartFigures` of the three parts, and figures that belong to none of them.

    shared   seconds per step to sum the gradients of parameters that tp ranks replicate
    message  bytes of a message between stages
    token    elements of the token embedding on one rank
    constant bytes that no step changes, on a rank with one block
    """


Figures = list[dict[str, float]]  # {field of `PartFigures`: its value}, for each part
_FIELDS = {
    FORWARD: "forward",
    RECOMPUTE: "recompute",
    BACKWARD: "backward",
    BACKWARD_INPUT: "backward",
    BACKWARD_WEIGHT: "weight",
}


def parts(program: Program, cluster: Cluster) -> list[float]:
    """The numbers of `Parts`, one after the other, from a program of one block, one micro-batch."""
    model, plan = program.model, program.plan
    figures = [dict.fromkeys(PartFigures._fields, 0.0) for _ in model.parts]
    last = max(at for at, ins in enumerate(program.codes[0]) if ins.op in COMPUTE)
    shared = _add_seconds(figures, program, cluster, last)
    _add_bytes(figures, program, last, gloo=not cluster.gpus)
    replicated, grad = plan.replace(dp=2), BYTES_PER_ELEMENT[plan.grad_precision]
    for part, (name, _, _) in zip(figures, model.parts, strict=True):
        sizes = model.numels[name]
        part["elements"], part["largest"] = sum(sizes.values()), max(sizes.values(), default=0)
        part["tensors"], buckets = len(sizes), units(sizes, program.spec, replicated)
        part["units"] = sum(min(unit.numel * grad / plan.bucket_bytes, 1.0) for unit in buckets)
    numbers = [number for part in figures for number in part.values()]
    message, token = _message_bytes(program), prod(model.shapes[TIED[0]])
    return [*numbers, shared, message, token, program.constant_bytes(0)]


def _add_seconds(figures: Figures, program: Program, cluster: Cluster, last: int) -> float:
    """Add the seconds of every part, up to the ``last`` compute. Returns those of `Parts.shared`,
    which follow it.
    """
    code, costs = program.codes[0], Costs(program, cluster)
    starts = [i for _, i, _ in program.model.parts]
    seconds, serial_seconds = (
        [end - start for start, end in zip(*times.of_program(0), strict=True)]
        for times in (walked(program, costs), walked(program, Serial(costs)))
    )
    for at in reversed(range(last + 1)):  # calls and waits count for the compute that follows them
        ins, cost = code[at], costs.of(0, code[at])
        if ins.op in COMPUTE:
            part = figures[bisect_right(starts, ins.at[0]) - 1]
            # A weight half that was split off to hide a call belongs to its backward.
            field = _FIELDS[BACKWARD if ins.phase else ins.op]
        part[field] += seconds[at]
        part["tp_hidden"] += serial_seconds[at] - seconds[at]
        if field != "recompute" and program.plan.tp > 1:
            part["tp_wait"] += seconds[at] - (cost.seconds if type(cost) is Compute else 0.0)
    after = range(last + 1, len(code))
    return sum(seconds[at] for at in after if code[at].op not in (COPY, UPDATE))


def _add_bytes(figures: Figures, program: Program, last: int, *, gloo: bool) -> None:
    """Add the bytes of every part up to the ``last`` compute, without gradients of parameters."""
    starts = [i for _, i, _ in program.model.parts]
    code, splits = program.codes[0], program.plan.schedule in SPLIT
    base = {}  # part -> bytes before its forward
    levels = [  # (bytes at the instruction's peak, gradient bytes among these, bytes after it)
        (peak, held.get(GRADIENTS, 0), sum(after.values()))
        for peak, held, after in islice(moments(program, gloo=gloo), last + 2)
    ]
    for ins, *around in zip(code, levels, levels[1:], strict=False):
        (_, gradients_before, before), (peak, gradients, after) = around
        if ins.op in COMPUTE:  # calls and waits behind it have their peaks in the same part
            number = bisect_right(starts, ins.at[0]) - 1
            part, begin = figures[number], base.setdefault(number, before)
            later = sum(later["deferred"] for later in figures[number + 1 :])
            field = "forward_peak" if ins.op == FORWARD else "backward_peak"
        if ins.op == BACKWARD_WEIGHT and splits:
            above = peak - before - (gradients - gradients_before)
            part["weight_peak"] = max(part["weight_peak"], above)
            continue
        if ins.op == FORWARD:
            part["saved"] = after - begin
        elif ins.op == BACKWARD_INPUT and splits:
            message = _message_bytes(program) * (number > 0)  # the gradient of its input
            part["deferred"] = after - begin - gradients - message - later
        part[field] = max(part[field], peak - gradients - begin - later)


def _message_bytes(program: Program) -> int:
    """Bytes of a state of the residual stream, or of its gradient, as stages send it."""
    return program.model.item * program.model.tokens * program.model.width


def part_table(space: Space, model: ModelSpec, cluster: Cluster) -> Parts:
    """The figures of every plan of a space, as columns."""
    one_block, width = model.replace(layers=1), len(PartFigures._fields)
    layout_codes = numbered(space.splits, *(space.codes[name] for name in LAYOUT))
    table = np.empty((3 * width + len(Parts._fields) - 3, len(space)))
    known: dict[Plan, Program] = {}
    for layout in np.unique(layout_codes):
        plans_of_layout = np.flatnonzero(layout_codes == layout)
        samples, example = space.microbatch_size[plans_of_layout], space[plans_of_layout[0]]
        fewest, most = int(samples.min()), int(samples.max())
        plan = Plan(
            **{name: getattr(example, name) for name in LAYOUT},
            schedule=SPLIT[0] if space.splits[plans_of_layout[0]] else "1f1b",
        )
        group = reach(cluster.devices_per_node, plan.tp, 1, example.world_size)
        machine = _of_group(cluster, group)
        figures = []
        for size in (fewest, most)[: 1 + (most > fewest)]:
            program = _compiled(one_block, plan.replace(microbatch_size=size), known)
            figures.append(np.array(parts(program, machine)))
        share = (samples - fewest) / max(most - fewest, 1)
        first, last = figures[0], figures[-1]
        table[:, plans_of_layout] = first[:, None] + share * (last - first)[:, None]
    three = (PartFigures(*table[i * width : (i + 1) * width]) for i in range(3))
    return Parts(*three, *table[3 * width :])


def _compiled(model: ModelSpec, plan: Plan, known: dict[Plan, Program]) -> Program:
    """The program of one micro-batch. Its instructions depend neither on the number of samples nor,
    of "1d", on how many ranks there are beyond one; so most come from ``known`` programs.
    """
    degree = min(plan.tp, 2) if plan.tp_mode == "1d" else plan.tp
    alike = plan.replace(tp=degree, microbatch_size=1)
    if alike not in known:
        known[alike] = compiled(model, plan)
        return known[alike]
    program = laid_out(model, plan, optimizer="adamw", clips=False)
    return replace(program, codes=known[alike].codes)


@lru_cache(maxsize=1024)
def reach(devices_per_node: int, size: int, stride: int, world: int) -> Reach:
    """The `Reach` of the group that is spread over most nodes, among all groups of ``size`` ranks
    that are ``stride`` apart.
    """
    first = np.arange(world - (size - 1) * stride)
    first = first[first // stride % size == 0]
    groups = (first[:, None] + stride * np.arange(size)) // devices_per_node
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
