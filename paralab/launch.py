"""Ranks as processes: any function, from a notebook cell too, on real ranks with a process group.

    losses = pl.launch(fn, ranks=4, args=(0.1,))      # fn(0.1) on four ranks, results in rank order

A warm launch of 4 ranks takes some 0.1 s (ranks/server.py says why), so a real run fits inside a
cell; where ranks cannot be forked (macOS), some seconds. Functions and their arguments travel by
value (code.py), so nothing is imported again. Ranks meet through a file in a temporary folder:
no port, no host name.

One rule covers every failure. An exception in a rank, a rank that dies, no sign of life for
``timeout`` seconds, an interrupt, a ``stop`` event that is set: all ranks are killed, the folder is
removed, what they printed is shown, and one error says what happened first. torch is not imported
in this process.
"""

from __future__ import annotations

import atexit
import contextlib
import inspect
import linecache
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from paralab.checks import choice, illegal, instance, real, shown, whole
from paralab.default_device import LEGAL, default_device
from paralab.ranks.code import pickled
from paralab.ranks.errors import Nested, Stopped, interrupted
from paralab.ranks.server import LOOK_SECONDS, RankServer, start_method
from paralab.ranks.watch import Run

MAX_RANKS = 64
NEVER = 1e8  # seconds: what is longer is three years, too, which gloo can count in


def launch(
    fn: Callable[..., Any],
    ranks: int = 4,
    args: Sequence[Any] = (),
    *,
    timeout: float = 120.0,
    device: str | None = None,
    live: bool = False,
    stop: threading.Event | None = None,
) -> list[Any]:
    """Call ``fn(*args)`` on every rank; its results in rank order. The default process group is up.

    ranks    processes, 1 to 64
    timeout  seconds without any sign of life (a result, a line printed, a call that ends) before
             the ranks are stopped; the time that they take to start does not count
    device   "cpu", "cuda", or None: what `pl.set_default_device` says; else a GPU for each
             rank where there are as many, else the CPU
    live     show what ranks print as it comes; otherwise in rank order at the end
    stop     set it from any thread, at any moment, and the ranks end within a second

    Raises ``RankError``, ``RankTimeout``, ``OutOfMemory`` or ``Stopped``, and ``ValueError`` before
    a process starts. A second call from another thread waits for the first; one from a rank ends
    in ``RankError``, and from the ``progress`` function of `pl.run` it is refused with
    ``RuntimeError``.
    """
    __tracebackhide__ = True
    how = {"timeout": timeout, "device": device, "live": live, "stop": stop}
    return launch_program(fn, ranks, args, told=False, any_tensor=True, **how)


def warm_up() -> None:
    """Start loading torch for the ranks to come, in the background. Returns at once; idempotent."""
    if _house.lock.acquire(blocking=False):  # else a launch is in progress, and there is a server
        try:
            _house.server()
        finally:
            _house.lock.release()


