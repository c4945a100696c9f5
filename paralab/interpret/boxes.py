"""A timed program as the boxes of a timeline, as a run's recorder would have written them.

The recorder (instruments/recorder.py) closes the open box of the compute lane wherever a call or a
wait begins, and opens a new part of it afterwards; so does this file. An instruction may have
several boxes (a wait, then the sum of a reduce-scatter's parts); the instructions of one action may
share a box (spans.py). Boxes are numbered in the order in which a rank closes them, as in a run.
The time to post a call, and the time that a rank loses after a wait, belong to the next compute.
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
    """One row of the table of spans, with its call or copy.

    lane    "compute", "comm:<axis>", "h2d" ...
    span    kind, micro-batch, stage, chunk
    after   numbers of the boxes that it waited for; negative ones count from the end of the step
            before
    call    the call, on a group's lane; ``moved``: the copy, on a lane between tiers
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
        """Seconds of work: 0 for waits and calls."""
        return 0.0 if self.span[0] in ("wait", "comm") else self.end - self.start


def boxes(times: Times, member: Member, calls: Calls) -> list[Box]:
    """The boxes of a rank in one step of an unfolded program. The ranks of a pipeline rank differ
    only where a shard is empty, so that its rank makes no call, and in who is the root of a reduce.
    """
    return _Writer(times, member, calls).made


class _Writer:
    """The boxes so far, and the open part of one.

    span, began  of the open box: its span, or None if no box is open, and when this part began
    last         number of the last box on the compute lane
    number_of    {position of a call or a job: number of its box}
    """

    def __init__(self, times: Times, member: Member, calls: Calls) -> None:
        program, pp, index = calls.program, member.at.pp, member.index
        self.program, self.member, self.pp = program, member, pp
        self.made: list[Box] = []
        self.span: Span | None = None
        self.began, self.last = 0.0, -1
        self.number_of: dict[int, int] = {}
        code, left, begun = times.lists[pp], times.left[pp], times.calls[pp]
        span_of, entered = spans(program, [ins for ins, _ in code]), [0.0, *left]
        waits, since = times.waits[pp], 0.0  # since: when the next box begins
        for position, (ins, cost) in enumerate(code):
            self.move(span_of[position], since)
            kind = type(cost)
            if kind is Compute:
                since = left[position]
            elif kind is Awaited:
                if position in waits:
                    call, end = waits[position]
                    until = max(entered[position], end)
                    summed = getattr(code[call][1], "summed", 0.0)
                    if call in self.number_of:
                        self.wait(entered[position], until, self.number_of[call], summed)
                    since = until + summed
            elif kind is Job:
                earlier = times.predecessors[pp][position]
                self.job(position, ins, entered[position], begun[position], earlier)
            else:
                for call in calls.of(pp, ins, index):
                    launched = entered[position] + cost.packed
                    self.number_of[position] = self.begin(call, launched, begun[position])
        self.move(None, left[-1] if left else 0.0)
        before = (self.last - len(self.made),)  # last box of the step before, for the first calls
        for number, box in enumerate(self.made):
            if box.after[:1] == (-1,):
                self.made[number] = box._replace(after=before + box.after[1:])

    # ---- the compute lane ------------------------------------------------------------------------
    def move(self, span: Span | None, now: float) -> None:
        """The rank comes to an instruction with this span: open its box, if it is another one."""
        if span != self.span:
            self.cut(now)
            self.span, self.began = span, now

    def cut(self, now: float) -> tuple[int, ...]:
        """End the open part and begin a new one. Returns (number of the lane's last box,)."""
        if self.span is not None:
            self.last = self.add(Box("compute", self.span, self.began, now))
            self.began = now
        return (self.last,)

    def add(self, box: Box) -> int:
        self.made.append(box)
        return len(self.made) - 1

    def wait(self, start: float, end: float, number: int, summed: float) -> None:
        """The wait for the call or job in box ``number``, and the sum of what was received."""
        call, member = self.made[number].call, self.member
        if summed and call.root >= 0 and member.group(call.axis)[call.root] != member.rank:
            end, summed = end + summed, 0.0  # the root adds up, the others wait for it
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
        self, position: int, ins: Instr, now: float, begun: tuple[float, float], earlier: list[int]
    ) -> None:
        after = (*self.cut(now), *(self.number_of[other] for other in earlier))
        kind = kind_of(ins)
        copied = moved(self.program, ins, self.pp) if kind == "copy" else None
        box = Box(ins.lane, (kind, -1, 0, 0), *begun, after, moved=copied)
        self.number_of[position] = self.add(box)
