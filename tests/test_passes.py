"""What single passes add to a program: recomputation, what hides tensor parallelism's messages,
messages in parts, hpZ's second shard.

That such plans train what the reference trains is in test_programs_equal.py, and what recomputed
ones keep in test_papers_korthikanti.py.
"""

from __future__ import annotations

from collections import Counter

import pytest

import paralab as pl
from paralab.programs.compile import compiled
from paralab.programs.instructions import (
    BACKWARD_WEIGHT,
    BACKWARDS,
    COMPUTE,
    FORWARD,
    RECOMPUTE,
    keeps,
)
from stated import TIERS

SPEC = pl.ModelSpec(layers=4, hidden=48, heads=4, seq_len=24, vocab=260)


def sent(plan: pl.Plan, *by: str, near: int = 4) -> dict:
    """{columns of a call: bytes that all ranks send in such calls}, ``near`` ranks on a node"""
    nodes = TIERS.replace(nodes=4 // near, devices_per_node=near)
    calls = pl.predict(SPEC, plan, nodes, steps=1).collectives
    return calls.groupby(list(by))["wire_bytes"].sum().to_dict()


# ---- recomputation -------------------------------------------------------------------------------
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("kind", ["full", "selective"])
def test_a_forward_keeps_nothing_and_is_made_again_right_before_its_backward(kind, schedule):
    plan = pl.Plan(pp=2, microbatches=3, schedule=schedule, recompute=kind)
    again: Counter = Counter()
    for code in compiled(SPEC.replace(dropout=0.2), plan).codes:
        row = [ins for ins in code if ins.op in COMPUTE]
        ranges = {ins.at for ins in row if ins.op == RECOMPUTE}
        for ins, after in zip(row, row[1:], strict=False):
            if ins.op == RECOMPUTE:
                again[ins.at] += 1
                assert (after.at, after.mb) == (ins.at, ins.mb) and after.op in BACKWARDS
            elif ins.op == FORWARD:
                assert keeps(ins) == (ins.at not in ranges)
    assert len(again) == SPEC.layers and set(again.values()) == {plan.microbatches}


# ---- tensor parallelism, with gradients in buckets -----------------------------------------------
@pytest.mark.parametrize("more", [{}, {"zero_stage": 1}, {"pp": 2, "microbatches": 2}], ids=str)
@pytest.mark.parametrize("bucket_bytes", [1, 4_000, 60_000])
def test_no_buckets_edge_separates_f_from_the_layer_whose_gradient_hides_its_message(
    bucket_bytes, more
):
    plan = pl.Plan(dp=2, tp=2, bucket_bytes=bucket_bytes, **more)
    for code in compiled(SPEC, plan).codes:
        hides = [ins for ins in code if ins.op == BACKWARD_WEIGHT and ins.phase]
        assert len(hides) >= SPEC.layers and all(
            any(kind == "grad" for kind, *_ in ins.writes) for ins in hides
        )


# ---- messages in parts: PTD-P, Narayanan+ 2021, arXiv:2104.04473, sec. 4.1 -----------------------
WHOLE = pl.Plan(tp=2, pp=2, microbatches=3)
PLANS = {
    "1F1B": WHOLE,
    "zero bubble, recomputed": WHOLE.replace(schedule="zb-h1", recompute="full"),
    "interleaved, inputs in parts": WHOLE.replace(
        schedule="interleaved", virtual_stages=2, microbatches=4, recompute="full",
        partition_activations=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
def test_of_a_message_a_part_leaves_and_the_rest_is_gathered_by_its_receivers(name):
    """Of x a t-th leaves for the next stage, and (t-1)/t of it goes over tp; nothing else moves."""
    whole, parts = (
        sent(PLANS[name].replace(partition_messages=cut), "op", "axis", "phase")
        for cut in (False, True)
    )
    [message] = {key for key in whole if key[:2] == ("send", "pp")}
    gathers = ("all_gather", "tp", "activations")
    assert whole[message] > 0 and gathers not in whole
    half = whole[message] // WHOLE.tp
    assert parts == whole | {message: half, gathers: half * (WHOLE.tp - 1)}


def test_it_pays_where_links_between_nodes_are_slow_and_messages_large():
    model = pl.ModelSpec.preset("gpt3-175b")
    plan = pl.Plan(tp=8, pp=8, microbatches=16, precision="fp16", recompute="full")
    nodes = pl.Cluster.preset("dgx-a100", nodes=8)
    slow = nodes.replace(inter=nodes.inter.replace(bandwidth=nodes.inter.bandwidth / 10))
    for cluster in (nodes, slow):
        whole, parts = (
            pl.predict(model, plan.replace(partition_messages=one), cluster, steps=1).step_time
            for one in (False, True)
        )
        assert parts < whole


# ---- hpZ: ZeRO++, Wang+ 2023, arXiv:2306.10209, sec. 3.2 -----------------------------------------
@pytest.mark.parametrize("microbatches", [1, 3])
def test_of_hpz_bytes_by_level_are_the_papers_volumes(microbatches):
    """What all ranks send together: forward M over all, backward M inside each node, gradients M
    over all; each times (group - 1) / group per rank. Of ZeRO-3's 3 M between nodes 2 M are left.
    """
    n, near = 4, 2  # ranks that share the parameters, and those of them on one node
    plan = pl.Plan(dp=n, zero_stage=3, secondary_shard=near, microbatches=microbatches)
    program = compiled(SPEC, plan)
    m = sum(program.model.item * unit.numel for units in program.units for unit in units)
    over_all = (n - 1) * m * microbatches
    assert sent(plan, "phase", "level", near=near) == {
        ("param_gather", "inter"): over_all,
        ("param_gather", "intra"): n // near * (near - 1) * m * microbatches,
        ("grad_sync", "inter"): over_all,
    }
