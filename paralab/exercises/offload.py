"""Lab 09: an update whose optimizer states pass through a small window of host memory.

States of U units lie in files. A unit is read, updated and written in r, u and w seconds: reads and
writes on the lane "disk", updates on the lane "host". No order is faster than the busier lane,

    max(U (r + w), r + U u + w)        with one buffer everything is in turn: U (r + u + w)

and one that reads ahead is as fast as that where u <= min(r, w) or u >= r + w. It is what
parallel/offload.py does (after ZeRO-Infinity, Rajbhandari+ 2021, arXiv:2104.07857). The checker
hands the answer's jobs to a real rank's lanes, with files and AdamW, and compares every file with
an update in memory, bytes with twice the states and memory with the window; then it simulates them
with a fast host and with a slow one. One unit after the other is right, and too slow.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from paralab.checks import choice, illegal, real, whole
from paralab.exercises.exercise import Exercise
from paralab.exercises.verdict import Notes, Verdict, on_ranks

if TYPE_CHECKING:
    from paralab.report.report import Report
    from paralab.theory.engine import Times

Job = tuple[str, int, int]  # what, unit, buffer

LANE = {"read": "disk", "update": "host", "write": "disk"}
TASK_SIZE = UNITS, WINDOW = 6, 2
SIZES = (TASK_SIZE, (1, 2), (5, 1), (7, 2), (7, 3), (3, 8))  # units, window
READ_S, WRITE_S = 10e-3, 15e-3
UPDATE_S = {"fast": 8e-3, "slow": 30e-3}  # by host
FAST_S, SLOW_S = UPDATE_S.values()
ROWS, ELEMENTS = 3, 1024  # a unit's states: two moments and the master weights, fp32
STATES_BYTES = 4 * ROWS * ELEMENTS
LINES = 100_000  # of the answer's code that may be run for one list
MOST = 10  # jobs per unit that are looked at
TIMEOUT_S = 10.0


def limit_s(units: int, window: int, update_s: float) -> float:
    """What no order of jobs is faster than."""
    if window == 1:
        return units * (READ_S + update_s + WRITE_S)
    return max(units * (READ_S + WRITE_S), READ_S + units * update_s + WRITE_S)


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms"


ORDER, STATES, BYTES, MEMORY, TIME = (
    "jobs",
    "states in the files",
    "bytes through the disk",
    "host memory",
    "simulated update",
)

TASK = f"""
**Your turn.** The optimizer states of some units lie in files. The host has a window of a few
buffers, each as large as one unit's states. Write `my_stream(units, window)`: the list of the jobs
of one update, in the order in which they are handed over. A job is one of

* `("read", unit, buffer)`: the unit's states come from their file into the buffer;
* `("update", unit, buffer)`: the host makes AdamW's step on them, in the buffer;
* `("write", unit, buffer)`: they go back into their file.

Units and buffers are counted from 0. Reads and writes go to the lane `disk`, updates to the lane
`host`. A lane does one job at a time, in your order. A job also waits for the last one before it in
your list that has the same buffer, and for nothing else: jobs cannot wait in a circle, but they can
overwrite states that are still needed.

A read takes r = {ms(READ_S)}, a write w = {ms(WRITE_S)}, an update u = {ms(FAST_S)} on a fast host
and {ms(SLOW_S)} on a slow one; one list has to suit both. It will be asked for {UNITS} units and a
window of {WINDOW}, and for other sizes, one single buffer too.

