"""Training with the instruments on against what torch has for the same, the same model and text.

    data parallel  DistributedDataParallel, also with ``gradient_as_bucket_view``
    ZeRO           stage 3: fully_shard (FSDP2), every block a unit of its own, as its documentation
                   wraps a GPT; stage 1: DistributedDataParallel with ZeroRedundancyOptimizer;
                   stage 2 the same: torch has no stage 2 apart from FSDP2's
    tensor         parallelize_module (DTensor): qkv and up by columns, proj and down by rows. It
                   keeps embedding and logits whole on every rank, which saves it two messages
    pipeline       torch.distributed.pipelining; its 1F1B is Schedule1F1B

Each side has the sizes of buckets that it comes with.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from pairs import row, slowest_rank, trained_in_turn

import paralab as pl
from paralab.launch import launch_program

MODEL = pl.ModelSpec(layers=8, hidden=256, heads=8, seq_len=128)  # 6.4 M parameters
BUCKET = 25 * 2**20  # the cap that DistributedDataParallel has by default


def step_of(context: Any, plan: pl.Plan, module: Any, optimizers: list[Any]) -> Callable:
    """A function of the step that trains a module of torch's and gives the losses."""
    from paralab.model import reference

    def step(number: int) -> list[float]:
        for optimizer in optimizers:
            optimizer.zero_grad()
        mine = {"rank": context.rank % plan.dp, "ranks": plan.dp}
        (batch,) = reference.batches(
            MODEL, step=number, microbatch_size=plan.microbatch_size, **mine
        )
        loss = module(*batch)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return [loss.item()]

    return step


def replicated(context: Any, plan: pl.Plan, view: bool = False) -> Callable:
    """DistributedDataParallel; with ZeRO, its optimizer's states are sharded."""
    import torch
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    from paralab.model import reference

    module = DistributedDataParallel(reference.GPT(MODEL), gradient_as_bucket_view=view)
    if plan.zero_stage:
        kind = torch.optim.AdamW
        sharded = ZeroRedundancyOptimizer(module.parameters(), kind, lr=1e-3, fused=True)
        return step_of(context, plan, module, [sharded])
    return step_of(context, plan, module, [reference.optimizer(module.parameters())])


def viewed(context: Any, plan: pl.Plan) -> Callable:
    return replicated(context, plan, view=True)


def fully_sharded(context: Any, plan: pl.Plan) -> Callable:
    import torch
    from torch.distributed.fsdp import fully_shard

    from paralab.model import reference

    model = reference.GPT(MODEL)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return step_of(context, plan, model, [torch.optim.AdamW(model.parameters(), lr=1e-3)])


def cut_by_dtensor(context: Any, plan: pl.Plan) -> Callable:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    from paralab.model import reference

    model, mesh = reference.GPT(MODEL), init_device_mesh("cpu", (plan.tp,))
    for block in model.blocks:
        with torch.no_grad():  # a rank's rows of qkv next to each other: its heads' q, k and v
            for p in block.attention.qkv.parameters():
                parts = p.view(3, plan.tp, -1, *p.shape[1:]).transpose(0, 1)
                p.copy_(parts.reshape(p.shape))
        parallelize_module(block, mesh, {
            "attention.qkv": ColwiseParallel(), "attention.proj": RowwiseParallel(),
            "mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel(),
        })  # fmt: skip
    # Fused is for one kind of tensor: blocks are DTensors, the rest is not.
    kinds: dict[str, list[Any]] = {}
    for p in model.parameters():
        kinds.setdefault(type(p.data).__name__, []).append(p)
    optimizers = [torch.optim.AdamW(some, lr=1e-3, fused=True) for some in kinds.values()]
    return step_of(context, plan, model, optimizers)


