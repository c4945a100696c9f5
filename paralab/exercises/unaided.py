"""Calls of a learner's function that end, and that cannot ask this package, which knows the answer.

A profiler sees the calls of this package, on all threads; the functions that answer most questions
are closed in addition, as an answer can switch the profiler off.
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

LINES = 2_000_000  # of the learner's own code that one question may run: half a second
ENDLESS = "lines of it were run, and it has not ended"
OURS = str(Path(__file__).parents[1])
NOT_THEIRS = tuple({sys.prefix, sys.base_prefix, OURS, "<frozen "})
KNOWING = {  # what answers most questions, whichever thread asks
    "paralab.programs.search": "plan_search",
    "paralab.interpret.predict": "predict",
    "paralab.interpret.text": "program",
    "paralab.dry_run": "dry_run",
}
UNAIDED = "paralab knows the answer: here it cannot be asked", ("spec/", "checks.py")  # for `ended`


def close() -> None:
    """On this rank, which ends soon, nothing can be asked any more, by whatever name an answer has
    imported it.
    """
    for home, name in KNOWING.items():
        function = inspect.unwrap(getattr(importlib.import_module(home), name))
        function.__code__ = _refused.__code__


def _refused(*_: Any, **__: Any) -> None:
    from paralab.exercises.unaided import UNAIDED  # it runs in other modules

    raise RuntimeError(UNAIDED[0])


def ended(call: Callable[[], Any], alone: str = "", legal: tuple[str, ...] = ()) -> tuple[Any, str]:
    """`attempt`, with an error in place of a loop without end, which could fill the memory before a
    timeout; and, if ``alone`` gives a reason, in place of a call of this package, which knows the
    answer, but for its folders and files that are ``legal``. An answer that catches such an error
    has failed all the same.
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
    threading.setprofile(entered if alone else None)  # of threads that begin within
    sys.settrace(counted)
    try:
        value, trouble = attempt(call)
    finally:
        sys.settrace(before[1])
        sys.setprofile(before[0])
        threading.setprofile(None)
    if stopped and not trouble:  # it was caught, and nothing is seen any more
        return None, f"raised RuntimeError: {stopped}"
    return value, trouble


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """The library's own work within a question, at its own speed."""
    before = sys.gettrace()
    sys.settrace(None)
    try:
        yield
    finally:
        sys.settrace(before)
