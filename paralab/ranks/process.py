"""One rank: from a newborn process to a result, an error, or a sign of what it waits for.

`main` is the life of a rank of `pl.launch`; ranks/torchrun.py makes a rank of a process that
torchrun started. Both end in a `RankContext`: who this rank is, its device, a store, and two ways
to be heard. ``note`` writes what the rank is about to block in to a page that the launching process
can read at any time (1 us); ``progress`` reports finished steps.

A rank talks to its launcher over one pipe: (kind, ...) tuples of plain values, so that nothing of
the user's has to unpickle for an error to arrive. When that pipe closes, or the process that
started the rank is gone, the rank ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import linecache
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

from paralab.checks import illegal
from paralab.default_device import VARIABLE
from paralab.ranks.errors import RankError
from paralab.ranks.failure import Failure, Refused, describe
from paralab.ranks.host import keep_pages, send_first
from paralab.ranks.notes import Notebook
from paralab.ranks.server import ONE_THREAD

_PROGRESS_SECONDS = 0.05  # between two reports, except the last
_LOOK_SECONDS = 1.0  # between two looks at whether the server is still there


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """Who this rank is and how it is heard.

    nodes     index of the node that each rank runs on
    device    "cpu" or "cuda:0"; where this rank's tensors belong
    backend   "gloo" or "nccl", of the default process group, which is up
    shared    whether another rank's kernels run on this rank's GPU
    store     a torch Store that all ranks share
    limit     seconds that a call of torch.distributed may take
    strict    hold every call to NCCL's order rules, whatever the backend
    note      note(text): what this rank is about to block in; "" when it computes again
    alive     alive(): the rank's device gets on, though the rank notes nothing
    progress  progress(done, total), reported at most 20 times a second, the last one always
    """

    rank: int
    world_size: int
    nodes: tuple[int, ...]
    device: str
    backend: str
    store: dist.Store
    limit: float
    shared: bool = False
    strict: bool = False
    note: Callable[[str], None]
    alive: Callable[[], None] = lambda: None
    progress: Callable[[int, int], None] = lambda done, total: None


class Chosen(NamedTuple):
    """A rank's device, its backend, whether other ranks share its GPU, and what there is to say."""

    device: str
    backend: str
    shared: bool = False
    why: str = ""


def card(local_rank: int) -> str:
    """The UUID of the GPU whose turn it is on this rank; "" where torch sees none."""
    if not torch.cuda.is_available():
        return ""
    turn = local_rank % torch.cuda.device_count()
    return str(torch.cuda.get_device_properties(turn).uuid)


def choose_device(device: str | None, local_rank: int, cards: Sequence[tuple[int, str]]) -> Chosen:
    """The device of a rank.

    device  what was asked for: "cpu", "cuda" or None
    cards   of every rank (its node, `card`): as a wrapper, or Slurm, may show each rank one GPU as
            its only one, numbers do not tell GPUs apart

    NCCL refuses two ranks on one GPU, and what a rank's kernels take there has the others' in it:
    with fewer GPUs than ranks the CPU is the default. Asked for, they share them, over gloo. Raises
    ``ValueError`` if CUDA is asked for where there is none.
    """
    if device == "cpu" or (device is None and not any(uuid for _, uuid in cards)):
        return Chosen("cpu", "gloo")
    sees_one, gpus = torch.cuda.is_available(), len({one for one in cards if one[1]})
    if device == "cuda" and not sees_one:
        legal = f"'cpu', and no {VARIABLE}=cuda in the environment; or after "
        legal += "pl.set_default_device(None) no device at all"
        raise illegal("device", device, "torch sees no GPU here", legal)
    own, few = gpus == len(cards), f"{len(cards)} ranks and {gpus} GPU{'s' * (gpus != 1)}"
    if device is None and not (own and sees_one):
        why = f"{few}: they train on the CPU, over gloo; with device='cuda' they would share, and "
        why += "times would mix"
        if not sees_one:  # others do
            why = f"some of {len(cards)} ranks have no GPU: all train on the CPU, over gloo"
        return Chosen("cpu", "gloo", why=why)
    chosen = f"cuda:{local_rank % torch.cuda.device_count()}"
    torch.cuda.set_device(chosen)
    why = f"{few}: ranks share a GPU, over gloo through the host, and the times of each have the "
    return Chosen(chosen, "nccl") if own else Chosen(chosen, "gloo", True, why + "others' in them")


def take_device(
    device: str | None, rank: int, local_rank: int, cards: Sequence[tuple[int, str]]
) -> Chosen:
    """`choose_device`; rank 0 says why, and what this rank predicts is for the same device."""
    chosen = choose_device(device, local_rank, cards)
    os.environ[VARIABLE] = chosen.device.partition(":")[0]
    if chosen.why and rank == 0:
        print(f"paralab: {chosen.why}")
    return chosen


def join(context: RankContext, backend: str) -> None:
    """The ranks meet: the default process group is up on return."""
    who = {"rank": context.rank, "world_size": context.world_size, "store": context.store}
    dist.init_process_group(backend, timeout=timedelta(seconds=context.limit), **who)
    send_first()


# ---- a rank of pl.launch ------------------------------------------------------------------------


