"""A rank's failure: described by the rank in plain values, judged by the process that launched it.

The exception itself is never pickled: its class may be defined in a notebook cell, hold a lock, or
fail to unpickle, and the launching process has to show it all the same. torch's errors are
recognized by name, so that the launching process can import this file without torch.
"""

from __future__ import annotations

import os
import re
import signal
import time
import traceback
from collections.abc import Collection
from typing import NamedTuple

from paralab.checks import ADDRESS, shortened, shown
from paralab.ranks.errors import OutOfMemory, RankError
from paralab.ranks.hangs import show_cells
from paralab.ranks.server import CANNOT_START, NO_PROCESS

_HERE = os.path.dirname(__file__) + os.sep
_FROM_A_PEER = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|socket closed|timed out|remote process",
    re.IGNORECASE,
)
_TORCHS_FROM_A_PEER = {"DistBackendError", "DistNetworkError", "DistStoreError"}
_ALLOCATION = re.compile(r"allocated?:? +([\d.]+) ?([KMGTP]?i?B|bytes)\b", re.IGNORECASE)
_NO_THREAD = re.compile("^(Resource temporarily unavailable|can't start new thread)$")
_NO_MEMORY = re.compile("can't allocate memory|not enough memory|std::bad_alloc")
ENDED = "was killed by signal"
KILLED = """. If no other program sent this signal, the kernel's out-of-memory killer did, because \
the machine, or the user's or container's share of it, had no memory left (dmesg shows it). Use \
fewer ranks or a smaller model"""


class Refused(RankError):
    """A setting that only a rank can find illegal; the caller of the launch gets a ValueError."""


class Failure(NamedTuple):
    """Why a rank ended.

    time    of the failure, on the clock that all processes of the machine share
    kind    "error", "memory", "communication" (its error is the consequence of another rank's
            failure), "refused", "cannot start", or "died"
    what    one line that completes "rank 2 ..."
    table   what holds the memory, for a failed allocation
    status  the exit status that a process with this failure has
    """

    rank: int
    time: float
    kind: str
    what: str
    traceback: str = ""
    table: str = ""
    status: int = 1


# ---- in the rank --------------------------------------------------------------------------------


def describe(error: BaseException, rank: int, noted: str = "") -> Failure:
    """``error`` as plain values. noted: the call in which the rank was blocked, as it noted it"""
    now = time.monotonic()
    if isinstance(error, Refused):
        return Failure(rank, now, "refused", str(error))
    if isinstance(error, RankError):  # raised by paralab about the user's function
        return Failure(rank, now, "error", shortened(f"failed: {error}"))
    message = _message(error)
    line, kind, table, status = (message.splitlines() or [""])[0], "error", "", 1
    text = _traceback(error)
    if noted:
        text += f"(this rank was in {noted})\n"
    what = f"raised {type(error).__name__}" + f": {line}" * bool(line)
    if isinstance(error, SystemExit):
        what = f"called sys.exit({shown(error.code)})"
        status = error.code & 0xFF if isinstance(error.code, int) else 1
    elif isinstance(error, OutOfMemory):
        kind, what, table = "memory", f"ran out of memory: {line}", error.table
        text = text.replace(f"\n\n{table}", "") if table else text
    elif isinstance(error, (MemoryError, RuntimeError)) and (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or _NO_MEMORY.search(message)
    ):
        kind, what = "memory", "ran out of memory"
        if size := _ALLOCATION.search(" ".join(message.splitlines())):
            count, unit = size.groups()
            if unit == "bytes":
                count, unit = f"{int(count) / 2**20:,.1f}", "MiB"
            what += f": it asked for {count} {unit}"
    elif _NO_THREAD.match(message):
        what += NO_PROCESS
    elif is_from_a_peer(error):
        kind = "communication"
    return Failure(rank, now, kind, shortened(what), shortened(text), shortened(table), status)


def _message(error: BaseException) -> str:
    try:
        return str(error).strip()
    except Exception:  # the class may be the user's
        return "<its message cannot be shown>"


def _traceback(error: BaseException) -> str:
    """The traceback from the user's outermost frame on, or all of it if no frame is the user's."""
    frames = error.__traceback__
    while frames is not None and (
        frames.tb_frame.f_code.co_filename.startswith(_HERE)
        or "__tracebackhide__" in frames.tb_frame.f_code.co_varnames
    ):
        frames = frames.tb_next
    frames = frames or error.__traceback__
    return "".join(traceback.format_exception(type(error), error, frames))


def is_from_a_peer(error: BaseException | None) -> bool:
    """Whether a rank that was lost caused this error, or an error that led to it."""
    seen: list[BaseException] = []
    while error is not None and all(error is not one for one in seen):
        if _TORCHS_FROM_A_PEER & {kind.__name__ for kind in type(error).__mro__}:
            return True
        of_torch = isinstance(error, (RuntimeError, ConnectionError))
        if of_torch and _FROM_A_PEER.search(_message(error)):
            return True
        seen.append(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


# ---- in the launching process -------------------------------------------------------------------


def died(code: int, *, returned: bool) -> str:
    """How a process with this exit code ended, in words; a negative code is a signal's number."""
    when = "after" if returned else "before"
    if code >= 0:
        return f"ended with exit code {code} {when} its function returned"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else "unknown"
    text = f"{ENDED} {-code} ({name}) {when} its function returned"
    return text + KILLED * (-code == signal.SIGKILL)


def root_cause(failures: Collection[Failure]) -> Exception:
    """The error to raise for a launch: of the earliest failure that another one did not cause.

    If several ranks fail alike, which of them was first is chance, so the lowest one is named.
    """
    causes = [f for f in failures if f.kind != "communication"] or list(failures)
    first = min(causes, key=lambda f: f.time)
    alike = [f for f in causes if ADDRESS.sub("", f.what) == ADDRESS.sub("", first.what)]
    rank, _, kind, what, trace, table, status = min(alike, key=lambda f: f.rank)
    if kind == "refused":
        return ValueError(what)
    if kind == "cannot start":
        return RankError(CANNOT_START + what, rank=rank)
    trace = show_cells(trace).rstrip()
    message = "\n\n".join(part for part in (f"rank {rank} {what}", table, trace) if part)
    if kind == "memory":
        return OutOfMemory(message, rank=rank, table=table, traceback=trace)
    return RankError(message, rank=rank, traceback=trace, status=status)
