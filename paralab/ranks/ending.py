"""Python's work at the end of a program, for a program whose process goes on.

A launched rank waits until all ranks are done and is then killed, so Python never ends by itself. A
script that ran in it expects that after its last line its pools of workers end, its threads are
joined, its functions registered with atexit are called, its temporary folders are removed, and its
files are flushed.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import threading
import weakref
from collections.abc import Iterator


@contextlib.contextmanager
def ending() -> Iterator[None]:
    """Do all of this at the end of the block. If the block raises, its pools and threads are not
    waited for: they may wait for something that will never come.
    """
    before = set(threading.enumerate())
    # What the process had registered that this one was forked from is left to that process.
    atexit._clear()
    for finalizer in list(weakref.finalize._registry):
        finalizer.atexit = False
    weakref.finalize._registered_with_atexit = False  # so that the next one registers them again
    try:
        yield
        for end in reversed(getattr(threading, "_threading_atexits", ())):
            end()  # first, as in Python: it tells the threads of a pool to end
        for thread in set(threading.enumerate()) - before:
            if not thread.daemon:
                thread.join()
    finally:
        atexit._run_exitfuncs()
        # All files, even unreachable ones: a file in a reference cycle would lose its buffer.
        for file in gc.get_objects():
            if issubclass(type(file), io.IOBase):
                with contextlib.suppress(OSError, ValueError):  # closed, or not for writing
                    file.flush()
