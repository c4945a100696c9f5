"""Overlapped data parallel, instruments on, against torch DistributedDataParallel, the same model.

Both sides live in the same ranks and take turns: the same processes, threads, text and optimizer.
"""

from __future__ import annotations

from typing import Any

from pairs import row, slowest_rank, take_turns

import paralab as pl

MODEL = pl.ModelSpec(layers=8, hidden=256, heads=8, seq_len=128)  # 6.4 M parameters
BATCH = 2
BUCKET = 25 * 2**20  # the cap that DistributedDataParallel has by default
STEPS = 3  # a turn


def turns(context: Any, ours_first: bool, view: bool) -> dict[str, list[float]]:
    """Seconds per step of each turn on this rank."""
    from torch.nn.parallel import DistributedDataParallel

    from paralab.interpret.train import Trainer
    from paralab.model import reference

    plan = pl.Plan(dp=context.world_size, microbatch_size=BATCH, bucket_bytes=BUCKET)

    def build_theirs() -> DistributedDataParallel:
        return DistributedDataParallel(reference.GPT(MODEL), gradient_as_bucket_view=view)

    if ours_first:
        trainer, ddp = Trainer(context, MODEL, plan), build_theirs()
    else:
        ddp, trainer = build_theirs(), Trainer(context, MODEL, plan)
    optimizer = reference.optimizer(ddp.parameters())

    def their_step(step: int) -> None:
        optimizer.zero_grad()
        ((tokens, targets),) = reference.batches(
            MODEL, step=step, microbatch_size=BATCH, rank=context.rank, ranks=context.world_size
        )
        loss = ddp(tokens, targets)
        loss.backward()
        optimizer.step()
        loss.item()

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
