"""GPipe, 1F1B and interleaved 1F1B, instruments on, against torch.distributed.pipelining.

The same stages of the same model, micro-batches and optimizer on both sides, which take turns in
the same ranks. torch's 1F1B is its Schedule1F1B.
"""

from __future__ import annotations

from typing import Any

from pairs import row, slowest_rank, take_turns

import paralab as pl

MODEL = pl.ModelSpec(layers=8, hidden=256, heads=8, seq_len=128, tied=False)  # 6.5 M parameters
RANKS, MICROBATCHES, BATCH = 4, 8, 2
STEPS = 1  # a turn


def turns(context: Any, ours_first: bool, schedule: str, chunks: int) -> dict[str, list[float]]:
    """Seconds per step of each turn on this rank."""
    import torch

    from paralab.interpret.train import Trainer
    from paralab.model import reference

    plan = pl.Plan(
        pp=context.world_size, schedule=schedule, virtual_stages=chunks,
        microbatches=MICROBATCHES, microbatch_size=BATCH,
    )  # fmt: skip

    if ours_first:
        trainer = Trainer(context, MODEL, plan)
        theirs, stages = build_theirs(context, plan)
    else:
        theirs, stages = build_theirs(context, plan)
        trainer = Trainer(context, MODEL, plan)
    parameters = [p for stage in stages for p in stage.submod.parameters()]
    optimizer = reference.optimizer(parameters)
    first, last = context.rank == 0, context.rank == context.world_size - 1

    def their_step(step: int) -> None:
        batches = reference.batches(
            MODEL, step=step, microbatches=MICROBATCHES, microbatch_size=BATCH
        )
        tokens, targets = map(torch.cat, zip(*batches, strict=True))
        losses: list = []
        theirs.step(*([tokens] if first else []), target=targets if last else None, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        if losses:
            torch.stack(losses).tolist()

    trainer.step(0)
    their_step(0)
    for a, b in zip(trainer.whole().values(), parameters, strict=True):
        gap = abs(a - b.detach().numpy()).max()
        assert gap < 1e-3, "the two sides do not train the same weights"
    return take_turns({"ours": trainer.step, "theirs": their_step}, steps=STEPS)


def build_theirs(context: Any, plan: pl.Plan) -> tuple[Any, list[Any]]:
    """torch's schedule object on this rank, and its stages."""
    import torch
    import torch.distributed.pipelining as pp

    from paralab.model import reference
    from paralab.parallel.partition import partition

    class Piece(torch.nn.Module):
        """A stage as torch wants it: the last one ends in logits, the loss is a function apart."""

        def __init__(self, parts: tuple[str, ...]) -> None:
            super().__init__()
            gpt = reference.GPT(MODEL)
            modules = (gpt.get_submodule(part) for part in parts if part != "head")
            last = [gpt.head.norm, gpt.head.output] if "head" in parts else []
            self.all = torch.nn.Sequential(*modules, *last)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.all(x)

    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    parts = partition(MODEL, plan.stages, BATCH)
    mine = range(context.rank, plan.stages, plan.pp)
    stages = [pp.PipelineStage(Piece(parts[s]), s, plan.stages, torch.device("cpu")) for s in mine]
    form = {"gpipe": pp.ScheduleGPipe, "1f1b": pp.Schedule1F1B,
            "interleaved": pp.ScheduleInterleaved1F1B}[plan.schedule]  # fmt: skip
    what = stages if plan.schedule == "interleaved" else stages[0]
    return form(what, MICROBATCHES, loss_fn=loss), stages


def measure() -> list[dict]:
    rows = []
    for schedule, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2)):
        ours, theirs = slowest_rank(turns, RANKS, (schedule, chunks))
        note = (
            f"s per step of the slowest of {RANKS} ranks, {MICROBATCHES} micro-batches, gloo, "
            f"{MODEL.num_params / 1e6:.1f} M parameters, AdamW"
        )
        peer = "torch.distributed.pipelining"
        rows.append(row(f"pipeline, {schedule}, v={chunks}", peer, ours, theirs, note))
    return rows


if __name__ == "__main__":
    for r in measure():
        print(r["name"], r["peer"], f"{r['ratio']:.3f}", r["note"], sep="  ")
