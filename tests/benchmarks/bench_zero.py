"""ZeRO's stages, instruments on, against what torch has for each, the same model.

    stage 3  fully_shard (FSDP2), every block a unit of its own, as its documentation wraps a GPT
    stage 1  DistributedDataParallel with ZeroRedundancyOptimizer
    stage 2  the same: torch has no stage 2 apart from FSDP2's

Both sides live in the same ranks and take turns: the same processes, threads, text and optimizer;
each with the sizes of buckets that it comes with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pairs import row, slowest_rank, take_turns

import paralab as pl
from paralab.launch import launch_program

MODEL = pl.ModelSpec(layers=8, hidden=256, heads=8, seq_len=128)  # 6.4 M parameters
BATCH = 2
STEPS = 3  # a turn


def sharded(lr: float = 1e-3) -> tuple[Any, Any]:
    """The model and its optimizer under FSDP2."""
    import torch
    from torch.distributed.fsdp import fully_shard

    from paralab.model import reference

    model = reference.GPT(MODEL)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=lr)


def redundant(lr: float = 1e-3) -> tuple[Any, Any]:
    """The model under DistributedDataParallel, its optimizer states sharded."""
    import torch
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    from paralab.model import reference

    model = DistributedDataParallel(reference.GPT(MODEL), gradient_as_bucket_view=True)
    kind = torch.optim.AdamW
    return model, ZeroRedundancyOptimizer(model.parameters(), kind, lr=lr, fused=True)


def their_step(context: Any, stage: int, plan: pl.Plan) -> Callable[[int], float]:
    """A function of the step that trains torch's side and gives the loss."""
    from paralab.model import reference

    model, optimizer = sharded() if stage == 3 else redundant()

    def step(number: int) -> float:
        optimizer.zero_grad()
        (batch,) = reference.batches(
            MODEL, step=number, microbatch_size=BATCH, rank=context.rank, ranks=plan.dp
        )
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def our_step(context: Any, stage: int, plan: pl.Plan) -> Callable[[int], float]:
    """The same of this side."""
    from paralab.interpret.train import Trainer

    trainer = Trainer(context, MODEL, plan)
    return lambda number: trainer.step(number)[0]


SIDES = {"ours": our_step, "theirs": their_step}


def plan_of(stage: int, ranks: int) -> pl.Plan:
    return pl.Plan(dp=ranks, microbatch_size=BATCH, zero_stage=stage)


def turns(context: Any, ours_first: bool, stage: int) -> dict[str, list[float]]:
    """Seconds per step of each turn on this rank."""
    plan = plan_of(stage, context.world_size)
    order = SIDES if ours_first else reversed(SIDES)
    both = {side: SIDES[side](context, stage, plan) for side in order}
    for step in range(3):  # the same training
        ours, theirs = both["ours"](step), both["theirs"](step)
        assert abs(ours - theirs) < 1e-3, (step, ours, theirs)
    return take_turns({side: both[side] for side in SIDES}, steps=STEPS)


def resident_peak(context: Any, side: str, stage: int) -> int:
    """Most bytes of memory that the kernel saw this rank hold in two steps, beyond an empty rank's.

    It is asked of the kernel for both sides alike: counters of tensors miss what each does inside
    its own wrappers. Freed pages go back at once (ranks are born with malloc's thresholds set).
    """
    empty = resident("VmRSS")
    step = SIDES[side](context, stage, plan_of(stage, context.world_size))
    step(0)  # makes optimizer states and buffers
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the high-water mark starts anew from here: proc(5)
    step(1), step(2)
    return resident("VmHWM") - empty


def resident(name: str) -> int:
    """A line of the kernel's account of this process, in bytes."""
    with open("/proc/self/status") as file:
        (line,) = [line for line in file if line.startswith(name + ":")]
    return 1024 * int(line.split()[1])


def measure() -> list[dict]:
    rows = []
    peers = {3: "torch fully_shard (FSDP2)", 1: "torch DDP + ZeroRedundancyOptimizer",
             2: "torch DDP + ZeroRedundancyOptimizer"}  # fmt: skip
    for stage, ranks in ((3, 4), (3, 2), (1, 4), (2, 4)):
        ours, theirs = slowest_rank(turns, ranks, (stage,))
        memory = [
            max(launch_program(resident_peak, ranks, (side, stage), timeout=120, device="cpu"))
            for side in SIDES
        ]
        note = (f"s per step of the slowest of {ranks} ranks, gloo, "
                f"{MODEL.num_params / 1e6:.1f} M parameters, AdamW; peak memory "
                f"{memory[0] / 1e6:.1f} against {memory[1] / 1e6:.1f} MB")  # fmt: skip
        rows.append(row(f"ZeRO-{stage}, {ranks} ranks", peers[stage], ours, theirs, note))
    return rows


if __name__ == "__main__":
    for r in measure():
        print(r["name"], r["peer"], f"{r['ratio']:.3f}", r["note"], sep="  ")
