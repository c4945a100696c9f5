"""A timed program as the rows that a run's recorder would have written: one box after the other.

The recorder (instruments/recorder.py) closes a box of the compute lane wherever a call or a wait
begins, and opens a new part of it behind; so do these. An instruction may have several boxes
(a wait, then what a reduce-scatter's parts are added up in), several instructions of one action one
box (spans.py). Boxes are numbered in the order in which a rank closes them, as in a run. What calls
cost to be posted, and what goes on more slowly behind a wait, is in the box of what is computed
next.
"""

from __future__ import annotations

from typing import NamedTuple

from paralab.interpret.costs import Awaited, Compute, Job
from paralab.interpret.spans import Span, spans
from paralab.interpret.time import Times
from paralab.interpret.traffic import Calls, Member
from paralab.model.ops import Call
from paralab.programs.instructions import Instr
from paralab.programs.tiers import Moved, kind_of, moved

WAITING: Span = ("wait", -1, 0, 0)
ADDING: Span = ("copy", -1, 0, 0)
CALLING: Span = ("comm", -1, 0, 0)


class Box(NamedTuple):
    """One row of the table of spans, and what the tables of calls and copies say about it.

    lane    "compute", "comm:<axis>", "h2d" ...
    span    kind, micro-batch, stage, chunk
    after   numbers of the boxes that it waited for; below 0: of the step before, from its end
    call    of a box on a group's lane; ``moved``: of one between tiers
    """

    lane: str
    span: Span
    start: float
    end: float
    after: tuple[int, ...] = ()
    call: Call | None = None
    moved: Moved | None = None

    @property
    def cost(self) -> float:
        """Seconds of work; a wait and a call are none."""
        return 0.0 if self.span[0] in ("wait", "comm") else self.end - self.start


def boxes(times: Times, member: Member, calls: Calls) -> list[Box]:
    """Of a step on a rank, in a program that is not folded. Other ranks of its pipeline rank have
    the same, but for shards that a rank has nothing of, which make no call, and a sum's root.
    """
    return _Writer(times, member, calls).made


class _Writer:
    """The boxes so far, and the part of one that is open.

    here, began  the action whose box is open, or None, and since when
    last         number of the compute lane's last box
    at           {position of a call or a job: number of its box}
    """

    def __init__(self, times: Times, member: Member, calls: Calls) -> None:
        program, pp, index = calls.program, member.at.pp, member.index
        self.program, self.member, self.pp = program, member, pp
        self.made: list[Box] = []
        self.here: Span | None = None
        self.began, self.last = 0.0, -1
        self.at: dict[int, int] = {}
        code, left, begun = times.lists[pp], times.left[pp], times.calls[pp]
        of, entered = spans(program, [ins for ins, _ in code]), [0.0, *left]
        waits, since = times.waits[pp], 0.0  # when the next box begins
        for position, (ins, cost) in enumerate(code):
            self.move(of[position], since)
            kind = type(cost)
            if kind is Compute:
                since = left[position]
            elif kind is Awaited:
                if position in waits:
                    call, end = waits[position]
                    until = max(entered[position], end)
                    summed = getattr(code[call][1], "summed", 0.0)
                    if call in self.at:
                        self.wait(entered[position], until, self.at[call], summed)
                    since = until + summed
            elif kind is Job:
                behind = times.behind[pp][position]
                self.job(position, ins, entered[position], begun[position], behind)
            else:
                for call in calls.of(pp, ins, index):
                    launched = entered[position] + cost.before
                    self.at[position] = self.begin(call, launched, begun[position])
        self.move(None, left[-1] if left else 0.0)
        before = (self.last - len(self.made),)  # what the step's first calls come after
        for number, box in enumerate(self.made):
            if box.after[:1] == (-1,):
                self.made[number] = box._replace(after=before + box.after[1:])

    # ---- the compute lane ------------------------------------------------------------------------
    def move(self, span: Span | None, now: float) -> None:
        """The rank comes to an instruction of this action."""
        if span != self.here:
            self.cut(now)
            self.here, self.began = span, now

    def cut(self, now: float) -> tuple[int, ...]:
        """End the open part, and go on with a new one. Returns the compute lane's last box."""
        if self.here is not None:
            self.last = self.add(Box("compute", self.here, self.began, now))
            self.began = now
        return (self.last,)

    def add(self, box: Box) -> int:
        self.made.append(box)
        return len(self.made) - 1

    def wait(self, start: float, end: float, number: int, summed: float) -> None:
        """For the call or job in this box; then what it brought is added up."""
        of = self.made[number].call
        if summed and of.root >= 0 and self.member.group(of.axis)[of.root] != self.member.rank:
            end, summed = end + summed, 0.0  # for the root, which does
        self.cut(start)
        self.last = self.add(Box("compute", WAITING, start, end, (number,)))
        self.began = end
        if summed:
            self.cut(end)
            self.last = self.add(Box("compute", ADDING, end, end + summed))
            self.began = end + summed

    # ---- other lanes -----------------------------------------------------------------------------
    def begin(self, call: Call, now: float, begun: tuple[float, float]) -> int:
        after, axis = self.cut(now), "pp" if call.axis == "ends" else call.axis
        return self.add(Box(f"comm:{axis}", CALLING, *begun, after, call))

    def job(
        self, position: int, ins: Instr, now: float, begun: tuple[float, float], behind: list[int]
    ) -> None:
        after = (*self.cut(now), *(self.at[other] for other in behind))
        kind = kind_of(ins)
        what = moved(self.program, ins, self.pp) if kind == "copy" else None
        box = Box(ins.lane, (kind, -1, 0, 0), *begun, after, moved=what)
        self.at[position] = self.add(box)
