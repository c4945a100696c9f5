"""One walk through the lists of all pipeline ranks, each going on as far as it can.

    compute   one lane per rank, in the order of its list
    calls     one lane per group. A call begins when all members have launched it and the lane is
              free, and lasts as long as the bytes of its slowest member take
    messages  one lane per pair and direction; one moves when both its ends are posted
    jobs      lanes of workers (h2d, d2h, disk, host). A job begins when it is launched, the lane is
              free, and the jobs that it depends on are over (jobs.py)
    WAIT      ends at max(now, the end of what it waits for)

Nothing in a program is decided by the clock, so every moment is a longest path through what must
come before it, and the answer does not depend on which rank goes first. What a moment is, is left
open here: seconds, of what is predicted (time.py) and of what was recorded (theory/replay.py), or a
node of a graph whose seconds are worked out later (pipeline.py).
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, zip_longest
from typing import Any, NamedTuple

from paralab.interpret.costs import Awaited, Compute, Cost, Job, Posted
from paralab.interpret.jobs import Begun, Order
from paralab.programs.instructions import Instr, Value

WORK, CALL, JOB, WAIT = "work", "call", "job", "wait"


class Item(NamedTuple):
    """An instruction, as far as the walk knows it.

    op       WORK, CALL, JOB or WAIT
    takes    of compute; of a call or a job on its lane, as all members of a call say; of a WAIT
             what goes with it behind it
    name     what a call writes, and what a WAIT is for; of a JOB the instruction
    lane     of a call or a job
    members  pipeline ranks that make the call, if these are its members; else 0
    before   what the rank does in front of a call, or None
    frees    of a WAIT the values whose memory ends behind it
    """

    op: str
    takes: Any = 0.0
    name: Any = None
    lane: Any = ""
    members: int = 0
    before: Any = None
    frees: tuple = ()


def item(r: int, ins: Instr, cost: Any, awaited: Cost | None = None, share: float = 1.0) -> Item:
    """Of an instruction of rank ``r``. awaited: what the call takes that a WAIT is for; ``share``:
    see `Posted.after`.
    """
    kind = type(cost)
    if kind is Compute:
        return Item(WORK, cost.seconds)
    if kind is Awaited:
        takes = awaited.after(share) if awaited else 0.0
        return Item(WAIT, takes, ins.reads, frees=ins.frees)
    if kind is Job:
        return Item(JOB, cost.seconds, ins, cost.lane)
    if kind is not Posted:
        return Item(WORK, cost.seconds)
    lane, members, before = cost.lane, cost.members, cost.before or None
    if cost.peer >= 0:
        lane, members = (r, cost.peer) if cost.sends else (cost.peer, r), 2
    return Item(CALL, cost.seconds, ins.writes, lane, members, before)


class Walk:
    """What the ranks have in common; moments are seconds.

    posting  what posting a call takes
    """

    queues = True  # whether a message may have to wait for the one before it
    origin: Any = 0.0

    def __init__(self, posting: Any) -> None:
        self.posting = posting
        self.free: dict[Any, Any] = {}  # when each lane of several pipeline ranks is
        self.there: dict[Any, list[tuple]] = {}  # of a call that is not complete: who is at it
        self.ready: deque[Iterator] = deque()

    def go(self, ranks: Sequence[Rank]) -> None:
        """As far as they come."""
        self.ready.extend(rank.walk for rank in ranks)
        while self.ready:
            next(self.ready.popleft(), None)

    def later(self, one: Any, other: Any, takes: Any) -> Any:
        """What ends when both moments are there and it has taken so long."""
        return (one if one > other else other) + takes

    def lasts(self, moments: Sequence[Any], takes: Any) -> tuple[Any, Any]:
        """From when to when something is on its lane that begins at the latest of these."""
        start = max(moments)
        return start, start + takes

    def meet(self, rank: Rank, item: Item, moment: Any) -> None:
        """A rank is at a call of several; with the last of them it goes."""
        lane, free = item.lane, self.free
        number = rank.count[lane] = rank.count[lane] + 1
        there = self.there.setdefault((lane, number), [])
        there.append((rank, len(rank.left), moment))
        if len(there) < item.members:
            return
        del self.there[lane, number]
        moments = [moment for _, _, moment in there]
        if lane in free:
            moments.append(free[lane])
        start, end = self.lasts(moments, item.takes)
        if self.queues or type(lane) is str:
            free[lane] = end
        for member, position, _ in there:
            member.calls[position] = start, end
            if member.stands == position:
                member.stands = None
                self.ready.append(member.walk)


class Rank:
    """Goes through one rank's list.

    left     behind every instruction
    calls    {position: (start, end)} of calls and jobs, on their lanes
    waits    {position of a WAIT: (position of its call or job, the end of that)}, but for jobs that
             are over because an earlier WAIT was for one that comes after it
    jobs     {position: `Begun`}; ``behind``: {position: positions of the jobs that it came after}
    flights  {what a call in flight writes: its position}
    stands   position of the call that it cannot go on without
    """

    def __init__(
        self, walk: Walk, items: Iterable[Item], order: Order, lanes: dict[str, Any] | None = None
    ) -> None:
        self.common, self.items, self.order, self.lanes = walk, items, order, lanes or {}
        self.left: list[Any] = []
        self.calls: dict[int, tuple[Any, Any]] = {}
        self.waits: dict[int, tuple[int, Any]] = {}
        self.jobs: dict[int, Begun] = {}
        self.behind: dict[int, list[int]] = {}
        self.flights: dict[tuple[Value, ...], int] = {}
        self.count: Counter[Any] = Counter()
        self.stands: int | None = None
        self.walk = self._go()

    def _go(self) -> Iterator[None]:
        common, lanes, left, calls = self.common, self.lanes, self.left, self.calls
        later, lasts, posting, origin = common.later, common.lasts, common.posting, common.origin
        flights, waits, jobs = self.flights, self.waits, self.jobs
        clock = origin
        for now in self.items:
            op, takes, name, lane, members, before, frees = now
            at = len(left)
            if op == WORK:
                clock = later(clock, clock, takes)
            elif op == WAIT:
                call = flights.get(name)
                lasted = call not in jobs or not jobs[call].over
                if call in jobs and lasted:
                    jobs[call].settled()
                while lasted and call not in calls:
                    self.stands = call
                    yield
                if lasted:
                    end = calls[call][1]
                    waits[at] = call, end
                    clock = later(clock, end, takes)
                del flights[name]
                if frees:
                    self.order.end(frees)
            elif op == CALL:
                if before is not None:
                    clock = later(clock, clock, before)
                flights[name] = at
                if members:
                    common.meet(self, now, clock)
                else:
                    calls[at] = lasts((clock, lanes.get(lane, origin)), takes)
                    lanes[lane] = calls[at][1]
                if posting:
                    clock = later(clock, clock, posting)
            else:
                behind, flights[name.writes] = self.order.behind(name), at
                ends = (job.end for job in behind)
                calls[at] = lasts((clock, lanes.get(lane, origin), *ends), takes)
                job = jobs[at] = Begun(at, calls[at][1], behind)
                lanes[lane] = job.end
                self.order.add(name, job)
                positions = (other.position for other in behind)
                self.behind[at] = [place for place in positions if place is not None]
            left.append(clock)


# ---- lists whose calls have names ----------------------------------------------------------------
def moments(lists: Sequence[Sequence[Item]]) -> list[list[tuple[float, float]]]:
    """When each item of each rank begins and ends, in seconds. A call has the name that all its
    members give it, and its lane ends with their ranks. Replay times so what was recorded.

    Raises ValueError if no rank can go on: members of a group launch other calls, or wait for each
    other's.
    """
    launched: dict[Any, dict[int, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for number, items in enumerate(lists):
        for item in items:
            if item.op == CALL:
                launched[item.lane][number].append(item.name)
    for (*_, members), names in launched.items():
        for calls in zip_longest(*(names[member] for member in members), fillvalue="nothing more"):
            if len(set(calls)) > 1:
                pairs = zip(members, calls, strict=True)
                said = ", ".join(f"rank {member} launches {call}" for member, call in pairs)
                raise ValueError(f"no rank can go on: {said}")
    walk = Walk(0.0)
    ranks = [Rank(walk, items, Order(None)) for items in lists]
    walk.go(ranks)
    if walk.there:
        raise ValueError("no rank can go on: ranks wait for each other's calls in a circle")
    return [
        [rank.calls.get(at, work) for at, work in enumerate(pairwise([0.0, *rank.left]))]
        for rank in ranks
    ]
