"""A failure of a rank: told by the rank as plain values, judged by the process that launched it.

The exception itself never travels: its class may live in a notebook cell, hold a lock, or refuse to
unpickle, and the launching process has to show it all the same. torch's errors are known by name,
so that both sides read this file.
"""

from __future__ import annotations

import re
import signal
import traceback
from collections.abc import Collection
from typing import NamedTuple

from paralab.checks import shortened
from paralab.ranks.errors import OutOfMemory, RankError
from paralab.ranks.server import CANNOT_START
from paralab.ranks.waits import show_cells

_FROM_A_PEER = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|socket closed|timed out|remote process",
    re.IGNORECASE,
)
_TORCHS_FROM_A_PEER = {"DistBackendError", "DistNetworkError", "DistStoreError"}
_ASKED_FOR = re.compile(r"allocate[d]?:? +((?:[\d.]+ ?[KMGTP]?i?B|\d+ bytes)\b.*)", re.IGNORECASE)
_NO_MEMORY = re.compile("can't allocate memory|not enough memory|std::bad_alloc")
ENDED = "was killed by signal"
KILLED = """. If no other program sent it, it was the kernel's out-of-memory killer: the machine \
had no memory left (dmesg tells); fewer ranks or a smaller model would fit"""


class Refused(Exception):
    """A setting that only a rank can judge is illegal: becomes the caller's ValueError."""


class Failure(NamedTuple):
    """What ended a rank.

    kind  "error", "memory", "communication" (what a rank sees when another one failed), "refused",
          "cannot start", or "died"
    what  one line that follows "rank 2"; time: on the clock that all processes share
    status  of a process that ends so
    """

    rank: int
    time: float
    kind: str
    what: str
    traceback: str = ""
    table: str = ""
    status: int = 1


# ---- in the rank --------------------------------------------------------------------------------


def describe(
    error: BaseException, rank: int, time: float, *, noted: str = "", hide: str = ""
) -> Failure:
    """``error`` as plain values. noted: what the rank was blocked in; hide: file to leave out."""
    if isinstance(error, Refused):
        return Failure(rank, time, "refused", str(error))
    if isinstance(error, RankError):  # said by the rank itself, about the user's function
        return Failure(rank, time, "error", shortened(f"failed: {error}"))
    try:
        said = str(error).strip()
    except Exception:
        said = "<its message cannot be shown>"
    line, kind, table, status = (said.splitlines() or [""])[0], "error", "", 1
    text = _traceback(error, hide)
    if noted:
        text += f"(this rank was in {noted.removeprefix('in ')})\n"
    what = f"raised {type(error).__name__}" + f": {line}" * bool(line)
    if isinstance(error, SystemExit):
        what = f"called sys.exit({error.code!r})"
        status = error.code & 0xFF if isinstance(error.code, int) else 1
    elif isinstance(error, OutOfMemory):
        kind, what, table = "memory", f"ran out of memory: {line}", error.table
        text = text.replace(f"\n\n{table}", "") if table else text
    elif isinstance(error, (MemoryError, RuntimeError)) and (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or _NO_MEMORY.search(said)
    ):
        asked = _ASKED_FOR.search(" ".join(said.splitlines()))
        what = "ran out of memory" + (f": it asked for {_readable(asked[1])}" if asked else "")
        kind = "memory"
    elif any(_is_from_a_peer(e) for e in _chain(error)):
        kind = "communication"
    return Failure(rank, time, kind, shortened(what), shortened(text), shortened(table), status)


def _traceback(error: BaseException, hide: str) -> str:
    """From the user's own frame on; if there is none, the fault is paralab's, and all is shown."""
    frames = error.__traceback__
    while frames is not None and (
        frames.tb_frame.f_code.co_filename == hide
        or "__tracebackhide__" in frames.tb_frame.f_code.co_varnames
    ):
        frames = frames.tb_next
    frames = frames or error.__traceback__
    return "".join(traceback.format_exception(type(error), error, frames))


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
    if _TORCHS_FROM_A_PEER & {kind.__name__ for kind in type(error).__mro__}:
        return True
    return isinstance(error, (RuntimeError, ConnectionError)) and bool(
        _FROM_A_PEER.search(str(error))
    )


# ---- in the launching process -------------------------------------------------------------------


def died(code: int, *, returned: bool) -> str:
    """How a process ended by itself: ``code`` below 0 for a signal."""
    when = "after" if returned else "before"
    if code >= 0:
        return f"ended with exit code {code} {when} its function returned"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else "unknown"
    text = f"{ENDED} {-code} ({name}) {when} its function returned"
    return text + KILLED * (-code == signal.SIGKILL)


def root_cause(failures: Collection[Failure]) -> Exception:
    """The failure that is not the echo of another one; of several, the earliest.

    One mistake that all ranks make alike: which came first is chance, so the lowest rank is named.
    """
    causes = [f for f in failures if f.kind != "communication"] or list(failures)
    first = min(causes, key=lambda f: f.time)
    alike = [f for f in causes if _without_addresses(f) == _without_addresses(first)]
    rank, _, kind, what, trace, table, status = min(alike, key=lambda f: f.rank)
    if kind == "refused":
        return ValueError(what)
    if kind == "cannot start":
        return RuntimeError(CANNOT_START + what)
    trace = show_cells(trace).rstrip()
    message = "\n\n".join(part for part in (f"rank {rank} {what}", table, trace) if part)
    if kind == "memory":
        return OutOfMemory(message, rank=rank, table=table, traceback=trace)
    return RankError(message, rank=rank, traceback=trace, status=status)


def _without_addresses(failure: Failure) -> str:
    """What was raised; objects in it are somewhere else in every rank."""
    return re.sub(r"\b0x[0-9a-f]+", "", failure.what)
