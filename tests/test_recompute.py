"""Recomputing activations: what a forward leaves out is made again right before its backward.

That recomputed plans train what the reference trains is in test_programs_equal.py, and what they
keep in test_papers_korthikanti.py.
"""

from __future__ import annotations

from collections import Counter

import pytest

import paralab as pl
from paralab.programs.compile import compiled
from paralab.programs.instructions import BACKWARDS, COMPUTE, FORWARD, RECOMPUTE, keeps

SPEC = pl.ModelSpec(layers=4, hidden=40, heads=4, seq_len=24, vocab=257, dropout=0.2)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("kind", ["full", "selective"])
def test_a_forward_keeps_nothing_and_is_made_again_right_before_its_backward(kind, schedule):
    plan = pl.Plan(pp=2, microbatches=3, schedule=schedule, recompute=kind)
    again: Counter = Counter()
    for code in compiled(SPEC, plan).codes:
        row = [ins for ins in code if ins.op in COMPUTE]
        ranges = {ins.at for ins in row if ins.op == RECOMPUTE}
        for ins, after in zip(row, row[1:], strict=False):
            if ins.op == RECOMPUTE:
                again[ins.at] += 1
                assert (after.at, after.mb) == (ins.at, ins.mb) and after.op in BACKWARDS
            elif ins.op == FORWARD:
                assert keeps(ins) == (ins.at not in ranges)
    assert len(again) == SPEC.layers and set(again.values()) == {plan.microbatches}
