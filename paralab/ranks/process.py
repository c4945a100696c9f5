"""One rank: from the start of its process to its result or its error.

`main` is the life of a rank of `pl.launch`; ranks/torchrun.py makes a rank of a process that
torchrun started. Both make a `RankContext`: the rank's numbers, its device, a store, and functions
that report to the launching process.

A rank sends its launcher messages over one pipe: (kind, ...) tuples of plain values, so an error
arrives even if objects of the user's cannot be unpickled. When that pipe closes, or the process
that started the rank has ended, the rank ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import linecache
import math
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TextIO

import cloudpickle
import numpy.random
import torch
import torch.distributed as dist

from paralab.checks import count_of, illegal
from paralab.default_device import VARIABLE
from paralab.ranks.errors import RankError
from paralab.ranks.failure import Failure, Refused, describe
from paralab.ranks.host import keep_pages, send_first, separate_queues
from paralab.ranks.notes import Notebook
from paralab.ranks.server import ONE_THREAD

_PROGRESS_SECONDS = 0.05  # at least, between two reports of progress, except the last
_LOOK_SECONDS = 1.0  # between two checks that the server still exists


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """What a rank knows of itself, and how it reports to the launching process.

    nodes     for each rank the index of its node
    device    "cpu" or for example "cuda:0", on which this rank's tensors are
    backend   "gloo" or "nccl", of the default process group, which is initialized
    shared    whether other ranks' kernels run on this rank's GPU
    store     a torch Store that all ranks share
    limit     seconds that a call of torch.distributed may take
    patience  seconds without progress of its GPU after which the rank ends itself
    strict    hold every call to NCCL's order rules, whatever the backend
    note      note(text): names the call in which the rank is about to block; "" when it is over
    alive     alive(): says that the rank's device makes progress, though the rank notes nothing
    progress  progress(done, total): reported at most 20 times a second, the last call always
    """

    rank: int
    world_size: int
    nodes: tuple[int, ...]
    device: str
    backend: str
    store: dist.Store
    limit: float
    patience: float = math.inf
    shared: bool = False
    strict: bool = False
    note: Callable[[str], None]
    alive: Callable[[], None] = lambda: None
    progress: Callable[[int, int], None] = lambda done, total: None


class Chosen(NamedTuple):
    """A rank's device and backend, whether other ranks share its GPU, and why if it is unusual."""

    device: str
    backend: str
    shared: bool = False
    why: str = ""


def card(local_rank: int) -> str:
    """The UUID of the GPU that this rank would use; "" where torch sees none."""
    if not torch.cuda.is_available():
        return ""
    index = local_rank % torch.cuda.device_count()
    return str(torch.cuda.get_device_properties(index).uuid)


def choose_device(device: str | None, local_rank: int, cards: Sequence[tuple[int, str]]) -> Chosen:
    """The device of a rank.

    device  the caller's choice: "cpu", "cuda" or None
    cards   for every rank (its node, `card`). UUIDs, because a wrapper or Slurm may show each rank
            a single GPU, and all of these have the number 0

    NCCL refuses two ranks on one GPU, and the times of ranks that share a GPU include one another's
    kernels. So with fewer GPUs than ranks the default is the CPU; with device="cuda" ranks share
    GPUs, over gloo. Raises ``ValueError`` for "cuda" where torch sees no GPU.
    """
    if device == "cpu" or (device is None and not any(uuid for _, uuid in cards)):
        return Chosen("cpu", "gloo")
    sees_gpu, gpus = torch.cuda.is_available(), len({card for card in cards if card[1]})
    if device == "cuda" and not sees_gpu:
        legal = f"'cpu'; or no device at all, with no {VARIABLE}=cuda in the environment and after "
        legal += "pl.set_default_device(None)"
        raise illegal("device", device, "torch sees no GPU here", legal)
    one_each, counts = gpus == len(cards), f"{len(cards)} ranks and {count_of(gpus, 'GPU')}"
    if device is None and not (one_each and sees_gpu):
        why = f"{counts}: by default ranks use the CPU and gloo; with device='cuda' they share GPUs"
        if not sees_gpu:  # but another rank does
            why = f"some of the {len(cards)} ranks have no GPU: by default all use the CPU and gloo"
        return Chosen("cpu", "gloo", why=why)
    chosen = f"cuda:{local_rank % torch.cuda.device_count()}"
    torch.cuda.set_device(chosen)
    if one_each:
        return Chosen(chosen, "nccl")
    why = f"{counts}: ranks share a GPU, with gloo; the times of each include the others' work"
    return Chosen(chosen, "gloo", shared=True, why=why)


