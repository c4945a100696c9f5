"""plan_search: all that is legal and nothing else, in the order that the simulation has."""

from __future__ import annotations

import random
import time
import warnings
from itertools import product

import numpy as np
import pytest

import paralab as pl
from paralab.parallel.data_parallel import Overlapped
from paralab.theory import search_space
from paralab.theory.outline import totals
from paralab.view.plan_times import rank_correlation

LAPTOP = pl.Cluster(name="stated", devices_per_node=8, flops=5e10, memory_bandwidth=1e10,
                    op_overhead=5e-6, memory=10**9, intra=pl.Link(alpha=5e-5, bandwidth=1e9),
                    host=pl.Link(alpha=1e-5, bandwidth=5e9), host_bandwidth=5e9,
                    disk=pl.Link(alpha=1e-4, bandwidth=1e9))  # fmt: skip
SMALL = pl.ModelSpec(layers=4, hidden=64, heads=8, seq_len=8, vocab=64)


def by_hand(model, devices, batch, tried):
    """Every plan of these values that `validate` allows, but those with settings without effect."""
    found = set()
    degrees = [(dp, tp, pp) for dp, tp, pp in product(range(1, devices + 1), repeat=3)
               if dp * tp * pp == devices]  # fmt: skip
    for (dp, tp, pp), b in product(degrees, range(1, batch + 1)):
        if batch % (dp * b):
            continue
        for chosen in product(*tried.values()):
            plan = pl.Plan(dp=dp, tp=tp, pp=pp, microbatches=batch // dp // b, microbatch_size=b,
                           **dict(zip(tried, chosen, strict=True)))  # fmt: skip
            try:
                plan.validate(model)
            except ValueError:
                continue
            twin = search_space.needless(plan)
            if not (twin and any(value in tried[name] for name, value in twin.items())):
                found.add(plan)
    return found


