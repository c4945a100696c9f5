"""Predictions next to what A100s of others and one H100 took, and next to one rate for all."""

import itertools
import json
import statistics

import pytest

import paralab as pl
from benchmarks import bench_gpu
from benchmarks import bench_published as bench


def test_the_preset_comes_closer_to_papers_than_any_rate_for_everything():
    """Of PTD-P those of fewer than 35 stages: lab 11 shows how far off all ten rows are."""
    found = bench.papers()
    found["PTD-P, table 1"] = [run for run in found["PTD-P, table 1"] if run.plan.pp < 35]
    preset = bench.PRESET.replace(ports=None)
    bars = {"PTD-P, table 1": (0.04, 0.08), "Korthikanti+, table 5": (0.025, 0.04)}
    for name, (mean, worst) in bars.items():
        off = [abs(error) for error in bench.errors(found[name], preset)]
        rates = [statistics.mean(map(abs, bench.one_rate(found[name], r * 1e12)))
                 for r in range(100, 200, 5)]  # fmt: skip
        assert statistics.mean(off) <= mean and max(off) <= worst
        assert statistics.mean(off) < min(rates)


def test_the_preset_with_four_ports_predicts_what_was_measured_and_which_plan_is_faster():
    """Of the model of 18.4 B parameters every pair of plans that are 15 % apart."""
    mine, others = ([run for run in bench.rows("nodes") if run.model.hidden == hidden]
                    for hidden in (6144, 8192))  # fmt: skip
    times = [(run.seconds, bench.seconds(run, bench.PRESET)) for run in mine + others[::6]]
    off = [abs(predicted / measured - 1) for measured, predicted in times]
    assert statistics.mean(off) <= 0.1 and statistics.median(off) <= 0.07
    pairs = itertools.combinations(times[: len(mine)], 2)
    apart = [(a, b) for a, b in pairs if max(a[0], b[0]) > 1.15 * min(a[0], b[0])]
    assert len(apart) > 30
    assert statistics.mean((a[0] < b[0]) == (a[1] < b[1]) for a, b in apart) >= 0.9


# Milliseconds of forward and backward of one block of the 22B model: table 4; and how far off we
# are at most.
TABLE_4 = {
    ("none", False): (7.7 + 11.9, 0.03),
    ("none", True): (7.2 + 11.8, 0.035),
    ("selective", False): (7.7 + 13.2, 0.04),
    ("selective", True): (7.2 + 13.1, 0.045),
    ("full", False): (7.7 + 19.5, 0.045),
}


@pytest.mark.parametrize("recompute, sequence_parallel", TABLE_4)
def test_a_block_takes_what_korthikantis_table_4_says(recompute, sequence_parallel):
    at = bench.SETTINGS["22B"]
    how = {"recompute": recompute, "sequence_parallel": sequence_parallel}
    plan = pl.Plan(tp=at.tp, microbatch_size=at.micro, precision="fp16", **how)
    one = pl.Cluster.preset("dgx-a100")
    few, more = (
        pl.predict(at.model.replace(layers=n), plan, one, steps=1)
        .spans.query("rank == 0 and kind in ['forward', 'backward']")["end"]
        .max()
        for n in (3, 4)
    )
    milliseconds, off = TABLE_4[recompute, sequence_parallel]
    assert 1e3 * (more - few) == pytest.approx(milliseconds, rel=off)


# Of the rows of h100.json: the host's processor updates.
NOT_PREDICTED = {("25 M", "offload"), ("gpt2 padded", "offload")}


def test_what_an_h100_took_is_what_its_calibration_predicts():
    errors = {(r["name"].removeprefix("predicted: ").partition(", ")[::2]): r["ratio"] - 1
              for r in bench_gpu.stored()}  # fmt: skip
    assert set(errors) > NOT_PREDICTED and len(errors) == 19
    off = [abs(error) for key, error in errors.items() if key not in NOT_PREDICTED]
    assert statistics.median(off) < 0.1 and max(off) < 0.18


def test_what_an_h100_held_is_what_is_predicted_and_its_allocator_had_little_more():
    for one in json.loads(bench_gpu.STORED.read_text())["rows"]:
        model, plan = bench_gpu.of(one["model"], one["form"])
        cluster = pl.Cluster.preset("dgx-h100").replace(disk=pl.Link(alpha=0, bandwidth=1e9))
        peak = pl.predict(model, plan, cluster, steps=1).peak_memory
        assert peak == pytest.approx(one["ledger"], rel=5e-4, abs=2_000)
        assert 0 < one["allocated"] - one["ledger"] < 110e6