def take_device(
    device: str | None, rank: int, local_rank: int, cards: Sequence[tuple[int, str]]
) -> Chosen:
    """`choose_device`, of which rank 0 prints the reason if it is unusual."""
    chosen = choose_device(device, local_rank, cards)
    os.environ[VARIABLE] = chosen.device.partition(":")[0]  # predictions on this rank are for it
    if chosen.why and rank == 0:
        print(f"paralab: {chosen.why}")
    return chosen


def joined(chosen: Chosen, backend: str = "", **facts: Any) -> RankContext:
    """The context of a rank with this device and these ``facts``, once all ranks have initialized
    the default process group. backend: that of the group, if it is more than the device's own.
    """
    own = {"device": chosen.device, "backend": chosen.backend, "shared": chosen.shared}
    context = RankContext(**own, **facts)
    ranks = {"rank": context.rank, "world_size": context.world_size, "store": context.store}
    limit = timedelta(seconds=context.limit)
    dist.init_process_group(backend or context.backend, timeout=limit, **ranks)
    # NCCL connects ranks at their first call, and the first to come waits in the store, where
    # nothing watches it.
    patience = timedelta(seconds=min(context.limit, context.patience))
    context.store.set_timeout(max(patience, context.store.timeout))
    send_first()
    return context


# ---- a rank of pl.launch ------------------------------------------------------------------------


def main(rank: int, control: int, folder: str, server: int) -> NoReturn:
    """The whole life of a rank; this never returns.

    control  the file descriptor of the pipe to the launcher
    folder   the launch's folder for temporary files
    server   the id of the server's process, which this one must not outlive
    """
    pipe = Connection(control)
    try:
        task = pickle.loads(pipe.recv_bytes())
    except (EOFError, OSError):  # the launcher has ended
        os._exit(1)
    launcher, notes, error = _Launcher(rank, pipe, server), Notebook(Path(folder), rank), None
    try:
        _set_up(rank, task, folder)
        result = _work(rank, task, folder, launcher, notes)
        if os.getpid() == launcher.pid:
            launcher.send_result(result)
    except BaseException as caught:
        error = caught
    if os.getpid() != launcher.pid:
        _end_of_a_fork(error)
    if error is not None:
        launcher.send_failure(error, notes.read())
    while True:  # other ranks may still need this one as a peer; the launcher ends all together
        signal.pause()


def _end_of_a_fork(error: BaseException | None) -> NoReturn:
    """End a child process that the user's function forked and that returned from the function, as
    Python would end it. The launcher gets the result of the rank itself only.
    """
    code = error.code if isinstance(error, SystemExit) else error
    if code is error is not None:
        traceback.print_exception(error)
    _flush()
    os._exit(code & 0xFF if isinstance(code, int) else int(code is not None))


