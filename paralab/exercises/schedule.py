"""Lab 04: a pipeline schedule of one's own, fast enough and small enough, and right.

The checker proves the lists (theory/schedule_check.py), simulates them with stated costs, F = 10 ms
and B = 20 ms, free links (theory/pipeline.py), counts live micro-batches, asks for other sizes too,
and at last trains on four real ranks and compares gradients with one process. GPipe keeps the time
and not the memory, one micro-batch after another the memory and not the time; 1F1B keeps both
(Narayanan+ 2021, arXiv:2006.09503, sec. 3.2), and so does a backward split into its halves (Qi+
2023, arXiv:2401.10241, sec. 2.1), which is faster still.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from paralab.checks import real
from paralab.exercises.exercise import Exercise
from paralab.exercises.sync import first_wrong
from paralab.exercises.verdict import NOT_STARTED, Notes, Verdict, attempt
from paralab.parallel.schedules import Action, Schedule, one_f_one_b
from paralab.spec import ModelSpec, Plan

if TYPE_CHECKING:
    import numpy as np

    from paralab.theory.pipeline import Simulation

PP, MICROBATCHES = 4, 6
SIZES = ((2, 1), (2, 5), (3, 2), (3, 7), (4, 1), (4, 3), (4, 8), (4, 13), (6, 9))
FORWARD_S, HALF_S = 10e-3, 10e-3  # a whole backward is two halves
# What is trained: small, a block for every stage.
MODEL = ModelSpec(layers=4, hidden=32, heads=2, seq_len=16)
TRAINING: dict[str, Any] = {
    "steps": 1,
    "optimizer": "sgd",
    "lr": 0.1,
    "keep_state": True,
    "progress": False,
}
BATCH = {"microbatches": MICROBATCHES, "microbatch_size": 2}
TIMEOUT_S = 20.0


def limit_s(pp: int, microbatches: int) -> float:
    """(m + p - 1)(F + B): what GPipe and 1F1B take where stages are alike and links free."""
    return (microbatches + pp - 1) * (FORWARD_S + 2 * HALF_S)


VALID, TIME, MEMORY, OTHERS, GRADIENTS = (
    "schedule",
    "simulated step",
    "live micro-batches",
    "other sizes",
    "gradients",
)

TASK = f"""
**Your turn.** Write `my_schedule(pp, microbatches)`: for every rank, what it computes and in which
order. Rank r has stage r of `pp`; `"2F0"` is stage 2, forward, micro-batch 0, and `"2B0"` its
backward. Every rank does every forward and every backward once. A rank goes through its list in
order, and waits where what an action needs is not there yet.

It will be asked for p = {PP} stages and m = {MICROBATCHES} micro-batches, and for other sizes. A
forward takes 10 ms, a backward 20 ms, links are free. (A backward may be split: `"2I0"` is the
half that the stage before waits for, `"2W0"` the half that nobody waits for, 10 ms each.)

`pl.exercises.own_schedule.check(my_schedule)`
"""

ASKED = (
    (VALID, f"p={PP}, m={MICROBATCHES}: every action once, and nobody waits in a circle"),
    (TIME, f"at most {1e3 * limit_s(PP, MICROBATCHES):.0f} ms = (m+p-1)(F+B)"),
    (MEMORY, f"at most {PP} alive at once, on any rank"),
    (OTHERS, "from p=2, m=1 to p=6, m=9: the same, with (m+p-1)(F+B) and p alive"),
    (GRADIENTS, f"of a step on {PP} ranks: those of one process"),
)

HINTS = (
    "the last rank can go back as soon as it has gone forward: F0 B0 F1 B1 ... What does the rank "
    "before it have to have done when B0 arrives there, so that the last rank never had to wait?",
    "rank r does pp - r - 1 forwards first (the warm-up, none on the last rank). Then one forward, "
    "one backward in turn, and in the end the backwards that are left. With few micro-batches the "
    "warm-up ends early.",
    "for forward in range(microbatches): append its F; if forward >= pp - rank - 1, append the "
    "next B too, counting backwards from 0. After the loop append the B's that are left.",
)


def check(answer: Callable[..., Any], *, timeout: float = TIMEOUT_S) -> Verdict:
    """Prove, simulate and run ``answer(pp, microbatches)``; about a second when ranks are warm.

    timeout  seconds without a sign of life until a run is called off

    Raises ValueError for a wrong timeout; an answer that is wrong, fails or hangs is a Verdict.
    """
    from paralab.experiment import run

    timeout = real("timeout", timeout, above=0.0)
    notes = Notes("own_schedule", ASKED)
    if not callable(answer):
        notes.note(VALID, "nothing to call", False, f"asked is a function, yours is {answer!r}")
        return notes.verdict()
    try:
        inspect.signature(answer).bind(PP, MICROBATCHES)
    except (TypeError, ValueError) as error:
        notes.note(
            VALID,
            "cannot be called",
            False,
            f"asked is f(pp, microbatches), yours cannot be called so: {error}",
        )
        return notes.verdict()
    simulated, trouble = attempt(lambda: _simulated(answer, PP, MICROBATCHES))
    if trouble == NOT_STARTED:
        return notes.verdict()
    if trouble:
        notes.note(VALID, "no schedule", False, f"p={PP}, m={MICROBATCHES}: {trouble}")
        return notes.verdict()
    count = sum(map(len, simulated.schedule))
    notes.note(VALID, f"{count} actions on {PP} ranks", True)
    _look(notes, simulated)
    wrong = next((w for sizes in SIZES if (w := _wrong_at(answer, *sizes))), "")
    notes.note(OTHERS, wrong or f"{len(SIZES)} other sizes", not wrong, wrong)

    plan = Plan(pp=PP, schedule=answer, **BATCH)
    report, trouble = attempt(lambda: run(MODEL, plan, timeout=timeout, strict=True, **TRAINING))
    if trouble:
        notes.note(GRADIENTS, "failed", False, trouble)
        return notes.verdict()
    right = _of_one_process()
    wrong = first_wrong(right, report.gradients)
    notes.note(
        GRADIENTS, wrong or f"{len(right)} tensors, all equal", not wrong, f"gradients: {wrong}"
    )
    return notes.verdict()


@functools.cache  # the same for every answer
def _of_one_process() -> dict[str, np.ndarray]:
    from paralab.experiment import run

    return dict(run(MODEL, Plan(**BATCH), **TRAINING).gradients)


def simulate(schedule: Schedule) -> Simulation:
    """A schedule with the exercise's costs: F = 10 ms, B = 20 ms, I = W = 10 ms, links free."""
    from paralab.theory import pipeline

    return pipeline.simulate(schedule, forward=FORWARD_S, backward=HALF_S, weight_grad=HALF_S)


