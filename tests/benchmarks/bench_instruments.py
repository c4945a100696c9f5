"""What this kit adds to a step: its instruments, `pl.observe`, and all that is not a product.

recorder  a step with the recorder on against the same without; and, as a fraction of a per cent
          drowns in a busy machine's noise, the events of a step times the cost of one
observe   DistributedDataParallel observed, no ledger on, against the same unobserved: required
          is at most 3 %
replay    the observed run on other links against our data parallelism of the same plan on
          these: required is within 10 %
tiny      a model so small that nearly all of its step is overhead, against the reference's
          forward, autograd and torch's fused AdamW
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from bench_torch import BUCKET, MODEL, replicated
from pairs import PAIRS_A_ROUND, ROUNDS, row, slowest_rank, take_turns, together, trained_in_turn

import paralab as pl
from paralab.instruments.recorder import Recorder
from paralab.launch import launch_program

STEPS, RANKS = 3, 2  # steps of a turn
LINK = pl.Link(alpha=1e-5, bandwidth=1e9)
CLUSTER = pl.Cluster(flops=1e12, memory_bandwidth=1e11, intra=LINK, inter=LINK)
REPLAYED = 6  # steps of a run that is replayed
PLAN = pl.Plan(dp=RANKS)
AS_DDP = PLAN.replace(bucket_bytes=BUCKET)
TINY = pl.ModelSpec(layers=8, hidden=16, heads=2, seq_len=16, vocab=256)
FOUR = pl.Plan(microbatches=4, microbatch_size=1)


class Blind(Recorder):
    """Takes every call and writes nothing down."""

    def enter(self, *args: object, **kwargs: object) -> None: ...

    def cut(self) -> tuple[int, ...]:
        return ()

    def launch(self, *args: object) -> int:
        return -1

    leave = completed = settled = call = begin_step = end_step = enter


def recorded(context: Any, ours_first: bool) -> dict[str, list[float]]:
    """The same trainer with its recorder on, and with a blind one in its place."""
    from paralab.interpret.train import Trainer

    trainer = Trainer(context, MODEL, PLAN)

    def side(recorder: Recorder) -> Callable[[int], None]:
        def step(number: int) -> None:
            groups = filter(None, trainer.groups.values())
            for holder in (trainer, trainer.rank, trainer.rank.env, *groups):
                holder.recorder = recorder
            trainer.step(number)

        return step

    kinds = {"ours": Recorder, "theirs": Blind}
    names = list(kinds) if ours_first else list(reversed(kinds))
    made = {name: side(kinds[name](rank=context.rank, world_size=RANKS)) for name in names}
    return take_turns(made, steps=STEPS)


def events(context: Any) -> tuple[float, float]:
    """(events of one step, seconds that one of them costs)."""
    from paralab.interpret.train import Trainer

    trainer = Trainer(context, MODEL, PLAN)
    trainer.step(0)
    tables = trainer.recorder.tables()
    count = 2 * len(tables["spans"]["id"]) + len(tables["collectives"]["call"])
    probe = Recorder(rank=0, world_size=1)
    began = time.thread_time()
    for _ in range(2000):
        with probe.span("forward"):
            pass
    return count, (time.thread_time() - began) / 4000


def observed(context: Any, ours_first: bool) -> dict[str, list[float]]:
    """Seconds per step of each turn: the same model, with the observer on and without.

    An observer's first step, in which it meets the model, is not timed; nor is the other side's.
    """
    from paralab.observing import _observed

    step = replicated(context, AS_DDP)
    times: dict[str, list[float]] = {"ours": [], "theirs": []}
    for turn in range(PAIRS_A_ROUND + 1):
        for side in times if (turn % 2 == 0) == ours_first else reversed(times):
            settings = {"marked": False, "memory_steps": 0}
            watched = _observed(context, settings) if side == "ours" else contextlib.nullcontext()
            with watched:
                step(0)
                began = together()
                for number in range(STEPS):
                    step(number + 1)
                if turn:
                    times[side].append((time.perf_counter() - began) / STEPS)
    return times


def train(steps: int) -> None:
    from types import SimpleNamespace

    import torch.distributed as dist

    step = replicated(SimpleNamespace(rank=dist.get_rank()), AS_DDP)
    for number in range(steps):
        step(number)


def replays() -> dict[str, list[float]]:
    """Seconds of a replayed step, pair by pair: torch's observed, and ours."""
    seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
    sides = {
        "ours": lambda: pl.observe(train, RANKS, (REPLAYED,), memory_steps=0, device="cpu"),
        "theirs": lambda: pl.run(MODEL, AS_DDP, steps=REPLAYED, device="cpu"),
    }
    for pair in range(ROUNDS * PAIRS_A_ROUND):
        for side in sides if pair % 2 else reversed(sides):
            seconds[side].append(sides[side]().replay(CLUSTER).step_time)
    return seconds


def tiny(context: Any, ours_first: bool) -> dict[str, list[float]]:
    def ours() -> Callable[[int], list[float]]:
        from paralab.interpret.train import Trainer

        return Trainer(context, TINY, FOUR).step

    def theirs() -> Callable[[int], list[float]]:
        import torch

        gpt = pl.reference.GPT(TINY, 0)
        optimizer = pl.reference.optimizer(gpt.parameters())
        sizes = {"microbatches": FOUR.microbatches, "microbatch_size": FOUR.microbatch_size}

        def step(number: int) -> list[float]:
            losses = []
            optimizer.zero_grad()
            gpt.at(number)
            for tokens, targets in pl.reference.batches(TINY, step=number, **sizes):
                loss = gpt(tokens, targets)
                (loss / FOUR.microbatches).backward()
                losses.append(loss.detach())
            optimizer.step()
            return torch.stack(losses).tolist()

        return step

    return trained_in_turn({"ours": ours, "theirs": theirs}, ours_first, steps=25)


def measure() -> list[dict]:
    with_recorder = slowest_rank(recorded, RANKS, ())
    count, each = launch_program(events, RANKS, device="cpu")[0]
    share = count * each / (sum(with_recorder[1]) / len(with_recorder[1]))
    slowest = f"s per step of the slowest of {RANKS} ranks"
    note = f"{slowest}; {count} events a step at {each * 1e6:.1f} us each are {share:.2%} of it"
    small = "8 blocks of hidden 16, 4 micro-batches of 16 tokens, AdamW, recorder on"
    return [
        row("instruments on", "the same step, nothing recorded", *with_recorder, note),
        row("DDP observed", "the same, unobserved", *slowest_rank(observed, RANKS, ()),
            f"{slowest}; required: at most 1.03"),
        row("replay of observed DDP", "replay of our data parallelism", *replays().values(),
            "s per replayed step on links of 1 GB/s; required: 0.9 to 1.1"),
        row("a step of a tiny model, 1 rank", "autograd", *slowest_rank(tiny, 1, ()), small),
    ]  # fmt: skip
