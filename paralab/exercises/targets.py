"""Lab 04's last exercise: three schedules with a split backward, each of which reaches a target.

F = I = W = 10 ms, links are free, and a rank has one stage. The first target is ZB-H1's time within
1F1B's memory; the second no idle time between a rank's first and last action (Qi+ 2024,
arXiv:2401.10241, sec. 2). The third is 1F1B's time with a third less memory. A micro-batch goes
down p stages as forwards and up again as input halves, so the first rank holds it for 2p + 1 slots
of 10 ms. If a micro-batch starts every 3 slots, at least (2p + 1)/3 are alive. With p = 4 forwards
and input halves collide at that pace; the time of 1F1B's bubble makes up for it while m is small.
So the third target can be reached for the SIZES below, but not for every m.
"""

from __future__ import annotations

from operator import attrgetter

from paralab.exercises.exercise import Takes, Tries, exercise
from paralab.exercises.questions import ask
from paralab.exercises.schedule import FORWARD_S, Target, idle, late, missed, wasted
from paralab.parallel.schedules import zb_h1

SIZES = ((4, 8), (4, 12), (3, 9), (6, 12), (2, 6))  # p, m


def least_alive(p: int) -> int:
    """The third target's limit on the micro-batches that a rank holds."""
    return -(-(2 * p + 1) // 3)


REQUIRED = {
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
        why=idle,
    ),
    Target(
        alive=least_alive,
        why=lambda simulated: wasted(simulated, least_alive(simulated.order.ranks)),
    ),
)


@exercise(
    *(Takes(f"{name}(pp, microbatches)") for name in ("first", "second", "third")),
    required=REQUIRED,
)
def better_schedules(tries: Tries) -> None:
    questions = [(part, size) for part in range(len(TARGETS)) for size in SIZES]
    for notes, (part, (p, m)), reply in ask(tries, questions, questions):
        notes.where = f"p={p}, m={m}"
        notes.look([*REQUIRED][part], missed(reply, p, m, TARGETS[part]), "reached")
