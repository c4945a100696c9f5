"""What a run would measure, from model, plan and machine: the same report, no process started.

The program is compiled once and read three times: when everything happens (time.py), what is alive
meanwhile (memory.py), what every call sends (traffic.py). boxes.py writes that down as the recorder
of a run does. No paradigm has a formula here: what it takes follows from its list of instructions.
"""

from __future__ import annotations

from collections import Counter
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
MANY = 40_000  # rows of a report, at about 40 microseconds each
MOST = 2_000_000  # rows: beyond, a report takes minutes and gigabytes
STATED = {  # how a cluster says what a plan that offloads needs to know
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

    Bytes are exact; memory is that of one step, as in a run. Times are as good as the cluster's
    numbers, for ranks that share no core and no device. They leave out reading the data, Python
    between instructions and page faults; and calls of several groups in flight at once, which share
    a port, and what NCCL's kernels take from the compute that hides them (Li+ 2020,
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
    choice("detail", detail, DETAILS)
    check_steps(steps, rows if detail == "calls" else _actions(plan))
    said: dict[str, Any] = {"optimizer": optimizer, "steps": steps, "detail": detail}
    if detail == "actions":
        from paralab.interpret.outline import outline

        tables, said["in flight"] = outline(model, plan, cluster, optimizer=optimizer, steps=steps)
    else:
        program = compiled(model, plan, optimizer=optimizer)
        tables = in_full(program, time(program, cluster), cluster, steps)
    return Report(
        clock="predicted",
        model=model,
        plan=plan,
        cluster=cluster,
        meta={**said, "nodes": [cluster.node_of(rank) for rank in range(plan.world_size)]},
        **tables,
    )


def check_steps(steps: int, rows: int) -> None:
    """Refuse more steps, of ``rows`` each and all alike, than a report can hold."""
    most = max(1, MOST // rows)
    if steps > most:
        why = f"of about {rows} rows each, which are alike"
        raise illegal("steps", steps, why, f"up to {most}")


def _actions(plan: Plan) -> int:
    """Of a step of all pipeline ranks, each with what it sends and waits for."""
    return 2 * plan.microbatches * plan.stages * 3


def rows_of_a_pipeline(model: ModelSpec, plan: Plan) -> int:
    """Roughly how many rows a step in full has, of one pipeline's ranks; known before anything is
    compiled.
    """
    per_block = 1 + 12 * (plan.tp > 1) + 3 * (plan.zero_stage > 1) + 3 * (plan.tiers is not None)
    blocks = 2 * plan.microbatches * model.layers * (per_block if per_block > 1 else 0)
    return _actions(plan) + blocks


def check_cluster(plan: Plan, cluster: Cluster) -> None:
    """Raise ``ValueError`` if the cluster lacks devices for the plan, or does not say how fast the
    links are that it uses.
    """
    instance("cluster", cluster, Cluster, "a pl.Cluster(...), as pl.Cluster.local() measures one")
    if plan.world_size > cluster.num_devices:
        largest = max(("dp", "tp", "pp"), key=lambda name: getattr(plan, name))
        why = f"the plan needs {plan.world_size} devices, "
        why += f"{cluster.name!r} has {cluster.num_devices}"
        legal = "fewer ranks, or a cluster with more nodes"
        raise illegal(largest, getattr(plan, largest), why, legal)
    if plan.tiers is None:
        return
    asked = ["host", "host_bandwidth"] + ["disk"] * plan.tiers.uses("nvme")
    if missing := [name for name in asked if getattr(cluster, name) is None]:
        why = f"the plan offloads, and {cluster.name!r} does not state it"
        legal = ", ".join(f"{name}={STATED[name]}" for name in missing)
        raise illegal(missing[0], None, why, f"cluster.replace({legal})")


def in_full(program: Program, times: Times, cluster: Cluster, steps: int) -> Tables:
    """The rows that every rank's recorder would have written, every step like the first."""
    plan, calls, rows = program.plan, Calls(program), Rows(program.plan.world_size)
    held = [samples(program, times, pp, gloo=not cluster.gpus) for pp in range(plan.pp)]
    known: dict[tuple, list[Box]] = {}  # of ranks that do the same at the same moments
    for rank in range(plan.world_size):
        member = Member(program, rank, cluster.node_of)
        pp = member.at.pp
        alike = pp, member.index, member.at.tp if plan.tp_mode != "1d" else 0
        if alike not in known:
            known[alike] = boxes(times, member, calls)
        for step in range(steps):  # memory as in a run, which looks in its first step
            start = step * times.seconds
            here = held[pp] * (step == 0)
            rows.add(member, known[alike], here, step, start, start + times.ends[pp])
    return rows.tables()


def samples(program: Program, times: Times, pp: int, *, gloo: bool = True) -> Samples:
    """(seconds from the start of the step, bytes) where an instruction ends, and at the highest
    peak; of several at once the largest.
    """
    (_, _, before), *found = moments(program, pp, gloo=gloo)
    made = [(0.0, before)]

    def add(moment: float, here: dict[Kind, int]) -> None:
        if moment > made[-1][0]:
            made.append((moment, here))
        elif sum(here.values()) > sum(made[-1][1].values()):
            made[-1] = (moment, here)

    peaks = [peak for peak, *_ in found]
    where, (entered, left) = peaks.index(max(peaks)), times.of_program(pp)
    for position, (_, top, here) in enumerate(found):
        moment = left[position]
        if position == where:
            add((entered[position] + moment) / 2, top)
        add(moment, here)
    return made


class Rows:
    """The rows of every table, as the recorders of ``world`` ranks would have written them."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.rows: dict[str, list[tuple]] = {name: [] for name in COLUMNS}
        self.calls: Counter[tuple[int, str]] = Counter()  # so far, of each rank and phase

    def add(
        self, member: Member, mine: list[Box], held: Samples, step: int, start: float, end: float
    ) -> None:
        """A rank's step from ``start`` to ``end``: its boxes, and what it holds at which moment."""
        rank, world = member.rank, self.world
        first = step * len(mine) * world + rank  # id of the first box
        spans, collectives, copies, memory, steps, _ = self.rows.values()
        for number, box in enumerate(mine):
            name, when = first + number * world, (start + box.start, start + box.end)
            kind, microbatch, stage, chunk = box.span
            after = tuple([first + at * world for at in box.after if step or at >= 0])
            what = box.lane, kind, stage, chunk, microbatch
            spans.append((name, rank, step, *what, *when, box.cost, after))
            if box.call is not None:
                call = rank, box.call.phase
                row = member.row(box.call)
                collectives.append((self.calls[call], rank, step, *row, *when, name))
                self.calls[call] += 1
            elif box.moved is not None:
                copies.append((rank, step, box.lane, *box.moved, *when, name))
        memory += [
            (rank, step, start + now, *kind, size)
            for now, here in held
            for kind, size in here.items()
        ]
        steps.append((rank, step, start, end, 0.0))

    def tables(self) -> Tables:
        return by_column(self.rows)
