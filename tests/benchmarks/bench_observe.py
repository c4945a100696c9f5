"""What `pl.observe` costs a timed step, and whether its report is worth what a run's is.

overhead  DistributedDataParallel of the reference GPT observed, no ledger on, against the same
          model's steps unobserved: required is at most 3 %
replay    the observed run on other links, against our data parallelism of the same plan on these
          links: required is within 10 %
"""

from __future__ import annotations

import contextlib
from typing import Any

from bench_data_parallel import MODEL, STEPS, plan, torchs
from pairs import PAIRS_A_ROUND, ROUNDS, row, slowest_rank

import paralab as pl

LINK = pl.Link(alpha=1e-5, bandwidth=1e9)
CLUSTER = pl.Cluster(flops=1e12, memory_bandwidth=1e11, intra=LINK, inter=LINK)
REPLAYED = 6  # steps of a run that is replayed


def turns(context: Any, ours_first: bool) -> dict[str, list[float]]:
    """Seconds per step of each turn: the same model, with the observer on and without.

    An observer's first step, in which it meets the model, is not timed; nor is the other side's.
    """
    import time

    import torch.distributed as dist

    from paralab.observing import _observed

    _, step = torchs(context.rank, context.world_size)
    times: dict[str, list[float]] = {"ours": [], "theirs": []}
    for turn in range(PAIRS_A_ROUND + 1):
        for side in times if (turn % 2 == 0) == ours_first else reversed(times):
            settings = {"marked": False, "memory_steps": 0}
            watched = _observed(context, settings) if side == "ours" else contextlib.nullcontext()
            with watched:
                step(0)
                dist.barrier()
                began = time.perf_counter()
                for number in range(STEPS):
                    step(number + 1)
                if turn:
                    times[side].append((time.perf_counter() - began) / STEPS)
    return times


def train(steps: int) -> None:
    import torch.distributed as dist

    _, step = torchs(dist.get_rank(), dist.get_world_size())
    for number in range(steps):
        step(number)


def replays(ranks: int) -> tuple[list[float], list[float]]:
    """Seconds of a replayed step, pair by pair: torch's observed, and ours."""
    seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
    sides = {
        "ours": lambda: pl.observe(train, ranks, (REPLAYED,), memory_steps=0, device="cpu"),
        "theirs": lambda: pl.run(MODEL, plan(ranks), steps=REPLAYED, device="cpu"),
    }
    for pair in range(ROUNDS * PAIRS_A_ROUND):
        for side in sides if pair % 2 else reversed(sides):
            seconds[side].append(sides[side]().replay(CLUSTER).step_time)
    return seconds["ours"], seconds["theirs"]


def measure(*, ranks: int = 2) -> list[dict]:
    note = f"s per step of the slowest of {ranks} ranks; required: at most 1.03"
    said = "s per replayed step on links of 1 GB/s; required: 0.9 to 1.1"
    return [
        row("DDP observed", "the same, unobserved", *slowest_rank(turns, ranks, ()), note),
        row("replay of observed DDP", "replay of our data parallelism", *replays(ranks), said),
    ]


if __name__ == "__main__":
    for r in measure():
        print(r["name"], r["peer"], f"{r['ratio']:.3f}", r["note"], sep="  ")
