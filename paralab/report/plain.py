"""What JSON can hold: plain values, and what is read back checked by its type."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import NoneType
from typing import Any

from paralab.checks import illegal

PLAIN = {bool, int, float, str, NoneType}  # what JSON knows as it is


def typed(body: Mapping[str, Any], name: str, kind: type | tuple[type, ...]) -> Any:
    """``body[name]`` if it is there and is a ``kind``, or the ValueError that says so."""
    if name not in body:
        raise ValueError(f"{name} is missing")
    value = body[name]
    if not isinstance(value, kind) or isinstance(value, bool):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        said = " or ".join("nothing" if k is type(None) else k.__name__ for k in kinds)
        raise ValueError(f"{name} is {type(value).__name__}, not {said}")
    return value


def plain(value: Any, where: str) -> Any:
    """``value`` as JSON knows it: dict with text keys, list, text, number, yes/no, None.

    Done when a report is made, so that what is saved and loaded again is equal. Raises ValueError
    naming the place of a value that JSON has no form for.
    """
    if isinstance(value, Mapping):
        return {str(k): plain(v, f"{where}[{k!r}]") for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        if set(map(type, value)) <= PLAIN:  # the nodes of thousands of ranks
            return list(value)
        return [plain(v, f"{where}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a NumPy scalar
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    legal = "text, numbers, yes/no, None, and lists and dicts of them"
    raise illegal(where, value, f"{type(value).__name__} has no plain form", legal)
