"""Overlapped data parallel, instruments on, against torch DistributedDataParallel, the same model.

Both sides live in the same ranks and take turns: the same processes, threads, text and optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pairs import row, slowest_rank, take_turns

import paralab as pl

MODEL = pl.ModelSpec(layers=8, hidden=256, heads=8, seq_len=128)  # 6.4 M parameters
BATCH = 2
BUCKET = 25 * 2**20  # the cap that DistributedDataParallel has by default
STEPS = 3  # a turn


def plan(ranks: int) -> pl.Plan:
    return pl.Plan(dp=ranks, microbatch_size=BATCH, bucket_bytes=BUCKET)


def torchs(rank: int, ranks: int, *, view: bool = False) -> tuple[Any, Callable[[int], None]]:
    """The reference GPT in DistributedDataParallel, and one step of its training."""
    from torch.nn.parallel import DistributedDataParallel

    from paralab.model import reference

    ddp = DistributedDataParallel(reference.GPT(MODEL), gradient_as_bucket_view=view)
    optimizer = reference.optimizer(ddp.parameters())

    def step(number: int) -> None:
        optimizer.zero_grad()
        ((tokens, targets),) = reference.batches(
            MODEL, step=number, microbatch_size=BATCH, rank=rank, ranks=ranks
        )
        loss = ddp(tokens, targets)
        loss.backward()
        optimizer.step()
        loss.item()

    return ddp, step


def turns(context: Any, ours_first: bool, view: bool) -> dict[str, list[float]]:
    """Seconds per step of each turn on this rank."""
    from paralab.interpret.train import Trainer

    def build_ours() -> Trainer:
        return Trainer(context, MODEL, plan(context.world_size))

    trainer = build_ours() if ours_first else None
    ddp, their_step = torchs(context.rank, context.world_size, view=view)
    trainer = trainer or build_ours()
    trainer.step(0)
    their_step(0)
    if context.rank == 0:
        for a, b in zip(trainer.whole().values(), ddp.parameters(), strict=True):
            gap = abs(a - b.detach().numpy()).max()
            assert gap < 1e-3, "the two sides do not train the same weights"
    return take_turns({"ours": trainer.step, "theirs": their_step}, steps=STEPS)


def measure() -> list[dict]:
    rows = []
    for ranks in (2, 4):
        for view in (False, True):
            ours, theirs = slowest_rank(turns, ranks, (view,))
            peer = "torch DistributedDataParallel" + (", gradient_as_bucket_view" if view else "")
            size = f"{MODEL.num_params / 1e6:.1f} M parameters"
            note = f"s per step of the slowest of {ranks} ranks, gloo, {size}, AdamW"
            rows.append(row(f"data parallel, {ranks} ranks", peer, ours, theirs, note))
    return rows


if __name__ == "__main__":
    for r in measure():
        print(r["name"], r["peer"], f"{r['ratio']:.3f}", r["note"], sep="  ")
