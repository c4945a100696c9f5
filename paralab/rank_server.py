"""Where ranks are born: a server process that has torch loaded forks one in milliseconds.

A rank that starts from nothing imports torch first: seconds, and 160 MB each. The server imports it
once, stays single-threaded, never touches CUDA, and forks; a rank then shares those pages with all
the others. `multiprocessing` has a forkserver too, but one per process: it would be shared with
the user's own pools, ask for their settings and import their ``__main__`` again in every rank. This
one talks over one inherited socket, so there is no port, no file and no key.

    RankServer   the caller's end: start, fork, end, close; torch-free
    serve        the server's end: preload, fork, report exits, clean up when the caller is gone

Nothing outlives the caller: the server ends when its socket closes or its parent changes, a rank
gets SIGKILL when the server ends, and whatever a rank itself started is adopted by the server
(a child subreaper) and ended with it. Where forking a loaded torch is unsafe (macOS) the same
server execs a fresh interpreter per rank: method "spawn", slower and larger, otherwise alike.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import importlib.util
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

# What every rank needs. Failing to import one of these is the launch's error.
ESSENTIAL = ("torch", "torch.distributed", "paralab.rank_process", "paralab.train")
# What DDP, FSDP and the profiler pull in at first use: 0.9 s and 75 MB in every rank if not shared.
# Loaded while nobody waits, in pieces below 0.4 s, so a first launch does not pay for it. A piece
# that fails is tried again by the rank that uses it, and the error is raised there.
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
END_SECONDS = 5.0  # for all ranks to be gone; then the server itself is killed, and they with it

# Also keeps numpy's BLAS from starting threads in the server, where they would not survive a fork.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def default_method() -> str:
    """ "fork" on Linux, "spawn" on other Unix systems.

    Raises ``RuntimeError`` on Windows, which has neither signals nor file descriptors to pass.
    """
    if os.name != "posix":
        raise RuntimeError(
            f"ranks cannot be started on {sys.platform}: paralab needs the processes and signals "
            "of a Unix system; on Windows run Jupyter inside WSL 2, where everything works"
        )
    return "fork" if sys.platform == "linux" else "spawn"


class RankServer:
    """The caller's end of one server process. Not thread-safe: the launcher holds a lock."""

    def __init__(self, method: str | None = None) -> None:
        ours, theirs = socket.socketpair()
        serve_it = (
            "from paralab.rank_server import serve; "
            f"serve({theirs.fileno()}, {method or default_method()!r}, {os.getpid()})"
        )
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        # A session of its own: Ctrl-C and Jupyter's interrupt go to the caller's process group.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", serve_it],
            env={**os.environ, **ONE_THREAD, "PYTHONPATH": path},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        self._socket = ours
        self.connection = Connection(os.dup(ours.fileno()))
        self._ready = False
        self._talking = False  # an interrupted conversation cannot be taken up again

    @property
    def pid(self) -> int:
        return self._process.pid

    def alive(self) -> bool:
        return not self._talking and self._process.poll() is None

    def fork(self, folder: Path, fds: list[tuple[int, int]]) -> list[int]:
        """Fork one rank per (control, output) descriptor pair; returns their process ids.

        Raises ``RuntimeError`` if the server could not load what ranks need, with the import's
        traceback, and ``EOFError`` or ``OSError`` if it has died.
        """
        if not self._ready:
            self.connection.poll(None)  # an interrupt while torch loads does no harm
            kind, text = self.connection.recv()
            if kind == "failed":
                raise RuntimeError(f"ranks cannot start, an import they need fails:\n\n{text}")
            self._ready = True
        self._talking = True
        self.connection.send(("fork", str(folder), len(fds)))
        socket.send_fds(self._socket, [b"f"], [fd for pair in fds for fd in pair])
        kind, pids = self.connection.recv()
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
        try:
            if self._talking:
                raise EOFError
            self._talking = True
            self.connection.send(("end",))
            give_up = time.monotonic() + END_SECONDS
            while self.connection.poll(max(0.0, give_up - time.monotonic())):
                if self.connection.recv()[0] == "ended":
                    self._talking = False
                    return
        except (EOFError, OSError):
            pass
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


def serve(fd: int, method: str, caller: int) -> None:
    """The server process, from start to end. ``caller`` is the process id it must not outlive."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
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
            self._end()
            os._exit(0)

    def _preload(self) -> None:
        try:
            for name in ESSENTIAL if self.method == "fork" else ():
                if name != "paralab.train" or importlib.util.find_spec(name):
                    importlib.import_module(name)
            self.connection.send(("ready", ""))
        except Exception:
            self.connection.send(("failed", traceback.format_exc()))
            raise EOFError from None

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
            else:
                self._end()
                self.connection.send(("ended",))
        elif spare:
            with contextlib.suppress(Exception):
                importlib.import_module(self.later.pop(0))

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
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
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
            be = f"import paralab.rank_process as r; r.main({rank}, {control}, {self.folder!r})"
            os.execv(sys.executable, [sys.executable, "-P", "-c", be])
        from paralab import rank_process

        rank_process.main(rank, control, self.folder)

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
