"""What is sent to a rank by value: functions and classes of a notebook, and where they stand.

cloudpickle leaves the file of such code out from version 3.1.3 on. A traceback on a rank shows the
cell and its line, and needs the name under which the notebook's kernel knows the cell.
"""

from __future__ import annotations

import io
from collections import ChainMap
from types import CodeType
from typing import Any

import cloudpickle


def placed(file: str, kind: Any, args: tuple) -> CodeType:
    """Code as it was made, with the name of its file."""
    return kind(*args).replace(co_filename=file)


def _reduce(code: CodeType) -> tuple:
    kind, args, *_ = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return placed, (code.co_filename, kind, args)


class _Pickler(cloudpickle.Pickler):
    dispatch_table = ChainMap({CodeType: _reduce}, cloudpickle.Pickler.dispatch_table)


def pickled(value: Any) -> bytes:
    """``value`` as bytes that a rank can load. Raises what cannot be pickled."""
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()
