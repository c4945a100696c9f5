"""Lab 04: a learner's pipeline schedules, which have to be legal, fast and small in memory.

The lists of actions are checked by theory/schedule_check.py and simulated by theory/pipeline.py.
GPipe keeps the limit of time but not of memory, one micro-batch after another that of memory but
not of time. 1F1B keeps both (Narayanan+ 2021, arXiv:2006.09503, sec. 3.2), and so does a schedule
with each backward split into two halves (Qi+ 2023, arXiv:2401.10241, sec. 2.1), which is faster.

The last exercise has three schedules with a split backward, each of which reaches a target.
F = I = W = 10 ms, links are free, and a rank has one stage. The first target is ZB-H1's time within
1F1B's memory; the second no idle time between a rank's first and last action (Qi+ 2024,
arXiv:2401.10241, sec. 2). The third is 1F1B's time with a third less memory. A micro-batch goes
down p stages as forwards and up again as input halves, so the first rank holds it for 2p + 1 slots
of 10 ms. If a micro-batch starts every 3 slots, at least (2p + 1)/3 are alive. With p = 4 forwards
and input halves collide at that pace; the time of 1F1B's bubble makes up for it while m is small.
So the third target can be reached for the `TARGET_SIZES`, but not for every m.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from paralab.exercises.attempts import attempt
from paralab.exercises.exercise import Takes, Tries, exercise
from paralab.exercises.one_process import look_at_run
from paralab.exercises.questions import Reply, ask, asked
from paralab.exercises.unaided import UNAIDED
from paralab.exercises.verdict import SLACK, ms
from paralab.parallel.schedules import Action, Schedule, one_f_one_b, zb_h1
from paralab.spec import ModelSpec, Plan

if TYPE_CHECKING:
    from paralab.theory.pipeline import Simulation

PP, MICROBATCHES = 4, 6
SIZES = (  # p, m: with fewer micro-batches than stages, as many, and more
    *((2, m) for m in (1, 2, 5)),
    *((3, m) for m in (2, 3, 7)),
    *((4, m) for m in (1, 2, 3, 4, 8, 13)),
    *((5, m) for m in (3, 5, 6)),
    *((6, m) for m in (2, 9)),
)
FORWARD_S, HALF_S = 10e-3, 10e-3  # a whole backward is two halves
# The model that is trained: small, with one block per stage.
MODEL = ModelSpec(layers=4, hidden=32, heads=2, seq_len=16)
BATCH = {"microbatches": MICROBATCHES, "microbatch_size": 2}


def limit_s(pp: int, microbatches: int) -> float:
    """(m + p - 1)(F + B): the time of GPipe and 1F1B for equal stages and free links."""
    return (microbatches + pp - 1) * (FORWARD_S + 2 * HALF_S)


REQUIRED = {
    "schedule": f"p={PP}, m={MICROBATCHES}: every action once, and no cycle of waits",
    "simulated step": f"at most {1e3 * limit_s(PP, MICROBATCHES):.0f} ms = (m+p-1)(F+B)",
    "live micro-batches": f"at most {PP} alive at once, on any rank",
    "other sizes": "the same from p=2, m=1 to p=6, m=9: (m+p-1)(F+B), and at most p alive",
    "gradients": f"of a step on {PP} ranks: those of one process",
}
VALID, TIME, MEMORY, OTHERS, GRADIENTS = REQUIRED


@dataclass(frozen=True)
class Written:
    """A schedule for `Plan` that returns the lists that the answer has made."""

    lists: Any
    __name__ = "your answer"  # what error messages call it

    def __call__(self, pp: int, microbatches: int) -> Any:
        return self.lists


@exercise(Takes("f(pp, microbatches)"), required=REQUIRED)
def own_schedule(tries: Tries) -> None:
    questions = [(0, size) for size in ((PP, MICROBATCHES), *SIZES)]
    case = f"p={PP}, m={MICROBATCHES}"
    for notes, outcome in tries.run(asked, 1, questions, *UNAIDED, where=case, memory=False):
        task_reply, *others = outcome.results[0]
        simulated, trouble = simulate_reply(task_reply, PP, MICROBATCHES)
        if trouble:
            notes.end(trouble, yours="no schedule")
            continue
        notes.look(VALID, "", f"{sum(map(len, simulated.schedule))} actions on {PP} ranks")
        why, most = f": {late(simulated)}", max(simulated.peak_live)
        notes.at_most(TIME, simulated.makespan, limit_s(PP, MICROBATCHES), ms, why)
        said = f"{most} on rank {simulated.peak_live.index(most)}"
        notes.look(MEMORY, first_too_many(simulated.schedule, PP), said)
        for reply, (p, m) in zip(others, SIZES, strict=True):
            notes.where = f"p={p}, m={m}"
            notes.each(OTHERS, missed(reply, p, m, Target()), f"kept at {len(SIZES)} other sizes")
        notes.where, plan = "", Plan(pp=PP, schedule=Written(task_reply.value), **BATCH)
        if not notes.broke():  # only a schedule that keeps all limits so far is trained with
            look_at_run(notes, (GRADIENTS,), MODEL, plan, steps=1, timeout=tries.timeout)


def simulate(schedule: Schedule) -> Simulation:
    """Simulate with the exercise's costs: F = 10 ms, B = 20 ms, I = W = 10 ms, links free."""
    from paralab.theory import pipeline

    return pipeline.simulate(schedule, forward=FORWARD_S, backward=HALF_S, weight_grad=HALF_S)


