"""What Python does at a program's end, for a program in a process that lives on.

A launched rank waits until all ranks are done, and is killed then. A script in it expects what
comes after its last line: its pools of workers end, its threads are waited for, the functions that
it has registered are called, its files are written out.
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
    """All of this at the end of the block; if that has raised, nobody waits for its threads, which
    may themselves wait for what will not come.
    """
    called: list[tuple[Callable[..., Any], tuple, dict]] = []
    before, own = set(threading.enumerate()), (atexit.register, atexit.unregister)

    def register(function: Callable[..., Any], *args: Any, **named: Any) -> Callable[..., Any]:
        called.append((function, args, named))
        return function

    def unregister(function: Callable[..., Any]) -> None:
        called[:] = [one for one in called if one[0] != function]
        own[1](function)

    atexit.register, atexit.unregister = register, unregister
    try:
        yield
        for end in reversed(getattr(threading, "_threading_atexits", ())):
            end()  # as Python does first: a thread of a pool ends when it is told to
        for thread in set(threading.enumerate()) - before:
            if not thread.daemon:
                thread.join()
    finally:
        while called:
            function, args, named = called.pop()
            try:
                function(*args, **named)
            except Exception:
                traceback.print_exc()
        atexit.register, atexit.unregister = own
        for file in gc.get_objects():  # also what nobody has any more: a file in a cycle loses it
            if issubclass(type(file), io.IOBase):
                with contextlib.suppress(OSError, ValueError):  # closed, or not for writing
                    file.flush()
