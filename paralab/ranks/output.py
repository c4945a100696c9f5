"""The ranks' output: whole lines, tagged by rank, of bounded length.

A rank's file descriptors 1 and 2 are pipes, so lines of C++ libraries arrive as well: one pipe for
both, so that lines keep their order; for output that is shown live two, so that errors arrive on
standard error. Of a rank that prints very much, the first and last half megabyte are shown
(`keeping` sets another limit), and the gap is stated. Output that is shown live has no limit.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

KEEP_BYTES = 500_000  # of the beginning of a rank's output, and as many of its end
_kept = ContextVar("kept", default=KEEP_BYTES)


@contextmanager
def keeping(count: int) -> Iterator[None]:
    """In the block, launches show the first and the last ``count`` bytes of each rank's output."""
    before = _kept.set(count)
    try:
        yield
    finally:
        _kept.reset(before)


class RankOutput:
    """The output of one rank. ``live``: lines are shown as they arrive, not at the end.

    stream  where they are shown: "stdout" or "stderr"
    """

    def __init__(self, rank: int, *, live: bool, stream: str = "stdout") -> None:
        self._tag, self._live, self._stream = f"[rank {rank}] ", live, stream
        self._partial = b""
        self._head: list[str] = []
        self._keep = self._head_left = self._tail_left = _kept.get()
        self._tail: deque[str] = deque()
        self._dropped = 0

    def feed(self, data: bytes) -> None:
        *lines, self._partial = (self._partial + data).split(b"\n")
        if len(self._partial) > self._keep:
            lines.append(self._partial)
            self._partial = b""
        for line in lines:
            self._add(line)
        if self._live:
            self._show_head()

    def finish(self) -> None:
        """Show all that has not been shown."""
        if self._partial:
            self._add(self._partial)
            self._partial = b""
        if self._dropped:
            self._tail.appendleft(f"{self._tag}... {self._dropped} bytes left out ...\n")
        self._head.extend(self._tail)
        self._tail.clear()
        self._show_head()

    def _add(self, raw: bytes) -> None:
        # A progress bar overwrites its line: only its last state is kept, as on a terminal.
        text = raw.rstrip(b"\r").rsplit(b"\r", 1)[-1].decode(errors="replace")
        line = f"{self._tag}{text}\n"
        if self._live or self._head_left > 0:
            self._head_left -= len(line)
            self._head.append(line)
            return
        self._tail.append(line)
        self._tail_left -= len(line)
        while self._tail_left < 0 and len(self._tail) > 1:
            dropped = len(self._tail.popleft())
            self._tail_left += dropped
            self._dropped += dropped

    def _show_head(self) -> None:
        if self._head:
            stream = getattr(sys, self._stream)
            stream.write("".join(self._head))
            stream.flush()
            self._head.clear()