def simulate_reply(reply: Reply, pp: int, microbatches: int) -> tuple[Simulation | None, str]:
    """(the simulation of the schedule in a reply, "") or (None, why it is no schedule)."""
    if reply.trouble:
        return None, reply.trouble
    if reply.value is None:
        return None, "the function returned None, required: a list of actions per pipeline rank"
    plan = {"pp": pp, "microbatches": microbatches, "schedule": Written(reply.value)}
    simulated, trouble = attempt(lambda: simulate(Plan(**plan).actions()))
    return simulated, trouble.replace("schedule='own: your answer'", "your schedule")


def late(
    simulated: Simulation, best: Callable[..., Schedule] = one_f_one_b, name: str = "1F1B"
) -> str:
    """The first action that starts later than in ``best``, a schedule that keeps the limit."""
    order, starts = simulated.order, _starts(simulated)
    earliest = _starts(simulate(best(order.ranks, order.microbatches)))
    for key, (_, _, soonest) in sorted(earliest.items(), key=lambda item: item[1][2]):
        action, position, start = starts.get(key, (None, 0, 0.0))
        if key.kind != "W" and start > soonest * SLACK + 1e-12:
            said = f"rank {action.stage} starts {action}, action {position + 1} of its list, at "
            return f"{said}{ms(start)}; in {name} it starts at {ms(soonest)}"
    return "forwards and input halves start in time, weight halves too late"


def wasted(simulated: Simulation) -> str:
    """The first idle time of a rank in which another action of its list could run, in words; if
    there is none, the first idle time.
    """
    gaps, most = _gaps(simulated), least_alive(simulated.order.ranks)
    for since, i, words in gaps:
        if action := _startable(simulated, since, i, most):
            return f"{words}, where {action} could start"
    return gaps[0][2] if gaps else ""


def _gaps(simulated: Simulation) -> list[tuple[float, int, str]]:
    """(seconds since when a rank is idle, number of the action that comes then, both in words) of
    all idle times of ranks between two actions, in order.
    """
    order, start, end, gaps = simulated.order, simulated.start, simulated.end, []
    for rank, (first, after) in enumerate(pairwise(order.first)):
        for i in range(first + 1, after):
            if start[i] > end[i - 1] + 1e-12:
                words = f"rank {rank} is idle from {ms(end[i - 1])} to {ms(start[i])}, before "
                words += f"{order.action(i)}, action {i - first + 1} of its list"
                gaps.append((end[i - 1], i, words))
    return sorted(gaps)


def _startable(simulated: Simulation, since: float, i: int, most: int) -> Action | None:
    """The first action after action ``i`` in its rank's list whose inputs exist ``since`` then; a
    forward only if the rank holds fewer than ``most`` micro-batches.
    """
    from paralab.theory.schedule_check import live

    order, rank = simulated.order, simulated.order.rank[i]
    done, row = i - order.first[rank], simulated.schedule[rank]
    held = live(simulated.schedule)[rank][done - 1] - (row[done - 1].kind in "BW")
    for at in range(done + 1, len(row)):
        # An action waits for at most one of another stage, its source, and for those of its own
        # stage and micro-batch that come before it.
        action, source = row[at], order.source[order.first[rank] + at]
        arrived = source < 0 or simulated.end[source] <= since + 1e-12
        same = (action.stage, action.microbatch)
        waits = any((other.stage, other.microbatch) == same for other in row[done:at])
        if arrived and not waits and (action.kind != "F" or held < most):
            return action
    return None


