"""A reader's own rows in the papers' tables; errata; presets of clusters next to datasheets."""

import importlib
import inspect

import pandas as pd
import pytest

import paralab as pl
from paralab.theory import needs, papers
from paralab.theory.papers import korthikanti, ptdp
from refusals import refuses

MODEL, PLAN = pl.ModelSpec.preset("ptdp-39b"), pl.Plan(dp=8, tp=8, microbatches=4)
NAN = float("nan")
RUN = {"model": MODEL, "plan": PLAN, "tflops": 140}
MEASURED = {"model": MODEL, "devices": 64, "batch": 64, "present": 10.0}
TABLES = {  # how a row is made, a reader's, the paper's own
    papers.ptdp_table1: (ptdp.Row, RUN, ptdp.TABLE_1),
    papers.ptdp_table2: (ptdp.Days, RUN, ptdp.TABLE_2),
    papers.korthikanti_table5: (korthikanti.Measured, MEASURED, korthikanti.TABLE_5),
}


@pytest.mark.parametrize("table", TABLES)
def test_a_readers_row_has_every_recomputed_column_and_empty_printed_ones(table):
    kind, row, _ = TABLES[table]
    for given in ([row], kind(**row), [kind(**row)]):
        assert table(rows=given).equals(table(rows=row))
    found = table(rows=[row, row])
    assert len(found) == 2 and list(found) == list(table())
    printed = [name for name in found if name.endswith(", printed") and name.startswith(
        ("parameters", "PFLOP/s", "peak", "days", "full", "throughput", "MFU", "HFU"))]  # fmt: skip
    assert printed and found[printed].isna().all(axis=None)
    assert found["devices"].tolist() == [64, 64]


@pytest.mark.parametrize("table", TABLES)
def test_the_papers_own_rows_given_as_rows_are_the_table(table):
    _, _, rows = TABLES[table]
    for given in (rows, [row._asdict() for row in rows]):
        pd.testing.assert_frame_equal(table(rows=given), table(), check_dtype=False)


def test_a_readers_row_is_computed_with_its_own_figures():
    row = papers.ptdp_table1(rows=RUN | {"params": 39.1, "peak": 1e15}).iloc[0]
    flops = needs.step_flops(MODEL, PLAN.global_batch)  # this plan recomputes nothing
    assert row["FLOPs per step"] == flops
    assert row["seconds per step"] == pytest.approx(flops / (64 * 140e12))
    assert row["peak (%), recomputed"] == pytest.approx(14.0)
    assert row["parameters (B), printed"] == 39.1
    days = papers.ptdp_table2(rows=[RUN, RUN | {"tokens": 600e9}])["days, recomputed"]
    assert days[1] == pytest.approx(2 * days[0])
    row = papers.korthikanti_table5(rows=MEASURED | {"full": 13.0, "gain": None}).iloc[0]
    assert row["throughput (%), recomputed"] == pytest.approx(30.0)


WRONG = [
    ([], r"rows=\[\]: there is no row; legal: a Row, a mapping of model, plan, tflops"),
    (140, "rows=140: not rows of this table"),
    ("39B", "rows='39B': not rows of this table"),
    ([RUN, 140], r"rows\[1\]=140: not a row of this table"),
    ({"model": MODEL, "plan": PLAN}, r"rows\[0\]=.*: tflops is missing; legal: a row with"),
    (RUN | {"tflop": 1}, r"rows\[0\].tflop=1: this table has no such column; legal: model, "),
    (RUN | {"tflops": 0}, r"rows\[0\].tflops=0: out of range; legal: a finite number above 0"),
    (RUN | {"params": "39"}, r"rows\[0\].params='39': not a number"),
    ([RUN, RUN | {"plan": MODEL}], r"rows\[1\].plan=ModelSpec.*: not a Plan; legal: a Plan"),
    (RUN | {"plan": PLAN.replace(tp=7)}, "heads=64: tp=7 "),
]


def test_a_row_that_cannot_be_is_refused():
    for rows, words in WRONG:
        refuses(words, papers.ptdp_table1, rows=rows)
    for wrong, words in (
        ({"devices": 1.5}, "not a whole number"),
        ({"present": NAN}, "not finite"),
    ):
        ((name, value),) = wrong.items()
        said = rf"rows\[0\].{name}={value}: {words}"
        refuses(said, papers.korthikanti_table5, rows=MEASURED | wrong)


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
