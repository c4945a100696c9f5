"""Prediction of ZeRO: bytes of the closed forms, the rows of a run, model states and memory."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

import paralab as pl
from paralab.parallel.buckets import units
from paralab.theory import formulas, memory, memory_zero
from paralab.theory.gathering import Gathering
from paralab.theory.predict import predict
from test_predict import MODEL, cluster

SMALL = {"bucket_bytes": 20_000}  # several units in stages 1 and 2
DEEP = MODEL.replace(layers=4)
SOME = ("embedding.token", "blocks.0", "blocks.1.mlp")


def layout(model, plan, rank=0):
    return units(memory.rank_sizes(model, plan, rank), model, plan)


def padded(model, plan, rank=0):
    """Elements of all units that are trained."""
    return sum(unit.numel for unit in layout(model, plan, rank) if not unit.frozen)


def sent(report, **where):
    calls = report.collectives[report.collectives["step"] == 0]
    for column, value in where.items():
        calls = calls[calls[column] == value]
    return int(calls["wire_bytes"].sum())


# ---- traffic --------------------------------------------------------------------------------
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("m", [1, 2, 5])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_sends_2_psi_or_m_plus_1_psi_or_3_m_psi(stage, m, n, tied):
    model = MODEL.replace(tied=tied)
    plan = pl.Plan(dp=n, zero_stage=stage, microbatches=m, prefetch=m - 1, **SMALL)
    report = predict(model, plan, cluster(), steps=1)
    psi = 4 * padded(model, plan)  # bytes
    assert 0 <= psi - 4 * model.num_params < 4 * n * len(layout(model, plan))
    gathers = 2 * m if stage == 3 else 1
    reduces = 1 if stage == 1 else m
    assert gathers + reduces == {1: 2, 2: m + 1, 3: 3 * m}[stage]
    # N ranks, each (N-1)/N of the payload
    assert sent(report, op="all_gather", phase="param_gather") == gathers * (n - 1) * psi
    assert sent(report, op="reduce_scatter", phase="grad_sync") == reduces * (n - 1) * psi
    assert sent(report) == (gathers + reduces) * (n - 1) * psi
    assert set(report.collectives["axis"]) == ({"dp"} if n > 1 or stage == 3 else set())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_replicas_add_one_all_reduce_of_a_shards_gradient(stage):
    m = 3
    plan = pl.Plan(dp=8, shard=4, zero_stage=stage, microbatches=m, **SMALL)
    report = predict(MODEL, plan, cluster(nodes=2, devices_per_node=4), steps=1)
    psi = 4 * padded(MODEL, plan)
    times = {1: 2, 2: m + 1, 3: 3 * m}[stage]
    assert sent(report, axis="dp", level="intra") == 2 * times * 3 * psi  # two groups of four
    # four pairs, each sends 2 times a quarter
    assert sent(report, axis="replica", level="inter") == 4 * 2 * psi // 4
    assert sent(report) == sent(report, level="intra") + sent(report, level="inter")
    calls = report.collectives[report.collectives["axis"] == "replica"]
    assert set(calls["ranks"]) == {(r, r + 4) for r in range(4)}


@pytest.mark.filterwarnings("ignore:zero_stage=3 with pp")
def test_stage_2_of_a_pipeline_reduces_once_a_step_and_stage_3_in_every_action():
    m, model = 3, DEEP.replace(tied=False)
    for stage, times in ((1, 2), (2, 2), (3, 3 * m)):
        plan = pl.Plan(pp=2, dp=2, zero_stage=stage, microbatches=m, **SMALL)
        report = predict(model, plan, cluster(), steps=1)
        psi = 4 * (padded(model, plan, 0) + padded(model, plan, 2))
        assert sent(report, axis="dp") == times * psi  # N - 1 = 1


def test_a_tied_embedding_of_a_pipeline_is_summed_shard_by_shard():
    plan = pl.Plan(pp=2, dp=3, zero_stage=1, microbatches=2, **SMALL)
    calls = predict(DEEP, plan, cluster(), steps=1).collectives
    tied = calls[calls["phase"] == "tied"]
    elements = DEEP.vocab * DEEP.hidden
    assert set(tied["payload_bytes"]) == {4 * -(-elements // 3)} and len(tied) == 6


@pytest.mark.parametrize("prefetch", [0, 1])
def test_frozen_parameters_are_gathered_and_never_reduced(prefetch):
    model = MODEL.replace(frozen=("embedding", "blocks.0"), tied=False)
    plan = pl.Plan(dp=2, zero_stage=3, prefetch=prefetch)
    report = predict(model, plan, cluster(), steps=1)
    made = layout(model, plan)
    free = sum(unit.numel for unit in made if unit.frozen)
    assert sent(report, op="reduce_scatter") == 4 * padded(model, plan)
    # in forward; nothing flows back through them, so backward does without
    assert sent(report, op="all_gather") == 4 * (2 * padded(model, plan) + free)
    kept = predict(model, plan.replace(zero_stage=1), cluster(), steps=1)
    assert sent(kept) == 2 * 4 * padded(model, plan.replace(zero_stage=1))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_16_bits_halve_the_bytes(stage):
    plan = pl.Plan(dp=4, zero_stage=stage, microbatches=2, bucket_bytes=10**9)
    full, half = (
        predict(MODEL, plan.replace(precision=precision), cluster(), steps=1)
        for precision in ("fp32", "bf16")
    )
    assert 2 * sent(half) == sent(full)


# ---- rows of a run ----------------------------------------------------------------------------
def order(report, rank):
    """Everything a rank does in step 1, in order, with every call's row of the traffic table.

    Of a pipeline without waits: in strict mode a send waits for its receiver.
    """
    spans = report.spans[(report.spans["rank"] == rank) & (report.spans["step"] == 1)]
    calls = report.collectives.set_index("span")
    columns = ["op", "axis", "ranks", "peer", "level", "phase", "payload_bytes", "wire_bytes"]
    found = []
    for row in spans.sort_values("id").itertuples():
        said = (row.kind, row.stage, row.chunk, row.microbatch)
        if row.kind == "comm":
            call = calls.loc[row.id]
            if call["phase"] in ("control", "setup"):
                continue
            said = tuple(call[columns])
        if row.kind != "wait" or report.plan.pp == 1:
            found.append(said)
    return found


@pytest.mark.parametrize(
    "model, settings",
    [
        (MODEL, {"dp": 2, "zero_stage": 1}),
        (MODEL.replace(tied=False), {"dp": 3, "zero_stage": 1, "microbatches": 3}),
        (MODEL, {"dp": 3, "zero_stage": 2, "microbatches": 2}),
        (MODEL, {"dp": 2, "zero_stage": 3, "microbatches": 2}),
        (MODEL.replace(tied=False), {"dp": 3, "zero_stage": 3, "prefetch": 2}),
        (MODEL, {"dp": 1, "zero_stage": 3, "microbatches": 2, "prefetch": 0}),
        (MODEL, {"dp": 4, "shard": 2, "zero_stage": 3, "prefetch": 0}),
        (MODEL, {"dp": 4, "shard": 2, "zero_stage": 2, "microbatches": 2}),
        (MODEL.replace(frozen=SOME), {"dp": 2, "zero_stage": 3, "microbatches": 2}),
        (MODEL.replace(frozen=("embedding", "blocks.0")), {"dp": 2, "zero_stage": 3}),
        (MODEL.replace(frozen=SOME), {"dp": 2, "zero_stage": 1}),
        (MODEL.replace(frozen=SOME), {"dp": 2}),
        (MODEL, {"dp": 2, "zero_stage": 3, "recompute": "full"}),
        (MODEL, {"dp": 2, "recompute": "selective"}),
        (MODEL, {"dp": 3, "zero_stage": 2, "precision": "bf16"}),
        (MODEL, {"dp": 2, "precision": "bf16"}),
        (DEEP, {"pp": 2, "dp": 2, "zero_stage": 1, "microbatches": 3}),
        (DEEP, {"pp": 2, "dp": 2, "zero_stage": 2, "microbatches": 2, "schedule": "zb-h1"}),
        (DEEP, {"pp": 2, "dp": 2, "zero_stage": 3, "microbatches": 3}),
    ],
    ids=lambda given: (
        "-".join(f"{k}={v}" for k, v in given.items()) if isinstance(given, dict) else ""
    ),
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:zero_stage=3 with pp")
def test_predicted_rows_are_the_rows_of_a_run(run, model, settings):
    plan = pl.Plan(**settings, **SMALL)
    measured, expected = run(model, plan, steps=2), predict(model, plan, cluster(), steps=2)
    for rank in range(plan.world_size):
        assert order(expected, rank) == order(measured, rank)
    assert pl.compare(expected, measured).bytes_agree


def test_gathering_at_every_action_of_a_pipeline_is_predicted_with_a_warning():
    plan = pl.Plan(pp=2, dp=2, zero_stage=3, microbatches=2)
    with pytest.warns(UserWarning, match="gathered again for every action"):
        predict(DEEP, plan, cluster(), steps=1)


def test_a_comparison_says_what_computing_hides():
    for settings, said in [
        ({"zero_stage": 1}, "gathered after the optimizer"),
        ({"zero_stage": 3}, "up to 1 unit ahead"),
        ({"zero_stage": 3, "prefetch": 0}, "gathered when they are needed"),
    ]:
        report = predict(MODEL, pl.Plan(dp=2, **settings), cluster())
        held = pl.compare(report, report.replay(cluster()))
        assert said in held.notes["exposed communication"] and "zero_stage=" in repr(held)
    far = cluster(nodes=2, devices_per_node=2)
    report = predict(MODEL, pl.Plan(dp=4, shard=2, zero_stage=3), far)
    # of 3 Psi/2 + Psi/2 what the replicas send each other leaves the node
    assert "25 % of them leave a node" in str(pl.compare(report, report.replay(far)))


# ---- time -----------------------------------------------------------------------------------
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_costs_its_forward_once_more_and_no_bytes(recompute):
    plan, machine = pl.Plan(dp=2, zero_stage=3), cluster()
    plain, again = (
        predict(MODEL, plan.replace(recompute=r), machine, steps=1) for r in ("none", recompute)
    )
    spent = [r.spans[r.spans["kind"] == "backward"]["cost"].sum() / 2 for r in (plain, again)]
    block = formulas.recompute_work(MODEL, 2, recompute)
    assert spent[1] - spent[0] == pytest.approx(MODEL.layers * block.seconds(machine), rel=1e-9)
    assert sent(plain) == sent(again)
    # four b s^2 h for the scores and their product with the values; a block's whole forward
    arithmetic = formulas.EXP_FLOPS * formulas.sizes(MODEL, 2)[1]
    if recompute == "selective":
        assert block.flops - arithmetic == 4 * 2 * MODEL.seq_len**2 * MODEL.hidden
    else:
        assert block == formulas.forward_parts(MODEL, 2)["blocks.1"]


def test_a_shard_takes_an_nth_of_the_optimizers_time():
    free = cluster(op_overhead=0.0)
    cost = [
        predict(MODEL, pl.Plan(dp=4, zero_stage=stage), free, steps=1)
        .spans.query("kind == 'optimizer'")["cost"].mean()
        for stage in (0, 3)
    ]  # fmt: skip
    assert cost[1] == pytest.approx(cost[0] / 4, rel=1e-3)


# ---- memory ---------------------------------------------------------------------------------
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_model_states_are_the_papers_formulas_with_padding(n, precision):
    w, k = (4, 8) if precision == "fp32" else (2, 12)
    for stage in range(4):
        plan = pl.Plan(dp=n, zero_stage=stage, precision=precision, **SMALL)
        states = memory.state_bytes(MODEL, plan)
        plain, made = MODEL.num_params, layout(MODEL, plan) if stage else []
        psi = padded(MODEL, plan) if stage else plain
        share = [n if stage >= shared else 1 for shared in (3, 2, 1)]  # of w, w and K
        tensors = len(made) if stage else len(MODEL.parameter_shapes())
        assert states["parameters"] == w * psi // share[0]
        assert states["gradients"] == (w * psi // share[1] if stage > 1 else w * plain)
        assert states["optimizer"] == k * psi // share[2] + 4 * tensors
        assert psi - plain < max(1, n * len(made))


def test_frozen_parameters_have_bytes_of_their_own_alone():
    model = MODEL.replace(frozen=("embedding",))
    for stage in (0, 1, 3):
        plan = pl.Plan(dp=2, zero_stage=stage, bucket_bytes=10**9)
        whole, part = memory.state_bytes(MODEL, plan), memory.state_bytes(model, plan)
        assert part["parameters"] == whole["parameters"]
        assert part["gradients"] * MODEL.num_params == whole["gradients"] * model.num_trainable


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("prefetch", [0, 1, 2, 9])
def test_no_more_units_are_gathered_than_the_prefetch_depth_says(prefetch, tied):
    model = DEEP.replace(tied=tied)
    plan = pl.Plan(dp=2, zero_stage=3, prefetch=prefetch)
    stages = memory.stage_parts(model, plan, 0)
    gathering = Gathering(model, stages, layout(model, plan), prefetch)
    parts, most = stages[0], 0
    root = 1 if tied else 0  # the embedding stays for the head
    for at in range(len(parts)):
        gathering.forward(parts, at)
        most = max(most, len(gathering.here))
        gathering.leave(parts, at)
    assert not gathering.here
    for at in reversed(range(len(parts))):
        gathering.backward(parts, at)
        most = max(most, len(gathering.here))
        if not (tied and at == 0):
            gathering.release([unit for unit in gathering.needs[parts[at]] if unit])
    assert most == min(1 + prefetch + root, len(parts))


def test_the_formulas_peak_falls_from_stage_to_stage():
    model = pl.ModelSpec(layers=12, hidden=64, heads=4, seq_len=16)
    peaks = []
    for stage in range(4):
        plan = pl.Plan(dp=4, zero_stage=stage, microbatches=2, bucket_bytes=100_000)
        report = predict(model, plan, cluster(), steps=1)
        moments = memory.moments(model, plan).values()
        assert report.peak_memory == max(sum(moment.values()) for moment in moments)
        peaks.append(report.peak_memory)
    assert peaks == sorted(peaks, reverse=True) and peaks[3] < peaks[0] / 2


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("recompute, kept", [("full", 1), ("selective", 16)])
def test_recomputation_keeps_a_blocks_input_or_all_but_its_scores(recompute, kept, stage):
    batch, model = (
        16,
        DEEP.replace(vocab=32),
    )  # a small head, so that a block's backward is the peak
    x, _ = formulas.sizes(MODEL, batch)
    stats = 0 if recompute == "full" else 4 * batch * MODEL.seq_len
    found = memory.block_activation_bytes(MODEL, batch, recompute=recompute)
    assert found == 4 * (kept * x + stats)
    plan = pl.Plan(microbatch_size=batch, recompute=recompute, zero_stage=stage)
    plain = memory.moments(model, plan.replace(recompute="none"))["forward"]["activations"]
    moments = memory.moments(model, plan)
    one = memory.block_activation_bytes(model, batch)
    assert plain - moments["forward"]["activations"] == model.layers * (one - found)
    # while it runs backward, one block has everything again, or its scores and q, k, v
    again = one - 4 * x if recompute == "full" else one - found + 4 * 3 * x
    head = memory.part_activation_bytes(model, "head", batch)
    assert again > head
    less = moments["forward"]["activations"] - head + again - moments["backward"]["activations"]
    # ZeRO's fullest moment may be a later block's backward, when some have gone and gradients came
    assert less in [found * gone for gone in range(model.layers if stage else 1)]


@pytest.mark.parametrize(
    "settings",
    [
        {"dp": 2, "zero_stage": 1}, {"dp": 3, "zero_stage": 2}, {"dp": 2, "zero_stage": 3},
        {"dp": 3, "zero_stage": 3, "prefetch": 0, "precision": "bf16"},
    ],
)  # fmt: skip
def test_the_ledger_counts_the_formulas_bytes(run, settings):
    plan = pl.Plan(**settings, **SMALL)
    found = run(MODEL, plan, steps=1).memory
    found = found[found["rank"] == plan.world_size - 1]
    least, most = (found.groupby("category")["bytes"].agg(name) for name in ("min", "max"))
    states, item = memory.state_bytes(MODEL, plan), 4 if plan.precision == "fp32" else 2
    masks = MODEL.layers * MODEL.seq_len**2
    assert most["optimizer"] == least["optimizer"] == states["optimizer"]
    assert least["parameters"] == states["parameters"] + masks
    if plan.zero_stage > 1:
        assert most["gradients"] >= states["gradients"]
    if plan.zero_stage < 3:
        assert memory.moments(MODEL, plan)["forward"]["parameters"] == most["parameters"]
    kept = memory.activation_bytes(MODEL, plan.microbatch_size, precision=plan.precision)
    assert most["activations"] - kept in range(17)  # the loss's own scalars
    if plan.zero_stage == 3:  # at most the embedding, the unit in use and those ahead of it
        sizes = [item * unit.numel for unit in layout(MODEL, plan)]
        gathered = most["parameters"] - least["parameters"]
        assert max(sizes) <= gathered <= sum(sorted(sizes)[-2 - plan.prefetch :])


@pytest.mark.parametrize(("pp", "schedule"), [(1, "1f1b"), (2, "1f1b"), (2, "gpipe")])
def test_the_first_stage_keeps_whole_gradients_until_the_last_micro_batch(pp, schedule):
    """So no reduce-scatter is under way in any forward, and all gradients are there in one."""
    model = pl.ModelSpec(layers=4, hidden=64, heads=4, seq_len=16, vocab=512)
    plan = pl.Plan(dp=2, pp=pp, schedule=schedule, microbatches=6, microbatch_size=1, zero_stage=1)
    for rank in range(0, plan.world_size, 2):
        forward = memory.moments(model, plan, rank=rank)["forward"]
        assert forward["buffers"] == memory.message_bytes(model, plan, rank)
        before = pp > 1 and schedule == "gpipe"  # every forward comes before the first backward
        whole = 4 * sum(memory.rank_sizes(model, plan, rank).values())
        assert forward["gradients"] == (0 if before else whole)


def test_threads_that_ask_for_the_same_plan_do_not_disturb_each_other():
    """As a widget does that checks its plan in the background while a slider moves."""
    model = pl.ModelSpec(layers=8, hidden=64, heads=4, seq_len=16, vocab=512)
    plans = [
        pl.Plan(dp=2, pp=4, microbatches=6, microbatch_size=size, zero_stage=3, prefetch=2)
        for size in range(1, 9)
    ]
    alone = [[memory.moments(model, plan, rank=r) for r in range(8)] for plan in plans]
    caches = memory_zero._walk, memory._standing, memory._held, memory._chunks
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for at, plan in enumerate(plans):
            for cache in caches:
                cache.cache_clear()
            with ThreadPoolExecutor(4) as threads:
                asked = [threads.submit(memory.moments, model, plan, rank=r) for r in range(8)]
            assert [one.result() for one in asked] == alone[at]
    finally:
        sys.setswitchinterval(before)
