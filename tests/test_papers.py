"""How theory is reached; errata; presets of clusters next to datasheets."""

import importlib
import inspect

import pytest

import paralab as pl
from paralab.theory import papers
from processes import printed


def test_theory_is_reached_without_a_deep_import_and_brings_nothing_along():
    code = """
import sys, paralab as pl
heavy = lambda: {"numpy", "pandas", "torch", "plotly"} & sys.modules.keys()
pl.theory.zero.volume(3)
assert "theory" in pl.__all__ and "papers" in dir(pl.theory) and not heavy(), heavy()
pl.theory.pipeline.bubble_formula("1f1b", 4, 8), pl.theory.papers.errata()
assert heavy() <= {"numpy", "pandas"}, heavy()
"""
    printed(code)
    with pytest.raises(AttributeError, match="'paralab.theory' has no attribute 'pipelines'"):
        pl.theory.pipelines  # noqa: B018


def test_errata_name_functions_that_say_so():
    table = papers.errata()
    assert len(table) >= 17 and not table.duplicated("where").any()
    assert (table[["printed", "follows", "why"]] != "").all(axis=None)
    for where, path in zip(table["where"], table["see"], strict=True):
        if path:
            module, _, name = path.partition(".")
            found = getattr(importlib.import_module(f"paralab.theory.{module}"), name)
            assert inspect.getdoc(found), where


# Datasheets: bytes of memory, bytes/s of memory, of NVLink and between nodes, TFLOP/s in fp32, with
# tf32, in bf16 and fp16; and what a product in 16 bits reaches at best by stas00/ml-engineering's
# tables.
DATASHEETS = {
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