def piped(context: Any, plan: pl.Plan) -> Callable:
    import torch
    import torch.distributed.pipelining as pp

    from paralab.model import reference
    from paralab.parallel.partition import partition

    model = MODEL.replace(tied=False)

    class Piece(torch.nn.Module):
        """A stage as torch wants it: the last one ends in logits, the loss is a function apart."""

        def __init__(self, parts: tuple[str, ...]) -> None:
            super().__init__()
            gpt = reference.GPT(model)
            modules = (gpt.get_submodule(part) for part in parts if part != "head")
            last = [gpt.head.norm, gpt.head.output] if "head" in parts else []
            self.all = torch.nn.Sequential(*modules, *last)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.all(x)

    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    parts = partition(model, plan.stages, plan.microbatch_size)
    mine = range(context.rank, plan.stages, plan.pp)
    stages = [pp.PipelineStage(Piece(parts[s]), s, plan.stages, torch.device("cpu")) for s in mine]
    form = {"gpipe": pp.ScheduleGPipe, "1f1b": pp.Schedule1F1B,
            "interleaved": pp.ScheduleInterleaved1F1B}[plan.schedule]  # fmt: skip
    what = stages if plan.schedule == "interleaved" else stages[0]
    schedule = form(what, plan.microbatches, loss_fn=loss)
    optimizer = reference.optimizer([p for stage in stages for p in stage.submod.parameters()])
    first, last = context.rank == 0, context.rank == plan.pp - 1
    sizes = {"microbatches": plan.microbatches, "microbatch_size": plan.microbatch_size}

    def step(number: int) -> list[float]:
        batches = reference.batches(model, step=number, **sizes)
        tokens, targets = map(torch.cat, zip(*batches, strict=True))
        losses: list = []
        schedule.step(*([tokens] if first else []), target=targets if last else None, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).tolist() if losses else []

    return step


class Compared(NamedTuple):
    """A plan, torch's way to do it, and how it is built; steps: of a turn."""

    name: str
    plan: pl.Plan
    peer: str
    build: Callable[[Any, pl.Plan], Callable[[int], list[float]]]
    steps: int = 3


DDP, FSDP = "torch DistributedDataParallel", "torch fully_shard (FSDP2)"
PIPELINES = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2))
COMPARED = [
    *(Compared("data parallel", pl.Plan(dp=n, bucket_bytes=BUCKET), *peer)
      for n in (2, 4)
      for peer in ((DDP, replicated), (f"{DDP}, gradient_as_bucket_view", viewed))),
    *(Compared(f"pipeline, {name}, v={v}",
               pl.Plan(pp=4, schedule=name, virtual_stages=v, microbatches=8, microbatch_size=2),
               "torch.distributed.pipelining", piped, 1)
      for name, v in PIPELINES),
    *(Compared("ZeRO-3", pl.Plan(dp=n, zero_stage=3), FSDP, fully_sharded) for n in (4, 2)),
    *(Compared(f"ZeRO-{stage}", pl.Plan(dp=4, zero_stage=stage),
               f"{DDP} + ZeroRedundancyOptimizer", viewed) for stage in (1, 2)),
    *(Compared("tensor parallel 1D", pl.Plan(tp=n, microbatch_size=4),
               "torch parallelize_module (DTensor)", cut_by_dtensor) for n in (2, 4)),
]  # fmt: skip


def side(context: Any, name: str, one: Compared) -> Callable[[int], list[float]]:
    """The step of a side, which is built here."""
    from paralab.interpret.train import Trainer

    if name == "theirs":
        return one.build(context, one.plan)
    return Trainer(context, MODEL.replace(tied=one.plan.pp == 1), one.plan).step


def turns(context: Any, ours_first: bool, at: int) -> dict[str, list[float]]:
    """Seconds per step of each turn on this rank."""
    sides = {name: partial(side, context, name, COMPARED[at]) for name in ("ours", "theirs")}
    return trained_in_turn(sides, ours_first, steps=COMPARED[at].steps)


def resident_peak(context: Any, name: str, at: int) -> int:
    """Most bytes of memory that the kernel saw this rank hold in two steps, beyond an empty rank's.

    It is asked of the kernel for both sides alike: counters of tensors miss what each does inside
    its own wrappers. Freed pages go back at once (ranks are born with malloc's thresholds set).
    """

    def resident(name: str) -> int:
        with open("/proc/self/status") as file:
            (line,) = [line for line in file if line.startswith(name + ":")]
        return 1024 * int(line.split()[1])

    empty = resident("VmRSS")
    step = side(context, name, COMPARED[at])
    step(0)  # makes optimizer states and buffers
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the high-water mark starts anew from here: proc(5)
    step(1), step(2)
    return resident("VmHWM") - empty


def measure() -> list[dict]:
    found = []
    for at, one in enumerate(COMPARED):
        ranks = one.plan.world_size
        note = f"s per step of the slowest of {ranks} ranks, gloo, 6.4 M parameters, AdamW"
        if one.plan.zero_stage:
            peaks = (launch_program(resident_peak, ranks, (name, at), timeout=120, device="cpu")
                     for name in ("ours", "theirs"))  # fmt: skip
            note += "; peak memory {:.1f} against {:.1f} MB".format(*(max(p) / 1e6 for p in peaks))
        times = slowest_rank(turns, ranks, (at,))
        found.append(row(f"{one.name}, {ranks} ranks", one.peer, *times, note))
    return found
