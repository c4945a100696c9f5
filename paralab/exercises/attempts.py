"""Calls that may fail, or never end, and what there is to say of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from paralab.exercises.verdict import NOT_STARTED
from paralab.ranks.errors import OutOfMemory, RankError, RankTimeout, Stopped
from paralab.ranks.waits import noted_place, place

WHOLE = 6  # times `timeout`: the longest that a launch may take, whatever it prints meanwhile


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
        return attempt(lambda: call(*args, timeout=timeout, stop=stop, **settings))
    finally:
        timer.cancel()


def attempt(call: Callable[[], Any]) -> tuple[Any, str]:
    """(what ``call`` returns, "") or (None, why there is nothing), for an answer that may fail."""
    try:
        return call(), ""
    except RankTimeout as error:
        standing = [f"rank {rank} {where}" for rank, where in sorted(error.waiting.items())]
        return None, f"nothing moves any more: {'; '.join(standing) or first_line(error)}"
    except Stopped:
        return None, "it has not ended in the time that there is for a check"
    except (RankError, OutOfMemory) as error:
        return None, said(first_line(error) + noted_place(error.traceback))
    except NotImplementedError:
        return None, NOT_STARTED
    except Exception as error:
        if isinstance(error, ValueError) and "; legal: " in first_line(error):
            return None, first_line(error)  # a refusal in paralab's own words
        said_by_it = f"raised {type(error).__name__}: {first_line(error)}".removesuffix(": ")
        return None, said_by_it + place(error)


def said(failure: str) -> str:
    """ "not started yet" for the ``NotImplementedError`` of a stub."""
    return NOT_STARTED if "raised NotImplementedError" in failure else failure


def first_line(error: BaseException) -> str:
    """The first line of an error's message; "" if it has none, or none that can be shown."""
    try:
        return (str(error).strip().splitlines() or [""])[0]
    except Exception:
        return ""
