"""Notes of the calls in which ranks are blocked, which the launching process can read at any time.

A small file that all processes map has one slot per rank, of bytes [main thread's id 8][signs of
life 1][text 503]. A rank writes its slot in less than 1 us, without a lock or a system call. The
launching process reads the slots when no rank has sent anything for a while.
"""

from __future__ import annotations

import mmap
import struct
import threading
from pathlib import Path

_SLOT = struct.Struct("<QB503s")
_LIFE_AT, _TEXT_AT = 8, 9


class Notebook:
    """One rank's slot; in the launching process all slots."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        with (folder / "notes").open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._slot = rank * _SLOT.size

    @classmethod
    def create(cls, folder: Path, ranks: int) -> Notebook:
        (folder / "notes").write_bytes(bytes(ranks * _SLOT.size))
        return cls(folder)

    @classmethod
    def open(cls, folder: Path, rank: int) -> Notebook:
        """A rank's own slot, with the id of the rank's main thread written into it."""
        notes = cls(folder, rank)
        _SLOT.pack_into(notes._map, notes._slot, threading.main_thread().ident or 0, 0, b"")
        return notes

    def write(self, text: str) -> None:
        start, end = self._slot + _TEXT_AT, self._slot + _SLOT.size
        self._map[start:end] = text.encode()[: end - start].ljust(end - start, b"\0")

    def alive(self) -> None:
        """Count a sign of life: the device makes progress, though the rank writes no note."""
        at = self._slot + _LIFE_AT
        self._map[at] = (self._map[at] + 1) % 256

    def read(self, rank: int = 0) -> tuple[int, str]:
        """(main thread's id, text) of the slot that is ``rank`` slots behind this one."""
        thread, _, text = _SLOT.unpack_from(self._map, self._slot + rank * _SLOT.size)
        return thread, text.rstrip(b"\0").decode(errors="replace")

    def snapshot(self) -> bytes:
        """All slots' bytes, which differ whenever a rank has given a sign of life."""
        return self._map[:]
