"""What is claimed in seconds, held where nothing else runs: a part of `make bench`.

    python -m pytest tests/benchmarks/claims.py

No test of `make test` asserts a time, so that it passes on a machine that is busy. What the clock
says is claimed here: how soon a slider, a search or an error answers, and that a replay is the wall
clock where every rank has a core of its own. A claim has two more tries (`AGAIN`).
"""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import pytest

import paralab as pl
from paralab import view
from paralab.interpret import walk
from paralab.interpret.predict import predict
from paralab.parallel.schedules import interleaved
from paralab.spec.cluster import available_cores
from paralab.theory.gaps import other_threads
from paralab.theory.ideal import schedule_of, stage_costs
from paralab.theory.pipeline import bubble_formula, simulate
from paralab.theory.schedule_check import validate
from widgets import CLUSTER

AGAIN = pytest.mark.flaky(reruns=2, reruns_delay=5)
pytestmark = [AGAIN, pytest.mark.timeout(600)]


def quickest(work: Callable[[], Any]) -> tuple[float, Any]:
    """Processor seconds of the quickest of three calls, and what the last one returned."""
    best, found = math.inf, None
    for _ in range(3):
        began = time.process_time()
        found = work()
        best = min(best, time.process_time() - began)
    return best, found


# ---- sliders -------------------------------------------------------------------------------------
WIDGETS = view.widgets
SLIDERS: dict[str, tuple[Callable[[], Any], list[dict], list[tuple[str, list]]]] = {
    "data parallel": (
        lambda: WIDGETS.data_parallel(cluster=CLUSTER), [{}], [("ranks", [2, 8, 4] * 3)],
    ),
    "pipeline": (
        lambda: WIDGETS.pipeline(),
        [{"pp": 8, "microbatches": 16, "virtual_stages": 3, "schedule": schedule}
         for schedule in ("gpipe", "1f1b", "zb-h2", "interleaved")],
        [("imbalance", [1.5, 2.0, 1.5, 2.0, 1.5])],
    ),
    "ZeRO": (
        lambda: WIDGETS.zero(), [{"stage": 3}, {"stage": 1, "ranks": 64, "microbatches": 8}],
        [("hidden", [192, 256, 384, 256, 192])],
    ),
    "1D tensor parallel": (
        lambda: WIDGETS.tensor1d(cluster=CLUSTER),
        [{"sequence": "whole"}, {"sequence": "parts"}],
        [("bandwidth", [10**8, 10**10, 10**8, 10**10, 10**8])],
    ),
    "tensor parallel": (
        lambda: WIDGETS.tensor(),
        [{"ranks": 8, "mode": "3d", "hidden": 512}, {"ranks": 64, "tokens": 8192}],
        [("tokens", [2048, 8192, 32768, 131072, 8192])],
    ),
    "offload": (
        lambda: WIDGETS.offload(cluster=CLUSTER), [{}, {"ranks": 4, "microbatches": 8}],
        [("bandwidth", []), ("microbatch_size", []), ("host", [])],
    ),
    "explorer": (
        lambda: pl.explore(cluster=CLUSTER), [{}, {"cluster": "dgx-a100", "nodes": 2}],
        [("dp", [4, 2] * 2), ("pp", [4, 2] * 2), ("tp", [2, 1] * 2), ("microbatches", [8, 4] * 2),
         ("zero_stage", [1, 0] * 2), ("schedule", ["gpipe", "1f1b"] * 2),
         ("recompute", ["full", "none"] * 2)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SLIDERS)
def test_a_slider_that_moves_is_answered_within_a_tenth_of_a_second(name):
    make, settings, moves = SLIDERS[name]
    bench = make()
    for some in settings:
        bench.set(**some)
        for knob, values in moves:
            took = []
            for value in values or [value for _, value in bench._declared[knob].options][:5]:
                began = time.thread_time()
                bench.knobs[knob].value = value
                took.append(time.thread_time() - began)
            print(f"{some} {knob}: {median(took) * 1e3:.0f} ms of processor time")
            assert median(took) <= 0.1 and bench.error is None, (some, knob, bench.error)
    bench.close()


# ---- importing -----------------------------------------------------------------------------------
def test_importing_paralab_takes_under_half_a_second():
    code = "import time; t = time.process_time(); import paralab; print(time.process_time() - t)"
    ran = [subprocess.check_output([sys.executable, "-c", code], text=True) for _ in range(3)]
    assert min(map(float, ran)) < 0.5


# ---- predictions ---------------------------------------------------------------------------------
def test_ten_thousand_plans_are_searched_in_a_second():
    model, cluster = pl.ModelSpec.preset("ptdp-39b"), pl.Cluster.preset("dgx-a100", nodes=8)
    seconds, found = quickest(
        lambda: pl.plan_search(model, cluster, global_batch=128, precision="bf16")
    )
    count = len(found.plans)
    print(f"{count:,} plans in {seconds:.2f} s of processor time")
    assert count >= 10_000 and seconds * 10_000 / count <= 1


def proved(*sizes: int) -> None:
    schedule = interleaved(*sizes)
    validate(schedule)
    simulate(schedule, forward=1.0, backward=2.0)


def outlined(model: pl.ModelSpec, plan: pl.Plan, cluster: pl.Cluster) -> pl.Report:
    return predict(model, plan, cluster, steps=1, detail="actions")


def items(name: str) -> list[walk.Item]:
    call = walk.Item(walk.CALL, 1.0, name, ("comm:dp", tuple(range(4))), 4)
    return [walk.Item(walk.WORK, 0.1), call, walk.Item(walk.WAIT, name=name)]


ITEMS = [item for name in map(str, range(834)) for item in items(name)]
SMALL = pl.ModelSpec(layers=4, hidden=32, heads=4, seq_len=16, vocab=256)
TRILLION = pl.ModelSpec.preset("ptdp-1t")
LARGE = pl.Plan(dp=6, tp=8, pp=64, microbatches=512, microbatch_size=1, recompute="full")
QUICK: dict[str, tuple[Callable[[], Any], float]] = {
    "outline of a laptop plan": (
        lambda: outlined(SMALL, pl.Plan(dp=2, tp=2, pp=2, microbatches=8), CLUSTER), 0.05
    ),
    "outline of a trillion parameters": (
        lambda: outlined(TRILLION, LARGE, pl.Cluster.preset("dgx-a100", nodes=384)), 4.0
    ),
    "dry run of a trillion parameters": (lambda: pl.dry_run(TRILLION, LARGE, rank=3071), 2.0),
    "a slider's schedule, proved and simulated": (lambda: proved(16, 64, 4), 0.05),
    "a large schedule, proved and simulated": (lambda: proved(64, 512, 4), 2.0),
    "ten thousand items, played": (lambda: walk.moments([ITEMS] * 4), 0.05),
}  # fmt: skip


@pytest.mark.parametrize("what", QUICK)
def test_what_has_no_ranks_is_quick(what):
    work, seconds = QUICK[what]
    assert quickest(work)[0] < seconds


# ---- instruments ---------------------------------------------------------------------------------
def test_writing_down_a_span_costs_microseconds():
    from paralab.instruments.recorder import Recorder

    recorder = Recorder(rank=0, world_size=1)
    began = time.thread_time()
    for _ in range(10_000):
        with recorder.span("forward"):
            pass
    each = (time.thread_time() - began) / 10_000
    assert each < 50e-6, f"{each * 1e6:.1f} us a span"  # some 4 us on an idle machine


def test_a_watched_step_costs_a_seventh_more_at_most():
    def ratios(group: Any) -> list[float]:
        import torch

        from paralab.instruments.ledger import Ledger
        from paralab.instruments.recorder import Recorder
        from paralab.interpret.train import Trainer

        torch.set_num_threads(1)  # all of the step on the thread that is timed
        recorder = Recorder(rank=0, world_size=1)
        spec = pl.ModelSpec(layers=4, hidden=256, heads=8, seq_len=128, vocab=256)
        ledger, found = Ledger(recorder), []
        with ledger:
            trainer = Trainer(group.context, spec, pl.Plan(microbatch_size=8), recorder=recorder)
            trainer.step(0)
        for step in range(9):
            start = time.thread_time()
            trainer.step(2 * step)
            between = time.thread_time()
            with ledger:
                trainer.step(2 * step + 1)
            found.append((time.thread_time() - between) / (between - start))
        return found

    found = pl.trace(ratios, ranks=1).results[0]
    assert statistics.median(found) < 1.15


# ---- runs ----------------------------------------------------------------------------------------
MODEL = pl.ModelSpec(layers=4, hidden=256, heads=4, seq_len=128, vocab=256)
own_cores = pytest.mark.skipif(available_cores() < 2, reason="two ranks need two cores")


def runs_of(plan: pl.Plan) -> list[pl.Report]:
    """Five: the median leaves out those next to which something else was busy."""
    return [pl.run(MODEL.replace(heads=8), plan, steps=6) for _ in range(5)]


@own_cores
def test_the_replay_of_an_overlapped_run_is_within_ten_per_cent_of_the_wall_clock():
    runs = runs_of(pl.Plan(dp=2, microbatch_size=8))
    assert all(len(run.collectives.query("step == 1 and rank == 0")) > 1 for run in runs)
    ratios = [run.replay().step_time / run.step_time for run in runs]
    assert 0.9 <= median(ratios) <= 1.1, ratios


@own_cores
def test_what_a_replay_leaves_out_is_written_down_with_the_step():
    """The processor time of the threads that carry messages: here it counts."""
    runs = runs_of(pl.Plan(dp=2, microbatch_size=4, bucket_bytes=2**20))
    assert all(other_threads(run) > 0.02 * run.step_time for run in runs)
    ratios = [(run.replay().step_time + other_threads(run)) / run.step_time for run in runs]
    assert 0.88 <= median(ratios) <= 1.1, ratios


@pytest.mark.parametrize(
    ("name", "pp", "microbatches"),
    [("gpipe", 4, 4), ("1f1b", 4, 8), ("interleaved", 4, 8), ("1f1b", 8, 8), ("gpipe", 8, 8)],
)
def test_a_replayed_bubble_is_the_formulas(run, name, pp, microbatches):
    v = 2 if name == "interleaved" else 1
    plan = pl.Plan(pp=pp, microbatches=microbatches, schedule=name, virtual_stages=v)
    links = CLUSTER.replace(intra=pl.Link(alpha=1e-4, bandwidth=5e9))
    formula = bubble_formula(name, pp, microbatches, v)
    replayed, simulated = [], []
    for _ in range(4):
        pair = (run(MODEL.replace(layers=v * pp), plan, steps=6, optimizer="sgd") for _ in "ab")
        first, other = pair
        replayed.append(first.replay(links).bubble)
        simulated.append(simulate(schedule_of(other), **stage_costs(other)).bubble_rate)
        found, expected = median(replayed), median(simulated)
        if abs(found - expected) <= 0.02 and abs(found - formula) <= 0.05:
            return
    pytest.fail(f"formula {formula}, replayed {replayed}, simulated {simulated}")


# ---- errors --------------------------------------------------------------------------------------
def goes_wrong(how: str) -> None:
    import os
    import signal

    import torch
    import torch.distributed as dist

    if dist.get_rank() == 2 and how == "raises":
        raise KeyError("a mistake")
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize("how", ["raises", "is killed"])
def test_an_error_comes_within_three_seconds(how):
    pl.launch(max, ranks=1, args=((1, 2),))  # the server that ranks are forked from is up
    for _ in range(20):
        began = time.monotonic()
        with pytest.raises(pl.RankError):
            pl.launch(goes_wrong, ranks=4, args=(how,))
        assert time.monotonic() - began < 3.0


def test_stop_ends_a_run_within_a_second():
    import threading

    stop, seen = threading.Event(), []

    def look(rank: int, done: int, total: int) -> None:
        if done >= 2 and not seen:
            seen.append(time.monotonic())
            stop.set()

    with pytest.raises(pl.Stopped):
        pl.run(MODEL, pl.Plan(dp=2), steps=5000, progress=look, stop=stop)
    assert time.monotonic() - seen[0] < 1.0
