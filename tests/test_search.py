"""plan_search: all that is legal and nothing else; the best is the best; it fits.

`make memory` makes twenty searches where `make test` makes two, and runs ten of the best plans.
"""

from __future__ import annotations

import os
import random
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
from torch import nn

import paralab as pl
from paralab.interpret.costs import Costs
from paralab.interpret.memory import memory
from paralab.interpret.serial import Serial
from paralab.interpret.time import walked
from paralab.interpret.totals import Totals
from paralab.programs.compile import compiled
from paralab.programs.estimate import Estimate
from paralab.programs.fold import folds
from paralab.programs.program import Program
from paralab.programs.search import SETTINGS, SPARE, Search
from paralab.programs.search_words import brief
from paralab.programs.space import NEEDLESS, space, values
from paralab.spec.settings import Settings
from paralab.view.plan_times import rank_correlation
from witness_memory import witness

SEARCHES = int(os.environ.get("PARALAB_MEMORY_SEARCHES", "2"))
RUN = 1 if SEARCHES < 20 else 10  # of the best plans that are run under their limit
LINK = pl.Link(alpha=5e-5, bandwidth=1e9)
LAPTOP = pl.Cluster(  # processors: messages are gloo's
    name="stated", devices_per_node=8, flops=5e10, memory_bandwidth=1e10, op_overhead=5e-6,
    memory=10**9, intra=LINK, host=pl.Link(alpha=1e-5, bandwidth=5e9), host_bandwidth=5e9,
    disk=pl.Link(alpha=1e-4, bandwidth=1e9), cores=8,
)  # fmt: skip
SLOW = LAPTOP.replace(call_overhead=2e-4, wait_overhead=2.5e-4)
SPARING = SLOW.replace(wait_work=6e-5)
NODES = LAPTOP.replace(devices_per_node=4, nodes=2, inter=pl.Link(alpha=2e-4, bandwidth=3e8))
TINY = pl.ModelSpec(layers=4, hidden=64, heads=8, seq_len=8, vocab=64)
SMALL = TINY.replace(hidden=256, seq_len=64)
LOGITS = pl.ModelSpec(layers=4, hidden=128, heads=4, seq_len=128, vocab=8192)

COUNTS = ("dp", "tp", "pp", "microbatches", "microbatch_size")


# ---- what is searched ---------------------------------------------------------------------------
def needless(plan: pl.Plan, model: pl.ModelSpec, tried: dict[str, tuple]) -> bool:
    """Whether a setting has nothing to act on, and the plain one is tried too."""
    return any(
        idle(Settings(plan, model)) and getattr(plan, name) != plain and plain in tried[name]
        for name, plain, idle in NEEDLESS
    )


