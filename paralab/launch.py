"""Ranks as processes: any function, from a notebook cell too, on real ranks with a process group.

    losses = pl.launch(fn, ranks=4, args=(0.1,))      # fn(0.1) on four ranks, results in rank order

A warm launch of 4 ranks takes about 0.1 s (ranks/server.py says why), so a notebook cell can start
real ranks; where ranks cannot be forked (macOS) it takes some seconds. The function and its
arguments are pickled by value (ranks/code.py), so ranks need not import the module that defines
them. Ranks rendezvous through a file in a temporary folder: no port, no host name.

One rule covers every failure. An exception in a rank, a rank that dies, no sign of life for
``timeout`` seconds, an interrupt, a ``stop`` event that is set: in each case all ranks are killed,
the folder is removed, the ranks' output is shown, and one error says what happened first. torch is
not imported in this process.
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

from paralab.checks import choice, current_folder, illegal, instance, misfit, real, shown, whole
from paralab.default_device import LEGAL, default_device
from paralab.ranks.code import pickled
from paralab.ranks.errors import Nested, Stopped, interrupted
from paralab.ranks.lookout import backstop
from paralab.ranks.server import LOOK_SECONDS, RankServer, start_method
from paralab.ranks.watch import Run

MAX_RANKS = 64
MAX_TIMEOUT = 1e8  # seconds, three years: longer ones become this, which gloo can hold


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
    """Call ``fn(*args)`` on every rank, where the default process group is initialized, and return
    the results in rank order.

    ranks    processes, 1 to 64
    args     the arguments, the same on every rank
    timeout  seconds without any sign of life (a result, a line printed, a call that ends) after
             which the ranks are stopped; the time that they take to start does not count
    device   "cpu", "cuda", or None: what `pl.set_default_device` says; else a GPU for each
             rank where there are as many, else the CPU
    live     show what ranks print as it comes, and on standard error what they print there, instead
             of all on standard output in rank order at the end
    stop     an event: set it from any thread, at any moment, and the ranks end within a second

    Raises ``RankError``, ``RankTimeout``, ``OutOfMemory`` or ``Stopped``, and ``ValueError`` before
    a process starts. A second call from another thread waits for the first. A call from a rank ends
    in ``RankError``; one from the ``progress`` function of `pl.run` raises ``RuntimeError``.
    """
    __tracebackhide__ = True
    how = {"timeout": timeout, "device": device, "live": live, "stop": stop}
    return launch_program(fn, ranks, args, with_context=False, any_tensor=True, **how)


def warm_up() -> None:
    """Start the server that loads torch for later launches. Returns at once; idempotent."""
    if _shared_server.lock.acquire(blocking=False):  # else a launch has started the server
        try:
            _shared_server.server()
        finally:
            _shared_server.lock.release()


class _SharedServer:
    """The rank server of this process, and the lock that lets one launch at a time use it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.owner: int | None = None  # the thread whose launch is in progress
        self._server: RankServer | None = None

    def server(self) -> RankServer:
        """The running server; a new one if there is none, if it has died, or if PARALAB_START now
        names another start method. The caller holds the lock.
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
        """Wait until the launches before this one have ended, then yield the server."""
        me = threading.get_ident()
        if self.owner == me:
            raise RuntimeError(
                "a launch is in progress in this thread and waits for this callback to return: "
                "start the next launch after that one has ended"
            )
        while not self.lock.acquire(timeout=LOOK_SECONDS if stop else -1):
            if stop.is_set():
                raise Stopped("stopped while waiting for an earlier launch to end")
        try:
            self.owner = me
            yield self.server()
        finally:
            self.owner = None
            self.lock.release()


_shared_server = _SharedServer()
atexit.register(lambda: _shared_server.close())


def _forget_server() -> None:
    """Run in a fork of this process: the server goes on belonging to the parent."""
    global _shared_server
    if _shared_server._server is not None:
        _shared_server._server.let_go()
    _shared_server = _SharedServer()


os.register_at_fork(after_in_child=_forget_server)


def launch_program(
    program: Callable[..., Any],
    ranks: int,
    args: Sequence[Any] = (),
    *,
    fn: Any = ...,
    with_context: bool = True,
    any_tensor: bool = False,
    optimizers: bool = True,
    timeout: float = 120.0,
    device: str | None = None,
    live: bool = False,
    on_progress: Callable[[int, int, int], None] | None = None,
    strict: bool = False,
    stop: threading.Event | None = None,
) -> list[Any]:
    """`launch` for a function that gets its `RankContext` too: ``program(context, *args)``.

    fn            the user's function that ``program`` passes ``args`` to, if it is not ``program``
                  itself: an error about what cannot be sent to ranks names it
    with_context  False: call ``program(*args)``, as `launch` does
    any_tensor    where each rank has a GPU, let the process group carry CPU tensors too, over gloo;
                  otherwise it is NCCL alone, which refuses them
    optimizers    False if ranks use no optimizer of torch's, whose imports take more than a second
    on_progress   called as ``on_progress(rank, done, total)``, in the thread of this call
    strict        the value of ``context.strict``

    The other arguments are those of `launch`.
    """
    __tracebackhide__ = True
    first = [None] * (with_context if fn is ... else not any_tensor)  # the group of a rank
    fn = program if fn is ... else fn
    if "PARALAB_RANK" in os.environ:
        raise Nested(
            f"rank {os.environ['PARALAB_RANK']} called a launch: ranks cannot launch ranks; legal: "
            "a call from a process that is not a rank, where PARALAB_RANK is not set"
        )
    call = "fn(group, *args)" if first else "fn(*args)"
    if not callable(program) or not (any_tensor or callable(fn)):
        raise illegal("fn", fn, "cannot be called", f"a function for the call {call}")
    ranks = whole("ranks", ranks, at_least=1, at_most=MAX_RANKS)
    instance("args", args, (tuple, list), f"args=({shown(args)},)", "tuple of arguments")
    timeout = check_launch(timeout, device, strict, stop)
    payload = _pickled("fn", program, tuple(args), fn)
    if callable(fn) and (why := misfit(fn, *first, *args)):
        raise illegal("fn", fn, why, f"a function for the call {call}, with args={shown(args)}")
    cwd = current_folder()
    task = {
        "ranks": ranks,
        "device": device or default_device(),
        "strict": strict,
        "with_context": with_context,
        "any_tensor": any_tensor,
        # `watch` gives all ranks more time whenever one of them shows a sign of life; gloo's limit
        # is per call and knows nothing of that. It has to be far longer, so that `watch` gives up
        # first: its error says which rank waits for which.
        "group_timeout": backstop(timeout),
        "cwd": cwd,
        "path": [entry or cwd for entry in sys.path],
        "argv": sys.argv,
        "env": dict(os.environ),
        "lines": _cell_sources(),
    }
    with _shared_server.turn(stop) as server:
        run = Run(server, timeout=timeout, on_progress=on_progress, stop=stop)
        try:
            run.start(
                ranks, pickle.dumps(task), payload, live=live, trains=with_context and optimizers
            )
            error = run.watch()
        except KeyboardInterrupt as interrupt:
            raise interrupted(interrupt, run.interrupted()) from None
        finally:
            try:
                run.end()
            except KeyboardInterrupt as interrupt:  # raised before `end` held interrupts, or after
                run.end()
                raise interrupted(interrupt, "interrupted") from None
        if error is not None:
            raise error
        return run.results()


def check_launch(
    timeout: float, device: str | None, strict: bool = False, stop: threading.Event | None = None
) -> float:
    """The timeout in effect. Raises ``ValueError`` on arguments of `launch` that are illegal."""
    timeout = min(real("timeout", timeout, above=0.0), MAX_TIMEOUT)
    choice("device", device, LEGAL)
    choice("strict", strict, (False, True))
    if stop is not None and not isinstance(stop, threading.Event):
        raise illegal("stop", stop, "not an event", "None | threading.Event()")
    return timeout


def _cell_sources() -> dict[str, Any]:
    """The entries of `linecache` that have no file, for tracebacks in ranks: notebook cells."""
    entries = linecache.cache.items()
    return {name: entry for name, entry in list(entries) if len(entry) == 4 and entry[1] is None}


def _pickled(name: str, function: Callable[..., Any], args: tuple, fn: Any) -> bytes:
    """(function, args) as bytes. Raises ``ValueError`` naming the object of the user's ``fn`` or of
    ``args`` that cannot be sent.
    """
    try:
        return pickled((function, args))
    except Exception as error:
        reason = str(error) or type(error).__name__
    for label, value in _labelled(name, fn, args):
        try:
            pickled(value)
        except Exception as error:
            reason = f"{label}, a {type(value).__name__}, cannot be sent to a rank ({error})"
            break
    legal = "numbers, arrays and functions; create files, locks and connections inside the function"
    raise illegal(name, getattr(fn, "__name__", fn), reason, legal)


def unsent(name: str, *functions: Any) -> str:
    """Why one of ``functions`` cannot be sent to a rank; "" if all of them can."""
    for function in functions:
        try:
            _pickled(name, function, (), function)
        except ValueError as error:
            return str(error)
    return ""


def _labelled(name: str, function: Any, args: tuple) -> Iterator[tuple[str, Any]]:
    """(label, value) of each object that is pickled with a function, by its name in user code."""
    for index, value in enumerate(args):
        yield f"args[{index}]", value
    with contextlib.suppress(TypeError, ValueError):  # no Python function; a name without a value
        closure = inspect.getclosurevars(function)
        for kind, values in (("variable", closure.nonlocals), ("global", closure.globals)):
            for variable, value in values.items():
                yield f"its {kind} {variable!r}", value
    yield name, function
