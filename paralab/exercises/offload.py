"""Lab 09: an update whose optimizer states pass through a small window of host memory.

parallel/offload.py does the same (after ZeRO-Infinity, Rajbhandari+ 2021, arXiv:2104.07857). The
checker follows the answer's jobs buffer by buffer, which shows states that would be overwritten or
written too early, and simulates them with a fast and with a slow host (jobs.py). It is right, but
too slow, to read, update and write one unit after the other.
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
