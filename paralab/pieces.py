"""What a rank keeps of a training, piece by piece: what a checkpoint is made of, under any plan."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from paralab.parallel.buckets import cut
from paralab.parallel.layouts import box_shape

if TYPE_CHECKING:
    from paralab.train import Trainer


class Place(NamedTuple):
    """Where consecutive elements of one of the rank's own parameters lie.

    name   the parameter's, in this rank's stages
    start  first element, counted in the rank's own tensor, flattened
    where  these elements in ``kept``
    kept   what is stored: the parameter, or ZeRO's part of a flat buffer, which its optimizer
           updates
    """

    name: str
    start: int
    where: slice
    kept: Tensor


def places(named: Mapping[str, Tensor], flats: Sequence[Any] = ()) -> list[Place]:
    """Where everything lies that a rank keeps of its parameters.

    flats  ZeRO's flat buffers: of these a rank keeps its own part, wherever that cuts through a
           parameter
    """
    inside = {name for flat in flats for name in flat.unit.names}
    found = [Place(name, 0, slice(0, p.numel()), p) for name, p in named.items()
             if name not in inside]  # fmt: skip
    for flat in flats:
        sizes = {n: p.numel() for n, p in zip(flat.unit.names, flat.parameters, strict=True)}
        count = flat.own.numel()
        mine = cut(sizes, flat.group.index * count, count)
        found += [Place(name, start, where, flat.own) for name, start, where in mine]
    return found


class Piece(NamedTuple):
    """A box of one parameter that this rank keeps, and its optimizer state.

    name     the parameter's in the single-device model
    offsets  of the box in the whole parameter (qkv's three parts are a dimension of their own)
    weight   (...) a view of the box's shape: filling it changes what the rank trains
    state    {"exp_avg", "exp_avg_sq"}, such views too; with "master", the weight in fp32 that
             ``weight`` is rounded from
    """

    name: str
    offsets: tuple[int, ...]
    weight: Tensor
    state: Mapping[str, Tensor]


def boxes(
    shape: tuple[int, ...], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offsets, sizes) of the boxes that elements start to stop of a flattened tensor fill, in
    order: the end of a row, whole rows, the beginning of a row.
    """
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    inner = shape[1:]
    row = math.prod(inner)

    def within(number: int, begin: int, end: int) -> Iterator[tuple]:
        for offsets, sizes in boxes(inner, begin, end):
            yield (number, *offsets), (1, *sizes)

    (first, left), (last, right) = divmod(start, row), divmod(stop, row)
    if first == last:
        yield from within(first, left, right)
        return
    if left:
        yield from within(first, left, row)
        first += 1
    if first < last:
        yield (first, *[0] * len(inner)), (last - first, *inner)
    if right:
        yield from within(last, 0, right)


def pieces(trainer: Trainer) -> list[Piece]:
    """The training's state as far as a rank keeps it, to be read or filled."""
    found, held_as = [], {}
    for name, start, where, kept in trainer.places:
        if trainer.model.tied and name == "head.output.weight":
            name = "embedding.token.weight"
        held = trainer.holding(name)
        if kept not in held_as:
            held_as[kept] = trainer.update.tensors_of(kept)
        parts = {kind: tensor.view(-1)[where] for kind, tensor in held_as[kept].items()}
        at = 0
        for offsets, sizes in boxes(box_shape(held.box), start, start + where.stop - where.start):
            count = math.prod(sizes)
            views = {kind: part[at : at + count].view(sizes) for kind, part in parts.items()}
            corner = tuple(o + part.start for o, part in zip(offsets, held.box, strict=True))
            found.append(Piece(name, corner, views.pop("weight"), views))
            at += count
    return found


def counters(trainer: Trainer) -> dict[str, float]:
    """What the optimizer counts, the same for every parameter and on every rank."""
    counts = {count.item() for count in trainer.update.counts()}
    found = {"optimizer_steps": counts.pop()} if counts else {}
    if trainer.update.loss_scale is not None:
        scale = vars(trainer.update.loss_scale).items()
        found |= {f"loss_scale.{name}": tensor.item() for name, tensor in scale}
    return found


def restored(trainer: Trainer, step: int, counters: Mapping[str, float]) -> None:
    """Go on after ``step`` steps, whose state ``pieces`` was filled with."""
    trainer.first_step = step
    for count in trainer.update.counts():
        count.fill_(counters["optimizer_steps"])
    scale = vars(trainer.update.loss_scale) if trainer.update.loss_scale else {}
    for name, tensor in scale.items():
        if f"loss_scale.{name}" in counters:  # a training that was fp16 before
            tensor.fill_(counters[f"loss_scale.{name}"])
    trainer.update.refresh()
    if trainer.plan.zero_stage in (1, 2):
        for flat in trainer.sync.flats:
            flat.group.all_gather(flat.full, flat.own, phase="setup").wait()
