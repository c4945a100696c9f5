"""Lab 06's exercises: right answers pass, wrong ones are refused with the mistake named."""

from __future__ import annotations

import pytest

import bad_answers_06 as bad
import paralab as pl
from judged import assert_reads_the_same_alone, defined, judged, launches, missed
from paralab.exercises import sources

CHECKPOINT = pl.exercises.checkpoint
ANSWERS = [
    defined(text, "my_checkpoint")
    for text in (str(CHECKPOINT.solution()), sources.answer("checkpoint_other"))
]
WRONG = [  # answer, limits it breaks, words of the verdict
    (bad.plain, {"forwards", "peak memory"}, "block 0 runs 2 times in the step, required: 4"),
    (bad.torchs_own, {"gradients"}, "torch.utils.checkpoint is called: write what it does"),
    (bad.other_masks, {"gradients"}, "of its largest entry"),
    (bad.disturbs, {"generator"}, "the program draws other numbers after the step"),
    (bad.thrice, {"forwards"}, "block 0 runs 6 times in the step, required: 4"),
    (bad.twice_as_much, {"gradients"}, "is off by"),
    (bad.input_only, {"gradients"}, "has no gradient"),
    (bad.no_gradients, {"gradients"}, "raised RuntimeError: element 0 of tensors does not"),
    (bad.without_dropout, {"gradients"}, "of its largest entry"),
    (bad.one_too_few, {"gradients"}, "raised RuntimeError"),
    (bad.passes_on, {"gradients"}, "is off by"),
    (bad.late_state, {"gradients"}, "of its largest entry"),
    (bad.seeded, {"gradients", "generator"}, "of its largest entry"),
    (bad.global_state, {"gradients"}, "of its largest entry"),
    (bad.keeps_graph, {"forwards", "peak memory"}, "bytes at its peak, required:"),
    (bad.numpy_copies, {"peak memory"}, "bytes at its peak, required:"),
    (bad.detached, {"gradients"}, "has no gradient"),
    (bad.not_the_block, {"gradients"}, "my_checkpoint returns Tensor, not the block's y"),
    ("my_checkpoint", {"gradients"}, "required: a function"),
]
RIGHT = [*ANSWERS, bad.through_hooks, bad.right]
TABLE = [*(row[0] for row in WRONG), *RIGHT]


@pytest.mark.parametrize("answer, limits, words", WRONG)
def test_a_wrong_checkpoint_is_refused_by_the_limits_it_breaks(answer, limits, words):
    verdict = judged(CHECKPOINT, answer, TABLE)
    assert not verdict and verdict.started and limits <= missed(verdict), repr(verdict)
    assert words in repr(verdict) + verdict.table.to_string(), repr(verdict)


@pytest.mark.parametrize("answer", RIGHT)
def test_a_right_checkpoint_passes(answer):
    verdict = judged(CHECKPOINT, answer, TABLE)
    assert verdict.passed, repr(verdict)


def test_checkpoints_are_judged_in_one_launch_and_read_the_same_alone():
    assert_reads_the_same_alone(CHECKPOINT, bad.disturbs, TABLE)
    assert launches["checkpoint"] == 1
    stub = CHECKPOINT.check(defined(CHECKPOINT.stub, "my_checkpoint"))
    assert not stub and not stub.started
