"""Python's work at the end of a program, for a program whose process goes on.

A launched rank waits until all ranks are done and is then killed, so Python never ends by itself. A
script that ran in it expects that after its last line its pools of workers end, its threads are
joined, its functions registered with atexit are called, and its files are flushed.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def ending() -> Iterator[None]:
    """Do all of this at the end of the block. If the block raises, its pools and threads are not
    waited for: they may wait for something that will never come.
    """
    registered: list[tuple[Callable[..., Any], tuple, dict]] = []
    before, originals = set(threading.enumerate()), (atexit.register, atexit.unregister)

    def register(function: Callable[..., Any], *args: Any, **named: Any) -> Callable[..., Any]:
        registered.append((function, args, named))
        return function

    def unregister(function: Callable[..., Any]) -> None:
        registered[:] = [call for call in registered if call[0] != function]
        originals[1](function)

    atexit.register, atexit.unregister = register, unregister
    try:
        yield
        for end in reversed(getattr(threading, "_threading_atexits", ())):
            end()  # first, as in Python: it tells the threads of a pool to end
        for thread in set(threading.enumerate()) - before:
            if not thread.daemon:
                thread.join()
    finally:
        while registered:
            function, args, named = registered.pop()
            try:
                function(*args, **named)
            except Exception:
                traceback.print_exc()
        atexit.register, atexit.unregister = originals
        # All files, even unreachable ones: a file in a reference cycle would lose its buffer.
        for file in gc.get_objects():
            if issubclass(type(file), io.IOBase):
                with contextlib.suppress(OSError, ValueError):  # closed, or not for writing
                    file.flush()
