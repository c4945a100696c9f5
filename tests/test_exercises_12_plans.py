"""Lab 12's exercises: what a rank of a large plan holds, and a better plan."""

from __future__ import annotations

import pytest

import paralab as pl
from judged import defined, judged, launches, missed
from paralab.exercises import sources
from paralab.exercises.graded import asked_for


def answer(name, which="", **changes):
    """The package's answer with some of its text replaced."""
    text = sources.solution(sources.answer(name + which))
    for old, new in changes.values():
        assert old in text, old
        text = text.replace(old, new)
    return text


def memory(**changes):
    text = answer("stage_memory", **changes)
    return defined(text, "stage_parameters"), defined(text, "in_flight")


def plan(**changes):
    settings = defined(answer("trillion_plan"), "my_plan")() | changes
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
WRONG_MEMORY = {
    "whole": (memory(a=(BLOCK, "t = 1; " + BLOCK)), "those of all tensor-parallel ranks together"),
    "equal": ((lambda m, p, s: m.num_params / p.pp / p.tp, alive), "stages differ"),
    "no ends": (memory(a=("model.vocab * h // t +", "0 +")), "embedding or the head is missing"),
    "whole table": (memory(a=("model.vocab * h // t", "model.vocab * h")), "head are not sharded"),
    "everywhere": (memory(a=("if stage == 0:", "if True:")), "every stage has an embedding"),
    "no positions": (memory(a=(" + model.seq_len * h", "")), "positions' embedding is missing"),
    "no norm": (memory(a=(" + 2 * h", "")), "the last LayerNorm is missing"),
    "sharded norms": (memory(a=("+ 6 * h ", "+ 6 * h // t ")), "norms and biases of rows are repl"),
    "text": ((lambda m, p, s: "many", alive), "required: a number of parameters"),
    "gpipe": (memory(a=(FLIGHT, "plan.microbatches")), "that is GPipe: all of them"),
    "unbounded": (memory(a=(FLIGHT, "plan.pp - stage")), "there are no more than m"),
    "one less": (memory(a=(FLIGHT, "plan.pp - stage - 1")), "without the one at work"),
    "other end": (memory(a=(FLIGHT, "min(stage + 1, plan.microbatches)")), "from the other end"),
    "raises": ((held_by_program, lambda m, p, s: 1 / 0), "ZeroDivisionError"),
}
RIGHT_MEMORY = {
    "answer": memory(),
    "other": tuple(
        defined(answer("stage_memory", "_other"), name)
        for name in ("stage_parameters", "in_flight")
    ),
    "program": (held_by_program, alive),
}
WRONG_PLANS = {
    "published": (
        plan(
            pp=64,
            dp=6,
            microbatches=512,
            virtual_stages=1,
            schedule="1f1b",
            zero_stage=0,
            sequence_parallel=False,
            recompute="full",
        ),
        "80.5 days predicted",
    ),
    "memory": (
        plan(pp=64, dp=6, microbatches=512, zero_stage=0),
        "GB on the rank with the highest",
    ),
    "batch": (plan(microbatches=128), "1,536 samples per step, required: 3,072"),
    "devices": (plan(dp=24, microbatches=128), "6,144 devices, there are 3,072"),
    "illegal": (plan(tp=7), "tp=7"),
    "unknown": (plan(speed=9), "speed"),
    "no dict": (lambda: "fast", "required: a dict"),
    "a plan": (lambda: pl.Plan(), "required: a dict"),
    "raises": (lambda: 1 / 0, "ZeroDivisionError"),
    "exits": (lambda: __import__("sys").exit(3), "exit"),
}
RIGHT_PLANS = {
    "answer": defined(answer("trillion_plan"), "my_plan"),
    "other": defined(answer("trillion_plan", "_other"), "my_plan"),
    "of a plan": as_a_plan,
}
ANSWERS = {  # exercise: wrong answers, right ones
    "stage_memory": (WRONG_MEMORY, RIGHT_MEMORY),
    "trillion_plan": (WRONG_PLANS, RIGHT_PLANS),
}
TABLES = {
    exercise: [*(row[0] for row in wrong.values()), *right.values()]
    for exercise, (wrong, right) in ANSWERS.items()
}
WRONG = [(exercise, name) for exercise, (wrong, _) in ANSWERS.items() for name in wrong]
RIGHT = [(exercise, name) for exercise, (_, right) in ANSWERS.items() for name in right]


@pytest.mark.parametrize("exercise, name", WRONG)
def test_a_wrong_answer_is_refused_and_its_mistake_is_named(exercise, name):
    given, words = ANSWERS[exercise][0][name]
    verdict = judged(pl.exercises.ALL[exercise], given, TABLES[exercise])
    assert not verdict and missed(verdict) and words in repr(verdict), repr(verdict)


@pytest.mark.parametrize("exercise, name", RIGHT)
def test_three_right_answers_pass(exercise, name):
    verdict = judged(pl.exercises.ALL[exercise], ANSWERS[exercise][1][name], TABLES[exercise])
    assert verdict.passed, repr(verdict)


@pytest.mark.parametrize("exercise", ANSWERS)
def test_the_stub_has_not_been_started(exercise):
    exercise = pl.exercises.ALL[exercise]
    verdict = exercise.check(*(defined(exercise.stub, name) for name in asked_for(exercise)))
    assert not verdict and not verdict.started


@pytest.mark.parametrize("exercise", ANSWERS)
def test_a_table_of_answers_takes_one_launch(exercise):
    judged(pl.exercises.ALL[exercise], TABLES[exercise][0], TABLES[exercise])
    assert launches[exercise] == 1
