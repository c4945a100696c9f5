"""What runs on ranks: answers that must not pass."""

from __future__ import annotations

import pytest

import bad_answers as bad
import bad_attacks as attacks
import paralab as pl
from judged import assert_reads_the_same_alone, judged, launches, missed
from paralab.exercises import sync
from paralab.exercises.tries import Try, on_ranks
from paralab.exercises.verdict import Notes

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


# ---- lab 01 --------------------------------------------------------------------------------------
RING = [  # answer, limits it breaks, words of the verdict
    (bad.ring_whole_tensor, {"bytes per rank", "extra memory", "simulated time"}, "40,000 bytes"),
    (bad.ring_through_root, {"calls", "bytes per rank", "simulated time"}, "no neighbour"),
    (bad.ring_direct, {"calls"}, "n=4: rank 0 does a send to rank 2, no neighbour of it"),
    (bad.ring_full_copy, {"extra memory"}, "n=2: rank 0 takes 40,000 bytes, one chunk is 20,000"),
    (bad.ring_not_in_place, {"result"}, "n=2: rank 0, chunk 0, element 0: -1, required: "),
    (bad.ring_own_chunk_is_r, {"result"}, "; still unfinished"),
    (bad.ring_stored_in_wrong_order, {"result"}, "; holds the numbers of chunk 2"),
    (bad.ring_one_step_short, {"result"}, "n=3: rank 0, chunk 2"),
    (bad.ring_by_collective, {"calls", "extra memory"}, "calls group.all_gather"),
    (bad.ring_plain, {"calls"}, "n=2: rank 0 calls group.broadcast"),
    (bad.ring_in_small_pieces, {"simulated time"}, "n=2: 96.0 µs of 36.0 µs"),
    (bad.ring_sends_first, {"result"}, "each send needs its receive in the same exchange"),
    (bad.ring_waits_for_nobody, {"result"}, "nothing moves any more: rank 1 in exchange"),
    (bad.ring_wrong_signature, {"result"}, "yours cannot be called so: too many positional"),
    ("ring", {"result"}, "required: a function, yours is 'ring'"),
    # right by luck, around the ledger, for one size
    (attacks.ring_waits_at_the_end, {"result"}, "of send #1 was changed before it was waited for"),
    (attacks.ring_sleeps, {"result"}, "n=2: rank 0 never waits for send #0"),
    (
        attacks.ring_changes_what_it_sends,
        {"result"},
        "of send #0 was changed before it was waited for",
    ),
    (attacks.ring_numpy_copy, {"extra memory"}, "n=2: rank 0 takes 60,"),
    (attacks.ring_decoy, {"calls", "bytes per rank"}, "n=2: rank 0 calls group.broadcast"),
    (attacks.ring_control, {"calls", "extra memory"}, "calls group.all_gather"),
    (attacks.ring_writes_the_numbers, {"result"}, "n=2: rank 0, chunk 0, element 0: 0, required: "),
    (attacks.ring_resizes, {"result"}, "n=2: rank 0: the tensor has shape (10,) now"),
    (attacks.ring_exits, {"result"}, "n=2: rank 0 called sys.exit(3)"),
    (attacks.ring_generator_exit, {"result"}, "n=2: rank 0 raised GeneratorExit"),
    (attacks.ring_prints_for_ever, {"result"}, "nothing moves any more: rank 0 line "),
]
RIGHT_RINGS = [bad.ring_copied, bad.ring_to_the_left]
RINGS = [*(row[0] for row in RING), *RIGHT_RINGS]
RING_ALONE = (bad.ring_waits_for_nobody, bad.ring_sends_first, attacks.ring_prints_for_ever)


@pytest.mark.parametrize("answer, limits, words", RING)
def test_a_wrong_ring_is_refused_by_the_limits_it_breaks(answer, limits, words):
    verdict = judged(pl.exercises.all_gather_half, answer, RINGS, alone=RING_ALONE)
    assert not verdict and limits <= missed(verdict), repr(verdict)
    assert words in repr(verdict) + verdict.table.to_string(), repr(verdict)


@pytest.mark.parametrize("answer", RIGHT_RINGS)
def test_another_right_ring_passes(answer):
    verdict = judged(pl.exercises.all_gather_half, answer, RINGS, alone=RING_ALONE)
    assert verdict.passed, repr(verdict)


def test_what_an_answer_prints_is_cut(capfd):
    assert pl.exercises.all_gather_half.check(attacks.ring_prints).passed
    shown = capfd.readouterr()
    assert "and more, which is left out" in shown.out
    assert len(shown.out) + len(shown.err) < 9 * 25_000  # nine ranks in three launches


