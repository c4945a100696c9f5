"""Contiguous stages, each with a block, the most expensive of them as cheap as can be."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import paralab as pl
from paralab.parallel.partition import partition
from paralab.theory.flops import block_flops, head_flops


def model(layers: int, vocab: int = 256) -> pl.ModelSpec:
    return pl.ModelSpec(layers=layers, hidden=64, heads=4, seq_len=32, vocab=vocab)


def costs_of(spec: pl.ModelSpec, stages: list[tuple[str, ...]]) -> list[float]:
    """Of matrix products alone: what the ops count besides is the same in every block."""
    cost = {"embedding": 0, "head": head_flops(spec, 1)}
    return [sum(cost.get(name, block_flops(spec, 1)) for name in stage) for stage in stages]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from([256, 3000, 20_000]))
def test_the_dearest_stage_is_as_cheap_as_any_cut_can_make_it(layers, stages, vocab):
    spec = model(layers, vocab)
    if stages > layers:
        with pytest.raises(ValueError, match=f"stages={stages}: .*; legal: 1 to {layers}"):
            partition(spec, stages)
        return
    found = partition(spec, stages)
    blocks = [f"blocks.{i}" for i in range(layers)]
    assert [name for stage in found for name in stage] == ["embedding", *blocks, "head"]
    assert all(any(name in blocks for name in stage) for stage in found)
    best = float("inf")
    for ends in itertools.combinations(range(1, layers), stages - 1):
        cut = [blocks[a:b] for a, b in itertools.pairwise((0, *ends, layers))]
        cut[0], cut[-1] = ["embedding", *cut[0]], [*cut[-1], "head"]
        best = min(best, max(costs_of(spec, cut)))
    assert max(costs_of(spec, found)) == pytest.approx(best, rel=1e-12)


def test_equal_blocks_are_spread_equally_and_the_rest_goes_to_later_stages():
    assert [len(stage) for stage in partition(model(8), 4)] == [3, 2, 2, 3]
    counts = [sum(n.startswith("blocks") for n in stage) for stage in partition(model(7), 3)]
    assert counts == [2, 3, 2]  # the head sits on the last one
