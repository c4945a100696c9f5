"""What a run would measure, from model, plan and machine: the same report, no process started.

The program is compiled once and interpreted three times: when everything happens (time.py), which
memory is alive meanwhile (memory.py), and what every call sends (traffic.py). boxes.py turns this
into the rows that the recorder of a run would have written. No paradigm has a formula of its own
here: its cost follows from its list of instructions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import count, groupby
from operator import itemgetter
from typing import Any

from paralab.checks import choice, illegal, instance, whole
from paralab.instruments.calibrate import device_of_run
from paralab.interpret.boxes import Box, boxes
from paralab.interpret.memory import Kind, moments
from paralab.interpret.time import Times, time
from paralab.interpret.traffic import Calls, Member
from paralab.programs.compile import compiled
from paralab.programs.program import Program
from paralab.report.report import Report
from paralab.report.tables import COLUMNS, by_column
from paralab.spec import Cluster, ModelSpec, Plan
from paralab.theory.uncollected import uncollected

DETAILS = ("calls", "actions")
MANY = 40_000  # rows, at about 40 microseconds each, from which on calls are summed up
MOST = 2_000_000  # rows: a larger report takes minutes and gigabytes
STATED = {  # what to write, for an error, if a plan offloads and the cluster lacks it
    "host": "pl.Link(alpha=10e-6, bandwidth=25e9)",
    "host_bandwidth": "20e9",
    "disk": "pl.Link(alpha=1e-4, bandwidth=2e9)",
}
Tables = dict[str, dict[str, list[Any]]]
Samples = list[tuple[float, dict[Kind, int]]]


@uncollected()
def predict(
    model: ModelSpec,
    plan: Plan | None = None,
    cluster: Cluster | None = None,
    *,
    steps: int = 4,
    optimizer: str = "adamw",
    detail: str | None = None,
) -> Report:
    """The report that ``pl.run(model, plan)`` would return on ``cluster``, on the predicted clock.

    model, plan  what to train and how to split it (default: one device)
    cluster      the machine; default this one, measured once and cached: ``Cluster.local`` of the
                 device that ``pl.run`` would take for the plan, GPUs where there are enough
    steps        steps to write down; all alike, a prediction has no warm-up
    optimizer    "adamw" or "sgd"
    detail       "calls": every call of every rank. "actions": one rank per pipeline stage, one box
                 per action, calls summed up (outline.py). None: calls while they are few. It is in
                 ``meta["detail"]``

    Bytes are exact; memory is that of one step, as in a run. Both are of a run without clip_norm,
    whose few bytes and messages of phase "control" `pl.dry_run` has. Times are as good as the
    cluster's numbers, for ranks that share no core and no device. They leave out reading the data,
    Python between instructions and page faults; and calls of several groups in flight at once,
    which share a port, and what NCCL's kernels take from the compute that hides them (Li+ 2020,
    arXiv:2006.15704, measure it), without which overlap looks better than it is. There are no
    losses. Raises ValueError on a plan that cannot train the model.
    """
    plan = instance("plan", Plan() if plan is None else plan, Plan, "a pl.Plan(...)")
    plan.validate(model)
    if cluster is None:
        cluster = Cluster.local(device=device_of_run(plan.world_size))
    check_cluster(plan, cluster)
    model = model.resolved(gpus=cluster.gpus)
    steps = whole("steps", steps, at_least=1)
    rows = plan.dp * plan.tp * rows_of_a_pipeline(model, plan)
    if detail is None:
        detail = "calls" if rows * (steps + 1) <= MANY else "actions"
    choice("detail", detail, DETAILS, "None")
    rows = rows if detail == "calls" else _actions(plan)
    if steps > (most := max(1, MOST // rows)):
        why = f"with about {rows:,} rows per step, the report would be too large"
        raise illegal("steps", steps, why, f"up to {most}")
    meta: dict[str, Any] = {"optimizer": optimizer, "steps": steps, "detail": detail}
    if detail == "actions":
        from paralab.interpret.outline import outline

        tables, meta["in flight"] = outline(model, plan, cluster, optimizer=optimizer, steps=steps)
    else:
        program = compiled(model, plan, optimizer=optimizer)
        tables = in_full(program, time(program, cluster), cluster, steps)
    return Report(
        clock="predicted",
        model=model,
        plan=plan,
        cluster=cluster,
        meta={**meta, "nodes": [cluster.node_of(rank) for rank in range(plan.world_size)]},
        **tables,
    )


def _actions(plan: Plan) -> int:
    """Rows of a step in outline: the actions of all pipeline ranks, their messages and waits."""
    return 2 * plan.microbatches * plan.stages * 3


def rows_of_a_pipeline(model: ModelSpec, plan: Plan) -> int:
    """Roughly how many rows one pipeline's ranks have per step in full, without compiling."""
    per_block = 1 + 12 * (plan.tp > 1) + 3 * (plan.zero_stage > 1) + 3 * (plan.tiers is not None)
    blocks = 2 * plan.microbatches * model.layers * (per_block if per_block > 1 else 0)
    return _actions(plan) + blocks


