"""Tables about pipelines and layers, and the list of errata: as printed, and what follows."""

from __future__ import annotations

import inspect
from fractions import Fraction

import pytest

import paralab as pl
from paralab.parallel.schedules import SCHEDULES as MADE
from paralab.theory import experts, papers, pipeline_costs, tensor_costs
from paralab.theory.pipeline import bubble_formula, simulate
from paralab.theory.pipeline_costs import idle_seconds, peak_activations


# ---- Zero Bubble: Qi+ 2023, arXiv:2401.10241 ----
def test_zero_bubbles_table_5_to_four_decimals():
    table = papers.zero_bubble_table5()
    for name in ("1F1B", "ZB-H1", "ZB-H2"):
        assert (table[f"{name}, recomputed"].round(4) == table[f"{name}, printed"]).all()
    gap = table["1F1B-I, recomputed"] - table["1F1B-I, printed"]
    assert gap.abs().max() < 0.004
    # ZB-1p, found by search under 1F1B's memory, is no better than ZB-H1
    assert (table["ZB-1p, printed"] == table["ZB-H1, printed"]).all()


# ---- GPipe: Huang+ 2018, arXiv:1811.06965 ----
def test_gpipes_table_2_where_it_is_a_pipeline_of_equal_stages():
    table = papers.gpipe_table2()
    assert len(table) == 18
    rows = table.query("model == 'Transformer' and `micro-batches` == 32")
    assert rows["throughput, recomputed"].round(4).tolist() == [1.9394, 3.6571, 6.5641]
    assert rows["off by (%)"].abs().max() < 10
    # at m = 4 it is printed faster than any pipeline with so many micro-batches
    rows = table.query("model == 'Transformer' and `micro-batches` == 4")
    assert (rows["throughput, printed"] > rows["throughput, recomputed"]).all()


# ---- what schedules cost by their sources ----
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zb-h2"])
@pytest.mark.parametrize("p", [2, 4, 8])
def test_idle_time_and_activations_are_what_the_simulator_finds(name, p):
    m, times = 3 * p, {"F": 2.0, "B": 2.0, "W": 1.0}
    got = simulate(MADE[name](p, m), forward=2.0, backward=2.0, weight_grad=1.0)
    idle = idle_seconds(name, p, **times)
    assert got.cost - m * 5.0 == pytest.approx(idle)
    assert bubble_formula(name, p, m, **times) == pytest.approx(idle / (idle + 5 * m))
    kept = [peak_activations(name, p, m, rank=r) for r in range(p)]
    assert max(got.peak_live) == max(kept)
    if name == "1f1b":
        assert got.peak_live == kept
    if name.startswith("zb"):  # a micro-batch waiting for its weight half lives too
        whole = [sum(pipeline_costs.zero_bubble_activations(name, p, r)) for r in range(p)]
        assert max(got.peak_live) == max(whole)


@pytest.mark.parametrize("p, v", [(2, 2), (4, 2), (4, 3), (8, 4)])
def test_interleaving_divides_the_bubble_and_the_first_stage_keeps_more(p, v):
    m = 4 * p
    got = simulate(MADE["interleaved"](p, m, v), forward=1 / v, backward=2 / v)
    assert got.cost - 3 * m == pytest.approx(
        idle_seconds("interleaved", p, B=1, W=1, virtual_stages=v)
    )
    # Korthikanti+, sec. 4.2.3: L (1 + (p-1)/(p v)) blocks of L/(p v) each
    expected = peak_activations("interleaved", p, m, virtual_stages=v) * v
    assert got.peak_live[0] == expected


def test_sources_of_the_v_shaped_schedules():
    # sail-sg/zero-bubble-pipeline-parallelism, README: B, B/3, 0, 0, B/2, 2B/3 at F = B = W
    of_1f1b = {"zb-h1": Fraction(1, 3), "zb-h2": 0, "zb-v": 0, "v-half": Fraction(1, 2),
               "v-min": Fraction(2, 3)}  # fmt: skip
    for name, part in of_1f1b.items():
        assert idle_seconds(name, 8) == pytest.approx(float(part) * idle_seconds("1f1b", 8))
    kept = [peak_activations(name, 6, 32) for name in ("zb-v", "v-half", "v-min")]
    assert kept == [6, 3, 2]
    with pytest.raises(ValueError, match=r"zb-v=\(1.0, 2.0, 1.0\): stated for F = B = W only"):
        idle_seconds("zb-v", 8, B=2.0)


def test_dualpipe_and_zb1p_as_deepseek_writes_them():
    # deepseek-ai/DualPipe, README, where B is the whole backward:
    # 1F1B (PP-1)(F+B), ZB1P (PP-1)(F+B-2W), DualPipe (PP/2-1)(F&B+B-3W), PP+1 and 2 copies
    pp, f, whole, w, both = 16, 1.0, 2.5, 0.75, 3.0
    times = {"F": f, "B": whole - w, "W": w}
    assert idle_seconds("1f1b", pp, **times) == (pp - 1) * (f + whole)
    assert idle_seconds("zb-h1", pp, **times) == (pp - 1) * (f + whole - 2 * w)
    for name in ("dualpipe", "dualpipev"):
        found = idle_seconds(name, pp, together=both, **times)
        assert found == (pp / 2 - 1) * (both + whole - 3 * w)
        assert peak_activations(name, pp, 99) == pp + 1
        assert pipeline_costs.parameter_copies(name) == 2
    assert pipeline_costs.parameter_copies("zb-h2") == 1
    with pytest.raises(ValueError, match="pp=5.*even"):
        idle_seconds("dualpipe", 5)


