"""One launch, watched from outside: start the ranks, listen, find out what went wrong, end them.

A single loop waits for whatever comes first: a rank's message, what it prints, its death. After a
first failure it listens a quarter of a second more, because a rank that lost its peer often
complains before the peer's own error arrives, and the peer is the one to name.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from paralab.checks import shortened
from paralab.ranks.errors import OutOfMemory, RankError, RankTimeout, Stopped
from paralab.ranks.notes import Notebook
from paralab.ranks.output import RankOutput
from paralab.ranks.server import LOOK_SECONDS, RankServer
from paralab.ranks.waits import Standing, main_stack, sentence, show_cells, standing

GRACE_SECONDS = 0.25  # after an echo, for the failure behind it
BRIEF_SECONDS = 0.1  # after a failure of a rank's own, for an earlier one still on its way
STACK_SECONDS = 0.5  # for ranks to write down where they stand
SERVER_DIED = """the process that ranks are forked from has died, and they with it, perhaps by the \
kernel's out-of-memory killer; the next call starts a new one"""


def _without_addresses(failure: dict[str, Any]) -> str:
    """What was raised; objects in it are somewhere else in every rank."""
    return re.sub(r"\b0x[0-9a-f]+", "", failure["what"])


@dataclass
class _Rank:
    """What the launcher knows of one rank. A closed end is None."""

    rank: int
    control: Connection | None
    pipe: int | None
    output: RankOutput
    pid: int = 0
    result: bytes | None = None


