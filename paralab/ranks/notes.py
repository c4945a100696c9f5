"""What each rank is blocked in, on a page that the launching process can read at any time.

One slot per rank in a small file that all of them map: [thread id 8][signs of life 4][text 500]. A
rank writes without a lock and without a system call, below 1 us; it is read when nothing has moved
for a while.
"""

from __future__ import annotations

import mmap
import struct
import threading
from pathlib import Path

_SLOT, _LIFE = struct.Struct("<QI500s"), struct.Struct("<I")
_LIFE_AT, _TEXT_AT = 8, 12


class Notebook:
    """One rank's slot, or on the launcher's side, all of them."""

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
        """A rank's own slot; also says which of its threads is the main one."""
        notes = cls(folder, rank)
        _SLOT.pack_into(notes._map, notes._slot, threading.main_thread().ident or 0, 0, b"")
        return notes

    def write(self, text: str) -> None:
        start, end = self._slot + _TEXT_AT, self._slot + _SLOT.size
        self._map[start:end] = text.encode()[: end - start].ljust(end - start, b"\0")

    def alive(self) -> None:
        """A sign of life: the rank's device gets on, though the rank writes nothing."""
        (count,) = _LIFE.unpack_from(self._map, self._slot + _LIFE_AT)
        _LIFE.pack_into(self._map, self._slot + _LIFE_AT, (count + 1) % 2**32)

    def read(self, rank: int = 0) -> tuple[int, str]:
        """The main thread's id, and the text, of the rank-th slot from this one."""
        thread, _, text = _SLOT.unpack_from(self._map, self._slot + rank * _SLOT.size)
        return thread, text.rstrip(b"\0").decode(errors="replace")

    def text(self) -> str:
        """What this rank wrote last."""
        return self.read()[1]

    def snapshot(self) -> bytes:
        """Changes whenever a rank writes something new."""
        return self._map[:]
