"""Predictions have the messages, copies and bytes that the frozen plans have."""

from __future__ import annotations

import warnings
from collections import Counter

import pytest

import oracles
import paralab as pl
from paralab.spec.links import messages

SAMPLE = range(0, 251, 10)  # evenly over all, so of pairwise plans and of drawn ones


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
    # Ops take fewer kernels than autograd's layers did, and groups of one rank no time. Alpha
    # was paid for a call, and is paid for each of its messages.
    mine = report.collectives.query("rank == 0 and op != 'recv'")
    more = sum(
        messages(op, len(ranks)) - 1 for op, ranks in zip(mine["op"], mine["ranks"], strict=True)
        if len(ranks) > 1
    )  # fmt: skip
    longest = 1.1 * one.step_time + more * oracles.MACHINE.inter.alpha
    assert 0.5 * one.step_time < report.step_time < longest
