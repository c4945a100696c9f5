"""A replay against the clock on the wall, where every rank has a core of its own to be honest on.

The two differ by what a replay leaves out on purpose: the processor time of the threads that carry
messages (a device of its own has an engine for that), and ranks that wait for one that was slow.
The first is written down beside every step; with enough computing per byte both are small.
"""

from __future__ import annotations

from statistics import median

import pytest

import paralab as pl
from paralab.cluster import available_cores
from paralab.theory.gaps import beside

MODEL = pl.ModelSpec(layers=4, hidden=256, heads=4, seq_len=128)


def runs_of(plan: pl.Plan) -> list[pl.Report]:
    """Five: the median leaves out those beside which something else was busy."""
    return [pl.run(MODEL, plan, steps=6) for _ in range(5)]


@pytest.mark.alone
@pytest.mark.skipif(available_cores() < 2, reason="two ranks need two cores of their own")
def test_replay_of_an_overlapped_run_is_within_ten_per_cent_of_the_wall_clock():
    runs = runs_of(pl.Plan(dp=2, microbatch_size=8))
    assert all(len(run.collectives.query("step == 1 and rank == 0")) > 1 for run in runs)
    ratios = [run.replay().step_time / run.step_time for run in runs]
    assert 0.9 <= median(ratios) <= 1.1, ratios


@pytest.mark.alone
@pytest.mark.skipif(available_cores() < 2, reason="two ranks need two cores of their own")
def test_what_the_replay_leaves_out_is_written_down_beside_the_step():
    # more bytes per computation: here the messages' own work counts
    runs = runs_of(pl.Plan(dp=2, microbatch_size=4, bucket_bytes=2**20))
    assert all(beside(run) > 0.02 * run.step_time for run in runs)
    ratios = [(run.replay().step_time + beside(run)) / run.step_time for run in runs]
    assert 0.88 <= median(ratios) <= 1.1, ratios
