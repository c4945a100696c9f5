"""Lab 05: ZeRO-3 of one's own. ZeRO-1 is in test_exercises_zero.py."""

from __future__ import annotations

import pytest

import bad_answers_05 as bad
import paralab as pl
from judged import defined, judged, launches, missed
from paralab.exercises import sources

ZERO3 = pl.exercises.my_zero3
WRONG = [  # answer, limits it breaks, words of the verdict
    (bad.StaysWhole, {"peak of a step"}, "units at once, in addition to what forward saves"),
    (bad.NeverFrees, {"kept between steps"}, "N=4: rank 0 keeps "),
    (bad.KeepsAll, {"kept between steps"}, "bytes, an N-th of both is "),
    (bad.GradientsAtTheEnd, {"peak of a step"}, "units at once, in addition to what forward saves"),
    (bad.Sums, {"weights"}, "it has changed by 4 times what is required"),
    (bad.LastMicrobatchOnly, {"weights"}, "embedding.token.weight, element "),
    (bad.NeverZero, {"weights"}, "N=3: "),
    (bad.ForFour, {"weights"}, "N=3: "),
    (bad.OwnGradient, {"weights"}, "embedding.token.weight, element "),
    (bad.AllReduces, {"bytes per rank"}, "1.33 times as many"),
    (bad.OtherPart, {"weights"}, "embedding.token.weight, element "),
    (bad.NoStep, {"weights"}, "it is as it was before"),
    (bad.NoGather, {"weights"}, "embedding.token.weight, element "),
    (bad.Raises, {"weights"}, "raised KeyError: 'unit 7'"),
    (bad.Torchs, {"weights"}, "raised "),
    (bad.HasNoGather, {"weights"}, "the class has no method gather"),
    ("zero", {"weights"}, "required: a class, yours is 'zero'"),
]
RIGHT = [
    defined(str(ZERO3.solution()), "MyZero3"),
    defined(sources.answer("my_zero3_other"), "SavedTensorHooks"),
    bad.Good,
    bad.Recomputes,
]
TABLE = [*(row[0] for row in WRONG), *RIGHT]
ALONE = (bad.Torchs,)


@pytest.mark.parametrize("answer, limits, words", WRONG)
def test_a_wrong_zero3_is_refused_by_the_limits_it_breaks(answer, limits, words):
    verdict = judged(ZERO3, answer, TABLE, alone=ALONE)
    assert not verdict and verdict.started and limits <= missed(verdict), repr(verdict)
    assert words in repr(verdict) + verdict.table.to_string(), repr(verdict)


@pytest.mark.parametrize("answer", RIGHT)
def test_a_right_zero3_passes(answer):
    verdict = judged(ZERO3, answer, TABLE, alone=ALONE)
    assert verdict.passed, repr(verdict)


def test_the_stub_is_not_started_and_a_table_takes_one_launch_for_every_run():
    assert not ZERO3.check(defined(ZERO3.stub, "MyZero3")).started
    judged(ZERO3, bad.Sums, TABLE, alone=ALONE)
    assert launches[ZERO3.name] <= 4  # two of these are references
