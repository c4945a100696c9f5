"""Lab 09's exercises: right answers pass, wrong ones are refused with the mistake named."""

from __future__ import annotations

import pytest

import bad_answers_09 as bad
import paralab as pl
from judged import Table, stored

BANDWIDTH, STREAMED = pl.exercises.bandwidth, pl.exercises.streamed_optimizer


# ---- warm-up: the bandwidth ----------------------------------------------------------------------
FIRST, OTHERS, PAPER = BANDWIDTH.asked
NEEDED = [stored("bandwidth_other", "bandwidth_needed"), bad.share_of_time]
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
BANDWIDTHS = Table(BANDWIDTH, WRONG_BANDWIDTH, NEEDED, exact=True)
test_a_wrong_bandwidth_is_refused, test_a_right_bandwidth_passes, test_its_stub = BANDWIDTHS.tests()


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
RIGHT = [stored("streamed_optimizer_other", "MyStreamedAdamW"), bad.Good]
TABLE = Table(STREAMED, WRONG, RIGHT)
test_a_wrong_optimizer_is_refused, test_a_right_optimizer_passes, test_the_stub = TABLE.tests()


def test_tables_are_judged_in_one_launch_and_a_verdict_reads_the_same_alone():
    TABLE.assert_reads_the_same_alone(bad.Everything)
    assert BANDWIDTHS[bad.one_flop].started and BANDWIDTHS.launches == TABLE.launches == 1


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
