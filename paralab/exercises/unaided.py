"""Calls learners' functions with a bound on the lines they run, and without help from this package,
which could compute the answer.

A profile function sees every call into this package, on all threads. An answer can switch it off,
so the functions that answer most questions are disabled in addition.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from paralab.exercises.attempts import attempt

LINES = 2_000_000  # of the learner's own code that one call may run: half a second
ENDLESS = "lines of the answer were run, and it has not ended: does a loop never stop?"
OURS = str(Path(__file__).parents[1])
NOT_THEIRS = tuple({sys.prefix, sys.base_prefix, OURS, "<frozen "})  # files that are not counted
ANSWERING = {  # {module: function} that answers most questions
    "paralab.programs.search": "plan_search",
    "paralab.interpret.predict": "predict",
    "paralab.interpret.text": "program",
    "paralab.dry_run": "dry_run",
}
# Arguments of `bounded` for an answer that may use no more of paralab than specifications.
COMPUTES = "paralab would compute the answer here, so this function of it may not be called"
UNAIDED = COMPUTES, ("spec/", "checks.py")


def close() -> None:
    """Disable the functions in `ANSWERING` on this rank, which ends after the check. Their code is
    replaced, so that every name under which an answer has imported them is disabled too.
    """
    for module, name in ANSWERING.items():
        function = inspect.unwrap(getattr(importlib.import_module(module), name))
        function.__code__ = _refused.__code__


def _refused(*_: Any, **__: Any) -> None:
    from paralab.exercises.unaided import UNAIDED  # this code runs with another module's globals

    raise RuntimeError(UNAIDED[0])


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
        stopped = stopped or why
        raise RuntimeError(stopped)

    def counted(frame: Any, event: str, _: Any) -> Callable[..., Any] | None:
        nonlocal left
        if event == "call" and frame.f_code.co_filename.startswith(NOT_THEIRS):
            return None
        left -= 1
        return counted if left >= 0 else stop(f"{LINES:,} {ENDLESS}")

    def entered(frame: Any, event: str, _: Any) -> None:
        name, caller = (one.f_code.co_filename for one in (frame, frame.f_back))
        called = event == "call" and name.startswith(OURS) and not caller.startswith(OURS)
        if called and not name.startswith(allowed):
            stop(alone)

    before = sys.getprofile(), sys.gettrace()
    sys.setprofile(entered if alone else before[0])
    threading.setprofile(entered if alone else None)  # for threads that the call starts
    sys.settrace(counted)
    try:
        value, trouble = attempt(call)
    finally:
        sys.settrace(before[1])
        sys.setprofile(before[0])
        threading.setprofile(None)
    if stopped and not trouble:  # the answer caught the error, with which tracing ended
        return None, f"raised RuntimeError: {stopped}"
    return value, trouble


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """Within this context no lines are counted: the library works for the answer, at full speed."""
    before = sys.gettrace()
    sys.settrace(None)
    try:
        yield
    finally:
        sys.settrace(before)
