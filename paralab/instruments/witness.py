"""The kernel as witness: what the loopback interface counted, next to what the ledger says.

Ranks on one machine talk through the loopback interface, and the kernel counts its bytes without
knowing anything of collectives. Ranks are held at a *gate* before and after every call, and the
last one to come reads the counter while all the others are idle. So theory, ledger and kernel can
be put side by side, and an implementation that moves more than its name says is found out.

Headers add some 0.3 to 4 kB per rank and call: below 1 % from about 1 MiB on.

The counter belongs to the whole machine (to the network namespace, to be exact). What other
programs send over the loopback can only add to it, so every call is made several times and the
least counts.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paralab.checks import choice, whole
from paralab.instruments.measure import call
from paralab.launch import MAX_RANKS, launch_program
from paralab.theory import collectives as theory
from paralab.theory import traffic

if TYPE_CHECKING:
    import pandas as pd

NATIVE = "native reduce_scatter"  # torch's own on gloo: n all-reduces
OPS = (*(op for op in traffic.OPS if op != "recv"), NATIVE, *theory.ALGORITHMS)
DEFAULT = ("all_reduce", "all_gather", "reduce_scatter", NATIVE, "ring_all_reduce")
REPEATS = 5
_SETTLE_SECONDS = 0.02  # what is still on its way arrives
_COUNTERS = Path("/proc/net/dev")

Gate = Callable[[], None]


def witness(
    ranks: int = 4, ops: Sequence[str] = DEFAULT, nbytes: int = 8 * 2**20, *, timeout: float = 60.0
) -> pd.DataFrame:
    """Make every call of ``ops`` on ``nbytes`` of fp32 and ask the kernel what was sent.

    ranks   processes, 2 to 64
    ops     "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce",
            "send" (rank 0 to the last): the calls of `comm.Group`; "ring_all_reduce",
            "tree_all_reduce", ...: those of parallel/collectives.py; "native reduce_scatter":
            torch's own, past the ledger
    nbytes  of the full tensor, rounded down to whole elements per rank; 1 MiB or more, or headers
            show
    timeout seconds without any sign of life before the ranks are stopped

    One row per op, bytes summed over the ranks: op, theory_bytes (the closed form), ledger_bytes
    (what `Group` wrote down; none for the native call), kernel_bytes (the least of 5 calls), ratio
    (kernel over theory). Raises OSError where the kernel shows no counter (only Linux does).
    """
    import pandas as pd

    ranks = whole("ranks", ranks, at_least=2, at_most=MAX_RANKS)
    ops = [choice("ops", op, OPS) for op in ([ops] if isinstance(ops, str) else ops)]
    nbytes = whole("nbytes", nbytes, at_least=4 * ranks) // (4 * ranks) * (4 * ranks)
    parts, counts = between_gates(_calls, ranks, (ops, nbytes), timeout=timeout)
    rows = []
    for i, op in enumerate(ops):
        expected = theory_bytes(op, ranks, nbytes)
        seen = min(per_call(counts, i))
        ledger = None if op == NATIVE else sum(part[i] for part in parts)
        rows.append((op, expected, ledger, seen, round(seen / expected, 3)))
    table = pd.DataFrame(
        rows, columns=["op", "theory_bytes", "ledger_bytes", "kernel_bytes", "ratio"]
    )
    return table.astype({"ledger_bytes": "Int64"})


def theory_bytes(op: str, ranks: int, nbytes: int) -> int:
    """What all ranks together send for ``op`` on ``nbytes``, by the closed forms."""
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
    """Run ``program(context, gate, *args)`` on every rank; the counter's state at every gate.

    A rank that calls ``gate()`` is idle until all ranks have and the counter has been read. Returns
    the programs' results and the readings, in bytes.
    """
    loopback_bytes()  # refuse before a process starts
    settings = {"timeout": timeout, "device": "cpu"}
    found = launch_program(_gated, ranks, (program, *args), **settings)
    return [result for result, _ in found], found[0][1]


def _gated(context: Any, program: Callable[..., Any], *args: Any) -> tuple[Any, list[int]]:
    """In a rank: what the program returns, and the readings. Ranks meet in their store: a file."""
    counts: list[int] = []

    def gate() -> None:
        name = f"gate {len(counts)} of the witness"
        context.note(name)
        if context.store.add(f"ranks at {name}", 1) == context.world_size:
            time.sleep(_SETTLE_SECONDS)
            context.store.set(name, str(loopback_bytes()))
        counts.append(int(context.store.get(name)))
        context.note("")

    return program(context, gate, *args), counts


def per_call(counts: Sequence[int], index: int) -> list[int]:
    """Bytes between successive gates of call number ``index``, which passed REPEATS + 1 of them."""
    own = counts[index * (REPEATS + 1) : (index + 1) * (REPEATS + 1)]
    return [after - before for before, after in itertools.pairwise(own)]


def loopback_bytes() -> int:
    """Bytes received on the loopback interface so far: there, each byte sent is received once."""
    with contextlib.suppress(OSError):
        if counted := re.search(r"^ *lo: *(\d+)", _COUNTERS.read_text(), re.MULTILINE):
            return int(counted[1])
    raise OSError(
        f"the kernel shows no counter of the loopback interface in {_COUNTERS}: only Linux has it; "
        "elsewhere the ledger (report.traffic()) has no witness"
    )


# ---- what ranks do between the gates ------------------------------------------------------------
def _calls(context: Any, gate: Gate, ops: Sequence[str], nbytes: int) -> list[int]:
    """Every op between gates; this rank's ledger bytes of one call of each."""
    from paralab.comm import everyone

    group = everyone(context)
    return [held(calls(group, nbytes)[op], gate, group.recorder) for op in ops]


def held(once: Callable[[], None], gate: Gate, recorder: Any) -> int:
    """Make a call REPEATS times between gates. Returns what the ledger says ``once`` sent."""
    once()  # connections are made at the first call
    before = sum(recorder.tables()["collectives"]["wire_bytes"])
    gate()
    for _ in range(REPEATS):
        once()
        gate()
    return (sum(recorder.tables()["collectives"]["wire_bytes"]) - before) // REPEATS


def calls(group: Any, nbytes: int) -> dict[str, Callable[[], None]]:
    """By op: one call of it on ``nbytes`` of fp32, n * 4 bytes a divisor of them."""
    import torch

    from paralab.parallel.collectives import ALGORITHMS
    from paralab.transports import FUNCTIONS

    whole = torch.zeros(nbytes // 4)  # (n k,)
    part = torch.zeros(whole.numel() // group.size)  # (k,)
    made: dict[str, Callable[[], None]] = {NATIVE: lambda: FUNCTIONS["reduce_scatter"](part, whole)}
    for op in OPS:
        if op in ALGORITHMS:
            made[op] = functools.partial(ALGORITHMS[op], group, whole)
        elif op != NATIVE:
            made[op] = functools.partial(call, group, op, whole, part, end=group.ranks[-1])
    return made
