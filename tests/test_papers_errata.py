"""The list of errata, and what presets of clusters say next to datasheets."""

import importlib
import inspect

import pytest

import paralab as pl
from paralab.theory import papers, zero


def test_errata_name_functions_that_say_so():
    table = papers.errata()
    assert len(table) >= 17 and not table.duplicated("where").any()
    assert (table[["printed", "follows", "why"]] != "").all(axis=None)
    for where, path in zip(table["where"], table["see"], strict=True):
        if path:
            module, _, name = path.partition(".")
            found = getattr(importlib.import_module(f"paralab.theory.{module}"), name)
            assert inspect.getdoc(found), where


def test_errata_follow():
    gib = 2**30
    assert 12 * 282.2e6 / gib == pytest.approx(3.15, abs=0.005)  # GPipe, table 1
    checkpoints = 2 * 8192 * 32 * 1024 * 125  # ZeRO, sec. 6.1
    assert (round(checkpoints / 1e9, 1), round(checkpoints / 16e9, 1)) == (67.1, 4.2)
    first = 32 / zero.bytes_per_device(1.0, 64, 1)  # ZeRO, table 2, billions
    assert [round(mp * first, 2) for mp in (2, 4, 8, 16)] == [15.28, 30.57, 61.13, 122.27]
    # ZeRO-Infinity: figure 2a's smallest model, and eq. 5 at 2 bytes per element
    assert round(16 * 10240**2 / gib, 2) == 1.56 and round(20 * 10240**2 / gib, 2) == 1.95
    assert round(2 * 2 * 1024 * (16 * 10240 + 2 * 128 * 1024) / gib, 2) == 1.62
    assert round(312e12 / 12.5e9 / 1e3, 2) == 24.96  # Ring Attention


# Datasheets: bytes of memory, bytes/s of memory, of NVLink and between nodes, TFLOP/s in fp32, with
# tf32, in bf16 and fp16 (a V100 has no products in two of these); and what a product in 16 bits
# reaches at best by stas00/ml-engineering's tables.
DATASHEETS = {
    "dgx-v100": (32e9, 900e9, 150e9, 12.5e9, (15.7, 15.7, 15.7, 125), 271.2 / 312 * 125),
    "dgx-a100": (80e9, 2039e9, 300e9, 25e9, (19.5, 156, 312, 312), 271.2),
    "dgx-h100": (80e9, 3350e9, 450e9, 50e9, (67, 494.5, 989, 989), 794.5),
}


@pytest.mark.parametrize("preset", DATASHEETS)
def test_presets_are_datasheets_and_published_measurements(preset):
    size, rate, inside, between, peaks, product = DATASHEETS[preset]
    cluster = pl.Cluster.preset(preset)
    assert cluster.memory == size
    rates = [cluster.rate(precision) / 1e12 for precision in ("fp32", "tf32", "bf16", "fp16")]
    share = product / peaks[-1]
    assert rates == pytest.approx([share * peak for peak in peaks])
    assert cluster.peak_flops == 1e12 * peaks[-1]
    # Calls reach 76 to 90 % of NVLink, whose packets have heads, and 192 of eight ports' 200 GB/s.
    assert 0.76 < cluster.intra.bandwidth / inside < 0.9
    assert cluster.inter.bandwidth == pytest.approx(0.96 * between)
    assert cluster.memory_bandwidth == cluster.operand_bandwidth == pytest.approx(0.65 * rate)
    assert not cluster.elements and cluster.fused  # nothing of a processor's is charged to a GPU
