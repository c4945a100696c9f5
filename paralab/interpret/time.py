"""Time a program: when every instruction begins and ends, if each rank had a device of its own.

A lane does one thing at a time, in the order in which things come to it.

    compute   one lane per rank, in the order of its list
    calls     one lane per group. A call begins when all members have launched it and the lane is
              free, and lasts as long as the bytes of its slowest member take
    messages  one lane per pair and direction; one moves when both its ends are posted
    jobs      lanes of workers (h2d, d2h, disk, host). A job begins when it is launched, the lane is
              free, and the jobs that it depends on are over (jobs.py)
    WAIT      ends at max(now, the end of what it waits for)

Nothing in a program is decided by the clock, so every moment is a longest path through what must
come before it: one walk over the lists, each rank going on as far as it can. The answer does not
depend on which rank goes first. Data-parallel and tensor-parallel ranks do the same at the same
moments, so one pipeline is walked for all of them. costs.py has the seconds of each instruction;
the walk itself takes about a microsecond for one. The model of a link is Hockney's (1994): alpha +
bytes / bandwidth. Labs 02 to 05.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from paralab.interpret.costs import Awaited, Compute, Cost, Costs, Job, Posted
from paralab.interpret.jobs import Begun, Jobs
from paralab.interpret.serial import Serial
from paralab.programs.instructions import CALL, WAIT, Code, Instr, Value
from paralab.programs.names import Names
from paralab.programs.program import Program
from paralab.spec import Cluster


class Inside(NamedTuple):
    """A call that an op made inside an instruction. Seconds: posted at ``begun``, on its lane from
    ``start`` to ``end``, waited for from ``waited`` to ``until``.
    """

    begun: float
    start: float
    end: float
    waited: float
    until: float


class Body(NamedTuple):
    """What a CALL stands for: its seconds, and when everything in it happens on its rank."""

    seconds: float
    times: Times


class Times(NamedTuple):
    """Seconds from the start of the step, for every pipeline rank.

    entered, left  per instruction: the rank comes to it, goes on behind it
    turned         of a call the moment of launch, of a WAIT its end: what follows until ``left`` is
                   work that goes with it (costs.py). Else ``left``
    calls          {position: (start, end)} of calls and jobs, on their lanes
    waits          {position of a WAIT: position of its call or job}; without WAITs for a job that
                   is over because an earlier WAIT was for one that comes after it
    inside         {position: the calls that its ops made}
    behind         {position of a job: positions of the jobs that it came after}
    costs          per instruction what was counted
    """

    entered: list[list[float]]
    turned: list[list[float]]
    left: list[list[float]]
    calls: list[dict[int, tuple[float, float]]]
    waits: list[dict[int, int]]
    inside: list[dict[int, list[Inside]]]
    behind: list[dict[int, list[int]]]
    costs: list[list[Cost | Body]]

    @property
    def ends(self) -> list[float]:
        """When each rank's step is over."""
        return [left[-1] if left else 0.0 for left in self.left]

    @property
    def seconds(self) -> float:
        """Of the step: its slowest rank's."""
        return max(self.ends)


def time(program: Program, cluster: Cluster, *, overlap: bool = True) -> Times:
    """When everything happens in one step; without ``overlap`` see serial.py.

    Raises ValueError naming what each rank waits for, if no rank can go on.
    """
    costs = (Costs if overlap else Serial)(program, cluster)
    return walked(program, counted(program, costs), cluster.call_overhead)


def counted(program: Program, costs: Costs) -> list[list[Cost | Body]]:
    """What every instruction takes, of every pipeline rank."""
    bodies: dict[tuple, Body] = {}

    def of(r: int, ins: Instr) -> Cost | Body:
        if ins.op != CALL:
            return costs.of(r, ins)
        if ins.at not in bodies:
            bodies[ins.at] = body(program, costs, r, program.bodies[ins.at])
        return bodies[ins.at]

    return [[of(r, ins) for ins in code] for r, code in enumerate(program.codes)]


