"""Prediction: bytes equal the closed forms, time behaves, memory is the states' formulas.

That its rows are those of a run is in test_interpret_traffic.py, and that its peak is the ledger's
in test_interpret_memory.py.
"""

from __future__ import annotations

import math
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import paralab as pl
from paralab.interpret import quick
from paralab.interpret.predict import predict
from paralab.programs.compile import compiled
from paralab.programs.instructions import ALL_GATHER
from paralab.spec.cluster import ELEMENTS
from paralab.theory import flops, zero
from paralab.theory.ideal import ideal, schedule_of, stage_costs
from paralab.theory.work import Work
from refusals import refuses
from stated import FREE, MODEL, SCHEDULES, cluster, mixed, plan_of

DEEP = MODEL.replace(layers=8)


# ---- time -----------------------------------------------------------------------------------
@settings(deadline=None, max_examples=10)
@given(
    dp=st.integers(2, 4),
    microbatches=st.integers(1, 3),
    bucket_bytes=st.integers(1000, 200_000),
    alpha=st.just(0.0) | st.floats(1e-60, 1e-2),
    bandwidth=st.floats(1e6, 1e10),
)
def test_overlap_never_makes_a_step_longer(dp, microbatches, bucket_bytes, alpha, bandwidth):
    plan = pl.Plan(dp=dp, microbatches=microbatches, bucket_bytes=bucket_bytes)
    machine = cluster(intra=pl.Link(alpha=alpha, bandwidth=bandwidth))
    after = predict(MODEL, plan.replace(grad_sync="bucketed"), machine, steps=1)
    beside = predict(MODEL, plan.replace(grad_sync="overlapped"), machine, steps=1)
    assert beside.step_time <= after.step_time * (1 + 1e-12)


def test_products_in_16_bits_take_their_own_rates_and_other_kernels_as_long_as_in_fp32():
    plain = Work(flops=5e9, bytes=3e8, kernels=10, products=(1e9, 2e9, 1e9))
    rates = {"bf16": (1e10, 2e9, 5e9)}
    slow, machine = cluster(products=rates, cores=2), cluster()
    rest = 3e8 / machine.memory_bandwidth + 10 * machine.op_overhead
    assert plain.seconds(slow) == plain.seconds(machine) == pytest.approx(5e9 / 1e11 + rest)
    assert plain.seconds(slow, "bf16") == pytest.approx(0.1 + 1.0 + 0.2 + 1e9 / 1e11 + rest)
    halved = rest - 1.5e8 / machine.memory_bandwidth
    assert plain.seconds(slow, "fp16") == pytest.approx(5e9 / 1e11 + halved)
    # On a GPU other kernels move half as much.
    own = plain.seconds(cluster(products=rates), "bf16")
    assert own == pytest.approx(0.1 + 1.0 + 0.2 + 1e9 / 1e11 + halved)


def test_with_tf32_products_take_its_rates_and_other_kernels_move_what_they_did():
    rates = {"tf32": (2e11, 4e11, 8e11)}
    plain, low = (
        predict(MODEL, pl.Plan(tf32=tf32), cluster(products=rates), steps=1)
        for tf32 in (False, True)
    )
    ops = compiled(MODEL.resolved(gpus=True), pl.Plan()).model.ops
    works = (half for op in ops for half in op.work)
    products = sum(works, Work()).products
    less = sum(n / 1e11 - n / rate for n, rate in zip(products, rates["tf32"], strict=True))
    assert plain.step_time - low.step_time == pytest.approx(less) and less > 0
    assert plain.step_time == predict(MODEL, pl.Plan(tf32=True), cluster(), steps=1).step_time


@pytest.mark.parametrize(("vocab", "share"), [(257, 1.0), (258, 0.5), (264, 0.0)])
def test_a_vocabulary_of_odd_size_is_slow_in_16_bits_on_a_gpu(vocab, share):
    model = MODEL.replace(vocab=vocab, attention="explicit")
    products = sum((half for half in compiled(model, pl.Plan()).model.ops[-2].work), Work())
    assert products.odd == share * products.flops > 0 or share == products.odd == 0
    stated = {"bf16": (2e11, 2e11, 2e11)}
    for precision, rates, cores, rate in (
        ("bf16", stated, None, 2e11), ("fp16", {}, None, 1e11),
        ("fp32", {}, None, math.inf), ("bf16", stated, 2, math.inf),  # without tensor cores
    ):  # fmt: skip
        even, odd = (cluster(products=rates, cores=cores, odd_products=s) for s in (1.0, 0.25))
        more = products.seconds(odd, precision) - products.seconds(even, precision)
        assert more == pytest.approx(3 * products.odd / rate)


def test_the_loss_of_16_bits_is_computed_in_32_and_copied_to_it_and_back():
    for precision, each in (("fp32", 12), ("bf16", 18)):
        program = compiled(MODEL, pl.Plan(microbatch_size=3, precision=precision))
        forward, backward, _ = program.model.ops[-1].work
        moved = each * 3 * MODEL.seq_len * MODEL.vocab
        assert forward.exact == backward.exact == moved and forward.bytes == 0
        for cores in (None, 2):  # as many on a GPU as on a processor that states rates
            machine = cluster(products={"bf16": (1e9, 1e9, 1e9)}, cores=cores, op_overhead=0.0)
            found = forward.seconds(machine, precision)
            assert found == pytest.approx(moved / machine.memory_bandwidth)


