"""Lab 09: an update whose optimizer states pass through a small window of host memory.

It is what parallel/offload.py does (after ZeRO-Infinity, Rajbhandari+ 2021, arXiv:2104.07857). The
answer's jobs are followed buffer by buffer, which shows what would be overwritten or written too
early, and simulated with a fast host and with a slow one (jobs.py). One unit after the other is
right, and too slow.
"""

from __future__ import annotations

from collections.abc import Sequence

from paralab.exercises.attempts import attempt
from paralab.exercises.exercise import Takes, Tries, exercise
from paralab.exercises.jobs import (
    UPDATE_S,
    Job,
    as_jobs,
    first_misplaced,
    limit_s,
    simulate,
    too_late,
)
from paralab.exercises.questions import ask
from paralab.exercises.verdict import Notes, first, ms

Size = tuple[int, int]  # units, window

TASK_SIZE = 6, 2
SIZES = (TASK_SIZE, (1, 2), (5, 1), (4, 2), (7, 2), (7, 3), (3, 8))
REQUIRED = {
    "jobs": "every unit read, updated and written once, in a buffer with no other unit in it",
    "host memory": "`window` buffers, 0 to window - 1",
    "simulated update": "at most max(U(r+w), r+Uu+w), U units, with either host: "
    f"{' and '.join(ms(limit_s(*TASK_SIZE, update_s)) for update_s in UPDATE_S.values())}; "
    "with one buffer U(r+u+w)",
}
ORDER, MEMORY, TIME = REQUIRED


@exercise(Takes("my_stream(units, window)"), required=REQUIRED)
def stream(tries: Tries) -> None:
    for notes, size, reply in ask(tries, SIZES):
        notes.where, jobs, trouble = "units={}, window={}".format(*size), [], reply.trouble
        if not trouble:
            jobs, trouble = attempt(lambda reply=reply, size=size: as_jobs(reply.value, size[0]))
        if trouble:
            notes.end(trouble)
        else:
            _look(notes, jobs, size)


def _look(notes: Notes, jobs: Sequence[Job], size: Size) -> None:
    """The jobs against every limit. What is right is said of the task's size."""
    units, window = size

    def look(limit: str, wrong: str, right: str) -> None:
        if wrong or size == TASK_SIZE:
            notes.look(limit, wrong, right)

    misplaced = first_misplaced(jobs, units)
    look(ORDER, misplaced, f"{len(jobs)} jobs")
    beyond = [f"jobs[{i}]={job!r}" for i, job in enumerate(jobs) if job[2] >= window]
    look(MEMORY, f"{beyond[0]}: buffers are 0 to {window - 1}" if beyond else "", "no other buffer")
    if not misplaced:
        ends = (max(end for _, end in simulate(jobs, seconds)) for seconds in UPDATE_S.values())
        look(
            TIME,
            first(too_late(jobs, *size, host) for host in UPDATE_S),
            " and ".join(map(ms, ends)),
        )
