"""The end of a step in outline, rank by rank: what is left to do after the last action.

What is left of gradient sync, the tied embedding's sum, the optimizer, what is gathered afterwards:
the last rows of a rank's program (outline_program.py), played from when its last micro-batch really
came (outline_times.py). See theory/outline.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from paralab.spec import Plan
from paralab.theory.engine import Collective, Compute, Wait
from paralab.theory.outline_program import Program, Slice
from paralab.theory.outline_times import Timetable


class Tail:
    """One rank after its last action, and what of its traffic came from its last micro-batch.

    begun, now  seconds from the start of the step: when it begins, and in the end when it ends
    start, end  {position in the program: seconds from the start of the step}
    """

    def __init__(
        self, program: Program, last: Sequence[tuple[float, Slice]], now: float
    ) -> None:  # fmt: skip
        self.program, self.begun, self.now = program, now, now
        self.start: dict[int, float] = {}
        self.end: dict[int, float] = {}
        self.lanes: dict[str, float] = {}
        self.at = program.tail
        for position in range(program.head):
            self._launch(position, 0.0)
        for begin, part in last:
            self._launches(part, begin)

    def _launches(self, part: Slice, begin: float) -> None:
        """The calls and copies of an action that really began at ``begin``, in their lanes."""
        rows, now = self.program.rows, begin
        for position in range(part.first, part.end):
            if type(rows[position].item) in (Compute, Wait):
                now = begin + self.program.played.end[position] - part.begin
            else:
                self._launch(position, now)

    def _launch(self, position: int, now: float) -> None:
        row = self.program.rows[position]
        after = [self.end[on] for on in row.item.after if on in self.end]
        start = max([now, self.lanes.get(row.item.lane, 0.0), *after])
        self.start[position] = start
        self.end[position] = self.lanes[row.item.lane] = start + self.program.cost(row)

    def play(self, *, meet: Callable[[float], float] | None = None) -> float | None:
        """Go on to the end; or to a call that another stage is part of, and return its moment.

        meet  says when that call begins, given when this rank comes to it
        """
        rows = self.program.rows
        while self.at < len(rows):
            row, item = rows[self.at], rows[self.at].item
            if type(item) is Compute:
                self.start[self.at] = self.now
                self.now += item.seconds
                self.end[self.at] = self.now
            elif type(item) is Wait:
                self.start[self.at] = self.now
                self.now = max([self.now, *[self.end.get(on, 0.0) for on in item.on]])
                self.end[self.at] = self.now
            elif row.axis == "pp" and type(item) is Collective:
                if meet is None:
                    return self.now
                self._launch(self.at, meet(self.now))
                meet = None
            else:
                self._launch(self.at, self.now)
            self.at += 1
        return None


def tails(plan: Plan, made: Sequence[Program], times: Timetable) -> list[Tail]:
    """The end of the step on every pipeline rank."""
    found = times.order
    units = found.stage if plan.relays else found.stage // plan.pp
    last: list[list[tuple[float, Slice]]] = [[] for _ in made]
    for action in np.flatnonzero(times.number == plan.microbatches - 1).tolist():
        rank, kind = int(found.rank[action]), "FBIW"[found.kind[action]]
        part = made[rank].slices[int(units[action]), kind, made[rank].count - 1]
        last[rank].append((float(times.start[action] + times.more[action]), part))
    nows = times.end[found.first[1:] - 1]
    sent = np.zeros(found.ranks)
    np.maximum.at(sent, found.rank[times.maker], times.came)
    ends = [
        Tail(program, parts, max(float(now), float(out)))
        for program, parts, now, out in zip(made, last, nows, sent, strict=True)
    ]
    met = [tail.play() for tail in ends]
    there = [moment for moment in met if moment is not None]
    for tail, moment in zip(ends, met, strict=True):
        if moment is not None:
            tail.play(meet=lambda _: max(there))
    return ends