def _simulated(answer: Callable[..., Any], pp: int, microbatches: int) -> Simulation:
    return simulate(Plan(pp=pp, microbatches=microbatches, schedule=answer).actions())


def _look(notes: Notes, simulated: Simulation) -> None:
    """Time and memory at the sizes of the task."""
    limit = limit_s(PP, MICROBATCHES)
    said = f"{1e3 * simulated.makespan:.0f} ms"
    notes.note(
        TIME,
        said,
        _in_time(simulated, limit),
        f"a step takes {said}, "
        f"{1e3 * (simulated.makespan - limit):.0f} ms more than the {1e3 * limit:.0f} ms "
        f"asked: {_first_late(simulated)}",
    )
    most = max(simulated.peak_live)
    notes.note(
        MEMORY,
        f"{most} on rank {simulated.peak_live.index(most)}",
        most <= PP,
        _first_too_many(simulated.schedule, PP),
    )


def _wrong_at(answer: Callable[..., Any], pp: int, microbatches: int) -> str:
    """What is wrong at these sizes, in words; "" if nothing is."""
    where, limit = f"p={pp}, m={microbatches}", limit_s(pp, microbatches)
    simulated, trouble = attempt(lambda: _simulated(answer, pp, microbatches))
    if trouble:
        return f"{where}: {trouble}"
    if not _in_time(simulated, limit):
        return f"{where}: takes {1e3 * simulated.makespan:.0f} ms, asked {1e3 * limit:.0f} ms"
    too_many = _first_too_many(simulated.schedule, pp)
    return f"{where}: {too_many}" if too_many else ""


def _in_time(simulated: Simulation, limit: float) -> bool:
    return simulated.makespan <= limit * (1 + 1e-9)


def _first_late(simulated: Simulation) -> str:
    """The first action that starts later than it could: than in 1F1B, which keeps the limit."""
    pp, best = len(simulated.schedule), simulate(one_f_one_b(PP, MICROBATCHES))
    mine, could = _starts(simulated), _starts(best)
    for (stage, way, microbatch), soonest in sorted(could.items(), key=lambda item: item[1][2]):
        action, position, start = mine[stage, way, microbatch]
        if start > soonest[2] * (1 + 1e-9) + 1e-12:
            return (
                f"rank {stage % pp} starts {action}, the {_nth(position)} of its list, at "
                f"{1e3 * start:.0f} ms, and could at {1e3 * soonest[2]:.0f} ms"
            )
    return "the weight halves come too late"


def _starts(simulated: Simulation) -> dict[tuple[int, str, int], tuple[Action, int, float]]:
    """{(stage, F or B, micro-batch): (action, place in its list, start)}; I counts as B."""
    found, starts = {}, iter(simulated.start.tolist())
    for row in simulated.schedule:
        for position, action in enumerate(row):
            start, way = next(starts), action.kind.replace("I", "B")
            found[action.stage, way, action.microbatch] = action, position, start
    return found


def _first_too_many(schedule: Schedule, limit: int) -> str:
    """Where a rank first holds more than ``limit`` micro-batches, in words; "" if none does."""
    from paralab.theory.schedule_check import live

    for rank, (row, counts) in enumerate(zip(schedule, live(schedule), strict=True)):
        if max(counts) > limit:
            position = next(i for i, count in enumerate(counts) if count > limit)
            return (
                f"rank {rank} holds {max(counts)} micro-batches, asked are at most {limit}: "
                f"{row[position]}, the {_nth(position)} of its list, is one too many"
            )
    return ""


def _nth(position: int) -> str:
    """The place of list position 0, 1, ... in words: 1st, 2nd."""
    n = position + 1
    return f"{n}{'th' if 10 <= n % 100 <= 20 else {1: 'st', 2: 'nd', 3: 'rd'}.get(n % 10, 'th')}"


own_schedule = Exercise(
    name="own_schedule", lab="04", task=TASK, asked=ASKED, hints=HINTS, checker=check
)
