"""Pairwise plans on the virtual device: what waits for what, and which memory is whose.

A few that have every value of every setting, and those that offload on two ranks, which are cheap
and have most to wait for; `make virtual` takes all.
"""

from __future__ import annotations

import os
from math import isfinite

import pytest

from pairwise import PLAIN, Case, case, cover, each_value
from together import Together, named
from virtual_runs import Found, Job, virtuals

ALL = cover().cases
OFFLOAD = [one for one in ALL if one.plan.tiers is not None and one.plan.world_size == 2]
SCALED = case(PLAIN | {"dp": 2, "zero_stage": 3, "microbatches": 3, "offload": "nvme",
                       "precision": "fp16", "clip_norm": 0.05})  # fmt: skip
FEW = list({one.name: one for one in (*each_value(), *OFFLOAD, SCALED)}.values())
PLANS = ALL if os.environ.get("PARALAB_VIRTUAL_PLANS") else FEW


def train(some: list[Case]) -> list[Found]:
    return virtuals(
        [Job(one.model, one.plan, steps=2, settings={"clip_norm": one.clip_norm}) for one in some]
    )


@pytest.fixture(scope="module")
def trained() -> Together:
    return Together(PLANS, train, most=12)


@named(PLANS)
def test_virtual_plan_is_in_order(trained, one):
    found = trained[one]
    assert found.wrong == []
    assert all(isfinite(loss) for of_rank in found.losses for step in of_rank for loss in step)
    assert found.contexts == [{rank} for rank in range(one.plan.world_size)]
