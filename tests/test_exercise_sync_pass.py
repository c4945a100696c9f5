"""Lab 02's second exercise: passes whose sums overlap pass, others miss the limits they break."""

import os

import paralab as pl
from judged import Table, missed
from paralab.exercises import one_process
from paralab.programs import all_gather, all_reduce, completed, gradients, insert, reduce_scatter

SYNC_PASS = pl.exercises.sync_pass
PROGRAM, GRADIENTS, WEIGHTS, BYTES, TIME = SYNC_PASS.required


def each(program, *calls):
    """The program with these calls for every unit, where its gradient is complete."""
    ends = completed(program.code).items()
    sums = {at: [call(unit) for unit in units for call in calls] for at, units in ends}
    return program.replace(insert(program.code, sums))


def all_sums(program):
    return map(all_reduce, gradients(program.code))


def behind_backward(program, calls):
    return program.replace(insert(program.code, {max(completed(program.code)): calls}))


# ---- right ---------------------------------------------------------------------------------------
def by_unit(program):
    """A right answer by other means: the list is walked once."""
    ends, code = completed(program.code), []
    for position, ins in enumerate(program.code):
        code += [ins, *(all_reduce(unit) for unit in ends.get(position, ()))]
    return program.replace(code)


# ---- wrong ---------------------------------------------------------------------------------------
def sums_each_microbatch(program):
    ends = completed(program.code, per_microbatch=True).items()
    sums = {position: map(all_reduce, units) for position, units in ends}
    return program.replace(insert(program.code, sums))


def for_one_plan(program):
    """Positions as the learner has read them off the printed list."""
    read = {37: [0], 39: [1], 40: [2], 42: [3], 44: [4], 45: [5], 47: [6]}
    sums = {position: map(all_reduce, units) for position, units in read.items()}
    return program.replace(insert(program.code, sums))


class FailsOnRanks:
    """Right in the process that made it."""

    def __init__(self):
        self.home = os.getpid()

    def __call__(self, program):
        if os.getpid() != self.home:
            raise KeyError("bucket 7")
        return by_unit(program)


WRONG = [  # answer, limits it misses, words of the verdict
    # What any wrong pass is told: test_own_pass.py, test_checks.py.
    (lambda program: program, {PROGRAM}, "head.norm.bias and 5 more (bucket 0) is never"),
    (lambda program: by_unit(by_unit(program)), {PROGRAM}, "is summed over 'dp' already"),
    (sums_each_microbatch, {PROGRAM}, "adds to the gradient of head.norm.bias"),
    (lambda program: by_unit(program).code, {PROGRAM}, "it returned a list"),
    (for_one_plan, {PROGRAM}, "with microbatches=3, bucket_bytes=1024: "),
    (FailsOnRanks(), {PROGRAM}, "raised KeyError: 'bucket 7'"),
    (lambda program: behind_backward(program, all_sums(program)), {TIME},
     "42.3 ms, required: at most 37 ms: 7 of 7 calls begin when"),
    (lambda program: each(program, reduce_scatter, all_gather), {TIME},
     "39.7 ms, required: at most 37 ms: the rank is idle at "),
    (lambda program: each(program, reduce_scatter, all_gather, all_gather), {BYTES, TIME},
     "rank 0 sends 7,5"),
]  # fmt: skip
PASSES = Table(SYNC_PASS, WRONG, [by_unit], exact=True)
test_a_wrong_pass_is_refused, test_a_right_pass_passes, test_its_stub = PASSES.tests()


def test_what_ranks_train_is_held_against_one_process(monkeypatch):
    right = one_process.of_one_process

    def other(model, **batch):
        return [one._replace(gradients={n: 2 * g for n, g in one.gradients.items()},
                             weights={n: 4 * w for n, w in one.weights.items()})
                for one in right(model, **batch)]  # fmt: skip

    monkeypatch.setattr(one_process, "of_one_process", other)
    verdict = SYNC_PASS.check(by_unit)
    assert missed(verdict) == {GRADIENTS, WEIGHTS}
    for times in (0.5, 0.25):
        assert f"it is {times} times what is required" in verdict.table.to_string()
