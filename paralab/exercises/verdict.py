"""What a checker found, limit by limit: what was required, what the answer did, whether it holds.

Rows are text with rounded numbers and no clock readings, so a verdict reads the same twice and a
notebook's stored one can be compared. Torch is not imported here.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from paralab.checks import shortened
from paralab.ranks.waits import show_places

if TYPE_CHECKING:
    import pandas as pd

NOT_STARTED = "not started yet"
# Readable on light and dark pages; next to a word that says the same, never alone.
GOOD, BAD = "var(--jp-success-color1, #0B8A55)", "var(--jp-error-color1, #D8452E)"
SLACK = 1 + 1e-9  # of rounding, in simulated seconds
LONGEST = 600  # characters of a row: an answer's value of megabytes is no help in a notebook


class Row(NamedTuple):
    """One limit. ``ok`` is None where an earlier failure left nothing to look at."""

    limit: str
    required: str
    yours: str
    ok: bool | None

    @property
    def word(self) -> str:
        return {True: "yes", False: "no", None: "-"}[self.ok]


@dataclass(frozen=True, repr=False, kw_only=True)
class Verdict:
    """What `Exercise.check` returns. True where every limit is kept.

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
        """The rows; columns limit, required, yours, ok."""
        import pandas as pd

        rows = [(row.limit, row.required, row.yours, row.word) for row in self.rows]
        return pd.DataFrame(rows, columns=list(Row._fields))

    def __bool__(self) -> bool:
        return self.passed

    def __repr__(self) -> str:
        kept, left = (sum(row.ok is ok for row in self.rows) for ok in (True, None))
        if not self.started:
            return f"{self.exercise}: {NOT_STARTED}; .hint() gives one hint at a time"
        if self.passed:
            return f"{self.exercise}: passed, all {kept} limits kept"
        looked_at = f"{kept} of {len(self.rows) - left} limits kept"
        more = f", {left} not looked at" * (left > 0)
        return f"{self.exercise}: not yet, {looked_at}{more}: {self.said}"

    def _repr_html_(self) -> str:
        tints = {True: GOOD, False: BAD, None: "inherit"}
        passed = self.passed if self.started else None
        state = {True: "passed", False: "not yet", None: NOT_STARTED}[passed]
        left = 'style="text-align:left"'
        head = "".join(f"<th {left}>{word}</th>" for word in Row._fields)
        body = ""
        for row in self.rows:
            cells = "".join(f"<td {left}>{html.escape(t)}</td>" for t in (row.required, row.yours))
            bold = f"text-align:left;font-weight:600;color:{tints[row.ok]}"
            body += f"<tr><th {left}>{html.escape(row.limit)}</th>{cells}"
            body += f'<td style="{bold}">{row.word}</td></tr>'
        said = f": {html.escape(self.said)}" if passed is False else ""
        return (
            f'<p><b>{html.escape(self.exercise)}</b>: <b style="color:{tints[passed]}">{state}</b>'
            f"{said}</p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        )


def ms(seconds: float) -> str:
    return f"{round(1e3 * seconds, 1):g} ms"


def as_many(yours: float, required: float, words: str = ", {} times as many") -> str:
    """The factor, in ``words``; "" where it rounds to 1, or nothing is required."""
    factor = f"{yours / required:.3g}" if required else "1"
    return "" if factor == "1" else words.format(factor)


def first(wrongs: Iterable[str]) -> str:
    """The first of these that says something, or ""."""
    return next((wrong for wrong in wrongs if wrong), "")


class Notes:
    """The rows of one verdict while a checker fills them in, in the order of the stated limits.

    limits   {name: what is required} of every limit of the exercise
    where    the case that is looked at, in words: "N=2"
    over     a failure has ended the check
    """

    def __init__(self, exercise: str, limits: dict[str, str]) -> None:
        self.exercise, self.limits = exercise, limits
        self._found: dict[str, tuple[str, bool]] = {}
        self.where, self.said, self.over = "", "", False

    def note(self, limit: str, yours: str, ok: bool, said: str = "") -> None:
        """Write down one look at ``limit``; of several looks the first failure stands."""
        if limit not in self.limits:
            raise KeyError(f"{limit!r} is not a stated limit of {self.exercise}")
        if not self.broke((limit,)):
            self._found[limit] = (shortened(show_places(yours), LONGEST), bool(ok))
        if not ok and not self.said:
            said = said or f"{limit}: required: {self.limits[limit]}, yours {yours}"
            self.said = shortened(show_places(said), LONGEST)

    def look(self, limit: str, wrong: str, right: str) -> None:
        """Note ``wrong``, or, if that is empty, that the limit is kept, as ``right`` says."""
        self.note(limit, self._here(wrong or right), not wrong, self._here(wrong))

    def each(self, limit: str, wrong: str, right: str = "right everywhere") -> None:
        """One of many looks at a limit: what is right needs no place."""
        self.note(limit, self._here(wrong) if wrong else right, not wrong, self._here(wrong))

    def end(self, trouble: str, *, limit: str = "", yours: str = "failed") -> None:
        """Nothing more can be looked at: ``trouble`` says why, or `NOT_STARTED`."""
        self.over = True
        if trouble == NOT_STARTED:
            self.said = self.said or NOT_STARTED
            return
        limit = limit or next(iter(self.limits))
        self.note(limit, self._here(yours), False, self._here(trouble))

    def _here(self, words: str) -> str:
        return f"{self.where}: {words}" if self.where else words

    def broke(self, limits: Iterable[str] | None = None) -> bool:
        """Whether one of these limits, by default any, has been found broken."""
        limits = self.limits if limits is None else limits
        return not all(self._found.get(limit, ("", True))[1] for limit in limits)

    def at_most(
        self, limit: str, yours: float, most: float, show: Callable[[float], str], why: str = ""
    ) -> None:
        """``yours`` may not be more than ``most``. show: a number as text, with its unit; why: what
        makes it too much, ": no gather is in flight", or "".
        """
        said = f"{limit}: {show(yours)}, required: at most {show(most)}{why}"
        self.note(limit, self._here(show(yours)), yours <= most * SLACK, self._here(said))

    def bytes(
        self,
        limit: str,
        sent: Sequence[float],
        most: int,
        doing: str = "",
        *,
        least: int | None = None,
    ) -> None:
        """Every rank has to send ``least`` to ``most`` bytes, without a ``least`` ``most`` exactly.
        doing: "in a step", or "".
        """
        least, doing = most if least is None else least, f" {doing}" if doing else ""
        off = [max(size - most, least - size) for size in sent]
        worst = off.index(max(off))
        required = f"at most {most:,}" if not least else f"{least:,} to {most:,}"
        required = f"{most:,}" if least == most else required
        wrong = ""
        if off[worst] > 0 and not sent[worst]:
            wrong = f"rank {worst} sends nothing through the group{doing}"
        elif off[worst] > 0:
            wrong = f"rank {worst} sends {sent[worst]:,.10g} bytes{doing}, required: {required}"
            wrong += as_many(sent[worst], most)
        self.look(limit, wrong, f"{sent[worst]:,} bytes")

    def memory(
        self,
        limit: str,
        held: Sequence[int],
        most: int,
        words: str,
        ranks: Callable[[int], str] = "rank {}".format,
    ) -> None:
        """No rank may have more than ``most`` bytes. words: "keeps {held} bytes, an N-th is 7"."""
        worst = held.index(max(held))
        said = f"{ranks(worst)} {words.format(held=f'{held[worst]:,}')}"
        self.look(limit, said if held[worst] > most else "", f"{held[worst]:,} bytes")

    def verdict(self) -> Verdict:
        rows = []
        for limit, required in self.limits.items():
            rows.append(Row(limit, required, *self._found.get(limit, ("", None))))
        said = self.said or ("" if all(row.ok for row in rows) else NOT_STARTED)
        return Verdict(exercise=self.exercise, rows=tuple(rows), said=said)