# ---- lab 02 --------------------------------------------------------------------------------------
SYNC = [
    (bad.SyncAveragesTwice, {"gradients", "weights"}, "it is 0.25 times what is required"),
    (bad.SyncForgetsOne, {"gradients"}, "rank 0: blocks.0.norm1.bias, element 0: "),
    (bad.SyncNothing, {"gradients", "weights", "bytes per rank"}, "embedding.token.weight"),
    (bad.SyncNoWait, {"gradients", "weights"}, "embedding.token.weight"),
    (bad.SyncKeepsGradients, {"weights"}, "weights: rank 0: embedding.token.weight"),
    (bad.SyncKeepsBuckets, {"weights"}, "failed"),
    (bad.SyncOnlyRootKnows, {"gradients", "weights"}, "gradients: rank 1: embedding.token.weight"),
    (bad.SyncPerParameter, {"simulated step"}, "52 messages"),
    (bad.SyncAfterBackward, {"simulated step"}, "21.8 ms, required: at most 15 ms: nothing leaves"),
    (bad.SyncOneBucket, {"simulated step"}, "20.3 ms"),
    (bad.SyncWaitsAtOnce, {"simulated step"}, "backward is idle while"),
    (bad.SyncGathersAll, {"bytes per rank", "simulated step", "extra memory"}, "410.1 kB"),
    (bad.SyncTwoCopies, {"extra memory"}, "copies of the gradients"),
    (bad.SyncPlain, {"simulated step"}, "21.8 ms, required: at most 15 ms: backward is"),
    (bad.SyncOtherOrderOnEveryRank, {"gradients"}, "make the same calls in the same order"),
    (bad.SyncRaises, {"gradients"}, "raised KeyError: 'bucket 7'"),
    (bad.SyncHasNoFinish, {"gradients"}, "no method finish"),
    ("overlapped", {"gradients"}, "required: a class, yours is 'overlapped'"),
    (dict, {"gradients"}, "no method grad_ready and no finish and no reset"),
    (attacks.SyncWaitsForTheLast, {"gradients"}, "rank 0 never waits for all_reduce #0"),
    (attacks.SyncNumpyCopies, {"extra memory"}, "copies of the gradients"),
    (attacks.SyncDecoy, {"simulated step"}, "33.3 ms, required: at most 15 ms: nothing leaves"),
    (attacks.SyncLittle, {"gradients", "bytes per rank"}, "0.0 kB of "),
    (attacks.SyncForFour, {"weights"}, "weights: rank 0: embedding.token.weight, element (0, 0): "),
    (attacks.SyncUntilTheFourth, {"gradients"}, "in backward 5 of the timed model, rank 0 has "),
]
RIGHT_SYNCS = [bad.SyncGood, bad.Maker(), attacks.SyncSpans]
SYNCS = [*(row[0] for row in SYNC), *RIGHT_SYNCS]
SYNC_ALONE = (bad.SyncOtherOrderOnEveryRank,)


@pytest.mark.parametrize("answer, limits, words", SYNC)
def test_a_wrong_gradient_sync_is_refused_by_the_limits_it_breaks(answer, limits, words):
    verdict = judged(pl.exercises.gradient_sync, answer, SYNCS, alone=SYNC_ALONE)
    assert not verdict and limits <= missed(verdict), repr(verdict)
    assert words in repr(verdict) + verdict.table.to_string(), repr(verdict)


@pytest.mark.parametrize("answer", RIGHT_SYNCS, ids=["good", "maker", "spans"])
def test_another_right_gradient_sync_passes(answer):
    verdict = judged(pl.exercises.gradient_sync, answer, SYNCS, alone=SYNC_ALONE)
    assert verdict.passed, repr(verdict)


def test_two_verdicts_on_one_answer_are_the_same():
    judged(pl.exercises.gradient_sync, bad.SyncPerParameter, SYNCS, alone=SYNC_ALONE)
    assert_reads_the_same_alone(pl.exercises.gradient_sync, bad.SyncPerParameter, SYNCS)


def test_a_table_of_answers_takes_one_launch_for_every_run_of_the_checker():
    for exercise, answer, table, runs in (
        (pl.exercises.all_gather_half, bad.ring_direct, RINGS, 3),
        (pl.exercises.gradient_sync, bad.SyncRaises, SYNCS, 5),  # of these, two are references
    ):
        judged(exercise, answer, table, alone=RING_ALONE + SYNC_ALONE)
        assert launches[exercise.name] <= runs


def test_simulated_time_is_the_order_and_the_stated_costs_and_nothing_of_the_clock():
    sizes = [300_000, 100_000, 40_000, 160_000]
    for form in (bad.SyncGood, bad.SyncOneBucket):
        one = Try((form,), Notes("gradient_sync", sync.ASKED))
        [(_, found)] = on_ranks([one], sync.backwards, 4, (sizes, 500_000), timeout=20)
        got = sync.simulated(found.report, sizes).step_time / sync.BACKWARDS
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
