"""What a run would measure, from model, plan and machine: the same report, no process started.

A rank's step is written down as the list of what it does (`step_actions`), each with its seconds
from the device model (theory/formulas.py) or its bytes from the ring formulas (theory/traffic.py);
the event engine (theory/engine.py) says when everything happens. So data parallelism's three forms
differ here in the same place as in parallel/data_parallel.py: when the all-reduces are launched,
and who waits.

    naive       step = compute + sum over parameters of (alpha + 2(N-1)/N bytes / bandwidth)
    bucketed    the same bytes, alpha paid once per bucket
    overlapped  only what the rest of backward does not cover is waited for

Left out, and part of the gap to a measured step: reading the data, Python between spans, page
faults, the cores that ranks share. Li+ 2020 (arXiv:2006.15704) measure what is modelled here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from paralab.checks import illegal, whole
from paralab.records.tables import COLUMNS
from paralab.spec import GRAD_SYNC_FORMS, Cluster, ModelSpec, Plan
from paralab.theory import memory
from paralab.theory.engine import Collective, Compute, Item, Times, Wait, link_cost, simulate
from paralab.theory.formulas import (
    ITEM,
    Work,
    backward_parts,
    bucket_copy_work,
    forward_parts,
    optimizer_work,
    total,
)
from paralab.theory.traffic import wire_bytes

if TYPE_CHECKING:
    from paralab.report import Report


class Action(NamedTuple):
    """One row of a rank's step: an engine item, and what the tables say about it."""

    item: Item
    kind: str
    microbatch: int = -1
    after: tuple[int, ...] = ()  # positions in the same list
    payload: int = 0  # of a collective, bytes
    phase: str = ""


def predict(
    model: ModelSpec,
    plan: Plan | None = None,
    cluster: Cluster | None = None,
    *,
    steps: int = 4,
    optimizer: str = "adamw",
) -> Report:
    """The report that ``pl.run(model, plan)`` would return on ``cluster``, on the predicted clock.

    model, plan  what to train and how to split it (default: one device)
    cluster      the machine; default ``Cluster.local()``, this one, measured once and cached
    steps        steps to write down; all alike, a prediction has no warm-up
    optimizer    "adamw" or "sgd"

    Bytes are exact. Times are as good as the cluster's numbers: against replayed runs on the
    calibrated machine the step time of 24 small plans was off by 6 % at the median and 26 % at the
    worst (steps of 6 ms, all overhead). The memory table has the formulas' two possible peaks of
    every step. There are no losses. Raises ValueError on anything that a run would refuse.
    """
    from paralab.report import Report

    plan = Plan() if plan is None else plan
    if not isinstance(plan, Plan):
        raise illegal("plan", plan, "not a plan", "a pl.Plan(...)")
    plan.validate(model)
    if callable(plan.grad_sync):
        raise illegal(
            "grad_sync",
            plan.grad_sync,
            "theory cannot know when a class of your own sends; run it, and "
            "pl.run(...).replay(cluster) says what it takes on other links",
            " | ".join(map(repr, GRAD_SYNC_FORMS)),
        )
    cluster = Cluster.local() if cluster is None else cluster
    if not isinstance(cluster, Cluster):
        raise illegal("cluster", cluster, "not a cluster", "a pl.Cluster(...) or None")
    steps = whole("steps", steps, at_least=1)
    if plan.world_size > cluster.num_devices:
        raise illegal(
            "dp",
            plan.dp,
            f"the plan needs {plan.world_size} devices, {cluster.name!r} has {cluster.num_devices}",
            "fewer ranks, or a cluster with more nodes",
        )
    peaks = memory.moments(model, plan, optimizer=optimizer)
    ranks = [
        step_actions(model, plan, cluster, rank=r, optimizer=optimizer) for r in range(plan.dp)
    ]
    times = simulate([[action.item for action in rank] for rank in ranks], link_cost(cluster))
    return Report(
        clock="predicted",
        model=model,
        plan=plan,
        cluster=cluster,
        meta={
            "optimizer": optimizer,
            "steps": steps,
            "nodes": [cluster.node_of(r) for r in range(plan.world_size)],
        },
        **_tables(ranks, times, peaks, steps=steps),
    )


def step_actions(
    model: ModelSpec, plan: Plan, cluster: Cluster, *, rank: int, optimizer: str
) -> list[Action]:
    """What ``rank`` does in one step, in launch order: the counterpart of train.py's loop."""
    actions: list[Action] = []
    group = _DataParallel(model, plan, cluster, rank, actions)
    batch = plan.microbatch_size
    forward = total(forward_parts(model, batch).values()).seconds(cluster)
    for k in range(plan.microbatches):
        actions.append(Action(Compute(forward), "forward", k))
        last = k == plan.microbatches - 1
        work = Work()

        def cut(work: Work, k: int = k) -> Work:
            """End a part of this backward, as the recorder does at every launch and copy."""
            actions.append(Action(Compute(work.seconds(cluster)), "backward", k))
            return Work()

        for part, names in backward_parts(model, batch, accumulate=k > 0):
            work += part
            for copying in group.completes(names) if last else ():
                work = cut(work)
                actions.append(Action(Compute(copying.seconds(cluster)), "copy"))
                while group.may_launch():
                    work = cut(work)
                    group.launch_next()
        cut(work)
    group.finish()
    work = optimizer_work(model, optimizer=optimizer)
    actions.append(Action(Compute(work.seconds(cluster)), "optimizer"))
    return actions


