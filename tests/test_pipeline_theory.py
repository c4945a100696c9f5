"""The pipeline simulator: the papers' tables and formulas, and timelines worked out by hand."""

from itertools import product

import numpy as np
import pytest

from paralab.parallel.schedules import SCHEDULES, build, gpipe, interleaved, naive, zb_h1, zb_h2
from paralab.report import metrics
from paralab.theory.ideal import bubbles
from paralab.theory.pipeline import bubble_formula, simulate
from refusals import refuses

# Zero Bubble (Qi+ 2023, arXiv:2401.10241). Table 6: measured milliseconds of TF, TB, TW, Tcomm.
# Table 5: bubble rates of 1F1B, ZB-H1, ZB-H2, 1F1B-I; the last has a layer per chunk, (l + 2)/p = 3
# chunks per rank for the models of 22 and of 46 layers.
#        p, m,   TF,    TB,    TW,   Tcomm, 1F1B,  ZB-H1,  ZB-H2,  1F1B-I
PAPER = [
    (8, 24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1585, 0.1083, 0.1055),
    (8, 32, 18.513, 18.086, 9.331, 0.626, 0.1985, 0.1242, 0.0837, 0.0818),
    (8, 64, 18.546, 18.097, 9.321, 0.762, 0.1240, 0.0674, 0.0444, 0.0443),
    (16, 48, 11.347, 11.248, 8.132, 0.377, 0.2552, 0.1397, 0.0672, 0.1104),
    (16, 64, 11.307, 11.254, 8.101, 0.379, 0.2082, 0.1088, 0.0516, 0.0852),
    (16, 128, 11.325, 11.308, 8.109, 0.378, 0.1251, 0.0576, 0.0266, 0.0445),
]


@pytest.mark.parametrize("row", PAPER, ids=lambda row: f"p{row[0]}-m{row[1]}")
def test_the_zero_bubble_papers_table_5_follows_from_its_table_6(row):
    p, m, tf, tb, tw, tcomm, *printed = row
    for name, rate in zip(("1f1b", "zb-h1", "zb-h2"), printed, strict=False):
        got = simulate(SCHEDULES[name](p, m), forward=tf, backward=tb, weight_grad=tw, comm=tcomm)
        assert round(got.bubble_rate, 4) == rate
    v = 3
    costs = {"forward": tf / v, "backward": tb / v, "weight_grad": tw / v}
    got = simulate(interleaved(p, m, v), **costs, comm=tcomm)
    # Errata: the paper leaves out a message in all but one of p micro-batches.
    work = tf + tb + tw
    idle = (p - 1) * work / v + (2 * (p * v - 1) - p) * tcomm
    assert round(idle / (idle + m * work), 4) == printed[3]
    assert 0.001 < got.bubble_rate - printed[3] < 0.0036
    if m == 24:
        assert round(got.bubble_rate, 4) == 0.1090


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_bubble_formulas_are_exact_where_stages_are_alike_and_links_free(p):
    for m, b in product((1, 2, 3, 4, 8, 17), (1.0, 2.0, 3.0)):  # whole numbers: no rounding
        for name in ("naive", "gpipe", "1f1b"):
            got = simulate(SCHEDULES[name](p, m), forward=1.0, backward=b).bubble_rate
            assert got == pytest.approx(bubble_formula(name, p, m, 1, 1.0, b), abs=1e-12)
            if name != "naive":
                assert got == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)
        for v in (1, 2, 3, 4):
            got = simulate(interleaved(p, m * p, v), forward=1.0, backward=b).bubble_rate
            want = bubble_formula("interleaved", p, m * p, v, v, v * b)
            assert got == pytest.approx(want, abs=1e-12)
            assert want == pytest.approx((p - 1) / (v * m * p + p - 1))


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_zero_bubble_formulas_are_exact_and_a_weight_half_hides_no_more_than_a_forward(p):
    costs = (1, 1, 1), (2, 2, 1), (3, 3, 2), (1, 0.8, 1.2), (0.5, 2, 1.2), (1, 2, 3), (1, 0.5, 1)
    sizes = product((1, 2, p, 2 * p - 1, 2 * p, 5 * p), costs)
    for (m, (f, b, w)), (name, k) in product(sizes, (("zb-h1", 1), ("zb-h2", 2))):
        got = simulate(SCHEDULES[name](p, m), forward=f, backward=b, weight_grad=w)
        want, full = bubble_formula(name, p, m, 1, f, b, w), m >= 2 * p - 1
        if full or k * w <= f + b:
            assert got.bubble_rate == pytest.approx(want, abs=1e-12)
        assert got.bubble_rate > want - 1e-12
        if full:  # Zero Bubble, table 2
            idle = max(0, (p - 1) * (f + b - k * min(f, w)))
            assert got.cost - m * (f + b + w) == pytest.approx(idle, abs=1e-9)


