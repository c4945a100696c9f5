"""Lab 05: ZeRO-3 of one's own, and its prefetch. ZeRO-1 is in test_exercises_zero.py."""

from __future__ import annotations

import pytest

import bad_answers_05 as bad
import paralab as pl
from judged import Table, stored

ZERO3 = pl.exercises.my_zero3
WRONG = [  # answer, limits it breaks, words of the verdict
    (bad.StaysWhole, {"peak of a step"}, "units at once, in addition to what forward saves"),
    (bad.NotBefore, {"weights"}, "whose storage is freed: it has to be gathered before"),
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
    stored("my_zero3_other", "SavedTensorHooks"),
    bad.Good,
    bad.Recomputes,
]
TABLE = Table(ZERO3, WRONG, RIGHT, alone=[bad.Torchs])
test_a_wrong_zero3_is_refused, test_a_right_zero3_passes, test_its_stub = TABLE.tests()


def test_a_table_takes_one_launch_for_every_run():
    assert not TABLE[bad.Sums] and TABLE.launches <= 4  # two of these are references


# ---- prefetch ------------------------------------------------------------------------------------
AHEAD = pl.exercises.my_prefetch
LATE = [  # answer, limits it breaks, words of the verdict
    (bad.Good, {"exposed time"}, "72 ms of a step, required: at most 36 ms"),
    (bad.InForwardOnly, {"exposed time"}, "no gather is in flight during the backward of unit 6"),
    (bad.InBackwardOnly, {"exposed time"}, "no gather is in flight during the forward of unit 1"),
    (bad.PostsAfterwards, {"exposed time"}, "no gather is in flight during the forward of unit 1"),
    (bad.WaitsForBoth, {"exposed time"}, "no gather is in flight during the forward of unit 1"),
    (bad.HidesReductionsOnly, {"exposed time"}, "no gather is in flight during the forward of "),
    (bad.WrongWay, {"weights"}, "was changed before it was waited for"),
    (bad.TwoAhead, {"gathers"}, "2 units are gathered ahead when unit 1 begins its forward"),
    (bad.AllAhead, {"gathers", "peak of a step"}, "5 units are gathered ahead when unit 1 begins"),
    (bad.NeverWaits, {"weights"}, "timed units: rank 0 never waits for all_gather #0"),
    (bad.WaitsWhenItIsOver, {"weights"}, "a unit has computed before its parameters had arrived"),
    (
        bad.OneGatherOnly,
        {"weights"},
        "backward of layer 6 has begun while its parameters are freed",
    ),
    (
        bad.AheadStaysWhole,
        {"gathers", "peak of a step"},
        "6 units are gathered in a step, required",
    ),
    (bad.KnowsTheTimedUnits, {"gathers"}, "6 units are gathered in a step, required: 12"),
    (bad.Alone, {"gathers", "weights"}, "0 units are gathered in a step, required: 12"),
    (bad.FirstUnitStays, {"kept between steps"}, "N=3: rank 0 keeps "),
    (bad.AheadAllReduces, {"bytes per rank"}, "1.33 times as many"),
    (bad.AheadSums, {"weights"}, "timed units: step 2: the units' output is "),
    (bad.NoGatherAhead, {"weights"}, "the class has no method gather"),
]
HIDDEN = [stored("my_prefetch_other", "InOrder"), bad.Ahead, bad.LearnsTheOrder]
TIMES = "8 ms", "32 ms", "32 ms", "32 ms"
PREFETCHES = Table(AHEAD, LATE, HIDDEN)
test_a_wrong_prefetch_is_refused, test_a_right_prefetch_passes, test_the_stub = PREFETCHES.tests()


@pytest.mark.parametrize("answer, exposed", list(zip(PREFETCHES.right, TIMES, strict=True)))
def test_the_exposed_time_of_a_prefetch_is_that_of_the_stated_costs(answer, exposed):
    assert PREFETCHES[answer].rows[-1].yours == exposed


def test_prefetch_takes_a_launch_of_timed_units_one_of_training_and_a_reference():
    assert PREFETCHES[bad.Ahead] and PREFETCHES.launches <= 3
