"""A call under way: what every method of a `Group` returns, and where a rank stands idle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paralab.comm import Group


class Pending:
    """A call under way. ``wait()`` returns when its result may be read; twice is harmless."""

    __slots__ = ("_group", "_works", "_span", "_what", "_finish", "_done")

    def __init__(
        self, group: Group, works: Sequence[Any], span: int, what: tuple, finish: Callable | None
    ) -> None:
        self._group, self._works, self._span = group, works, span
        self._what, self._finish, self._done = what, finish, False

    def wait(self) -> None:
        if self._done:
            return
        self._done = True
        group = self._group
        group.recorder.enter("wait", after=(self._span,))
        group.blocked_in(*self._what)
        group.settle(self._works)
        group.recorder.settled(self._span)
        group.blocked_in()
        group.recorder.leave()
        if self._finish is not None:
            self._finish()
