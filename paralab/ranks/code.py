"""Pickling what a rank receives by value: the functions and classes of a notebook or script.

cloudpickle omits the file name of such code from version 3.1.3 on. This pickler keeps it: by that
name a traceback on a rank finds the notebook cell and shows its line. A function with a cache
(functools.cache) would be pickled by its name, which a rank cannot import; this pickler sends the
function itself, and the rank gives it an empty cache.
"""

from __future__ import annotations

import functools
import io
from collections import ChainMap
from collections.abc import Callable
from types import CodeType
from typing import Any

import cloudpickle


def code_with_file(file: str, make: Any, args: tuple) -> CodeType:
    return make(*args).replace(co_filename=file)


def _reduce_code(code: CodeType) -> tuple:
    make, args, *_ = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return code_with_file, (code.co_filename, make, args)


def _reduce_cached_property(value: functools.cached_property) -> tuple:
    """In Python 3.11 the object itself holds a lock, which cannot be pickled."""
    return functools.cached_property, (value.func,), {"attrname": value.attrname}


def with_cache(parameters: dict[str, Any], make: Callable[..., Any], args: tuple) -> Any:
    """A function with its cache, still without globals: the function may be one of them itself."""
    return functools.lru_cache(**parameters)(make(*args))


def fill(cached: Any, state: tuple) -> None:
    """Give the function inside the cache its state: globals, defaults, docstring."""
    fill_function, function_state = state
    fill_function(cached.__wrapped__, function_state)
    functools.update_wrapper(cached, cached.__wrapped__)


class _Pickler(cloudpickle.Pickler):
    dispatch_table = ChainMap(
        {CodeType: _reduce_code, functools.cached_property: _reduce_cached_property},
        cloudpickle.Pickler.dispatch_table,
    )

    def reducer_override(self, value: Any) -> Any:
        reduced = NotImplemented
        if isinstance(value, functools._lru_cache_wrapper) and value.__module__ == "__main__":
            reduced = super().reducer_override(value.__wrapped__)
        if reduced is NotImplemented:
            return super().reducer_override(value)
        make, args, state, *_, fill_function = reduced
        parameters = value.cache_parameters()
        return with_cache, (parameters, make, args), (fill_function, state), None, None, fill


def pickled(value: Any) -> bytes:
    """``value`` as bytes that a rank can load. Raises the pickler's error if it cannot be."""
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()
