"""What a checker found, limit by limit: what was asked, what the answer did, whether it holds.

A checker never raises for a wrong answer; it says what it saw. Rows are text with rounded numbers
and no clock readings, so a verdict reads the same twice and a notebook's stored one can be
compared. Torch is not imported here.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paralab.ranks.errors import OutOfMemory, RankError, RankTimeout

if TYPE_CHECKING:
    import pandas as pd

NOT_STARTED = "not started yet"
GOOD, BAD = "#0B7A4B", "#B4310F"  # beside a word that says the same, never alone


@dataclass(frozen=True, kw_only=True)
class Row:
    """One limit. ``ok`` is None where an earlier failure left nothing to look at."""

    limit: str
    asked: str
    yours: str
    ok: bool | None

    @property
    def word(self) -> str:
        return {True: "yes", False: "no", None: "-"}[self.ok]


@dataclass(frozen=True, repr=False, kw_only=True)
class Verdict:
    """The answer to ``check``. True where every limit is kept.

    passed   all rows are ok
    said     the first thing that is wrong, in one sentence; "" if nothing is
    rows     every limit of the exercise
    """

    exercise: str
    rows: tuple[Row, ...]
    said: str = ""

    @property
    def passed(self) -> bool:
        return bool(self.rows) and all(row.ok for row in self.rows)

    @property
    def started(self) -> bool:
        """Whether there was anything to look at."""
        return self.said != NOT_STARTED

    @property
    def table(self) -> pd.DataFrame:
        """The rows; columns limit, asked, yours, ok."""
        import pandas as pd

        return pd.DataFrame(
            [(row.limit, row.asked, row.yours, row.word) for row in self.rows],
            columns=["limit", "asked", "yours", "ok"],
        )

    def __bool__(self) -> bool:
        return self.passed

    def __repr__(self) -> str:
        kept = sum(row.ok is True for row in self.rows)
        if not self.started:
            return f"{self.exercise}: {NOT_STARTED}; .hint() gives one push at a time"
        if self.passed:
            return f"{self.exercise}: passed, all {kept} limits kept"
        return f"{self.exercise}: not yet, {kept} of {len(self.rows)} limits kept: {self.said}"

    def _repr_html_(self) -> str:
        state = "passed" if self.passed else NOT_STARTED if not self.started else "not yet"
        colour = GOOD if self.passed else BAD if self.started else "inherit"
        left = 'style="text-align:left"'
        head = "".join(f"<th {left}>{word}</th>" for word in ("limit", "asked", "yours", "ok"))
        body = ""
        for row in self.rows:
            tint = {True: GOOD, False: BAD, None: "inherit"}[row.ok]
            cells = "".join(f"<td {left}>{html.escape(t)}</td>" for t in (row.asked, row.yours))
            body += (
                f"<tr><th {left}>{html.escape(row.limit)}</th>{cells}"
                f'<td style="text-align:left;font-weight:600;color:{tint}">{row.word}</td></tr>'
            )
        said = "" if self.passed or not self.started else f": {html.escape(self.said)}"
        return (
            f'<p><b>{html.escape(self.exercise)}</b>: <b style="color:{colour}">{state}</b>{said}'
            f"</p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        )


class Notes:
    """The rows of one verdict while a checker fills them in, in the order of the stated limits.

    limits   (name, what is asked) of every limit of the exercise
    """

    def __init__(self, exercise: str, limits: tuple[tuple[str, str], ...]) -> None:
        self.exercise, self.limits = exercise, dict(limits)
        self._found: dict[str, tuple[str, bool]] = {}
        self.said = ""

    def note(self, limit: str, yours: str, ok: bool, said: str = "") -> None:
        """Write down one look at ``limit``; of several looks the first failure stands."""
        if limit not in self.limits:
            raise KeyError(f"{limit!r} is not a stated limit of {self.exercise}")
        if self._found.get(limit, ("", True))[1]:
            self._found[limit] = (yours, bool(ok))
        if not ok and not self.said:
            self.said = said or f"{limit}: asked {self.limits[limit]}, yours {yours}"

    def verdict(self) -> Verdict:
        rows = []
        for limit, asked in self.limits.items():
            yours, ok = self._found.get(limit, ("", None))
            rows.append(Row(limit=limit, asked=asked, yours=yours, ok=ok))
        said = self.said
        if not said and not all(row.ok for row in rows):
            said = NOT_STARTED
        return Verdict(exercise=self.exercise, rows=tuple(rows), said=said)


def on_ranks(
    notes: Notes,
    form: Any,
    sizes: Iterable[int],
    run: Callable[[int], Any],
    look: Callable[[Notes, Any, int], None],
    *,
    first: str,
    letter: str,
) -> Verdict:
    """The verdict on a class that real ranks run, once for every size; a failure ends it.

    run     size -> what came of it, usually a Report
    look    notes what there is to say about that
    first   the limit that an answer misses which fails
    letter  what the size is called: "N"
    """
    if not callable(form):
        notes.note(first, "nothing to call", False, f"asked is a class, yours is {form!r}")
        return notes.verdict()
    for size in sizes:
        found, trouble = attempt(lambda size=size: run(size))
        if trouble == NOT_STARTED:
            return notes.verdict()
        if trouble:
            notes.note(first, f"{letter}={size}: failed", False, f"{letter}={size}: {trouble}")
            return notes.verdict()
        look(notes, found, size)
    return notes.verdict()


def attempt(call: Callable[[], Any]) -> tuple[Any, str]:
    """(what ``call`` returns, "") or (None, why there is nothing), for an answer that may fail.

    "not started yet" for the ``NotImplementedError`` of a stub, on a rank too. An interrupt is the
    user's and passes.
    """
    try:
        return call(), ""
    except NotImplementedError:
        return None, NOT_STARTED
    except RankTimeout as error:
        return None, f"nothing moves any more: {_where_they_wait(error)}"
    except (RankError, OutOfMemory) as error:
        said = first_line(error)
        return None, NOT_STARTED if "raised NotImplementedError" in said else said
    except Exception as error:  # the learner's code: whatever it raises is an observation
        if isinstance(error, ValueError) and "; legal: " in str(error):
            return None, first_line(error)  # a refusal in paralab's own words
        return None, f"raised {type(error).__name__}: {first_line(error)}".removesuffix(": ")


def first_line(error: BaseException) -> str:
    """The first line of an error's message; "" if it has none."""
    return (str(error).strip().splitlines() or [""])[0]


def _where_they_wait(error: RankTimeout) -> str:
    """Each rank's standing without call numbers' surroundings: the same words for the same hang."""
    standing = [f"rank {rank} {where}" for rank, where in sorted(error.waiting.items())]
    return "; ".join(standing) if standing else first_line(error)
