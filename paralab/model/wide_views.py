"""Weights that a block of the user's own sees as wider numbers, as complex ones, wherever they lie.

torch sees two real numbers as a complex one where an even count of them lies before, in a storage.
A module's parameter begins a storage; on a rank it lies in its unit's flat buffer, behind any
count. There the module is given a copy, as backward is (custom.py), which no prediction has.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


def wide_views(weights: Iterable[Tensor]) -> AbstractContextManager:
    """Within, such views of these weights are possible. Most begin at even places: no mode then."""
    if any(w.storage_offset() % 2 for w in weights):
        return _Copying()
    return contextlib.nullcontext()


class _Copying(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if (size := _width(func, args)) and args[0].storage_offset() * args[0].itemsize % size:
            args = (args[0].clone(), *args[1:])
        return func(*args, **(kwargs or {}))


def _width(func: Any, args: tuple) -> int:
    """Bytes of the numbers that a tensor is to be seen as; 0 of any other call."""
    if func is torch.view_as_complex and args:
        return 2 * args[0].itemsize
    if func is torch.Tensor.view and isinstance(args[-1], torch.dtype):
        return args[-1].itemsize
    return 0
