"""What a rank keeps of a training, piece by piece: what a checkpoint is made of, under any plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from paralab.train import Trainer


class Piece(NamedTuple):
    """Consecutive elements of one parameter that this rank keeps, and their optimizer state.

    name    the parameter's in the single-device model
    start   first element, counted in the flattened parameter
    weight  (n,) a view: filling it changes what the rank trains
    state   {"exp_avg": (n,), "exp_avg_sq": (n,)}, views; with "master", the weight in fp32 that
            ``weight`` is rounded from
    """

    name: str
    start: int
    weight: Tensor
    state: Mapping[str, Tensor]


def cut(sizes: Mapping[str, int], start: int, count: int) -> Iterator[tuple[str, int, slice]]:
    """(name, its first element there, where in the part) of what lies in a part of a flat buffer.

    sizes  elements of the buffer's tensors, one after the other; the part is ``count`` elements
           from ``start``
    """
    offset = 0
    for name, size in sizes.items():
        first, end = max(offset, start), min(offset + size, start + count)
        if first < end:
            yield name, first - offset, slice(first - start, end - start)
        offset += size


def pieces(trainer: Trainer) -> list[Piece]:
    """The training's state as far as a rank keeps it, to be read or filled.

    Of ZeRO's flat buffers that is its own part, wherever that cuts through a parameter.
    """
    flats = trainer.sync.flats if trainer.plan.zero_stage else []
    inside = {name for flat in flats for name in flat.unit.names}
    places = [(name, 0, slice(p.numel()), p) for name, p in trainer.named.items()
              if name not in inside]  # fmt: skip
    for flat in flats:
        sizes = {n: p.numel() for n, p in zip(flat.unit.names, flat.parameters, strict=True)}
        count = flat.own.numel()
        found_in = cut(sizes, flat.group.index * count, count)
        places += [(name, start, where, flat.own) for name, start, where in found_in]
    found, masters = [], dict(zip(trainer.targets, trainer.update.masters, strict=True))
    for name, start, where, kept in places:
        if trainer.tied is not None and name == "head.output.weight":
            name = "embedding.token.weight"
        master = masters.get(kept, kept)
        tensors = {"weight": kept.detach(), **trainer.update.optimizer.state.get(master, {})}
        tensors |= {"master": master} if master is not kept else {}
        tensors.pop("step", None)
        parts = {kind: tensor.view(-1)[where] for kind, tensor in tensors.items()}
        found.append(Piece(name, start, parts.pop("weight"), parts))
    return found


def counters(trainer: Trainer) -> dict[str, float]:
    """What the optimizer counts, the same for every parameter and on every rank."""
    counts = {state["step"].item() for state in trainer.update.optimizer.state.values()}
    found = {"optimizer_steps": counts.pop()} if counts else {}
    if trainer.update.loss_scale is not None:
        scale = vars(trainer.update.loss_scale).items()
        found |= {f"loss_scale.{name}": tensor.item() for name, tensor in scale}
    return found


def restored(trainer: Trainer, step: int, counters: Mapping[str, float]) -> None:
    """Go on after ``step`` steps, whose state ``pieces`` was filled with."""
    trainer.first_step = step
    for state in trainer.update.optimizer.state.values():
        state["step"].fill_(counters["optimizer_steps"])
    scale = vars(trainer.update.loss_scale) if trainer.update.loss_scale else {}
    for name, tensor in scale.items():
        if f"loss_scale.{name}" in counters:  # a training that was fp16 before
            tensor.fill_(counters[f"loss_scale.{name}"])
    with torch.no_grad():
        for target, master in zip(trainer.targets, trainer.update.masters, strict=True):
            target.copy_(master)
    if trainer.plan.zero_stage in (1, 2):
        for flat in trainer.sync.flats:
            flat.group.all_gather(flat.full, flat.own, phase="setup").wait()
