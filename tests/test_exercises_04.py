"""Lab 04's three targets: what misses one is told by how much, and where."""

from __future__ import annotations

import bad_answers as bad
import paralab as pl
from judged import Table, stored
from paralab.exercises.schedule import TARGETS_REQUIRED
from paralab.parallel.schedules import SCHEDULES

TASK = pl.exercises.better_schedules
ONE, TWO, THREE = TARGETS_REQUIRED


def own(name: str):
    return lambda pp, microbatches: SCHEDULES[name](pp, microbatches)


def late(rule, warm_up=1):
    """The first answer with each rank's weight halves as late as ``rule`` says. warm_up: 2 for the
    second answer.
    """
    first = stored("better_schedules", "delayed")
    return lambda pp, m: first(pp, m, lambda rank: warm_up * (pp - rank - 1), rule)


FIRST, SECOND, THIRD = stored("better_schedules", "first", "second", "third")
WRONG = [  # answer, limits it breaks, words of the verdict
    ((own("1f1b"), SECOND, THIRD), {ONE},
     "(p=4, m=8): takes 330 ms, required: at most 270 ms: rank 2 starts 2B0, the 3rd of its list, "
     "at 60 ms; in ZB-H1, which splits every backward, it starts at 50 ms"),
    ((SECOND, SECOND, THIRD), {ONE}, "rank 0 holds 7 micro-batches, required: at most 4: 0F4"),
    ((late(lambda rank: 9), SECOND, THIRD), {ONE}, "p=4, m=8: takes 300 ms"),
    ((FIRST, FIRST, THIRD), {TWO},
     "p=4, m=8: takes 270 ms, required: at most 240 ms: rank 0 is idle from 40 ms to 70 ms, before "
     "0I0, the 5th of its list"),
    ((FIRST, SECOND, FIRST), {THREE}, "rank 0 holds 4 micro-batches, required: at most 3"),
    ((own("naive"), own("naive"), own("naive")), {ONE, TWO, THREE}, "takes 960 ms"),
    ((FIRST, SECOND, lambda pp, m: bad.one_f_one_b(pp, 6)), {THREE}, "p=4, m=8: "),
]  # fmt: skip
RIGHT = own("zb-h1"), own("zb-h2"), lambda pp, m: map(" ".join, THIRD(pp, m))
TABLE = Table(TASK, WRONG, [RIGHT], exact=True)
test_a_schedule_that_misses_a_target_is_refused, test_right_ones_pass, test_its_stub = TABLE.tests()