class _DataParallel:
    """The launches and waits of one form of gradient sync; see parallel/data_parallel.py."""

    def __init__(
        self, model: ModelSpec, plan: Plan, cluster: Cluster, rank: int, actions: list[Action]
    ) -> None:
        self.plan, self.rank, self.actions = plan, rank, actions
        self.ranks = tuple(range(plan.dp))
        self.level = "inter" if len({cluster.node_of(r) for r in self.ranks}) > 1 else "intra"
        self.sizes = memory.parameter_sizes(model)
        self.buckets = memory.gradient_buckets(model, plan)
        names = list(self.sizes)
        self.missing = [{names[i] for i in params} for params, _ in self.buckets]
        self.next = 0  # the bucket that leaves next
        self.calls = 0
        self.pending: list[int] = []  # positions of launches not yet waited for

    def completes(self, names: tuple[str, ...]) -> list[Work]:
        """Take note of complete gradients; the work of packing each bucket that is now complete."""
        copies = []
        for number, missing in enumerate(self.missing):
            if missing and missing <= missing.intersection(names):
                params, size = self.buckets[number]
                copies.append(bucket_copy_work(size // ITEM, len(params)))
            missing.difference_update(names)
        return copies

    def may_launch(self) -> bool:
        """Whether the bucket whose turn it is may leave; they leave in order."""
        overlapped = self.plan.grad_sync == "overlapped"
        return overlapped and self.next < len(self.buckets) and not self.missing[self.next]

    def launch_next(self) -> None:
        self._launch(self.buckets[self.next][1])
        self.next += 1

    def _launch(self, payload: int) -> None:
        wire = wire_bytes("all_reduce", payload, self.plan.dp, self.rank)
        item = Collective(("dp", self.calls), "comm:dp", self.ranks, "all_reduce", wire, self.level)
        before = self._last_on_compute()
        self.pending.append(len(self.actions))
        self.actions.append(Action(item, "comm", -1, before, payload, "grad_sync"))
        self.calls += 1

    def _last_on_compute(self) -> tuple[int, ...]:
        for position in reversed(range(len(self.actions))):
            if self.actions[position].kind != "comm":
                return (position,)
        return ()

    def _wait(self, position: int) -> None:
        self.actions.append(Action(Wait((position,)), "wait", -1, (position,)))

    def finish(self) -> None:
        """After backward: wait for what is under way, or send what has not left."""
        if self.plan.dp == 1:
            return
        if self.plan.grad_sync == "overlapped":
            for position in self.pending:
                self._wait(position)
            return
        payloads = [size for _, size in self.buckets]
        if self.plan.grad_sync == "naive":
            payloads = [ITEM * count for count in self.sizes.values()]
        for payload in payloads:
            self._launch(payload)
            self._wait(self.pending[-1])


def _tables(
    ranks: list[list[Action]], times: Times, peaks: dict[str, dict[str, int]], *, steps: int
) -> dict[str, dict[str, list[Any]]]:
    """The rows that a recorder would have written, every step like the first."""
    world = len(ranks)
    duration = max((end[-1] for end in times.end), default=0.0)
    made = {name: {column: [] for column in columns} for name, columns in COLUMNS.items()}

    def add(table: str, **values: Any) -> None:
        for column, value in values.items():
            made[table][column].append(value)

    for rank, actions in enumerate(ranks):
        launches = sum(action.kind == "comm" for action in actions)
        for step in range(steps):
            offset, call = step * duration, step * launches
            first = step * len(actions)
            ends: dict[str, float] = {}
            for position, action in enumerate(actions):
                item, kind = action.item, action.kind
                start = offset + times.start[rank][position]
                end = offset + times.end[rank][position]
                identity = (first + position) * world + rank
                lane = getattr(item, "lane", "compute")
                add(
                    "spans",
                    id=identity,
                    rank=rank,
                    step=step,
                    lane=lane,
                    kind=kind,
                    stage=0,
                    chunk=0,
                    microbatch=action.microbatch,
                    start=start,
                    end=end,
                    cost=item.seconds if isinstance(item, Compute) else 0.0,
                    after=tuple((first + p) * world + rank for p in action.after),
                )
                if isinstance(item, Collective):
                    add(
                        "collectives",
                        call=call,
                        rank=rank,
                        step=step,
                        op=item.op,
                        axis=lane.removeprefix("comm:"),
                        ranks=item.ranks,
                        peer=-1,
                        level=item.level,
                        phase=action.phase,
                        payload_bytes=action.payload,
                        wire_bytes=item.wire_bytes,
                        start=start,
                        end=end,
                        span=identity,
                    )
                    call += 1
                ends[kind] = end
            for moment, categories in peaks.items():
                for category, size in categories.items():
                    add(
                        "memory",
                        rank=rank,
                        step=step,
                        time=ends[moment],
                        tier="device",
                        category=category,
                        bytes=size,
                    )
            end = offset + times.end[rank][-1]
            add("steps", rank=rank, step=step, start=offset, end=end, beside=0.0)
    return made