def body(program: Program, costs: Costs, r: int, code: Code) -> Body:
    """What a CALL takes on pipeline rank ``r``: nothing is in flight when it begins and ends, so it
    takes as long wherever it stands.
    """
    part = replace(program, codes=[*([] for _ in range(r)), code])
    times = walked(part, counted(part, costs), costs.cluster.call_overhead)
    return Body(times.ends[r], times)


def walked(program: Program, costs: list[list[Cost | Body]], posting: float) -> Times:
    """When everything happens, if instructions take ``costs``. posting: seconds that posting a
    call takes.
    """
    walk = _Walk(program, costs, posting, [Jobs(program) for _ in program.codes])
    walk.walk()
    over = walk.times.seconds
    if any(job.end > over for jobs in walk.jobs for job in jobs.begun.values()):
        # A worker goes on during the next step, which is like all that follow.
        walk = _Walk(program, costs, posting, [jobs.next_step(over) for jobs in walk.jobs])
        walk.walk()
    return walk.times


class _Walk:
    """Where every rank is in its list."""

    def __init__(
        self, program: Program, costs: list[list[Cost | Body]], posting: float, jobs: Sequence[Jobs]
    ) -> None:
        self.program, self.codes, self.posting = program, program.codes, posting
        self.ranks = n = len(self.codes)
        lists, tables = (
            ([[] for _ in range(n)] for _ in range(3)),
            ([{} for _ in range(n)] for _ in range(4)),
        )
        self.times = Times(*lists, *tables, costs)
        self.todo = deque(range(n))
        self.jobs = jobs
        self.lanes: list[dict[str, float]] = [{} for _ in range(n)]  # when each is free
        self.wires: dict[object, float] = {}  # the same of lanes that two ranks or more share
        # Per rank what calls in flight write, and the positions of these calls.
        self.begun: list[dict[tuple[Value, ...], int]] = [{} for _ in range(n)]
        # Of lanes that ranks share: the calls that each has made, and who is at one of them.
        self.turns: list[dict[object, int]] = [{} for _ in range(n)]
        self.met: dict[tuple[object, int], list[tuple[int, int, float]]] = {}

    def walk(self) -> None:
        """To the end. Raises ValueError if no rank can go on before."""
        while self.todo:
            self.go(self.todo.popleft())
        if any(map(self.stuck, range(self.ranks))):
            raise ValueError(self.explain())

    def go(self, r: int) -> None:
        """As far as rank ``r`` comes."""
        times, code, lanes, jobs = self.times, self.codes[r], self.lanes[r], self.jobs[r]
        entered, turned, left, calls = (table[r] for table in times[:4])
        begun, posting = self.begun[r], self.posting
        clock = left[-1] if left else 0.0
        costs = times.costs[r]
        for position in range(len(left), len(code)):
            cost, turn = costs[position], clock
            kind = type(cost)
            if kind is Compute:
                if cost.inside:
                    end = self._inside(r, position, clock, cost.inside)
                else:
                    end = clock + cost.seconds
                turn = end
            elif kind is Awaited:
                reads = code[position].reads
                call = begun.get(reads)
                if call in jobs.begun:
                    turn = self._await(jobs.begun[call], times.waits[r], position, clock)
                    end = turn + costs[call].behind * (position in times.waits[r])
                elif call in calls:
                    times.waits[r][position] = call
                    turn = max(clock, calls[call][1])
                    end = turn + costs[call].summed + costs[call].behind
                else:
                    return  # the one that completes it comes back here
                del begun[reads]
                jobs.end(code[position].frees)
            elif kind is Job:
                job = jobs.begin(position, code[position], cost.seconds, clock)
                calls[position] = job.start, job.end
                behind = [other.position for other in job.behind]
                times.behind[r][position] = [at for at in behind if at is not None]
                begun[code[position].writes] = position
                end = clock
            elif kind is Body:
                turn = end = clock + cost.seconds
            else:
                turn = clock + cost.before
                begun[code[position].writes] = position
                if cost.peer >= 0 or cost.members:
                    self._meet(r, position, cost, turn)
                else:
                    start = max(turn, lanes.get(cost.lane, 0.0))
                    lanes[cost.lane] = start + cost.seconds
                    calls[position] = start, start + cost.seconds
                end = turn + posting
            entered.append(clock)
            turned.append(turn)
            left.append(end)
            clock = end

    def _inside(self, r: int, position: int, clock: float, events: tuple) -> float:
        """Go through compute that makes calls; each of its groups is one of alike ranks."""
        lanes, made = self.lanes[r], []
        behind = []
        for event in events:
            kind = type(event)
            if kind is float:
                clock += event
            elif kind is int:
                call, until = made[event], max(clock, made[event].end)
                made[event] = call._replace(waited=clock, until=until)
                clock = until + behind[event]
            else:
                start = max(clock, lanes.get(event.lane, 0.0))
                end = lanes[event.lane] = start + event.seconds
                made.append(Inside(clock, start, end, end, end))
                behind.append(event.summed + event.behind)
                clock += self.posting
        self.times.inside[r][position] = made
        return clock

    @staticmethod
    def _await(job: Begun, waits: dict[int, int], position: int, clock: float) -> float:
        """The rank waits for a job, if it has not waited for one that came after it."""
        if job.over:
            return clock
        job.settled()
        waits[position] = job.position
        return max(clock, job.end)

    # ---- between pipeline ranks ------------------------------------------------------------------
    def _meet(self, r: int, position: int, cost: Posted, clock: float) -> None:
        """A call between pipeline ranks begins when the last of its members is there: a message
        when both its ends are posted.
        """
        lane, members = self._lane(r, cost)
        number = self.turns[r][lane] = self.turns[r].get(lane, 0) + 1
        there = self.met.setdefault((lane, number), [])
        there.append((r, position, clock))
        if len(there) < len(members):
            return
        del self.met[lane, number]
        start = max(self.wires.get(lane, 0.0), *(clock for _, _, clock in there))
        end = self.wires[lane] = start + cost.seconds
        for r, position, _ in there:
            self.times.calls[r][position] = start, end
            at, code = len(self.times.left[r]), self.codes[r]
            waits = at < len(code) and code[at].op == WAIT
            if waits and self.begun[r].get(code[at].reads) == position and r not in self.todo:
                self.todo.append(r)

    def _lane(self, r: int, cost: Cost | Body) -> tuple[object, Sequence[int]]:
        """The lane that rank ``r`` shares for a call, and its members; of a message (from, to)."""
        if type(cost) is not Posted or cost.peer < 0 and not cost.members:
            return None, ()
        if cost.peer >= 0:
            way = (r, cost.peer) if cost.sends else (cost.peer, r)
            return way, way
        return cost.lane, range(0, self.ranks, self.ranks - 1 if cost.members == 2 else 1)

    # ---- no rank can go on -----------------------------------------------------------------------
    def stuck(self, r: int) -> bool:
        return len(self.times.left[r]) < len(self.codes[r])

    def explain(self) -> str:
        """Who waits for whom."""
        width = self.program.plan.dp * self.program.plan.tp
        lines = []
        for r in filter(self.stuck, range(self.ranks)):
            waits = self.codes[r][len(self.times.left[r])]
            position = self.begun[r].get(waits.reads)
            if position is None:
                what, why = Names(self.program, r).values(waits.reads), "which no call brings"
            else:
                what = Names(self.program, r).instruction(self.codes[r][position])
                why = self._why(r, position, width)
            lines.append(f"rank {r * width} waits for {what}, {why}")
        return "no rank can go on: " + "; ".join(lines)

    def _why(self, r: int, position: int, width: int) -> str:
        """What the call at this position lacks."""
        costs = self.times.costs
        cost = costs[r][position]
        lane, members = self._lane(r, cost)

        def made(r: int, until: int | None = None) -> int:
            return sum(self._lane(r, c)[0] == lane for c in costs[r][:until])

        turn = made(r, position + 1)
        there = [member for member, *_ in self.met[lane, turn]]
        missing = [member for member in members if member not in there]
        for other in missing:
            if made(other) < turn:
                does = "makes" if cost.members else "receives" if cost.sends else "sends"
                return f"which rank {other * width} never {does}"
        return f"which rank {', '.join(str(m * width) for m in missing)} has not come to"
