"""Lab 09's exercises: right answers pass, wrong ones are refused with the mistake named."""

from __future__ import annotations

import pytest

import bad_answers_09 as bad
import paralab as pl
from judged import assert_reads_the_same_alone, defined, judged, launches, missed
from paralab.exercises import sources

BANDWIDTH, STREAMED = pl.exercises.bandwidth, pl.exercises.streamed_optimizer


def reference(exercise, name):
    """The package's answer and its second, different one."""
    texts = str(exercise.solution()), sources.answer(f"{exercise.name}_other")
    return [defined(text, name) for text in texts]


# ---- warm-up: the bandwidth ----------------------------------------------------------------------
FIRST, OTHERS, PAPER = BANDWIDTH.asked
NEEDED = [*reference(BANDWIDTH, "bandwidth_needed"), bad.share_of_time]
WRONG_BANDWIDTH = [  # answer, limits it breaks, words of the verdict
    (bad.without_recomputation, {FIRST, OTHERS, PAPER}, "8 FLOPs per parameter and token, not 6"),
    (bad.forward_alone, {FIRST, OTHERS, PAPER}, "that counts forward alone"),
    (bad.one_flop, {FIRST, OTHERS, PAPER}, "a multiply-add is two FLOPs"),
    (bad.one_token, {FIRST, OTHERS, PAPER}, "tokens are missing"),
    (bad.one_byte, {FIRST, OTHERS, PAPER}, "that is for one byte per parameter"),
    (
        bad.without_the_rest,
        {FIRST, OTHERS, PAPER},
        "that is e P / I: the device computes e of the time",
    ),
    (bad.exchanged, {OTHERS, PAPER}, "e and 1 - e are exchanged"),
    (bad.intensity_alone, {OTHERS, PAPER}, "that is P / I: copies as long as computation"),
    (bad.in_gigabytes, {FIRST, OTHERS, PAPER}, "those are GB/s"),
    (bad.as_text, {FIRST, OTHERS, PAPER}, "required: a number of bytes per second"),
    (bad.of_three, {FIRST}, "yours cannot be called so"),
]
BANDWIDTHS = [*(row[0] for row in WRONG_BANDWIDTH), *NEEDED]


@pytest.mark.parametrize("answer, limits, words", WRONG_BANDWIDTH)
def test_a_wrong_bandwidth_is_refused_with_the_mistake_named(answer, limits, words):
    verdict = judged(BANDWIDTH, answer, BANDWIDTHS)
    assert not verdict and verdict.started and limits == missed(verdict), repr(verdict)
    assert words in repr(verdict) + verdict.table.to_string(), repr(verdict)


@pytest.mark.parametrize("answer", NEEDED)
def test_a_right_bandwidth_passes(answer):
    assert judged(BANDWIDTH, answer, BANDWIDTHS).passed
    assert launches["bandwidth"] == 1


# ---- implement: the streamed optimizer -----------------------------------------------------------
WEIGHTS, FILES, PEAK, KEPT = STREAMED.asked
WRONG = [
    (bad.InMemory, {WEIGHTS, KEPT}, "so the states are not in them alone"),
    (bad.Everything, {PEAK}, "numbers per element of a unit, required: at most 8"),
    (bad.Kept, {WEIGHTS, KEPT}, "so the states are not in them alone"),
    (bad.NeverWritten, {WEIGHTS}, "differs after step 2"),
    (bad.NoCount, {WEIGHTS}, "differs after step 2"),
    (bad.CountsUnits, {WEIGHTS}, "differs after step 1"),
    (bad.NoDecay, {WEIGHTS}, "differs after step 1"),
    (bad.L2, {WEIGHTS}, "differs after step 1"),
    (bad.FirstUnitOnly, {WEIGHTS}, "embedding.token.weight differs after step 1 in 7,"),
    (bad.SameStates, {WEIGHTS}, "differs after step 1"),
    (bad.Doubled, {FILES}, "required: 403,200"),
    (bad.HalfPrecision, {WEIGHTS}, "differs after step 2"),
    (bad.OtherOrder, {WEIGHTS}, "differs after step 1"),
    (bad.Raises, {WEIGHTS}, "raised KeyError: 'unit 3'"),
    (bad.NoStep, {WEIGHTS}, "the class has no method step"),
    ("adam", {WEIGHTS}, "required: a class"),
]
RIGHT = [*reference(STREAMED, "MyStreamedAdamW"), bad.Good]
TABLE = [*(row[0] for row in WRONG), *RIGHT]


@pytest.mark.parametrize("answer, limits, words", WRONG)
def test_a_wrong_streamed_optimizer_is_refused_by_the_limits_it_breaks(answer, limits, words):
    verdict = judged(STREAMED, answer, TABLE)
    assert not verdict and verdict.started and limits <= missed(verdict), repr(verdict)
    assert words in repr(verdict) + verdict.table.to_string(), repr(verdict)


@pytest.mark.parametrize("answer", RIGHT)
def test_a_right_streamed_optimizer_passes(answer):
    verdict = judged(STREAMED, answer, TABLE)
    assert verdict.passed, repr(verdict)


def test_it_is_judged_in_one_launch_reads_the_same_alone_and_stubs_are_not_started():
    assert_reads_the_same_alone(STREAMED, bad.Everything, TABLE)
    assert launches["streamed_optimizer"] == 1
    for exercise, name in ((STREAMED, "MyStreamedAdamW"), (BANDWIDTH, "bandwidth_needed")):
        stub = exercise.check(defined(exercise.stub, name))
        assert not stub and not stub.started


# ---- go further: the order of a streamed update, drawn -------------------------------------------
def test_the_picture_of_an_order_has_its_jobs_and_says_how_far_it_is_from_the_limit():
    from bad_answers_offload import good, one_after_the_other
    from paralab import view

    chart, slow = view.jobs(good(6, 2), host="fast"), view.jobs(one_after_the_other(6, 2))
    assert chart.finding == "6 units take 150 ms; no order takes less than 150 ms"
    assert slow.finding == "6 units take 330 ms; no order takes less than 205 ms"
    assert len(chart.table) == 18 and chart.table["end"].max() == pytest.approx(0.150)
    assert set(chart.table.query("what == 'update'")["lane"]) == {"host"}
    with pytest.raises(ValueError, match="legal: fast, slow|'fast'"):
        view.jobs(good(6, 2), host="other")
