"""Predictions next to iterations that others measured on A100s, and next to one rate for all."""

from __future__ import annotations

import itertools
import statistics

import pytest

from benchmarks import bench_published as bench
from paralab.theory.published import vtrain_18b, vtrain_39b


def test_the_rows_are_of_the_models_that_ptdp_names():
    for runs, billions, devices, batch in ((vtrain_18b(), 18.4, 256, 1024),
                                           (vtrain_39b(), 39.1, 512, 1536)):  # fmt: skip
        for run in runs:
            run.plan.validate(run.model)
            assert run.model.num_params / 1e9 == pytest.approx(billions, abs=0.05)
            assert (run.plan.world_size, run.plan.global_batch) == (devices, batch)


def test_the_preset_as_it_is_comes_closer_than_one_rate_that_was_fitted():
    small, large = vtrain_18b(), vtrain_39b()
    ours, null = bench.errors(large), bench.null_errors(large, small)
    median = [statistics.median(map(abs, found)) for found in (ours, null)]
    worst = [max(map(abs, found)) for found in (ours, null)]
    # The worst is 29.6 % too fast. Its run was measured with Megatron-LM, which begins to recompute
    # when a gradient has come; the program recomputes a block while it waits, as its runs do. And
    # products add up weights' gradients, without the passes over memory that autograd needs.
    assert median[0] <= 0.085 and worst[0] <= 0.30 and max(ours) <= 0.16
    assert median[0] < 0.75 * median[1] and worst[0] < 0.8 * worst[1]


def test_of_two_plans_the_faster_one_is_known_where_they_differ():
    runs = vtrain_39b()
    machine = bench.cluster(runs[0])
    times = [(run.seconds, bench.seconds(run, machine)) for run in runs]
    apart = [(a, b) for a, b in itertools.combinations(times, 2)
             if max(a[0], b[0]) > 1.15 * min(a[0], b[0])]  # fmt: skip
    right = [(a[0] < b[0]) == (a[1] < b[1]) for a, b in apart]
    # 43 of the 56 wrong pairs have one of three runs with tp=2 in them, which took 22 to 26 s and
    # are predicted to take 16 to 18. Of the other runs' pairs 97 % are right.
    assert len(apart) > 400 and statistics.mean(right) >= 0.89


def test_the_tables_slow_links_are_felt():
    """Sixteen tensor-parallel ranks need two nodes, and their messages the links between."""
    runs = {(r.plan.tp, r.plan.pp, r.plan.dp, r.plan.microbatch_size): r for r in vtrain_18b()}
    inside, across = runs[8, 1, 32, 2], runs[16, 1, 16, 2]
    machine = bench.cluster(inside)
    assert across.seconds > 1.9 * inside.seconds
    assert bench.seconds(across, machine) > 1.9 * bench.seconds(inside, machine)
