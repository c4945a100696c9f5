"""Plans of several paradigms at once: they train what one process does, and as predicted.

Every two settings that can meet do so in the list of pairwise.py. Each of its plans trains once,
and that one run is held against a plain loop on one device (equality.py), against the rows of its
prediction, and against the formulas of memory.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import paralab as pl
from equality import TOLERANCE, assert_equal_state, references, worst
from pairwise import Case, cover
from paralab.parallel.buckets import units
from paralab.spec import BYTES_PER_ELEMENT
from paralab.theory import memory
from paralab.theory.traffic import BOOKKEEPING
from paralab.theory.workspace import backward_workspace

STEPS, LR = 2, 0.5
LINK = pl.Link(alpha=1e-5, bandwidth=1e9)
CLUSTER = pl.Cluster(flops=1e11, memory_bandwidth=3e10, devices_per_node=8, intra=LINK, host=LINK,
                     disk=LINK, host_bandwidth=1e10)  # fmt: skip
CALL = ["rank", "op", "axis", "ranks", "peer", "level", "phase", "payload_bytes", "wire_bytes"]
COPY = ["rank", "lane", "op", "category", "bytes"]
CASES = cover().cases

pytestmark = pytest.mark.filterwarnings("ignore:zero_stage=3 with pp")


@pytest.fixture(scope="module")
def expected(text):
    """What each case trains, by one process for all of them."""
    asked = [
        {"model": one.model, "microbatches": one.plan.dp * one.plan.microbatches,
         "microbatch_size": one.plan.microbatch_size, "steps": STEPS, "lr": LR, "data": text,
         "precision": one.plan.precision, "clip_norm": one.clip_norm}
        for one in CASES
    ]  # fmt: skip
    once = {repr(one): one for one in asked}
    found = dict(zip(once, references(list(once.values())), strict=True))
    return {one.name: found[repr(how)] for one, how in zip(CASES, asked, strict=True)}


@pytest.fixture(scope="module", params=CASES, ids=lambda one: one.name)
def one(request) -> Case:
    return request.param


@pytest.fixture(scope="module")
def report(run, one) -> pl.Report:
    """The case's one run."""
    return run(one.model, one.plan, steps=STEPS, optimizer="sgd", lr=LR, clip_norm=one.clip_norm,
               keep_state=True)  # fmt: skip


def adds_in_the_same_order(one: Case) -> bool:
    """Whether every gradient is one chain of additions, as in the plain loop: then no bit may
    differ. Clipping adds norms up tensor by tensor, or flat unit by flat unit.
    """
    plan, tied = one.plan, one.model.tied
    alone = plan.dp == plan.tp == 1 and one.clip_norm is None
    two_chains = tied and (plan.pp > 1 or (plan.relays and plan.microbatches > 1))
    return alone and not two_chains


def rows(table: Any, columns: list[str], step: int) -> Counter:
    """A step's rows, how often each; bookkeeping left out."""
    table = table[table["step"] == step]
    if "phase" in table:
        table = table[~table["phase"].isin(BOOKKEEPING)]
    return Counter(zip(*(table[column] for column in columns), strict=True))


def test_gradients_weights_and_losses_are_those_of_one_process(report, expected, one):
    alone = expected[one.name]
    assert_equal_state(alone, report, precision=one.plan.precision)
    if adds_in_the_same_order(one):
        for what in ("gradients", "weights"):
            gap, name = worst(alone[what], getattr(report, what))
            assert gap == 0.0, f"{what} of {name} differ by {gap:.1e}"
    count = len(alone["losses"]) // STEPS
    for step, loss in enumerate(report.losses):
        mean = sum(alone["losses"][step * count : (step + 1) * count]) / count
        assert loss == pytest.approx(mean, rel=TOLERANCE[one.plan.precision])


def test_every_call_and_every_copy_is_predicted(report, one):
    expect = pl.predict(one.model, one.plan, CLUSTER, steps=STEPS, optimizer="sgd")
    for step in range(STEPS):
        for table, columns in (("collectives", CALL), ("copies", COPY)):
            want, got = (rows(getattr(r, table), columns, step) for r in (expect, report))
            assert want == got, (table, step, list((want - got) + (got - want))[:3])


def test_peak_memory_is_the_formulas(report, one):
    """Within 10 % below and 5 % above. What a backward has in hand for a moment is in the
    formulas of plans that offload; of others it may come on top. So may more messages of a
    pipeline, and the bucket that is being filled while blocks are still differentiated.
    """
    plan = one.plan
    hand = backward_workspace(one.model, plan)
    most = max(hand.head, hand.down, hand.core, hand.close, hand.lookup) + hand.tied
    for rank in range(plan.world_size):
        table = report.peaks(rank)
        formula, found = table["formula"], table.loc["total", "measured"]
        spare = 0 if formula["workspace"] else most
        spare += memory.message_bytes(one.model, plan, rank)
        buckets = memory.gradient_buckets(one.model, plan, rank)
        spare += max((size for _, size in buckets), default=0)
        if plan.zero_stage:  # a unit more whose sum is still under way, if the others are late
            made = units(memory.rank_sizes(one.model, plan, rank), one.model, plan)
            spare += BYTES_PER_ELEMENT[plan.precision] * max(unit.numel for unit in made)
        assert found >= 0.9 * (formula["total"] - formula["workspace"]), table
        assert found <= 1.05 * (formula["total"] + spare), table
