"""ZeRO-Offload's cuts and ZeRO-Infinity's bandwidths, as printed, and where they err."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import paralab as pl
from paralab.theory import offload_costs as costs
from paralab.theory.offload_costs import CPU, GPU
from refusals import refuses

PEAK = 70e12  # FLOP/s of a V100, ZeRO-Infinity, sec. 4.2

# Ren+ 2021, ZeRO-Offload, arXiv:2101.06840, Table 1: where fp16 parameters, fp16 gradients and the
# update are, and bytes per parameter on the GPU as printed; the last is an erratum.
TABLE_1 = {(GPU, GPU, GPU): 16, (GPU, CPU, GPU): 14, (GPU, GPU, CPU): 4, (GPU, CPU, CPU): 4}
REDUCTION = {(GPU, GPU, GPU): 1, (GPU, CPU, GPU): 1.14, (GPU, GPU, CPU): 4, (GPU, CPU, CPU): 8}
ERRATUM = (GPU, CPU, CPU)
UPDATE_SUPER = ("update", "p32", "m32", "v32", "float2half")  # one node of the reduced graph


def placed(*on_cpu: str) -> dict[str, str]:
    """These nodes on the CPU, all others on the GPU."""
    return {name: CPU if name in on_cpu else GPU for name in costs.HELD}


def row(p16: str, g16: str, update: str) -> dict[str, str]:
    """The assignment that a row of ZeRO-Offload's table 1 means."""
    where = {"p16": p16, "g16": g16, **dict.fromkeys(UPDATE_SUPER, update)}
    return placed(*(name for name, device in where.items() if device == CPU))


def printed(number: float) -> object:
    """As rounded to two digits behind the point, either way at a tie."""
    return pytest.approx(number, abs=0.005 + 1e-9)


# ---- ZeRO-Offload ----
@pytest.mark.parametrize("where", TABLE_1)
def test_table_1_memory_and_its_last_row(where):
    found = costs.gpu_memory(row(*where))
    assert found == (2 if where == ERRATUM else TABLE_1[where])
    assert 16 / found == printed(REDUCTION[where])  # which the row printed as 4M contradicts


def test_edges_weigh_2m_from_16_bits_and_4m_from_32_and_p16_is_read_twice():
    # sec. 3.1; p16 and the node that forward and backward became: 4M, sec. 3.3
    for (source, to), width in costs.FLOWS.items():
        states32 = {source, to} & {"p32", "m32", "v32"}
        assert width == (4 if states32 or (source, to) == ("p16", "fwd-bwd") else 2)


def test_of_all_cuts_with_the_update_on_the_cpu_zero_offload_is_the_only_best_one():
    # sec. 3.3: at least 4M; 6M where 32-bit states leave their producers, or p16 the GPU
    all_cuts = costs.cuts()
    assert len({tuple(sorted(cut.items())) for cut in all_cuts}) == len(all_cuts) == 2**6
    assert all(cut["fwd-bwd"] == GPU and cut["update"] == CPU for cut in all_cuts)
    least = [cut for cut in all_cuts if costs.cut_volume(cut) == 4]
    assert least == [row(GPU, GPU, CPU), row(GPU, CPU, CPU)]
    assert min(costs.cut_volume(cut) for cut in all_cuts if cut not in least) == 6
    # sec. 3.5: unique; whatever leaves less on the GPU crosses more
    assert [costs.gpu_memory(cut) for cut in least] == [4, 2]


def test_table_1_lists_every_cut_below_6m():
    both = costs.cuts(GPU) + costs.cuts(CPU)
    listed = [row(*where) for where in TABLE_1]
    assert all((costs.cut_volume(cut) < 6) == (cut in listed) for cut in both)
    assert [costs.cut_volume(cut) for cut in listed] == [0, 4, 4, 4]


# ---- ZeRO-Infinity, sec. 4 ----
def test_1_23_terabytes_per_second_give_90_percent_where_1_5_are_printed():
    # sec. 4.2: optimizer states at 2 samples of 1024 tokens per GPU
    ait = costs.ait_optimizer(2, 1024)
    assert costs.bandwidth_needed(0.9, ait, PEAK) / 1e12 == printed(1.23)
    assert 100 * costs.efficiency(ait, 1, PEAK, 1.5e12) == pytest.approx(91.6, abs=0.05)


@given(share=st.floats(1e-3, 0.999), ait=st.floats(0.1, 1e7), peak=st.floats(1e6, 1e15))
def test_bandwidth_needed_inverts_the_efficiency(share, ait, peak):
    bandwidth = costs.bandwidth_needed(share, ait, peak)
    assert costs.efficiency(ait, 1, peak, bandwidth) == pytest.approx(share, rel=1e-9)


@pytest.mark.parametrize(
    "moved, bandwidth, alone, hidden",
    [(8e9, 8e9, 4 / 5, 1), (8e9, 1e9, 4 / 12, 4 / 8), (0, 8e9, 1, 1)],
)
def test_efficiencies_by_hand(moved, bandwidth, alone, hidden):
    # 4 s of computation; 8 bytes (fp32: gradients down, parameters up) of 10^9 parameters, 1 or 8 s
    assert costs.efficiency(4e12, moved, 1e12, bandwidth) == alone
    assert costs.efficiency_overlapped(4e12, moved, 1e12, bandwidth) == hidden


# ---- where states are kept ----
# ZeRO-Infinity, table 2: optimizer states and gradients, then parameters: on which devices, and
# whether they are partitioned; the plan that says the same.
TABLE_2 = (
    ("GPU", False, "GPU", False, {"zero_stage": 0}),
    ("GPU", True, "GPU", False, {"zero_stage": 2}),
    ("CPU, GPU", True, "GPU", False, {"zero_stage": 2, "offload": "cpu"}),
    ("GPU", True, "GPU", True, {"zero_stage": 3}),
    ("CPU, GPU", True, "CPU, GPU", True, {"zero_stage": 3, "offload": "cpu"}),
    ("NVMe, CPU, GPU", True, "NVMe, CPU, GPU", True, {"zero_stage": 3, "offload": "nvme"}),
)


@pytest.mark.parametrize("states, shared, parameters, whole, settings", TABLE_2)
def test_infinity_table_2_is_what_the_plans_do(states, shared, parameters, whole, settings):
    plan = pl.Plan(dp=2, **settings)
    tiers = plan.tiers
    place = {"device": "GPU", "cpu": "CPU", "nvme": "NVMe"}
    where = [tiers.optimizer, tiers.gradients, tiers.parameters] if tiers else ["device"] * 3
    assert {place[tier] for tier in where[:2]} <= set(states.split(", "))
    assert place[where[2]] in parameters.split(", ")
    assert (plan.zero_stage >= 2, plan.zero_stage == 3) == (shared, whole)
    assert states.split(", ")[0] == place[where[0]]  # the farthest place that the system may use


# ---- refusals ----
REFUSED = {
    "fwd-bwd='cpu': unknown choice; legal: 'gpu'": (costs.cut_volume, placed("fwd-bwd")),
    "p16='nvme': unknown choice": (costs.cut_volume, {**placed(), "p16": "nvme"}),
    "fwd-bwd=None: unknown choice": (costs.gpu_memory, {}),
    "assignment='gpu': not a dict": (costs.cut_volume, "gpu"),
    "update='nvme': unknown choice; legal: 'gpu' | 'cpu'": (costs.cuts, "nvme"),
    "efficiency=1: without overlap, ev": (costs.bandwidth_needed, 1, 512, PEAK),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_is_refused_by_name(words):
    call, *given = REFUSED[words]
    refuses(words.replace("|", r"\|"), call, *given)