class Run:
    """One launch. `start`, `watch` and, whatever happened, `end`."""

    def __init__(
        self,
        server: RankServer,
        *,
        timeout: float,
        on_progress: Callable[[int, int, int], None] | None,
        stop: threading.Event | None = None,
    ) -> None:
        self.server, self.timeout = server, timeout
        self.on_progress, self.stop = on_progress, stop
        self.ranks: list[_Rank] = []
        self.folder: Path | None = None
        self.failures: dict[int, dict[str, Any]] = {}  # by rank, as failure.describe says
        self.grace_ends = 0.0
        self.life = self.looked = time.monotonic()

    # ---- start --------------------------------------------------------------------------------
    def start(self, count: int, task: bytes, payload: bytes, *, live: bool, trains: bool) -> None:
        """Fork the ranks.

        The payload lies in a file, once for all; a rank may die before it reads. The task has the
        environment in it, secrets too, and goes through each rank's pipe: it is in no file.
        """
        self._go_on()
        with self._or_died():
            # Before there is a folder to remove.
            self.server.get_ready(self._go_on, to_train=trains)
        try:
            self.folder = Path(tempfile.mkdtemp(prefix="paralab-"))
            (self.folder / "payload").write_bytes(payload)
            self.notes = Notebook.create(self.folder, count)
        except OSError as error:
            where = self.folder.parent if self.folder else tempfile.tempdir or "TMPDIR, /tmp"
            why = (
                f"{error.strerror}: a launch keeps {len(payload)} bytes for its ranks in the "
                "folder for temporary files; make room there, or set TMPDIR to another folder"
            )
            raise OSError(error.errno, why, str(where)) from None
        self.noted = self.notes.snapshot()
        with contextlib.ExitStack() as theirs:
            ends = []
            for rank in range(count):
                control, far = Pipe()
                theirs.callback(far.close)
                pipe, write = os.pipe()
                theirs.callback(os.close, write)
                os.set_blocking(pipe, False)
                self.ranks.append(_Rank(rank, control, pipe, RankOutput(rank, live=live)))
                ends.append((far.fileno(), write))
            with self._or_died():
                pids = self.server.fork(self.folder, ends)
        for rank, pid in zip(self.ranks, pids, strict=True):
            rank.pid = pid
            with contextlib.suppress(OSError):  # it has died: the server tells
                rank.control.send_bytes(task)
        self.life = self.looked = time.monotonic()

    @contextlib.contextmanager
    def _or_died(self) -> Iterator[None]:
        """A conversation with the server that its death ends."""
        try:
            yield
        except (EOFError, OSError):
            raise RankError(SERVER_DIED) from None

    # ---- watch --------------------------------------------------------------------------------
    def watch(self) -> Exception | None:
        """Listen until all ranks have returned (None) or the launch has failed (why)."""
        while any(rank.result is None for rank in self.ranks):
            silent = all(r.result is not None or r.rank in self.failures for r in self.ranks)
            if self.failures and (silent or time.monotonic() >= self.grace_ends):
                return self._root_cause()
            self._go_on()
            self._listen()
            if not self.failures and self._nothing_moves():
                return self._who_waits()
        return self._root_cause() if self.failures else None

    def _go_on(self) -> None:
        """Raise ``Stopped`` if the caller has asked for it."""
        if self.stop is not None and self.stop.is_set():
            work = f"in the middle of its work on {len(self.ranks)} ranks"
            raise Stopped(f"stopped {work if self.ranks else 'before its ranks had started'}")

    def _listen(self) -> None:
        speakers: dict[Any, _Rank] = {r.control: r for r in self.ranks if r.control is not None}
        printers: dict[int, _Rank] = {r.pipe: r for r in self.ranks if r.pipe is not None}
        often = 0.02 if self.failures else LOOK_SECONDS if self.stop else 1.0
        ready = wait([*speakers, *printers, self.server.connection], min(often, self.timeout / 4))
        for source in ready:
            if source in printers:
                self._read(printers[source])
            elif source in speakers:
                self._hear(speakers[source])
            else:
                self._count_the_dead()
        if ready:
            self.life = time.monotonic()

    def _read(self, rank: _Rank) -> bool:
        """Take what a rank has printed; whether there was something."""
        try:
            data = os.read(rank.pipe, 1 << 16)
        except BlockingIOError:
            return False
        if data:
            rank.output.feed(data)
        else:
            os.close(rank.pipe)
            rank.pipe = None
        return bool(data)

    def _hear(self, rank: _Rank) -> None:
        try:
            kind, *said = rank.control.recv()
            if kind == "result":
                rank.result = rank.control.recv_bytes()
        except (EOFError, OSError):  # its death is reported by the server
            rank.control.close()
            rank.control = None
            return
        if kind == "failure":
            self._failed(said[0])
        elif kind == "progress" and self.on_progress is not None:
            self.on_progress(rank.rank, *said)

    def _count_the_dead(self) -> None:
        with self._or_died():
            deaths = self.server.deaths()
        for rank in (r for r in self.ranks if r.pid in deaths):
            while rank.control is not None and rank.control.poll(0):  # its last words first
                self._hear(rank)
            if rank.rank not in self.failures:
                what = _how_it_died(deaths[rank.pid], rank.result is not None)
                now = time.monotonic()
                self._failed({"rank": rank.rank, "time": now, "kind": "died", "what": what})

    def _failed(self, failure: dict[str, Any]) -> None:
        now, own = time.monotonic(), failure["kind"] != "communication"
        if not self.failures:
            self.grace_ends = now + GRACE_SECONDS
        if own:
            self.grace_ends = min(self.grace_ends, now + BRIEF_SECONDS)
        self.failures[failure["rank"]] = failure

    # ---- what went wrong ----------------------------------------------------------------------
    def _root_cause(self) -> Exception:
        """The failure that is not the echo of another one; of several, the earliest."""
        found = list(self.failures.values())
        causes = [f for f in found if f["kind"] != "communication"] or found
        first = min(causes, key=lambda f: f["time"])
        # One mistake that all ranks make alike: which came first is chance, so name the lowest.
        alike = [f for f in causes if _without_addresses(f) == _without_addresses(first)]
        first = min(alike, key=lambda f: f["rank"])
        if first["kind"] == "refused":
            return ValueError(first["what"])
        table, trace = first.get("table", ""), show_cells(first.get("traceback", "")).rstrip()
        parts = [f"rank {first['rank']} {first['what']}", table, trace]
        message = "\n\n".join(part for part in parts if part)
        if first["kind"] == "memory":
            return OutOfMemory(message, rank=first["rank"], table=table, traceback=trace)
        return RankError(message, rank=first["rank"], traceback=trace)

    def _nothing_moves(self) -> bool:
        now = time.monotonic()
        if now - self.looked >= min(1.0, self.timeout / 4):
            self.looked = now
            noted = self.notes.snapshot()
            if noted != self.noted:  # calls end and others begin: slow, but alive
                self.noted, self.life = noted, now
        return now - self.life > self.timeout

    def _who_waits(self) -> RankTimeout:
        dumps = self._stacks()
        found = []
        for rank in self.ranks:
            if rank.result is not None:
                found.append(Standing(rank.rank, "has returned its result", finished=True))
                continue
            if rank.rank not in dumps:
                found.append(Standing(rank.rank, "is starting: its function was not yet called"))
                continue
            stack = main_stack(dumps[rank.rank], self.notes.main_thread(rank.rank))
            found.append(standing(rank.rank, len(self.ranks), self.notes.read(rank.rank), stack))
        lines = "\n".join(f"  rank {s.rank}: {s.text}" for s in found)
        return RankTimeout(
            f"no sign of life for {self.timeout:g} s: {sentence(found)}\n{lines}\n"
            "If the work is only slow, ask for a longer timeout.",
            waiting={s.rank: s.text for s in found if not s.finished},
        )

    def _stacks(self) -> dict[int, str]:
        """Ask every rank where it stands, in Python terms: faulthandler writes it from C, into a
        file that a rank opens when it starts.
        """
        files = {rank.rank: self.folder / f"stacks.{rank.rank}" for rank in self.ranks}
        asked = [r for r in self.ranks if r.result is None and files[r.rank].exists()]
        for rank in asked:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGUSR1)
        texts: dict[int, str] = {rank.rank: "" for rank in asked}
        give_up = time.monotonic() + STACK_SECONDS
        while time.monotonic() < give_up:
            time.sleep(0.02)
            now = {r: files[r].read_text(errors="replace") for r in texts}
            if now == texts and all(texts.values()):
                break
            texts = now
        return texts

    # ---- end ----------------------------------------------------------------------------------
    def end(self) -> None:
        """Kill the ranks and what they started; show what they printed. May be called twice."""
        with _no_interrupt():
            if self.ranks:
                self.server.end_ranks()
            for rank in self.ranks:
                while rank.pipe is not None and self._read(rank):
                    pass
                if rank.pipe is not None:
                    os.close(rank.pipe)
                    rank.pipe = None
                if rank.control is not None:
                    rank.control.close()
                    rank.control = None
            if self.folder is not None:
                shutil.rmtree(self.folder, ignore_errors=True)
            for rank in self.ranks:
                rank.output.finish()

    def results(self) -> list[Any]:
        found = []
        for rank in self.ranks:
            try:
                found.append(pickle.loads(rank.result))
            except Exception as error:
                raise RankError(
                    f"rank {rank.rank} returned a result that cannot be rebuilt in this process: "
                    f"{type(error).__name__}: {shortened(str(error))}",
                    rank=rank.rank,
                ) from None
        return found


def _how_it_died(code: int, returned: bool) -> str:
    when = "after" if returned else "before"
    if code >= 0:
        return f"ended with exit code {code} {when} its function returned"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else "unknown"
    text = f"was killed by signal {-code} ({name}) {when} its function returned"
    if -code == signal.SIGKILL:
        text += (
            ". If nobody sent it, it was the kernel's out-of-memory killer: the machine had no "
            "memory left (dmesg tells); fewer ranks or a smaller model would fit"
        )
    return text


@contextlib.contextmanager
def _no_interrupt() -> Iterator[None]:
    """A second Ctrl-C must not stop the cleaning up after the first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if previous is None else previous)