def test_zero_bubble_activations_by_worker():
    # Zero Bubble, table 1, workers from 1: (p-i+1) M_B + (i-1) M_W; (2p-2i+1) M_B + (2i-2) M_W
    found = [pipeline_costs.zero_bubble_activations("zb-h1", 4, r) for r in range(4)]
    assert found == [(4, 0), (3, 1), (2, 2), (1, 3)]
    found = [pipeline_costs.zero_bubble_activations("zb-h2", 4, r) for r in range(4)]
    assert found == [(7, 0), (5, 2), (3, 4), (1, 6)]


def test_the_table_of_schedules_is_the_formulas():
    table = papers.schedule_costs(8, 32, 2).set_index("schedule")
    assert tuple(table.index) == pipeline_costs.SCHEDULES
    assert table.loc["1f1b"].tolist() == [21.0, 7 / 32, 8.0, 1]
    assert table.loc["interleaved", "bubble over ideal"] == 7 / 64
    with pytest.raises(ValueError, match="name='breadth-first'"):
        idle_seconds("breadth-first", 4)


# ---- layers ----
def test_colossal_costs_are_the_printed_and_the_true_ones():
    table = papers.colossal_costs(64).set_index("mode")
    assert list(table.index) == ["1d", "2d", "2.5d", "3d"]
    for mode in table.index:
        assert table.loc[mode, "bandwidth, printed"] == float(tensor_costs.as_printed(mode, 64))
        assert table.loc[mode, "bandwidth, recomputed"] == float(tensor_costs.in_one_unit(mode, 64))
    assert table["bandwidth, printed"].tolist() == [126 / 64, 6 * 7 / 8, 3 * 3 * 5 / 16, 18 / 64]
    assert papers.colossal_costs(8)["mode"].tolist() == ["1d", "2.5d", "3d"]


def test_switch_table_1():
    # Fedus+ 2021, arXiv:2101.03961, table 1
    table = papers.switch_table1()
    best = table.loc[table["hours to -1.50, printed"].idxmin()]
    assert (best["model"], best["capacity factor"]) == ("Switch-Base", 1.0)
    assert best["speed over T5-Large"] == pytest.approx(131.1 / 62.8)
    switch = table[table["model"] == "Switch-Base"].sort_values("capacity factor")
    assert switch["examples/s, printed"].is_monotonic_decreasing  # more room, more work
    assert switch["examples/s over T5-Base"].tolist() == [0.625, 910 / 1600, 860 / 1600]


def test_expert_capacity():
    # Switch Transformers, eq. 3, and its figure 3: 6 tokens, 3 experts, room for 2 and for 3
    assert experts.expert_capacity(6, 3) == 2
    assert experts.expert_capacity(6, 3, 1.5) == 3
    assert experts.expert_capacity(100, 8, 1.1) == Fraction(55, 4)
    assert experts.dropped([3, 2, 1]) == 1 and experts.dropped([3, 2, 1], 1.5) == 0
    assert experts.dropped([0, 0]) == 0
    with pytest.raises(ValueError, match="factor=0"):
        experts.expert_capacity(6, 3, 0)


# ---- hardware ----
@pytest.mark.parametrize("preset, device", [("dgx-a100", "A100-80GB"), ("dgx-h100", "H100-SXM")])
def test_presets_are_the_datasheets_at_stated_shares(preset, device):
    row, cluster = papers.devices().set_index("device").loc[device], pl.Cluster.preset(preset)
    assert cluster.memory == row["memory (GB)"] * 10**9
    assert cluster.intra.bandwidth == row["inside a node (GB/s)"] * 1e9
    assert cluster.inter.bandwidth == row["between nodes (GB/s)"] * 1e9
    assert cluster.memory_bandwidth == pytest.approx(0.8e9 * row["memory (GB/s)"])
    # 62 % of peak: above what PTD-P's whole steps reach, below what a single product does
    assert cluster.flops == pytest.approx(0.62e12 * row["peak (TFLOP/s)"])
    assert cluster.flops < 1e12 * row["matrix product (TFLOP/s)"]


def test_matrix_products_reach_80_to_87_percent():
    reached = papers.devices().set_index("device")["reached (%)"].round(1)
    assert reached["A100-80GB"] == 86.9 and reached["H100-SXM"] == 80.3


# ---- errata ----
def test_errata_name_functions_that_say_so():
    import importlib

    table = papers.errata()
    assert not table.duplicated("where").any() and (table[["printed", "follows", "why"]] != "").all(
        axis=None
    )
    for where, path in zip(table["where"], table["see"], strict=True):
        if not path:
            continue
        module, _, name = path.partition(".")
        found = importlib.import_module(f"paralab.theory.{module}")
        found = getattr(found, name) if name else found
        assert inspect.getdoc(found), where
    assert len(table) >= 17


def test_every_maker_gives_a_table_with_numbers():
    makers = [name for name in papers.__all__ if name != "ptdp_models"]
    assert len(makers) > 20
    for name in makers:
        table = getattr(papers, name)()
        assert len(table) > 1 and inspect.getdoc(getattr(papers, name))
        for column in table.columns:
            if ", recomputed" in column and "GiB" not in column:
                assert column.replace("recomputed", "printed") in table.columns or "limit" in column
