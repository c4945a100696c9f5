"""Fragmentation on the storages of a real step: what is free, and what of it is in one piece."""

from __future__ import annotations

from collections import Counter

import pytest

import paralab as pl
from paralab.instruments import heap
from paralab.instruments.heap import Storage

MODEL = pl.ModelSpec(layers=4, hidden=64, heads=4, seq_len=32)
KB = 1024


def test_a_gap_between_what_stays_is_used_only_by_what_fits():
    found = [Storage(0, 9, 4 * KB, "activations"), Storage(1, 3, 2 * KB, "workspace"),
             Storage(2, 9, 4 * KB, "activations"), Storage(4, 9, 3 * KB, "workspace"),
             Storage(5, 9, 1 * KB, "workspace")]  # fmt: skip
    # 3 KB do not fit into the gap of 2 and go to the end; 1 KB does.
    space = heap.first_fit(found)
    assert (space.alive, space.extent) == (12 * KB, 13 * KB)
    apart = heap.first_fit(found, apart=[("activations",)])
    assert (apart.alive, apart.extent) == (12 * KB, 12 * KB)


@pytest.fixture(scope="module")
def found():
    return heap.storages(MODEL, pl.Plan(microbatch_size=2))


def test_a_step_gives_back_all_but_the_model_states_the_mask_and_the_loss(found):
    last = max(storage.died for storage in found)
    kept = Counter()
    for storage in found:
        kept[storage.category] += storage.bytes * (storage.died == last)
    psi, tensors = MODEL.num_params, len(MODEL.parameter_shapes())
    assert +kept == {
        "parameters": 4 * psi,
        "optimizer": 8 * psi + 4 * tensors,  # AdamW counts steps for each tensor
        "buffers": MODEL.seq_len**2,  # the causal mask
        "workspace": 4,  # the loss, which is read when the step is over
    }
    assert all(0 <= storage.born < storage.died for storage in found)


def test_alive_is_the_ledgers_peak(found, run):
    report = run(MODEL, pl.Plan(microbatch_size=2), steps=1)
    assert heap.first_fit(found).alive == pytest.approx(report.peak_memory, rel=0.001)


def test_mixed_lives_leave_space_that_no_large_request_can_use(found):
    mixed = heap.first_fit(found)
    apart = heap.first_fit(found, apart=[("activations",), ("gradients",)])
    assert mixed.hole < mixed.free / 2  # free bytes, in pieces
    assert apart.hole > 2 * mixed.hole
    assert mixed.alive == apart.alive <= mixed.extent <= apart.extent


def test_several_ranks_are_refused():
    with pytest.raises(ValueError, match="a plan of one rank"):
        heap.storages(MODEL, pl.Plan(dp=2))
