"""System settings of a rank's process, so that its times depend on nothing but its work."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal

RECEIVING = "gloo_tcp_loop"  # gloo's name for the thread of a group that receives


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


def end_with_parent(by: int = signal.SIGTERM) -> None:
    """Linux: let the kernel send this process a signal when the one that started it has ended, even
    by SIGKILL.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(1, by, 0, 0, 0)  # linux/prctl.h: PR_SET_PDEATHSIG


def separate_queues() -> None:
    """Before the GPU is used: let up to 32 of its streams have a queue each, not 8 for all. A wait
    at the head of a queue holds up the other streams in it.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def send_first() -> None:
    """Linux: give the receiving threads of all gloo groups made so far the lowest priority.

    While another thread sends on a connection, the receiving thread spins on the connection's lock.
    Where ranks share cores, an arriving message lets it preempt the sender, and it spins until its
    time slice ends: an all-reduce of four ranks on two cores takes twice as long.
    """
    try:
        threads = os.listdir("/proc/self/task")
    except OSError:  # not Linux
        return
    for thread in threads:
        # A thread that has just ended is skipped. A new one has the name of its process until it
        # sets its own, so this is called at each group.
        with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/comm") as file:
            if file.read().strip() == RECEIVING:
                os.setpriority(os.PRIO_PROCESS, int(thread), 19)  # the lowest
