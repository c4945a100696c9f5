"""Where ranks are born: a process that has torch loaded forks one in milliseconds.

A rank that starts from nothing imports torch first: seconds, and 160 MB each. The server
(ranks/serve.py) imports it once and forks; a rank shares those pages with all the others.
`multiprocessing` has a forkserver too, but one per process: it would be shared with the user's own
pools, ask for their settings, and import their ``__main__`` again in every rank. This one talks
over one inherited socket, so there is no port, no file and no key.

`RankServer` is the caller's end, and torch-free.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

LOOK_SECONDS = 0.1  # between two looks at whether to go on waiting
END_SECONDS = 5.0  # for all ranks to be gone; then the server itself is killed, and they with it

# Also keeps numpy's BLAS from starting threads in the server, where they would not survive a fork.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


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
            "from paralab.ranks.serve import serve; "
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
        self._to_train = ""  # "asked" to load what training needs, or "there"
        self._talking = False  # an interrupted conversation cannot be taken up again

    @property
    def pid(self) -> int:
        return self._process.pid

    def alive(self) -> bool:
        return not self._talking and self._process.poll() is None

    def get_ready(self, look: Callable[[], None] = lambda: None, *, to_train: bool = False) -> None:
        """Wait until the server has loaded what ranks need.

        look      called ten times a second; what it raises ends the waiting, and does no harm
        to_train  what an optimizer needs too
        Raises ``RuntimeError`` with the import's traceback if it could not; ``EOFError`` or
        ``OSError`` if it has died.
        """
        if not self._ready:
            kind, text = self._hear(look)
            if kind == "failed":
                self._talking = True  # it ends now: not `alive` for the next call
                raise RuntimeError(f"ranks cannot start, an import they need fails:\n\n{text}")
            self._ready = True
        if to_train and not self._to_train:
            self.connection.send(("to train",))
            self._to_train = "asked"
        if self._to_train == "asked":  # now, or by a launch that was interrupted
            self._hear(look)
            self._to_train = "there"

    def _hear(self, look: Callable[[], None]) -> tuple:
        while not self.connection.poll(LOOK_SECONDS):  # an interrupt here does no harm
            look()
        return self.connection.recv()

    def fork(self, folder: Path, fds: list[tuple[int, int]]) -> list[int]:
        """Fork one rank per (control, output) descriptor pair; returns their process ids.

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
