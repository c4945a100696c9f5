"""A step of many micro-batches from one of few: what repeats is executed three times, and written
down as often as it happens.

A rank goes through a list of actions and messages (parallel/lowering.py). Between warm-up and
cool-down the list repeats itself: an entry for micro-batch k, the same one for k + 1. And so does
all that comes of it, for what an entry does depends on what the rank holds, and that repeats too.
This is checked, not assumed:

    the list   that of the shorter step, with copies of its period put in, is entry for entry that
               of the longer one
    the rows   of the period's last three times are the same: messages, copies, spans, and every
               sample of memory; of this bytes may grow from one to the next by a fixed amount (the
               losses that a pipeline's last rank keeps)

Where either does not hold (GPipe, whose memory grows with every micro-batch; few micro-batches) all
of them are executed. Exact but for the moment after the update when a last rank reads its losses:
12 bytes less for each that was not executed. Torch is not imported here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from paralab.parallel.lowering import Step, lower
from paralab.records import tables
from paralab.spec import Plan

Rows = list[dict[str, Any]]
REPEATS = 3  # times a period has to pass in the same way
SPARE = 6  # periods beyond the pipeline's depth: warm-up and cool-down are longer than one pass


class Repeat(NamedTuple):
    """How a step of few micro-batches becomes one of many.

    plan    with fewer micro-batches
    until   entry of its list before which copies are put in
    period  entries that repeat, with ``more`` micro-batches each time
    copies  how often they are put in
    """

    plan: Plan
    until: int
    period: int
    more: int
    copies: int


def repeat(plan: Plan, rank: int) -> Repeat | None:
    """The shortest step that ``rank``'s can be made of; None: all of it has to be executed."""
    if plan.relays or callable(plan.schedule):
        return None
    stage, more = plan.place(rank).pp, plan.pp if plan.virtual_stages > 1 else 1
    long: list[Step] | None = None
    for depth in (1, 2, 4):
        few = depth * plan.pp + SPARE * more
        few += (plan.microbatches - few) % more
        if few + more > plan.microbatches:
            return None
        short = plan.replace(microbatches=few)
        long = lower(plan.actions())[stage] if long is None else long
        entries, copies = lower(short.actions())[stage], (plan.microbatches - few) // more
        period, rest = divmod(len(long) - len(entries), copies)
        alike = next((i for i, (a, b) in enumerate(zip(entries, long, strict=False)) if a != b),
                     len(entries))  # fmt: skip
        until = alike - period  # the last micro-batch, which completes gradients, comes after
        if rest or until < REPEATS * period:
            continue
        first = until - REPEATS * period
        again = [entries[first + i % period] for i in range(REPEATS * period)]
        again = [_later(entry, i // period * more) for i, entry in enumerate(again)]
        last, inside = entries[until - period : until], []
        for i in range(1, copies + 1):
            inside += [_later(entry, i * more) for entry in last]
        end = [_later(entry, copies * more) for entry in entries[until:]]
        if again == entries[first:until] and entries[:until] + inside + end == long:
            return Repeat(short, until, period, more, copies)
    return None


def _later(entry: Step, more: int) -> Step:
    return entry._replace(microbatch=entry.microbatch + more)


def stretched(part: dict[str, Any], how: Repeat) -> dict[str, Any] | None:
    """What the rank would have written down in a step of all micro-batches; None: its rows do not
    repeat.
    """
    found = {name: _rows(part[name]) for name in tables.COLUMNS}
    turns, steps = part["turns"], len(found["steps"])
    each = len(turns) // steps  # an entry's beginning each, and the list's end
    for step in reversed(range(steps)):  # from the back: what lies before stays where it is
        at = [turns[step * each + how.until - i * how.period] for i in range(REPEATS, -1, -1)]
        done = _Stretch(found, at, how)
        if not done.repeats():
            return None
        done.put_in()
    return {**part, **{name: _columns(name, rows) for name, rows in found.items()}}


class _Stretch:
    """One optimizer step's rows, and the moments ``at`` at which periods began, and the last ended.

    A row lies in the period in which it began: between two entries of its list a rank has nothing
    open.
    """

    def __init__(self, found: dict[str, Rows], at: Sequence[float], how: Repeat) -> None:
        self.found, self.at, self.how = found, at, how
        self.world = how.plan.world_size
        ends = list(zip(at, at[1:], strict=False))
        self.periods = {name: [self._between(name, *pair) for pair in ends]
                        for name in tables.COLUMNS if name != "steps"}  # fmt: skip
        numbers = [[row["id"] // self.world for row in rows] for rows in self.periods["spans"]]
        self.spans = [min(found, default=0) for found in numbers]  # the first of every period
        self.calls: list[dict[tuple, int]] = []  # of every period the first call of each group
        for rows in self.periods["collectives"]:
            first: dict[tuple, int] = {}
            for row in rows:
                first.setdefault(_group(row), row["call"])
            self.calls.append(first)

    def _between(self, name: str, start: float, end: float) -> Rows:
        when = "time" if name == "memory" else "start"
        return [row for row in self.found[name] if start <= row[when] < end]

    def repeats(self) -> bool:
        """Whether all periods have the same rows, one later than the other."""
        for name, periods in self.periods.items():
            alike = [[self._relative(row, i) for row in rows] for i, rows in enumerate(periods)]
            if any(rows != alike[0] for rows in alike):
                return False
        sizes = [[row["bytes"] for row in rows] for rows in self.periods["memory"]]
        growth = [[b - a for a, b in zip(*pair, strict=True)]
                  for pair in zip(sizes, sizes[1:], strict=False)]  # fmt: skip
        return all(more == growth[0] for more in growth) and len(self._growth()) > 0

    def _relative(self, row: dict[str, Any], i: int) -> dict[str, Any]:
        """A row of period ``i`` as it would read from the period's own beginning."""
        shown = {key: round(value - self.at[i], 5) if key in tables.TIMES else value
                 for key, value in row.items() if key != "bytes" or "tier" not in row}  # fmt: skip
        first = self.spans[i]
        for key in ("id", "span"):
            if key in shown:
                shown[key] = shown[key] // self.world - first
        if "after" in shown:
            shown["after"] = [a // self.world - first for a in shown["after"]]
        if "call" in shown:
            shown["call"] -= self.calls[i][_group(row)]
        if shown.get("microbatch", -1) >= 0:
            shown["microbatch"] -= i * self.how.more
        return shown

    def _growth(self) -> dict[tuple[str, str], int]:
        """{(tier, category): bytes more in every period}; empty if it is not the same throughout"""
        found: dict[tuple[str, str], set[int]] = {}
        for a, b in zip(*self.periods["memory"][-2:], strict=True):
            found.setdefault((a["tier"], a["category"]), set()).add(b["bytes"] - a["bytes"])
        if any(len(sizes) > 1 for sizes in found.values()):
            return {}
        return {key: min(sizes) for key, sizes in found.items()}

    def put_in(self) -> None:
        """Copies of the last period, and all that comes after them later."""
        end, growth = self.at[-1], self._growth()
        for name in tables.COLUMNS:
            rows, when = self.found[name], "time" if name == "memory" else "start"
            before = [row for row in rows if row[when] < end]
            after = [row for row in rows if row[when] >= end]
            inside = [self._later(row, i, growth) for i in range(1, self.how.copies + 1)
                      for row in self.periods.get(name, [()])[-1]]  # fmt: skip
            after = [self._later(row, self.how.copies, growth) for row in after]
            if name == "steps":  # the one that was made longer began before
                before[-1]["end"] += self.how.copies * (end - self.at[-2])
            self.found[name] = before + inside + after

    def _later(self, row: dict[str, Any], i: int, growth: dict) -> dict[str, Any]:
        """The row ``i`` periods later."""
        later, how = dict(row), self.how
        passed, counted = i * (self.at[-1] - self.at[-2]), i * (self.spans[-1] - self.spans[-2])
        first = self.spans[0] * self.world  # what began before it is waited for no more
        for key in tables.TIMES:
            if key in row:
                later[key] += passed
        for key in ("id", "span"):
            if key in row:
                later[key] += counted * self.world
        if "after" in row:
            later["after"] = [a + counted * self.world * (a >= first) for a in row["after"]]
        if "call" in row and _group(row) in self.calls[-1]:
            group = _group(row)
            later["call"] += i * (self.calls[-1][group] - self.calls[-2][group])
        if row.get("microbatch", -1) >= 0:
            later["microbatch"] += i * how.more
        if "tier" in row:
            later["bytes"] += i * growth.get((row["tier"], row["category"]), 0)
        return later


def _group(row: dict[str, Any]) -> tuple:
    return row["axis"], tuple(row["ranks"])


def _rows(table: dict[str, list]) -> Rows:
    return [dict(zip(table, values, strict=True)) for values in zip(*table.values(), strict=True)]


def _columns(name: str, rows: Rows) -> dict[str, list]:
    return {column: [row[column] for row in rows] for column in tables.COLUMNS[name]}
