"""Lab 09: an update whose optimizer states pass through a small window of host memory.

It is what parallel/offload.py does (after ZeRO-Infinity, Rajbhandari+ 2021, arXiv:2104.07857). The
answer's jobs are followed buffer by buffer, which shows what would be overwritten or written too
early, and simulated with a fast host and with a slow one (jobs.py). One unit after the other is
right, and too slow.
"""

from __future__ import annotations

from paralab.exercises.attempts import attempt
from paralab.exercises.exercise import Takes, Tries, exercise
from paralab.exercises.jobs import UPDATE_S, as_jobs, first_misplaced, limit_s, simulate, too_late
from paralab.exercises.questions import ask
from paralab.exercises.verdict import first, ms

TASK_SIZE = 6, 2  # units, window
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
    for notes, (units, window), reply in ask(tries, SIZES):
        notes.where, jobs, trouble = f"units={units}, window={window}", [], reply.trouble
        if not trouble:
            jobs, trouble = attempt(lambda reply=reply, units=units: as_jobs(reply.value, units))
        if trouble:
            notes.end(trouble)
            continue
        misplaced = first_misplaced(jobs, units)
        beyond = [f"jobs[{i}]={job!r}" for i, job in enumerate(jobs) if job[2] >= window]
        wrong = f"{beyond[0]}: buffers are 0 to {window - 1}" if beyond else ""
        found = [(ORDER, misplaced, f"{len(jobs)} jobs"), (MEMORY, wrong, "no other buffer")]
        if not misplaced:
            wrong = first(too_late(jobs, units, window, host) for host in UPDATE_S)
            ends = (max(end for _, end in simulate(jobs, seconds)) for seconds in UPDATE_S.values())
            found.append((TIME, wrong, " and ".join(map(ms, ends))))
        for limit, wrong, right in found:
            if wrong or (units, window) == TASK_SIZE:  # what is right is said of the task's size
                notes.look(limit, wrong, right)
