"""A reader's own rows in the papers' tables; and that the tables are reached from ``pl``."""

import pandas as pd
import pytest

import paralab as pl
from paralab.theory import needs, papers
from paralab.theory.papers import korthikanti, ptdp
from processes import printed

MODEL, PLAN = pl.ModelSpec.preset("ptdp-39b"), pl.Plan(dp=8, tp=8, microbatches=4)
RUN = {"model": MODEL, "plan": PLAN, "tflops": 140}
TABLES = {
    papers.ptdp_table1: (ptdp.Row, RUN),
    papers.ptdp_table2: (ptdp.Days, RUN),
    papers.korthikanti_table5: (
        korthikanti.Measured,
        {"model": MODEL, "devices": 64, "batch": 64, "present": 10.0},
    ),
}

OWN = {
    papers.ptdp_table1: ptdp.TABLE_1,
    papers.ptdp_table2: ptdp.TABLE_2,
    papers.korthikanti_table5: korthikanti.TABLE_5,
}


@pytest.mark.parametrize("table", TABLES)
def test_a_readers_row_has_every_recomputed_column_and_empty_printed_ones(table):
    kind, row = TABLES[table]
    for given in (row, [row], kind(**row), [kind(**row)]):
        assert table(rows=given).equals(table(rows=row))
    found = table(rows=[row, row])
    assert len(found) == 2 and list(found) == list(table())
    printed = [name for name in found if name.endswith(", printed") and name.startswith(
        ("parameters", "PFLOP/s", "peak", "days", "full", "throughput", "MFU", "HFU"))]  # fmt: skip
    assert printed and found[printed].isna().all(axis=None)
    assert found["devices"].tolist() == [64, 64]


@pytest.mark.parametrize("table", TABLES)
def test_the_papers_own_rows_given_as_rows_are_the_table(table):
    rows = OWN[table]
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
    (_, measured) = TABLES[papers.korthikanti_table5]
    row = papers.korthikanti_table5(rows=measured | {"full": 13.0, "gain": None}).iloc[0]
    assert row["throughput (%), recomputed"] == pytest.approx(30.0)


@pytest.mark.parametrize(
    "rows, words",
    [
        ([], r"rows=\[\]: there is no row; legal: a Row, a mapping of model, plan, tflops"),
        (140, "rows=140: not rows of this table"),
        (MODEL, "rows=ModelSpec.*: not rows of this table"),
        ("39B", "rows='39B': not rows of this table"),
        ([RUN, 140], r"rows\[1\]=140: not a row of this table"),
        ({"model": MODEL, "plan": PLAN}, r"rows\[0\]=.*: tflops is missing; legal: a row with"),
        (RUN | {"tflop": 1}, r"rows\[0\].tflop=1: this table has no such column; legal: model, "),
        (RUN | {"tflops": 0}, r"rows\[0\].tflops=0: out of range; legal: a finite number above 0"),
        (RUN | {"tflops": None}, r"rows\[0\].tflops=None: not a number"),
        (RUN | {"params": "39"}, r"rows\[0\].params='39': not a number"),
        ([RUN, RUN | {"plan": MODEL}], r"rows\[1\].plan=ModelSpec.*: not a Plan; legal: a Plan"),
        (RUN | {"plan": PLAN.replace(tp=7)}, "heads=64: tp=7 "),
    ],
    ids=range(12),
)
def test_a_row_that_cannot_be_is_refused(rows, words):
    with pytest.raises(ValueError, match=words):
        papers.ptdp_table1(rows=rows)


def test_a_row_of_measured_times_needs_whole_devices_and_a_time():
    (_, row) = TABLES[papers.korthikanti_table5]
    with pytest.raises(ValueError, match=r"rows\[0\].devices=1.5: not a whole number"):
        papers.korthikanti_table5(rows=row | {"devices": 1.5})
    with pytest.raises(ValueError, match=r"rows\[0\].present=nan: not finite"):
        papers.korthikanti_table5(rows=row | {"present": float("nan")})


def test_theory_is_reached_without_a_deep_import_and_brings_nothing_along():
    code = """
import sys
import paralab as pl
assert "theory" in pl.__all__ and "papers" in dir(pl.theory)
heavy = {"numpy", "pandas", "torch", "plotly"}
assert not heavy & sys.modules.keys()
pl.theory.zero.volume(3)
assert not heavy & sys.modules.keys()
pl.theory.pipeline.bubble_formula("1f1b", 4, 8)
pl.theory.papers.errata()
assert not {"torch", "plotly"} & sys.modules.keys()
"""
    printed(code)
    with pytest.raises(AttributeError, match="'paralab.theory' has no attribute 'pipelines'"):
        pl.theory.pipelines  # noqa: B018