@pytest.mark.parametrize(
    "model, devices, batch, pinned",
    [
        (pl.ModelSpec(layers=5, hidden=12, heads=6, seq_len=8, vocab=12), 4, 4, {"recompute":
                                                                         ["none", "full"]}),
        (pl.ModelSpec(layers=6, hidden=16, heads=4, seq_len=9, vocab=10, attention="sdpa",
                      dropout=0.1), 4, 4, {"offload": None}),
        (SMALL, 8, 8, {"tp_mode": ["1d", "2d", "3d"], "offload": None, "recompute": "full",
                       "partition_activations": [False, True], "zero_stage": [0, 1]}),
        (SMALL, 8, 8, {"shard": [None, 1, 2, 4], "offload": [None, "cpu"], "schedule": "1f1b",
                       "precision": ["fp32", "bf16"], "recompute": "none"}),
        (SMALL, 4, 8, {"grad_sync": ["overlapped", "naive"], "schedule": ["gpipe", "zb-h1"],
                       "offload": [None, {"activations": "cpu"}]}),
    ],
)  # fmt: skip
def test_what_is_searched_is_what_validate_allows(model, devices, batch, pinned):
    tried = search_space.values(model, LAPTOP, pinned)
    found = search_space.space(model, LAPTOP, devices, batch, pinned)
    plans = [found.plan(at) for at in range(len(found))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        legal = by_hand(model, devices, batch, tried)
    assert len(plans) == len(set(plans)) and len(legal) > 50
    assert set(plans) == legal


@pytest.fixture(scope="module")
def small():
    return pl.plan_search(SMALL.replace(hidden=256, seq_len=64), LAPTOP, devices=8, global_batch=16,
                          top=10)  # fmt: skip


def test_the_best_are_simulated_and_come_in_that_order(small):
    table = small.table
    simulated = table[table["simulated_s"].notna() & table["fits"]]
    assert len(simulated) == 10 and simulated["rank"].tolist() == list(range(1, 11))
    assert simulated["simulated_s"].is_monotonic_increasing
    rest = table[table["simulated_s"].isna() & table["fits"]]
    assert rest["closed_s"].is_monotonic_increasing
    report = pl.predict(small.model, small.best, LAPTOP, steps=1, detail="actions")
    assert table["simulated_s"][0] == report.step_time
    assert table["memory"][0] == report.peak_memory
    assert small.plans[0] == small.best and small.best.world_size == 8
    assert small.best.global_batch == 16
    assert table["why"][0] == "the best" and all(table["why"])


def test_the_terms_add_up(small):
    for term in small.terms.values():
        assert (term >= -1e-12).all()
    assert np.allclose(sum(small.terms.values()), small.closed)


@pytest.mark.parametrize(
    "cluster, like, least",
    [(LAPTOP, 0.99, 0.9),
     (LAPTOP.replace(call_overhead=2e-4, wait_overhead=2.5e-4), 0.97, 0.85)],
)  # fmt: skip
def test_the_closed_forms_rank_as_the_simulation_does(cluster, like, least):
    """Also where calls and waits cost four times what a link does."""
    found = pl.plan_search(SMALL.replace(hidden=256, seq_len=64), cluster, global_batch=16, top=1)
    some = random.Random(0).sample(range(len(found.space)), 60)
    exact = [totals(found.model, found.space.plan(at), cluster, optimizer="adamw") for at in some]
    seconds, peaks = zip(*exact, strict=True)
    assert rank_correlation(found.closed[some], seconds) >= like
    assert rank_correlation(found.memory[some], peaks) >= 0.97
    ratios = found.closed[some] / np.array(seconds)
    assert np.quantile(ratios, 0.05) >= least and np.quantile(ratios, 0.95) <= 1.05


def test_the_front_is_what_no_other_plan_beats(small):
    front = small.pareto()
    assert front["closed_s"].is_monotonic_increasing and front["memory"].is_monotonic_decreasing
    for seconds, size in zip(small.closed, small.memory, strict=True):
        assert ((front["closed_s"] <= seconds) & (front["memory"] <= size)).any()


def test_losers_have_the_other_choices_and_a_reason(small):
    losers = small.losers()
    best = small.best
    assert {"tp", "pp", "recompute", "zero_stage"} <= set(losers["setting"])
    for row in losers.to_dict("records"):
        assert row["why"], row
        if hasattr(best, row["setting"]):
            assert row["instead"] != getattr(best, row["setting"])


def test_megatrons_advice_comes_out():
    nodes = pl.Cluster.preset("dgx-a100", nodes=64)
    found = pl.plan_search(pl.ModelSpec.preset("ptdp-145b"), nodes, global_batch=512,
                           precision="bf16", schedule="1f1b", offload=None, zero_stage=[0, 1],
                           top=3)  # fmt: skip
    assert found.best.tp == 8 and found.best.pp > 1  # inside the node, and across
    beyond = found.losers().query("instead == 'beyond a node'").iloc[0]
    assert beyond["times"] > 2 and "tensor-parallel waits" in beyond["why"]


@pytest.mark.prompt
def test_ten_thousand_plans_take_two_seconds():
    model, cluster = pl.ModelSpec.preset("ptdp-39b"), pl.Cluster.preset("dgx-a100", nodes=8)
    best, count = float("inf"), 0
    for _ in range(3):
        began = time.process_time()
        found = pl.plan_search(model, cluster, global_batch=128, precision="bf16", top=1)
        best, count = min(best, time.process_time() - began), len(found.plans)
    print(f"{count:,} plans in {best:.2f} s of processor time")
    assert count >= 10_000
    assert best * 10_000 / count <= 2


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"memory": 10**5}, "none of .* plans fits in 100 kB: the smallest needs 111 kB"),
        ({"batch_size": 3}, "batch_size=3: a plan has no such field"),
        ({"devices": 9}, "'stated' has 8"),
        ({"schedule": "l2l"}, "there is no closed form for it"),
        ({"grad_sync": Overlapped}, "a class of your own sends; legal: 'naive'"),
        ({"tp": 3}, "legal"),
        ({"tp": []}, "no value to try"),
    ],
)
def test_what_cannot_be_searched_is_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        pl.plan_search(SMALL, LAPTOP, **settings)


def test_a_notebook_sees_the_counts_and_the_best_ten(small):
    assert repr(small).startswith("Search(") and "fit in" in repr(small)
    page = small._repr_html_()
    assert page.count("<tr>") == 11 and "Search" not in page[:20]
