"""One launch, in the launching process: start the ranks, listen to them, end them.

A single loop waits for the next event: a rank's message, its output or its end. After a first
failure the loop listens a quarter of a second more: a rank that lost its peer often reports that
before the error of the peer arrives, and the error to raise is the peer's. ranks/failure.py decides
which failure is the cause, ranks/hangs.py which ranks wait for which others.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from paralab.checks import count_of, shortened
from paralab.ranks.errors import RankError, RankTimeout, Stopped
from paralab.ranks.failure import Failure, died, root_cause
from paralab.ranks.hangs import Frame, Standing, hang_error, main_stack, rank_names, standing
from paralab.ranks.notes import Notebook
from paralab.ranks.output import RankOutput
from paralab.ranks.server import LOOK_SECONDS, RankServer

START_SECONDS = 300.0  # for all ranks to start, before it counts as a hang: imports may be slow
GRACE_SECONDS = 0.25  # after a failure that another one caused, for that other one to arrive
DEATH_SECONDS = 10.0  # for the server to tell how a rank died, on however busy a machine
BRIEF_SECONDS = 0.1  # after any other failure, for the message of an earlier one to arrive
STACK_SECONDS = 5.0  # for ranks to write their Python stacks
BRIEF_STACK_SECONDS = 0.5  # the same after an interrupt, when the user waits
_PF_EXITING = 4  # linux/sched.h
SERVER_DIED = """the process that starts the ranks has died, and the ranks with it; perhaps the \
kernel's out-of-memory killer ended it. The next call starts a new one"""


