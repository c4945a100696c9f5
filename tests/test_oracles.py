"""The oracles are whole, and predictions have the messages, copies and bytes that they have."""

from __future__ import annotations

import hashlib
import warnings
from collections import Counter

import pytest

import oracles
import paralab as pl

SAMPLE = range(0, 251, 10)  # evenly over all, so of pairwise plans and of drawn ones
TIERS = ("host", "file")


@pytest.fixture(scope="module")
def frozen() -> list[oracles.Oracle]:
    """All of them, of which no plan may warn: some are slow on purpose."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return oracles.load()


# ---- whole ---------------------------------------------------------------------------------------
def test_all_plans_are_there_and_no_two_are_alike(frozen):
    assert Counter(one.source for one in frozen) == {"pairwise": 51, "drawn": 200}
    assert len({(one.model, one.plan, one.clip_norm) for one in frozen}) == len(frozen)


@pytest.mark.filterwarnings("ignore:zero_stage=3 with pp")
def test_every_plan_can_train_its_model_on_the_machine(frozen):
    for one in frozen:
        one.plan.validate(one.model)
        assert one.plan.world_size <= oracles.MACHINE.num_devices


def test_every_rank_has_its_rows_and_every_message_its_ranks(frozen):
    for one in frozen:
        assert len(one.calls) == len(one.copies) == one.plan.world_size
        for rank, calls in enumerate(one.calls):
            assert all(rank in ranks for *_, ranks in calls)
            assert not {phase for _, _, phase, *_ in calls} & {"control", "setup"}
        assert one.step_time > 0
        assert one.plan.world_size == 1 or any(one.calls)


def test_what_is_sent_arrives(frozen):
    for one in frozen:
        sent, arrived = Counter(), Counter()
        for rank, calls in enumerate(one.calls):
            for op, _, phase, payload, _, level, peer, _ in calls:
                if op == "send":
                    sent[rank, peer, phase, payload, level] += 1
                elif op == "recv":
                    arrived[peer, rank, phase, payload, level] += 1
        assert sent == arrived


def test_bytes_of_memory_add_up(frozen):
    for one in frozen:
        assert set(one.memory) == {0, one.plan.world_size - 1}
        for held in one.memory.values():
            for tier in [held, *(held[name] for name in TIERS if name in held)]:
                assert tier["peak"] == sum(tier["at_peak"].values())
                for moment in ("at_peak", "at_end"):
                    assert sum(tier[moment].values()) <= tier["peak"]
                    assert all(0 < n <= tier["most"][name] for name, n in tier[moment].items())
            assert held["num_params"] > 0
            assert any(name in held for name in TIERS) == (one.plan.tiers is not None)


def test_a_run_sends_what_was_predicted_in_whatever_order(frozen):
    for one in frozen:
        assert set(one.ran) == set(one.memory)
        for rank, (calls, copies) in one.ran.items():
            assert Counter(calls) == Counter(one.calls[rank])
            delayed = one.plan.tiers is not None and one.plan.tiers.delayed
            if not delayed:  # nothing has come back yet in the only step of a dry run
                assert Counter(copies) == Counter(one.copies[rank])


def test_losses_are_of_the_text_that_all_tests_train_on(text):
    known = oracles.losses()
    assert hashlib.sha256(text.read_bytes()).hexdigest() == known["text_sha256"]
    assert len(known["runs"]) == 6
    pl.ModelSpec(**known["model"])
    for run in known["runs"].values():
        pl.Plan(**run["plan"])
        losses = [float.fromhex(loss) for loss in run["losses"]]
        assert len(losses) == known["steps"] and losses == sorted(losses, reverse=True)


# ---- and still true ------------------------------------------------------------------------------
@pytest.mark.parametrize("number", SAMPLE)
@pytest.mark.filterwarnings("ignore:zero_stage=3 with pp")
def test_a_prediction_has_the_messages_and_copies_of_before(frozen, number):
    one = frozen[number]
    report = pl.predict(
        one.model, one.plan, oracles.MACHINE, steps=1, optimizer=one.optimizer, detail="calls"
    )
    for mine, theirs in zip(oracles.calls_of(report), one.calls, strict=True):
        assert Counter(mine) == Counter(theirs)
    for mine, theirs in zip(oracles.copies_of(report), one.copies, strict=True):
        assert Counter(mine) == Counter(theirs)
    # Ops take fewer kernels than autograd's layers did, and groups of one rank no time at all.
    assert 0.5 < report.step_time / one.step_time < 1.1
