"""Where ranks are born: a process that has torch loaded forks one in milliseconds.

A rank that starts from nothing imports torch first: seconds, and 160 MB each. The server imports it
once and forks; a rank shares those pages with all the others. `multiprocessing` has a forkserver
too, but one per process: it would be shared with the user's own pools, ask for their settings, and
import their ``__main__`` again in every rank. This one talks over one inherited socket, so there is
no port, no file and no key. `RankServer` is the caller's end, `serve` the process; neither imports
torch by name.

[Note: spawn] Where forking a loaded torch is unsafe (macOS), or PARALAB_START=spawn asks for it,
the same server starts a new interpreter per rank: seconds instead of milliseconds, otherwise alike.
Spawn uses nothing that only Linux has, so it can be tested there.

[Note: ends] The server ends when its socket closes or its parent changes, and kills its ranks and
their process groups. A rank ends when the pipe to its launcher closes or its parent changes
(ranks/process.py). With fork, Linux does more: it kills a rank with its server even in the middle
of a call that cannot be interrupted, and hands the server what a rank started in a session of its
own. With spawn such a process outlives its rank.
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
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from paralab.checks import choice

START = "PARALAB_START"  # the environment variable that chooses between "fork" and "spawn"
LOOK_SECONDS = 0.1  # between two looks at whether to go on waiting
IDLE_SECONDS = 1.0  # after the last thing asked for, before the server goes on with WHEN_IDLE
END_SECONDS = 50.0  # for all ranks to be gone; then the server itself is killed, and they with it
CANNOT_START = "ranks cannot start, an import they need fails:\n\n"

# What every rank needs. A failing import is the launch's error.
ESSENTIAL = (
    "numpy.random",
    "torch.distributed",
    "paralab.ranks.process",
    "paralab.interpret.train",  # the program of pl.run
    "paralab.ranks.rehearsal",
)
# What torch's optimizers import at first use, its compiler: 1.4 s in every rank if not shared.
# Loaded before the first launch that may use one; `pl.run` calls the kernels themselves.
TO_TRAIN = ("torch._dynamo",)
# What ranks of an exercise's check import, and what DDP, FSDP and the profiler import at first use,
# and all of the above in smaller pieces: 75 MB in every rank if not shared. Loaded while no launch
# runs, in pieces below 0.4 s, so a first launch does not pay for it. A rank that uses a piece that
# failed tries again, and the error is raised there.
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
# Also keeps numpy's BLAS from starting threads in the server, where they would not survive a fork.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def start_method() -> str:
    """What PARALAB_START asks for; otherwise "fork" on Linux, "spawn" on other Unix systems.

    Raises ``ValueError`` for another word, and ``RuntimeError`` on Windows, which has neither the
    signals nor the file descriptors that a launch passes on.
    """
    if os.name != "posix":
        raise RuntimeError(
            f"ranks cannot be started on {sys.platform}: paralab needs the processes and signals "
            "of a Unix system; on Windows run Jupyter inside WSL 2, where everything works"
        )
    usual = "fork" if sys.platform == "linux" else "spawn"
    return choice(START, os.environ.get(START) or usual, ("fork", "spawn"))


class RankServer:
    """The caller's end of one server process. Not thread-safe: the launcher holds a lock."""

    def __init__(self, method: str) -> None:
        self.method = method
        self._socket, theirs = socket.socketpair()
        self.connection = Connection(os.dup(self._socket.fileno()))
        be = f"import paralab.ranks.server as s; s.serve({theirs.fileno()}, {method!r}, "
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        with theirs:
            # A session of its own: Ctrl-C and Jupyter's interrupt go to the caller's process group.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", f"{be}{os.getpid()})"],
                env={**os.environ, **ONE_THREAD, "PYTHONPATH": path},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._talking = False  # an interrupted conversation cannot be taken up again
        self._asked: set[tuple[str, ...]] = set()  # modules to load
        self.loading = 0  # requests without an answer yet
        self._load(ESSENTIAL)

    @property
    def pid(self) -> int:
        return self._process.pid

    def alive(self) -> bool:
        return not self._talking and self._process.poll() is None

    def get_ready(self, look: Callable[[], None] = lambda: None, *, to_train: bool = False) -> None:
        """Wait until the server has loaded what ranks need, and for training an optimizer.

        look  called ten times a second; what it raises ends the waiting, and does no harm
        Raises ``RuntimeError`` with the import's traceback if it could not; ``EOFError`` or
        ``OSError`` if it has died.
        """
        if to_train:
            self._load(TO_TRAIN)
        while self.loading:
            while not self.connection.poll(LOOK_SECONDS):  # an interrupt here does no harm
                look()
            failed = self.connection.recv()[1]
            self.loading -= 1
            if failed:
                self._talking = True  # not `alive` for the next call, which tries again
                raise RuntimeError(CANNOT_START + failed)

    def _load(self, names: tuple[str, ...]) -> None:
        if self.method == "fork" and names not in self._asked:
            self._asked.add(names)
            self.loading += 1
            with contextlib.suppress(OSError):  # it has died: the next answer says so
                self.connection.send(("load", names))

    def fork(self, folder: Path, fds: list[tuple[int, int]]) -> list[int]:
        """Start one rank per (control, output) descriptor pair; returns their process ids.

        Raises ``EOFError`` or ``OSError`` if the server has died.
        """
        self._talking = True
        self.connection.send(("fork", str(folder), len(fds)))
        socket.send_fds(self._socket, [b"f"], [fd for pair in fds for fd in pair])
        _, pids = self.connection.recv()
        self._talking = False
        return pids

    def deaths(self) -> dict[int, int]:
        """{process id: exit code} of ranks that ended since the last call; below 0 for a signal."""
        self._talking, found = True, {}
        while self.connection.poll(0):
            _, pid, code = self.connection.recv()
            found[pid] = code
        self._talking = False
        return found

    def end_ranks(self) -> None:
        """SIGKILL to every rank and what it started; returns when all are gone."""
        if not self._talking:
            self._talking = True
            give_up = time.monotonic() + END_SECONDS
            with contextlib.suppress(EOFError, OSError):
                self.connection.send(("end",))
                while self.connection.poll(max(0.0, give_up - time.monotonic())):
                    if self.connection.recv()[0] == "ended":
                        self._talking = False
                        return
        self.close()  # it does not answer, so its ranks end by its death

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
    """The server process, from start to end. ``caller`` is the process id it must not outlive.

    It stays single-threaded and never touches CUDA, because neither survives a fork.
    """
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
        self.folder: str | None = None  # of the launch in progress
        self.idle_from = 0.0
        self.later = list(WHEN_IDLE) if method == "fork" else []
        self.wake_up, wake = os.pipe()
        for end in (self.wake_up, wake):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.children = Path(f"/proc/self/task/{os.getpid()}/children")
        # Adopting orphans only helps if they can be found again.
        if self._on_linux() and self.children.exists():
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def _on_linux(self) -> bool:
        """Whether what only Linux has is used: [Note: spawn]."""
        return self.method == "fork" and sys.platform == "linux"

    def run(self) -> NoReturn:
        with contextlib.suppress(EOFError, OSError):  # the caller is gone
            while os.getppid() == self.caller:
                self._one_round()
        self._leave()

    def _leave(self) -> NoReturn:
        with contextlib.suppress(EOFError, OSError):
            while self.folder is None and self.connection.poll(0):  # a launch that was not begun
                kind, *said = self.connection.recv()
                self.folder = said[0] if kind == "fork" else None
        self._kill_all()
        os._exit(0)

    def _one_round(self) -> None:
        spare = self.later and not self.ranks and time.monotonic() >= self.idle_from
        ready, _, _ = select.select([self.socket, self.wake_up], [], [], 0.0 if spare else 1.0)
        if self.wake_up in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self.wake_up, 4096)
            self._reap()
        if self.socket in ready:
            kind, *said = self.connection.recv()
            {"load": self._load, "fork": self._fork, "end": self._end}[kind](*said)
        elif spare:
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
        """Seconds long, on a busy machine: look up meanwhile whether the caller is still there."""
        signal.signal(signal.SIGALRM, lambda *_: os.getppid() == self.caller or self._leave())
        signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)
        try:
            importlib.import_module(name)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)

    def _fork(self, folder: str, count: int) -> None:
        self.folder = folder
        _, fds, _, _ = socket.recv_fds(self.socket, 1, 2 * count)
        for fd in fds:
            os.set_inheritable(fd, False)
        gc.freeze()  # a rank's collector leaves the shared objects, and so their pages, alone
        pids, server = [], os.getpid()
        for rank in range(count):
            pid = os.fork()
            if pid == 0:
                try:
                    self._become(rank, fds, server)
                finally:
                    os._exit(1)
            pids.append(pid)
        self.ranks.update(pids)
        for fd in fds:
            os.close(fd)
        self.connection.send(("born", pids))

    def _become(self, rank: int, fds: list[int], server: int) -> None:
        """In the new process: cut every tie to the server but its life, then become a rank."""
        os.setsid()
        if self._on_linux():  # survives an exec
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
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
        if self.method == "fork":
            be_rank(rank, control, self.folder, server)
        os.set_inheritable(control, True)
        be = f"s.be_rank({rank}, {control}, {self.folder!r}, {server})"
        command = [sys.executable, "-P", "-c", f"import paralab.ranks.server as s; {be}"]
        os.execv(sys.executable, command)

    def _reap(self) -> None:
        """Report each rank that ended, and end what it had started."""
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
                    for pid in self.children.read_text().split():  # ranks, and orphans they left
                        kill(int(pid))
                os.waitpid(-1, 0)
        self.ranks.clear()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = None


def be_rank(rank: int, control: int, folder: str, server: int) -> NoReturn:
    """In a rank's process: import what a forked one has already, then be the rank."""
    try:
        for name in ESSENTIAL:
            importlib.import_module(name)
    except Exception:
        failed = rank, time.monotonic(), "cannot start", traceback.format_exc()
        Connection(control).send(("failure", *failed))
        os._exit(1)
    sys.modules["paralab.ranks.process"].main(rank, control, folder, server)


def kill(pid: int) -> None:
    """SIGKILL to a rank and to its whole process group: a rank leads one of its own."""
    for end in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            end(pid, signal.SIGKILL)
