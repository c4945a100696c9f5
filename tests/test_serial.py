"""A step without overlap: it is never shorter, and exactly the sum where one rank is looked at."""

from __future__ import annotations

import random

import pytest

import paralab as pl
from paralab.interpret.costs import Compute, Costs, Job, Posted
from paralab.interpret.serial import Serial
from paralab.interpret.time import Times, walked
from paralab.interpret.totals import Totals
from paralab.programs.compile import compiled
from paralab.programs.fold import folds
from paralab.programs.instructions import COMPUTE, SEND, WAIT, WORKERS
from paralab.programs.program import Program
from paralab.programs.space import space
from test_search import LAPTOP, NODES, SLOW, SMALL, SPARING


def timed(program: Program, cluster: pl.Cluster, *, overlap: bool = True) -> Times:
    costs = Costs(program, cluster)
    return walked(program, costs if overlap else Serial(costs))


def seconds(plan: pl.Plan, cluster: pl.Cluster, *, overlap: bool = True) -> float:
    return timed(compiled(SMALL, plan), cluster, overlap=overlap).seconds


@pytest.mark.parametrize("plan", [
    {"microbatches": 3}, {"recompute": "full"}, {"precision": "bf16", "zero_stage": 2},
], ids=str)  # fmt: skip
def test_one_device_takes_as_long_with_and_without(plan):
    plan = pl.Plan(**plan)
    assert seconds(plan, SLOW, overlap=False) == seconds(plan, SLOW)


def test_what_overlaps_takes_longer_without():
    for plan in (pl.Plan(dp=4), pl.Plan(tp=4), pl.Plan(zero_stage=2, offload="cpu")):
        assert seconds(plan, LAPTOP, overlap=False) > 1.0001 * seconds(plan, LAPTOP)


@pytest.mark.parametrize("plan", [
    {"dp": 4, "grad_sync": "overlapped", "microbatches": 2},
    {"dp": 4, "zero_stage": 3, "microbatches": 2},
    {"dp": 2, "tp": 2, "sequence_parallel": True},
    {"dp": 2, "zero_stage": 3, "offload": "nvme", "precision": "bf16"},
], ids=str)  # fmt: skip
def test_a_rank_of_one_stage_takes_the_sum_of_its_work_its_calls_and_its_copies(plan):
    plan = pl.Plan(**plan)
    program = compiled(SMALL, plan)
    costs, (code,) = Costs(program, SLOW), program.codes
    begun, total = {}, 0.0
    for ins in code:
        cost = costs.of(0, ins)
        if ins.op == WAIT:
            call = begun[ins.reads]
            total += SLOW.wait_overhead if ins.lane in WORKERS else call.after()
            continue
        total += cost.seconds
        if isinstance(cost, Posted):
            total += cost.packed + SLOW.call_overhead
            begun[ins.writes] = cost
        elif isinstance(cost, Job):
            begun[ins.writes] = cost
        elif isinstance(cost, Compute):
            calls = [call for _, call in cost.inside if isinstance(call, Posted)]
            total += sum(SLOW.call_overhead + call.seconds + call.after() for call in calls)
    assert seconds(plan, SLOW, overlap=False) == pytest.approx(total, rel=1e-9)


@pytest.mark.parametrize("cluster", [LAPTOP, SPARING, NODES], ids=["laptop", "slow", "nodes"])
def test_no_plan_is_faster_without_overlap_and_a_folded_program_says_the_same(cluster):
    plans = space(SMALL, cluster, 8, 32, {"precision": ["fp32", "bf16"]})
    folded = 0
    for at in random.Random(1).sample(range(len(plans)), 12):
        plan = plans[at]
        serial = seconds(plan, cluster, overlap=False)
        assert serial >= seconds(plan, cluster) * (1 - 1e-12), plan
        if folds(plan) and plan.zero_stage < 3:
            folded += 1
            found = Totals(SMALL, plan, cluster, "adamw", many=True).seconds(overlap=False)
            assert found == pytest.approx(serial, rel=1e-9), plan
    assert folded >= 3


def test_both_ends_of_a_message_pay_for_it():
    """One micro-batch, there and back: rank 0 has a message to wait for either way, and what it
    sent itself, long over, is paid for at the end of the step.
    """
    program = compiled(SMALL.replace(tied=False), pl.Plan(pp=2, microbatches=1))
    costs = Costs(program, LAPTOP)
    sent = next(costs.of(0, ins) for ins in program.codes[0] if ins.op == SEND)
    sent = sent.seconds + sent.late
    plain, serial = (timed(program, LAPTOP, overlap=overlap).ends for overlap in (True, False))
    assert serial[0] == pytest.approx(plain[0] + sent, rel=1e-12) and sent > 1e-5


@pytest.mark.parametrize("more", [
    {}, {"sequence_parallel": True, "dp": 2}, {"recompute": "full"},
], ids=str)  # fmt: skip
def test_tensor_parallelism_that_waits_takes_what_it_takes_without_overlap(more):
    plan = pl.Plan(tp=4, microbatches=2, grad_sync="bucketed", bucket_bytes=2**40, **more)
    waits = plan.replace(tp_overlap=False)
    found = seconds(waits, LAPTOP)  # where posting takes no time; else a call moves meanwhile
    assert found == pytest.approx(seconds(plan, LAPTOP, overlap=False), rel=1e-9)
    assert found > 1.0001 * seconds(plan, LAPTOP)


@pytest.mark.parametrize("more", [{}, {"pp": 2, "schedule": "zb-h1"}], ids=str)
def test_where_tensor_parallelism_waits_no_message_of_it_moves_while_its_rank_computes(more):
    plan = pl.Plan(tp=2, microbatches=2, sequence_parallel=True, **more)

    def moving(plan: pl.Plan) -> int:
        """Messages in flight, summed over the instructions that compute."""
        found, flying = 0, set()
        for ins in compiled(SMALL, plan).codes[0]:
            if ins.op == WAIT:
                flying.discard(ins.reads)
            elif ins.lane == "tp":
                flying.add(ins.writes)
            found += len(flying) * (ins.op in COMPUTE)
        return found

    assert moving(plan) > 0 == moving(plan.replace(tp_overlap=False))
