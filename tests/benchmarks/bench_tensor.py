"""1D tensor parallelism, instruments on, against torch's `parallelize_module` (DTensor).

The same GPT, cut in the same way: qkv and up by columns, proj and down by rows. The peer keeps
embedding and logits whole on every rank, which saves it two messages here; with 256 entries they
are small. Both sides live in the same ranks and take turns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pairs import row, slowest_rank, take_turns

import paralab as pl

MODEL = pl.ModelSpec(layers=8, hidden=256, heads=8, seq_len=128)  # 6.4 M parameters
BATCH = 4
STEPS = 3  # a turn


def cut_by_dtensor(ranks: int, lr: float = 1e-3) -> tuple[Any, Any]:
    """The model and its optimizer under torch's tensor parallelism."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    from paralab.model import reference

    model = reference.GPT(MODEL)
    mesh = init_device_mesh("cpu", (ranks,))
    for block in model.blocks:
        with torch.no_grad():  # a rank's rows of qkv next to each other: its heads' q, k and v
            for p in block.attention.qkv.parameters():
                parts = p.view(3, ranks, -1, *p.shape[1:]).transpose(0, 1)
                p.copy_(parts.reshape(p.shape))
        parallelize_module(block, mesh, {
            "attention.qkv": ColwiseParallel(), "attention.proj": RowwiseParallel(),
            "mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel(),
        })  # fmt: skip
    # Fused is for one kind of tensor: blocks are DTensors, the rest is not.
    cut = [p for block in model.blocks for n, p in block.named_parameters() if _is_cut(p)]
    whole = [p for p in model.parameters() if not _is_cut(p)]
    return model, [torch.optim.AdamW(some, lr=lr, fused=True) for some in (cut, whole)]


def _is_cut(parameter: Any) -> bool:
    return type(parameter.data).__name__ == "DTensor"


def their_step(context: Any, plan: pl.Plan) -> Callable[[int], float]:
    """A function of the step that trains torch's side and gives the loss."""
    from paralab.model import reference

    model, optimizers = cut_by_dtensor(context.world_size)

    def step(number: int) -> float:
        for optimizer in optimizers:
            optimizer.zero_grad()
        (batch,) = reference.batches(MODEL, step=number, microbatch_size=BATCH)
        loss = model(*batch)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss.item()

    return step


def our_step(context: Any, plan: pl.Plan) -> Callable[[int], float]:
    """The same of this side. Only one rank says the loss."""
    from paralab.interpret.train import Trainer

    trainer = Trainer(context, MODEL, plan)
    return lambda number: (trainer.step(number) or [float("nan")])[0]


SIDES = {"ours": our_step, "theirs": their_step}


def turns(context: Any, ours_first: bool) -> dict[str, list[float]]:
    """Seconds per step of each turn on this rank."""
    plan = pl.Plan(tp=context.world_size, microbatch_size=BATCH)
    order = SIDES if ours_first else reversed(SIDES)
    both = {side: SIDES[side](context, plan) for side in order}
    for step in range(3):  # the same training
        ours, theirs = both["ours"](step), both["theirs"](step)
        assert context.rank or abs(ours - theirs) < 1e-3, (step, ours, theirs)
    return take_turns({side: both[side] for side in SIDES}, steps=STEPS)


def measure() -> list[dict]:
    rows = []
    for ranks in (2, 4):
        ours, theirs = slowest_rank(turns, ranks, ())
        note = (f"s per step of the slowest of {ranks} ranks, gloo, "
                f"{MODEL.num_params / 1e6:.1f} M parameters, AdamW")  # fmt: skip
        name = f"tensor parallel 1D, {ranks} ranks"
        rows.append(row(name, "torch parallelize_module (DTensor)", ours, theirs, note))
    return rows


if __name__ == "__main__":
    for r in measure():
        print(r["name"], r["peer"], f"{r['ratio']:.3f}", r["note"], sep="  ")