@pytest.mark.parametrize("name", SCHEDULES)
def test_one_stage_has_no_bubble_and_none_below_zero(name):
    for m, f in product((3, 4, 7, 9), (0.1, 0.3, 0.7)):
        share = bubble_formula(name, 1, m, F=f, B=0.2, W=0.3)
        lists = build(name, pp=1, microbatches=m)
        found = simulate(lists, forward=f, backward=0.23, weight_grad=0.07)
        assert [f"{x:.1%}" for x in (share, found.bubble_rate)] == ["0.0%"] * 2


def test_bubble_formula_says_what_it_knows():
    assert bubble_formula("1f1b", 4, 8) == pytest.approx(3 / 11)  # costs need not be given
    refuses("'zb-h2'", bubble_formula, "dualpipe", 4, 8)
    refuses("microbatches=6: .*groups of pp=4.*or 8", bubble_formula, "interleaved", 4, 6, 2)
    refuses("F='1': not a number", bubble_formula, "1f1b", 4, 8, F="1")


def test_gpipe_on_two_ranks_by_hand():
    got = simulate(gpipe(2, 2), forward=[1.0, 2.0], backward=[3.0, 1.0], weight_grad=[0.5, 1.0])
    names = [" ".join(map(str, row)) for row in got.schedule]
    assert names == ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"]
    assert got.start.tolist() == [0.0, 1.0, 7.0, 10.5, 1.0, 3.0, 5.0, 7.0]
    assert got.end.tolist() == [1.0, 2.0, 10.5, 14.0, 3.0, 5.0, 7.0, 9.0]
    assert (got.makespan, got.cost, got.busy) == (14.0, 14.0, [9.0, 8.0])
    assert got.bubble_rate == 1 - 17 / 28
    assert got.peak_live == [2, 2]


def test_comm_delays_what_goes_to_another_rank_and_nothing_else():
    got = simulate(naive(2, 1), forward=1, backward=1, comm=[0.25, 0.5])
    assert got.start.tolist() == [0.0, 3.75, 1.25, 2.25]  # 0F0 0B0, 1F0 1B0
    alone = interleaved(1, 2, 2)  # both stages on one rank
    free = simulate(alone, forward=1, backward=1)
    assert simulate(alone, forward=1, backward=1, comm=9.0).end.tolist() == free.end.tolist()


def test_the_bubble_is_that_of_the_report_which_has_no_formula_of_another_schedule():
    for schedule in (naive(4, 8), gpipe(4, 6), interleaved(2, 4, 2), zb_h1(3, 5), zb_h2(3, 7)):
        got = simulate(schedule, forward=1.0, backward=1.5, weight_grad=0.5, comm=0.25)
        report = got.report("mine")
        assert metrics.bubble(report) == pytest.approx(got.bubble_rate, abs=1e-12)
        assert report.clock == "predicted" and report.meta["function"] == "mine"
        assert len(report.spans) == len(got.start)
        free = simulate(schedule, forward=1.0, backward=1.5, weight_grad=0.5)
        table = bubbles(free.report())
        assert table["simulated"]["bubble"] == pytest.approx(free.bubble_rate)
        assert np.isnan(table["formula"]["bubble"])


def test_a_schedule_that_cannot_run_is_refused_not_simulated():
    crossed = [["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]]
    costs = {"forward": 1, "backward": 1}
    for lists, said in ((crossed, "deadlock"), ([["0F0"]], "missing")):
        refuses(said, simulate, lists, **costs)
    for function, pair, said in (
        (gpipe, ("0F1", "0B0"), "of rank 0, but there 0F1 starts together with 0B0; legal: .* 1B0"),
        (naive, ("1B0", "1F1"), "waits at 0B0, .*1B0 starts together with 1F1; .* 0F1 before 0B0"),
    ):
        refuses(said, simulate, function(2, 2), **costs, overlapped=1.0, pairs=[pair])


def test_costs_that_are_none_are_refused():
    for wrong, said in (
        ({"forward": -1.0}, "forward=-1.0"),
        ({"backward": float("nan")}, "backward"),
        ({"forward": [1.0]}, "1 number for 2 stages"),
        ({"comm": [0.0, -2.0]}, r"comm\[1\]"),
        ({"forward": "fast"}, "forward='fast'"),
    ):
        refuses(said, simulate, gpipe(2, 2), **{"forward": 1.0, "backward": 1.0} | wrong)
