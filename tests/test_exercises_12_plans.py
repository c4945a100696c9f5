"""Lab 12's exercises: what a rank of a large plan holds, and a better plan."""

import paralab as pl
from judged import Table, altered, stored


def memory(*change):
    """The package's answer with the first text replaced by the second one."""
    return altered("stage_memory")(change)


def plan(**changes):
    settings = stored("trillion_plan", "my_plan")() | changes
    return lambda: settings


def as_a_plan():
    """An unusual answer: the settings of a whole plan, defaults too."""
    import paralab as pl

    more = {"sequence_parallel": True, "recompute": "selective", "precision": "fp16"}
    mesh = {"tp": 8, "pp": 32, "dp": 12, "zero_stage": 1, "microbatches": 256, "microbatch_size": 1}
    return pl.Plan(**mesh, **more, schedule="interleaved", virtual_stages=2).to_dict()


def held_by_program(model, plan, stage):
    import paralab as pl

    return pl.dry_run(model, plan, rank=stage * plan.dp * plan.tp).meta["num_params"]


def alive(model, plan, stage):
    return sorted((plan.microbatches, plan.pp - stage))[0]


BLOCK = "block = 12 * h * h // t + 7 * h // t + 6 * h"
FLIGHT = "min(plan.pp - stage, plan.microbatches)"
WRONG_MEMORY = [  # answer, words of the verdict
    (memory(BLOCK, "t = 1; " + BLOCK), "those of all tensor-parallel ranks together"),
    ((lambda m, p, s: m.num_params / p.pp / p.tp, alive), "stages differ"),
    (memory("model.vocab * h // t +", "0 +"), "embedding or the head is missing"),
    (memory("model.vocab * h // t + model", "2 * model.vocab * h // t + model"),
     "with tied=False the first stage has no head, and the last one no embedding"),
    (memory("+ 6 * h ", "+ 6 * h // t "), "norms and the biases of row-parallel layers are repl"),
    ((lambda m, p, s: "many", alive), "required: a number of parameters"),
    (memory(FLIGHT, "plan.microbatches"), "that is GPipe, which holds all micro-batches"),
    (memory(FLIGHT, "plan.pp - stage - 1"), "one is missing: that of the forward right before"),
    (memory("    if stage == plan.pp - 1", "    elif stage == plan.pp - 1"),
     "(with one stage, the first is also the last: it has the embedding"),
    ((held_by_program, alive), "so this function of it may not be called"),
    (memory(f"return {FLIGHT}", "return 1 / 0"), "ZeroDivisionError"),
]  # fmt: skip
WRONG_PLANS = [
    (plan(pp=64, dp=6, microbatches=512, virtual_stages=1, schedule="1f1b", zero_stage=0,
          sequence_parallel=False, recompute="full"),  # the published one
     "78.8 days, required: at most 56.0"),
    (plan(zero_stage=0), "GB on the rank with the highest"),
    (plan(microbatches=128), "1,536 samples per step, required: 3,072"),
    (plan(dp=24, microbatches=128), "6,144, required: at most 3,072"),
    (plan(tp=7), "tp=7"),
    (plan(offload="nvme"),
     "offload='nvme': not allowed in this exercise; legal: to leave it out"),
    (plan(passes=(lambda p: p,)), ("passes=(<function", ": not allowed in this exercise")),
    (lambda: "fast", "required: a dict"),
    (lambda: 1 / 0, "ZeroDivisionError"),
    (lambda: __import__("sys").exit(3),
     "called sys.exit(3)"),  # a verdict shows the line of the answer, which is not this one
]  # fmt: skip


def table(exercise, wrong, *right):
    return Table(exercise, [(given, set(), words) for given, words in wrong], right, most=1)


MEMORY = table(pl.exercises.stage_memory, WRONG_MEMORY)
PLANS = table(pl.exercises.trillion_plan, WRONG_PLANS, as_a_plan)
test_wrong_bytes_are_refused, test_right_bytes_pass, test_its_stub = MEMORY.tests()
test_a_wrong_plan_is_refused, test_a_right_plan_passes, test_the_stub_of_a_plan = PLANS.tests()
