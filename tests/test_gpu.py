"""The same code on CUDA. Runs where a GPU is present."""

from __future__ import annotations

import os

import pytest

import paralab as pl
from equality import worst


def num_gpus() -> int:
    if not any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg"))):  # asking torch takes seconds
        return 0
    import torch

    return torch.cuda.device_count()


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        num_gpus() == 0, reason="needs an NVIDIA GPU; the CPU tests cover the same code"
    ),
]
MODEL = pl.ModelSpec(layers=2, hidden=64, heads=4, seq_len=32)


@pytest.mark.parametrize("dp", [1, 2])
def test_gpu_gradients_equal_the_cpus(run, dp):
    """With one GPU and two ranks: gloo through pinned buffers. With two: NCCL."""
    settings = {"steps": 2, "optimizer": "sgd", "keep_state": True}
    on_cpu = run(MODEL, pl.Plan(microbatches=dp), device="cpu", **settings)
    on_gpu = run(MODEL, pl.Plan(dp=dp), device="cuda", **settings)
    for what in ("gradients", "weights"):
        gap, name = worst(getattr(on_cpu, what), getattr(on_gpu, what))
        assert gap < 1e-3, name
    assert on_gpu.meta["backend"] == ("nccl" if num_gpus() >= dp else "gloo")


def test_gpu_spans_are_device_time_in_order(run):
    report = run(MODEL, pl.Plan(), steps=4, device="cuda")
    spans = report.spans.query("kind in ('forward', 'backward', 'optimizer') and step > 0")
    assert (spans.cost > 0).all()
    ordered = spans.sort_values("id")
    assert (ordered.start.diff().dropna() >= 0).all()
    steps = report.steps.query("step > 0")
    assert (
        spans.start.min() >= steps.start.min() - 1e-4 and spans.end.max() <= steps.end.max() + 1e-4
    )


@pytest.mark.skipif(
    num_gpus() >= 2, reason="two ranks have a GPU each here: NCCL, nothing to stage"
)
def test_ranks_that_share_a_gpu_record_their_copies(run):
    report = run(MODEL, pl.Plan(dp=2), steps=2, device="cuda")
    copies = report.spans.query("kind == 'copy'")
    assert set(copies.lane) == {"d2h", "h2d"} and (copies.end > copies.start).all()


@pytest.mark.parametrize("place", ["cpu", "nvme"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gpu_offload_is_the_same_training(run, stage, place):
    """AdamW on the host's processor, and on the device: other kernels, nearly the same bits."""
    settings = {"steps": 3, "keep_state": True, "device": "cuda"}
    plan = pl.Plan(zero_stage=stage, offload=place, microbatches=2)
    away, here = run(MODEL, plan, **settings), run(MODEL, plan.replace(offload=None), **settings)
    for what in ("gradients", "weights"):
        gap, name = worst(getattr(here, what), getattr(away, what))
        assert gap < 1e-3, name


def test_gpu_copies_are_lanes_of_device_time_and_some_hide_behind_compute(run):
    model = pl.ModelSpec(layers=8, hidden=1024, heads=16, seq_len=512)
    plan = pl.Plan(zero_stage=3, offload="cpu", microbatch_size=8, prefetch=2, recompute="full")
    report = run(model, plan, steps=3, device="cuda")
    copies = report.copies
    assert set(copies["lane"]) == {"h2d", "d2h"} and (copies["end"] > copies["start"]).all()
    rates = copies["bytes"].sum() / (copies["end"] - copies["start"]).sum()
    assert rates > 2e9  # page-locked memory; pageable copies block the host and are slower
    assert report.summary()["value"]["of the copies hidden behind compute"] > 20


def test_gpu_offload_trains_what_a_limit_refuses_without(run):
    model = pl.ModelSpec(layers=12, hidden=512, heads=8, seq_len=64)
    limit = 6 * 4 * model.num_params // 4
    with pytest.raises(pl.OutOfMemory):
        run(model, pl.Plan(), steps=1, device="cuda", memory_limit=limit)
    plan = pl.Plan(zero_stage=3, offload="cpu", recompute="full")
    assert run(model, plan, steps=1, device="cuda", memory_limit=limit).peak_memory <= limit
