"""What is read off a report's tables once: they never change, and several pictures ask for it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary


def once(read: Callable[..., Any]) -> Callable[..., Any]:
    """``read(report, *more)`` without reading twice; forgotten with the report. What it returns is
    shared, and not to be altered.
    """
    known: WeakKeyDictionary[Any, dict[tuple[Any, ...], Any]] = WeakKeyDictionary()

    @functools.wraps(read)
    def remembered(report: Any, *more: Any) -> Any:
        found = known.setdefault(report, {})
        if more not in found:
            found[more] = read(report, *more)
        return found[more]

    return remembered
