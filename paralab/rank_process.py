"""One rank: from a newborn process to a result, an error, or a sign of what it waits for.

`main` is a rank of `pl.launch`; `torchrun_context` makes a rank of a process that torchrun started.
Both end in a `RankContext`: who this rank is, its device and backend, a store, and two ways to be
heard. ``note`` writes what the rank is about to block in to a page that the launching process can
read at any time (1 us); ``progress`` reports finished steps.

A rank talks to its launcher over one pipe: (kind, ...) tuples of plain values, so that nothing of
the user's has to unpickle for an error to arrive. When that pipe closes, the rank ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import linecache
import os
import pickle
import re
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn, TextIO

import cloudpickle
import torch
import torch.distributed as dist

from paralab.rank_errors import OutOfMemory, RankError
from paralab.rank_notes import Notebook
from paralab.rank_server import ONE_THREAD
from paralab.spec import illegal

_PROGRESS_SECONDS = 0.05  # between two reports, except the last


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """Who this rank is and how it is heard.

    nodes     index of the node that each rank runs on
    device    "cpu" or "cuda:0"; where this rank's tensors belong
    backend   "gloo" or "nccl", of the default process group, which is up
    store     a torch Store that all ranks share
    strict    hold every call to NCCL's order rules, whatever the backend
    note      note(text): what this rank is about to block in; "" when it computes again
    noted     what `note` was last given
    progress  progress(done, total), reported at most 20 times a second, the last one always
    """

    rank: int
    world_size: int
    local_rank: int
    nodes: tuple[int, ...]
    device: str
    backend: str
    store: dist.Store
    strict: bool = False
    note: Callable[[str], None]
    noted: Callable[[], str]
    progress: Callable[[int, int], None]


def choose_device(device: str | None, local_rank: int, local_ranks: int) -> tuple[str, str]:
    """(device, backend) of a rank. ``device`` is what was asked for: "cpu", "cuda" or None.

    NCCL refuses two ranks on one GPU: with fewer GPUs than ranks they share them, over gloo.
    Raises ``ValueError`` if CUDA is asked for where there is none.
    """
    if device == "cpu" or (device is None and not torch.cuda.is_available()):
        return "cpu", "gloo"
    if not torch.cuda.is_available():
        raise illegal("device", device, "torch sees no GPU here", "'cpu', or None for either")
    count = torch.cuda.device_count()
    chosen = f"cuda:{local_rank % count}"
    torch.cuda.set_device(chosen)
    return chosen, "nccl" if count >= local_ranks else "gloo"


def keep_pages() -> None:
    """glibc: keep freed memory instead of handing it back page by page.

    A training step allocates and frees the same tensors over and over. With the default thresholds
    each step faults thousands of pages in again, and compute times vary by tens of per cent.
    """
    with contextlib.suppress(AttributeError, OSError):  # not glibc
        mallopt = ctypes.CDLL(None).mallopt
        trim_threshold, top_pad, mmap_threshold = -1, -2, -3  # malloc.h
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(top_pad, 64 * 2**20)
        mallopt(mmap_threshold, 32 * 2**20)  # the largest that glibc takes


# ---- a rank of pl.launch ------------------------------------------------------------------------


def main(rank: int, control: int, folder: str) -> NoReturn:
    """The whole life of a rank. ``control`` is the pipe to the launcher; this never returns."""
    launcher = _Launcher(rank, Connection(control))
    try:
        with open(os.path.join(folder, "task"), "rb") as file:
            task = pickle.load(file)
        notes = Notebook.open(Path(folder), rank)
        _settle(rank, task, folder)
        result = _work(rank, task, folder, launcher, notes)
        launcher.send_result(result)
    except BaseException as error:
        launcher.send_failure(error, notes.read() if "notes" in locals() else "")
    while True:  # the launcher ends all ranks together: this one may still be needed as a peer
        signal.pause()


def _settle(rank: int, task: dict[str, Any], folder: str) -> None:
    """Give a newborn process what the launcher's has, and what every rank needs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Kept open for life: where this rank stands, in Python terms, whenever the launcher asks.
    stacks = open(os.path.join(folder, f"stacks.{rank}"), "w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True, chain=False)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("500")  # if memory runs out, a rank goes before the user's notebook
    os.chdir(task["cwd"])
    os.environ.clear()
    os.environ.update(task["env"], **ONE_THREAD)
    os.environ["PARALAB_RANK"] = str(rank)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    sys.path[:], sys.argv[:] = task["path"], task["argv"]
    # What the user's own __main__ defines comes by value; this one must not look like it.
    sys.modules["__main__"] = types.ModuleType("__main__")
    linecache.cache.update(task["lines"])  # source of notebook cells, for tracebacks
    sys.stdout, sys.stderr = _text(1), _text(2)
    keep_pages()
    torch.set_num_threads(1)
    if "numpy" in sys.modules:  # as in a fresh process, not as in all the other ranks
        sys.modules["numpy"].random.seed()
    gc.enable()


def _text(fd: int) -> TextIO:
    return open(fd, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _work(
    rank: int, task: dict[str, Any], folder: str, launcher: _Launcher, notes: Notebook
) -> Any:
    world_size = task["ranks"]
    try:
        device, backend = choose_device(task["device"], rank, world_size)
    except ValueError as error:
        raise _Refused(str(error)) from None
    with open(os.path.join(folder, "payload"), "rb") as file:
        function, args = _load(file.read())
    notes.write("in init_process_group")
    store = dist.FileStore(os.path.join(folder, "store"), world_size)
    timeout = timedelta(seconds=task["group_timeout"])
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    notes.write("")
    if not task["with_context"]:
        return function(*args)
    context = RankContext(
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        nodes=(0,) * world_size,
        device=device,
        backend=backend,
        store=store,
        strict=task["strict"],
        note=notes.write,
        noted=notes.read,
        progress=_at_most_often(launcher.send_progress),
    )
    return function(context, *args)


def _load(payload: bytes) -> tuple[Callable, tuple]:
    try:
        return pickle.loads(payload)
    except (ImportError, AttributeError) as error:
        raise RuntimeError(
            f"what was launched needs something that a rank cannot import: {error}. Ranks import "
            "modules anew, from the same sys.path: define it in the notebook or script itself, or "
            "in a module that lies on sys.path"
        ) from error


def _at_most_often(send: Callable[[int, int], None]) -> Callable[[int, int], None]:
    last = -_PROGRESS_SECONDS

    def progress(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if done >= total or now - last >= _PROGRESS_SECONDS:
            last = now
            send(done, total)

    return progress


class _Refused(Exception):
    """A setting that only a rank can judge is illegal: becomes the caller's ValueError."""


class _Launcher:
    """This rank's end of the pipe to the process that launched it."""

    def __init__(self, rank: int, pipe: Connection) -> None:
        self.rank, self.pipe, self.lock = rank, pipe, threading.Lock()
        # Gloo's waits are C++ and cannot be interrupted: only the end of the process ends them.
        threading.Thread(target=self._end_when_it_is_gone, daemon=True).start()

    def _end_when_it_is_gone(self) -> None:
        with contextlib.suppress(OSError, EOFError):
            self.pipe.poll(None)  # nothing is ever sent this way: readable means closed
        os._exit(1)

    def _send(self, *message: Any, payload: bytes | None = None) -> None:
        with self.lock:
            self.pipe.send(message)
            if payload is not None:
                self.pipe.send_bytes(payload)

    def send_progress(self, done: int, total: int) -> None:
        self._send("progress", int(done), int(total))

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
        self._send("result", payload=payload)

    def send_failure(self, error: BaseException, noted: str) -> None:
        happened = time.monotonic()
        try:
            report = describe(error, noted)
        except MemoryError:
            report = {"kind": "memory", "what": "ran out of memory", "traceback": ""}
        _flush()
        self._send("failure", {"rank": self.rank, "time": happened, **report})


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    ctypes.CDLL(None).fflush(None)  # what C and C++ libraries still hold


# ---- errors -------------------------------------------------------------------------------------

_FROM_A_PEER = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|socket closed|timed out|remote process",
    re.IGNORECASE,
)
_ASKED_FOR = re.compile(r"allocate[d]?:? +((?:[\d.]+ ?[KMGTP]?i?B|\d+ bytes)\b.*)", re.IGNORECASE)
_NO_MEMORY = ("can't allocate memory", "not enough memory", "std::bad_alloc")


def describe(error: BaseException, noted: str) -> dict[str, Any]:
    """An exception as plain values: its kind, one line, and its traceback as text.

    kind is "memory", "communication" (what a rank sees when another one failed), "refused" or
    "error".
    """
    if isinstance(error, _Refused):
        return {"kind": "refused", "what": str(error), "traceback": ""}
    if isinstance(error, RankError):  # said by this file, about the user's function
        return {"kind": "error", "what": f"failed: {error}", "traceback": ""}
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    frames = frames or error.__traceback__  # nothing but this file: its own fault, show all
    text = "".join(traceback.format_exception(type(error), error, frames))
    if noted:
        text += f"(this rank was {noted})\n"
    try:
        said = str(error).strip().splitlines() or [""]
    except Exception:
        said = ["<its message cannot be shown>"]
    what = f"raised {type(error).__name__}" + (f": {said[0]}" if said[0] else "")
    if isinstance(error, SystemExit):
        what = f"called sys.exit({error.code!r})"
    report = {"kind": "error", "what": what, "traceback": text}
    if isinstance(error, (MemoryError, torch.OutOfMemoryError, OutOfMemory)) or (
        isinstance(error, RuntimeError) and any(sign in " ".join(said) for sign in _NO_MEMORY)
    ):
        asked = _ASKED_FOR.search(" ".join(said))
        what = "ran out of memory" + (f": it asked for {_readable(asked[1])}" if asked else "")
        if isinstance(error, OutOfMemory):
            what = f"ran out of memory: {said[0]}"
        report |= {"kind": "memory", "what": what, "table": getattr(error, "table", "")}
    elif any(_is_from_a_peer(e) for e in _chain(error)):
        report["kind"] = "communication"
    return report


def _readable(asked: str) -> str:
    """8.0 TiB for "8796093022208 bytes. Error..."; other texts as they are, without their end."""
    number = re.match(r"(\d+) bytes", asked)
    if not number:
        return asked.split(". ")[0]
    size, units = float(number[1]), ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.1f} {units[0]}"


def _chain(error: BaseException | None) -> list[BaseException]:
    """The error and what it was raised from, outermost first."""
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return chain


def _is_from_a_peer(error: BaseException) -> bool:
    if isinstance(error, (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)):
        return True
    return isinstance(error, (RuntimeError, ConnectionError)) and bool(
        _FROM_A_PEER.search(str(error))
    )


# ---- a rank of torchrun -------------------------------------------------------------------------

_FROM_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")


def torchrun_context(
    *,
    timeout: float = 120.0,
    device: str | None = None,
    strict: bool = False,
    join_timeout: float = 60.0,
) -> RankContext:
    """Be the rank that torchrun says this process is; the default process group is up on return.

    timeout       seconds a collective may take; join_timeout: seconds for all ranks to meet
    Raises ``RankError`` with one line if the ranks cannot meet.
    """
    try:
        rank, world_size, local_rank, local_ranks, node = (
            int(os.environ[name]) for name in _FROM_TORCHRUN
        )
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    except (KeyError, ValueError) as error:
        raise RankError(
            f"this process is not a rank of torchrun ({type(error).__name__}: {error}): start it "
            "with torchrun --nproc-per-node N -m paralab run ..."
        ) from None
    if local_ranks == world_size:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    os.environ["PARALAB_RANK"] = str(rank)
    keep_pages()
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=join_timeout)))
        chosen, backend = choose_device(device, local_rank, local_ranks)
        facts = dist.PrefixStore("paralab", store)
        facts.set(str(rank), f"{node} {backend}")
        everyone = [facts.get(str(r)).decode().split() for r in range(world_size)]
        backend = "nccl" if all(b == "nccl" for _, b in everyone) else "gloo"
        limit = timedelta(seconds=timeout)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=limit
        )
    except (RuntimeError, OSError) as error:
        why = _why_they_did_not_meet(error, rank, where, join_timeout)
        raise RankError(why, rank=rank) from None
    noted = _say_what_it_was_in(rank)
    return RankContext(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        nodes=tuple(int(index) for index, _ in everyone),
        device=chosen,
        backend=backend,
        store=facts,
        strict=strict,
        note=lambda text: noted.__setitem__(0, text),
        noted=lambda: noted[0],
        progress=lambda done, total: None,
    )


def _why_they_did_not_meet(error: Exception, rank: int, where: str, seconds: float) -> str:
    said = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if "EADDRINUSE" in said or "address already in use" in said:
        why = "the port is taken by another program; give torchrun another --master-port"
    elif "timed out" in said.lower() or "timeout" in said.lower():
        why = f"nobody answered within {seconds:g} s; check --master-addr, --master-port, --nnodes"
    else:
        why = f"{said}; check --master-addr and --master-port"
    return f"rank {rank} could not meet the other ranks at {where}: {why}"


def _say_what_it_was_in(rank: int) -> list[str]:
    """A one-element list to note things in; an error that ends this process shows what it holds."""
    noted, previous = [""], sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, frames: Any) -> None:
        if noted[0]:
            error.add_note(f"rank {rank} was in {noted[0]}")
        previous(kind, error, frames)

    sys.excepthook = hook
    return noted