`pl.exercises.stream.check(my_stream)`
"""

ASKED = (
    (ORDER, "every unit read, updated and written once, in a buffer with no other unit in it"),
    (STATES, "bit for bit those of an update in memory, after a real run"),
    (BYTES, "exactly twice the states, in that run"),
    (MEMORY, "at most `window` buffers, in that run"),
    (
        TIME,
        "at most max(U(r+w), r+Uu+w), U units, with either host: "
        f"{ms(limit_s(*TASK_SIZE, FAST_S))} and {ms(limit_s(*TASK_SIZE, SLOW_S))}; "
        "with one buffer U(r+u+w)",
    ),
)

HINTS = (
    "read 0 is done after 10 ms, and write 0 cannot begin before the host has updated unit 0. What "
    "can the disk do meanwhile, if there is a second buffer? And what after that?",
    "with two buffers the disk's order is read 0, read 1, write 0, read 2, write 1, read 3 ...: it "
    "is always one unit ahead. Unit i goes into buffer i % window, and read i has to come after "
    "write i - window.",
    "ahead = window - 1; for i in range(units + ahead): if i < units, append read i and update i "
    "(which waits for its read by itself); then, if i >= ahead, append write i - ahead.",
)


def check(answer: Callable[..., Any], *, timeout: float = TIMEOUT_S) -> Verdict:
    """Run and simulate ``answer(units, window)``; about a second when ranks are warm.

    timeout  seconds without a sign of life until a run is called off

    Raises ValueError for a wrong timeout; an answer that is wrong, fails or hangs is a Verdict.
    """
    from paralab.trace import trace

    timeout = real("timeout", timeout, above=0.0)
    notes = Notes("stream", ASKED)
    if not callable(answer):
        notes.note(ORDER, "nothing to call", False, f"asked is a function, yours is {answer!r}")
        return notes.verdict()
    with tempfile.TemporaryDirectory(prefix="paralab-stream-") as folder:
        return on_ranks(
            notes,
            answer,
            SIZES,
            lambda size: trace(update, 1, (answer, *size, folder), timeout=timeout, device="cpu"),
            _look,
            first=ORDER,
            letter="units, window",
        )


def as_jobs(found: Any, units: int) -> list[Job]:
    """What an answer returned, if it is a list of jobs. Raises ValueError if it is not."""
    if not isinstance(found, list):
        raise illegal("jobs", type(found).__name__, "not a list", 'a list [("read", 0, 0), ...]')
    if len(found) > MOST * units:
        raise illegal("len(jobs)", len(found), "too many", f"{len(LANE)} per unit")
    jobs = []
    for i, job in enumerate(found):
        if not isinstance(job, tuple) or len(job) != 3:
            raise illegal(f"jobs[{i}]", job, "not a job", '("read", unit, buffer)')
        kind = choice(f"jobs[{i}][0]", job[0], tuple(LANE))
        unit = whole(f"jobs[{i}][1]", job[1], at_least=0, at_most=units - 1)
        jobs.append((kind, unit, whole(f"jobs[{i}][2]", job[2], at_least=0)))
    return jobs


@contextlib.contextmanager
def _ends() -> Iterator[None]:
    """An error in place of a loop without end, which could fill the memory before a timeout."""
    left, before = LINES, sys.gettrace()

    def count(*_: Any) -> Callable[..., Any]:
        nonlocal left
        left -= 1
        if left < 0:
            raise RuntimeError(f"{LINES:,} lines of it were run, and it has not ended")
        return count

    sys.settrace(count)
    try:
        yield
    finally:
        sys.settrace(before)


def update(
    group: Any, answer: Callable[..., Any], units: int, window: int, folder: str
) -> dict[str, Any]:
    """What the rank runs: the answer's jobs, handed to real lanes.

    Returns the jobs, the most bytes that buffers had, and states, (unit, row, element): as they
    were before, as the files have them, and as an update in memory leaves them.
    """
    import torch

    from paralab.instruments.memory import PeakMemory
    from paralab.interpret.files import Files
    from paralab.interpret.lanes import Lane

    with _ends():
        found = answer(units, window)
    jobs = as_jobs(found, units)
    draw = torch.Generator().manual_seed(units)
    before = torch.rand(units, ROWS, ELEMENTS, generator=draw)  # second moments are not negative
    gradients = torch.randn(units, ELEMENTS, generator=draw)
    files, recorder = Files(f"{folder}/{units}-{window}", cached=True), group.recorder
    lanes = {name: Lane(name, recorder) for name in ("disk", "host")}
    try:
        for unit in range(units):
            files.create(str(unit), STATES_BYTES)
            files.write(str(unit), before[unit])
        buffers, last = {}, {}
        with PeakMemory("cpu") as memory:
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
    return {"jobs": jobs, "peak": memory.peak, "before": before, "after": after, "right": right}


def _adamw(states: Any, gradient: Any) -> None:
    """The next step on one unit's states, in place."""
    import torch
    from torch.optim.adamw import adamw

    adamw(
        [states[2]],
        [gradient],
        [states[0]],
        [states[1]],
        [],
        [torch.tensor(4.0)],
        fused=True,
        amsgrad=False,
        beta1=0.9,
        beta2=0.999,
        lr=0.01,
        weight_decay=0.01,
        eps=1e-8,
        maximize=False,
    )


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
def _look(notes: Notes, report: Report, size: tuple[int, int]) -> None:
    """One real run against every limit. What is right is said of the task's size."""
    [found], (units, window) = report.results, size
    jobs, peak, where = found["jobs"], found["peak"], f"units={units}, window={window}"

    def note(limit: str, kept: str, wrong: str) -> None:
        if wrong or size == TASK_SIZE:
            said = f"{where}: {wrong or kept}"
            notes.note(limit, said, not wrong, said)

    misplaced = first_misplaced(jobs, units)
    note(ORDER, f"{len(jobs)} jobs", misplaced)
    note(STATES, f"all {units} units", _first_wrong(found))
    moved, asked = int(report.copies["bytes"].sum()), 2 * units * STATES_BYTES
    said = f"{moved:,} bytes, asked are {asked:,}, {moved / asked:.3g} times as many"
    note(BYTES, f"{moved:,} bytes", said if moved != asked else "")
    beyond = [
        f"jobs[{i}]={job!r}: buffers are 0 to {window - 1}; "
        for i, job in enumerate(jobs)
        if job[2] >= window
    ]
    said = f"{''.join(beyond[:1])}{peak:,} bytes, asked are at most {window * STATES_BYTES:,}"
    note(MEMORY, f"{peak:,} bytes", said if beyond or peak > window * STATES_BYTES else "")
    if not misplaced:
        took = [ms(max(simulate(jobs, seconds).end[0])) for seconds in UPDATE_S.values()]
        late = [why for host in UPDATE_S if (why := _too_late(jobs, *size, host))]
        note(TIME, " and ".join(took), late[0] if late else "")


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