@dataclass
class _Rank:
    """The launcher's state of one rank, and the launcher's ends of the rank's pipes."""

    rank: int
    control: Connection  # messages
    outputs: dict[int, RankOutput]  # by pipe
    pid: int = 0
    nccl: bool = False  # it communicates over NCCL
    up: bool = False  # it has sent a message, so its imports are done and its device is chosen
    gone: bool = False  # its pipe is closed: it has died, and the server will tell how
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
        self.handlers: dict[Any, Callable[[], object]] = {}  # {pipe or connection: its handler}
        self.to_close = contextlib.ExitStack()
        self.failures: dict[int, Failure] = {}  # by rank
        self.grace_ends = math.inf

    # ---- start --------------------------------------------------------------------------------
    def start(self, count: int, task: bytes, payload: bytes, *, live: bool, trains: bool) -> None:
        """Start the ranks.

        task     pickled settings of every rank. They include the environment, with its secrets, so
                 they go through the ranks' pipes and never into a file
        payload  the pickled function and its arguments, in one file that all ranks read
        """
        self._check_stop()
        with self._server_must_live():  # before there is a folder to remove
            self.server.get_ready(self._check_stop, to_train=trains)
        try:
            self.folder = Path(tempfile.mkdtemp(prefix="paralab-"))
            self.to_close.callback(shutil.rmtree, self.folder, ignore_errors=True)
            (self.folder / "payload").write_bytes(payload)
            self.notes = Notebook.create(self.folder, count)
        except OSError as error:
            why = (
                f"{error.strerror}: a launch keeps {len(payload)} bytes for its ranks in the "
                "folder for temporary files; make room there, or set TMPDIR to another folder"
            )
            raise OSError(error.errno, why, tempfile.tempdir or "TMPDIR, /tmp") from None
        self.snapshot = self.notes.snapshot()
        with contextlib.ExitStack() as theirs:
            ends = [self._open(rank, theirs, live=live) for rank in range(count)]
            with self._server_must_live():
                pids = self.server.fork(self.folder, ends)
        self.handlers[self.server.connection] = self._note_deaths
        for rank, pid in zip(self.ranks, pids, strict=True):
            rank.pid = pid
            with contextlib.suppress(OSError):  # the rank has died, which the server reports
                rank.control.send_bytes(task)
        self.life = time.monotonic()  # when a rank last gave a sign of life

    def _open(self, index: int, theirs: contextlib.ExitStack, *, live: bool) -> tuple[int, ...]:
        """Make a rank's pipes. Returns the rank's ends: for messages, output and errors."""
        control, far = Pipe()
        theirs.callback(far.close)
        self.to_close.callback(control.close)
        rank, ends = _Rank(index, control, {}), []
        self.handlers[control] = functools.partial(self._receive, rank)
        for stream in ("stdout", "stderr") if live else ("stdout",):
            pipe, write = os.pipe()
            os.set_blocking(pipe, False)
            theirs.callback(os.close, write)
            self.to_close.callback(os.close, pipe)
            ends.append(write)
            rank.outputs[pipe] = RankOutput(index, live=live, stream=stream)
            self.handlers[pipe] = functools.partial(self._read, pipe, rank.outputs[pipe])
        self.ranks.append(rank)
        return far.fileno(), ends[0], ends[-1]

    @contextlib.contextmanager
    def _server_must_live(self) -> Iterator[None]:
        """Raise ``RankError`` if the server dies in a request to it."""
        try:
            yield
        except (EOFError, OSError):
            raise RankError(SERVER_DIED) from None

    # ---- watch --------------------------------------------------------------------------------
    def watch(self) -> Exception | None:
        """Listen until all ranks have returned, or the launch has failed. Returns its error."""
        while any(rank.result is None for rank in self.ranks):
            if self.failures and self._is_judged():
                break
            self._check_stop()
            self._listen()
            if not self.failures and self._silence() > self._limit():
                return self._hang_error()
        return root_cause(self.failures.values()) if self.failures else None

    def _is_judged(self) -> bool:
        """Whether no other cause is to be expected. This process may not have run for longer than
        the grace, so all that has arrived is heard first.
        """
        unheard = [r for r in self.ranks if r.result is None and r.rank not in self.failures]
        if unheard and time.monotonic() >= self.grace_ends:
            for rank in unheard:
                self._hear(rank)
            dead = any(rank.gone or is_ending(rank.pid) for rank in unheard)
            return time.monotonic() >= self.grace_ends + DEATH_SECONDS * dead
        return not unheard

    def _check_stop(self) -> None:
        """Raise ``Stopped`` if the caller has set its ``stop`` event."""
        if self.stop is not None and self.stop.is_set():
            work = f"while {count_of(len(self.ranks), 'rank')} worked"
            raise Stopped(f"stopped {work if self.ranks else 'before the ranks had started'}")

    def _listen(self) -> None:
        seconds = 0.02 if self.failures else LOOK_SECONDS if self.stop else 1.0
        ready = wait(list(self.handlers), min(seconds, self.timeout / 4))
        for source in ready:
            if source in self.handlers:  # unless another source's handler has removed it
                self.handlers[source]()
        if ready:
            self.life = time.monotonic()

    def _read(self, pipe: int, output: RankOutput) -> bool:
        """Read a rank's output. Returns whether there was any."""
        try:
            data = os.read(pipe, 1 << 16)
        except BlockingIOError:
            return False
        if data:
            output.feed(data)
        else:
            del self.handlers[pipe]
        return bool(data)

    def _receive(self, rank: _Rank) -> None:
        try:
            kind, *fields = rank.control.recv()
            if kind == "result":
                rank.result = rank.control.recv_bytes()
        except (EOFError, OSError):  # the rank has died, which the server reports
            del self.handlers[rank.control]
            rank.gone = True
            return
        rank.up = True
        if kind == "up":
            [rank.nccl] = fields
        elif kind == "failure":
            self._failed(Failure(*fields))
        elif kind == "progress" and self.on_progress is not None:
            self.on_progress(rank.rank, *fields)

    def _hear(self, rank: _Rank) -> None:
        """Receive all messages of a rank that have arrived."""
        while rank.control in self.handlers and rank.control.poll(0):
            self._receive(rank)

    def _note_deaths(self) -> None:
        with self._server_must_live():
            deaths = self.server.deaths()
        for rank in (r for r in self.ranks if r.pid in deaths):
            self._hear(rank)  # its last messages first
            if rank.rank not in self.failures:
                what = died(deaths[rank.pid], returned=rank.result is not None)
                self._failed(Failure(rank.rank, time.monotonic(), "died", what))

    def _failed(self, failure: Failure) -> None:
        grace = GRACE_SECONDS if failure.kind == "communication" else BRIEF_SECONDS
        self.grace_ends = min(self.grace_ends, time.monotonic() + grace)
        self.failures[failure.rank] = failure

    # ---- no sign of life ----------------------------------------------------------------------
    def _limit(self) -> float:
        """Seconds of silence that end the launch: the caller's limit, once all ranks are up."""
        up = all(rank.up for rank in self.ranks)
        return self.timeout if up else max(self.timeout, START_SECONDS)

    def _silence(self) -> float:
        """Seconds since a rank last gave a sign of life."""
        now, snapshot = time.monotonic(), self.notes.snapshot()
        if snapshot != self.snapshot:  # calls end and others begin: slow, but alive
            self.snapshot, self.life = snapshot, now
        return now - self.life

    def _hang_error(self) -> RankTimeout:
        limit, stacks = self._limit(), self._stacks(STACK_SECONDS)
        standings = []
        for rank in self.ranks:
            index = rank.rank
            if rank.result is not None:
                at = Standing(index, "has returned its result", finished=True)
            elif not rank.up or index not in stacks:
                at = Standing(index, "is starting: its function has not been called yet")
            else:
                at = self._standing(index, stacks[index])._replace(nccl=rank.nccl)
            standings.append(at)
        return hang_error(standings, limit)

    def interrupted(self) -> str:
        """ "interrupted", and the ranks that were in a line of the user's code, by that line."""
        if not all(rank.up for rank in self.ranks):
            return "interrupted"
        ranks_at: dict[str, list[int]] = {}
        for index, stack in self._stacks(BRIEF_STACK_SECONDS).items():
            if any(frame.own for frame in stack):
                ranks_at.setdefault(self._standing(index, stack).text, []).append(index)
        lines = (f"{rank_names(numbers)}: {text}" for text, numbers in ranks_at.items())
        return "; ".join(["interrupted", *lines])

    def _standing(self, rank: int, stack: list[Frame]) -> Standing:
        return standing(rank, len(self.ranks), self.notes.read(rank), stack)

    def _stacks(self, seconds: float) -> dict[int, list[Frame]]:
        """{rank: its main thread's stack}, as far as it is written in time: by faulthandler, even
        of a process that is blocked in C, into a file that the rank opens when it starts.
        """
        files = {rank.rank: self.folder / f"stacks.{rank.rank}" for rank in self.ranks}
        running = [r for r in self.ranks if r.result is None and files[r.rank].exists()]
        for rank in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGUSR1)
        texts: dict[int, str] = {rank.rank: "" for rank in running}
        give_up = time.monotonic() + seconds
        while time.monotonic() < give_up:
            time.sleep(0.02)
            now = {r: files[r].read_text(errors="replace") for r in texts}
            if now == texts and all(texts.values()):
                break
            texts = now
        return {r: main_stack(text) for r, text in texts.items()}

    # ---- end ----------------------------------------------------------------------------------
    def end(self) -> None:
        """Kill the ranks and what they started; show what they printed. May be called twice."""
        with _no_interrupt():
            if self.ranks:
                self.server.end_ranks()
            for rank in self.ranks:
                for pipe, output in rank.outputs.items():
                    while pipe in self.handlers and self._read(pipe, output):
                        pass
                    output.finish()
            self.handlers.clear()
            self.to_close.close()

    def results(self) -> list[Any]:
        values = []
        for rank in self.ranks:
            try:
                values.append(pickle.loads(rank.result))
            except Exception as error:
                raise RankError(
                    f"rank {rank.rank} returned a result that cannot be rebuilt in this process: "
                    f"{type(error).__name__}: {shortened(str(error))}",
                    rank=rank.rank,
                ) from None
        return values


def is_ending(pid: int) -> bool:
    """Linux: whether this process is ending or has ended. The kernel closes the connections of a
    killed process before its pipes, and on a busy machine its peers may notice much earlier.
    """
    try:
        flags = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[6]
    except OSError:
        return Path("/proc/self/stat").exists()
    return bool(int(flags) & _PF_EXITING)


@contextlib.contextmanager
def _no_interrupt() -> Iterator[None]:
    """Ctrl-C must not stop the clean-up: raise it afterwards, unless it is the second one."""
    held: list[int] = []
    here = threading.current_thread() is threading.main_thread()  # which alone is interrupted
    previous = here and signal.signal(signal.SIGINT, lambda number, _: held.append(number))
    try:
        yield
    finally:
        if here:
            signal.signal(signal.SIGINT, previous or signal.SIG_DFL)
        if held and not isinstance(sys.exception(), KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
