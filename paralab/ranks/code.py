"""What is sent to a rank by value: functions and classes of a notebook, and where they stand.

cloudpickle leaves the file of such code out from version 3.1.3 on. A traceback on a rank shows the
cell and its line, and needs the name under which the notebook's kernel knows the cell. A function
with a cache (functools.cache) would travel as its name: it is made again, with an empty cache.
"""

from __future__ import annotations

import functools
import io
from collections import ChainMap
from collections.abc import Callable
from types import CodeType
from typing import Any

import cloudpickle


def placed(file: str, kind: Any, args: tuple) -> CodeType:
    """Code as it was made, with the name of its file."""
    return kind(*args).replace(co_filename=file)


def _reduce(code: CodeType) -> tuple:
    kind, args, *_ = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return placed, (code.co_filename, kind, args)


def kept(function: Callable[..., Any], name: str) -> functools.cached_property:
    """A cached property, which holds a lock in Python 3.11."""
    made = functools.cached_property(function)
    made.attrname = name
    return made


def _reduce_kept(value: functools.cached_property) -> tuple:
    return kept, (value.func, value.attrname)


CACHED = (type(functools.cache(_reduce)),)


def cached(how: dict[str, Any], make: Callable[..., Any], args: tuple) -> Any:
    """The cache around a function whose globals are still to come: it may be one of them itself."""
    return functools.lru_cache(**how)(make(*args))


def filled(function: Any, state: tuple) -> None:
    fill, own = state
    fill(function.__wrapped__, own)
    functools.update_wrapper(function, function.__wrapped__)


class _Pickler(cloudpickle.Pickler):
    dispatch_table = ChainMap(
        {CodeType: _reduce, functools.cached_property: _reduce_kept},
        cloudpickle.Pickler.dispatch_table,
    )

    def reducer_override(self, value: Any) -> Any:
        made = NotImplemented
        if isinstance(value, CACHED) and value.__module__ == "__main__":
            made = super().reducer_override(value.__wrapped__)
        if made is NotImplemented:
            return super().reducer_override(value)
        make, args, state, *_, fill = made
        how = value.cache_parameters()
        return cached, (how, make, args), (fill, state), None, None, filled


def pickled(value: Any) -> bytes:
    """``value`` as bytes that a rank can load. Raises what cannot be pickled."""
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()
