"""hpZ of ZeRO++: backward gathers the parameters inside a node, and everything else stays ZeRO-3.

Wang+ 2023, arXiv:2306.10209, sec. 3.2: of the 3 M that ZeRO-3 sends between nodes, hpZ sends 2 M.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest

import paralab as pl
from paralab.interpret.traffic import Row, rows
from paralab.programs.checks import check
from paralab.programs.compile import compiled

SPEC = pl.ModelSpec(layers=3, hidden=48, heads=4, seq_len=24, vocab=260)
N, NEAR = 4, 2  # ranks that share the parameters, and those of them on one node
PLAN = pl.Plan(dp=N, zero_stage=3, secondary_shard=NEAR)


def parameter_bytes(plan: pl.Plan) -> int:
    """M, padding included."""
    program = compiled(SPEC, plan)
    return sum(program.model.item * unit.numel for units in program.units for unit in units)


def all_rows(plan: pl.Plan) -> list[Row]:
    """What every rank sends in a step, on nodes of NEAR devices."""
    program = compiled(SPEC, plan)
    return [
        row
        for rank in range(plan.world_size)
        for row in rows(program, rank, lambda rank: rank // NEAR)
        if row.phase != "control"
    ]


def assert_volumes(found: Iterable[Row], m: int, microbatches: int = 1) -> None:
    """By level what all ranks send together: forward M over all, backward M inside each node,
    gradients M over all; each times (group - 1) / group per rank.
    """
    sent: Counter[tuple[str, str]] = Counter()
    for row in found:
        sent[row.phase, row.level] += row.wire
    over_all, nodes = (N - 1) * m * microbatches, N // NEAR
    assert sent == {
        ("param_gather", "inter"): over_all,
        ("param_gather", "intra"): nodes * (NEAR - 1) * m * microbatches,
        ("grad_sync", "inter"): over_all,
    }


# ---- what it sends and keeps ---------------------------------------------------------------------
@pytest.mark.parametrize("microbatches", [1, 3])
def test_bytes_by_level_are_the_papers_volumes(microbatches):
    plan = PLAN.replace(microbatches=microbatches)
    assert_volumes(all_rows(plan), parameter_bytes(plan), microbatches)


def test_a_copy_is_kept_from_the_first_forward_to_the_last_backward():
    plan = PLAN.replace(microbatches=2)
    program = compiled(SPEC, plan)
    check(program)
    (code,) = program.codes
    for unit in range(len(program.units[0])):
        second = ("second", unit, 0)
        made = [ins for ins in code if second in ins.writes]
        read = [ins for ins in code if second in ins.reads]
        assert [(ins.op, ins.mb) for ins in made] == [("COPY", 0)]
        assert [(ins.op, ins.lane, ins.mb) for ins in read] == [
            ("ALL_GATHER", "secondary", 0),
            ("ALL_GATHER", "secondary", 1),
        ]
        (freed,) = (position for position, ins in enumerate(code) if second in ins.frees)
        assert code[freed].op == "WAIT" and code[freed].mb == 1


# ---- what is asked for ---------------------------------------------------------------------------
def test_neighbours_share_a_second_copy():
    plan = pl.Plan(dp=8, shard=4, tp=2, zero_stage=3, secondary_shard=2)
    assert plan.ranks("secondary", 0) == (0, 2) and plan.ranks("secondary", 7) == (5, 7)
    assert plan.ranks("shard", 7) == (1, 3, 5, 7)
