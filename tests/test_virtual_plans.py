"""Every pairwise plan on the virtual device: what waits for what, and which memory is whose."""

from __future__ import annotations

from math import isfinite

import pytest

from pairwise import cover
from virtual_runs import virtual

pytestmark = pytest.mark.filterwarnings("ignore:zero_stage=3 with pp")


@pytest.mark.parametrize("one", cover().cases, ids=lambda one: one.name)
def test_virtual_plan_is_in_order(one):
    found = virtual(one.model, one.plan, steps=2, clip_norm=one.clip_norm)
    assert found.wrong == []
    assert all(isfinite(loss) for of_rank in found.losses for step in of_rank for loss in step)
    assert found.contexts == [{rank} for rank in range(one.plan.world_size)]