class Target(NamedTuple):
    """What a schedule has to reach, by default 1F1B's time and memory.

    took     the seconds that count: of the step, or of a rank from its first action to its last
    seconds  (p, m) -> the most that these may be
    alive    p -> the most micro-batches that a rank may hold
    why      the reason for a schedule that takes longer, in words, or ""
    """

    took: Callable[[Simulation], float] = attrgetter("makespan")
    seconds: Callable[[int, int], float] = limit_s
    alive: Callable[[int], int] = lambda p: p
    why: Callable[[Simulation], str] = late


def missed(reply: Reply, p: int, m: int, target: Target) -> str:
    """Why a reply is no schedule that reaches the target, in words; "" if it is one."""
    simulated, trouble = simulate_reply(reply, p, m)
    if trouble:
        return trouble
    took, most = target.took(simulated), target.seconds(p, m)
    if took > most * SLACK:
        said = f"takes {ms(took)}, required: at most {ms(most)}"
        return ": ".join(filter(None, (said, target.why(simulated))))
    return first_too_many(simulated.schedule, target.alive(p))


def _starts(simulated: Simulation) -> dict[Action, tuple[Action, int, float]]:
    """{action: (itself, position in its list, start)}; as a key, I is B."""
    starts = iter(simulated.start.tolist())
    return {
        action._replace(kind=action.kind.replace("I", "B")): (action, position, next(starts))
        for row in simulated.schedule
        for position, action in enumerate(row)
    }


def first_too_many(schedule: Schedule, limit: int) -> str:
    """Where a rank first holds more than ``limit`` micro-batches, in words; "" if none does."""
    from paralab.theory.schedule_check import live

    for rank, (row, counts) in enumerate(zip(schedule, live(schedule), strict=True)):
        if max(counts) > limit:
            position = next(i for i, count in enumerate(counts) if count > limit)
            said = f"rank {rank} holds {max(counts)} micro-batches, required: at most {limit}: "
            return f"{said}{row[position]}, action {position + 1} of its list, is one too many"
    return ""


# ---- three targets -------------------------------------------------------------------------------
TARGET_SIZES = ((4, 8), (4, 12), (3, 9), (6, 12), (2, 6))  # p, m


def least_alive(p: int) -> int:
    """The third target's limit on the micro-batches that a rank holds."""
    return -(-(2 * p + 1) // 3)


TARGETS_REQUIRED = {
    "1: ZB-H1's time": "a step of at most (3m + p - 1) · 10 ms; at most p micro-batches alive",
    "2: no bubble": "at most 3m · 10 ms from a rank's first action to its last, so none is idle in "
    "between; at most 2p - 1 micro-batches alive",
    "3: less memory": "a step of at most (m + p - 1) · 30 ms, like 1F1B's; at most (2p + 1) / 3 "
    "micro-batches alive, rounded up",
}
TARGETS = (
    Target(
        seconds=lambda p, m: (3 * m + p - 1) * FORWARD_S,
        why=lambda simulated: late(simulated, zb_h1, "ZB-H1, which splits every backward,"),
    ),
    Target(
        took=attrgetter("cost"),
        seconds=lambda p, m: 3 * m * FORWARD_S,
        alive=lambda p: 2 * p - 1,
        why=lambda simulated: _gaps(simulated)[0][2],
    ),
    Target(alive=least_alive, why=wasted),
)


@exercise(
    *(Takes(f"{name}(pp, microbatches)") for name in ("first", "second", "third")),
    required=TARGETS_REQUIRED,
)
def better_schedules(tries: Tries) -> None:
    questions = [(part, size) for part in range(len(TARGETS)) for size in TARGET_SIZES]
    for notes, (part, (p, m)), reply in ask(tries, questions, questions):
        notes.where = f"p={p}, m={m}"
        notes.look([*TARGETS_REQUIRED][part], missed(reply, p, m, TARGETS[part]), "reached")
