"""ZeRO's stages, instruments on, against what torch has for each, the same model.

    stage 3  fully_shard (FSDP2), every block a unit of its own, as its documentation wraps a GPT
    stage 1  DistributedDataParallel with ZeroRedundancyOptimizer
    stage 2  the same: torch has no stage 2 apart from FSDP2's

Both sides live in the same ranks and take turns: the same processes, threads, text and optimizer.
"""

from __future__ import annotations

from typing import Any

from pairs import row, slowest_rank, take_turns

import paralab as pl
from paralab.launch import launch_program

MODEL = pl.ModelSpec(layers=8, hidden=256, heads=8, seq_len=128)  # 6.4 M parameters
BATCH = 2
STEPS = 3  # a turn
BUCKET = 25 * 2**20


def sharded(lr: float = 1e-3) -> tuple[Any, Any]:
    """The model and its optimizer under FSDP2."""
    import torch
    from torch.distributed.fsdp import fully_shard

    from paralab.model import GPT

    model = GPT(MODEL, seed=0)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=lr)


def redundant(lr: float = 1e-3) -> tuple[Any, Any]:
    """The model under DistributedDataParallel, its optimizer states dealt out."""
    import torch
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    from paralab.model import GPT

    model = DistributedDataParallel(GPT(MODEL, seed=0), gradient_as_bucket_view=True)
    kind = torch.optim.AdamW
    return model, ZeroRedundancyOptimizer(model.parameters(), kind, lr=lr, fused=True)


def sides(context: Any, ours_first: bool, stage: int) -> dict[str, Any]:
    """{side: a function of the step that trains one}."""
    from paralab.train import Trainer, load_batches, read_scalars, to_device

    plan = pl.Plan(dp=context.world_size, microbatch_size=BATCH, zero_stage=stage,
                   bucket_bytes=BUCKET)  # fmt: skip
    made: dict[str, Any] = {}
    for side in ("ours", "theirs") if ours_first else ("theirs", "ours"):
        if side == "ours":
            made[side] = Trainer(context, MODEL, plan)
        else:
            made[side] = sharded() if stage == 3 else redundant()
    trainer, (model, optimizer) = made["ours"], made["theirs"]

    def their_step(step: int) -> float:
        optimizer.zero_grad()
        batches = load_batches(trainer.corpus, MODEL, plan, step=step, rank=context.rank, seed=0)
        loss = model(*to_device(batches[0], context.device))
        loss.backward()
        optimizer.step()
        return read_scalars([loss.detach()])[0]

    return {"ours": trainer.step, "theirs": their_step}


def turns(context: Any, ours_first: bool, stage: int) -> dict[str, list[float]]:
    """Seconds per step of each turn on this rank."""
    both = sides(context, ours_first, stage)
    for step in range(3):  # the same training
        ours, theirs = both["ours"](step)[0], both["theirs"](step)
        assert abs(ours - theirs) < 1e-3, (step, ours, theirs)
    return take_turns(both, steps=STEPS)


def peaks(context: Any, side: str, stage: int) -> int:
    """Bytes of one side alone at its peak over three steps, from an empty rank."""
    from paralab.observe.memory import PeakMemory
    from paralab.train import Trainer, load_batches, read_scalars, to_device

    plan = pl.Plan(dp=context.world_size, microbatch_size=BATCH, zero_stage=stage,
                   bucket_bytes=BUCKET)  # fmt: skip
    with PeakMemory() as memory:
        if side == "ours":
            trainer = Trainer(context, MODEL, plan)
            for step in range(3):
                memory.peak = memory.live
                trainer.step(step)
            return memory.peak
        model, optimizer = sharded() if stage == 3 else redundant()
        from paralab.data import Corpus

        corpus = Corpus(None)
        for step in range(3):
            memory.peak = memory.live
            optimizer.zero_grad()
            batches = load_batches(corpus, MODEL, plan, step=step, rank=context.rank, seed=0)
            loss = model(*to_device(batches[0], context.device))
            loss.backward()
            optimizer.step()
            read_scalars([loss.detach()])
        return memory.peak


def measure() -> list[dict]:
    rows = []
    peers = {3: "torch fully_shard (FSDP2)", 1: "torch DDP + ZeroRedundancyOptimizer",
             2: "torch DDP + ZeroRedundancyOptimizer"}  # fmt: skip
    for stage, ranks in ((3, 4), (3, 2), (1, 4), (2, 4)):
        ours, theirs = slowest_rank(turns, ranks, (stage,))
        memory = [
            max(launch_program(peaks, ranks, (side, stage), timeout=120, device="cpu"))
            for side in ("ours", "theirs")
        ]
        note = (f"s per step of the slowest of {ranks} ranks, gloo, "
                f"{MODEL.num_params / 1e6:.1f} M parameters, AdamW; peak memory "
                f"{memory[0] / 1e6:.1f} against {memory[1] / 1e6:.1f} MB")  # fmt: skip
        rows.append(row(f"ZeRO-{stage}, {ranks} ranks", peers[stage], ours, theirs, note))
    return rows


if __name__ == "__main__":
    for r in measure():
        print(r["name"], r["peer"], f"{r['ratio']:.3f}", r["note"], sep="  ")
