"""Predicting without the garbage collector: it is back afterwards, and has little to do."""

import gc
from functools import partial

import pytest

import paralab as pl
from paralab.theory.uncollected import uncollected
from stated import TIERS

MODEL = pl.ModelSpec(layers=4, hidden=64, heads=4, seq_len=32)


def test_the_collector_is_as_it_was():
    with pytest.raises(KeyError), uncollected():
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()
    gc.disable()
    try:
        with uncollected(), uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_search_leaves_hardly_any_cycles():
    search = partial(pl.plan_search, MODEL, TIERS, devices=8, global_batch=16)
    search()  # what is imported and remembered once
    gc.collect()
    with uncollected():
        search()
        assert gc.collect() < 2000  # objects, most of them closures
