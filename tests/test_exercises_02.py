"""Lab 02: averaged gradients and DDP of one's own. The pass is in test_exercise_sync_pass.py."""

from __future__ import annotations

import pytest

import bad_answers_02 as bad
import paralab as pl
from judged import assert_reads_the_same_alone, defined, judged, launches, missed
from paralab.exercises import ddp, sources
from paralab.exercises.tries import Try, on_ranks
from paralab.exercises.verdict import Notes

AVERAGE, DDP = pl.exercises.average_gradients, pl.exercises.my_ddp


def other(name: str, what: str):
    """The second answer of an exercise, as the solution notebook has it."""
    return defined(sources.answer(name), what)


MEANS = [  # answer, limits it breaks, words of the verdict
    (bad.mean_not_divided, {"gradients", "weights"}, "it is 4 times what is required"),
    (bad.mean_for_four, {"weights"}, "weights: rank 0: embedding.token.weight, element (0, 0): "),
    (bad.mean_divided_twice, {"gradients", "weights"}, "it is 0.25 times what is required"),
    (bad.mean_alone, {"gradients", "bytes per rank"}, "no gradient was sent"),
    (bad.mean_divided_alone, {"gradients", "bytes per rank"}, "no gradient was sent"),
    (bad.mean_not_waited, {"gradients"}, "rank 0 never waits for all_reduce #0"),
    (bad.mean_of_the_first, {"gradients", "bytes per rank"}, "embedding.position.weight"),
    (bad.mean_of_a_copy, {"gradients", "weights"}, "embedding.token.weight, element (0, 0): "),
    (bad.mean_of_rank_0, {"gradients", "weights"}, "embedding.token.weight, element (0, 0): "),
    (bad.mean_on_rank_0, {"gradients", "weights"}, "gradients: rank 1: embedding.token.weight"),
    (bad.mean_gathered, {"bytes per rank"}, "a rank sends 410.1 kB in a step"),
    (bad.mean_of_weights, {"gradients", "weights"}, "embedding.token.weight, element (0, 0): "),
    (
        bad.mean_drops,
        {"gradients"},
        "last call embedding.token.weight has no grad",
    ),
    ("mean", {"gradients"}, "required: a function, yours is 'mean'"),
]
RIGHT_MEANS = [
    defined(str(AVERAGE.solution()), "average_gradients"),
    other("average_gradients_other", "average_in_one_message"),
    bad.mean_coalesced,
]
DDPS = [
    (bad.Sums, {"gradients", "weights"}, "it is 4 times what is required"),
    (bad.AveragesTwice, {"gradients", "weights"}, "it is 0.25 times what is required"),
    (bad.ForFour, {"weights"}, "weights: rank 0: embedding.token.weight, element (0, 0): "),
    (bad.UntilTheSecond, {"gradients"}, "in backward 3 of the timed model, rank 0 has "),
    (bad.ForgetsOne, {"gradients"}, "rank 0: blocks.0.norm1.bias, element 0: "),
    (bad.ForgetsTheRest, {"gradients"}, "embedding.token.weight, element (0, 0): "),
    (bad.Nothing, {"gradients", "weights", "bytes per rank"}, "no gradient was sent"),
    (bad.NoBroadcast, {"gradients", "weights"}, "gradients: rank 0: embedding.token.weight"),
    (bad.NoSyncSyncs, {"bytes per rank"}, "a rank sends 410.1 kB in a step"),
    (bad.NoSyncForGood, {"gradients", "weights", "bytes per rank"}, "no gradient was sent"),
    (bad.NoWait, {"gradients", "weights"}, "embedding.token.weight"),
    (bad.WaitsForTheLast, {"gradients"}, "rank 0 never waits for all_reduce #"),
    (bad.KeepsBuckets, {"weights"}, "raised RuntimeError: split_with_sizes"),
    (bad.OnlyRootKnows, {"gradients", "weights"}, "gradients: rank 1: embedding.token.weight"),
    (bad.PerParameter, {"simulated step"}, "52 messages"),
    (bad.OneBucket, {"simulated step"}, "20.3 ms"),
    (bad.AfterBackward, {"simulated step"}, "21.8 ms, required: at most 15 ms: nothing is sent"),
    (bad.WaitsAtOnce, {"simulated step"}, "backward is idle while"),
    (bad.GathersAll, {"bytes per rank", "simulated step", "extra memory"}, "410.1 kB"),
    (bad.TwoCopies, {"extra memory"}, "copies of the gradients"),
    (bad.NumpyCopies, {"extra memory"}, "copies of the gradients"),
    (bad.Little, {"gradients", "bytes per rank"}, "0.0 kB of "),
    (bad.OtherOrderOnEveryRank, {"gradients"}, "make the same calls in the same order"),
    (bad.Torchs, {"gradients"}, "goes around what is counted"),
    (bad.Raises, {"gradients"}, "raised KeyError: 'bucket 7'"),
    (bad.HasNoFinish, {"gradients"}, "no method finish"),
    (bad.OneArgument, {"gradients"}, "yours cannot be called so: got an unexpected keyword"),
    ("overlapped", {"gradients"}, "required: a class, yours is 'overlapped'"),
]
RIGHT_DDPS = [
    defined(str(DDP.solution()), "MyDDP"),
    other("my_ddp_other", "BucketViews"),
    bad.Good,
    bad.DividesFirst,
]
TABLES = {
    AVERAGE.name: [*(row[0] for row in MEANS), *RIGHT_MEANS],
    DDP.name: [*(row[0] for row in DDPS), *RIGHT_DDPS],
}
ALONE = (bad.OtherOrderOnEveryRank, bad.Torchs)
WRONG = [(AVERAGE, *row) for row in MEANS] + [(DDP, *row) for row in DDPS]
RIGHT = [(AVERAGE, one) for one in RIGHT_MEANS] + [(DDP, one) for one in RIGHT_DDPS]


