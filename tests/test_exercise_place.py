"""Lab 10's exercise: planners that know the advice pass, others are refused by what they break."""

import contextlib
import importlib
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

import paralab as pl
from judged import Table
from paralab import plan_search

PLACE = pl.exercises.place
place = importlib.import_module("paralab.exercises.place")
PLAN, FITS, NODE, TIME = PLACE.required


def planned(tp, pp, batch, devices, samples=1, **settings):
    dp = devices // (tp * pp)
    settings = {"zero_stage": 1, "precision": "bf16", "recompute": "full", **settings}
    return pl.Plan(dp=dp, tp=tp, pp=pp, microbatch_size=samples,
                   microbatches=batch // dp // samples, **settings)  # fmt: skip


def shape(model):
    """(tp, pp) that fit with full recomputation."""
    return {36: (4, 1), 48: (8, 1), 96: (8, 8)}[model.layers]


def all_data_parallel(model, cluster, batch, ask):
    devices = min(cluster.num_devices, batch)
    return planned(1, cluster.num_devices // devices, batch, cluster.num_devices)


def asks(times, model, cluster, batch, ask):
    for _ in range(times):
        ask(all_data_parallel(model, cluster, batch, ask))


def asks_too_often(*asked):
    asks(13, *asked)


def allows_itself_more(*asked):
    importlib.import_module("paralab.exercises.place").QUESTIONS = 10**9
    asks(13, *asked)


class Claims(pl.Plan):
    """A plan that says of itself whatever is asked of it."""

    world_size, global_batch = 16, 64


def searches(model, cluster, batch, ask):
    return pl.plan_search(model, cluster, global_batch=batch, precision="bf16").best


def searches_by_name(model, cluster, batch, ask):
    return plan_search(model, cluster, global_batch=batch, precision="bf16").best


def predicts(model, cluster, batch, ask):
    plan = knows(model, cluster, batch, ask)
    pl.predict(model, plan, cluster, steps=1, detail="actions")
    return plan


def predicts_without_a_profile(*asked):
    before = sys.getprofile()
    sys.setprofile(None)
    try:
        return predicts(*asked)
    finally:
        sys.setprofile(before)


def predicts_on_a_thread(*asked):
    with ThreadPoolExecutor(1, initializer=lambda: sys.setprofile(None)) as pool:
        return pool.submit(predicts, *asked).result()


def weighs(model, cluster, batch, ask):
    pl.dry_run(model, plan := knows(model, cluster, batch, ask), rank=0, cluster=cluster)
    return plan


# ---- right ---------------------------------------------------------------------------------------
def knows(model, cluster, batch, ask):
    """The best plans, known by heart."""
    tp, pp, samples = {36: (1, 1, 2), 48: (4, 1, 2), 96: (4, 8, 1)}[model.layers]
    settings = {"recompute": "none", "sequence_parallel": tp > 1}
    return planned(tp, pp, batch, cluster.num_devices, samples, **settings)


def knows_and_asks(*asked):
    asks(12, *asked)
    return knows(*asked)


def knows_formulas(model, *asked):
    pl.theory.zero.bytes_per_device(model.num_params, 16, stage=1)
    return knows(model, *asked)


def recovers(*asked):
    """Catches the error of too deep a recursion, with which Python ends every profile and trace."""

    def sizes(n):
        return [n, *sizes(n + 1)]

    with contextlib.suppress(RecursionError):
        sizes(1)
    return knows(*asked)


WRONG = [  # answer to (model, cluster, batch, ask), limits it breaks, words of the verdict
    (lambda m, c, b, ask: planned(*shape(m), b, c.num_devices), {TIME},
     "simulated step (ptdp-7.5b on 16 devices, batch 64): "),
    (all_data_parallel, {FITS, TIME}, "simulated step ("),
    (lambda m, c, b, ask: planned(16, 1, b, c.num_devices), {NODE, TIME},
     "a tensor-parallel group are on 2 nodes"),
    (lambda m, c, b, ask: planned(*shape(m), b // 2, c.num_devices), {PLAN},
     "is 4*8*1 = 32, and a step has 64 samples; legal: 16 with dp=4, mic"),
    (lambda m, c, b, ask: planned(1, 16, b, 16, schedule="interleaved", virtual_stages=3), {PLAN},
     "pp*virtual_stages is 48 stages, the model has 36 blocks"),
    (lambda m, c, b, ask: planned(*shape(m), b, c.num_devices // 2), {PLAN},
     "dp*tp*pp is 8, and there are 16 devices"),
    (lambda m, c, b, ask: planned(*shape(m), b, c.num_devices, precision="fp32"), {PLAN},
     "precision='fp32': not the required precision"),
    (lambda m, c, b, ask: planned(*shape(m), b, c.num_devices, offload={"optimizer": "cpu"}),
     {PLAN}, "not allowed in this exercise; legal: None"),
    (asks_too_often, {PLAN}, "raised RuntimeError: more than 12 questions"),
    (allows_itself_more, {PLAN}, "raised RuntimeError: more than 12 questions"),
    (lambda *asked: Claims(dp=16, precision="bf16"), {PLAN}, "not a plan; legal: a pl.Plan(...)"),
    *(
        (one, {PLAN}, "so this function of it may not be called")
        for one in (searches, searches_by_name, predicts, predicts_without_a_profile,
                    predicts_on_a_thread, weighs)
    ),
]  # fmt: skip
TABLE = Table(PLACE, WRONG, [knows, knows_and_asks, knows_formulas, recovers], exact=True)
test_a_wrong_planner_is_refused, test_a_right_planner_passes, test_its_stub = TABLE.tests()


@pytest.mark.parametrize("case", place.CASES, ids=str)
def test_the_limit_is_the_best_plan_that_a_search_finds(case):
    ptdp = {"schedule": "1f1b", "zero_stage": [0, 1], "offload": None}  # what the paper composes
    found = pl.plan_search(case.spec, case.cluster, global_batch=case.batch,
                           precision="bf16", top=3, **ptdp)  # fmt: skip
    assert found.simulated[0] == pytest.approx(case.best, abs=1e-6)
