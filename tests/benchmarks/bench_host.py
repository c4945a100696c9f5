"""What a step costs beside its products: a model so small that nearly all of it is overhead.

One rank of the program against the reference's forward, autograd and torch's fused AdamW, the same
four micro-batches on both sides, read in the step.
"""

from __future__ import annotations

from typing import Any

from pairs import row, slowest_rank, take_turns

import paralab as pl

MODEL = pl.ModelSpec(layers=8, hidden=16, heads=2, seq_len=16, vocab=256)
PLAN = pl.Plan(microbatches=4, microbatch_size=1)
STEPS = 25


def turns(context: Any, ours_first: bool) -> dict[str, list[float]]:
    """The program's step, and autograd's."""

    def ours() -> Any:
        from paralab.interpret.train import Trainer

        return Trainer(context, MODEL, PLAN).step

    def theirs() -> Any:
        import torch

        gpt = pl.reference.GPT(MODEL, 0)
        optimizer = pl.reference.optimizer(gpt.parameters())

        def step(number: int) -> None:
            losses = []
            optimizer.zero_grad()
            gpt.at(number)
            sizes = {"microbatches": PLAN.microbatches, "microbatch_size": PLAN.microbatch_size}
            for tokens, targets in pl.reference.batches(MODEL, step=number, **sizes):
                loss = gpt(tokens, targets)
                (loss / PLAN.microbatches).backward()
                losses.append(loss.detach())
            optimizer.step()
            torch.stack(losses).tolist()

        return step

    sides = {"ours": ours, "theirs": theirs}
    names = list(sides) if ours_first else list(reversed(sides))
    return take_turns({name: sides[name]() for name in names}, steps=STEPS)


def measure() -> list[dict]:
    note = "8 blocks of hidden 16, 4 micro-batches of 16 tokens, AdamW, recorder on"
    return [row("a step of a tiny model, 1 rank", "autograd", *slowest_rank(turns, 1, ()), note)]


if __name__ == "__main__":
    for r in measure():
        print(f"{r['name']}: {r['ratio']:.3f}  {r['note']}")
