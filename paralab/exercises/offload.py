"""Lab 09: an update whose optimizer states pass through a small window of host memory.

States of U units are in files. A unit is read, updated and written in r, u and w seconds: reads and
writes on the lane "disk", updates on the lane "host". No order is faster than the busier lane,

    max(U (r + w), r + U u + w)        with one buffer everything is in turn: U (r + u + w)

and one that reads ahead is as fast as that where u <= min(r, w) or u >= r + w. It is what
parallel/offload.py does (after ZeRO-Infinity, Rajbhandari+ 2021, arXiv:2104.07857). The checker
hands the answer's jobs to a real rank's lanes, with files and AdamW, and compares every file with
an update in memory, bytes with twice the states and memory with the window; then it simulates them
with a fast host and with a slow one. One unit after the other is right, and too slow.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from paralab.checks import choice, illegal, whole
from paralab.exercises.exercise import Exercise
from paralab.exercises.questions import Odd, asked, kind_of
from paralab.exercises.tries import Takes, Try, attempt, on_ranks
from paralab.exercises.verdict import NOT_STARTED, Notes

if TYPE_CHECKING:
    from paralab.theory.engine import Times

Job = tuple[str, int, int]  # what, unit, buffer
Size = tuple[int, int]  # units, window

LANE = {"read": "disk", "update": "host", "write": "disk"}
TASK_SIZE = UNITS, WINDOW = 6, 2
SIZES = (TASK_SIZE, (1, 2), (5, 1), (4, 2), (7, 2), (7, 3), (3, 8))
READ_S, WRITE_S = 10e-3, 15e-3
UPDATE_S = {"fast": 8e-3, "slow": 30e-3}  # by host
FAST_S, SLOW_S = UPDATE_S.values()
ROWS, ELEMENTS = 3, 1024  # a unit's states: two moments and the master weights, fp32
STATES_BYTES = 4 * ROWS * ELEMENTS
MOST = 10  # jobs per unit that are looked at


def limit_s(units: int, window: int, update_s: float) -> float:
    """What no order of jobs is faster than."""
    if window == 1:
        return units * (READ_S + update_s + WRITE_S)
    return max(units * (READ_S + WRITE_S), READ_S + units * update_s + WRITE_S)


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms"


ASKED = {
    "jobs": "every unit read, updated and written once, in a buffer with no other unit in it",
    "states in the files": "bit for bit those of an update in memory, after a real run",
    "bytes through the disk": "exactly twice the states, in that run",
    "host memory": "at most `window` buffers, in that run",
    "simulated update": "at most max(U(r+w), r+Uu+w), U units, with either host: "
    f"{ms(limit_s(*TASK_SIZE, FAST_S))} and {ms(limit_s(*TASK_SIZE, SLOW_S))}; "
    "with one buffer U(r+u+w)",
}
ORDER, STATES, BYTES, MEMORY, TIME = ASKED


def check(tries: Sequence[Try], timeout: float) -> None:
    with tempfile.TemporaryDirectory(prefix="paralab-stream-") as folder:
        for notes, found in on_ranks(tries, update_each, 1, (folder,), timeout=timeout):
            for size, run in zip(SIZES, found.results[0], strict=True):
                if run["trouble"]:
                    notes.end(run["trouble"], where=f"units, window={size}")
                    break
                _look(notes, run, size)


def as_jobs(found: Any, units: int) -> list[Job]:
    """What an answer returned, if it is a list of jobs. Raises ValueError if it is not."""
    if not isinstance(found, list):
        raise illegal("jobs", kind_of(found), "not a list", 'a list [("read", 0, 0), ...]')
    if len(found) > MOST * units:
        raise illegal("len(jobs)", len(found), "too many", f"{len(LANE)} per unit")
    jobs = []
    for i, job in enumerate(found):
        if not isinstance(job, (tuple, list)) or isinstance(job, Odd) or len(job) != 3:
            raise illegal(f"jobs[{i}]", job, "not a job", '("read", unit, buffer)')
        kind = choice(f"jobs[{i}][0]", job[0], tuple(LANE))
        unit = whole(f"jobs[{i}][1]", job[1], at_least=0, at_most=units - 1)
        jobs.append((kind, unit, whole(f"jobs[{i}][2]", job[2], at_least=0, at_most=10**6)))
    return jobs


def update_each(watch: Any, answer: tuple, seed: int, folder: str) -> list[dict[str, Any]]:
    """What the rank runs: for every size the answer's jobs, handed to real lanes, up to the first
    that are none.
    """
    found: list[dict[str, Any]] = []
    for size in SIZES:
        run = {"trouble": NOT_STARTED}
        if not found or not found[-1]["trouble"]:
            value, trouble = asked(watch, answer, seed, [(0, size)])[0]
            if not trouble:
                jobs, trouble = attempt(lambda v=value, s=size: as_jobs(v, s[0]))
            run = {"trouble": trouble}
            if not trouble:
                run |= update(watch, jobs, size, f"{folder}/{seed}-{size[0]}-{size[1]}")
        found.append(run)
    return found


def update(watch: Any, jobs: Sequence[Job], size: Size, folder: str) -> dict[str, Any]:
    """The jobs, on real lanes, with files.

    Returns the jobs, the most bytes that buffers had, the bytes of the reads and writes, and
    states, (unit, row, element): as they were before, as the files have them, and as an update in
    memory leaves them.
    """
    import torch

    from paralab.interpret.files import Files
    from paralab.interpret.lanes import Lane

    units, _ = size
    draw = torch.Generator().manual_seed(units)
    before = torch.rand(units, ROWS, ELEMENTS, generator=draw)  # second moments are not negative
    gradients = torch.randn(units, ELEMENTS, generator=draw)
    files, recorder = Files(folder, cached=True), watch.group.recorder
    lanes = {name: Lane(name, recorder) for name in ("disk", "host")}
    copied = len(recorder._copies)
    try:
        for unit in range(units):
            files.create(str(unit), STATES_BYTES)
            files.write(str(unit), before[unit])
        buffers, last = {}, {}
        with watch.section() as section:
            for kind, unit, number in jobs:
                if number not in buffers:
                    buffers[number] = torch.full((ROWS, ELEMENTS), torch.nan)
                work, op, size = partial(_adamw, buffers[number], gradients[unit]), "optimizer", 0
                if kind != "update":
                    work = partial(getattr(files, kind), str(unit), buffers[number])
                    op, size = kind, STATES_BYTES
                needs = [last[number]] if number in last else []
                last[number] = lanes[LANE[kind]].submit(
                    work, after=needs, op=op, size=size, category="optimizer"
                )
            for job in last.values():
                job.wait()
        after = torch.empty_like(before)
        for unit in range(units):
            files.read(str(unit), after[unit])
    finally:
        for lane in lanes.values():
            lane.close()
        files.close()
    right = before.clone()
    for unit in range(units):
        _adamw(right[unit], gradients[unit])
    moved = sum(size for *_, size, _ in recorder._copies[copied:])
    states = {"before": before, "after": after, "right": right}
    return {"jobs": jobs, "peak": section.peak, "moved": moved, **states}


def _adamw(states: Any, gradient: Any) -> None:
    """The next step on one unit's states, in place."""
    import torch
    from torch.optim.adamw import adamw

    first, second, weights = states
    rates = {"lr": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
    how = {"fused": True, "amsgrad": False, "maximize": False, **rates}
    adamw([weights], [gradient], [first], [second], [], [torch.tensor(4.0)], **how)


def simulate(jobs: Sequence[Job], update_s: float) -> Times:
    """When jobs start and end, with the exercise's costs: ``.start[0][i]``, ``.end[0][i]``."""
    from paralab.theory import engine

    seconds = {"read": READ_S, "update": update_s, "write": WRITE_S}
    last: dict[int, int] = {}  # buffer -> the last job that has it
    program = []
    for i, (kind, _, buffer) in enumerate(jobs):
        after = (last[buffer],) if buffer in last else ()
        program.append(engine.Item(LANE[kind], seconds[kind], after))
        last[buffer] = i
    return engine.simulate([program])


# ---- what is wrong with it -----------------------------------------------------------------------
def _look(notes: Notes, run: dict[str, Any], size: Size) -> None:
    """One real run against every limit. What is right is said of the task's size."""
    units, window = size
    jobs, peak, where = run["jobs"], run["peak"], f"units={units}, window={window}"

    def look(limit: str, wrong: str, right: str) -> None:
        if wrong or size == TASK_SIZE:
            notes.look(limit, where, wrong, right)

    misplaced = first_misplaced(jobs, units)
    look(ORDER, misplaced, f"{len(jobs)} jobs")
    look(STATES, _first_wrong(run), f"all {units} units")
    moved, required = run["moved"], 2 * units * STATES_BYTES
    wrong = f"{moved:,} bytes, required: {required:,}, {moved / required:.3g} times as many"
    look(BYTES, wrong if moved != required else "", f"{moved:,} bytes")
    most = window * STATES_BYTES
    beyond = next((i for i, job in enumerate(jobs) if job[2] >= window), None)
    wrong = f"{peak:,} bytes, required: at most {most:,}"
    if beyond is not None:
        wrong = f"jobs[{beyond}]={jobs[beyond]!r}: buffers are 0 to {window - 1}; {wrong}"
    look(MEMORY, wrong if beyond is not None or peak > most else "", f"{peak:,} bytes")
    if not misplaced:
        took = [ms(max(simulate(jobs, seconds).end[0])) for seconds in UPDATE_S.values()]
        late = next((why for host in UPDATE_S if (why := _too_late(jobs, *size, host))), "")
        look(TIME, late, " and ".join(took))


def first_misplaced(jobs: Sequence[Job], units: int) -> str:
    """The first job that is in the wrong place, or is missing, in words; "" if none is."""
    inside: dict[int, int] = {}  # buffer -> the unit in it
    done: set[tuple[str, int]] = set()
    for i, (kind, unit, buffer) in enumerate(jobs):
        why, held = "", inside.get(buffer)
        if (kind, unit) in done:
            why = f"the {kind} of unit {unit} is there twice"
        elif kind == "read" and held is not None:
            why = f"overwrites unit {held}, which is in that buffer and not written yet"
        elif kind != "read" and held != unit:
            why = f"unit {unit} is not in buffer {buffer} by then"
        elif kind == "write" and ("update", unit) not in done:
            why = f"unit {unit} has not been updated by then"
        if why:
            return f"jobs[{i}]={jobs[i]!r}: {why}"
        done.add((kind, unit))
        if kind == "read":
            inside[buffer] = unit
        elif kind == "write":
            del inside[buffer]
    missing = ((kind, unit) for unit in range(units) for kind in LANE if (kind, unit) not in done)
    return next((f"there is no {kind} of unit {unit}" for kind, unit in missing), "")


def _first_wrong(run: dict[str, Any]) -> str:
    """The first unit whose file is not what an update in memory makes of it, in words, or ""."""
    for unit, got in enumerate(run["after"]):
        if got.tobytes() == run["before"][unit].tobytes():
            return f"unit {unit} is as it was before the update"
        if got.tobytes() != run["right"][unit].tobytes():  # every bit
            return f"unit {unit} has other states than after an update in memory"
    return ""


def _too_late(jobs: Sequence[Job], units: int, window: int, host: str) -> str:
    """By how much the limit is missed, and where the busier lane is first idle, or ""."""
    times, limit = simulate(jobs, UPDATE_S[host]), limit_s(units, window, UPDATE_S[host])
    took = max(times.end[0])
    if took <= limit * (1 + 1e-9):
        return ""
    lane, free = "disk", 0.0
    if limit > units * (READ_S + WRITE_S):
        lane, free = "host", READ_S  # nothing can be updated before
    said = f"{host} host, {ms(took)}, required: at most {ms(limit)}:"
    for (kind, unit, _), start, end in zip(jobs, times.start[0], times.end[0], strict=True):
        if LANE[kind] == lane:
            if start > free * (1 + 1e-9):
                where = f"from {ms(free)} to {ms(start)}, before {kind} {unit}"
                return f"{said} the lane {lane} is idle {where}"
            free = end
    return f"{said} too much is left to write after the last update"


stream = Exercise(
    name="stream",
    lab="09",
    asked=ASKED,
    takes=(Takes("a function", "my_stream(units, window)"),),
    checker=check,
)
