"""What runs on ranks: answers that must not pass."""

from __future__ import annotations

import pytest

import bad_answers as bad
import paralab as pl
from paralab.exercises import sync

REFUSED = r"grad_sync=.*; legal: "


# ---- Plan(grad_sync=a class) ---------------------------------------------------------------------
def test_a_plan_takes_no_class_and_says_what_it_takes_instead():
    with pytest.raises(ValueError, match=REFUSED + r".*'overlapped' \| None.*passes=\(f,\)"):
        pl.Plan(dp=2, grad_sync=bad.SyncGood)


def test_a_saved_plan_keeps_an_own_forms_name_which_no_longer_runs(model):
    plan = pl.Plan.from_dict({**pl.Plan(dp=2).to_dict(), "grad_sync": "own: SyncGood"})
    assert plan.grad_sync == plan.grad_sync_name == "own: SyncGood"
    with pytest.raises(ValueError, match=r"grad_sync='own: SyncGood'.*keeps only.*; legal: "):
        plan.validate(model)


@pytest.mark.parametrize(
    "form, why",
    [
        (bad.SyncHasNoFinish, "no method finish"),
        (7, "cannot be called"),
        (bad.ring_wrong_signature, "cannot be called"),
        (dict, "no method grad_ready and no finish and no reset"),
    ],
)
def test_a_form_that_cannot_work_is_refused_before_a_process_starts(form, why):
    with pytest.raises(ValueError, match=REFUSED) as refused:
        sync.check_form(form)
    assert why in str(refused.value)


# ---- lab 01 --------------------------------------------------------------------------------------
RING = [  # answer, limits it breaks, words of the verdict
    (bad.ring_whole_tensor, {"bytes per rank", "extra memory", "simulated time"}, "40,000 bytes"),
    (bad.ring_through_root, {"calls", "bytes per rank", "simulated time"}, "no neighbour"),
    (bad.ring_direct, {"calls"}, "n=4: rank 0 does a send to rank 2, no neighbour of it"),
    (bad.ring_full_copy, {"extra memory"}, "n=2: rank 0 takes 40,000 bytes, one chunk is 20,000"),
    (bad.ring_not_in_place, {"result"}, "n=2, rank 0, chunk 0: still unfinished at element 0"),
    (bad.ring_own_chunk_is_r, {"result"}, "still unfinished"),
    (bad.ring_stored_in_wrong_order, {"result"}, "n=3, rank 0, chunk 0: holds the numbers of"),
    (bad.ring_only_two, {"result"}, "n=3, rank 0, chunk 2"),
    (bad.ring_one_step_short, {"result"}, "n=3, rank 0, chunk 2"),
    (bad.ring_only_powers_of_two, {"result"}, "n=3, rank 0, chunk 0"),
    (bad.ring_by_collective, {"calls", "extra memory"}, "calls group.all_gather"),
    (bad.ring_behind_the_back, {"bytes per rank"}, "sends nothing through the group"),
    (bad.ring_in_small_pieces, {"simulated time"}, "n=2: 96.0 µs, of 36.0 µs asked"),
    (bad.ring_sends_first, {"result"}, "each send needs its receive in the same exchange"),
    (bad.ring_waits_for_nobody, {"result"}, "nothing moves any more: rank 1 in exchange"),
    (bad.ring_wrong_signature, {"result"}, "takes 1 positional argument but 2 were given"),
    ("ring", {"result"}, "asked is a function"),
]


def missed(verdict) -> set[str]:
    return {row.limit for row in verdict.rows if row.ok is False}


@pytest.mark.parametrize("answer, limits, words", RING)
def test_a_wrong_ring_is_refused_by_the_limits_it_breaks(answer, limits, words):
    verdict = pl.exercises.all_gather_half.check(answer, timeout=3)
    assert not verdict and limits <= missed(verdict), repr(verdict)
    assert words in repr(verdict) + verdict.table.to_string(), repr(verdict)


@pytest.mark.parametrize("answer", [bad.ring_copied, bad.ring_to_the_left])
def test_another_right_ring_passes(answer):
    verdict = pl.exercises.all_gather_half.check(answer)
    assert verdict.passed, repr(verdict)