class _House:
    """What this process has only one of: the server, and the turn to use it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.owner: int | None = None  # thread that has the turn
        self._server: RankServer | None = None

    def server(self) -> RankServer:
        """The running server; a new one if there is none, it has died, or another start method is
        asked for. Needs the lock.
        """
        method = start_method()
        if self._server is not None and (not self._server.alive() or self._server.method != method):
            self.close()
        if self._server is None:
            self._server = RankServer(method)
        return self._server

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    @contextlib.contextmanager
    def turn(self, stop: threading.Event | None) -> Iterator[RankServer]:
        """The server, when the launches before this one have ended."""
        me = threading.get_ident()
        if self.owner == me:
            raise RuntimeError(
                "a launch is in progress in this thread and waits for this callback to return: "
                "start the next one after it has ended"
            )
        while not self.lock.acquire(timeout=LOOK_SECONDS if stop else -1):
            if stop.is_set():
                raise Stopped("stopped while waiting for the launch before it to end")
        try:
            self.owner = me
            yield self.server()
        finally:
            self.owner = None
            self.lock.release()


_house = _House()
atexit.register(lambda: _house.close())


def _forget_house() -> None:
    """In a fork of this process: the server belongs to the original."""
    global _house
    if _house._server is not None:
        _house._server.let_go()
    _house = _House()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_house)


def launch_program(
    program: Callable[..., Any],
    ranks: int,
    args: Sequence[Any] = (),
    *,
    told: bool = True,
    any_tensor: bool = False,
    optimizers: bool = True,
    timeout: float = 120.0,
    device: str | None = None,
    live: bool = False,
    on_progress: Callable[[int, int, int], None] | None = None,
    strict: bool = False,
    stop: threading.Event | None = None,
) -> list[Any]:
    """`launch` for a program that is told who it is: ``program(context, *args)``.

    told         False for `launch`, whose ``fn`` is not
    any_tensor   where ranks have a GPU each, the process group carries the host's tensors too, over
                 gloo. Otherwise it is NCCL alone, which refuses them
    optimizers   False where ranks use none of torch's: they need not wait for what it imports
    on_progress  called here as ``on_progress(rank, done, total)``, in the thread that launched
    strict       carried to ``context.strict``
    """
    __tracebackhide__ = True
    name = "program" if told else "fn"
    if "PARALAB_RANK" in os.environ:
        raise Nested(
            f"rank {os.environ['PARALAB_RANK']} called a launch: ranks cannot launch "
            "ranks; legal: one from outside, where PARALAB_RANK is not set"
        )
    if not callable(program):
        raise illegal(name, program, "cannot be called", "a function")
    ranks = whole("ranks", ranks, at_least=1, at_most=MAX_RANKS)
    instance("args", args, (tuple, list), f"args=({shown(args)},)", "tuple of arguments")
    timeout = min(real("timeout", timeout, above=0.0), NEVER)
    choice("device", device, LEGAL)
    choice("live", live, (False, True))
    choice("strict", strict, (False, True))
    if stop is not None and not isinstance(stop, threading.Event):
        raise illegal("stop", stop, "not an event", "None | threading.Event()")
    payload = _pickled(name, program, tuple(args))
    try:
        here = os.getcwd()
    except FileNotFoundError:
        raise FileNotFoundError("the current folder was deleted: change to another one") from None
    task = {
        "ranks": ranks,
        "device": device or default_device(),
        "strict": strict,
        "with_context": told,
        "any_tensor": any_tensor,
        # One rank's output extends the time of all, so gloo's own, per call, has to be far longer:
        # the error that says who waits for whom comes from here.
        "group_timeout": 10 * timeout + 60,
        "cwd": here,
        "path": [entry or here for entry in sys.path],
        "argv": sys.argv,
        "env": dict(os.environ),
        "lines": _cells(),
    }
    with _house.turn(stop) as server:
        run = Run(server, timeout=timeout, on_progress=on_progress, stop=stop)
        try:
            run.start(ranks, pickle.dumps(task), payload, live=live, trains=told and optimizers)
            error = run.watch()
        except KeyboardInterrupt as interrupt:
            raise interrupted(interrupt, run.interrupted()) from None
        finally:
            try:
                run.end()
            except KeyboardInterrupt:  # just before `end` began to hold it off
                run.end()
                raise
        if error is not None:
            raise error
        return run.results()


def _cells() -> dict[str, Any]:
    """The source of code that is in no file: notebook cells, for the tracebacks of ranks."""
    entries = linecache.cache.items()
    return {name: entry for name, entry in list(entries) if len(entry) == 4 and entry[1] is None}


def _pickled(name: str, function: Callable[..., Any], args: tuple) -> bytes:
    try:
        return pickled((function, args))
    except Exception as error:
        said = str(error) or type(error).__name__
    for what, value in _parts(name, function, args):
        try:
            pickled(value)
        except Exception as error:
            table = any(hasattr(one, "registry") for one in (value, function))
            why = "functools.singledispatch keeps weak references" if table else error
            said = f"{what}, a {type(value).__name__}, cannot be sent to a rank ({why})"
            break
    legal = "numbers, arrays, functions; open files, locks and connections inside the function"
    raise illegal(name, getattr(function, "__name__", function), said, legal)


def unsent(name: str, *functions: Any) -> str:
    """Why one of these functions cannot be sent to a rank, or ""."""
    for function in functions:
        try:
            _pickled(name, function, ())
        except ValueError as error:
            return str(error)
    return ""


def _parts(name: str, function: Any, args: tuple) -> Iterator[tuple[str, Any]]:
    """What a function takes along, by the names the user gave it."""
    for index, value in enumerate(args):
        yield f"args[{index}]", value
    with contextlib.suppress(TypeError, ValueError):  # no Python function; a name without a value
        taken = inspect.getclosurevars(function)
        for kind, values in (("variable", taken.nonlocals), ("global", taken.globals)):
            for variable, value in values.items():
                yield f"its {kind} {variable!r}", value
    yield name, function
