"""Lab 04's three targets: what misses one is told by how much, and where."""

from __future__ import annotations

import bad_answers as bad
import paralab as pl
from judged import Table, stored
from paralab.exercises.schedule import TARGETS_REQUIRED
from paralab.parallel.schedules import SCHEDULES
from paralab.theory.pipeline import simulate

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
    ((late(lambda rank: 0), SECOND, THIRD), {ONE}, "at most 270 ms: rank 3 starts 3F1"),
    ((late(lambda rank: 9), SECOND, THIRD), {ONE}, "p=4, m=8: takes 300 ms"),
    ((FIRST, FIRST, THIRD), {TWO},
     "p=4, m=8: takes 270 ms, required: at most 240 ms: rank 0 is idle from 40 ms to 70 ms, before "
     "0I0, the 5th of its list"),
    ((FIRST, late(lambda rank: rank, 2), THIRD), {TWO}, "240 ms: rank 0 is idle from 140 ms"),
    ((FIRST, own("gpipe"), THIRD), {TWO}, "p=4, m=8: takes 330 ms, required: at most 240 ms"),
    ((FIRST, SECOND, own("1f1b")), {THREE}, "rank 0 holds 4 micro-batches, required: at most 3"),
    ((FIRST, SECOND, own("naive")), {THREE},
     "p=4, m=8: takes 960 ms, required: at most 330 ms: rank 0 is idle from 10 ms to 100 ms, "
     "before 0B0, the 2nd of its list, where 0F1 could start"),
    ((FIRST, SECOND, FIRST), {THREE}, "rank 0 holds 4 micro-batches, required: at most 3"),
    ((own("naive"), own("naive"), own("naive")), {ONE, TWO, THREE}, "takes 960 ms"),
    ((bad.schedule_upside_down, SECOND, THIRD), {ONE}, "deadlock, the waits form a cycle"),
    ((FIRST, SECOND, lambda pp, m: bad.one_f_one_b(pp, 6)), {THREE}, "p=4, m=8: "),
]  # fmt: skip
RIGHT = own("zb-h1"), own("zb-h2"), lambda pp, m: map(" ".join, THIRD(pp, m))
TABLE = Table(TASK, WRONG, [RIGHT], exact=True)
test_a_schedule_that_misses_a_target_is_refused, test_right_ones_pass, test_its_stub = TABLE.tests()


def test_the_third_target_has_1f1b_s_time_with_less_memory():
    for p, m in ((4, 8), (6, 24)):
        found = simulate(THIRD(p, m), forward=1, backward=1, weight_grad=1)
        assert found.makespan <= 3 * (m + p - 1) and max(found.peak_live) < p
