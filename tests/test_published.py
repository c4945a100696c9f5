"""Predictions next to iterations that others measured on A100s, and next to one rate for all."""

from __future__ import annotations

import itertools
import statistics

import pytest

from benchmarks import bench_published as bench


def size(hidden: int) -> list:
    return [run for run in bench.rows("nodes") if run.model.hidden == hidden]


def test_the_rows_are_of_the_models_that_ptdp_names():
    for hidden, billions, devices, batch in (
        (3072, 3.6, 64, 512),
        (6144, 18.4, 256, 1024),
        (8192, 39.1, 512, 1536),
    ):
        for run in size(hidden):
            run.plan.validate(run.model)
            assert run.model.num_params / 1e9 == pytest.approx(billions, abs=0.05)
            assert (run.plan.world_size, run.plan.global_batch) == (devices, batch)
    assert len(bench.rows("node")) == 300 and len(bench.rows("nodes")) == 88


def test_the_preset_comes_closer_to_papers_than_any_rate_for_everything():
    found = bench.papers()
    preset = bench.PRESET.replace(ports=None)
    bars = {"PTD-P, table 1": (0.04, 0.1), "Korthikanti+, table 5": (0.08, 0.15)}
    for name, (mean, worst) in bars.items():
        off = [abs(error) for error in bench.errors(found[name], preset)]
        rates = [statistics.mean(map(abs, bench.one_rate(found[name], r * 1e12)))
                 for r in range(100, 200, 5)]  # fmt: skip
        assert statistics.mean(off) <= mean and max(off) <= worst
        assert statistics.mean(off) < min(rates)


def test_the_preset_with_four_ports_predicts_what_was_measured_on_them():
    off = [abs(error) for error in bench.errors(size(6144) + size(8192)[::3], bench.PRESET)]
    assert statistics.mean(off) <= 0.1 and statistics.median(off) <= 0.07


def test_of_two_plans_the_faster_one_is_known_where_they_differ():
    runs = size(6144)
    times = [(run.seconds, bench.seconds(run, bench.PRESET)) for run in runs]
    apart = [
        (a, b)
        for a, b in itertools.combinations(times, 2)
        if max(a[0], b[0]) > 1.15 * min(a[0], b[0])
    ]
    assert len(apart) > 30
    assert statistics.mean((a[0] < b[0]) == (a[1] < b[1]) for a, b in apart) >= 0.9


def test_the_slow_ports_of_tensor_parallelism_across_nodes_are_felt_as_measured():
    """Sixteen tensor-parallel ranks need two nodes."""
    runs = {(r.plan.tp, r.plan.pp, r.plan.dp, r.plan.microbatch_size): r for r in size(6144)}
    inside, across = runs[8, 1, 32, 2], runs[16, 1, 16, 2]
    measured = across.seconds / inside.seconds  # 1.95
    predicted = bench.seconds(across, bench.PRESET) / bench.seconds(inside, bench.PRESET)
    assert predicted == pytest.approx(measured, rel=0.2)
