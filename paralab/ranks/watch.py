"""One launch, watched from outside: start the ranks, listen, end them.

A single loop waits for what comes first: a rank's message, what it prints, its death. After a first
failure it listens a quarter of a second more, because a rank that lost its peer often complains
before the peer's own error arrives, and the peer is the one to name. What went wrong is judged in
ranks/failure.py, and who waits for whom in ranks/waits.py.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
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
from paralab.ranks.errors import RankError, RankTimeout, Stopped
from paralab.ranks.failure import Failure, died, root_cause
from paralab.ranks.notes import Notebook
from paralab.ranks.output import RankOutput
from paralab.ranks.server import LOOK_SECONDS, RankServer
from paralab.ranks.waits import Standing, hung, main_stack, ranks, standing

START_SECONDS = 300.0  # for all ranks to be there; it is no hang, as an import may be slow
GRACE_SECONDS = 0.25  # after an echo, for the failure behind it
DEATH_SECONDS = 10.0  # for the server to tell how a rank died, on however busy a machine
BRIEF_SECONDS = 0.1  # after a failure of a rank's own, for an earlier one still on its way
STACK_SECONDS = 5.0  # for ranks to write down where they stand
BRIEF_STACK_SECONDS = 0.5  # where the user waits for them to be stopped
SERVER_DIED = """the process that ranks are started by has died, and they with it, perhaps by the \
kernel's out-of-memory killer; the next call starts a new one"""