@pytest.mark.parametrize(
    ("attention", "precision"), [("explicit", "fp32"), ("sdpa", "fp32"), ("sdpa", "bf16")]
)
def test_every_matrix_product_has_its_kind(attention, precision):
    """But for those of torch's fused kernel in fp32, which has one rate whatever the others do."""
    model = MODEL.replace(attention=attention, tied=False)
    ops = compiled(model, pl.Plan(microbatch_size=3, precision=precision)).model.ops
    forward, input_, weight = (sum((op.work[half] for op in ops), Work()) for half in range(3))
    attended = model.layers * 4 * 3 * model.seq_len**2 * model.hidden
    linear = flops.forward_flops(model, 3) - attended
    assert forward.flops == linear + attended and input_.flops == linear + 2 * attended
    attended *= (attention, precision) != ("sdpa", "fp32")
    assert forward.products == (linear, attended, 0)
    assert input_.products == (0, linear + 2 * attended, 0)
    assert weight.products == (0, 0, linear)


def test_dropout_draws_each_mask_whole_on_every_tensor_parallel_rank():
    model = MODEL.replace(vocab=258)
    drawn = model.layers * (2 * 2 * 24 * 40 + 2 * 4 * 24 * 24) + 2 * 24 * 40  # x twice, scores; x
    plain, dropped = (
        sum(
            op.work[0].elements[ELEMENTS.index("draw")]
            for op in compiled(model.replace(dropout=p), pl.Plan(tp=2)).model.ops
        )
        for p in (0.0, 0.1)
    )
    assert (plain, dropped) == (0, drawn)


def test_a_tensor_parallel_step_is_longer_by_what_its_waits_cost():
    model, plan = MODEL.replace(vocab=258), pl.Plan(tp=2, microbatches=2)
    plain, slower = (predict(model, plan, cluster(wait_overhead=s), steps=1) for s in (0.0, 1.0))
    waits = (plain.spans.query("rank == 0")["kind"] == "wait").sum()
    assert waits > 16 and slower.step_time - plain.step_time == pytest.approx(waits)


def test_a_rank_that_is_alone_in_its_groups_waits_for_no_other():
    plain, slower = (
        predict(MODEL, pl.Plan(zero_stage=3), cluster(wait_overhead=s), steps=1) for s in (0.0, 1.0)
    )
    assert len(plain.collectives) and slower.step_time == plain.step_time


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_costs_its_forward_once_more_and_no_bytes(recompute):
    plan = pl.Plan(dp=2, zero_stage=3)
    plain, again = (
        predict(MODEL, plan.replace(recompute=r), cluster(), steps=1) for r in ("none", recompute)
    )
    cost = [
        report.spans.query("rank == 0").groupby("kind")["cost"].sum() for report in (plain, again)
    ]
    more = cost[1]["backward"] - cost[0]["backward"]
    assert 0 < more < cost[0]["forward"]
    # four b s^2 h for the scores and their product with the values; a block's whole forward
    least = {"selective": 4 * 2 * MODEL.seq_len**2 * MODEL.hidden,
             "full": flops.block_flops(MODEL, 2)}  # fmt: skip
    assert more > MODEL.layers * least[recompute] / cluster().flops
    assert cost[1]["forward"] == pytest.approx(cost[0]["forward"], rel=1e-12)
    assert plain.traffic().equals(again.traffic())


def test_a_shard_takes_an_nth_of_the_optimizers_time():
    free = cluster(op_overhead=0.0)
    cost = [
        predict(MODEL, pl.Plan(dp=4, zero_stage=stage), free, steps=1)
        .spans.query("kind == 'optimizer'").groupby("rank")["cost"].sum().mean()
        for stage in (0, 3)
    ]  # fmt: skip
    assert cost[1] == pytest.approx(cost[0] / 4, rel=1e-3)


# ---- pipelines ------------------------------------------------------------------------------
@pytest.mark.parametrize("name", [*SCHEDULES, mixed])
def test_with_free_links_a_prediction_is_the_simulated_schedule(name):
    plan = plan_of(name, pp=4, microbatches=8)
    free = cluster(intra=FREE, op_overhead=0.0)
    report = predict(DEEP.replace(tied=False), plan, free, steps=1)
    assert schedule_of(report) == [list(rank) for rank in plan.actions()]
    assert report.bubble == pytest.approx(ideal(report).bubble_rate, abs=1e-9)


def test_the_halves_of_a_backward_cost_what_the_whole_does():
    whole, split = (stage_costs(predict(DEEP, plan_of(n), cluster())) for n in ("1f1b", "zb-h1"))
    for stage in range(2):
        halves = split["backward"][stage] + split["weight_grad"][stage]
        assert halves == pytest.approx(whole["backward"][stage], rel=1e-9)
        assert 0.2 < split["weight_grad"][stage] / whole["backward"][stage] < 0.6
    assert whole["weight_grad"] == [0.0, 0.0]


