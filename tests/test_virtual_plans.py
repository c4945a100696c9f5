"""Pairwise plans on the virtual device: what waits for what, and which memory is whose.

A few that have every value of every setting, and those that offload on two ranks, which are cheap
and have most to wait for; `make virtual` takes all.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from math import isfinite

import pytest

from pairwise import PLAIN, Case, case, cover, each_value
from virtual_runs import Found, Job, virtuals

ALL = cover().cases
OFFLOAD = [one for one in ALL if one.plan.tiers is not None and one.plan.world_size == 2]
SCALED = case(PLAIN | {"dp": 2, "zero_stage": 3, "microbatches": 3, "offload": "nvme",
                       "precision": "fp16", "clip_norm": 0.05})  # fmt: skip
FEW = list({one.name: one for one in (*each_value(), *OFFLOAD, SCALED)}.values())
PLANS = ALL if os.environ.get("PARALAB_VIRTUAL_PLANS") else FEW
TOGETHER = 12  # plans with as many ranks that train in one launch


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
