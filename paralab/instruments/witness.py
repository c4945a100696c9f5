"""The operating system's kernel as witness: the bytes that it counted on the ranks' connections,
compared with the bytes in the ledger.

Ranks communicate over TCP connections, whose bytes the kernel counts without knowing anything of
collectives. Ranks wait at a *gate* before and after every call, and each reads its counters while
all the others are idle. So theory, ledger and kernel can be compared, and an implementation that
sends more than the closed form of its operation is exposed.

What gloo adds to a message is far below 1 % from about 1 MiB on. Neither what other programs of the
machine send nor what TCP sends again is counted. A call may still meet what another one left to be
sent, so every call is made several times, and the lowest reading counts.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import socket
import stat
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from paralab.checks import choice, whole
from paralab.instruments.measure import call
from paralab.launch import MAX_RANKS, launch_program
from paralab.theory import collectives as theory
from paralab.theory import traffic

if TYPE_CHECKING:
    import pandas as pd

NATIVE = "native reduce_scatter"  # torch's own over gloo, which makes n all-reduces
OPS = (*(op for op in traffic.OPS if op != "recv"), NATIVE, *theory.ALGORITHMS)
DEFAULT = ("all_reduce", "all_gather", "reduce_scatter", NATIVE, "ring_all_reduce")
REPEATS = 5
_RECEIVED = struct.Struct("128xQ")  # linux/tcp.h: tcpi_bytes_received of tcp_info

Gate = Callable[[], None]


def witness(ranks: int = 4, ops: Sequence[str] = DEFAULT, nbytes: int = 8 * 2**20) -> pd.DataFrame:
    """Make every call of ``ops`` on ``nbytes`` of fp32 and ask the kernel what was sent.

    ranks    processes, 2 to 64
    ops      "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce",
             "send" (rank 0 to the last): the calls of `comm.Group`; "ring_all_reduce",
             "tree_all_reduce", ...: those of parallel/collectives.py; "native reduce_scatter":
             torch's own, which the ledger does not see
    nbytes   of the full tensor, rounded down to equal parts of whole elements per rank; below 1 MiB
             gloo's own bytes may be more than 1 %

    One row per op, bytes summed over the ranks: op, theory_bytes (the closed form), ledger_bytes
    (recorded by `Group`; none for the native call), kernel_bytes (the lowest of 5 calls), ratio
    (kernel over theory). Raises OSError where the kernel has no such counter: only Linux has.
    """
    import pandas as pd

    ranks = whole("ranks", ranks, at_least=2, at_most=MAX_RANKS)
    ops = [choice("ops", op, OPS) for op in ([ops] if isinstance(ops, str) else ops)]
    nbytes = whole("nbytes", nbytes, at_least=4 * ranks) // (4 * ranks) * (4 * ranks)
    ledgers, readings = between_gates(_calls, ranks, (ops, nbytes))
    rows = []
    for i, op in enumerate(ops):
        expected = theory_bytes(op, ranks, nbytes)
        counted = min(per_call(readings, i))
        recorded = None if op == NATIVE else sum(ledger[i] for ledger in ledgers)
        rows.append((op, expected, recorded, counted, round(counted / expected, 3)))
    columns = ["op", "theory_bytes", "ledger_bytes", "kernel_bytes", "ratio"]
    return pd.DataFrame(rows, columns=columns).astype({"ledger_bytes": "Int64"})


def theory_bytes(op: str, ranks: int, nbytes: int) -> int:
    """Bytes that all ranks together send for ``op`` on ``nbytes``, by the closed forms."""
    if op in theory.ALGORITHMS:
        return sum(theory.wire_bytes(op, ranks, nbytes, index) for index in range(ranks))
    if op == "send":
        return nbytes
    op = op.removeprefix("native ")
    return sum(traffic.wire_bytes(op, nbytes, ranks, index) for index in range(ranks))


# ---- gates --------------------------------------------------------------------------------------
def between_gates(
    program: Callable[..., Any], ranks: int, args: Sequence[Any], *, timeout: float = 60.0
) -> tuple[list[Any], list[int]]:
    """Run ``program(context, gate, *args)`` on every rank. Returns the results in rank order, and
    the readings of the counters in bytes, summed over the ranks, one per gate.

    A rank that calls ``gate()`` is idle until all ranks have called it and read their counters.
    """
    if not counts():
        raise OSError(
            "the kernel shows no counter of a connection's bytes: only Linux has one; elsewhere no "
            "second count can confirm report.traffic()"
        )
    parts = launch_program(_gated, ranks, (program, *args), timeout=timeout, device="cpu")
    results, readings = zip(*parts, strict=True)
    return list(results), [sum(each) for each in zip(*readings, strict=True)]


def _gated(context: Any, program: Callable[..., Any], *args: Any) -> tuple[Any, list[int]]:
    """Runs in a rank: (the program's result, the readings). Gates use the ranks' store, which is a
    file and sends nothing.
    """
    readings: list[int] = []

    def meet(name: str) -> None:
        if context.store.add(f"ranks at {name}", 1) == context.world_size:
            context.store.set(name, "all")
        context.store.get(name)

    def gate() -> None:
        name = f"gate {len(readings)} of the witness"
        context.note(name)
        meet(name)
        readings.append(received_bytes())
        meet(f"the end of {name}")
        context.note("")

    return program(context, gate, *args), readings


def per_call(readings: Sequence[int], index: int) -> list[int]:
    """Bytes of each repetition of op number ``index``, which has REPEATS + 1 of the gates."""
    own = readings[index * (REPEATS + 1) : (index + 1) * (REPEATS + 1)]
    return [after - before for before, after in itertools.pairwise(own)]


def received_bytes() -> int:
    """Bytes received so far on the TCP connections that this process has open, where each byte sent
    is received once.
    """
    total = 0
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # it is closed by now, or no TCP connection
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                with socket.socket(fileno=os.dup(number)) as one:
                    info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED.size)
                    total += _RECEIVED.unpack(info.ljust(_RECEIVED.size, b"\0"))[0]  # 0 if unknown
    return total


def counts() -> bool:
    """Whether the kernel counts what a connection receives."""
    with (
        contextlib.suppress(OSError),
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as one,
        server.accept()[0] as other,
    ):
        one.sendall(b"seen")
        other.recv(4, socket.MSG_WAITALL)
        return received_bytes() >= 4
    return False


# ---- what ranks do between the gates ------------------------------------------------------------
def _calls(context: Any, gate: Gate, ops: Sequence[str], nbytes: int) -> list[int]:
    """Runs in a rank: make every op between gates. Returns each op's bytes in the ledger."""
    from paralab.comm import everyone

    group = everyone(context)
    return [repeated(one_call(group, op, nbytes), gate, group.recorder) for op in ops]


def repeated(make_call: Callable[[], None], gate: Gate, recorder: Any) -> int:
    """Make a call REPEATS times between gates. Returns the bytes in the ledger of one of them."""
    make_call()  # the first call also opens connections
    before = sum(recorder.tables()["collectives"]["wire_bytes"])
    gate()
    for _ in range(REPEATS):
        make_call()
        gate()
    return (sum(recorder.tables()["collectives"]["wire_bytes"]) - before) // REPEATS


def one_call(group: Any, op: str, nbytes: int) -> Callable[[], None]:
    """A function that makes one call of ``op`` on ``nbytes`` of fp32, a multiple of 4 times the
    number of ranks.
    """
    import torch

    from paralab.parallel.collectives import ALGORITHMS
    from paralab.transports import FUNCTIONS

    whole = torch.zeros(nbytes // 4)  # (n k,)
    part = torch.zeros(whole.numel() // group.size)  # (k,)
    if op == NATIVE:
        return functools.partial(FUNCTIONS["reduce_scatter"], part, whole)
    if op in ALGORITHMS:
        return functools.partial(ALGORITHMS[op], group, whole)
    return functools.partial(call, group, op, whole, part, end=group.ranks[-1])
