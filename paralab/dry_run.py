"""`pl.dry_run`: what one rank of a plan of any size holds and sends, without running it.

The program of the rank's pipeline rank is compiled and read: how many parameters the rank holds,
what fills its memory, what it sends to which ranks, what it copies. None of these facts needs a
clock, and they are read from the list of instructions that `pl.run` executes, so they are exact. A
model of 10^12 parameters on 3072 devices takes a second or two. `pl.predict` has all ranks' times.
"""

from __future__ import annotations

from math import prod

from paralab.checks import instance, real, whole
from paralab.interpret.dry import numbered
from paralab.programs.compile import compiled
from paralab.report.report import Report
from paralab.report.tables import DRY
from paralab.spec import Cluster, ModelSpec, Plan
from paralab.spec.cluster import check_devices
from paralab.theory.uncollected import uncollected


@uncollected()
def dry_run(
    model: ModelSpec,
    plan: Plan | None = None,
    *,
    rank: int = 0,
    optimizer: str = "adamw",
    clip_norm: float | None = None,
    cluster: Cluster | None = None,
) -> Report:
    """What ``rank`` would hold, send and copy in a step of ``model`` under ``plan``: bytes alone.

    model, plan  what to train and how to split it (default: one device), over any number of ranks
    rank         which of the plan's ranks to look at
    optimizer    "adamw" or "sgd"
    clip_norm    clip the gradients' global norm to this, which takes further messages
    cluster      says which ranks share a node (the level of a message), whether its devices are
                 GPUs, and how much memory one has (for the chart); default: one node of processors

    Returns a `Report` on the clock "dry run" with the rows of that rank in the tables collectives,
    memory, copies, steps and spans. In place of times they have the events' numbers
    in order. ``meta`` has the "rank" and its "num_params". Bytes are, row by row, those of a run on
    the cluster's kind of device; a message counts as sent the moment it leaves. Memory on a 2D or
    2.5D grid is that of the rank that holds most; others hold up to a few per cent less. Raises
    ValueError on anything that no run could do.
    """
    plan = instance("plan", Plan() if plan is None else plan, Plan, "a pl.Plan(...)")
    plan.validate(model)
    check_devices(cluster, plan.world_size)
    gpus = cluster is not None and cluster.gpus
    model = model.resolved(gpus=gpus)
    rank = whole("rank", rank, at_least=0, at_most=plan.world_size - 1)
    clip_norm = None if clip_norm is None else real("clip_norm", clip_norm, above=0.0)
    pp, node_of = plan.place(rank).pp, cluster.node_of if cluster else lambda rank: 0
    program = compiled(model, plan, optimizer=optimizer, clips=clip_norm is not None, only=pp)
    shapes = program.model.shapes
    return Report(
        clock=DRY,
        model=model,
        plan=plan,
        cluster=cluster,
        meta={
            "rank": rank,
            "optimizer": optimizer,
            "clip_norm": clip_norm,
            "num_params": sum(prod(shapes[name]) for u in program.units[pp] for name in u.names),
            "nodes": list(map(node_of, range(plan.world_size))),
        },
        **numbered(program, rank, node_of, gloo=not gpus),
    )
