"""Calibrating GPUs, on virtual devices (virtual_cuda.py) that are as fast as is stated here."""

from __future__ import annotations

import sys

import pytest
import torch

import paralab as pl
from paralab.comm import everyone
from paralab.instruments import calibrate, measure
from paralab.launch import launch_program
from paralab.spec.links import Reach
from patience import HANG_S
from virtual_runs import measured, on_virtual

STATED = pl.Cluster(
    devices_per_node=2, flops=2e10, half_rate_tokens=48, memory_bandwidth=4e9, op_overhead=5e-6,
    odd_products=0.25, products={"tf32": (9e10, 8e10, 7e10), "bf16": (4e11, 3e11, 2e11),
                                 "fp16": (3e11, 2e11, 1e11)},
    intra=pl.Link(alpha=9e-5, bandwidth=9e8), host=pl.Link(alpha=1e-5, bandwidth=5e8),
    collectives={op: pl.Link(alpha=(3 + i) * 1e-5, bandwidth=(2 + i) * 1e8)
                 for i, op in enumerate(measure.OPS)},
)  # fmt: skip
WANTED = measure.Workloads(
    models=((1, 32, 2, 16, 1),),
    precisions=("fp32", "tf32", "bf16", "fp16"),
    products=((32, 64, 192), (64, 64, 64), (128, 128, 256), (512, 96, 96)),
    messages=(2**10, 2**14, 2**17),
    tiers=(2**14, 2**16, 2**18),
    kernels=(2**10, 2**14, 2**18),
    odd=((4096, 96, 95),),
    ahead=2**10,
)


@pytest.fixture
def virtual_gpus(monkeypatch, tmp_path):
    def put(count: int) -> None:
        monkeypatch.setattr(calibrate, "gpus", lambda: (("virtual", 8 * 10**9),) * count)

    def launched(program, ranks, args, *, device, optimizers):
        assert device == "cuda" and not args
        return launch_program(
            measured, ranks, (program, STATED, WANTED), device="cpu", timeout=HANG_S
        )

    monkeypatch.setenv("PARALAB_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(sys.modules["paralab.launch"], "launch_program", launched)
    return put


def same(link: pl.Link, stated: pl.Link) -> bool:
    found, wanted = ([one.alpha, one.bandwidth] for one in (link, stated))
    return found == pytest.approx(wanted, rel=0.01)


def test_virtual_calibration_finds_what_is_stated(virtual_gpus):
    virtual_gpus(2)
    found = pl.Cluster.local(device="cuda")
    for name in ("flops", "half_rate_tokens", "memory_bandwidth", "op_overhead"):
        assert getattr(found, name) == pytest.approx(getattr(STATED, name), rel=0.01), name
    for precision, rates in STATED.products.items():
        assert found.products[precision] == pytest.approx(rates, rel=0.01)
    assert found.odd_products == pytest.approx(STATED.odd_products, rel=0.05)
    for op in measure.OPS:
        assert same(found.collectives[op], STATED.collectives.get(op, STATED.intra)), op
    assert same(found.host, STATED.host) and found.intra == found.collectives["send"]
    assert found.call_overhead == found.wait_overhead == 0.0  # posting takes a virtual host no time
    assert found.num_devices == 2 and found.memory == 8 * 10**9 and found.cores is None
    assert found.disk.bandwidth > 0 and found.host_bandwidth > 0  # this machine's own


def test_virtual_single_gpu_is_calibrated_without_links(virtual_gpus):
    virtual_gpus(1)
    found = pl.Cluster.local(device="cuda")
    assert not found.collectives and found.intra == found.host and same(found.host, STATED.host)
    assert found.flops == pytest.approx(STATED.flops, rel=0.01)
    assert pl.predict(pl.ModelSpec(layers=1, hidden=16, heads=2, seq_len=8)).cluster == found


@pytest.mark.parametrize("op", ["all_reduce", "send"])
def test_virtual_calls_begin_when_the_last_member_comes(op):
    def late(context):
        machine, context = on_virtual(context, cluster=STATED)
        group = everyone(context)
        machine.works(1.0 * context.rank, "late")
        measure.call(group, op, torch.zeros(50), None, end=1)
        clock = group.recorder.clock
        return clock.seconds(clock.mark())

    ends = launch_program(late, 2, (), device="cpu", timeout=HANG_S)
    filled = STATED.op_overhead + 200 / STATED.memory_bandwidth
    took = STATED.call(op, 200, Reach(2, 2, 1))[1]
    assert ends == pytest.approx([1.0 + filled + took] * 2, rel=1e-9)
