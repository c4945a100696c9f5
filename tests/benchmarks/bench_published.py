"""How far `pl.predict` is from iterations that others measured on 256 and 512 A100s.

    python tests/benchmarks/bench_published.py

Calibrated on one model, tested on the other (theory/published.py has the rows). Four figures of the
preset "dgx-a100" are fitted to the 15 runs of 18.4 B parameters, within what the hardware could
physically do: the FLOP/s of a GPU, the tokens with which it reaches half of them, and the
bandwidths within and between nodes. Then the 47 runs of
39.1 B are predicted. The null model is one rate for everything, model FLOPs per second and GPU, and
is calibrated on the same 15 runs.

The fit goes through the four figures in turn, over a grid, until none of them improves the mean
error of the logarithm.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

import paralab as pl
from paralab.theory.needs import step_flops
from paralab.theory.published import Run, vtrain_18b, vtrain_39b

PEAK = 312e12  # FLOP/s of an A100 in 16 bits, dense: its data sheet
# What may be: shares of the peak that large matrix products reach, tokens of a micro-batch with
# which they reach half of that, and shares of what the links are sold as.
SHARES = tuple(i / 20 for i in range(8, 21))
GRID = {"flops": SHARES, "half_rate_tokens": (0, 64, 128, 256, 512, 1024), "intra": SHARES,
        "inter": SHARES}  # fmt: skip


def cluster(run: Run) -> pl.Cluster:
    return pl.Cluster.preset("dgx-a100", nodes=run.plan.world_size // 8)


def seconds(run: Run, machine: pl.Cluster) -> float:
    return pl.predict(run.model, run.plan, machine, steps=1, detail="actions").step_time


def fitted(machine: pl.Cluster, values: dict[str, float]) -> pl.Cluster:
    links = {name: replace(link, bandwidth=values[name] * link.bandwidth)
             for name, link in (("intra", machine.intra), ("inter", machine.inter))}  # fmt: skip
    return replace(machine, flops=values["flops"] * PEAK,
                   half_rate_tokens=values["half_rate_tokens"], **links)  # fmt: skip


def errors(runs: Sequence[Run], values: dict[str, float] | None = None) -> list[float]:
    """Relative, of every run: above zero where the prediction is too slow."""
    machine = cluster(runs[0])
    machine = machine if values is None else fitted(machine, values)
    return [seconds(run, machine) / run.seconds - 1 for run in runs]


def calibrate(runs: Sequence[Run]) -> dict[str, float]:
    """The figures that fit these runs best."""

    def cost(values: dict[str, float]) -> float:
        return statistics.mean(abs(math.log1p(error)) for error in errors(runs, values))

    best = {"flops": 0.6, "half_rate_tokens": 0, "intra": 1.0, "inter": 1.0}
    least, before = cost(best), math.inf
    while least < before:
        before = least
        for name, values in GRID.items():
            for value in values:
                tried = {**best, name: value}
                if tried != best and (found := cost(tried)) < least:
                    least, best = found, tried
    return best


def null_errors(runs: Sequence[Run], calibration: Sequence[Run]) -> list[float]:
    """Of one rate for all plans: the median of what the calibration's runs reached."""

    def work(run: Run) -> float:  # FLOPs of one GPU
        return step_flops(run.model, run.plan.global_batch) / run.plan.world_size

    rate = statistics.median(work(run) / run.seconds for run in calibration)
    return [work(run) / rate / run.seconds - 1 for run in runs]


def said(found: Sequence[float]) -> str:
    median, worst = statistics.median(map(abs, found)), max(map(abs, found))
    return f"median {median:.1%}, worst {worst:.1%}"


def measure() -> list[dict]:
    small, large = vtrain_18b(), vtrain_39b()
    null = null_errors(large, small)
    values = calibrate(small)
    plain, ours = errors(large), errors(large, values)
    for run, error, unfitted, zero in zip(large, ours, plain, null, strict=True):
        plan = run.plan
        print(f"{run.seconds:7.2f} s  {error:+6.1%} {unfitted:+6.1%} {zero:+6.1%}  dp={plan.dp} "
              f"tp={plan.tp} pp={plan.pp} micro-batch {plan.microbatch_size}")  # fmt: skip
    print("errors: fitted, preset, null model")
    off = [abs(error) * run.seconds for error, run in zip(ours, large, strict=True)]
    null_off = [abs(error) * run.seconds for error, run in zip(null, large, strict=True)]
    parts = (f"{values['flops']:.0%} of the peak FLOP/s, half of it with "
             f"{values['half_rate_tokens']} tokens, {values['intra']:.0%} of NVLink, "
             f"{values['inter']:.0%} of InfiniBand")  # fmt: skip
    note = (f"39.1 B on 512 A100s, calibrated on 18.4 B on 256 ({parts}): {said(ours)}; the "
            f"preset as it is {said(plain)}; null model {said(null)}; on 18.4 B itself "
            f"{said(errors(small, values))}. Seconds are the median distance")  # fmt: skip
    return [{"name": "prediction of published iterations", "peer": "null model: one rate",
             "paralab_s": statistics.median(off), "peer_s": statistics.median(null_off),
             "ratio": statistics.median(map(abs, ours)) / statistics.median(map(abs, null)),
             "note": note}]  # fmt: skip


if __name__ == "__main__":
    for row in measure():
        print("", row["name"], row["note"], sep="\n")
