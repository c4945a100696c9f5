"""One walk through the lists of all pipeline ranks: each rank goes on as far as it can.

    compute   one lane per rank, in the order of its list
    calls     one lane per group. A call begins when all members have launched it and the lane is
              free, and lasts as long as the bytes of its slowest member take
    messages  one lane per pair and direction; a message moves once both its ends are posted, and
              arrives some time after it has left its lane (spec/links.py, [Note: messages])
    jobs      lanes of workers (h2d, d2h, disk, host). A job begins when it is launched, the lane is
              free, and the jobs that it depends on are over (jobs.py)
    WAIT      ends at max(now, the end of what it waits for)

Nothing in a program is decided by the clock. So each moment is the longest path through everything
that must come before it, and the result does not depend on which rank goes first. Predictions
(time.py) and recorded runs (theory/replay.py) both use this walk. For a deep pipeline pipeline.py
finds the paths by the same rules before any duration is known.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, zip_longest
from typing import Any, NamedTuple

from paralab.interpret.costs import Awaited, Cost, Job, Posted
from paralab.interpret.jobs import Begun, Order
from paralab.programs.instructions import Instr, Value

WORK, WAIT, CALL, JOB = range(4)


class Item(NamedTuple):
    """An instruction, as far as the walk needs to know it.

    op       WORK, CALL, JOB or WAIT
    takes    seconds: of compute; of a call or a job on its lane, the same for all members of a
             call; for a WAIT of the work that follows once it is over
    name     of a call the values that it writes, which a WAIT for it has as its name, too; of a JOB
             the instruction
    lane     of a call or a job
    members  how many pipeline ranks make the call together; 0: this one alone
    before   seconds of work that the rank does just before it launches a call, or None
    frees    the values whose memory ends after a WAIT
    late     seconds after which a call of several is over for this member, once its lane is free
    """

    op: int
    takes: Any = 0.0
    name: Any = None
    lane: Any = ""
    members: int = 0
    before: Any = None
    frees: tuple = ()
    late: Any = 0.0


def item(ins: Instr, cost: Any, awaited: Cost | None = None, share: float = 1.0) -> Item:
    """awaited: for a WAIT the cost of its call; ``share``: see `Posted.after`."""
    kind = type(cost)
    if kind is Awaited:
        takes = awaited.after(share) if awaited else 0.0
        return Item(WAIT, takes, ins.reads, frees=ins.frees)
    if kind is Job:
        return Item(JOB, cost.seconds, ins, cost.lane)
    if kind is Posted:
        call = ins.writes, cost.lane, cost.members, cost.packed or None
        return Item(CALL, cost.seconds, *call, late=cost.late_for(ins))
    return Item(WORK, cost.seconds)


class Walk:
    """What the ranks share: the lanes and the calls of several ranks. Moments are in seconds.

    posting  seconds that posting a call takes
    free     {lane of several pipeline ranks: when it is free}
    launched {(lane, number of a call): the members that have launched it}; complete calls are gone
    """

    def __init__(self, posting: float) -> None:
        self.posting = posting
        self.free: dict[Any, float] = {}
        self.launched: dict[Any, list[tuple]] = {}

    def go(self, ranks: Sequence[Rank]) -> None:
        """Let all ranks go on until each is through its list. Raises ValueError on a deadlock,
        which no checked program has (programs/checks.py).
        """
        done, before = 0, -1
        while done > before:
            for rank in ranks:
                next(rank.walk, None)
            done, before = sum(len(rank.left) for rank in ranks), done
        if self.launched:
            raise ValueError("deadlock: ranks wait for each other's calls in a cycle")

    def meet(self, rank: Rank, item: Item, moment: float) -> None:
        """A rank has launched a call of several; when the last of them has, the call is timed."""
        lane = item.lane
        number = rank.count[lane] = rank.count[lane] + 1
        launched = self.launched.setdefault((lane, number), [])
        launched.append((rank, len(rank.left), moment, item.late))
        if len(launched) < item.members:
            return
        del self.launched[lane, number]
        start = max(self.free.get(lane, 0.0), *(moment for _, _, moment, _ in launched))
        end = self.free[lane] = start + item.takes
        for member, position, _, late in launched:
            member.calls[position] = start, end + late


class Rank:
    """One rank on its way through its list.

    left          per instruction when the rank goes on to the next
    calls         {position: (start, end)} of calls and jobs, on their lanes
    waits         {position of a WAIT: (position of its call or job, the end of that)}; left out are
                  jobs known to be over, because an earlier WAIT was for a job that came after them
    jobs          {position: `Begun`}
    predecessors  {position of a job: positions of the jobs that it comes after}
    flights       {name of a call in flight: its position}
    count         {lane of several pipeline ranks: calls launched on it}
    lanes         {lane of its own: when it is free}
    """

    def __init__(
        self, walk: Walk, items: Iterable[Item], order: Order, lanes: dict[str, float] | None = None
    ) -> None:
        self.common, self.items, self.order, self.lanes = walk, items, order, lanes or {}
        self.left: list[float] = []
        self.calls: dict[int, tuple[float, float]] = {}
        self.waits: dict[int, tuple[int, float]] = {}
        self.jobs: dict[int, Begun] = {}
        self.predecessors: dict[int, list[int]] = {}
        self.flights: dict[tuple[Value, ...], int] = {}
        self.count: Counter[Any] = Counter()
        self.walk = self._go()

    def _go(self) -> Iterator[None]:
        common, lanes, left, calls = self.common, self.lanes, self.left, self.calls
        flights, waits, jobs, posting = self.flights, self.waits, self.jobs, self.common.posting
        clock = 0.0
        for entry in self.items:
            op, takes, name, lane, members, before, frees, _ = entry
            at = len(left)
            if op == WORK:
                clock += takes
            elif op == WAIT:
                call = flights.pop(name, None)
                job = jobs.get(call)
                if job is None or not job.over:
                    if job is not None:
                        job.settled()
                    while call not in calls:
                        yield
                    end = calls[call][1]
                    waits[at] = call, end
                    clock = max(clock, end) + takes
                if frees:
                    self.order.end(frees)
            elif op == CALL:
                if before is not None:
                    clock += before
                flights[name] = at
                if members:
                    common.meet(self, entry, clock)
                else:
                    start = max(clock, lanes.get(lane, 0.0))
                    calls[at] = start, start + takes
                    lanes[lane] = start + takes
                clock += posting
            else:
                predecessors, flights[name.writes] = self.order.predecessors(name), at
                start = max(clock, lanes.get(lane, 0.0), *(job.end for job in predecessors))
                job = jobs[at] = Begun(at, start + takes, predecessors)
                calls[at], lanes[lane] = (start, job.end), job.end
                self.order.add(name, job)
                positions = (other.position for other in predecessors)
                self.predecessors[at] = [place for place in positions if place is not None]
            left.append(clock)


# ---- lists whose calls have names ----------------------------------------------------------------
def moments(lists: Sequence[Sequence[Item]]) -> list[list[tuple[float, float]]]:
    """When each item of each rank begins and ends, in seconds. Replay times recorded runs so.

    All members give a call the same name; the last entry of its lane is the tuple of their ranks.
    Raises ValueError if no rank can go on: members of a group launch different calls, or wait for
    each other's.
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
                launches = ", ".join(f"rank {member} launches {call}" for member, call in pairs)
                raise ValueError(f"members of a group make different calls: {launches}")
    walk = Walk(0.0)
    ranks = [Rank(walk, items, Order(None)) for items in lists]
    walk.go(ranks)
    return [
        [rank.calls.get(at, work) for at, work in enumerate(pairwise([0.0, *rank.left]))]
        for rank in ranks
    ]
