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
    program, pp, compute = calls.program, member.at.pp, _Compute()
    code, rank, made, since = times.lists[pp], times.ranks[pp], compute.made, 0.0
    left, waits, begun = rank.left, rank.waits, rank.calls
    number_of: dict[int, int] = {}  # {position of a call or a job: number of its box}
    columns = spans(program, [ins for ins, _ in code]), [0.0, *left], left, code
    for at, (span, entered, ended, (ins, cost)) in enumerate(zip(*columns, strict=False)):
        compute.move(span, since)  # since: when the next box begins
        kind = type(cost)
        if kind is Compute:
            since = ended
        elif kind is Awaited:
            if at in waits:
                position, over = waits[at]
                summed = getattr(code[position][1], "summed", 0.0)
                until = max(entered, over)
                since = until + summed
                if position in number_of:
                    call = made[number_of[position]].call
                    if summed and 0 <= call.root != member.group(call.axis).index(member.rank):
                        until, summed = since, 0.0  # the root adds up, the others wait for it
                    compute.add(WAITING, entered, until, (number_of[position],))
                    if summed:
                        compute.add(ADDING, until, since)
        elif kind is Job:
            after = (*compute.cut(entered), *(number_of[job] for job in rank.predecessors[at]))
            what = kind_of(ins)
            copied = moved(program, ins, pp) if what == "copy" else None
            number_of[at] = len(made)
            made.append(Box(ins.lane, (what, -1, 0, 0), *begun[at], after, moved=copied))
        else:
            for call in calls.of(pp, ins, member.index):
                after = compute.cut(entered + cost.packed)
                axis = "pp" if call.axis == "ends" else call.axis
                number_of[at] = len(made)
                made.append(Box(f"comm:{axis}", CALLING, *begun[at], after, call))
    compute.move(None, left[-1])
    before = (compute.last - len(made),)  # last box of the step before, for the first calls
    return [b._replace(after=before + b.after[1:]) if b.after[:1] == (-1,) else b for b in made]


class _Compute:
    """The compute lane, and the boxes of all lanes so far.

    span, began  of the open box: its span, or None if no box is open, and when this part began
    last         number of the last box on this lane
    """

    def __init__(self) -> None:
        self.made: list[Box] = []
        self.span: Span | None = None
        self.began, self.last = 0.0, -1

    def move(self, span: Span | None, now: float) -> None:
        """The rank comes to an instruction with this span: open its box, if it is another one."""
        if span != self.span:
            self.cut(now)
            self.span, self.began = span, now

    def cut(self, now: float) -> tuple[int]:
        """End the open part and begin a new one. Returns (number of the lane's last box,)."""
        if self.span is not None:
            self.last = len(self.made)
            self.made.append(Box("compute", self.span, self.began, now))
            self.began = now
        return (self.last,)

    def add(self, span: Span, start: float, end: float, after: tuple[int, ...] = ()) -> None:
        """A box between two parts of the open one."""
        self.cut(start)
        self.last = len(self.made)
        self.made.append(Box("compute", span, start, end, after))
        self.began = end
