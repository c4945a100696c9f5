"""Which jobs a job on a worker's lane comes after: one rule for runs and for predictions.

A job comes after the jobs that wrote a value which it reads or writes, the jobs that read a value
which it overwrites, and those that used its buffer before, where the buffers of a ring are taken in
turn. So the lanes themselves keep the order of accesses to a value, also from one step to the next,
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
    """A job: the jobs that it comes after, and whether it is known to be ``over``, because the rank
    has waited for it, or for a job that came after it.
    """

    def __init__(self, predecessors: tuple[Any, ...]) -> None:
        self.predecessors, self.over = predecessors, False

    def over_for(self, lane: str) -> bool:
        """Whether a job that is now handed over to this lane may ignore this one."""
        return self.over

    def settled(self) -> None:
        """The rank has waited for it: it is over, and so are all jobs that it came after."""
        newly_over = [self]
        while newly_over:
            job = newly_over.pop()
            job.over = True
            newly_over += (other for other in job.predecessors if not other.over)
            job.predecessors = ()


class Slot(NamedTuple):
    """One buffer of a ring: its number, and the jobs that have used it since it was taken."""

    number: int
    users: list[Any]


class Order:
    """The order of one rank's jobs.

    writer, readers  {value: the last job that writes it}, {value: the jobs that read it since}
    rings   {name: its buffers, the next to be taken first}; ``slots``: {value in one: its buffer}
    """

    def __init__(self, plan: Plan | None) -> None:
        self.plan = plan
        self.writer: dict[Value, Any] = {}
        self.readers: dict[Value, list[Any]] = {}
        self.slots: dict[Value, Slot] = {}
        self.rings = defaultdict(lambda: deque(Slot(n, []) for n in range(BUFFERS)))

    def predecessors(self, ins: Instr) -> tuple[Any, ...]:
        """The jobs that an instruction's job comes after. Takes buffers of rings for its values."""
        jobs = [self.writer.get(v) for v in (*ins.reads, *ins.writes)]
        for v in ins.writes:
            jobs += (*self.readers.get(v, ()), *self._take(v))
        return tuple(j for j in dict.fromkeys(jobs) if j is not None and not j.over_for(ins.lane))

    def add(self, ins: Instr, job: Any) -> None:
        """Register ``job`` as that of the instruction."""
        for v in ins.reads:
            self.readers.setdefault(v, []).append(job)
        for v in ins.writes:
            self.writer[v], self.readers[v] = job, []
        for v in (*ins.reads, *ins.writes):
            if v in self.slots and job not in self.slots[v].users:
                self.slots[v].users.append(job)

    def end(self, values: Iterable[Value]) -> None:
        """The memory of these values ends: forget their jobs."""
        for v in values:
            for table in (self.slots, self.writer, self.readers):
                table.pop(v, None)

    def _take(self, v: Value) -> Iterable[Any]:
        """Take the next buffer of the value's ring, if it lies in one. Returns the jobs that have
        used the buffer before.
        """
        name = ring(self.plan, v)
        if not name or v in self.slots:
            return ()
        slot = self.slots[v] = self.rings[name][0]
        self.rings[name].rotate(-1)
        before = tuple(slot.users)
        slot.users.clear()
        return before


class Begun(Ordered):
    """A job in a prediction: its position in the list (None: a job of the step before), its end."""

    def __init__(self, position: int, end: Any, predecessors: tuple[Begun, ...]) -> None:
        super().__init__(predecessors)
        self.position: int | None = position
        self.end = end

    def next_step(self, seconds: float) -> None:
        """Count from the next step on, which begins ``seconds`` after this one."""
        self.position, self.end = None, self.end - seconds
        self.over = self.over or self.end <= 0.0
