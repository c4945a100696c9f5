"""What JSON can hold: plain values, and NumPy arrays as dtype, shape and base64 of their bytes.

Every bit comes back. Only arrays of numbers are written and read, without pickle, so a file never
runs code. They take four thirds of their bytes on disk.
"""

from __future__ import annotations

import base64
import binascii
import math
import os
from collections.abc import Mapping
from types import NoneType
from typing import TYPE_CHECKING, Any

from paralab.checks import illegal

if TYPE_CHECKING:
    import numpy as np

PLAIN = {bool, int, float, str, NoneType}  # what JSON knows as it is
_ARRAY_KINDS = "biufc"  # yes/no, whole, unsigned, float, complex


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


def encode_arrays(arrays: Mapping[str, np.ndarray] | None) -> dict[str, Any] | None:
    """The arrays as JSON values. Raises ValueError on an array that holds no numbers."""
    if arrays is None:
        return None
    import numpy as np

    encoded = {}
    for name, array in arrays.items():
        array = np.asarray(array)
        if array.dtype.kind not in _ARRAY_KINDS:
            raise ValueError(
                f"array {name!r}: {array.dtype} is not a number type; it cannot be saved"
            )
        little = array.astype(array.dtype.newbyteorder("<"), order="C", copy=False)
        encoded[name] = {
            "dtype": little.dtype.str,
            "shape": list(little.shape),
            "data": base64.b64encode(little.tobytes()).decode(),
        }
    return encoded


def decode_arrays(body: Mapping[str, Any], field: str) -> dict[str, np.ndarray] | None:
    """The inverse, of ``body[field]``. Raises ValueError saying which array is wrong and how."""
    found = typed(body, field, (dict, type(None)))
    if found is None:
        return None
    import numpy as np

    arrays = {}
    for name, entry in found.items():
        where = f"{field}[{name!r}]"
        if not isinstance(entry, dict):
            raise ValueError(f"{where} is not an array")
        shape = typed(entry, "shape", list)
        try:
            dtype = np.dtype(typed(entry, "dtype", str))
            raw = base64.b64decode(typed(entry, "data", str), validate=True)
        except (TypeError, SyntaxError, binascii.Error) as error:
            raise ValueError(f"{where}: {error}") from None
        whole = all(type(n) is int and n >= 0 for n in shape)
        if dtype.kind not in _ARRAY_KINDS or not whole:
            raise ValueError(f"{where}: dtype {dtype}, shape {shape} is not an array of numbers")
        if math.prod(shape) * dtype.itemsize != len(raw):
            raise ValueError(f"{where}: {len(raw)} bytes do not fill shape {shape} of {dtype}")
        native = dtype.newbyteorder("=")
        arrays[name] = np.frombuffer(raw, dtype).astype(native).reshape(shape)
    return arrays


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
