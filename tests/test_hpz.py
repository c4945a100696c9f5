"""hpZ of ZeRO++: backward gathers the parameters inside a node, and everything else stays ZeRO-3.

Wang+ 2023, arXiv:2306.10209, sec. 3.2: of the 3 M that ZeRO-3 sends between nodes, hpZ sends 2 M.
"""

from __future__ import annotations

from collections import Counter

import pytest

import paralab as pl
from paralab.interpret.traffic import rows
from paralab.programs.compile import compiled

SPEC = pl.ModelSpec(layers=3, hidden=48, heads=4, seq_len=24, vocab=260)
N, NEAR = 4, 2  # ranks that share the parameters, and those of them on one node
PLAN = pl.Plan(dp=N, zero_stage=3, secondary_shard=NEAR)


@pytest.mark.parametrize("microbatches", [1, 3])
def test_bytes_by_level_are_the_papers_volumes(microbatches):
    """What all ranks send together: forward M over all, backward M inside each node, gradients M
    over all; each times (group - 1) / group per rank.
    """
    program, sent = compiled(SPEC, PLAN.replace(microbatches=microbatches)), Counter()
    for rank in range(N):
        for row in rows(program, rank, lambda rank: rank // NEAR):
            sent[row.phase, row.level] += row.wire
    m = sum(program.model.item * unit.numel for units in program.units for unit in units)
    over_all = (N - 1) * m * microbatches
    assert sent == {
        ("param_gather", "inter"): over_all,
        ("param_gather", "intra"): N // NEAR * (NEAR - 1) * m * microbatches,
        ("grad_sync", "inter"): over_all,
    }


def test_neighbours_share_a_second_copy():
    plan = pl.Plan(dp=8, shard=4, tp=2, zero_stage=3, secondary_shard=2)
    assert plan.ranks("secondary", 0) == (0, 2) and plan.ranks("secondary", 7) == (5, 7)
    assert plan.ranks("shard", 7) == (1, 3, 5, 7)
