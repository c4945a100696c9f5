"""The verdict on an answer: for each limit what is required, what the answer does, and a yes or no.

Rows are text with rounded numbers and no clock readings, so the same answer gets the same verdict
every time, and a verdict can be compared with the one that a notebook stores. Three details of
wrong answers are left to chance: which of the ranks whose calls differ reports it, the contents of
memory that nothing has been written to, and the last digits of bytes that Python has allocated.
This module does not import torch.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from paralab.checks import ADDRESS, count_of, shortened
from paralab.ranks.hangs import show_places

if TYPE_CHECKING:
    import pandas as pd

NOT_STARTED = "not started yet"
# Readable on light and dark pages; the colour stands next to a word that says the same.
GOOD, BAD = "var(--jp-success-color1, #0B8A55)", "var(--jp-error-color1, #D8452E)"
SLACK = 1 + 1e-9  # factor on limits of simulated seconds, for rounding
LONGEST = 600  # characters of a text in a row: an answer may have returned megabytes


class Row(NamedTuple):
    """One limit. ``ok`` is None if an earlier failure ended the check before this limit."""

    limit: str
    required: str
    yours: str
    ok: bool | None

    @property
    def word(self) -> str:
        return {True: "yes", False: "no", None: "-"}[self.ok]


@dataclass(frozen=True, repr=False, kw_only=True)
class Verdict:
    """What `Exercise.check` returns; it is true if every limit is kept.

    passed   whether all rows are ok
    said     the first mistake that was found, in one sentence; "" if there is none
    rows     one for every limit of the exercise, in its order
    """

    exercise: str
    rows: tuple[Row, ...]
    said: str = ""

    @property
    def passed(self) -> bool:
        return all(row.ok for row in self.rows)

    @property
    def started(self) -> bool:
        """False for a stub: then no limit was looked at."""
        return self.said != NOT_STARTED

    @property
    def table(self) -> pd.DataFrame:
        """The rows, with the columns limit, required, yours, ok."""
        import pandas as pd

        return pd.DataFrame([row._replace(ok=row.word) for row in self.rows])

    def __bool__(self) -> bool:
        return self.passed

    def __repr__(self) -> str:
        kept, open_rows = (sum(row.ok is ok for row in self.rows) for ok in (True, None))
        if not self.started:
            return f"{self.exercise}: {NOT_STARTED}; .hint() gives one hint at a time"
        if self.passed:
            every = f"all {kept} limits" if kept > 1 else "its one limit"
            return f"{self.exercise}: passed, {every} kept"
        looked_at = len(self.rows) - open_rows
        count = f"{kept} of {count_of(looked_at, 'limit')} kept"
        rest = f", {open_rows} not looked at" * (open_rows > 0)
        return f"{self.exercise}: not yet, {count}{rest}: {self.said}"

    def _repr_html_(self) -> str:
        tints = {True: GOOD, False: BAD, None: "inherit"}
        passed = self.passed if self.started else None
        state = {True: "passed", False: "not yet", None: NOT_STARTED}[passed]
        align = 'style="text-align:left"'
        head = "".join(f"<th {align}>{word}</th>" for word in Row._fields)
        body = ""
        for row in self.rows:
            cells = "".join(f"<td {align}>{html.escape(t)}</td>" for t in (row.required, row.yours))
            bold = f"text-align:left;font-weight:600;color:{tints[row.ok]}"
            body += f"<tr><th {align}>{html.escape(row.limit)}</th>{cells}"
            body += f'<td style="{bold}">{row.word}</td></tr>'
        said = f": {html.escape(self.said)}" if passed is False else ""
        return (
            f'<p><b>{html.escape(self.exercise)}</b>: <b style="color:{tints[passed]}">{state}</b>'
            f"{said}</p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        )


def ms(seconds: float) -> str:
    return f"{round(1e3 * seconds, 1):g} ms"


def as_many(yours: float, required: float) -> str:
    """The factor in words, "yours is 1.5 times that", or "" if it rounds to 1 or a number is 0."""
    factor = f"{yours / required:.3g}" if yours and required else "1"
    return "" if factor == "1" else f" (yours is {factor} times that)"


def first(wrongs: Iterable[str]) -> str:
    """The first text that is not empty, or ""."""
    return next((wrong for wrong in wrongs if wrong), "")


def _readable(text: str) -> str:
    """The text with places in the learner's words, without addresses, and not too long."""
    return shortened(ADDRESS.sub("", show_places(text)), LONGEST)


