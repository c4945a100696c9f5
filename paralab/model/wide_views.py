"""Lets a user's block view its weights as wider numbers, say as complex ones, at any offset.

torch views pairs of real numbers as complex ones only if the view begins at an even offset of its
storage. A module's parameter has a storage of its own; on a rank it lies anywhere in its unit's
flat buffer. At an odd offset the module views a copy instead, as backward does (custom.py). No
prediction counts that copy.
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
    """A context in which such views of ``weights`` work; it does nothing where offsets are even."""
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
    """Bytes per number of the view that a call makes; 0 for a call that makes no such view."""
    if func is torch.view_as_complex and args:
        return 2 * args[0].itemsize
    if func is torch.Tensor.view and isinstance(args[-1], torch.dtype):
        return args[-1].itemsize
    return 0
