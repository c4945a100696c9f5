"""The pieces of a training's state that a rank keeps: from its units to boxes of parameters.

A training's state belongs to the model, not to the plan. Under any plan a rank keeps consecutive
elements of some parameters, and a checkpoint stores them as boxes of the whole parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import Tensor

from paralab.interpret.state import State
from paralab.parallel.layouts import box_shape, holding
from paralab.spec import TIED


class Piece(NamedTuple):
    """A box of one parameter that this rank keeps, and its optimizer state.

    name     the parameter's in the single-device model
    offsets  of the box in the whole parameter (qkv's three parts are a dimension of their own)
    weight   (...) a view in the box's shape: filling it changes what the rank trains
    state    {"exp_avg", "exp_avg_sq"}, likewise views; with "master", the weight in fp32, where
             ``weight`` is rounded from it
    """

    name: str
    offsets: tuple[int, ...]
    weight: Tensor
    state: Mapping[str, Tensor]


def boxes(
    shape: tuple[int, ...], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offsets, sizes) of the boxes that elements start to stop of a flattened tensor consist of,
    in order: the end of a row, whole rows, the beginning of a row.
    """
    inner = shape[1:]
    if not inner:
        yield (start,), (stop - start,)
        return
    row = math.prod(inner)
    while start < stop:
        first, begin = divmod(start, row)
        rows = 0 if begin else (stop - start) // row
        if rows:
            yield (first, *[0] * len(inner)), (rows, *inner)
        else:
            for offsets, sizes in boxes(inner, begin, min(begin + stop - start, row)):
                yield (first, *offsets), (1, *sizes)
        start = min(stop, (first + max(rows, 1)) * row)


def pieces(state: State) -> Iterator[Piece]:
    """The pieces of the training's state that a rank keeps, to be read or filled."""
    program = state.program
    for u, name, start, count, first in program.places(state.pp, state.index):
        real = TIED[0] if program.spec.tied and name == TIED[1] else name
        held = holding(program.spec, program.plan, real, state.tp)
        parts, at = state.kept(u, name, slice(start, start + count)), 0
        for offsets, box in boxes(box_shape(held.box), first, first + count):
            size = math.prod(box)
            views = {kind: part[at : at + size].view(box) for kind, part in parts.items()}
            corner = tuple(o + part.start for o, part in zip(offsets, held.box, strict=True))
            yield Piece(real, corner, views.pop("weight"), views)
            at += size