class Notes:
    """The findings of a checker about one answer, from which `verdict` makes a row per limit.

    limits   {name: what is required} of every limit of the exercise
    where    the case that the checker looks at, in words: "N=2"
    said     the first mistake, in one sentence
    over     whether a failure has ended the check
    """

    def __init__(self, exercise: str, limits: dict[str, str]) -> None:
        self.exercise, self.limits = exercise, limits
        self._rows = {limit: Row(limit, required, "", None) for limit, required in limits.items()}
        self.where, self.said, self.over = "", "", False

    def note(self, limit: str, yours: str, ok: bool, said: str = "") -> None:
        """Record a finding about ``limit``, a KeyError if it is not a stated one. A later finding
        never replaces a failure.

        yours  the text of the row
        said   the sentence for a failure, by default made of the row
        """
        if not self.broke((limit,)):
            self._rows[limit] = self._rows[limit]._replace(yours=_readable(yours), ok=bool(ok))
        if not ok and not self.said:
            said = said or f"{limit}: required: {self.limits[limit]}, yours {yours}"
            self.said = _readable(said)

    def look(self, limit: str, wrong: str, right: str) -> None:
        """Record that the limit is broken, with the words ``wrong``; if these are empty, that it is
        kept, with the words ``right``.
        """
        self.note(limit, self._at_case(wrong or right), not wrong, self._sentence(limit, wrong))

    def each(self, limit: str, wrong: str, right: str = "right everywhere") -> None:
        """`look` at one of many cases of a limit: only a failure names its case."""
        yours = self._at_case(wrong) if wrong else right
        self.note(limit, yours, not wrong, self._sentence(limit, wrong))

    def end(self, trouble: str, *, limit: str = "", yours: str = "failed") -> None:
        """End the check, for the reason ``trouble`` or because the answer is `NOT_STARTED`."""
        self.over = True
        if trouble == NOT_STARTED:
            self.said = self.said or NOT_STARTED
            return
        limit = limit or next(iter(self.limits))
        self.note(limit, self._at_case(yours), False, self._at_case(trouble))

    def _at_case(self, words: str) -> str:
        return f"{self.where}: {words}" if self.where else words

    def _sentence(self, limit: str, wrong: str) -> str:
        """What is wrong, after the limit and the case: "loss (N=2): required: 5, yours 7"."""
        case = f" ({self.where})" if self.where not in ("", limit) else ""
        return f"{limit}{case}: {wrong}" if wrong else ""

    def broke(self, limits: Iterable[str] | None = None) -> bool:
        """Whether one of these limits, by default of all limits, is broken."""
        limits = self.limits if limits is None else limits
        return any(self._rows[limit].ok is False for limit in limits)

    def at_most(
        self, limit: str, yours: float, most: float, show: Callable[[float], str], why: str = ""
    ) -> None:
        """Record whether ``yours`` is at most ``most``. show: formats a number with its unit; why:
        the cause of an excess, such as ": no gather is in flight", or "".
        """
        said = self._sentence(limit, f"{show(yours)}, required: at most {show(most)}{why}")
        self.note(limit, self._at_case(show(yours)), yours <= most * SLACK, said)

    def bytes(
        self, limit: str, sent: Sequence, most: int, doing: str = "", least: int | None = None
    ) -> None:
        """Record whether each rank sends from ``least`` to ``most`` bytes; without ``least``,
        exactly ``most``. sent: bytes by rank; doing: "in a step", or "".
        """
        least, doing = most if least is None else least, f" {doing}" if doing else ""
        excess = [max(size - most, least - size) for size in sent]
        worst = excess.index(max(excess))
        required = f"at most {most:,}" if not least else f"{least:,} to {most:,}"
        required = f"{most:,}" if least == most else required
        size = f"{sent[worst]:,.10g}" if sent[worst] else "no"
        wrong = f"rank {worst} sends {size} bytes{doing}, required: {required}"
        wrong += as_many(sent[worst], most)
        self.look(limit, wrong if excess[worst] > 0 else "", f"{sent[worst]:,} bytes")

    def memory(
        self,
        limit: str,
        held: Sequence[int],
        most: int,
        words: str,
        why: str = "",
        ranks: Callable[[int], str] = "rank {}".format,
    ) -> None:
        """Record whether each rank holds at most ``most`` bytes. held: bytes by rank; words, why:
        for a failure, "keeps {} bytes" and "; an N-th is 7"; ranks: rank -> its name.
        """
        largest = f"{max(held):,}"
        said = f"{ranks(held.index(max(held)))} {words.format(largest)}, required: at most {most:,}"
        self.look(limit, said + why if max(held) > most else "", f"{largest} bytes")

    def verdict(self) -> Verdict:
        rows = tuple(self._rows.values())
        said = self.said or ("" if all(row.ok for row in rows) else NOT_STARTED)
        return Verdict(exercise=self.exercise, rows=rows, said=said)
