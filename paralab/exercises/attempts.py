"""Calls that may fail, or never end, and what there is to say of it."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import Any

from paralab.checks import shown
from paralab.exercises.verdict import NOT_STARTED
from paralab.ranks.errors import OutOfMemory, RankError, RankTimeout, Stopped
from paralab.ranks.output import keeping
from paralab.ranks.waits import Frame, noted_place, place

WHOLE = 6  # times `timeout`: the longest that a launch may take, whatever it prints meanwhile
KEPT = 10_000  # bytes of what a rank prints first, and last: enough to look for a mistake in


def launched(
    call: Callable[..., Any], *args: Any, timeout: float, **settings: Any
) -> tuple[Any, str]:
    """`attempt` of a call that starts ranks. They are stopped when the longest time is over: an
    answer that prints for ever gives signs of life for ever.
    """
    stop = threading.Event()
    timer = threading.Timer(WHOLE * timeout, stop.set)
    timer.daemon = True
    timer.start()
    try:
        with keeping(KEPT):
            how = {"timeout": timeout, "stop": stop, **settings}
            return attempt(lambda: call(*args, **how), within=WHOLE * timeout)
    finally:
        timer.cancel()


def attempt(call: Callable[[], Any], *, within: float = 0.0) -> tuple[Any, str]:
    """(what ``call`` returns, "") or (None, why there is nothing), for an answer that may fail.
    within: seconds after which it is stopped.
    """
    try:
        return call(), ""
    except RankTimeout as error:
        standing = [f"rank {rank} {where}" for rank, where in sorted(error.waiting.items())]
        return None, f"nothing moves any more: {'; '.join(standing) or first_line(error)}"
    except Stopped as stopped:
        flood = f"; it printed {stopped.printed / 1e6:,.1f} MB" * (stopped.printed > 2 * KEPT)
        return None, f"it has not ended in the time that there is for a check, {within:g} s{flood}"
    except (RankError, OutOfMemory) as error:
        noted = NOT_STARTED if NOT_STARTED in error.traceback else noted_place(error.traceback)
        return None, said(first_line(error) + noted)
    except (Exception, SystemExit, GeneratorExit) as error:
        if isinstance(error, ValueError) and "; legal: " in first_line(error):
            return None, first_line(error)  # a refusal in paralab's own words
        said_by_it = f"raised {type(error).__name__}: {first_line(error)}".removesuffix(": ")
        if isinstance(error, SystemExit):
            said_by_it = f"called sys.exit({shown(error.code)})"
        return None, said(said_by_it + whence(error))


def whence(error: BaseException) -> str:
    """The `place` of an error, or `NOT_STARTED` for the one of a stub: "your turn", or a bare
    ``raise NotImplementedError`` of the learner's. torch raises others, for a method that a class
    does not have, or a kernel that does not know a dtype: those are mistakes.
    """
    if isinstance(error, NotImplementedError):
        last = traceback.extract_tb(error.__traceback__)[-1]
        bare = not first_line(error) and Frame(last.filename, 0, last.name).own
        if bare or first_line(error).startswith("your turn"):
            return NOT_STARTED
    return place(error)


def said(failure: str) -> str:
    """`NOT_STARTED` for a failure that ends in it, as `whence` says."""
    return NOT_STARTED if failure.endswith(NOT_STARTED) else failure


def first_line(error: BaseException) -> str:
    """The first line of an error's message; "" if it has none, or none that can be shown."""
    try:
        return (str(error).strip().splitlines() or [""])[0]
    except Exception:
        return ""
