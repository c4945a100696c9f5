"""How far `pl.predict` is from what plans take, beside a model that knows nothing of plans.

    python tests/benchmarks/bench_predict.py [WORD ...]    all plans, or those that have every word

Every plan of tests/pairwise.py, on a model wide enough that steps take tens of milliseconds, runs
on this machine and is replayed, one virtual device per rank, on `Cluster.local()`: that is what its
prediction claims to know. The null model is one rate for everything: the model's FLOPs over
ranks times the FLOP/s that the median plan reaches per rank. It is fitted to these very runs; the
prediction is not.

The calibration's passes stand between the runs, a seventh of these behind each: a machine that
others share changes its speed by a tenth from one minute to the next. Let nothing else run here.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import warnings
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import paralab as pl
from pairwise import Case, cover
from paralab.instruments import calibrate
from paralab.theory.needs import step_flops

WIDE = {"hidden": 128, "seq_len": 64}
STEPS = 6  # five of them count: costs are their medians
NOTABLE = 0.1


class Found(NamedTuple):
    """One plan: seconds a step, and the relative errors."""

    case: Case
    replayed: float
    predicted: float
    null: float

    @property
    def error(self) -> float:
        return self.predicted / self.replayed - 1

    @property
    def null_error(self) -> float:
        return self.null / self.replayed - 1


def trained(one: Case) -> pl.Report:
    model = one.model.replace(**WIDE)
    return pl.run(model, one.plan, steps=STEPS, clip_norm=one.clip_norm, progress=False)


def calibrated(cases: list[Case]) -> tuple[list[pl.Report], pl.Cluster]:
    """A run of each, and this machine, measured in passes between these runs."""
    left, reports = iter(cases), []
    share = -(-len(cases) // calibrate.PASSES)

    def some() -> None:
        reports.extend(map(trained, itertools.islice(left, share)))

    cluster = pl.Cluster.from_dict(calibrate.measured("cpu", between=some)["cluster"])
    rates = f"{cluster.flops / 1e9:.1f} GFLOP/s, {cluster.memory_bandwidth / 1e9:.1f} GB/s"
    took = ("op_overhead", "call_overhead", "wait_overhead", "wait_work")
    print(rates, *(f"{name} {getattr(cluster, name) * 1e6:.1f} us" for name in took), sep=", ")
    return reports, cluster


def hold(cases: list[Case], reports: list[pl.Report], cluster: pl.Cluster) -> list[Found]:
    """Replay and predict each."""
    times, rates = [], []
    for one, report in zip(cases, reports, strict=True):
        predicted = pl.predict(report.model, one.plan, cluster).step_time
        replayed = report.replay(cluster).step_time
        flops = step_flops(report.model, one.plan.global_batch) / one.plan.world_size
        times.append((one, replayed, predicted, flops))
        rates.append(flops / replayed)
        print(f"{replayed * 1e3:8.1f} ms replayed {predicted * 1e3:8.1f} ms predicted  {one.name}",
              flush=True)  # fmt: skip
    rate = statistics.median(rates)
    return [Found(*rest, flops / rate) for *rest, flops in times]


def median_error(errors: list[float]) -> float:
    return statistics.median(map(abs, errors))


def by_setting(found: list[Found]) -> dict[str, tuple[float, int]]:
    """{setting=value: (median signed error, plans)}: far from zero, something is left out."""
    errors = defaultdict(list)
    for one in found:
        for word in one.case.name.split():
            errors[word].append(one.error)
    return {word: (statistics.median(some), len(some)) for word, some in errors.items()}


def show(found: list[Found]) -> None:
    print(f"\n{'replayed':>9}{'predicted':>11}{'error':>8}{'null':>8}  ranks  plan")
    for one in sorted(found, key=lambda one: -abs(one.error)):
        print(f"{one.replayed * 1e3:6.1f} ms{one.predicted * 1e3:8.1f} ms{one.error:+8.0%}"
              f"{one.null_error:+8.0%}  {one.case.plan.world_size:5}  {one.case.name}")  # fmt: skip
    print(f"\nsettings whose plans are off by more than {NOTABLE:.0%} at the median:")
    for word, (error, count) in sorted(
        by_setting(found).items(), key=lambda item: -abs(item[1][0])
    ):
        if abs(error) > NOTABLE and count > 2:
            print(f"  {error:+.0%}  {word} ({count} plans)")


def measure(words: list[str] | None = None) -> list[dict]:
    cases = [one for one in cover().cases if all(word in one.name for word in words or [])]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of ZeRO-3 in a pipeline
        found = hold(cases, *calibrated(cases))
    show(found)
    ours, theirs = ([getattr(one, name) for one in found] for name in ("error", "null_error"))
    off = [abs(one.predicted - one.replayed) for one in found]
    null_off = [abs(one.null - one.replayed) for one in found]
    note = (f"median error of the step time over {len(found)} plans {median_error(ours):.1%}, "
            f"worst {max(map(abs, ours)):.0%}; the null model's {median_error(theirs):.1%} and "
            f"{max(map(abs, theirs)):.0%}; seconds are the median distance from the replayed step "
            "time, the ratio is that of the median errors")  # fmt: skip
    return [{"name": "prediction of composed plans", "peer": "null model: one rate for all plans",
             "paralab_s": statistics.median(off), "peer_s": statistics.median(null_off),
             "ratio": median_error(ours) / median_error(theirs), "note": note}]  # fmt: skip


if __name__ == "__main__":
    for r in measure(sys.argv[1:]):
        print("", r["name"], r["note"], sep="\n")
