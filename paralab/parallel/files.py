"""The file tier: tensors in plain files, read and written whole, in blocks.

One file per tensor, of fixed size, its room reserved when it is made: a disk that is full says so
before training begins. A write is on its way to the disk when it returns, and has reached it
(fdatasync) two writes later, or with `sync`: nobody stands still for it. The page cache forgets
what was written or read, so that the next read comes from the disk and not from memory that
nobody counted (``cached`` leaves all that to the operating system). Nothing here is asynchronous:
the lane "disk" (lanes.py) is.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

import torch
from torch import Tensor

BLOCK = 8 * 2**20  # bytes per call of the operating system
UNSYNCED = 2  # writes that may be on their way


class Files:
    """The files of one rank, in a folder of their own, which is made here and removed by `close`.

    Every ``OSError`` says which file, what is wrong, and what to do.
    """

    def __init__(self, folder: str | os.PathLike[str], *, cached: bool = False) -> None:
        self.folder, self.cached = Path(folder), cached
        self.sizes: dict[str, int] = {}
        self._leaving: list[str] = []  # written, and not known to be on the disk
        with self._explained("make", ""):
            self.folder.mkdir(parents=True, exist_ok=True)

    def create(self, name: str, size: int) -> None:
        """A file of ``size`` bytes; what it holds is not defined."""
        with self._explained("reserve room for", name):
            file = os.open(self.folder / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                if size and hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file, 0, size)
                else:
                    os.ftruncate(file, size)
            finally:
                os.close(file)
        self.sizes[name] = size

    def write(self, name: str, tensor: Tensor) -> None:
        """The whole file becomes the tensor's bytes; contiguous, on the host."""
        data = _bytes(tensor)
        with self._explained("write", name), self._open(name, os.O_WRONLY) as file:
            at = 0
            while at < len(data):
                at += os.pwrite(file, data[at : at + BLOCK], at)
            self._forget(file)  # which starts to write out what is there
        if not self.cached:
            self._leaving.append(name)
            self.sync(keep=UNSYNCED)

    def sync(self, *, keep: int = 0) -> None:
        """All writes but the last ``keep`` are on the disk, and out of the page cache."""
        while len(self._leaving) > keep:
            name = self._leaving.pop(0)
            with self._explained("write", name), self._open(name, os.O_WRONLY) as file:
                getattr(os, "fdatasync", os.fsync)(file)
                self._forget(file)

    def read(self, name: str, tensor: Tensor) -> None:
        """The tensor's bytes become the whole file's."""
        if name in self._leaving:
            self.sync()
        data = _bytes(tensor)
        with self._explained("read", name), self._open(name, os.O_RDONLY) as file:
            if hasattr(os, "posix_fadvise"):  # ask for all of it at once, not as a reader comes by
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_WILLNEED)
            at = 0
            while at < len(data):
                count = os.preadv(file, [data[at : at + BLOCK]], at)
                if count == 0:
                    raise OSError(f"it ends after {at:,} of {len(data):,} bytes: somebody has cut "
                                  "it short")  # fmt: skip
                at += count
            self._forget(file)

    def mapped(self, name: str, dtype: torch.dtype) -> Tensor:
        """The file's contents as a tensor, (size / itemsize,): what is written to it is written to
        the file. For looking at results and for checkpoints, not for training.
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
    @contextlib.contextmanager
    def _open(self, name: str, how: int):  # noqa: ANN202
        file = os.open(self.folder / name, how)  # each time anew: a folder that went away is missed
        try:
            yield file
        finally:
            os.close(file)

    def _forget(self, file: int) -> None:
        if not self.cached and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)

    @contextlib.contextmanager
    def _explained(self, what: str, name: str):  # noqa: ANN202
        try:
            yield
        except OSError as error:
            why = error.strerror or str(error)
            room = ""
            with contextlib.suppress(OSError):
                room = f" ({shutil.disk_usage(self.folder).free / 2**20:,.0f} MiB free there)"
            raise OSError(
                f"offload cannot {what} {self.folder / name}: {why}{room}. Checkpoints of this run "
                "are as they were: resume from the last one, with offload's folder on a disk that "
                "has room and stays"
            ) from error


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.detach().view(-1).view(torch.uint8).numpy())