# ---- lab 02 --------------------------------------------------------------------------------------
SYNC = [
    (bad.SyncAveragesTwice, {"gradients", "weights"}, "is 0.25 times what it should be"),
    (bad.SyncForgetsOne, {"gradients"}, "gradients: blocks.0.norm1.bias is wrong"),
    (bad.SyncForgetsTheRest, {"gradients"}, "gradients: embedding.token.weight"),
    (bad.SyncNothing, {"gradients", "weights", "bytes per rank"}, "embedding.token.weight"),
    (bad.SyncNoWait, {"gradients", "weights"}, "embedding.token.weight"),
    (bad.SyncWeights, {"gradients", "weights"}, "embedding.token.weight"),
    (bad.SyncKeepsGradients, {"weights"}, "weights: embedding.token.weight"),
    (bad.SyncKeepsBuckets, {"weights"}, "failed"),
    (bad.SyncOnlyRootKnows, {"gradients", "weights"}, "gradients: embedding.token.weight"),
    (bad.SyncPerParameter, {"simulated step"}, "52 messages"),
    (bad.SyncAfterBackward, {"simulated step"}, "21.8 ms, asked are at most 15 ms: nothing leaves"),
    (bad.SyncOneBucket, {"simulated step"}, "20.3 ms"),
    (bad.SyncWaitsAtOnce, {"simulated step"}, "backward stands still"),
    (bad.SyncGathersAll, {"bytes per rank", "simulated step", "extra memory"}, "410.1 kB"),
    (bad.SyncTwoCopies, {"extra memory"}, "copies of the gradients"),
    (bad.SyncBehindTheBack, {"bytes per rank"}, "no gradient passed through the group"),
    (bad.SyncOtherOrderOnEveryRank, {"gradients"}, "make the same calls in the same order"),
    (bad.SyncRaises, {"gradients"}, "raised KeyError: 'bucket 7'"),
    (bad.SyncHasNoFinish, {"gradients"}, "no method finish"),
]


@pytest.mark.parametrize("answer, limits, words", SYNC)
def test_a_wrong_gradient_sync_is_refused_by_the_limits_it_breaks(answer, limits, words):
    verdict = pl.exercises.gradient_sync.check(answer, timeout=10)
    assert not verdict and limits <= missed(verdict), repr(verdict)
    assert words in repr(verdict) + verdict.table.to_string(), repr(verdict)


@pytest.mark.parametrize("answer", [bad.SyncGood, bad.Maker()])
def test_another_right_gradient_sync_passes(answer):
    verdict = pl.exercises.gradient_sync.check(answer)
    assert verdict.passed, repr(verdict)


def test_two_verdicts_on_one_answer_are_the_same():
    """A notebook's stored verdict is compared with a fresh one, on another machine."""
    first, second = (pl.exercises.gradient_sync.check(bad.SyncPerParameter) for _ in range(2))
    assert first == second and first._repr_html_() == second._repr_html_()


def test_simulated_time_is_the_order_and_the_stated_costs_and_nothing_of_the_clock():
    sizes = [300_000, 100_000, 40_000, 160_000]
    for form in (bad.SyncGood, bad.SyncOneBucket):
        report = pl.trace(sync.backwards, 4, (form, sizes, 500_000))
        got = sync.simulated(report, sizes).step_time / sync.BACKWARDS
        # 500 000 bytes close a bucket: 160 k elements leave first, 40 k + 100 k, then 300 k
        link, payloads = sync.CLUSTER.intra, [4 * n for n in sizes]
        if form is bad.SyncOneBucket:
            expected = sync.BACKWARD_S + link.seconds(1.5 * sum(payloads))
        else:
            first = sync.BACKWARD_S * 160 / 600 + link.seconds(1.5 * payloads[3])
            second = max(first, sync.BACKWARD_S * 300 / 600)
            second += link.seconds(1.5 * (payloads[1] + payloads[2]))
            expected = max(second, sync.BACKWARD_S) + link.seconds(1.5 * payloads[0])
        assert got == pytest.approx(expected, rel=1e-9), form
