"""Lab 04's last exercise: three schedules with a split backward, each against a number.

F = I = W = 10 ms, links free, one stage per rank. The first has ZB-H1's time within 1F1B's memory,
the second no idle time between a rank's first and last action (Qi+ 2024, arXiv:2401.10241, sec. 2).
The third keeps 1F1B's time with a third less memory: a micro-batch that goes down p stages and up
again as input halves occupies the first rank for (2p+1) of these 10 ms, so (2p+1)/3 are alive at
least where one starts every 3. Forwards and input halves of p=4 collide at that pace; 1F1B's bubble
pays for it while m is small, so this target is for the SIZES below, and not for every m.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from paralab.exercises.exercise import Takes, Tries, exercise
from paralab.exercises.questions import ask
from paralab.exercises.schedule import FORWARD_S, idle, late, limit_s, missed
from paralab.parallel.schedules import zb_h1

if TYPE_CHECKING:
    from paralab.theory.pipeline import Simulation

SIZES = ((4, 8), (4, 12), (3, 9), (6, 12), (2, 6))


class Target(NamedTuple):
    """What one schedule has to reach, for p ranks and m micro-batches.

    seconds  at most, by `took`: of the whole step, or of the rank that takes longest by itself
    alive    micro-batches on a rank, at most
    why      what makes a schedule take longer, in words
    """

    name: str
    words: str
    took: Callable[[Simulation], float]
    seconds: Callable[[int, int], float]
    alive: Callable[[int], int]
    why: Callable[[Simulation], str] = lambda simulated: ""


TARGETS = (
    Target(
        "1: ZB-H1's time",
        "step of at most (3m + p - 1) 10 ms, at most p alive",
        attrgetter("makespan"),
        lambda p, m: (3 * m + p - 1) * FORWARD_S,
        lambda p: p,
        lambda simulated: late(simulated, zb_h1),
    ),
    Target(
        "2: no bubble",
        "no rank is idle between its first and its last action, 3m 10 ms; at most 2p - 1 alive",
        attrgetter("cost"),
        lambda p, m: 3 * m * FORWARD_S,
        lambda p: 2 * p - 1,
        idle,
    ),
    Target(
        "3: less memory",
        "1F1B's time, (m + p - 1) 30 ms, at most (2p + 1) / 3 alive, rounded up",
        attrgetter("makespan"),
        limit_s,
        lambda p: -(-(2 * p + 1) // 3),
    ),
)


@exercise(
    *(Takes(f"{name}(pp, microbatches)") for name in ("first", "second", "third")),
    required={target.name: target.words for target in TARGETS},
)
def better_schedules(tries: Tries) -> None:
    questions = [(part, size) for part in range(len(TARGETS)) for size in SIZES]
    for notes, (part, (p, m)), reply in ask(tries, questions, questions):
        name, _, took, seconds, alive, why = TARGETS[part]
        notes.where = f"p={p}, m={m}"
        how = {"alive": alive(p), "took": took, "why": why}
        wrong = missed(reply, p, m, seconds=seconds(p, m), **how)
        notes.look(name, wrong, "reached")
