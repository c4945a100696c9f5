"""The folder with the files of a run's offloaded states: made before the ranks, removed after them.

    <folder>/paralab-offload-k3x9/rank-0/states-1 ...

The process that launched the ranks removes it, however the run ends. If that process is killed, the
next run with the same parent folder removes it: a folder is in use only as long as its process
holds a lock on the file ``lock`` in it, and the operating system releases the lock when the process
ends. Torch-free.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from paralab import checks
from paralab.checks import illegal, mb
from paralab.report import output_files
from paralab.spec.tiers import Offload

NAME, _UNLOCKED, _LOCK = "paralab-offload-", ".paralab-new-", "lock"


def check(tiers: Offload | None, needed: int) -> None:
    """Raise ``ValueError`` if ``needed`` bytes cannot be written into the folder of ``tiers``."""
    if tiers is None or not tiers.uses("nvme"):
        return
    field = "offload['folder']"
    legal = "an existing folder that you may write to, with enough space for what is offloaded"
    base = checks.path(field, tiers.folder or tempfile.gettempdir(), legal).absolute()
    if not base.is_dir():
        raise illegal(field, str(base), "there is no such folder", legal)
    _sweep(base)
    output_files.check_folder(field, base, legal)
    free = shutil.disk_usage(base).free
    if needed > free:
        why = f"this plan's files take {mb(needed)}, but only {mb(free)} are free there"
        raise illegal(field, str(base), why, legal)


@contextlib.contextmanager
def folder(tiers: Offload | None) -> Iterator[str | None]:
    """A folder for this process alone, removed after the block; None if ``tiers`` uses no files."""
    if tiers is None or not tiers.uses("nvme"):
        yield None
        return
    base = Path(tiers.folder or tempfile.gettempdir()).expanduser().absolute()
    _sweep(base)
    new = Path(tempfile.mkdtemp(prefix=_UNLOCKED, dir=base))
    current = new
    try:
        with open(new / _LOCK, "w") as lock:
            with contextlib.suppress(OSError):  # a file system without locks: no run removes it
                fcntl.flock(lock, fcntl.LOCK_EX)
            current = new.rename(base / new.name.replace(_UNLOCKED, NAME, 1))
            yield str(current)
    finally:
        for _ in range(20):  # a rank that was stopped may still be writing
            shutil.rmtree(current, ignore_errors=True)
            if not current.exists():
                break
            time.sleep(0.05)


def _sweep(base: Path) -> None:
    """Remove the folders of processes that have ended."""
    for entry in base.glob(f"{NAME}*"):  # and none that waits for its lock
        with contextlib.suppress(OSError):  # another user's folder may not be readable
            if not (entry / _LOCK).exists():
                # Removed once, together with its lock, while a rank was still writing into it.
                shutil.rmtree(entry, ignore_errors=True)
                continue
            file = os.open(entry / _LOCK, os.O_RDWR)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its process lives
                shutil.rmtree(entry, ignore_errors=True)
            finally:
                os.close(file)
