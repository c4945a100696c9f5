"""What the instruments cost: a training step with the recorder on against the same step without.

Two figures, because a fraction of a per cent drowns in a busy machine's noise: the paired ratio,
and the events of one step times the measured cost of one event.
"""

from __future__ import annotations

from typing import Any

from bench_data_parallel import BATCH, MODEL, STEPS
from pairs import row, slowest_rank, take_turns

import paralab as pl
from paralab.instruments.recorder import Recorder
from paralab.launch import launch_program


class Blind(Recorder):
    """Takes every call and writes nothing down."""

    def enter(self, *args: object, **kwargs: object) -> None: ...

    def leave(self) -> None: ...

    def cut(self) -> tuple[int, ...]:
        return ()

    def launch(self, *args: object) -> int:
        return -1

    def completed(self, *args: object) -> None: ...

    def settled(self, *args: object) -> None: ...

    def call(self, row: tuple) -> None: ...

    def begin_step(self, step: int) -> None: ...

    def end_step(self) -> None: ...


def turns(context: Any, ours_first: bool) -> dict[str, list[float]]:
    """The same trainer with its recorder on, and with a blind one in its place."""
    from paralab.interpret.train import Trainer

    trainer = Trainer(context, MODEL, pl.Plan(dp=context.world_size, microbatch_size=BATCH))
    kinds = {"ours": Recorder, "theirs": Blind}
    recorders = {s: k(rank=context.rank, world_size=context.world_size) for s, k in kinds.items()}

    def side(name: str) -> Any:
        def step(number: int) -> None:
            groups = filter(None, trainer.groups.values())
            for holder in (trainer, trainer.rank, trainer.rank.env, *groups):
                holder.recorder = recorders[name]
            trainer.step(number)

        return step

    names = list(kinds) if ours_first else list(reversed(kinds))
    return take_turns({name: side(name) for name in names}, steps=STEPS)


def events(context: Any) -> tuple[float, float]:
    """(events of one step, seconds that one of them costs)."""
    import time

    from paralab.interpret.train import Trainer

    trainer = Trainer(context, MODEL, pl.Plan(dp=context.world_size, microbatch_size=BATCH))
    trainer.step(0)
    tables = trainer.recorder.tables()
    count = 2 * len(tables["spans"]["id"]) + len(tables["collectives"]["call"])
    probe = Recorder(rank=0, world_size=1)
    began = time.thread_time()
    for _ in range(2000):
        with probe.span("forward"):
            pass
    return count, (time.thread_time() - began) / 4000


def measure(*, ranks: int = 2) -> list[dict]:
    ours, theirs = slowest_rank(turns, ranks, ())
    count, each = launch_program(events, ranks, device="cpu")[0]
    share = count * each / (sum(theirs) / len(theirs))
    note = (
        f"s per step of the slowest of {ranks} ranks; {count} events a step at {each * 1e6:.1f} us "
        f"each are {share:.2%} of it"
    )
    return [row("instruments on", "the same step, nothing recorded", ours, theirs, note)]


if __name__ == "__main__":
    for r in measure():
        print(f"{r['name']}: ratio {r['ratio']:.4f}  {r['note']}")
