"""Lab 02: averaged gradients, DDP of one's own, and its sums as a pass over a program."""

import os

import pytest

import paralab as pl
from judged import Table, altered, missed
from paralab.exercises import ddp, one_process
from paralab.exercises.tries import Tries, Try
from paralab.exercises.verdict import Notes
from paralab.programs import all_gather, all_reduce, completed, gradients, insert, reduce_scatter

AVERAGE, DDP = pl.exercises.average_gradients, pl.exercises.my_ddp
mean = altered("average_gradients")
SUM, DIVIDE = "dist.all_reduce(parameter.grad)", "parameter.grad /= dist.get_world_size()"
GATHERED = (
    "every = [0 * parameter.grad for _ in range(dist.get_world_size())]\n"
    "        dist.all_gather(every, parameter.grad)\n"
    "        parameter.grad = sum(every) / len(every)"
)
SUMMED = "it is the sum over the ranks, required: the mean"
MEANS = [  # answer, limits it breaks, words of the verdict
    (mean((DIVIDE, "pass")), {"gradients"}, SUMMED),
    (mean(("dist.get_world_size()", "4")), {"weights"},
     "; gradients are divided by 4, on 3 ranks"),
    (mean((SUM, f"parameter.grad *= dist.get_rank() > 0; {SUM}")), {"gradients"},
     "; the terms of micro-batch 0 of rank 0 and of micro-batch 1 of rank 0 are missing"),
    (lambda module: None, {"gradients", "bytes per rank"}, "no gradient was sent"),
    (mean(("module.parameters()", "list(module.parameters())[:1]")),
     {"gradients", "bytes per rank"}, "embedding.position.weight"),
    (mean((SUM, "dist.reduce(parameter.grad, dst=0)")), {"gradients"},
     ("gradients: rank 1: embedding.token.weight",
      "it is rank 1's own gradient divided by 4, to which no other was added")),
    (mean((SUM, GATHERED), (DIVIDE, "pass")), {"bytes per rank"},
     "rank 0 sends 410,112 bytes in a step, required: "),
    (mean((SUM, "parameter.grad = None"), (DIVIDE, "pass")), {"gradients"},
     "at the end of the step embedding.token.weight has no gradient"),
]  # fmt: skip

own = altered("my_ddp")
N, WORK = "dist.get_world_size()", "work = dist.all_reduce(flat, async_op=True)"
MEAN, BUCKET = f"flat /= {N}", "= module, bucket_bytes"
REST = "        if self.bucket:\n            self.send()\n"
LOUD = "            self.quiet = False\n"
PER_PARAMETER, ONE_BUCKET = own((BUCKET, "= module, 1")), own((BUCKET, "= module, 2**40"))
AFTERWARDS = own(  # buckets are sent when backward is over
    ("= [], []", "= [], []\n        self.closed = []"),
    ("self.bucket_bytes:\n            self.send()", "self.bucket_bytes:\n"
     "            self.closed.append(self.bucket)\n            self.bucket = []"),
    (REST, "        for self.bucket in filter(None, [*self.closed, self.bucket]):\n"
     "            self.send()\n        self.closed = []\n"),
)  # fmt: skip
DDPS = [
    (own((REST, f"        self.count = getattr(self, 'count', 0) + 1\n{REST}"),
         (MEAN, f"{MEAN} / (2 if self.count > 2 else 1)")), {"gradients"},
     "in backward 3 of the timed model, rank 0 has "),
    (own((REST, "        self.bucket = []\n")), {"gradients"},
     "it is rank 0's own gradient, to which no other was added"),
    (own(("dist.broadcast(parameter, src=0)", "pass")), {"gradients"},
     "the ranks began with unequal weights"),
    (own(("self.quiet = True", "pass"), (LOUD, "            self.finish()\n")),
     {"bytes per rank"},
     "rank 0 sends 410,112 bytes in a step, 205,056 of them within no_sync(), required: "),
    (own(("in parameters]", "in parameters[::-1]]"), ("zip(parameters,", "zip(parameters[::-1],")),
     {"gradients"}, "; from there on it has elements of another place, in blocks.0.norm1.weight"),
    (own(("= part.view_as(parameter)", "= parameter.grad if dist.get_rank() else "
          "part.view_as(parameter)")), {"gradients"},
     "gradients: rank 1: embedding.token.weight"),
    (PER_PARAMETER, {"simulated step"}, "52 messages"),
    (own((BUCKET, "= module, 512 * 1024")), {"bytes per rank"},
     "one message has 136,704 bytes, required: at most 81,920, which is bucket_bytes and"),
    (own((BUCKET, "= module, bucket_bytes // 4")), {"bytes per rank"},
     "a message that is not the last has "),
    (AFTERWARDS, {"simulated step"}, "21.8 ms, required: at most 15 ms: nothing is sent"),
    (own((WORK, f"{WORK}\n        work.wait()")), {"simulated step"}, "backward is idle while"),
    (own((WORK, f"{WORK}\n        self.kept = [*getattr(self, 'kept', ()), flat.clone()]")),
     {"extra memory"}, "10,011,648 bytes are still there when 3 backwards are over"),
    (own(("def finish(", "def over(")), {"gradients"}, "no method finish"),
    (own(("module: nn.Module, bucket_bytes: int", "module: nn.Module"), (BUCKET, "= module, 9**6")),
     {"gradients"}, "yours cannot be called in this way: got an unexpected keyword"),
]  # fmt: skip
RIGHT_DDP = own((WORK, f"{MEAN}\n        {WORK}"), (f"            {MEAN}\n", ""))
MEAN = Table(AVERAGE, MEANS)
TABLE = Table(DDP, DDPS, [RIGHT_DDP], most=5)  # two of these are references
test_a_wrong_mean_is_refused, test_a_right_mean_passes, test_the_stub_of_a_mean = MEAN.tests()
test_a_wrong_ddp_is_refused, test_a_right_ddp_passes, test_the_stub_of_a_ddp = TABLE.tests()


