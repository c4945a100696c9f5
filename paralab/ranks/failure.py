"""An exception of a rank as plain values: what kind, one line, and its traceback as text.

The exception itself never travels: its class may live in a notebook cell, hold a lock, or refuse to
unpickle, and the launching process has to show it all the same.
"""

from __future__ import annotations

import re
import traceback
from typing import Any

import torch
import torch.distributed as dist

from paralab.ranks.errors import OutOfMemory, RankError

_FROM_A_PEER = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|socket closed|timed out|remote process",
    re.IGNORECASE,
)
_ASKED_FOR = re.compile(r"allocate[d]?:? +((?:[\d.]+ ?[KMGTP]?i?B|\d+ bytes)\b.*)", re.IGNORECASE)
_NO_MEMORY = ("can't allocate memory", "not enough memory", "std::bad_alloc")


class Refused(Exception):
    """A setting that only a rank can judge is illegal: becomes the caller's ValueError."""


def describe(error: BaseException, noted: str, *, hide: str) -> dict[str, Any]:
    """Plain values for the launcher. noted: what the rank was blocked in; hide: file to leave out.

    kind is "memory", "communication" (what a rank sees when another one failed), "refused" or
    "error".
    """
    if isinstance(error, Refused):
        return {"kind": "refused", "what": str(error), "traceback": ""}
    if isinstance(error, RankError):  # said by the rank itself, about the user's function
        return {"kind": "error", "what": f"failed: {error}", "traceback": ""}
    frames = error.__traceback__
    while frames is not None and (
        frames.tb_frame.f_code.co_filename == hide
        or "__tracebackhide__" in frames.tb_frame.f_code.co_varnames
    ):
        frames = frames.tb_next
    frames = frames or error.__traceback__  # nothing else: paralab's own fault, show all
    text = "".join(traceback.format_exception(type(error), error, frames))
    if noted:
        text += f"(this rank was in {noted.removeprefix('in ')})\n"
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
            report["traceback"] = text.replace(f"\n\n{error.table}", "") if error.table else text
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