# ---- memory ---------------------------------------------------------------------------------
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("recipe", [("fp32", "fp32"), ("zero-fp16", "bf16")], ids=str)
@pytest.mark.parametrize("tied", [True, False])
def test_model_states_are_the_papers_formulas_with_padding(stage, recipe, tied):
    """And a step count of four bytes for every tensor that AdamW updates."""
    (name, precision), model = recipe, MODEL.replace(tied=tied)
    plan = pl.Plan(dp=4, zero_stage=stage, precision=precision, bucket_bytes=20_000)
    found = quick.states(program := compiled(model, plan), 0)
    psi, most = sum(unit.numel for unit in program.units[0]), 4 * len(model.parameter_shapes())
    assert 0 <= psi - model.num_params < 4 * len(program.units[0])
    said = zero.stage_bytes(psi, 4, stage, name)
    assert [found["parameters"], found["gradients"]] == [said["parameters"], said["gradients"]]
    counts = found["optimizer"] - said["moments"] - said.get("master", 0)
    assert counts == most if stage == 0 else 0 < counts <= most


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("prefetch", [0, 1, 2, 9])
def test_no_more_units_are_gathered_than_the_prefetch_depth_says(prefetch, tied):
    program = compiled(DEEP.replace(tied=tied), pl.Plan(dp=2, zero_stage=3, prefetch=prefetch))
    here: set[tuple] = set()
    most = 0
    for ins in program.codes[0]:
        if ins.op == ALL_GATHER:
            here.update(ins.writes)
        most = max(most, len(here))
        here.difference_update(ins.frees)
    root = 1 if tied else 0  # the embedding, which the head needs too
    assert most == min(1 + prefetch + root, len(program.units[0])) and not here


def test_the_table_for_messages_names_the_fullest_rank_its_categories_and_their_sum():
    plan = plan_of("1f1b", pp=4, microbatches=8)
    totals = [sum(quick.peak(MODEL.replace(layers=4), plan, rank=r).values()) for r in range(4)]
    text = quick.table(MODEL.replace(layers=4), plan)
    assert f"what rank {totals.index(max(totals))} needs" in text
    assert f"{max(totals) / 1e6:,.1f} MB" in text
    for category in ("parameters", "gradients", "optimizer", "activations", "in all"):
        assert category in text


def test_threads_that_ask_for_the_same_plan_do_not_disturb_each_other():
    """As a widget does that checks its plan in the background while a slider moves."""
    plans = [
        pl.Plan(dp=2, pp=4, microbatches=6, microbatch_size=size, zero_stage=1)
        for size in range(1, 7)
    ]

    def ask(plan):
        report = predict(DEEP, plan, cluster(), steps=1, detail="actions")
        return report.step_time, report.peak_memory

    alone = [ask(plan) for plan in plans]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            asked = [threads.submit(ask, plan) for plan in plans * 2]
        assert [one.result() for one in asked] == alone * 2
    finally:
        sys.setswitchinterval(before)


# ---- what cannot be predicted ---------------------------------------------------------------
@pytest.mark.parametrize(("arguments", "said"), [
    ({"model": "gpt2"}, "model='gpt2'"),
    ({"plan": "dp=2"}, "plan='dp=2'"),
    ({"plan": pl.Plan(tp=2)}, "tp=2"),
    ({"cluster": "laptop"}, "cluster='laptop'"),
    ({"steps": 0}, "steps=0"),
    ({"optimizer": "adam"}, "optimizer='adam'"),
    ({"plan": pl.Plan(dp=4, pp=2, microbatches=4), "cluster": cluster(devices_per_node=4)},
     "dp=4: the plan needs 8 devices"),
    ({"plan": pl.Plan(dp=2, pp=4, microbatches=4), "cluster": cluster(devices_per_node=4),
      "model": DEEP}, "pp=4: the plan needs 8 devices"),
])  # fmt: skip
def test_what_a_run_would_refuse_is_refused(arguments, said):
    given_ = {"model": MODEL, "plan": pl.Plan(dp=2), "cluster": cluster(), **arguments}
    refuses(f"{said}.*legal: ", predict, **given_)


@pytest.mark.parametrize("stated", [
    {"products": 3}, {"products": {"bf16": 1e9}}, {"products": {"bf16": (1, 2)}},
    {"products": {"fp32": (1, 2, 3)}}, {"products": {"bf16": (1e9, 0, 1e9)}}, {"odd_products": 2.0},
    {"collectives": {"allreduce": pl.Link(alpha=1.0, bandwidth=1.0)}},
    {"half_rate_tokens": -1}, {"peak_flops": 0}, {"call_overhead": -1}, {"wait_overhead": "long"},
], ids=str)  # fmt: skip
def test_a_machine_that_there_is_not_is_refused(stated):
    (field,) = stated
    refuses(f"^{field}.*legal: ", cluster, **stated)
