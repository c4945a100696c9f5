"""What a launch can end with; `pl` shows these names."""

from __future__ import annotations


class RankError(RuntimeError):
    """A rank failed. ``rank``: which one; ``traceback``: its own traceback, as text; ``status``: of
    the process, if it called sys.exit, else 1.
    """

    def __init__(
        self, message: str, *, rank: int = -1, traceback: str = "", status: int = 1
    ) -> None:
        super().__init__(message)
        self.rank, self.traceback, self.status = rank, traceback, status


class RankTimeout(RankError):
    """No rank gave a sign of life. ``waiting``: {rank: where it stands}."""

    def __init__(self, message: str, *, waiting: dict[int, str] | None = None) -> None:
        super().__init__(message)
        self.waiting = waiting or {}


class Stopped(RuntimeError):
    """The caller's ``stop`` event was set. Every rank has ended, and nothing was returned.
    ``printed``: bytes that the ranks had printed by then.
    """

    def __init__(self, message: str = "", *, printed: int = 0) -> None:
        super().__init__(message)
        self.printed = printed


def interrupted(error: KeyboardInterrupt, words: str) -> KeyboardInterrupt:
    """The interrupt with these words at its end, and without the frames that it came through:
    where the library was says nothing. Another kind, as of a signal, keeps its own words.
    """
    if type(error) is KeyboardInterrupt and words:
        error.args = ("; ".join([*map(str, error.args), words]),)
    return error.with_traceback(None)


class Nested(RuntimeError):
    """A rank asked for ranks."""


class OutOfMemory(RuntimeError):
    """An allocation failed. ``rank``: where; ``traceback``: in which lines; ``table``: what holds
    the memory, by category.
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
