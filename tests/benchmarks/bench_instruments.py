"""What the instruments cost: a training step with the recorder on against the same step without it.

Two figures, because a fraction of a per cent drowns in a busy machine's noise: the paired ratio,
and the events of one step times the measured cost of one event.
"""

from __future__ import annotations

from typing import Any

from bench_data_parallel import BATCH, MODEL
from statistics_of_pairs import row

import paralab as pl
from paralab.launch import launch_program


def turns(context: Any, pairs: int, steps: int) -> dict:
    import time

    import torch.distributed as dist

    from paralab.observe.recorder import Recorder
    from paralab.train import Trainer

    class Blind(Recorder):
        """Takes every call and writes nothing down."""

        def enter(self, *args: object, **kwargs: object) -> None: ...
        def leave(self) -> int:
            return -1  # noqa: E704

        def cut(self) -> tuple:
            return ()  # noqa: E704

        def launch(self, *args: object) -> int:
            return -1  # noqa: E704

        def completed(self, *args: object) -> None: ...
        def settled(self, *args: object) -> None: ...
        def call(self, row: tuple) -> None: ...
        def begin_step(self, step: int) -> None: ...
        def end_step(self) -> None: ...

    def trainer(kind: type[Recorder]) -> Trainer:
        recorder = kind(rank=context.rank, world_size=context.world_size)
        return Trainer(context, MODEL, plan, recorder=recorder)

    plan = pl.Plan(dp=context.world_size, microbatch_size=BATCH)
    sides = {"on": trainer(Recorder), "off": trainer(Blind)}
    times: dict[str, list[float]] = {"on": [], "off": []}
    for turn in range(pairs + 1):
        for side in sides if turn % 2 else reversed(sides):
            dist.barrier()
            began = time.perf_counter()
            for i in range(steps):
                sides[side].step(turn * steps + i)
            if turn:
                times[side].append((time.perf_counter() - began) / steps)
    recorder = sides["on"].recorder
    events = (2 * len(recorder._spans) + len(recorder._calls)) / ((pairs + 1) * steps)
    probe = Recorder(rank=0, world_size=1)
    began = time.thread_time()
    for _ in range(2000):
        with probe.span("forward"):
            pass
    return {**times, "events": events, "each": (time.thread_time() - began) / 4000}


def measure(*, ranks: int = 2, pairs: int = 24, steps: int = 3) -> list[dict]:
    parts = launch_program(turns, ranks, (pairs, steps), timeout=300, device="cpu")
    slowest = {
        side: [max(t) for t in zip(*(part[side] for part in parts), strict=True)]
        for side in ("on", "off")
    }
    found = row(
        "instruments on", "the same step, nothing recorded", slowest["on"], slowest["off"], ""
    )
    events, each = max(p["events"] for p in parts), max(p["each"] for p in parts)
    share = events * each / found["peer_s"]
    found["note"] += (
        f"s per step, {ranks} ranks; {events:.0f} events a step at {each * 1e6:.1f} us each are "
        f"{share:.2%} of it"
    )
    found["events_share"] = share
    return [found]


if __name__ == "__main__":
    for r in measure():
        print(f"{r['name']}: ratio {r['ratio']:.4f}  {r['note']}")
