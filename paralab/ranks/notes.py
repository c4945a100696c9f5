"""Notes of the calls in which ranks are blocked, which the launching process can read at any time.

A small file that all processes map has one slot per rank, of bytes [signs of life 1][text 511]. A
rank writes its slot in less than 1 us, without a lock or a system call. The launching process reads
the slots when no rank has sent anything for a while.
"""

from __future__ import annotations

import mmap
from pathlib import Path

_SLOT = 512


class Notebook:
    """One rank's slot; in the launching process all slots."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        with (folder / "notes").open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._slot = rank * _SLOT

    @classmethod
    def create(cls, folder: Path, ranks: int) -> Notebook:
        (folder / "notes").write_bytes(bytes(ranks * _SLOT))
        return cls(folder)

    def write(self, text: str) -> None:
        start, end = self._slot + 1, self._slot + _SLOT
        self._map[start:end] = text.encode()[: end - start].ljust(end - start, b"\0")

    def alive(self) -> None:
        """Count a sign of life: the device makes progress, though the rank writes no note."""
        self._map[self._slot] = (self._map[self._slot] + 1) % 256

    def read(self, rank: int = 0) -> str:
        """The text of the slot that is ``rank`` slots behind this one."""
        start = self._slot + rank * _SLOT
        return self._map[start + 1 : start + _SLOT].rstrip(b"\0").decode(errors="replace")

    def snapshot(self) -> bytes:
        """All slots' bytes, which differ whenever a rank has given a sign of life."""
        return self._map[:]