def _set_up(rank: int, task: dict[str, Any], folder: str) -> None:
    """Give a new process the launcher's environment, and what every rank needs."""
    # Open as long as the process lives: on SIGUSR1 the rank writes its Python stacks into it.
    stacks = open(os.path.join(folder, f"stacks.{rank}"), "w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True, chain=False)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("500")  # if memory runs out, the kernel kills a rank before the user's notebook
    os.chdir(task["cwd"])
    os.environ.clear()
    os.environ.update(task["env"], **ONE_THREAD)
    os.environ["PARALAB_RANK"] = str(rank)
    loopback = "lo" if sys.platform == "linux" else "lo0"
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = loopback
    if not task["any_tensor"]:  # a program of the user's own runs as it would elsewhere
        separate_queues()
    sys.path[:], sys.argv[:] = task["path"], task["argv"]
    # The definitions of the user's __main__ are sent by value; this module must not look like it.
    sys.modules["__main__"] = types.ModuleType("__main__")
    linecache.cache.update(task["lines"])  # source of notebook cells, for tracebacks
    sys.stdout, sys.stderr = _text(1), _text(2)
    keep_pages()
    torch.set_num_threads(1)
    numpy.random.seed()  # as in a new process; the forked state would be equal on all ranks
    gc.enable()


def _text(fd: int) -> TextIO:
    return open(fd, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _work(
    rank: int, task: dict[str, Any], folder: str, launcher: _Launcher, notes: Notebook
) -> Any:
    """Join the other ranks, call the launched function, and return its result."""
    world_size = task["ranks"]
    try:
        cards = [] if task["device"] == "cpu" else [(0, card(r)) for r in range(world_size)]
        chosen = take_device(task["device"], rank, rank, cards)
    except ValueError as error:
        raise Refused(str(error)) from None
    own = task["any_tensor"] and torch.cuda.device_count() > 0  # a script's own NCCL, say
    launcher.send("up", own or chosen.backend == "nccl")
    with open(os.path.join(folder, "payload"), "rb") as file:
        function, args = _load(file.read())
    notes.write("init_process_group")
    # A program of the user's own may send host tensors on a machine with GPUs, too.
    two_backends = chosen.backend == "nccl" and task["any_tensor"]
    context = joined(
        chosen,
        "cpu:gloo,cuda:nccl" * two_backends,
        rank=rank,
        world_size=world_size,
        nodes=(0,) * world_size,
        store=dist.FileStore(os.path.join(folder, "store"), world_size),
        limit=task["group_timeout"],
        strict=task["strict"],
        note=notes.write,
        alive=notes.alive,
        progress=launcher.progress,
    )
    notes.write("")
    return function(context, *args) if task["with_context"] else function(*args)


def _load(payload: bytes) -> tuple[Callable, tuple]:
    try:
        return pickle.loads(payload)
    except (ImportError, AttributeError) as error:
        raise RuntimeError(
            f"the launched function needs a name that a rank cannot import: {error}. Ranks import "
            "modules anew, from the same sys.path: define the name in the notebook or script "
            "itself, or in a module on sys.path"
        ) from error


class _Launcher:
    """This rank's end of the pipe to the process that launched it."""

    def __init__(self, rank: int, pipe: Connection, server: int) -> None:
        self.rank, self.pipe, self.lock = rank, pipe, threading.Lock()
        self.pid, self.server = os.getpid(), server
        self.reported = -_PROGRESS_SECONDS  # when progress was last sent
        # A thread, as gloo waits in C++ and cannot be interrupted, only ended with its process.
        threading.Thread(target=self._end_when_it_is_gone, daemon=True).start()

    def _end_when_it_is_gone(self) -> None:
        # After the task the launcher sends nothing more: if the pipe is readable, it was closed.
        with contextlib.suppress(OSError, EOFError):
            while not self.pipe.poll(_LOOK_SECONDS) and os.getppid() == self.server:
                pass
        os._exit(1)

    def send(self, *message: Any, payload: bytes | None = None) -> None:
        if os.getpid() != self.pid:  # a process forked from the rank must not report as the rank
            return
        with self.lock:
            self.pipe.send(message)
            if payload is not None:
                self.pipe.send_bytes(payload)

    def progress(self, done: int, total: int) -> None:
        now = time.monotonic()
        if done >= total or now - self.reported >= _PROGRESS_SECONDS:
            self.reported = now
            self.send("progress", int(done), int(total))

    def send_result(self, result: Any) -> None:
        try:
            payload = cloudpickle.dumps(result)
        except Exception as error:
            raise RankError(
                f"the function's result cannot be sent back: {error}. Return numbers, strings, "
                "NumPy arrays, or lists and dicts of them",
                rank=self.rank,
            ) from None
        _flush()
        self.send("result", payload=payload)

    def send_failure(self, error: BaseException, noted: str) -> None:
        try:
            failure = describe(error, self.rank, noted)
        except MemoryError:
            failure = Failure(self.rank, time.monotonic(), "memory", "ran out of memory")
        _flush()
        self.send("failure", *failure)


def _flush() -> None:
    ctypes.CDLL(None).fflush(None)  # the buffers of C and C++ libraries
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
