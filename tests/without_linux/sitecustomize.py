"""On PYTHONPATH this folder hides from Python, in ranks too, what only Linux has."""

from __future__ import annotations

import builtins
import functools
import io
import os
from collections.abc import Callable
from typing import Any

FOLDERS = ("/proc", "/sys", "/dev/shm")
NAMES = (
    *("sched_getaffinity", "sched_setaffinity", "O_DIRECT"),
    *("posix_fadvise", "posix_fallocate", "POSIX_FADV_DONTNEED"),
)


def hiding(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def hidden(path: Any = ".", *args: Any, **settings: Any) -> Any:
        if not isinstance(path, int) and os.fspath(path or "").startswith(FOLDERS):
            raise FileNotFoundError(2, "hidden from this process", path)
        return function(path, *args, **settings)

    return hidden


for name in NAMES:
    if hasattr(os, name):
        delattr(os, name)
io.open = builtins.open = hiding(builtins.open)
for name in ("open", "stat", "lstat", "listdir", "scandir", "statvfs"):
    setattr(os, name, hiding(getattr(os, name)))
