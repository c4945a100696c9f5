"""What a rank asks of the system that it runs on, so that its times are those of its work."""

from __future__ import annotations

import contextlib
import ctypes
import os

RECEIVING = "gloo_tcp_loop"  # a group's thread that receives, as it is called by gloo
ENOUGH = 4  # looks at a thread: one that has not taken this name by then will not
_looks: dict[str, int] = {}  # at threads of this process, by `send_first`


def keep_pages() -> None:
    """glibc: keep freed memory instead of handing it back page by page.

    A training step allocates and frees the same tensors over and over. With the default thresholds
    each step faults thousands of pages in again, and compute times vary by tens of per cent.
    """
    with contextlib.suppress(AttributeError, OSError):  # not glibc
        mallopt = ctypes.CDLL(None).mallopt
        trim_threshold, top_pad, mmap_threshold = -1, -2, -3  # malloc.h
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(top_pad, 64 * 2**20)
        mallopt(mmap_threshold, 32 * 2**20)  # the largest that glibc takes


def send_first() -> None:
    """Linux: the threads in which gloo receives give way to all others. For all groups so far.

    Such a thread tries the lock of a connection over and over while another thread sends on it.
    Where ranks share cores, a message that arrives puts it in the place of the sender, and it spins
    until its turn is over: an all-reduce of four ranks on two cores takes twice as long.
    """
    try:
        threads = set(os.listdir("/proc/self/task"))
    except OSError:  # not Linux
        return
    for gone in _looks.keys() - threads:  # the system may give a number again
        del _looks[gone]
    for thread in threads:
        looks = _looks.get(thread, 0)
        if looks < ENOUGH:  # a thread has its process's name until it takes its own
            _looks[thread] = looks + 1
            if _name(thread) == RECEIVING:
                _looks[thread] = ENOUGH
                with contextlib.suppress(OSError):  # it has just ended
                    os.setpriority(os.PRIO_PROCESS, int(thread), 19)  # the least


def _name(thread: str) -> str:
    with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/comm") as file:
        return file.read().strip()
    return ""  # one that has just ended
