"""Calls learners' functions with a bound on the lines they run, and without help from this package,
which could compute the answer. A trace function sees both lines and calls.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from paralab.exercises.attempts import attempt

LINES = 2_000_000  # of the learner's own code that one call may run: half a second
ENDLESS = "lines of the answer were run, and it has not ended: does a loop never stop?"
OURS = str(Path(__file__).parents[1])
NOT_THEIRS = tuple({sys.prefix, sys.base_prefix, OURS, "<frozen "})  # files that are not counted
# Arguments of `bounded` for an answer that may use no more of paralab than specifications.
COMPUTES = "paralab would compute the answer here, so this function of it may not be called"
UNAIDED = COMPUTES, ("spec/", "checks.py")


def bounded(
    call: Callable[[], Any], alone: str = "", legal: tuple[str, ...] = ()
) -> tuple[Any, str]:
    """`attempt`, in which a loop without end raises an error, before it fills the memory. An answer
    that catches the error has failed all the same.

    alone  a reason why this package must not be called: calling it raises an error with this text
    legal  folders and files of this package that may be called all the same
    """
    left, stopped, allowed = LINES, "", tuple(f"{OURS}/{name}" for name in legal)

    def stop(why: str) -> None:
        nonlocal stopped
        stopped = why
        raise RuntimeError(why)  # with which tracing ends

    def seen(frame: Any, event: str, _: Any) -> Callable[..., Any] | None:
        nonlocal left
        if event == "call" and (file := frame.f_code.co_filename).startswith(NOT_THEIRS):
            entered = file.startswith(OURS) and not frame.f_back.f_code.co_filename.startswith(OURS)
            if alone and entered and not file.startswith(allowed):
                stop(alone)
            return None
        left -= 1
        return seen if left >= 0 else stop(f"{LINES:,} {ENDLESS}")

    before = sys.gettrace()
    sys.settrace(seen)
    try:
        value, trouble = attempt(call)
    finally:
        sys.settrace(before)
    if stopped and not trouble:
        return None, f"raised RuntimeError: {stopped}"
    return value, trouble


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """Within this context nothing is traced: the library works for the answer, at full speed."""
    before = sys.gettrace()
    sys.settrace(None)
    try:
        yield
    finally:
        sys.settrace(before)