def _first_wrong(found: dict[str, Any]) -> str:
    """The first unit whose file is not what an update in memory makes of it, in words, or ""."""
    before, after, right = found["before"], found["after"], found["right"]
    for unit, got in enumerate(after):
        if got.tobytes() == before[unit].tobytes():
            return f"unit {unit} is as it was before the update"
        if got.tobytes() != right[unit].tobytes():  # every bit
            return f"unit {unit} has other states than after an update in memory"
    return ""


def _too_late(jobs: Sequence[Job], units: int, window: int, host: str) -> str:
    """By how much the limit is missed, and where the busier lane first stands still, or ""."""
    times, limit = simulate(jobs, UPDATE_S[host]), limit_s(units, window, UPDATE_S[host])
    took = max(times.end[0])
    if took <= limit * (1 + 1e-9):
        return ""
    lane, free = "disk", 0.0
    if limit > units * (READ_S + WRITE_S):
        lane, free = "host", READ_S  # nothing can be updated before
    said = f"{host} host, {ms(took)}, asked are {ms(limit)}:"
    for (kind, unit, _), start, end in zip(jobs, times.start[0], times.end[0], strict=True):
        if LANE[kind] == lane:
            if start > free * (1 + 1e-9):
                where = f"from {ms(free)} to {ms(start)}, before {kind} {unit}"
                return f"{said} the lane {lane} stands still {where}"
            free = end
    return f"{said} too much is left to write after the last update"


stream = Exercise(name="stream", lab="09", task=TASK, asked=ASKED, hints=HINTS, checker=check)
