"""A rank that torchrun started: the same `RankContext`, on one machine or many.

torchrun sets the rank of this process and the address of the rendezvous. This file adds that a
rendezvous which fails ends after a time limit and in one line: torch's own client waits for ever on
a port on which another program answers, and prints a page of C++ frames for each of its retries.
And gloo listens where machines reach each other: by itself it takes the address that a machine's
own name has there, which on Debian and Ubuntu is 127.0.1.1.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from paralab.default_device import default_device
from paralab.ranks.errors import RankError
from paralab.ranks.failure import is_from_a_peer
from paralab.ranks.host import end_with_parent, keep_pages
from paralab.ranks.lookout import backstop
from paralab.ranks.process import RankContext, card, joined, take_device
from paralab.ranks.started import NUMBERS, variable

_SIOCGIFADDR = 0x8915  # linux/sockios.h: the address of an interface


def torchrun_context(
    *, timeout: float = 120.0, device: str | None = None, join_timeout: float = 60.0
) -> RankContext:
    """Become the rank that torchrun's variables name, and initialize the default process group.

    timeout       seconds that a collective may take, or over NCCL that a GPU may make no progress
    join_timeout  seconds within which all ranks must meet
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
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()
    keep_pages()
    device = device or default_device()
    own_card = "" if device == "cpu" else card(local_rank)

    def rendezvous() -> tuple[dist.Store, list[tuple[int, str]]]:
        """The store of all ranks, and every rank's (node, `card`)."""
        if rank > 0 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            _reach(host, port, join_timeout)
        store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=join_timeout)))
        store = dist.PrefixStore("paralab", store)
        store.set(str(rank), f"{node} {_address(host)} {own_card}")
        every = [store.get(str(r)).decode().split(" ") for r in range(world_size)]
        if name := _interface([address for _, address, _ in every], every[rank][1]):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        return store, [(int(index), uuid) for index, _, uuid in every]

    @contextlib.contextmanager
    def one_line_errors(why: Callable[[Exception], str]) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError, OSError) as error:
            raise RankError(f"rank {rank} {why(error)}", rank=rank) from None

    met = f"could not meet the other ranks at {host}:{port}"
    with one_line_errors(lambda error: f"{met}: {_why_they_did_not_meet(error, join_timeout)}"):
        store, cards = _within(join_timeout, rendezvous)
    chosen = take_device(device, rank, local_rank, cards)
    with one_line_errors(_why_they_did_not_connect):
        return joined(
            chosen,
            rank=rank,
            world_size=world_size,
            nodes=tuple(index for index, _ in cards),
            store=store,
            limit=backstop(timeout) if chosen.backend == "nccl" else timeout,
            patience=timeout,
            note=_noting(rank),
        )


def _reach(host: str, port: int, seconds: float) -> None:
    """Wait until a process listens there. Raises ``OSError`` if none does within the time."""
    give_up = time.monotonic() + seconds
    while True:
        try:
            return socket.create_connection((host, port), timeout=seconds).close()
        except OSError as error:
            if time.monotonic() + 0.2 >= give_up:
                raise OSError(error.strerror or str(error)) from None
            time.sleep(0.2)


def _address(towards: str) -> str:
    """This machine's IPv4 address on the way to that one; "" if there is none."""
    with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as way:
        way.connect((towards, 9))  # which sends nothing
        return way.getsockname()[0]
    return ""


def _interface(addresses: Sequence[str], own: str) -> str:
    """The network interface on which this machine reaches the others; "" if it is not known.

    addresses  of all ranks, by which their machines reach rank 0's. That machine itself may reach
               its own name on the loopback, and then goes by its way to another one
    """
    if own.startswith("127."):
        own = next((_address(a) for a in addresses if a and not a.startswith("127.")), own)
    with socket.socket() as here:
        for _, name in socket.if_nameindex() if sys.platform == "linux" else ():
            with contextlib.suppress(OSError):  # this one has no IPv4 address
                found = fcntl.ioctl(here, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(found[20:24]) == own:
                    return name
    return ""


def _within(seconds: float, call: Callable[[], Any]) -> Any:
    """``call()``, or TimeoutError one second after this time, even if C++ code is still waiting."""
    outcome: Future = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return outcome.result(seconds + 1.0)


def _why_they_did_not_meet(error: Exception, seconds: float) -> str:
    line = (str(error).strip().splitlines() or ["timed out"])[0]
    if "EADDRINUSE" in line or "address already in use" in line:
        return "the port is taken by another program; give torchrun another --master-port"
    if "timed out" in line.lower() or "timeout" in line.lower():
        return (
            f"not all ranks of this job answered within {seconds:g} s; if no other machine says "
            "why, start all with the same --master-addr and --master-port, a port that no other "
            "program uses"
        )
    return f"{line}; check --master-addr and --master-port"


def _why_they_did_not_connect(error: Exception) -> str:
    line, name = str(error).partition("\n")[0], os.environ.get("GLOO_SOCKET_IFNAME", "not set")
    return (
        f"met the other ranks, but could not connect to them: {line}; if no other rank says more, "
        "set GLOO_SOCKET_IFNAME on each machine to its interface to the others, a name that `ip "
        f"address` shows (here it is {name})"
    )


def _noting(rank: int) -> Callable[[str], None]:
    """A function ``note(text)``: an uncaught error of this process shows the last text, and no
    lines of this library where it is the consequence of a lost rank.
    """
    noted, previous = "", sys.excepthook

    def note(text: str) -> None:
        nonlocal noted
        noted = text

    def hook(kind: type[BaseException], error: BaseException, frames: Any) -> None:
        if noted:
            error.add_note(f"rank {rank} was in {noted}")
            if is_from_a_peer(error):
                frames = error.__traceback__ = None
        previous(kind, error, frames)

    sys.excepthook = hook
    return note