@dataclass
class _Rank:
    """What the launcher knows of one rank, and its ends of the rank's two pipes."""

    rank: int
    control: Connection
    pipe: int
    output: RankOutput
    pid: int = 0
    nccl: bool = False  # it sends from its GPU
    up: bool = False  # its imports are done; the function comes next
    gone: bool = False  # its pipe is closed: it has ended, and the server will tell how
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
        self.hearing: dict[Any, Callable[[], object]] = {}  # what speaks, and who listens
        self.to_close = contextlib.ExitStack()
        self.failures: dict[int, Failure] = {}  # by rank
        self.grace_ends = 0.0
        self.life = self.looked = time.monotonic()

    # ---- start --------------------------------------------------------------------------------
    def start(self, count: int, task: bytes, payload: bytes, *, live: bool, trains: bool) -> None:
        """Start the ranks.

        The payload is in a file, once for all; a rank may die before it reads. The task has the
        environment in it, secrets too, and goes through each rank's pipe: it is in no file.
        """
        self._go_on()
        with self._or_died():  # before there is a folder to remove
            self.server.get_ready(self._go_on, to_train=trains)
        folder = None
        try:
            folder = Path(tempfile.mkdtemp(prefix="paralab-"))
            self.to_close.callback(shutil.rmtree, folder, ignore_errors=True)
            (folder / "payload").write_bytes(payload)
            self.notes = Notebook.create(folder, count)
        except OSError as error:
            where = folder.parent if folder else tempfile.tempdir or "TMPDIR, /tmp"
            why = (
                f"{error.strerror}: a launch keeps {len(payload)} bytes for its ranks in the "
                "folder for temporary files; make room there, or set TMPDIR to another folder"
            )
            raise OSError(error.errno, why, str(where)) from None
        self.folder, self.noted = folder, self.notes.snapshot()
        with contextlib.ExitStack() as theirs:
            ends = [self._open(rank, theirs, live=live) for rank in range(count)]
            with self._or_died():
                pids = self.server.fork(folder, ends)
        self.hearing[self.server.connection] = self._count_the_dead
        for rank, pid in zip(self.ranks, pids, strict=True):
            rank.pid = pid
            with contextlib.suppress(OSError):  # it has died: the server tells
                rank.control.send_bytes(task)
        self.life = self.looked = time.monotonic()

    def _open(self, index: int, theirs: contextlib.ExitStack, *, live: bool) -> tuple[int, int]:
        """Make a rank's two pipes: messages, and what it prints. Returns the rank's ends."""
        control, far = Pipe()
        pipe, write = os.pipe()
        os.set_blocking(pipe, False)
        theirs.callback(far.close)
        theirs.callback(os.close, write)
        self.to_close.callback(control.close)
        self.to_close.callback(os.close, pipe)
        rank = _Rank(index, control, pipe, RankOutput(index, live=live))
        self.hearing[control] = functools.partial(self._hear, rank)
        self.hearing[pipe] = functools.partial(self._read, rank)
        self.ranks.append(rank)
        return far.fileno(), write

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
            unheard = [r for r in self.ranks if r.result is None and r.rank not in self.failures]
            patience = DEATH_SECONDS if any(rank.gone for rank in unheard) else 0.0
            if self.failures and (not unheard or time.monotonic() >= self.grace_ends + patience):
                break
            self._go_on()
            self._listen()
            if not self.failures and self._silent() > self._limit():
                return self._who_waits()
        return root_cause(self.failures.values()) if self.failures else None

    def _go_on(self) -> None:
        """Raise ``Stopped`` if the caller has asked for it."""
        if self.stop is not None and self.stop.is_set():
            work = f"in the middle of its work on {len(self.ranks)} ranks"
            when = work if self.ranks else "before its ranks had started"
            printed = sum(rank.output.printed for rank in self.ranks)
            raise Stopped(f"stopped {when}", printed=printed)

    def _listen(self) -> None:
        often = 0.02 if self.failures else LOOK_SECONDS if self.stop else 1.0
        ready = wait(list(self.hearing), min(often, self.timeout / 4))
        for source in ready:
            if source in self.hearing:
                self.hearing[source]()
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
            del self.hearing[rank.pipe]
        return bool(data)

    def _hear(self, rank: _Rank) -> None:
        try:
            kind, *said = rank.control.recv()
            if kind == "result":
                rank.result = rank.control.recv_bytes()
        except (EOFError, OSError):  # its death is reported by the server
            del self.hearing[rank.control]
            rank.gone = True
            return
        rank.up, rank.nccl = True, rank.nccl or kind == "nccl"
        if kind == "failure":
            self._failed(Failure(*said))
        elif kind == "progress" and self.on_progress is not None:
            self.on_progress(rank.rank, *said)

    def _count_the_dead(self) -> None:
        with self._or_died():
            deaths = self.server.deaths()
        for rank in (r for r in self.ranks if r.pid in deaths):
            while rank.control in self.hearing and rank.control.poll(0):  # its last words first
                self._hear(rank)
            if rank.rank not in self.failures:
                what = died(deaths[rank.pid], returned=rank.result is not None)
                self._failed(Failure(rank.rank, time.monotonic(), "died", what))

    def _failed(self, failure: Failure) -> None:
        now, own = time.monotonic(), failure.kind != "communication"
        if not self.failures:
            self.grace_ends = now + GRACE_SECONDS
        if own:
            self.grace_ends = min(self.grace_ends, now + BRIEF_SECONDS)
        self.failures[failure.rank] = failure

    # ---- no sign of life ----------------------------------------------------------------------
    def _limit(self) -> float:
        """Seconds of silence that end the launch: the caller's limit, once all ranks are up."""
        up = all(rank.up for rank in self.ranks)
        return self.timeout if up else max(self.timeout, START_SECONDS)

    def _silent(self) -> float:
        now = time.monotonic()
        if now - self.looked >= min(1.0, self.timeout / 4):
            self.looked = now
            noted = self.notes.snapshot()
            if noted != self.noted:  # calls end and others begin: slow, but alive
                self.noted, self.life = noted, now
        return now - self.life

    def _who_waits(self) -> RankTimeout:
        limit, dumps = self._limit(), self._stacks(STACK_SECONDS)
        found = []
        for rank in self.ranks:
            index, (thread, note) = rank.rank, self.notes.read(rank.rank)
            if rank.result is not None:
                found.append(Standing(index, "has returned its result", finished=True))
            elif not rank.up or index not in dumps:
                found.append(Standing(index, "is starting: its function was not yet called"))
            else:
                stack = main_stack(dumps[index], thread)
                found.append(standing(index, len(self.ranks), note, stack)._replace(nccl=rank.nccl))
        return hung(found, limit)

    def interrupted(self) -> str:
        """That the launch was, and the ranks that were in a line of the user's, by that line."""
        if not all(rank.up for rank in self.ranks):
            return "interrupted"
        found: dict[str, list[int]] = {}
        for index, dump in self._stacks(BRIEF_STACK_SECONDS).items():
            thread, note = self.notes.read(index)
            stack = main_stack(dump, thread)
            if any(frame.own for frame in stack):
                text = standing(index, len(self.ranks), note, stack).text
                found.setdefault(text, []).append(index)
        said = (f"{ranks(numbers)}: {text}" for text, numbers in found.items())
        return "; ".join(["interrupted", *said])

    def _stacks(self, patience: float) -> dict[int, str]:
        """Ask every rank where it is, in Python terms: faulthandler writes it from C, into a file
        that a rank opens when it starts.
        """
        files = {rank.rank: self.folder / f"stacks.{rank.rank}" for rank in self.ranks}
        asked = [r for r in self.ranks if r.result is None and files[r.rank].exists()]
        for rank in asked:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGUSR1)
        texts: dict[int, str] = {rank.rank: "" for rank in asked}
        give_up = time.monotonic() + patience
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
                while rank.pipe in self.hearing and self._read(rank):
                    pass
                rank.output.finish()
            self.hearing.clear()
            self.to_close.close()

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
