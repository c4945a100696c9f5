"""`pl.dry_run`: one rank of a plan of any size, run to the end without its memory or its peers.

What `pl.run` would make every rank do, one process here does as rank r of n: the same model, the
same schedule, the same optimizer, every operation and every message. But its tensors have sizes and
no bytes (torch's "meta" device, observe/dry.py), and its messages go nowhere (comm.py): what is
left are the facts that no clock is needed for. How many parameters the rank holds, what fills its
memory at every moment, what it sends to whom: exactly, of a model of 10^12 parameters on 3072
devices, in seconds.

Formulas say the same without executing anything (`pl.predict`); a dry run is how they are checked
where nobody has the machines, and holds for what they do not know: a class or a schedule of your
own. It has no times: what happens is numbered. Torch is not imported here.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

from paralab.checks import choice, illegal, real, whole
from paralab.launch import OutOfMemory, RankError, RankTimeout, launch_program
from paralab.records.dry import CLOCK, tables_of
from paralab.report import Report
from paralab.spec import Cluster, ModelSpec, Plan
from paralab.theory.memory import OPTIMIZERS


def dry_run(
    model: ModelSpec, plan: Plan | None = None, *, rank: int = 0, optimizer: str = "adamw",
    steps: int = 1, clip_norm: float | None = None, cluster: Cluster | None = None,
    timeout: float = 120.0, stop: threading.Event | None = None,
) -> Report:  # fmt: skip
    """What ``rank`` would hold, send and copy if ``model`` ran under ``plan``: bytes, no times.

    model, plan  what to train and how to split it (default: one device), over any number of ranks
    rank         which of the plan's ranks to be
    optimizer    "adamw" or "sgd"
    steps        optimizer steps; they are alike, but where an offloaded update is delayed
    clip_norm    clip the gradients' norm, which takes messages of its own
    cluster      says which ranks share a node, for the messages' level, and how much memory a
                 device has, for the picture; default: one node
    timeout      seconds that it may take
    stop         an event: set it from any thread, and the run ends

    Returns a `Report` on the clock "dry run" with the rows of that rank in the tables collectives,
    memory (every step's), copies, steps and spans. Their times number what happens, one after the
    other. ``meta`` has the "rank" and its "num_params". Bytes are those of a run on CPUs, row by
    row; a message counts as sent the moment it leaves. Raises ValueError on anything that no run
    could do, RankTimeout, RankError or Stopped.
    """
    plan = Plan() if plan is None else plan
    if not isinstance(plan, Plan):
        raise illegal("plan", plan, "not a plan", "a pl.Plan(...)")
    plan.validate(model)
    choice("optimizer", optimizer, OPTIMIZERS)
    if cluster is not None and not isinstance(cluster, Cluster):
        raise illegal("cluster", cluster, "not a cluster", "a pl.Cluster(...) or None")
    if cluster is not None and plan.world_size > cluster.num_devices:
        raise illegal("cluster", cluster.name, f"it has {cluster.num_devices} devices, the plan "
                      f"needs {plan.world_size}", "one with more nodes, or None")  # fmt: skip
    settings = {
        "rank": whole("rank", rank, at_least=0, at_most=plan.world_size - 1),
        "optimizer": optimizer,
        "steps": whole("steps", steps, at_least=1),
        "clip_norm": None if clip_norm is None else real("clip_norm", clip_norm, above=0.0),
    }
    node_of = cluster.node_of if cluster is not None else lambda rank: 0
    nodes = tuple(map(node_of, range(plan.world_size)))
    who = f"rank {settings['rank']} of {plan.world_size}, in a dry run,"
    try:
        (part,) = launch_program(
            _program, 1, (model, plan, nodes, settings), timeout=timeout, device="cpu", stop=stop
        )
    except RankTimeout as error:
        raise RankTimeout(f"{who} was not done after {timeout:g} s; ask for a longer timeout",
                          waiting=error.waiting) from None  # fmt: skip
    except (RankError, OutOfMemory) as error:  # the one process is rank 0 to its launcher
        error.args = (str(error).replace("rank 0", who, 1),)
        error.rank = settings["rank"]
        raise
    meta = {**settings, "num_params": part["num_params"], **part["meta"]}
    return Report(clock=CLOCK, model=model, plan=plan, cluster=cluster, meta=meta,
                  **tables_of(part))  # fmt: skip


def _program(
    context: Any, model: ModelSpec, plan: Plan, nodes: tuple[int, ...], settings: dict[str, Any]
) -> dict[str, Any]:
    """The rank program, in a context where there are n ranks and no device."""
    from paralab.observe.dry import as_on_cpu
    from paralab.train import train

    context = replace(
        context, rank=settings["rank"], world_size=plan.world_size, nodes=nodes, device="meta",
        backend="fake", strict=False, note=lambda text: None, progress=lambda done, total: None,
    )  # fmt: skip
    with as_on_cpu(model.attention):
        return train(context, model, plan, steps=settings["steps"], keep_state=False,
                     optimizer=settings["optimizer"], clip_norm=settings["clip_norm"])  # fmt: skip
