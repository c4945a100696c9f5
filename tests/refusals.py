"""How a test says that a call is refused, so that several refusals read like a list."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def refuses(words: str, call: Callable[..., Any], *given: Any, **settings: Any) -> None:
    """The call raises a ValueError that has these words, a pattern."""
    __tracebackhide__ = True
    with pytest.raises(ValueError, match=words):
        call(*given, **settings)
