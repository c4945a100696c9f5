"""Every pairwise plan on the virtual device: what waits for what, and which memory is whose."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite

import pytest

from pairwise import Case, cover
from virtual_runs import Found, Job, virtuals

TOGETHER = 12  # plans with as many ranks that train in one launch

pytestmark = pytest.mark.filterwarnings("ignore:zero_stage=3 with pp")


@pytest.fixture(scope="module")
def trained() -> Callable[[Case], Found]:
    known: dict[str, Found] = {}

    def trained(one: Case) -> Found:
        if one.name not in known:
            others = (other for other in cover().cases if other.name not in {*known, one.name})
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


@pytest.mark.parametrize("one", cover().cases, ids=lambda one: one.name)
def test_virtual_plan_is_in_order(trained, one):
    found = trained(one)
    assert found.wrong == []
    assert all(isfinite(loss) for of_rank in found.losses for step in of_rank for loss in step)
    assert found.contexts == [{rank} for rank in range(one.plan.world_size)]