def test_simulated_time_is_the_order_and_the_stated_costs_and_nothing_of_the_clock():
    sizes = [300_000, 100_000, 40_000, 160_000]
    for form in (own(), ONE_BUCKET):
        one = Try((form,), Notes("my_ddp", ddp.REQUIRED))
        [(_, found)] = Tries([one], 20).run(ddp.backwards, 4, sizes, 500_000)
        got = ddp.simulated(found.report, sizes) / ddp.BACKWARDS
        # 500 000 bytes close a bucket: 160 k elements leave first, 40 k + 100 k, then 300 k
        link, payloads = ddp.CLUSTER.intra, [4 * n for n in sizes]
        if form is ONE_BUCKET:
            expected = ddp.BACKWARD_S + link.seconds(1.5 * sum(payloads))
        else:
            first = ddp.BACKWARD_S * 160 / 600 + link.seconds(1.5 * payloads[3])
            second = max(first, ddp.BACKWARD_S * 300 / 600)
            second += link.seconds(1.5 * (payloads[1] + payloads[2]))
            expected = max(second, ddp.BACKWARD_S) + link.seconds(1.5 * payloads[0])
        assert got == pytest.approx(expected, rel=1e-9), form


# ---- a pass --------------------------------------------------------------------------------------
SYNC_PASS = pl.exercises.sync_pass
PROGRAM, GRADIENTS, WEIGHTS, SENT, STEP_TIME = SYNC_PASS.required


def each(program, *calls):
    """The program with these calls for every unit, where its gradient is complete."""
    ends = completed(program.code).items()
    sums = {at: [call(unit) for unit in units for call in calls] for at, units in ends}
    return program.replace(insert(program.code, sums))


def all_sums(program):
    return map(all_reduce, gradients(program.code))


def behind_backward(program, calls):
    return program.replace(insert(program.code, {max(completed(program.code)): calls}))


def by_unit(program):
    """A right answer by other means: the list is walked once."""
    ends, code = completed(program.code), []
    for position, ins in enumerate(program.code):
        code += [ins, *(all_reduce(unit) for unit in ends.get(position, ()))]
    return program.replace(code)


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


WRONG_PASSES = [  # answer, limits it misses, words of the verdict
    # What any wrong pass is told: test_own_pass.py, test_checks.py.
    (lambda program: program, {PROGRAM}, "head.norm.bias and 5 more (bucket 0) is never"),
    (lambda program: by_unit(by_unit(program)), {PROGRAM}, "is summed over 'dp' already"),
    (sums_each_microbatch, {PROGRAM}, "adds to the gradient of head.norm.bias"),
    (lambda program: by_unit(program).code, {PROGRAM}, "it returned a list"),
    (lambda program: each(program, reduce_scatter), {PROGRAM},
     "is summed in parts only, one on each of the data-parallel ranks (axis 'dp'), and this reads "
     "the gradient of one rank; legal: ALL_GATHER over 'dp' after position 38, "),
    (for_one_plan, {PROGRAM}, "with microbatches=3, bucket_bytes=1024: "),
    (FailsOnRanks(), {PROGRAM}, "raised KeyError: 'bucket 7'"),
    (lambda program: behind_backward(program, all_sums(program)), {STEP_TIME},
     "42.3 ms, required: at most 37 ms: 7 of 7 calls begin when"),
    (lambda program: each(program, reduce_scatter, all_gather), {STEP_TIME},
     "39.7 ms, required: at most 37 ms: the rank is idle at "),
    (lambda program: each(program, reduce_scatter, all_gather, all_gather), {SENT, STEP_TIME},
     "rank 0 sends 7,5"),
]  # fmt: skip
PASSES = Table(SYNC_PASS, WRONG_PASSES, [by_unit], exact=True)
test_a_wrong_pass_is_refused, test_a_right_pass_passes, test_the_stub_of_a_pass = PASSES.tests()


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
