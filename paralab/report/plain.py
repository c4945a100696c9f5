"""Plain JSON values: converting to them, and checking their types when they are read back."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import NoneType
from typing import Any

from paralab.checks import illegal

PLAIN = {bool, int, float, str, NoneType}  # types that need no conversion


def typed(body: Mapping[str, Any], name: str, kind: type | tuple[type, ...]) -> Any:
    """``body[name]``. Raises ValueError if it is missing or is not a ``kind``; a bool never is."""
    if name not in body:
        raise ValueError(f"{name} is missing")
    value = body[name]
    if not isinstance(value, kind) or isinstance(value, bool):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        legal = " or ".join("None" if k is type(None) else k.__name__ for k in kinds)
        raise ValueError(f"{name} has type {type(value).__name__}, not {legal}")
    return value


def plain(value: Any, where: str) -> Any:
    """``value`` in the types of JSON: dict with text keys, list, text, number, yes/no, None.

    A report converts its values when it is made, so it is equal to itself saved and loaded again.
    Raises ValueError, which says where (``where[key]...``) a value is that JSON has no form for.
    """
    if isinstance(value, Mapping):
        return {str(k): plain(v, f"{where}[{k!r}]") for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        if set(map(type, value)) <= PLAIN:  # fast for long lists, such as the nodes of all ranks
            return list(value)
        return [plain(v, f"{where}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a NumPy scalar
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    legal = "strings, numbers, booleans, None, and lists and dicts of them"
    raise illegal(where, value, f"{type(value).__name__} has no plain form", legal)
