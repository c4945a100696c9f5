"""Lab 09: an update whose optimizer states pass through a small window of host memory.

parallel/offload.py does the same (after ZeRO-Infinity, Rajbhandari+ 2021, arXiv:2104.07857). The
states of U units are in files. A unit is read, updated and written in r, u and w seconds: reads and
writes take the lane "disk", updates the lane "host". No order is faster than the busier lane,

    max(U (r + w), r + U u + w)        with one buffer, all jobs in sequence: U (r + u + w)

and an order that reads ahead is that fast if u <= min(r, w) or u >= r + w. The checker follows the
answer's jobs buffer by buffer, which shows states that would be overwritten or written too early,
and simulates them with a fast and with a slow host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paralab.checks import choice, illegal, whole
from paralab.exercises.attempts import attempt
from paralab.exercises.exercise import Takes, Tries, exercise
from paralab.exercises.questions import ask
from paralab.exercises.verdict import SLACK, first, ms
from paralab.interpret.walk import JOB, Item, moments
from paralab.programs.instructions import Instr

Job = tuple[str, int, int]  # kind, unit, buffer

LANE = {"read": "disk", "update": "host", "write": "disk"}
READ_S, WRITE_S = 10e-3, 15e-3
UPDATE_S = {"fast": 8e-3, "slow": 30e-3}  # by host


def limit_s(units: int, window: int, update_s: float) -> float:
    """The seconds that no order of jobs can fall below."""
    if window == 1:
        return units * (READ_S + update_s + WRITE_S)
    return max(units * (READ_S + WRITE_S), READ_S + units * update_s + WRITE_S)


TASK_SIZE = 6, 2  # units, window
SIZES = (TASK_SIZE, (1, 2), (5, 1), (4, 2), (7, 2), (7, 3), (3, 8))
REQUIRED = {
    "jobs": "every unit read, updated and written once, in a buffer with no other unit in it",
    "host memory": "`window` buffers, 0 to window - 1",
    "simulated update": "at most max(U(r+w), r+Uu+w) for U units, with either host: "
    f"{' and '.join(ms(limit_s(*TASK_SIZE, update_s)) for update_s in UPDATE_S.values())}; "
    "with one buffer U(r+u+w)",
}
ORDER, MEMORY, TIME = REQUIRED


@exercise(Takes("my_stream(units, window)"), required=REQUIRED)
def stream(tries: Tries) -> None:
    for notes, (units, window), reply in ask(tries, SIZES):
        notes.where, jobs, trouble = f"units={units}, window={window}", [], reply.trouble
        if not trouble:
            jobs, trouble = attempt(lambda reply=reply, units=units: as_jobs(reply.value, units))
        if trouble:
            notes.end(trouble)
            continue
        misplaced = first_misplaced(jobs, units)
        outside = [f"jobs[{i}]={job!r}" for i, job in enumerate(jobs) if job[2] >= window]
        buffers = "only buffer is 0" if window == 1 else f"buffers are 0 to {window - 1}"
        wrong = f"{outside[0]}: the {buffers}" if outside else ""
        findings = [(ORDER, misplaced, f"{len(jobs)} jobs"), (MEMORY, wrong, "no other buffer")]
        if not misplaced:
            wrong = first(too_late(jobs, units, window, host) for host in UPDATE_S)
            ends = (max(end for _, end in simulate(jobs, seconds)) for seconds in UPDATE_S.values())
            findings.append((TIME, wrong, " and ".join(map(ms, ends))))
        for limit, wrong, right in findings:
            if wrong or (units, window) == TASK_SIZE:  # a row that is kept states the task's size
                notes.look(limit, wrong, right)


def as_jobs(returned: Any, units: int) -> list[Job]:
    """What an answer returned as a list of jobs. Raises ValueError if it is none."""
    if not isinstance(returned, (list, tuple)):
        raise illegal("jobs", returned, "not a list", 'a list [("read", 0, 0), ...]')
    jobs = []
    for i, job in enumerate(returned):
        if not isinstance(job, (tuple, list)) or len(job) != 3:
            raise illegal(f"jobs[{i}]", job, "not a job", '("read", unit, buffer)')
        kind = choice(f"jobs[{i}][0]", job[0], tuple(LANE))
        unit = whole(f"jobs[{i}][1]", job[1], at_least=0, at_most=units - 1)
        jobs.append((kind, unit, whole(f"jobs[{i}][2]", job[2], at_least=0, at_most=10**6)))
    return jobs


def simulate(jobs: Sequence[Job], update_s: float) -> list[tuple[float, float]]:
    """(start, end) of each job in seconds, with the exercise's costs."""
    seconds = {"read": READ_S, "update": update_s, "write": WRITE_S}
    items = [  # each waits for the job before it that has the same buffer
        Item(JOB, seconds[kind], Instr(kind, writes=(("buffer", buffer, 0),)), LANE[kind])
        for kind, _, buffer in jobs
    ]
    return moments([items])[0]


def first_misplaced(jobs: Sequence[Job], units: int) -> str:
    """The first job that comes too early, too often or not at all, in words, or ""."""
    inside: dict[int, int] = {}  # {buffer: the unit in it}
    done: set[tuple[str, int]] = set()
    for i, (kind, unit, buffer) in enumerate(jobs):
        wrong, held = "", inside.get(buffer)
        if (kind, unit) in done:
            wrong = f"the {kind} of unit {unit} is there twice"
        elif kind == "read" and held is not None:
            wrong = f"it overwrites unit {held}, which is in that buffer and has not been written"
        elif kind != "read" and held != unit:
            wrong = f"unit {unit} is not in buffer {buffer} by then"
        elif kind == "write" and ("update", unit) not in done:
            wrong = f"unit {unit} has not been updated by then"
        if wrong:
            return f"jobs[{i}]={jobs[i]!r}: {wrong}"
        done.add((kind, unit))
        if kind == "read":
            inside[buffer] = unit
        elif kind == "write":
            del inside[buffer]
    missing = ((kind, unit) for unit in range(units) for kind in LANE if (kind, unit) not in done)
    return next((f"there is no {kind} of unit {unit}" for kind, unit in missing), "")


def too_late(jobs: Sequence[Job], units: int, window: int, host: str) -> str:
    """How far the time exceeds its limit, and where the busier lane is first idle, or ""."""
    times, limit = simulate(jobs, UPDATE_S[host]), limit_s(units, window, UPDATE_S[host])
    took = max(end for _, end in times)
    if took <= limit * SLACK:
        return ""
    lane, free = "disk", 0.0
    if limit > units * (READ_S + WRITE_S):
        lane, free = "host", READ_S  # no unit can be updated before the first read
    said = f"with the {host} host it takes {ms(took)}, required: at most {ms(limit)};"
    for (kind, unit, _), (start, end) in zip(jobs, times, strict=True):
        if LANE[kind] == lane:
            if start > free * SLACK:
                where = f"from {ms(free)} to {ms(start)}, before {kind} {unit}"
                return f"{said} the lane {lane} is idle {where}"
            free = end
    return f"{said} too much is left to write after the last update"