def main(rank: int, control: int, folder: str, server: int) -> NoReturn:
    """The whole life of a rank; this never returns.

    control  the pipe to the launcher; server: the process that this one must not outlive
    """
    pipe = Connection(control)
    try:
        task = pickle.loads(pipe.recv_bytes())
    except (EOFError, OSError):  # the launcher is gone
        os._exit(1)
    launcher, noted, error = _Launcher(rank, pipe, server), str, None
    try:
        notes = Notebook.open(Path(folder), rank)
        noted = notes.text
        _settle(rank, task, folder)
        launcher.send("up")
        result = _work(rank, task, folder, launcher, notes)
        if os.getpid() == launcher.pid:
            launcher.send_result(result)
    except BaseException as caught:
        error = caught
    if os.getpid() != launcher.pid:
        _end_of_a_fork(error)
    if error is not None:
        launcher.send_failure(error, noted())
    while True:  # the launcher ends all ranks together: this one may still be needed as a peer
        signal.pause()


def _end_of_a_fork(error: BaseException | None) -> NoReturn:
    """In a child that the function has forked, when the function ends: end as Python ends. The
    launcher hears of the rank alone.
    """
    code = error.code if isinstance(error, SystemExit) else error
    if code is error is not None:
        traceback.print_exception(error)
    _flush()
    os._exit(code & 0xFF if isinstance(code, int) else int(code is not None))


def _settle(rank: int, task: dict[str, Any], folder: str) -> None:
    """Give a newborn process what the launcher's has, and what every rank needs."""
    # Kept open for life: where this rank is, in Python terms, whenever the launcher asks.
    stacks = open(os.path.join(folder, f"stacks.{rank}"), "w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True, chain=False)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("500")  # if memory runs out, a rank goes before the user's notebook
    os.chdir(task["cwd"])
    os.environ.clear()
    os.environ.update(task["env"], **ONE_THREAD)
    os.environ["PARALAB_RANK"] = str(rank)
    inner = "lo" if sys.platform == "linux" else "lo0"
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = inner
    sys.path[:], sys.argv[:] = task["path"], task["argv"]
    # What the user's own __main__ defines comes by value; this one must not look like it.
    sys.modules["__main__"] = types.ModuleType("__main__")
    linecache.cache.update(task["lines"])  # source of notebook cells, for tracebacks
    sys.stdout, sys.stderr = _text(1), _text(2)
    keep_pages()
    torch.set_num_threads(1)
    numpy.random.seed()  # as in a fresh process, not as in all the other ranks
    gc.enable()


def _text(fd: int) -> TextIO:
    return open(fd, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _work(
    rank: int, task: dict[str, Any], folder: str, launcher: _Launcher, notes: Notebook
) -> Any:
    world_size = task["ranks"]
    try:
        cards = [] if task["device"] == "cpu" else [(0, card(r)) for r in range(world_size)]
        chosen = take_device(task["device"], rank, rank, cards)
    except ValueError as error:
        raise Refused(str(error)) from None
    if chosen.backend == "nccl":
        launcher.send("nccl")
    with open(os.path.join(folder, "payload"), "rb") as file:
        function, args = _load(file.read())
    notes.write("in init_process_group")
    context = RankContext(
        rank=rank,
        world_size=world_size,
        nodes=(0,) * world_size,
        device=chosen.device,
        backend=chosen.backend,
        shared=chosen.shared,
        store=dist.FileStore(os.path.join(folder, "store"), world_size),
        limit=task["group_timeout"],
        strict=task["strict"],
        note=notes.write,
        alive=notes.alive,
        progress=launcher.progress,
    )
    # A user's own program may well use host tensors on a machine with GPUs: give it both.
    both = chosen.backend == "nccl" and task["any_tensor"]
    join(context, "cpu:gloo,cuda:nccl" if both else chosen.backend)
    notes.write("")
    return function(context, *args) if task["with_context"] else function(*args)


def _load(payload: bytes) -> tuple[Callable, tuple]:
    try:
        return pickle.loads(payload)
    except (ImportError, AttributeError) as error:
        raise RuntimeError(
            f"what was launched needs something that a rank cannot import: {error}. Ranks import "
            "modules again, from the same sys.path: define it in the notebook or script itself, or "
            "in a module on sys.path"
        ) from error


class _Launcher:
    """This rank's end of the pipe to the process that launched it."""

    def __init__(self, rank: int, pipe: Connection, server: int) -> None:
        self.rank, self.pipe, self.lock = rank, pipe, threading.Lock()
        self.pid, self.server = os.getpid(), server
        self.reported = -_PROGRESS_SECONDS  # when progress was last sent
        # Gloo's waits are C++ and cannot be interrupted: only the end of the process ends them.
        threading.Thread(target=self._end_when_it_is_gone, daemon=True).start()

    def _end_when_it_is_gone(self) -> None:
        # Behind the task nothing is sent this way: readable means closed.
        with contextlib.suppress(OSError, EOFError):
            while not self.pipe.poll(_LOOK_SECONDS) and os.getppid() == self.server:
                pass
        os._exit(1)

    def send(self, *message: Any, payload: bytes | None = None) -> None:
        if os.getpid() != self.pid:  # a fork of the rank, which reports its own progress
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
                f"the function's result, a {type(result).__name__}, cannot be sent back: {error}. "
                "Return numbers, strings, NumPy arrays, or lists and dicts of them",
                rank=self.rank,
            ) from None
        _flush()
        self.send("result", payload=payload)

    def send_failure(self, error: BaseException, noted: str) -> None:
        happened = time.monotonic()
        try:
            told = describe(error, self.rank, happened, noted=noted, hide=__file__)
        except MemoryError:
            told = Failure(self.rank, happened, "memory", "ran out of memory")
        _flush()
        self.send("failure", *told)


def _flush() -> None:
    ctypes.CDLL(None).fflush(None)  # what C and C++ libraries still hold
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
