"""Calls of learners' code, which may fail or never end: their value, or the reason for none."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import Any

from paralab.checks import LEGAL
from paralab.exercises.verdict import NOT_STARTED
from paralab.ranks.errors import OutOfMemory, RankError, RankTimeout, Stopped
from paralab.ranks.failure import describe
from paralab.ranks.hangs import Frame, noted_place, place
from paralab.ranks.output import keeping

WHOLE = 6  # times `timeout`: the longest that a launch may take, however much it prints
KEPT = 10_000  # bytes of what a rank prints first, and last: enough to look for a mistake in


def launched(
    call: Callable[..., Any], *args: Any, timeout: float, **settings: Any
) -> tuple[Any, str]:
    """`attempt`, for a call that starts ranks. They are stopped after `WHOLE` times the timeout in
    any case, because an answer that prints without end shows signs of life without end.
    """
    stop = threading.Event()
    timer = threading.Timer(WHOLE * timeout, stop.set)
    timer.daemon = True
    timer.start()
    try:
        with keeping(KEPT):
            limits = {"timeout": timeout, "stop": stop, **settings}
            return attempt(lambda: call(*args, **limits), within=WHOLE * timeout)
    finally:
        timer.cancel()


def attempt(call: Callable[[], Any], *, within: float = 0.0) -> tuple[Any, str]:
    """(the value that ``call`` returns, "") or (None, why it returns none, in words). within: the
    seconds after which the caller stops it, for these words.
    """
    try:
        return call(), ""
    except RankTimeout as error:
        waiting = [f"rank {rank} {_is_at(line)}" for rank, line in sorted(error.waiting.items())]
        return None, f"no rank makes progress any more: {'; '.join(waiting) or first_line(error)}"
    except Stopped:
        return None, f"it has not ended within {within:g} s, the time that a check may take"
    except (RankError, OutOfMemory) as error:
        where = NOT_STARTED if NOT_STARTED in error.traceback else noted_place(error.traceback)
        return None, without_stub(first_line(error) + where)
    except (Exception, SystemExit, GeneratorExit) as error:
        if isinstance(error, ValueError) and LEGAL in first_line(error):
            return None, first_line(error)  # a refusal in paralab's own words
        return None, without_stub(describe(error, 0).what + origin(error))


def _is_at(standing: str) -> str:
    """Where a rank stands, "in send, line 7 of ..." or "line 7 of ...", as a predicate."""
    verb = "is at " if standing.startswith("line ") else "is " * standing.startswith("in ")
    return verb + standing


def origin(error: BaseException) -> str:
    """The `place` where an error was raised; `NOT_STARTED` for the error of a stub: "your turn",
    or a bare ``raise NotImplementedError`` in the learner's code. torch raises that error too,
    where a class lacks a method or a kernel a dtype: then the answer has a mistake.
    """
    if isinstance(error, NotImplementedError):
        last = traceback.extract_tb(error.__traceback__)[-1]
        bare = not first_line(error) and Frame(last.filename, 0, last.name).own
        if bare or first_line(error).startswith("your turn"):
            return NOT_STARTED
    return place(error)


def without_stub(failure: str) -> str:
    """The failure, or `NOT_STARTED` alone if it ends in that: then the answer is a stub."""
    return NOT_STARTED if failure.endswith(NOT_STARTED) else failure


def first_line(error: BaseException) -> str:
    """The first line of an error's message; "" if it has none, or none that can be shown."""
    try:
        return (str(error).strip().splitlines() or [""])[0]
    except Exception:
        return ""
