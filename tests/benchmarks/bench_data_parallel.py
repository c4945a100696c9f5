"""Overlapped data parallel, instruments on, against torch DistributedDataParallel on the same
model.

Both sides live in the same ranks and take turns: the same processes, threads, text and optimizer. A
turn's time is that of the slowest rank.
"""

from __future__ import annotations

from typing import Any

from statistics_of_pairs import row

import paralab as pl
from paralab.launch import launch_program

MODEL = pl.ModelSpec(layers=8, hidden=256, heads=8, seq_len=128)  # 6.4 M parameters
BATCH = 2
BUCKET = 13 * 2**20  # two buckets, as DistributedDataParallel makes of this model


def turns(
    context: Any, model: pl.ModelSpec, plan: pl.Plan, peer: dict, pairs: int, steps: int
) -> dict:
    """Seconds per step of each turn on this rank, ours and the peer's."""
    import time

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from paralab.model import GPT
    from paralab.train import Trainer, load_batches, make_optimizer, read_scalars, to_device

    trainer = Trainer(context, model, plan)
    ddp = DistributedDataParallel(GPT(model, seed=0), **peer)
    optimizer = make_optimizer(list(ddp.parameters()), "adamw", 1e-3)

    def their_step(step: int) -> None:
        optimizer.zero_grad()
        batches = load_batches(trainer.corpus, model, plan, step=step, rank=context.rank, seed=0)
        tokens, targets = to_device(batches[0], context.device)
        loss = ddp(tokens, targets)
        loss.backward()
        optimizer.step()
        read_scalars([loss.detach()])

    times: dict[str, list[float]] = {"ours": [], "theirs": []}
    sides = {"ours": trainer.step, "theirs": their_step}
    for turn in range(pairs + 1):  # the first pair is warm-up
        order = list(sides) if turn % 2 else list(reversed(sides))
        if turn == 1:  # later, Adam has blown rounding up
            assert_same_weights(trainer.parameters, list(ddp.parameters()))
        for side in order:
            dist.barrier()
            began = time.perf_counter()
            for i in range(steps):
                sides[side](turn * steps + i)
            if turn:
                times[side].append((time.perf_counter() - began) / steps)
    assert torch.get_num_threads() == 1
    return times


def assert_same_weights(ours: list, theirs: list) -> None:
    """Both sides have to do the same work, or the ratio says nothing."""
    gap = max(
        (a.detach() - b.detach()).abs().max().item() for a, b in zip(ours, theirs, strict=True)
    )
    assert gap < 1e-3, f"the two sides trained different weights: {gap}"


def measure(*, pairs: int = 24, steps: int = 3) -> list[dict]:
    rows = []
    for ranks in (2, 4):
        for view in (False, True):
            plan = pl.Plan(dp=ranks, microbatch_size=BATCH, bucket_bytes=BUCKET)
            args = (MODEL, plan, {"gradient_as_bucket_view": view}, pairs, steps)
            parts = launch_program(turns, ranks, args, timeout=300, device="cpu")
            slowest = {
                side: [max(t) for t in zip(*(part[side] for part in parts), strict=True)]
                for side in ("ours", "theirs")
            }
            peer = "torch DistributedDataParallel" + (", gradient_as_bucket_view" if view else "")
            note = (
                f"s per step, {ranks} ranks, gloo, {MODEL.num_params / 1e6:.1f} M parameters, AdamW"
            )
            rows.append(
                row(f"data parallel, {ranks} ranks", peer, slowest["ours"], slowest["theirs"], note)
            )
    return rows


if __name__ == "__main__":
    for r in measure():
        print(r["name"], r["peer"], f"{r['ratio']:.3f}", r["note"], sep="  ")
