"""The server of ranks: a process that has torch loaded and forks a rank in milliseconds.

A rank that starts as a new interpreter first imports torch, which takes seconds and 160 MB for each
rank. The server imports torch once and forks; all ranks share those pages. `multiprocessing` has a
forkserver too, but one per process: ranks would share it with the user's own pools and their
settings, and every rank would import the user's ``__main__`` again. This server communicates over
one inherited socket, so there is no port, no file and no key. `RankServer` is the caller's end,
`serve` the process; neither imports torch by name.

[Note: spawn] Where forking a loaded torch is unsafe (macOS), or with PARALAB_START=spawn, the same
server starts a new interpreter per rank: in seconds instead of milliseconds, otherwise alike. Spawn
uses nothing that only Linux has, so that it can be tested on Linux.

[Note: ends] The server ends when its socket closes or its parent changes, and kills its ranks and
their process groups. A rank ends when the pipe to its launcher closes or its parent changes
(ranks/process.py). With fork, Linux does more: it kills a rank whose server has ended even inside a
call that cannot be interrupted, and makes the server the parent of processes that a rank left in a
session of their own. With spawn such a process outlives its rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from paralab.checks import choice
from paralab.ranks.errors import RankError
from paralab.ranks.host import end_with_parent

START = "PARALAB_START"  # the environment variable that chooses between "fork" and "spawn"
LOOK_SECONDS = 0.1  # between two checks whether to go on waiting
IDLE_SECONDS = 1.0  # after the last request, before the server imports modules of WHEN_IDLE
END_SECONDS = 50.0  # for all ranks to end; after that the server is killed, and they with it
NO_PROCESS = """. The user, or the container, may have no more processes and threads (ulimit -u \
shows the user's limit): use fewer ranks, or end other programs"""
CANNOT_START = "ranks cannot start, because an import that they need fails:\n\n"

# Modules that every rank needs. If an import fails, the launch fails with its error.
ESSENTIAL = (
    "numpy.random",
    "torch.distributed",
    "paralab.ranks.process",
    "paralab.interpret.train",  # the program of pl.run
    "paralab.ranks.rehearsal",
)
# torch's compiler, which its optimizers import at first use: 1.4 s in every rank if not shared.
# Loaded before the first launch that may use an optimizer; `pl.run` calls the kernels themselves.
TO_TRAIN = ("torch._dynamo",)
# Modules that the ranks of an exercise's check import, and that DDP, FSDP and the profiler import
# at first use; also parts of torch._dynamo, one by one: 75 MB in every rank if not shared. They are
# loaded while no launch runs, each in less than 0.4 s, so that a first launch need not wait. If an
# import fails here, a rank that needs the module tries again, and raises the error.
WHEN_IDLE = (
    "paralab.exercises.watched",
    "sympy",
    "torch.fx.experimental.symbolic_shapes",
    "torch._inductor.config",
    "torch.distributed.fsdp",
    "torch._dynamo",
    "torch.profiler",
    "torch.distributed.tensor.parallel",
    "torch.distributed.pipelining",
)
# Also keeps numpy's BLAS from starting threads in the server, which a fork would not copy.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def start_method() -> str:
    """The value of PARALAB_START; by default "fork" on Linux, "spawn" on other Unix systems.

    Raises ``ValueError`` for another value.
    """
    usual = "fork" if sys.platform == "linux" else "spawn"
    return choice(START, os.environ.get(START) or usual, ("fork", "spawn"))


class RankServer:
    """The caller's end of one server process. Not thread-safe: the launcher holds a lock."""

    def __init__(self, method: str) -> None:
        self.method = method
        self._socket, theirs = socket.socketpair()
        self.connection = Connection(os.dup(self._socket.fileno()))
        # Where this process has closed its standard streams, a socket may have the number of one.
        fd = fcntl.fcntl(theirs, fcntl.F_DUPFD_CLOEXEC, 3)
        serve = f"s.serve({fd}, {method!r}, {os.getpid()})"
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        with theirs, os.fdopen(fd):
            # In a session of its own the server gets neither Ctrl-C nor Jupyter's interrupt.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", f"import paralab.ranks.server as s; {serve}"],
                env={**os.environ, **ONE_THREAD, "PYTHONPATH": path},
                pass_fds=[fd],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.pid = self._process.pid
        self._in_request = False  # still True after an interrupt: then an answer may be outstanding
        self._requested: set[tuple[str, ...]] = set()  # modules that the server was told to load
        self.loading = 0  # of these requests, those without an answer yet
        self._load(ESSENTIAL)

    def alive(self) -> bool:
        return not self._in_request and self._process.poll() is None

    def get_ready(self, look: Callable[[], None] = lambda: None, *, to_train: bool = False) -> None:
        """Wait until the server has loaded ESSENTIAL; with ``to_train`` also TO_TRAIN.

        look  called ten times a second; it may raise to end the waiting
        Raises ``RankError`` with the traceback of an import that failed; ``EOFError`` or
        ``OSError`` if the server has died.
        """
        if to_train:
            self._load(TO_TRAIN)
        while self.loading:
            while not self.connection.poll(LOOK_SECONDS):  # an interrupt here loses no answer
                look()
            failed = self.connection.recv()[1]
            self.loading -= 1
            if failed:
                self._in_request = True  # so not `alive`: the next call starts another server
                raise RankError(CANNOT_START + failed)

    def _load(self, names: tuple[str, ...]) -> None:
        if self.method == "fork" and names not in self._requested:
            self._requested.add(names)
            self.loading += 1
            with contextlib.suppress(OSError):  # the server has died: waiting for it says so
                self.connection.send(("load", names))

    def fork(self, folder: Path, fds: list[tuple[int, ...]]) -> list[int]:
        """Start one rank per (control, output, errors) descriptors; returns their process ids.

        Raises ``EOFError`` or ``OSError`` if the server has died, and ``RankError`` if the system
        refuses another process.
        """
        self._in_request = True
        self.connection.send(("fork", str(folder), len(fds)))
        socket.send_fds(self._socket, [b"f"], [fd for ends in fds for fd in ends])
        _, pids, failed = self.connection.recv()
        self._in_request = False
        if failed:
            raise RankError(f"rank {len(pids)} cannot start: {failed}{NO_PROCESS}", rank=len(pids))
        return pids

    def deaths(self) -> dict[int, int]:
        """{process id: exit code} of ranks that ended since the last call; a signal is below 0."""
        self._in_request, codes = True, {}
        while self.connection.poll(0):
            _, pid, code = self.connection.recv()
            codes[pid] = code
        self._in_request = False
        return codes

    def end_ranks(self) -> None:
        """Kill every rank and the processes that it started; returns when all have ended."""
        if not self._in_request:
            self._in_request = True
            give_up = time.monotonic() + END_SECONDS
            with contextlib.suppress(EOFError, OSError):
                self.connection.send(("end",))
                while self.connection.poll(max(0.0, give_up - time.monotonic())):
                    if self.connection.recv()[0] == "ended":
                        self._in_request = False
                        return
        self.close()  # the server does not answer; its ranks end when it does

    def close(self) -> None:
        """End the server and its ranks."""
        self._process.kill()
        self._process.wait()
        self.let_go()

    def let_go(self) -> None:
        """Close this process's ends without ending the server: for a fork of the caller."""
        self._socket.close()
        self.connection.close()


# ---- the process --------------------------------------------------------------------------------


def serve(fd: int, method: str, caller: int) -> NoReturn:
    """The server process, from start to end. ``caller``: the id of the process it must not outlive.

    The server stays single-threaded and never uses CUDA: neither threads nor CUDA survive a fork.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited by the ranks
    gc.disable()  # a collection would write to pages that ranks share
    _Server(fd, method, caller).run()


class _Server:
    def __init__(self, fd: int, method: str, caller: int) -> None:
        os.set_inheritable(fd, False)
        self.socket = socket.socket(fileno=fd)
        self.connection = Connection(os.dup(fd))
        self.method, self.caller = method, caller
        self.ranks: set[int] = set()  # process ids
        self.folder: str | None = None  # of the launch in progress
        self.idle_from = 0.0
        self.later = list(WHEN_IDLE) if method == "fork" else []
        self.wake_up, wake = os.pipe()
        for end in (self.wake_up, wake):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.children = Path(f"/proc/self/task/{os.getpid()}/children")
        # Becoming the parent of orphans only helps if they can be listed.
        if self._on_linux() and self.children.exists():
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def _on_linux(self) -> bool:
        """Whether to use features that only Linux has: [Note: spawn]."""
        return self.method == "fork" and sys.platform == "linux"

    def run(self) -> NoReturn:
        with contextlib.suppress(EOFError, OSError):  # the caller has ended
            while os.getppid() == self.caller:
                self._one_round()
        self._leave()

    def _leave(self) -> NoReturn:
        with contextlib.suppress(EOFError, OSError):
            # The folder of a launch that the server has not begun must be removed, too.
            while self.folder is None and self.connection.poll(0):
                kind, *args = self.connection.recv()
                self.folder = args[0] if kind == "fork" else None
        self._kill_all()
        os._exit(0)

    def _one_round(self) -> None:
        idle = self.later and not self.ranks and time.monotonic() >= self.idle_from
        ready, _, _ = select.select([self.socket, self.wake_up], [], [], 0.0 if idle else 1.0)
        if self.wake_up in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self.wake_up, 4096)
            self._reap()
        if self.socket in ready:
            kind, *args = self.connection.recv()
            {"load": self._load, "fork": self._fork, "end": self._end}[kind](*args)
        elif idle:
            with contextlib.suppress(Exception):
                self._import(self.later.pop(0))

    def _load(self, names: tuple[str, ...]) -> None:
        failed = ""
        try:
            for name in names:
                self._import(name)
        except Exception:
            failed = traceback.format_exc()
        self.idle_from = time.monotonic() + IDLE_SECONDS
        self.connection.send(("loaded", failed))

    def _import(self, name: str) -> None:
        """Import a module. It may take seconds, so a timer checks that the caller still exists."""
        signal.signal(signal.SIGALRM, lambda *_: os.getppid() == self.caller or self._leave())
        signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)
        try:
            importlib.import_module(name)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)

    def _fork(self, folder: str, count: int) -> None:
        self.folder = folder
        _, fds, _, _ = socket.recv_fds(self.socket, 1, 3 * count)
        for fd in fds:
            os.set_inheritable(fd, False)
        gc.freeze()  # a rank's collector ignores the shared objects, so it writes to none of them
        pids, server, failed = [], os.getpid(), ""
        for rank in range(count):
            try:
                pid = os.fork()
            except OSError as error:
                failed = error.strerror
                break
            if pid == 0:
                try:
                    self._become(rank, fds, server)
                finally:
                    os._exit(1)
            pids.append(pid)
        self.ranks.update(pids)
        for fd in fds:
            os.close(fd)
        self.connection.send(("born", pids, failed))

    def _become(self, rank: int, fds: list[int], server: int) -> None:
        """In the new process: drop all that belongs to the server, then become a rank."""
        os.setsid()
        if self._on_linux():  # the kernel kills this process when the server ends
            end_with_parent(by=signal.SIGKILL)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        # SIGUSR1 asks for stacks, and must not end a rank that cannot write them yet, even in exec.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        control, output, errors = fds[3 * rank : 3 * rank + 3]
        os.dup2(output, 1)
        os.dup2(errors, 2)
        self.socket.close()
        self.connection.close()
        for fd in fds:
            if fd != control:
                os.close(fd)
        if self.method == "fork":
            be_rank(rank, control, self.folder, server)
        os.set_inheritable(control, True)
        code = f"s.be_rank({rank}, {control}, {self.folder!r}, {server})"
        command = [sys.executable, "-P", "-c", f"import paralab.ranks.server as s; {code}"]
        os.execv(sys.executable, command)

    def _reap(self) -> None:
        """Report each rank that ended, and kill the processes that it had started."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                if pid in self.ranks:
                    self.ranks.discard(pid)
                    kill(pid)
                    self.connection.send(("exit", pid, os.waitstatus_to_exitcode(status)))

    def _end(self) -> None:
        self._kill_all()
        self.idle_from = time.monotonic() + IDLE_SECONDS
        self.connection.send(("ended",))

    def _kill_all(self) -> None:
        for pid in self.ranks:
            kill(pid)
        with contextlib.suppress(ChildProcessError):
            while True:
                with contextlib.suppress(OSError, ValueError):
                    for pid in self.children.read_text().split():  # ranks, and their orphans
                        kill(int(pid))
                os.waitpid(-1, 0)
        self.ranks.clear()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = None


def be_rank(rank: int, control: int, folder: str, server: int) -> NoReturn:
    """In a rank's process: import the modules that a forked rank inherits, then be the rank."""
    try:
        for name in ESSENTIAL:
            importlib.import_module(name)
    except Exception:
        failure = rank, time.monotonic(), "cannot start", traceback.format_exc()
        Connection(control).send(("failure", *failure))
        os._exit(1)
    sys.modules["paralab.ranks.process"].main(rank, control, folder, server)


def kill(pid: int) -> None:
    """SIGKILL to a rank and to its process group, of which it is the leader."""
    for send in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            send(pid, signal.SIGKILL)
