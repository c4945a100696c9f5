"""2D, 2.5D and 3D as ops: the work and the bytes that an op lists."""

from __future__ import annotations

from typing import Any

import pytest

import paralab as pl
from paralab.interpret.memory import moments
from paralab.model import grid_ops
from paralab.model.build import build
from paralab.programs.compile import compiled
from paralab.programs.instructions import COMPUTE
from witness_memory import witness

MODEL = pl.ModelSpec(layers=2, hidden=32, heads=4, seq_len=12, vocab=260)
GRIDS: dict[str, dict[str, Any]] = {
    "2d": {"tp": 4, "tp_mode": "2d"},
    "2.5d": {"tp": 8, "tp_mode": "2.5d"},
    "2.5d flat": {"tp": 4, "tp_mode": "2.5d", "tp_depth": 1},
    "2.5d deep": {"tp": 2, "tp_mode": "2.5d", "tp_depth": 2},
    "3d": {"tp": 8, "tp_mode": "3d"},
}
ZB = {"pp": 2, "schedule": "zb-h1"}
GRID_OPS = (grid_ops.Linear2D, grid_ops.Linear3D, grid_ops.SplitNorm, grid_ops.Scatter)


def grid_plan(grid: str, **more: Any) -> pl.Plan:
    return pl.Plan(**{"microbatch_size": 4, "bucket_bytes": 20_000, **GRIDS[grid], **more})


@pytest.mark.parametrize("grid", GRIDS)
def test_the_ranks_share_the_products_of_one_device(grid):
    """Work of every kind of product, forward, of inputs and of weights, adds up to one device's."""
    plan = grid_plan(grid)
    whole = build(MODEL, pl.Plan(microbatch_size=4))
    part = build(MODEL, plan)
    for half in range(3):
        of_one, of_part = (
            [sum(op.work[half].products[kind] for op in model.ops) for kind in range(3)]
            for model in (whole, part)
        )
        assert of_part == pytest.approx([flops / plan.tp for flops in of_one])


@pytest.mark.parametrize(
    ("grid", "plan"),
    [
        ("2d", {}),
        ("2.5d", {"precision": "bf16"}),
        ("3d", {"precision": "bf16"}),
        ("3d", {"recompute": "full"}),
        ("2d", {**ZB, "microbatches": 2}),
        ("3d", {**ZB, "microbatches": 2}),
    ],
    ids=str,
)
def test_memory_inside_every_op_is_what_the_ledger_counts(monkeypatch, grid, plan):
    """Each op is an instruction here. On the first rank; others, whose turn in SUMMA is another,
    may stay below it.
    """
    monkeypatch.setattr(
        "paralab.programs.compile.message_cuts", lambda model: set(range(len(model.ops)))
    )
    plan, model = grid_plan(grid, **plan), MODEL.replace(hidden=64)
    program = compiled(model, plan)
    for rank in {0, 1, plan.world_size - 1}:
        _, *found = moments(program, plan.place(rank).pp)
        seen = witness(model, plan, rank)
        between = [{kind: n for (_, kind), n in then.items() if n} for *_, then in found]
        assert between == [{kind: n for kind, n in then.items() if n} for then in seen.between]
        checked = 0
        for position, ins in enumerate(program.codes[plan.place(rank).pp]):
            if ins.op in COMPUTE and isinstance(program.model.ops[ins.at[0]], GRID_OPS):
                said, was = found[position][0], seen.tops[position][0]
                assert was <= said if rank else was == said, (rank, ins)
                checked += 1
        assert checked > 20