@pytest.mark.parametrize("exercise, answer, limits, words", WRONG)
def test_a_wrong_answer_is_refused_by_the_limits_it_breaks(exercise, answer, limits, words):
    verdict = judged(exercise, answer, TABLES[exercise.name], alone=ALONE)
    assert not verdict and verdict.started and limits <= missed(verdict), repr(verdict)
    assert words in repr(verdict) + verdict.table.to_string(), repr(verdict)


@pytest.mark.parametrize("exercise, answer", RIGHT)
def test_a_right_answer_passes(exercise, answer):
    verdict = judged(exercise, answer, TABLES[exercise.name], alone=ALONE)
    assert verdict.passed, repr(verdict)


@pytest.mark.parametrize("exercise, name", [(AVERAGE, "average_gradients"), (DDP, "MyDDP")])
def test_a_stub_is_not_started(exercise, name):
    verdict = exercise.check(defined(exercise.stub, name))
    assert not verdict and not verdict.started, repr(verdict)


def test_two_verdicts_on_one_answer_are_the_same():
    judged(DDP, bad.PerParameter, TABLES[DDP.name], alone=ALONE)
    assert_reads_the_same_alone(DDP, bad.PerParameter, TABLES[DDP.name])


def test_a_table_of_answers_takes_one_launch_for_every_run_of_the_checker():
    judged(DDP, bad.Raises, TABLES[DDP.name], alone=ALONE)
    assert launches[DDP.name] <= 5  # two of these are references


def test_simulated_time_is_the_order_and_the_stated_costs_and_nothing_of_the_clock():
    sizes = [300_000, 100_000, 40_000, 160_000]
    for form in (bad.Good, bad.OneBucket):
        one = Try((form,), Notes("my_ddp", ddp.ASKED))
        [(_, found)] = on_ranks([one], ddp.backwards, 4, (sizes, 500_000), timeout=20)
        got = ddp.simulated(found.report, sizes) / ddp.BACKWARDS
        # 500 000 bytes close a bucket: 160 k elements leave first, 40 k + 100 k, then 300 k
        link, payloads = ddp.CLUSTER.intra, [4 * n for n in sizes]
        if form is bad.OneBucket:
            expected = ddp.BACKWARD_S + link.seconds(1.5 * sum(payloads))
        else:
            first = ddp.BACKWARD_S * 160 / 600 + link.seconds(1.5 * payloads[3])
            second = max(first, ddp.BACKWARD_S * 300 / 600)
            second += link.seconds(1.5 * (payloads[1] + payloads[2]))
            expected = max(second, ddp.BACKWARD_S) + link.seconds(1.5 * payloads[0])
        assert got == pytest.approx(expected, rel=1e-9), form
