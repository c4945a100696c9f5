"""What a run would measure, from model, plan and machine: the same report, no process started.

A rank's step is written down as the list of what it does (theory/predict_step.py), each entry with
its seconds from the device model (theory/formulas.py) or its bytes from the ring formulas
(theory/traffic.py); the event engine (theory/engine.py) says when everything happens.

    naive       step = compute + sum over parameters of (alpha + 2(N-1)/N bytes / bandwidth)
    bucketed    the same bytes, alpha paid once per bucket
    overlapped  only what the rest of backward does not cover is waited for
    a pipeline  its schedule, with every message between stages alpha + bytes / bandwidth under way
    ZeRO        its gathers and reduce-scatters where a run has them (predict_zero.py), and what
                computing does not cover of them

Left out, and part of the gap to a measured step: reading the data, Python between spans, page
faults, the cores that ranks share. Li+ 2020 (arXiv:2006.15704) measure what is modelled here.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from paralab.checks import choice, illegal, whole
from paralab.records.tables import COLUMNS
from paralab.spec import GRAD_SYNC_FORMS, Cluster, ModelSpec, Plan
from paralab.theory import memory
from paralab.theory.engine import Collective, Times, Wait, link_cost, simulate
from paralab.theory.offload import tier_bytes
from paralab.theory.uncollected import uncollected

if TYPE_CHECKING:
    from paralab.report import Report
    from paralab.theory.predict_rows import Row

DETAILS = ("calls", "actions")
MANY = 40_000  # rows of a report, at about 40 microseconds each


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
    cluster      the machine; default ``Cluster.local()``, this one, measured once and cached
    steps        steps to write down; all alike, a prediction has no warm-up
    optimizer    "adamw" or "sgd"
    detail       "calls": every call of every rank. "actions": one rank per pipeline stage, one box
                 per action, calls summed up; quick at any scale (theory/outline.py). None: calls
                 while they are few. It is in ``meta["detail"]``

    Bytes are exact. Times are as good as the cluster's numbers: against replayed runs on the
    calibrated machine the step time of 51 plans was off by 6 to 8 % at the median and 33 % at the
    worst (tests/benchmarks/FIGURES.md). The memory table has the formulas' two possible peaks of
    every step. There are no losses. Raises ValueError on a plan that cannot train the model.
    """
    # Not at the top: schedules are handled as arrays, and `import paralab` does without NumPy.
    from paralab.parallel.lowering import lower
    from paralab.report import Report
    from paralab.theory.predict_offload import check_links
    from paralab.theory.predict_step import step_rows

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
        largest = max(("dp", "tp", "pp"), key=lambda name: getattr(plan, name))
        raise illegal(
            largest,
            getattr(plan, largest),
            f"the plan needs {plan.world_size} devices, {cluster.name!r} has {cluster.num_devices}",
            "fewer ranks, or a cluster with more nodes",
        )
    choice("optimizer", optimizer, memory.OPTIMIZERS)
    check_links(plan, cluster)
    if detail is None:
        detail = "calls" if _rows(model, plan) * (steps + 1) <= MANY else "actions"
    choice("detail", detail, DETAILS)
    said: dict[str, Any] = {"optimizer": optimizer, "steps": steps, "detail": detail}
    if detail == "actions":
        from paralab.theory.outline import outline

        tables, said["in flight"] = outline(model, plan, cluster, optimizer=optimizer, steps=steps)
    else:
        lists = lower(plan.actions())
        ranks = [
            step_rows(model, plan, cluster, rank=r, optimizer=optimizer,
                      steps=lists[plan.place(r)[0]])
            for r in range(plan.world_size)
        ]  # fmt: skip
        times = simulate([[row.item for row in rank] for rank in ranks], link_cost(cluster))
        tables = _tables(model, plan, ranks, times, optimizer=optimizer, steps=steps)
    return Report(
        clock="predicted",
        model=model,
        plan=plan,
        cluster=cluster,
        meta={**said, "nodes": [cluster.node_of(r) for r in range(plan.world_size)]},
        **tables,
    )


def _rows(model: ModelSpec, plan: Plan) -> int:
    """Roughly how many rows a step in full has."""
    per_block = 1 + 12 * (plan.tp > 1) + 3 * (plan.zero_stage > 1) + 3 * (plan.tiers is not None)
    actions = 2 * plan.microbatches * plan.stages * 3  # each with what it sends and waits for
    blocks = 2 * plan.microbatches * model.layers * (per_block if per_block > 1 else 0)
    return plan.dp * plan.tp * (actions + blocks)


def _tables(
    model: ModelSpec, plan: Plan, ranks: list[list[Row]], times: Times, *, optimizer: str,
    steps: int,
) -> dict[str, dict[str, list[Any]]]:  # fmt: skip
    """The rows that a recorder would have written, every step like the first."""
    world = len(ranks)
    duration = max((end[-1] for end in times.end), default=0.0)
    made = {name: {column: [] for column in columns} for name, columns in COLUMNS.items()}

    def add(table: str, **values: Any) -> None:
        for column, value in values.items():
            made[table][column].append(value)

    for rank, rows in enumerate(ranks):
        peaks = memory.moments(model, plan, optimizer=optimizer, rank=rank)
        beyond = tier_bytes(model, plan, optimizer=optimizer, rank=rank)
        fullest = memory.fullest(model, plan, rank)[0]
        of_group = Counter(row.phase for row in rows if row.kind == "comm")
        for step in range(steps):
            offset, first = step * duration, step * len(rows)
            call = {phase: step * count for phase, count in of_group.items()}
            when: dict[str, float] = {}
            for position, row in enumerate(rows):
                item = row.item
                start = offset + times.start[rank][position]
                end = offset + times.end[rank][position]
                identity = (first + position) * world + rank
                add(
                    "spans",
                    id=identity,
                    rank=rank,
                    step=step,
                    lane=row.lane,
                    kind=row.kind,
                    stage=row.stage,
                    chunk=row.stage // plan.pp,
                    microbatch=row.microbatch,
                    start=start,
                    end=end,
                    cost=0.0 if isinstance(item, (Collective, Wait)) else item.seconds,
                    after=tuple((first + p) * world + rank for p in row.after),
                )
                if isinstance(item, Collective):
                    add(
                        "collectives",
                        call=call[row.phase],
                        rank=rank,
                        step=step,
                        op=item.op,
                        axis=row.axis,
                        ranks=row.ranks,
                        peer=row.peer,
                        level=item.level,
                        phase=row.phase,
                        payload_bytes=row.payload,
                        wire_bytes=item.wire_bytes,
                        start=start,
                        end=end,
                        span=identity,
                    )
                    call[row.phase] += 1
                if row.op:
                    add(
                        "copies",
                        rank=rank,
                        step=step,
                        lane=row.lane,
                        op=row.op,
                        category=row.category,
                        bytes=row.payload,
                        start=start,
                        end=end,
                        span=identity,
                    )
                if row.kind == "backward" or (row.kind, row.stage, row.microbatch) == (
                    "forward", fullest.stage, fullest.microbatch
                ):  # fmt: skip
                    when[row.kind] = end
            for moment, categories in peaks.items():
                for tier, held in {"device": categories, **beyond}.items():
                    for category, size in held.items():
                        add(
                            "memory",
                            rank=rank,
                            step=step,
                            time=when[moment],
                            tier=tier,
                            category=category,
                            bytes=size,
                        )
            end = offset + times.end[rank][-1]
            add("steps", rank=rank, step=step, start=offset, end=end, beside=0.0)
    return made
