"""Runs of plans on virtual GPUs (virtual_cuda.py), with durations that the test states."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import paralab as pl
import virtual_cuda
from paralab.instruments import measure
from paralab.interpret.run import Rank
from paralab.interpret.train import Trainer
from paralab.launch import launch_program
from paralab.programs.instructions import BACKWARD, FORWARD, Instr
from patience import HANG_S
from together import remembered
from virtual_cuda import Node, solve

COMPUTE = ("FORWARD", "BACKWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT", "RECOMPUTE")


class Lasts(NamedTuple):
    """Seconds that things take: of a stage's (``per_part``: of each instruction's) forward, of
    both halves of its backward, and of a call of NCCL.
    """

    forward: float = 0.0
    half: float = 0.0
    message: float = 0.0
    collective: float = 0.0
    per_part: bool = False

    def compute(self, op: str, share: float) -> float:
        seconds = {FORWARD: self.forward, BACKWARD: 2 * self.half}.get(op, self.half)
        return seconds * (1.0 if self.per_part else share)

    def call(self, op: str, size: int) -> float:
        return self.message if op == "message" else self.collective


AT_ONCE = Lasts()


def share(program: Any, ins: Instr) -> float:
    """Of a rank's part of the model that an instruction computes."""
    i, j = next((a, b) for a, b in program.stages if a <= ins.at[0] < b)
    return (ins.at[1] - ins.at[0]) / (j - i) / program.plan.virtual_stages


def on_virtual(context: Any, *how: Any, **stated: Any) -> tuple[virtual_cuda.Machine, Any]:
    """A virtual GPU of this rank's own, and the context of a rank that has taken it."""
    machine = virtual_cuda.install(context.rank, *how, **stated)
    device = virtual_cuda.name_of(context.rank)
    return machine, dataclasses.replace(context, device=device, backend="nccl")


class Job(NamedTuple):
    """A training on virtual GPUs. change(machine): break something first, for good."""

    model: pl.ModelSpec
    plan: pl.Plan
    lasts: Lasts = AT_ONCE
    steps: int = 1
    change: Callable | None = None
    settings: dict[str, Any] = {}


def of_a_rank(context: Any, jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """Each training on a virtual GPU of its own, one after the other."""
    groups, found = remembered(dist.new_group), []
    for job in jobs:
        dist.new_group = groups()
        machine, own = on_virtual(context, job.lasts.call)
        found.append(trained(machine, own, job))
        machine.remove()
    return found


def trained(machine: virtual_cuda.Machine, context: Any, job: Job) -> dict[str, Any]:
    lasts = job.lasts

    def timed(op: str, plain: Callable) -> Callable:
        def method(rank: Rank, ins: Instr, **more: Any) -> None:
            machine.works(lasts.compute(op, share(rank.program, ins)), op)
            plain(rank, ins, **more)

        return method

    for op in COMPUTE:
        machine.put(Rank, **{op: timed(op, getattr(Rank, op))})
    if job.change is not None:
        job.change(machine)
    with tempfile.TemporaryDirectory() as folder:
        settings = {"optimizer": "sgd", "lr": 0.5, "offload_folder": folder, **job.settings}
        trainer = Trainer(context, job.model, job.plan, **settings)
        trainer.grid.world.barrier()  # so that on all ranks the first step begins at one moment
        begins = len(machine.nodes) - 1
        losses = [trainer.step(step) for step in range(job.steps)]
        trainer.rank.settle()
        if trainer.host is not None:
            trainer.host.close()
    tables = trainer.recorder.tables()
    return {"nodes": list(map(tuple, machine.nodes)), "begins": begins, "wrong": machine.wrong,
            "losses": losses, "contexts": machine.contexts, "spans": len(tables["spans"]["id"]),
            "allocator": tables["allocator"],
            "tf32": torch.backends.cuda.matmul.allow_tf32}  # fmt: skip


def measured(
    context: Any, program: Callable, stated: pl.Cluster, wanted: Any
) -> list[dict[str, Any]]:
    """A measurement of the calibration, on a virtual GPU that is as fast as stated."""
    machine, context = on_virtual(context, cluster=stated)
    measure.WORKLOADS["cuda"] = wanted
    rows = program(context)
    assert machine.wrong == []
    return rows


class Found(NamedTuple):
    """step: seconds from the moment when all ranks are ready to the end of the last step."""

    step: float
    bubble: float
    wrong: list[str]
    contexts: list[set[int]]
    losses: list[Any]
    allocators: list[dict[str, list[int]]]
    tf32: list[bool]


def virtual(
    model: Any, plan: pl.Plan, lasts: Lasts = AT_ONCE, *, steps: int = 1,
    change: Callable | None = None, **settings: Any,
) -> Found:  # fmt: skip
    return virtuals([Job(model, plan, lasts, steps, change, settings)])[0]


def virtuals(jobs: Sequence[Job]) -> list[Found]:
    """What is found of several trainings, all on as many ranks."""
    ranks = jobs[0].plan.world_size
    parts = launch_program(of_a_rank, ranks, (jobs,), device="cpu", timeout=HANG_S)
    return [_found(of_job) for of_job in zip(*parts, strict=True)]


def _found(parts: Sequence[dict[str, Any]]) -> Found:
    graphs = [[Node(*node) for node in part["nodes"]] for part in parts]
    ends = solve(graphs).end
    step = max(map(max, ends)) - max(e[part["begins"]] for e, part in zip(ends, parts, strict=True))
    busy = sum(node.seconds for graph in graphs for node in graph if node.label in COMPUTE)
    return Found(
        step,
        1 - busy / len(graphs) / step if step else 0.0,
        [line for part in parts for line in part["wrong"]],
        [part["contexts"] for part in parts],
        [part["losses"] for part in parts],
        [part["allocator"] for part in parts],
        [part["tf32"] for part in parts],
    )
