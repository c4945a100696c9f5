"""The folder that a run's offloaded states lie in: made before the ranks, gone after them.

    <folder>/paralab-offload-k3x9/rank-0/states-1 ...

It goes when the run ends, however it ends: who launched the ranks removes it, and if that process
is killed too, the next run with the same folder does. A folder belongs to a process that lives: it
holds a lock on the file ``lock`` in it, which the operating system takes back when the process
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
from paralab.checks import illegal
from paralab.report import written
from paralab.spec.tiers import Offload

NAME, _UNLOCKED, _LOCK = "paralab-offload-", ".paralab-new-", "lock"


def check(tiers: Offload | None, needed: int) -> None:
    """Raise ``ValueError`` if ``needed`` bytes cannot be written where ``tiers`` says."""
    if tiers is None or not tiers.uses("nvme"):
        return
    field = "offload['folder']"
    legal = "a folder that exists, that you may write to, with room for what is offloaded"
    base = checks.path(field, _base(tiers), legal)
    if not base.is_dir():
        raise illegal(field, str(base), "there is no such folder", legal)
    _sweep(base)
    written.check_folder(field, base, legal)
    free = shutil.disk_usage(base).free
    if needed > free:
        takes, there = (f"{size / 1e6:,.0f} MB" for size in (needed, free))
        why = f"this plan's files take {takes}, and {there} are free there"
        raise illegal(field, str(base), why, legal)


@contextlib.contextmanager
def folder(tiers: Offload | None) -> Iterator[str | None]:
    """A folder of this process's own for as long as the block runs; None if no file is written."""
    if tiers is None or not tiers.uses("nvme"):
        yield None
        return
    base = _base(tiers)
    _sweep(base)
    new = Path(tempfile.mkdtemp(prefix=_UNLOCKED, dir=base))
    mine = new
    try:
        with open(new / _LOCK, "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            mine = new.rename(base / new.name.replace(_UNLOCKED, NAME, 1))
            yield str(mine)
    finally:
        for _ in range(20):  # a rank that was stopped may be at its last write
            shutil.rmtree(mine, ignore_errors=True)
            if not mine.exists():
                break
            time.sleep(0.05)


def _base(tiers: Offload) -> Path:
    return Path(tiers.folder or tempfile.gettempdir()).expanduser().absolute()


def _sweep(base: Path) -> None:
    """Remove what processes that are gone have left."""
    for found in [*base.glob(f"{NAME}*"), *base.glob(f"{_UNLOCKED}*")]:
        with contextlib.suppress(OSError):  # another user's folder may not even be looked into
            if found.name.startswith(NAME) and not (found / _LOCK).exists():
                shutil.rmtree(found, ignore_errors=True)  # removed once, while a rank still wrote
                continue
            file = os.open(found / _LOCK, os.O_RDWR)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its process lives
                shutil.rmtree(found, ignore_errors=True)
            finally:
                os.close(file)
