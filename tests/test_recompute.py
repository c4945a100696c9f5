"""Recomputing activations changes what is kept, and no bit of any gradient.

That recomputed plans train what the reference trains is in test_programs_equal.py.
"""

from __future__ import annotations

from collections import Counter

import pytest

import paralab as pl
from paralab.interpret import quick
from paralab.programs.compile import compiled
from paralab.programs.instructions import BACKWARDS, COMPUTE, FORWARD, RECOMPUTE, keeps

KINDS = ("full", "selective")
SPEC = pl.ModelSpec(layers=4, hidden=40, heads=4, seq_len=24, vocab=257, dropout=0.2)


# ---- the program ---------------------------------------------------------------------------------
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("kind", KINDS)
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


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("attention", ["explicit", "sdpa"])
def test_a_block_keeps_its_input_or_all_but_the_scores(attention, dropout, size):
    """In fp32, a mask's element one byte; the norms' own numbers are two per token and norm."""
    spec = SPEC.replace(attention=attention, dropout=dropout)
    x, tokens = size * spec.seq_len * spec.hidden, size * spec.seq_len

    def block(kind: str) -> int:
        plan = pl.Plan(microbatch_size=size, recompute=kind)
        less, more = (quick.most(spec.replace(layers=n), plan)["activations"] for n in (4, 5))
        return more - less

    assert block("full") == 4 * x
    assert block("selective") == 4 * (16 * x + 4 * tokens) + 2 * x * (dropout > 0)
    assert block("selective") < block("none")
