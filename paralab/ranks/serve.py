"""The server process: load what ranks need, fork them, report their ends, leave nothing behind.

It stays single-threaded and never touches CUDA, because neither survives a fork. It ends when its
socket closes or its parent changes; a rank gets SIGKILL when the server ends; and what a rank
itself started is adopted (the server is a child subreaper) and ended with it.

Where forking a loaded torch is unsafe (macOS) the same server execs a fresh interpreter per rank:
method "spawn", slower and larger, otherwise alike.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import select
import shutil
import signal
import socket
import sys
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

# What every rank needs; a failing import is the launch's error. The last one is pl.run's program.
ESSENTIAL = (
    "numpy.random",
    "torch.distributed",
    "paralab.ranks.process",
    "paralab.interpret.train",
)
# What torch's optimizers import at first use, its compiler: 1.4 s in every rank if not shared.
# Loaded before the first launch that trains.
TO_TRAIN = ("torch._dynamo",)
# What DDP, FSDP and the profiler pull in at first use, and all of the above in smaller pieces: 75
# MB in every rank if not shared. Loaded while nobody waits, in pieces below 0.4 s, so a first
# launch does not pay for it. A piece that fails is tried again by the rank that uses it, and the
# error is raised there.
WHEN_IDLE = (
    "sympy",
    "torch.fx.experimental.symbolic_shapes",
    "torch._inductor.config",
    "torch.distributed.fsdp",
    "torch._dynamo",
    "torch.profiler",
    "torch.distributed.tensor.parallel",
    "torch.distributed.pipelining",
)
IDLE_SECONDS = 1.0  # after a launch, before WHEN_IDLE goes on

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def serve(fd: int, method: str, caller: int) -> None:
    """The server process, from start to end. ``caller`` is the process id it must not outlive."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # here, and so in the ranks
    gc.disable()  # a collection would dirty pages that ranks share
    _Server(fd, method, caller).run()


class _Server:
    def __init__(self, fd: int, method: str, caller: int) -> None:
        os.set_inheritable(fd, False)
        self.socket = socket.socket(fileno=fd)
        self.connection = Connection(os.dup(fd))
        self.method, self.caller = method, caller
        self.ranks: set[int] = set()  # process ids
        self.folder: str | None = None  # of the launch under way
        self.idle_from = 0.0
        self.later = list(WHEN_IDLE) if method == "fork" else []
        self.wake_up, wake = os.pipe()
        for end in (self.wake_up, wake):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # Adopting orphans only helps if they can be found again.
        self.children = Path(f"/proc/self/task/{os.getpid()}/children")
        if sys.platform == "linux" and self.children.exists():
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def run(self) -> None:
        try:
            self._preload()
            while os.getppid() == self.caller:
                self._one_round()
        except (EOFError, OSError):
            pass  # the caller is gone
        finally:
            self._leave()

    def _preload(self) -> None:
        try:
            for name in ESSENTIAL if self.method == "fork" else ():
                self._import(name)
            self.connection.send(("ready", ""))
        except Exception:
            self.connection.send(("failed", traceback.format_exc()))
            raise EOFError from None

    def _import(self, name: str) -> None:
        """Seconds long, on a busy machine: look up meanwhile whether the caller is still there."""
        signal.signal(signal.SIGALRM, lambda *_: os.getppid() == self.caller or self._leave())
        signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)
        try:
            importlib.import_module(name)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)

    def _try(self, name: str) -> None:
        """`_import`; the rank that uses what fails here tries again, and says so."""
        with contextlib.suppress(Exception):
            self._import(name)

    def _leave(self) -> NoReturn:
        with contextlib.suppress(EOFError, OSError):
            if self.folder is None and self.connection.poll(0):  # a launch that was not begun
                self.folder = (*self.connection.recv(), None)[1]
        self._end()
        os._exit(0)

    def _one_round(self) -> None:
        spare = self.later and not self.ranks and time.monotonic() >= self.idle_from
        ready, _, _ = select.select([self.socket, self.wake_up], [], [], 0.0 if spare else 1.0)
        if self.wake_up in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self.wake_up, 4096)
            self._reap()
        if self.socket in ready:
            message = self.connection.recv()
            if message[0] == "fork":
                self._fork(*message[1:])
            elif message[0] == "to train":
                for name in TO_TRAIN if self.method == "fork" else ():
                    self._try(name)
                self.connection.send(("loaded",))
            else:
                self._end()
                self.connection.send(("ended",))
        elif spare:
            self._try(self.later.pop(0))

    def _fork(self, folder: str, count: int) -> None:
        self.folder = folder
        _, fds, _, _ = socket.recv_fds(self.socket, 1, 2 * count)
        for fd in fds:
            os.set_inheritable(fd, False)
        gc.freeze()  # a rank's collector leaves the shared objects, and so their pages, alone
        pids = []
        for rank in range(count):
            pid = os.fork()
            if pid == 0:
                try:
                    self._be_rank(rank, fds)
                finally:
                    os._exit(1)
            pids.append(pid)
        self.ranks.update(pids)
        for fd in fds:
            os.close(fd)
        self.connection.send(("born", pids))

    def _be_rank(self, rank: int, fds: list[int]) -> None:
        """In the new process: cut every tie to the server but its life, then become a rank."""
        os.setsid()
        die_with_parent()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        # Until the rank can say where it stands, being asked must not end it; an exec keeps this.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        control, output = fds[2 * rank : 2 * rank + 2]
        os.dup2(output, 1)
        os.dup2(output, 2)
        self.socket.close()
        self.connection.close()
        for fd in fds:
            if fd != control:
                os.close(fd)
        if self.method == "spawn":
            os.set_inheritable(control, True)
            be = f"import paralab.ranks.process as r; r.main({rank}, {control}, {self.folder!r})"
            os.execv(sys.executable, [sys.executable, "-P", "-c", be])
        from paralab.ranks import process

        process.main(rank, control, self.folder)

    def _reap(self) -> None:
        """Report each rank that ended, and end what it had started."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self.ranks:
                self.ranks.discard(pid)
                _kill(pid)
                self.connection.send(("exit", pid, os.waitstatus_to_exitcode(status)))

    def _end(self) -> None:
        for pid in self.ranks:
            _kill(pid)
        while True:
            with contextlib.suppress(OSError, ValueError):
                for pid in self.children.read_text().split():  # ranks, and orphans they left
                    _kill(int(pid))
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                break
        self.ranks.clear()
        self.idle_from = time.monotonic() + IDLE_SECONDS
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = None


def _kill(pid: int) -> None:
    """SIGKILL to a rank and to its whole process group: a rank leads one of its own."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def die_with_parent() -> None:
    """Linux: SIGKILL to this process when the one that forked it ends; survives exec."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it ended before the request was made
            os._exit(1)
