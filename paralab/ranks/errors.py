"""The errors with which a launch can end; most are names of `pl`."""

from __future__ import annotations


class RankError(RuntimeError):
    """A rank failed. ``rank``: its number; ``traceback``: its own traceback, as text; ``status``:
    the exit status if it called sys.exit, otherwise 1.
    """

    def __init__(
        self, message: str, *, rank: int = -1, traceback: str = "", status: int = 1
    ) -> None:
        super().__init__(message)
        self.rank, self.traceback, self.status = rank, traceback, status


class RankTimeout(RankError):
    """No rank gave a sign of life in time. ``waiting``: {rank: where it is blocked, or its end}."""

    def __init__(self, message: str, *, waiting: dict[int, str] | None = None) -> None:
        super().__init__(message)
        self.waiting = waiting or {}


class Stopped(RuntimeError):
    """The caller's ``stop`` event was set. Every rank has ended, and nothing was returned."""


def interrupted(error: KeyboardInterrupt, words: str) -> KeyboardInterrupt:
    """The interrupt with ``words`` added to its message, and without its traceback: the library's
    own lines would not help the user. A subclass, such as a signal handler's, keeps its message.
    """
    if type(error) is KeyboardInterrupt and words:
        error.args = ("; ".join([*map(str, error.args), words]),)
    return error.with_traceback(None)


class Nested(RuntimeError):
    """A rank itself called a function that launches ranks."""


class OutOfMemory(RuntimeError):
    """An allocation failed. ``rank``: the rank on which; ``traceback``: its traceback, as text;
    ``table``: the bytes in memory by category, as text.
    """

    def __init__(
        self, message: str, *, rank: int = -1, table: str = "", traceback: str = ""
    ) -> None:
        super().__init__(message)
        self.rank, self.table, self.traceback = rank, table, traceback

    def explain(self, table: str) -> None:
        """Add the category table to the message, if the error does not carry one yet."""
        if not self.table:
            self.table = table
            self.args = (f"{self}\n\n{table}",)
