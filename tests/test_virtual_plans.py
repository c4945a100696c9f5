"""Pairwise plans on the virtual device: what waits for what, and which memory is whose.

A few that have every value of every setting; `make virtual` takes all.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from math import isfinite

import pytest

from pairwise import Case, cover, each_value
from virtual_runs import Found, Job, virtuals

PLANS = cover().cases if os.environ.get("PARALAB_VIRTUAL_PLANS") else each_value()
TOGETHER = 12  # plans with as many ranks that train in one launch

pytestmark = pytest.mark.filterwarnings("ignore:zero_stage=3 with pp")


@pytest.fixture(scope="module")
def trained() -> Callable[[Case], Found]:
    known: dict[str, Found] = {}

    def trained(one: Case) -> Found:
        if one.name not in known:
            others = (other for other in PLANS if other.name not in {*known, one.name})
            ranks = one.plan.world_size
            alike = [one, *(other for other in others if other.plan.world_size == ranks)]
            alike = alike[:TOGETHER]
            jobs = [
                Job(this.model, this.plan, steps=2, settings={"clip_norm": this.clip_norm})
                for this in alike
            ]
            known.update(zip((this.name for this in alike), virtuals(jobs), strict=True))
        return known[one.name]

    return trained


@pytest.mark.parametrize("one", PLANS, ids=lambda one: one.name)
def test_virtual_plan_is_in_order(trained, one):
    found = trained(one)
    assert found.wrong == []
    assert all(isfinite(loss) for of_rank in found.losses for step in of_rank for loss in step)
    assert found.contexts == [{rank} for rank in range(one.plan.world_size)]