def check_cluster(plan: Plan, cluster: Cluster) -> None:
    """Raise ``ValueError`` if the cluster has too few devices for the plan, or does not state how
    fast the links are that the plan uses.
    """
    instance("cluster", cluster, Cluster, "a pl.Cluster(...), as pl.Cluster.local() measures one")
    if plan.world_size > cluster.num_devices:
        largest = max(("dp", "tp", "pp"), key=lambda name: getattr(plan, name))
        why = f"the plan needs {plan.world_size} devices, "
        why += f"and cluster {cluster.name!r} has {cluster.num_devices}"
        legal = "fewer ranks, or a cluster with more nodes"
        raise illegal(largest, getattr(plan, largest), why, legal)
    if plan.tiers is None:
        return
    needed = ["host", "host_bandwidth"] + ["disk"] * plan.tiers.uses("nvme")
    if missing := [name for name in needed if getattr(cluster, name) is None]:
        why = f"the plan offloads, and cluster {cluster.name!r} does not state {missing[0]}"
        legal = ", ".join(f"{name}={STATED[name]}" for name in missing)
        raise illegal(missing[0], None, why, f"cluster.replace({legal})")


def in_full(program: Program, times: Times, cluster: Cluster, steps: int) -> Tables:
    """The rows that every rank's recorder would have written; all steps are like the first."""
    plan, calls, rows = program.plan, Calls(program), Rows(program.plan.world_size)
    held = [samples(program, times, pp, gloo=not cluster.gpus) for pp in range(plan.pp)]
    known: dict[tuple, list[Box]] = {}  # shared by ranks that do the same at the same moments
    for rank in range(plan.world_size):
        member = Member(program, rank, cluster.node_of)
        pp = member.at.pp
        alike = pp, *calls.own(pp, member.index), member.at.tp if plan.tp_mode != "1d" else 0
        if alike not in known:
            known[alike] = boxes(times, member, calls)
        for step in range(steps):
            start = step * times.seconds
            sampled = held[pp] * (step == 0)  # a run records memory in its first step only
            rows.add(member, known[alike], sampled, step, start, start + times.ends[pp])
    return rows.tables()


def samples(program: Program, times: Times, pp: int, *, gloo: bool = True) -> Samples:
    """(seconds from the start of the step, bytes by kind) at the end of each instruction and at the
    highest peak; of several at one moment the largest.
    """
    (_, _, before), *weighed = moments(program, pp, gloo=gloo)
    taken, peaks = [(0.0, before)], [peak for peak, *_ in weighed]
    highest, (entered, left) = peaks.index(max(peaks)), times.of_program(pp)
    for position, (_, top, behind) in enumerate(weighed):
        if position == highest:
            taken.append(((entered[position] + left[position]) / 2, top))
        taken.append((left[position], behind))
    by_moment = groupby(taken, key=itemgetter(0))
    return [max(same, key=lambda sample: sum(sample[1].values())) for _, same in by_moment]


class Rows:
    """The rows of every table, as the recorders of ``world`` ranks would have written them."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.rows: dict[str, list[tuple]] = {name: [] for name in COLUMNS}
        self.calls: dict[tuple, Iterator[int]] = defaultdict(count)  # by rank, axis and group

    def add(
        self, member: Member, mine: list[Box], held: Samples, step: int, start: float, end: float
    ) -> None:
        """A rank's step from ``start`` to ``end``: its boxes, and samples of its memory."""
        rank, world = member.rank, self.world
        first = step * len(mine) * world + rank  # id of the step's first box
        spans, collectives, copies, memory, steps, _ = self.rows.values()
        for number, box in enumerate(mine):
            name, when = first + number * world, (start + box.start, start + box.end)
            kind, microbatch, stage, chunk = box.span
            after = tuple([first + at * world for at in box.after if step or at >= 0])
            action = box.lane, kind, stage, chunk, microbatch
            spans.append((name, rank, step, *action, *when, box.cost, after))
            if box.call is not None:
                row = member.row(box.call)
                number = next(self.calls[rank, row.axis, row.ranks])
                collectives.append((number, rank, step, *row, *when, name))
            elif box.moved is not None:
                copies.append((rank, step, box.lane, *box.moved, *when, name))
        memory += [
            (rank, step, start + moment, *kind, size)
            for moment, sizes in held
            for kind, size in sizes.items()
        ]
        steps.append((rank, step, start, end, 0.0))

    def tables(self) -> Tables:
        return by_column(self.rows)
