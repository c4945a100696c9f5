"""How a test says that a call, or a command, is refused: several then read like a list."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from paralab import cli


def refuses(words: str, call: Callable[..., Any], *given: Any, **settings: Any) -> None:
    """The call raises a ValueError that has these words, a pattern."""
    __tracebackhide__ = True
    with pytest.raises(ValueError, match=words):
        call(*given, **settings)


def shell_refuses(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The message with which the command line refuses these arguments, and all that it says."""
    with pytest.raises(SystemExit) as exit_:
        cli.main(list(arguments))
    assert exit_.value.code == 2
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    return err.splitlines()[-1]
