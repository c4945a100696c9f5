"""Which jobs a job on a worker's lane comes after. One rule for what runs and what predicts.

A job comes after those that have written what it reads or writes, those that read what it writes
over, and those that used the buffer that it writes into, where buffers of a ring are taken in turn.
So the lanes keep the order of the program's values among themselves, from one step to the next too,
and the rank waits only where the program says so.

`workers.py` hands jobs over to threads in this order, walk.py gives them moments. Torch-free.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Any, NamedTuple

from paralab.programs.instructions import Instr, Value
from paralab.programs.tiers import BUFFERS, ring
from paralab.spec import Plan


class Ordered:
    """A job: those that it comes behind, and whether the rank has waited for it, or for one that
    came after it.
    """

    def __init__(self, behind: tuple[Any, ...]) -> None:
        self.behind, self.over = behind, False

    def over_for(self, lane: str) -> bool:
        """Whether a job that is now handed over to this lane need not come after it."""
        return self.over

    def settled(self) -> None:
        """The rank has waited for it: it is over, and so is all that it came after."""
        rest = [self]
        while rest:
            job = rest.pop()
            job.over = True
            rest += (other for other in job.behind if not other.over)
            job.behind = ()


class Slot(NamedTuple):
    """One buffer of a ring: its number, and the jobs that the next one to take it comes after."""

    number: int
    users: list[Any]


class Order:
    """One rank's.

    writer, readers  {value: the job that makes it, and those that read it}
    rings   {name: its buffers, the next to be taken first}; ``slots``: {value in one: where it is}
    """

    def __init__(self, plan: Plan | None) -> None:
        self.plan = plan
        self.writer: dict[Value, Any] = {}
        self.readers: dict[Value, list[Any]] = {}
        self.slots: dict[Value, Slot] = {}
        self.rings = defaultdict(lambda: deque(Slot(n, []) for n in range(BUFFERS)))

    def behind(self, ins: Instr) -> tuple[Any, ...]:
        """What an instruction's job comes after; room in a ring is taken for what it writes."""
        jobs = [self.writer.get(v) for v in (*ins.reads, *ins.writes)]
        for v in ins.writes:
            jobs += (*self.readers.get(v, ()), *self._take(v))
        return tuple(j for j in dict.fromkeys(jobs) if j is not None and not j.over_for(ins.lane))

    def add(self, ins: Instr, job: Any) -> None:
        """``job`` is the instruction's."""
        for v in ins.reads:
            self.readers.setdefault(v, []).append(job)
        for v in ins.writes:
            self.writer[v], self.readers[v] = job, []
        for v in (*ins.reads, *ins.writes):
            if v in self.slots and job not in self.slots[v].users:
                self.slots[v].users.append(job)

    def end(self, values: Iterable[Value]) -> None:
        """The memory of these ends."""
        for v in values:
            for table in (self.slots, self.writer, self.readers):
                table.pop(v, None)

    def _take(self, v: Value) -> Iterable[Any]:
        """The next buffer of its ring, if it lies in one. Returns who used that before."""
        name = ring(self.plan, v)
        if not name or v in self.slots:
            return ()
        slot = self.slots[v] = self.rings[name][0]
        self.rings[name].rotate(-1)
        before = tuple(slot.users)
        slot.users.clear()
        return before


class Begun(Ordered):
    """A job in a prediction: its place in the list, or None if it is of the step before; and its
    end.
    """

    def __init__(self, position: int, end: Any, behind: tuple[Begun, ...]) -> None:
        super().__init__(behind)
        self.position: int | None = position
        self.end = end

    def next_step(self, seconds: float) -> None:
        """The next step begins, so many seconds after this one."""
        self.position, self.end = None, self.end - seconds
        self.over = self.over or self.end <= 0.0
