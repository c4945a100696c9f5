"""Lab 09: an update whose optimizer states pass through a small window of host memory.

It is what parallel/offload.py does (after ZeRO-Infinity, Rajbhandari+ 2021, arXiv:2104.07857). The
checker hands the answer's jobs to a real rank's lanes, with files and AdamW, and compares every
file with an update in memory, bytes with twice the states and memory with the window; then it
simulates them with a fast host and with a slow one (jobs.py). One unit after the other is right,
and too slow.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from typing import Any

from paralab.exercises.attempts import attempt
from paralab.exercises.exercise import Takes, Tries, exercise
from paralab.exercises.jobs import (
    LANE,
    UPDATE_S,
    Job,
    as_jobs,
    first_misplaced,
    limit_s,
    ms,
    simulate,
    too_late,
)
from paralab.exercises.late import torch
from paralab.exercises.questions import asked
from paralab.exercises.verdict import Notes, first

Size = tuple[int, int]  # units, window

TASK_SIZE = UNITS, WINDOW = 6, 2
SIZES = (TASK_SIZE, (1, 2), (5, 1), (4, 2), (7, 2), (7, 3), (3, 8))
ROWS, ELEMENTS = 3, 1024  # a unit's states: two moments and the master weights, fp32
STATES_BYTES = 4 * ROWS * ELEMENTS
ASKED = {
    "jobs": "every unit read, updated and written once, in a buffer with no other unit in it",
    "states in the files": "bit for bit those of an update in memory, after a real run",
    "bytes through the disk": "exactly twice the states, in that run",
    "host memory": "at most `window` buffers, in that run",
    "simulated update": "at most max(U(r+w), r+Uu+w), U units, with either host: "
    f"{' and '.join(ms(limit_s(*TASK_SIZE, update_s)) for update_s in UPDATE_S.values())}; "
    "with one buffer U(r+u+w)",
}
ORDER, STATES, BYTES, MEMORY, TIME = ASKED


@exercise(Takes("my_stream(units, window)"), lab="09", asked=ASKED)
def stream(tries: Tries) -> None:
    with tempfile.TemporaryDirectory(prefix="paralab-stream-") as folder:
        for notes, found in tries.run(update_each, 1, folder):
            for size, run in zip(SIZES, found.results[0], strict=False):
                if trouble := run.get("trouble"):
                    notes.where = f"units, window={size}"
                    notes.end(trouble)
                else:
                    notes.where = "units={}, window={}".format(*size)
                    _look(notes, run, size)


def update_each(watch: Any, answer: tuple, seed: int, folder: str) -> list[dict[str, Any]]:
    """What the rank runs: for every size the answer's jobs, handed to real lanes, up to the first
    that are none, {"trouble": why}.
    """
    found: list[dict[str, Any]] = []
    for size in SIZES:
        [(value, trouble)] = asked(watch, answer, seed, [(0, size)])
        if not trouble:
            jobs, trouble = attempt(lambda v=value, s=size: as_jobs(v, s[0]))
        if trouble:
            return [*found, {"trouble": trouble}]
        found.append(update(watch, jobs, size, f"{folder}/{seed}-{size[0]}-{size[1]}"))
    return found


def update(watch: Any, jobs: Sequence[Job], size: Size, folder: str) -> dict[str, Any]:
    """The jobs, on real lanes, with files.

    Returns the jobs, the most bytes that buffers had, the bytes of the reads and writes, and
    states, (unit, row, element): as they were before, as the files have them, and as an update in
    memory leaves them.
    """
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
    from torch.optim.adamw import adamw

    first, second, weights = states
    rates = {"lr": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
    how = {"fused": True, "amsgrad": False, "maximize": False, **rates}
    adamw([weights], [gradient], [first], [second], [], [torch.tensor(4.0)], **how)


# ---- what is wrong with it -----------------------------------------------------------------------
def _look(notes: Notes, run: dict[str, Any], size: Size) -> None:
    """One real run against every limit. What is right is said of the task's size."""
    units, window = size
    jobs, peak = run["jobs"], run["peak"]

    def look(limit: str, wrong: str, right: str) -> None:
        if wrong or size == TASK_SIZE:
            notes.look(limit, wrong, right)

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
        ends = (max(end for _, end in simulate(jobs, seconds)) for seconds in UPDATE_S.values())
        took = " and ".join(map(ms, ends))
        look(TIME, first(too_late(jobs, *size, host) for host in UPDATE_S), took)


def _first_wrong(run: dict[str, Any]) -> str:
    """The first unit whose file is not what an update in memory makes of it, in words, or ""."""
    for unit, got in enumerate(run["after"]):
        if got.tobytes() == run["before"][unit].tobytes():
            return f"unit {unit} is as it was before the update"
        if got.tobytes() != run["right"][unit].tobytes():  # every bit
            return f"unit {unit} has other states than after an update in memory"
    return ""
