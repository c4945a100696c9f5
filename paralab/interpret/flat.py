"""A unit's tensors as views into one flat buffer, which one collective moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from paralab.model.build import Model
from paralab.parallel.buckets import Unit

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Flat:
    """flat   (numel,)
    views  {full name of a parameter: its view, in its shape}
    fresh  names of the views that nothing was written into yet: of a new gradient all
    """

    def __init__(self, unit: Unit, flat: Tensor, model: Model) -> None:
        places, size = _places(unit, model)
        first = flat.storage_offset()
        self.flat, self.fresh = flat, set(unit.names)
        self.views = {
            name: flat.as_strided(shape, stride, first + at) for name, shape, stride, at in places
        }
        if size < flat.numel():  # padding
            flat[size:].zero_()


@lru_cache(maxsize=4096)
def _places(unit: Unit, model: Model) -> tuple[list[tuple], int]:
    """(name, shape, stride, first element) of the views, and the elements in all. A step makes new
    gradients, and this is half of what their views would cost.
    """
    places, at = [], 0
    for name in unit.names:
        shape = model.shapes[name]
        places.append((name, shape, [prod(shape[d + 1 :]) for d in range(len(shape))], at))
        at += prod(shape)
    return places, at


def flat_of(value: Any) -> Tensor:
    """The tensor that is moved or added where a value is: a unit's buffer, a state's last entry."""
    if isinstance(value, Flat):
        return value.flat
    return value[-1] if isinstance(value, tuple) else value


class Into:
    """Where an op's weight half puts its gradients: written the first time, added afterwards.

    names  {local: full name}
    flats  the gradients of units, one of which has a view of that name
    """

    def __init__(self, names: Mapping[str, str], flats: Sequence[Flat]) -> None:
        self.names, self.flats = names, flats

    def _place(self, local: str) -> tuple[Tensor, bool]:
        name = self.names[local]
        for flat in self.flats:
            if name in flat.views:
                break
        first = name in flat.fresh
        if first:
            flat.fresh.remove(name)
        return flat.views[name], first

    def add(self, local: str, grad: Tensor) -> None:
        view, first = self._place(local)
        (view.copy_ if first else view.add_)(grad)

    def add_product(self, local: str, a: Tensor, b: Tensor) -> None:
        """a @ b, without a tensor for the product, unless it is rounded to fewer bits first."""
        if self.flats[0].flat.dtype != a.dtype:
            self.add(local, a @ b)
            return
        view, first = self._place(local)
        if first:
            torch.mm(a, b, out=view)
        else:
            view.addmm_(a, b)