def by_hand(model: pl.ModelSpec, devices: int, batch: int, tried: dict[str, tuple]) -> set[pl.Plan]:
    """Every plan of these values that `validate` allows, but those with settings without effect."""
    found = set()
    degrees = [d for d in product(range(1, devices + 1), repeat=3) if np.prod(d) == devices]
    for (dp, tp, pp), b in product(degrees, range(1, batch + 1)):
        if batch % (dp * b):
            continue
        counts = {"dp": dp, "tp": tp, "pp": pp, "microbatches": batch // dp // b}
        for chosen in product(*tried.values()):
            plan = pl.Plan(**counts, microbatch_size=b, **dict(zip(tried, chosen, strict=True)))
            try:
                plan.validate(model)
            except ValueError:
                continue
            if not needless(plan, model, tried):
                found.add(plan)
    return found


@pytest.mark.parametrize(("model", "devices", "batch", "pinned"), [
    (TINY.replace(layers=5, hidden=12, heads=6), 4, 4, {"recompute": ["none", "full"]}),
    (TINY.replace(seq_len=9, attention="sdpa", dropout=0.1), 4, 4, {"offload": None}),
    (TINY, 8, 8, {
        "tp_mode": ["1d", "2d", "3d"], "offload": None, "recompute": "full",
        "partition_activations": [False, True], "zero_stage": [0, 1]}),
    (TINY, 8, 8, {
        "shard": [None, 1, 2, 4], "offload": [None, "cpu"], "schedule": "1f1b",
        "precision": ["fp32", "bf16"], "recompute": "none",
        "grad_dtype": [None, "fp32"]}),
    (TINY, 4, 8, {
        "grad_sync": ["overlapped", "naive"], "schedule": ["gpipe", "zb-h1"],
        "offload": [None, {"activations": "cpu"}]}),
], ids=range(5))  # fmt: skip
def test_what_is_searched_is_what_validate_allows(model, devices, batch, pinned):
    found = space(model, LAPTOP, devices, batch, pinned)
    plans = list(found)
    tried = values(model, LAPTOP, devices, batch, pinned)
    chosen = {name: some for name, some in tried.items() if name not in COUNTS}
    legal = by_hand(model, devices, batch, chosen)
    assert len(plans) == len(set(plans)) and len(legal) > 50
    assert set(plans) == legal


# ---- how good it is -----------------------------------------------------------------------------
GRIDS: dict[str, tuple[pl.ModelSpec, pl.Cluster, dict[str, Any]]] = {
    "every schedule": (TINY, LAPTOP, {
        "devices": 4, "global_batch": 8, "offload": None, "recompute": "none"}),
    "two nodes": (SMALL, NODES, {
        "global_batch": 16, "precision": "bf16", "schedule": "1f1b", "zero_stage": [0, 1, 3],
        "recompute": ["none", "full"], "offload": None, "sequence_parallel": False}),
    "little memory": (LOGITS, LAPTOP, {
        "devices": 4, "memory": "60MB", "schedule": ["1f1b", "zb-h1"], "recompute": ["none"],
        "offload": [None, "cpu"], "global_batch": 8}),
    "nothing but compute": (SMALL, LAPTOP.replace(flops=1e8), {
        "devices": 8, "global_batch": 16, "tp": 1, "pp": 1, "offload": None}),
}  # fmt: skip


@pytest.mark.parametrize("name", GRIDS)
def test_the_best_is_within_a_hundredth_of_the_best_of_all_compiled(name):
    model, cluster, settings = GRIDS[name]
    found = pl.plan_search(model, cluster, **settings)
    every = (Totals(model, found.plans[at], cluster, "adamw") for at in range(len(found.plans)))
    best = min(one.seconds() for one in every if one.peak <= found.memory_limit)
    assert found.simulated[0] <= 1.01 * best
    assert len(found.plans) > 2 * np.isfinite(found.simulated).sum()


@pytest.mark.parametrize(
    "cluster, least", [(LAPTOP, 0.9), (SPARING, 0.8)], ids=["links", "calls and waits"]
)
def test_estimates_rank_as_compiled_plans_do(cluster, least):
    """Also where calls and waits cost four times what a link does; with overlap and without."""
    plans = space(SMALL, cluster, 8, 16, {})
    estimate = Estimate(plans, SMALL, cluster, "adamw")
    some = random.Random(0).sample(range(len(plans)), 40)
    exact = [Totals(SMALL, plans[at], cluster, "adamw") for at in some]
    seconds, serial = (np.array([one.seconds(overlap=o) for one in exact]) for o in (True, False))
    peaks = np.array([one.peak for one in exact])
    closed, estimates = (sum(of.values())[some] for of in (estimate.terms, estimate.categories))
    assert rank_correlation(closed, seconds) >= 0.97
    assert rank_correlation(estimate.serial[some], serial) >= 0.97
    without = estimate.serial[some] / serial
    assert np.quantile(without, 0.05) >= least and np.quantile(without, 0.95) <= 1.1
    assert rank_correlation(estimates, peaks) >= 0.93
    times, sizes = closed / seconds, estimates / peaks
    assert np.quantile(times, 0.05) >= least and np.quantile(times, 0.95) <= 1.1
    assert np.quantile(sizes, 0.95) <= 1.4 and SPARE * sizes.min() >= 1


def test_what_tp_ranks_share_is_looked_up_once_for_a_compiled_program(monkeypatch):
    asked, places = [], Program.places
    monkeypatch.setattr(Program, "places", lambda *of: asked.append(of) or places(*of))
    plan = pl.Plan(tp=2, sequence_parallel=True)
    program = compiled(pl.ModelSpec(layers=1, hidden=32, heads=4, seq_len=16), plan)
    assert program.shared(0) and len(asked) == 1


def test_the_instructions_of_a_micro_batch_are_the_same_for_every_tp_and_number_of_samples():
    """So those of all layouts of "1d" are compiled once, for the figures of a model's parts."""
    for how in ({}, {"sequence_parallel": True, "recompute": "full"}, {"schedule": "zb-h1"}):
        plans = [pl.Plan(**how, tp=tp, microbatch_size=b) for tp, b in ((2, 1), (4, 3), (8, 4))]
        first, *others = (compiled(TINY.replace(layers=1), plan).codes for plan in plans)
        assert all(other == first for other in others)


def test_the_bubble_of_a_plan_is_the_share_that_its_report_says():
    """Neither what comes behind the last backward nor the messages between stages are work."""
    plans = space(SMALL, LAPTOP, 8, 16, {"pp": [2, 4, 8]})
    estimate, off = Estimate(plans, SMALL, LAPTOP, "adamw"), []
    for at in random.Random(0).sample(range(len(plans)), 30):
        report = pl.predict(SMALL, plans[at], LAPTOP, steps=1, detail="actions")
        off.append(estimate.bubble[at] - report.bubble)
    assert abs(np.median(off)) < 0.02 and np.quantile(np.abs(off), 0.9) < 0.08
    assert not Estimate(space(SMALL, LAPTOP, 8, 16, {"pp": 1}), SMALL, LAPTOP, "sgd").bubble.any()


def test_few_plans_are_all_compiled():
    """Where dp and files meet, estimates are too slow by different factors."""
    model = pl.ModelSpec(layers=3, hidden=240, heads=6, seq_len=24, tied=False)
    how = {"schedule": "1f1b", "recompute": "full", "offload": "nvme", "tp": 1}
    devices = LAPTOP.replace(devices_per_node=2, nodes=2)
    found = pl.plan_search(model, devices, global_batch=4, zero_stage=[1, 2], **how)
    assert np.isfinite(found.simulated).all() and found.simulated[0] == found.simulated.min()


def test_pipelines_of_odd_depth_are_searched():
    cluster, model = NODES.replace(nodes=3), TINY.replace(layers=6, tied=True)
    how = {"tp": 2, "zero_stage": 0, "schedule": "1f1b", "recompute": "none"}
    found = pl.plan_search(model, cluster, 12, global_batch=24, **how)
    assert set(found.table["pp"]) == {1, 2, 3, 6}


@pytest.mark.parametrize("fields", [
    {"dp": 4, "microbatch_size": 4},
    {"tp": 4, "sequence_parallel": True, "microbatches": 8},
    {"pp": 4, "microbatches": 16},
    {"offload": "cpu", "zero_stage": 1, "microbatch_size": 4},
], ids=str)  # fmt: skip
def test_a_step_without_overlap_is_estimated_with_all_that_overlapped(fields):
    """As the compiled plan says, but for three tenths of what overlap saves in that."""
    plan = pl.Plan(**fields)
    pinned = {name: getattr(plan, name) for name in SETTINGS}
    plans = space(SMALL, LAPTOP, plan.world_size, plan.global_batch, pinned)
    estimate, exact = Estimate(plans, SMALL, LAPTOP, "adamw"), Totals(SMALL, plan, LAPTOP, "adamw")
    assert list(plans) == [plan]
    serial = exact.seconds(overlap=False)
    saved = serial - exact.seconds()
    assert saved and estimate.serial[0] == pytest.approx(serial, abs=0.3 * saved)


A100 = pl.Cluster.preset("dgx-a100")
THIN = SMALL.replace(layers=6, hidden=32, seq_len=8)
CHUNKS = {"dp": 4, "pp": 2, "virtual_stages": [2, 4], "zero_stage": 0, "bucket_bytes": 2**20}
FAR_LINK = pl.Link(alpha=1e-3, bandwidth=1e9)
FAR = LAPTOP.replace(flops=1e13, memory_bandwidth=1e12, intra=FAR_LINK, inter=FAR_LINK)
APART = FAR.replace(devices_per_node=2, nodes=3, intra=LINK)
HALF_HIDDEN = LAPTOP.replace(intra=pl.Link(alpha=3e-3, bandwidth=1e9))
INTERLEAVED = {"schedule": "interleaved", "virtual_stages": [1, 2], "zero_stage": 0}
DEEP = SMALL.replace(layers=12, seq_len=8)
DATA = {"dp": 8, "zero_stage": [0, 1]}
STAGE_3 = {"dp": 4, "pp": 2, "zero_stage": 3, "schedule": ["naive", "gpipe", "1f1b"]}
BUCKETS = {"dp": 4, "bucket_bytes": 2**16, "zero_stage": [1, 2, 3], "offload": ["cpu", "nvme"]}
COPIES = {"dp": 4, "bucket_bytes": 1, "zero_stage": [0, 1], "precision": "bf16", "grad_dtype": None}


@pytest.mark.parametrize(("model", "cluster", "batch", "settings", "least", "most"), [
    (THIN, NODES, 32, {"dp": 8, "grad_sync": "naive", "zero_stage": 0}, 0.88, 1.27),
    (THIN, A100, 32, {"dp": 8, "bucket_bytes": 1, "zero_stage": 0}, 0.88, 1.27),
    (THIN, A100, 32, {"dp": 4, "tp": 2, "grad_sync": "naive", "zero_stage": 0}, 0.88, 1.27),
    (THIN, LAPTOP, 32, {"dp": 8, "zero_stage": 3, "secondary_shard": 2}, 0.88, 1.27),
    (THIN, NODES, 32, {"dp": 8, "zero_stage": 1, "shard": 2, "bucket_bytes": 2**12}, 0.88, 1.27),
    (SMALL.replace(hidden=128), LAPTOP, 4, BUCKETS, 0.9, 1.1),
    (THIN, A100, 32, BUCKETS | {"bucket_bytes": 2**12, "offload": "cpu"}, 0.95, 1.16),
    (THIN, A100, 32, COPIES, 0.95, 1.12),
    (SMALL, FAR, 32, {"pp": 4, "zero_stage": 0}, 0.88, 1.1),
    (SMALL, FAR, 12, {"pp": 2, "zero_stage": 0, "schedule": "gpipe"}, 0.95, 1.05),
    (THIN, APART, 36, {"pp": 6, "zero_stage": 0}, 0.78, 1.1),
    (SMALL, FAR, 16, {"dp": 2, "pp": 4, "zero_stage": 3}, 0.88, 1.27),
    (SMALL.replace(layers=8, seq_len=16), NODES, 8, CHUNKS, 0.95, 1.05),
    (DEEP, NODES, 32, STAGE_3, 0.84, 1.1),
    (SMALL, HALF_HIDDEN, 32, {"pp": 2} | INTERLEAVED, 0.95, 1.05),
    (SMALL.replace(vocab=8192, layers=8), HALF_HIDDEN, 32, {"pp": 4} | INTERLEAVED, 0.95, 1.1),
    (SMALL.replace(layers=8), HALF_HIDDEN, 32, {"pp": 4} | INTERLEAVED, 0.98, 1.02),
    (TINY.replace(vocab=16384), NODES, 16, DATA | {"bucket_bytes": 2**20}, 0.9, 1.1),
    (SMALL.replace(hidden=128), NODES, 16, DATA | {"bucket_bytes": 2**16}, 0.9, 1.1),
], ids=["a call per parameter", "kernels", "both", "hpZ", "replicas", "offload",
        "calls of the host", "copied gradients", "messages", "pairs of messages",
        "messages between nodes", "stages that gather while they are idle", "chunks",
        "sums and later gathers", "two ranks", "a head that hides messages",
        "forwards that hide messages", "an embedding in the last bucket",
        "blocks that share buckets"])  # fmt: skip
def test_every_call_and_every_kernel_of_the_synchronisation_is_estimated(
    model, cluster, batch, settings, least, most
):
    """Where messages are small and many, their number counts, and little else does. ZeRO-3 moves
    parts, not buckets; and buckets that were gathered make room for the next. In a pipeline each
    micro-batch waits for messages; a stage's gathers go on while it is idle.
    """
    how = {"dp": 1, "tp": 1, "pp": 1, "offload": None, "recompute": "none"} | settings
    plans = space(model, cluster, how["dp"] * how["tp"] * how["pp"], batch, how)
    seconds = sum(Estimate(plans, model, cluster, "adamw").terms.values())
    exact = [Totals(model, plan, cluster, "adamw").seconds() for plan in plans]
    assert len(exact) > 1
    assert (seconds / exact).min() >= least and (seconds / exact).max() <= most, seconds / exact


def test_bytes_of_blocks_of_ones_own_are_estimated_too():
    """They have no s x s mask, which here would be as much as all else; but what they hold."""

    def block(spec: pl.ModelSpec) -> Any:
        return nn.Sequential(nn.Linear(spec.hidden, spec.hidden), nn.GELU())

    model = TINY.replace(seq_len=1024, hidden=8, heads=1, vocab=8, block=block)
    found = pl.plan_search(model, LAPTOP, devices=2, global_batch=2, recompute="none", top=1)
    for at in range(0, len(found.plans), 5):
        exact = Totals(model, found.plans[at], LAPTOP, "adamw")
        bytes_of = sum(column[at] for column in found.categories.values())
        assert 0.9 <= bytes_of / exact.peak <= 1.35, found.plans[at]
        assert 0.7 <= found.closed[at] / exact.seconds() <= 1.3, found.plans[at]


def test_a_model_whose_blocks_have_no_parameters_is_searched():
    model = TINY.replace(block=lambda spec: nn.Tanh())
    assert pl.plan_search(model, LAPTOP, devices=2, global_batch=2, top=1).best.world_size == 2


def test_nothing_leaves_devices_on_which_a_small_model_fits():
    """A host calls no faster than it launches the device's kernels."""
    model = pl.ModelSpec(layers=4, hidden=128, heads=4, seq_len=64)
    nodes = pl.Cluster.preset("dgx-a100", nodes=2)
    how = {"schedule": "zb-h1", "recompute": "none", "tp": 1, "top": 1}
    assert pl.plan_search(model, nodes, precision="bf16", **how).best.offload is None


def test_megatrons_advice_comes_out():
    nodes = pl.Cluster.preset("dgx-a100", nodes=64)
    model = pl.ModelSpec.preset("ptdp-145b")
    how = {"precision": "bf16", "schedule": "1f1b", "offload": None, "zero_stage": [0, 1]}
    found = pl.plan_search(model, nodes, global_batch=512, top=1, **how)
    assert 1 < found.best.tp <= 8 and found.best.pp > 1  # inside the node, and across
    beyond = found.losers().query("instead == 'beyond a node'").iloc[0]
    assert beyond["times"] > 1.05 and "tensor-parallel waits" in beyond["why"]


# ---- what fits ----------------------------------------------------------------------------------
@cache
def searched(number: int) -> Search:
    """One of many searches; of each the limit is some way up from the least that fits."""
    draw = random.Random(number)
    hidden, layers = draw.choice((64, 128)), draw.choice((2, 4, 6))
    seq_len, vocab, tied = draw.choice((32, 128)), draw.choice((260, 8192)), draw.random() < 0.7
    model = pl.ModelSpec(
        layers=layers, hidden=hidden, heads=4, seq_len=seq_len, vocab=vocab, tied=tied
    )
    settings = {"devices": draw.choice((2, 4)), "global_batch": draw.choice((8, 16))}
    settings |= {"precision": draw.choice(("fp32", "bf16")), "memory": 10**12}
    settings |= {"offload": None if draw.random() < 0.5 else [None, "cpu"]}
    if settings["precision"] == "bf16":
        settings["grad_dtype"] = "fp32" if number % 2 else None
    least = pl.plan_search(model, LAPTOP, top=1, **settings).memory.min()
    limit = int(least * draw.choice((1.3, 2.0, 4.0)))
    return pl.plan_search(model, LAPTOP, **settings | {"memory": limit})


def test_the_best_and_their_figures_are_those_of_compiled_programs():
    for number in range(2):
        found = searched(number)
        for at in np.flatnonzero(np.isfinite(found.simulated))[::4].tolist():
            plan = found.plans[at]
            program = compiled(found.model, plan)
            peak = max(memory(program, pp).peak for pp in range(plan.pp))
            assert peak == found.memory[at] and found.fits[at] == (peak <= found.memory_limit)
            costs = Costs(program, found.cluster)
            both = tuple(walked(program, some).seconds for some in (costs, Serial(costs)))
            shown = found.simulated[at], found.serial[at]
            assert shown == pytest.approx(both, rel=1e-9)


@pytest.mark.parametrize("number", range(SEARCHES))
def test_a_plan_that_fits_is_within_its_limit_by_the_witness(number):
    found = searched(number)
    best = [at for at in range(min(20, len(found.plans))) if found.fits[at]]  # compiled or not
    for plan in (found.plans[at] for at in best[:: 1 if SEARCHES > 2 else 5]):
        for pp in range(plan.pp):
            seen = witness(found.model, plan, pp * plan.dp * plan.tp)
            assert seen.peak <= found.memory_limit, plan


@pytest.mark.parametrize("number", range(RUN))
def test_the_best_plan_runs_under_the_limit_that_it_was_searched_with(run, number):
    found = searched(number)
    report = run(found.model.replace(vocab=max(found.model.vocab, 256)), found.best, steps=2,
                 memory_limit=found.memory_limit)  # fmt: skip
    assert report.peak_memory <= found.memory_limit


# ---- what it says -------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def small() -> Search:
    return pl.plan_search(SMALL, LAPTOP, devices=8, global_batch=16, top=10)


def test_the_best_are_simulated_and_come_in_that_order(small):
    table = small.table
    simulated = table[table["simulated_s"].notna() & table["fits"]]
    assert 3 <= len(simulated) <= 10
    assert simulated["rank"].tolist() == list(range(1, len(simulated) + 1))
    assert simulated["simulated_s"].is_monotonic_increasing
    rest = table[table["simulated_s"].isna() & table["fits"]]
    assert rest["closed_s"].is_monotonic_increasing
    assert list(small.plans)[0] == small.best
    assert (small.best.world_size, small.best.global_batch) == (8, 16)


def test_a_winner_that_lives_by_overlap_shows_it():
    cluster = pl.Cluster.preset("dgx-a100", nodes=2)
    model = pl.ModelSpec(layers=16, hidden=4096, heads=32, seq_len=2048, vocab=51200)
    found = pl.plan_search(model, cluster, global_batch=32, precision="bf16", schedule="1f1b")
    at = int(np.where(found.fits, found.serial, np.inf).argmin())
    assert at and found.serial[0] > 1.2 * found.simulated[0]
    assert found.serial[at] < found.serial[0]
    said = f"The fastest plan without overlap is {brief(found.plans[at])}: "
    assert said in found._repr_html_()


def test_the_terms_add_up(small):
    for name, term in small.terms.items():
        assert (term >= -1e-12).all(), name
    assert np.allclose(sum(small.terms.values()), small.closed)
    assert not small.table.query("tp == 1")["tp_s"].any()  # and no rounding, which prints as -0.0


def test_the_front_is_what_no_other_plan_beats(small):
    front = small.rows(small.front)
    assert front["closed_s"].is_monotonic_increasing and front["memory"].is_monotonic_decreasing
    fast, lean = (front[name].to_numpy()[:, None] for name in ("closed_s", "memory"))
    assert ((fast <= small.closed) & (lean <= small.memory)).any(axis=0).all()


def test_losers_have_the_other_choices_and_a_reason(small):
    losers = small.losers()
    assert {"tp", "pp", "recompute", "zero_stage"} <= set(losers["setting"])
    for row in losers.to_dict("records"):
        assert str(row["instead"]) != str(getattr(small.best, row["setting"]))
    why = "; ".join(pl.plan_search(SMALL, LAPTOP, devices=2, global_batch=16).losers()["why"])
    assert "; almost equal: simulated 0.2" in why and "; 3 % longer if simulated, which" in why


@pytest.mark.parametrize(("settings", "words"), [
    ({"memory": 50_000}, "none .* in 50 kB: the smallest of 3 compiled ones needs .*legal: "),
    ({"memory": 1, "model": SMALL, "devices": 1, "global_batch": 2, "recompute": "none",
      "offload": None}, r"none of 2 plans .* smallest needs 54\.1 MB .*pp=1 m=1 b=2"),
    ({"memory_limit": "6MB"}, "6MB': no argument of a search and no .* legal: .*, memory, .*, dp,"),
    ({"devices": 9}, "'stated' has 8"),
    ({"schedule": "l2l"}, "does not try it, .*predicts such a plan; legal: 'naive'"),
    ({"passes": (len,)}, "passes=.*predicts such a plan"),
    ({"tp": 3, "model": TINY.replace(layers=1)}, "no legal plan of 1 layer has.* with tp=3; legal"),
    ({"devices": 1, "sequence_parallel": True}, "=True: it shards .* tp=1 has only one; legal: Fa"),
    ({"schedule": "gpipe", "virtual_stages": 2}, "rule: virtual_stages=2: .* one stage per rank;"),
    ({"shard": 3, "zero_stage": 1}, "rule: shard=3: dp=8 ranks cannot .*; legal: 1, 2, 4, 8$"),
    ({"tp": []}, "no value to try"),
    ({"model": "gpt3"}, "not a model description"),
    ({"cluster": "dgx"}, r"not a cluster; legal: .*pl.Cluster.local\(\)"),
    ({"top": 2**31}, "^top=.*: out of range; legal: .* from 1 to "),
    ({"global_batch": 2**62}, "^global_batch=.*: out of range; legal: .* from 1 to "),
    ({"devices": 2**20, "cluster": pl.Cluster.preset("dgx-a100", nodes=2**20)},
     "^devices=.*: out of range; legal: .* from 1 to "),
], ids=str)  # fmt: skip
def test_what_cannot_be_searched_is_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        pl.plan_search(**{"model": TINY, "cluster": LAPTOP, **settings})


def test_a_notebook_sees_the_counts_and_the_best_ten(small):
    assert repr(small).startswith("Search(") and "fit in" in repr(small)
    page = small._repr_html_()
    assert page.count("<tr") == 11 and "Search" not in page[:20] and "nan" not in page
    alone = pl.plan_search(SMALL, LAPTOP, devices=1)  # some of its ten best plans offload
    alone.serial[0] = np.nextafter(alone.simulated[0], 0.0)  # the same, rounded
    page = alone._repr_html_()
    assert "<td>None</td>" in page and "nan" not in page.lower() and "s (+0 %)" in page


def test_a_search_through_too_many_plans_is_refused(monkeypatch):
    asked = {"devices": 8, "global_batch": 720720}  # of 240 divisors
    assert len(pl.plan_search(SMALL, LAPTOP, **asked, pp=1, dp=8).plans) > 1000
    monkeypatch.setattr("paralab.programs.space.MOST", 1000)
    with pytest.raises(ValueError, match="^global_batch=720720: on 8 devices.* 1,000 plans to se"):
        pl.plan_search(SMALL, LAPTOP, **asked, pp=1, dp=8)


def test_a_large_batch_of_many_divisors_can_be_searched():
    """Ten thousand devices with four samples each: a micro-batch count is no choice of its own."""
    model, cluster = pl.ModelSpec.preset("gpt3-175b"), pl.Cluster.preset("dgx-a100", nodes=1260)
    pinned = {"schedule": "1f1b", "recompute": "full", "zero_stage": 1, "offload": None}
    plans = space(model.resolved(gpus=True), cluster, 10080, 40320, pinned)
    sizes = plans.dp * plans.microbatches * plans.microbatch_size
    assert len(plans) > 1000 and (sizes == 40320).all()


@pytest.mark.parametrize(("limit", "top"), [(4_214_276, 1), (4_000_000, 2)])
def test_the_best_is_a_plan_that_was_compiled_also_where_the_first_ones_do_not_fit(limit, top):
    model, cluster = pl.ModelSpec.preset("laptop"), pl.Cluster.preset("dgx-a100", nodes=1)
    found = pl.plan_search(model, cluster, global_batch=64, top=top, memory=limit)
    assert found.fits[0] and np.isfinite(found.simulated[0])
    assert "nan" not in found._repr_html_().lower()


def test_what_takes_seconds_to_compile_is_compiled_only_where_nothing_else_fits(monkeypatch):
    monkeypatch.setattr("paralab.programs.search.LARGE", 0)

    def simulated(**pinned) -> list[pl.Plan]:
        found = pl.plan_search(SMALL, LAPTOP, devices=4, global_batch=32, **pinned)
        return [found.plans[int(at)] for at in np.flatnonzero(np.isfinite(found.simulated))]

    assert len(simulated(microbatches=[1, 8])) > 1
    assert all(map(folds, simulated(microbatches=[1, 8])))
    assert len(simulated(microbatches=1)) == 1


def test_of_few_plans_none_that_fits_and_is_faster_is_left_out():
    """All of them are compiled, whatever their estimates of memory are."""
    model = pl.ModelSpec(layers=4, hidden=32, heads=4, seq_len=8, vocab=260)
    asked = {"global_batch": 16, "recompute": "none", "offload": None}
    found = pl.plan_search(model, LAPTOP, 2, **asked)
    exact = [Totals(model, plan, LAPTOP, "adamw") for plan in found.plans]
    rows = [(one.seconds(), one.peak) for one in exact]
    limit = min(rows)[1]
    best = pl.plan_search(model, LAPTOP, 2, memory=limit, **asked)
    assert best.simulated[0] == pytest.approx(min(rows)[0])
