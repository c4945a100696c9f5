"""A rank that torchrun started: the same `RankContext`, on one machine or many.

torchrun says who this process is and where the ranks meet; what is added here is that a meeting
that fails ends in one line and in time. torch's own client waits without end on a port where
another program answers, and prints a page of C++ frames for each of its retries.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from paralab.default_device import default_device
from paralab.ranks.errors import RankError
from paralab.ranks.host import keep_pages
from paralab.ranks.process import RankContext, card, join, take_device
from paralab.ranks.started import NUMBERS, variable


def torchrun_context(
    *,
    timeout: float = 120.0,
    device: str | None = None,
    join_timeout: float = 60.0,
) -> RankContext:
    """Be the rank that torchrun says this process is; the default process group is up on return.

    timeout       seconds a collective may take; join_timeout: seconds for all ranks to meet
    Raises ``RankError`` with one line if the ranks cannot meet, and ``ValueError`` if torchrun did
    not start this process.
    """
    numbers = [int(variable(name, number=True)) for name in NUMBERS]
    rank, world_size, local_rank, local_ranks, node, port = numbers
    host = variable("MASTER_ADDR")
    if local_ranks == world_size:
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo" if sys.platform == "linux" else "lo0")
    os.environ["PARALAB_RANK"] = str(rank)
    keep_pages()
    device = device or default_device()
    mine = "" if device == "cpu" else card(local_rank)

    def meet() -> tuple[dist.Store, list[tuple[int, str]]]:
        if rank > 0 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            _reach(host, port, join_timeout)
        store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=join_timeout)))
        facts = dist.PrefixStore("paralab", store)
        facts.set(str(rank), f"{node} {mine}")
        every = [facts.get(str(r)).decode().partition(" ") for r in range(world_size)]
        return store, [(int(index), uuid) for index, _, uuid in every]

    @contextlib.contextmanager
    def or_unmet() -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError, OSError) as error:
            why = f"{host}:{port}: {_why_they_did_not_meet(error, join_timeout)}"
            said = f"rank {rank} could not meet the other ranks at {why}"
            raise RankError(said, rank=rank) from None

    with or_unmet():
        store, everyone = _within(join_timeout, meet)
    chosen = take_device(device, rank, local_rank, everyone)
    context = RankContext(
        rank=rank,
        world_size=world_size,
        nodes=tuple(index for index, _ in everyone),
        device=chosen.device,
        backend=chosen.backend,
        shared=chosen.shared,
        store=dist.PrefixStore("paralab", store),
        limit=timeout,
        note=_noting(rank),
    )
    with or_unmet():
        join(context, chosen.backend)
    return context


def _reach(host: str, port: int, seconds: float) -> None:
    """Wait for a listener; torch's own client fills the screen with C++ frames while it retries."""
    give_up = time.monotonic() + seconds
    while True:
        try:
            return socket.create_connection((host, port), timeout=seconds).close()
        except OSError as error:
            if time.monotonic() + 0.2 >= give_up:
                raise OSError(error.strerror or str(error)) from None
            time.sleep(0.2)


def _within(seconds: float, call: Callable[[], Any]) -> Any:
    """``call()``, or TimeoutError after that time, though C++ may still be waiting."""
    outcome: Future = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return outcome.result(seconds + 1.0)


def _why_they_did_not_meet(error: Exception, seconds: float) -> str:
    said = (str(error).strip().splitlines() or ["timed out"])[0]
    if "EADDRINUSE" in said or "address already in use" in said:
        return "the port is taken by another program; give torchrun another --master-port"
    if "timed out" in said.lower() or "timeout" in said.lower():
        return (
            f"not all ranks of this job answered within {seconds:g} s; start all nodes with the "
            "same --master-addr and --master-port, a port that no other program uses"
        )
    return f"{said}; check --master-addr and --master-port"


def _noting(rank: int) -> Callable[[str], None]:
    """Notes why the rank is idle: an error that ends this process shows what was noted last."""
    noted, previous = "", sys.excepthook

    def note(text: str) -> None:
        nonlocal noted
        noted = text

    def hook(kind: type[BaseException], error: BaseException, frames: Any) -> None:
        if noted:
            error.add_note(f"rank {rank} was in {noted.removeprefix('in ')}")
        previous(kind, error, frames)

    sys.excepthook = hook
    return note
