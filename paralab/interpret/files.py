"""The file tier: tensors in plain files, read and written as a whole, in blocks.

Each tensor has a file of fixed size, whose room is reserved when it is made: so a full disk is an
error before training begins. Bytes bypass the operating system's page cache (O_DIRECT) and move
directly between the tensor's memory and the disk: nothing copies them, and no uncounted memory
answers in place of the disk. O_DIRECT needs addresses and lengths in whole pages. So the last bytes
of a file, tensors that do not begin a page (`aligned`), and file systems without O_DIRECT use the
cache, which then drops the bytes. Either way a write is on the disk (fdatasync) when it returns.
``cached`` leaves all of that to the operating system. Calls block; the lane "disk" (lanes.py) makes
them asynchronous.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from paralab.checks import mb

BLOCK = 8 * 2**20  # bytes per call of the operating system
PAGE = 4096  # bytes; whole pages may bypass the page cache
_DIRECT = getattr(os, "O_DIRECT", 0)  # macOS has none


class Files:
    """The files of one rank, in a folder of their own, which is made here and removed by `close`.

    Every ``OSError`` says which file, what is wrong, and what to do.
    """

    def __init__(self, folder: str | os.PathLike[str], *, cached: bool = False) -> None:
        self.folder, self.cached = Path(folder), cached
        self.sizes: dict[str, int] = {}
        with self._explained("make", ""):
            self.folder.mkdir(parents=True, exist_ok=True)
        self._direct = 0 if cached else _direct(self.folder)

    def create(self, name: str, size: int) -> None:
        """Make a file of ``size`` bytes, with undefined contents."""
        new = os.O_RDWR | os.O_CREAT | os.O_EXCL
        with self._explained("reserve room for", name), self._open(name, new) as file:
            if size and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file, 0, size)
            else:
                os.ftruncate(file, size)
        self.sizes[name] = size

    def write(self, name: str, tensor: Tensor) -> None:
        """Overwrite the whole file with the bytes of a contiguous tensor on the host."""
        with self._explained("write", name), self._open(name, os.O_WRONLY) as file:
            self._move(os.pwritev, file, tensor)
            if not self.cached:
                getattr(os, "fdatasync", os.fsync)(file)
            self._forget(file)

    def read(self, name: str, tensor: Tensor) -> None:
        """Overwrite the tensor's bytes with those of the whole file."""
        with self._explained("read", name), self._open(name, os.O_RDONLY) as file:
            self._move(os.preadv, file, tensor)
            self._forget(file)

    def mapped(self, name: str, dtype: torch.dtype) -> Tensor:
        """The file mapped into memory as a tensor, (size / itemsize,): writing to it writes to the
        file. For results and checkpoints, not for training.
        """
        with self._explained("map", name):
            if (found := (self.folder / name).stat().st_size) != self.sizes[name]:
                raise OSError(f"it has {found:,} of {self.sizes[name]:,} bytes")
            count = self.sizes[name] // dtype.itemsize
            return torch.from_file(str(self.folder / name), shared=True, size=count, dtype=dtype)

    def close(self) -> None:
        """Remove the folder and all that is in it."""
        shutil.rmtree(self.folder, ignore_errors=True)

    # ---- inside --------------------------------------------------------------------------------
    def _move(self, call: Callable[..., int], file: int, tensor: Tensor) -> None:
        """All bytes through ``call``, os.preadv or os.pwritev; whole pages past the page cache."""
        data = memoryview(tensor.detach().view(-1).view(torch.uint8).numpy())
        whole = len(data) // PAGE * PAGE if self._direct and tensor.data_ptr() % PAGE == 0 else 0
        flags, at = fcntl.fcntl(file, fcntl.F_GETFL), 0
        for end, how in ((whole, flags | self._direct), (len(data), flags)):
            if at < end:
                fcntl.fcntl(file, fcntl.F_SETFL, how)
            while at < end:
                count = call(file, [data[at : min(at + BLOCK, end)]], at)
                at += count
                if count == 0 or (at < whole and at % PAGE):
                    raise OSError(
                        f"it ends after {at:,} of {len(data):,} bytes: it has been cut short"
                    )

    @contextlib.contextmanager
    def _open(self, name: str, how: int) -> Iterator[int]:
        # Opened for every call, so that a folder that has been removed is noticed.
        file = os.open(self.folder / name, how, 0o600)
        try:
            yield file
        finally:
            os.close(file)

    def _forget(self, file: int) -> None:
        if not self.cached and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)

    @contextlib.contextmanager
    def _explained(self, what: str, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            why = error.strerror or str(error)
            room = ""
            with contextlib.suppress(OSError):
                room = f" ({mb(shutil.disk_usage(self.folder).free)} free there)"
            raise OSError(
                f"offload cannot {what} {self.folder / name}: {why}{room}. Its folder, "
                "which is TMPDIR unless offload names one, needs a disk that has enough room and "
                "stays available. Checkpoints that were saved are intact: resume from the last one"
            ) from error


def _direct(folder: Path) -> int:
    """The flag to open files in this folder without page cache; 0 if the file system has none."""
    probe = folder / "probe"
    try:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | _DIRECT, 0o600))
        return _DIRECT
    except OSError:
        return 0
    finally:
        probe.unlink(missing_ok=True)


def aligned(size: int) -> Tensor:
    """Memory of ``size`` bytes from the start of a page on, (size,), uint8; no ledger sees it."""
    room = np.empty(size + PAGE, dtype=np.uint8)
    skip = -room.ctypes.data % PAGE
    return torch.from_numpy(room[skip : skip + size])
