"""Lab 12's exercises: what a rank of a large plan sends and holds, and a better plan."""

import contextlib

import paralab as pl
from judged import Table, altered, stored

SENDS = pl.exercises.rank_sends


def counted(model, plan, rank):
    return dict(pl.dry_run(model, plan, rank=rank).traffic(by="axis").to_numpy())


def counted_at_the_second_try(model, plan, rank):
    for _ in range(2):
        with contextlib.suppress(RuntimeError):
            return counted(model, plan, rank)


WRONG = [  # changes of the answer, limits it breaks, words of the verdict
    ([("6 if", "4 if")], {"tp"}, "forward runs twice, and so do its two all-reduces"),
    ([("plan.microbatch_size * s", "s")], {"tp", "pp"},
     "(yours counts one sample per micro-batch)"),
    ([("plan.microbatch_size * s", "plan.global_batch / m * s")], {"tp", "pp"},
     "(yours counts the samples of all data-parallel ranks)"),
    ([("2 * (d - 1) * width", "2 * (d - 1) * 4")], {"dp"}, "GB (in bf16 a number has 2 bytes)"),
    ([('"fp32" else 2', '"fp32" else 4')], {"tp", "pp", "dp"}, "in bf16 a number has 2 bytes"),
    ([("rank // (d * t)", "rank // t % p")], {"tp", "pp", "dp"}, "dp=8, pp=3, tp=4, m=6, rank 48"),
    ([("        reduces += 1 ", "        reduces += 0 ")], {"tp"},
     "the embedding's all-reduce is missing, or the rank is on another stage: tp is innermost"),
    ([("tp = m * ", "tp = ")], {"tp"}, "yours counts one micro-batch"),
    ([("reduces * 2 * (t - 1)", "reduces * (t - 1)")], {"tp"},
     "(that is half of an all-reduce, or in bf16 a number has 2 bytes)"),
    ([("activation // t", "activation")], {"tp"},
     "(each of the 2 (t-1) steps of a ring sends a t-th of the tensor)"),
    ([("1 if stage == 0 else 2", "1")], {"pp"}, "a stage in the middle also sends gradients back"),
    ([("2 * (d - 1) * width", "m * 2 * (d - 1) * width")], {"dp"}, "summed once per step"),
    ([("    if stage == 0:\n        parameters", "    if False:\n        parameters")], {"dp"},
     "dp=8, pp=3, tp=4, m=6, rank 0: "),
    ([("replicated = 2 * h + 4 * h", "replicated = 6 * h // t")], {"dp"},
     "(norms and the biases of row-parallel layers are replicated)"),
    ([("6 if", "2 if"), ("else 4", "else 2")], {"tp"}, "backward makes two all-reduces per block"),
    ([("6 if", "6 * p if"), ("else 4", "else 4 * p")], {"tp"}, "yours counts the whole model"),
    ([("(3 * h + 4 * h) // t", "7 * h")], {"dp"}, "(the biases of column-parallel layers are sh"),
    ([("(3 * h + 4 * h) // t", "0"), ("2 * h + 4 * h", "0")], {"dp"},
     "(yours counts weights, without biases and norms)"),
    ([("model.vocab * h // t", "model.vocab * h")], {"dp"}, "(the token embedding is sharded)"),
    ([("return {\"tp\": tp, ", "return {")], {"tp"}, "the dict has no entry 'tp'"),
    ([("return {\"tp\": tp, \"pp\": pp, \"dp\": dp}", "return tp + pp + dp")], {"tp", "pp", "dp"},
     "required: a dict, {axis: bytes}, yours is an int"),
]  # fmt: skip
BAD = [
    *((altered("rank_sends")(*pairs), *row) for pairs, *row in WRONG),
    *(
        (one, set(SENDS.required), "so this function of it may not be called")
        for one in (counted, counted_at_the_second_try)
    ),
]
TABLE = Table(SENDS, BAD, exact=True)
test_wrong_bytes_are_refused, test_right_bytes_pass, test_its_stub = TABLE.tests()


# ---- what a rank holds, and plans ----------------------------------------------------------------
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
    (memory("+ 7 * h // t", "+ 7 * h"), "(the biases of column-parallel layers are sharded)"),
    ((lambda m, p, s: "many", alive), "required: a number of parameters"),
    (memory(FLIGHT, "plan.microbatches"), "that is GPipe, which holds all micro-batches"),
    (memory(FLIGHT, "min(plan.pp, plan.microbatches)"), "that is what the first stage holds; a "),
    (memory(FLIGHT, "plan.pp - stage - 1"), "one is missing: that of the forward right before"),
    (memory("    if stage == plan.pp - 1", "    elif stage == plan.pp - 1"),
     "(with one stage, the first is also the last: it has the embedding"),
    ((held_by_program, alive), "so this function of it may not be called"),
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
]  # fmt: skip


def table(exercise, wrong, *right):
    return Table(exercise, [(given, set(), words) for given, words in wrong], right, most=1)


MEMORY = table(pl.exercises.stage_memory, WRONG_MEMORY)
PLANS = table(pl.exercises.trillion_plan, WRONG_PLANS, as_a_plan)
test_wrong_memory_is_refused, test_right_memory_passes, test_the_stub_of_a_memory = MEMORY.tests()
test_a_wrong_plan_is_refused, test_a_right_plan_passes, test_the_stub_of_a_plan = PLANS.tests()
