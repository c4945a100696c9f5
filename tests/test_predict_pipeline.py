"""Prediction of pipelines: bytes of the closed forms, the rows of a run, time and memory."""

from __future__ import annotations

from collections import Counter

import pytest

import paralab as pl
from paralab.parallel.partition import partition
from paralab.parallel.schedules import one_f_one_b
from paralab.theory import formulas, memory
from paralab.theory.ideal import ideal, schedule_of, stage_costs
from paralab.theory.predict import predict

MODEL = pl.ModelSpec(layers=5, hidden=40, heads=4, seq_len=24, vocab=257)
NAMES = ("naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2")
ACTIVATION = 4 * 2 * MODEL.seq_len * MODEL.hidden  # bytes of two samples


def cluster(**changes):
    settings = {
        "name": "stated",
        "devices_per_node": 64,
        "flops": 1e11,
        "memory_bandwidth": 3e10,
        "op_overhead": 5e-6,
        "intra": pl.Link(alpha=3e-4, bandwidth=1e9),
    }
    return pl.Cluster(**{**settings, **changes})


FREE = pl.Link(alpha=0.0, bandwidth=1e30)


def plan_of(name, pp=2, microbatches=4, **settings):
    v = 2 if name == "interleaved" else 1
    return pl.Plan(pp=pp, schedule=name, microbatches=microbatches, virtual_stages=v, **settings)


# ---- traffic --------------------------------------------------------------------------------
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tied", [True, False])
def test_every_boundary_carries_every_microbatch_once_in_each_direction(name, tied):
    plan = plan_of(name)
    calls = predict(MODEL.replace(tied=tied), plan, cluster(), steps=2).collectives
    calls = calls[calls["step"] == 1]
    sends = calls[calls["op"] == "send"]
    assert set(sends["payload_bytes"]) == set(sends["wire_bytes"]) == {ACTIVATION}
    assert len(sends) == 2 * plan.microbatches * (plan.stages - 1)
    assert len(sends) == (calls["op"] == "recv").sum()
    tied_rows = calls[calls["phase"] == "tied"]
    assert len(tied_rows) == 2 * tied
    assert set(tied_rows["wire_bytes"]) <= {4 * MODEL.vocab * MODEL.hidden}  # 2(n-1)/n S, n = 2


@pytest.mark.parametrize(
    "plan",
    [
        plan_of("gpipe"),
        plan_of("interleaved", dp=2, bucket_bytes=20_000),
        plan_of("zb-h1", dp=2, bucket_bytes=20_000, grad_sync="bucketed"),
        plan_of("1f1b", pp=3, microbatches=2),
        plan_of("zb-h2", pp=3, microbatches=7),
    ],
    ids=lambda plan: f"{plan.schedule}-{plan.pp}-{plan.dp}",
)
def test_predicted_bytes_and_order_are_those_of_a_run(run, plan):
    measured = run(MODEL, plan, steps=2)
    expected = predict(MODEL, plan, cluster(), steps=2)
    assert pl.compare(expected, measured).bytes_agree
    assert order(expected) == order(measured)


def order(report):
    """What every rank computes and whom it calls, in order; waits left out, and the losses."""
    spans = report.spans[(report.spans["step"] == 1) & ~report.spans["kind"].isin(["wait"])]
    calls = report.collectives.set_index("span")
    found = {}
    for row in spans.sort_values("id").itertuples():
        said = (row.kind, row.stage, row.chunk, row.microbatch)
        if row.kind == "comm":
            call = calls.loc[row.id]
            if call["phase"] in ("control", "setup"):
                continue
            said = (call["op"], call["axis"], call["ranks"], call["peer"], call["phase"])
        found.setdefault(row.rank, []).append(said)
    return found


def test_gradients_of_a_stage_travel_in_buckets_of_its_own_parameters():
    plan = pl.Plan(pp=2, dp=2, microbatches=2, grad_sync="bucketed", bucket_bytes=10**9)
    calls = predict(MODEL, plan, cluster(), steps=1).collectives
    calls = calls[calls["phase"] == "grad_sync"]
    for rank in range(4):
        mine = calls[calls["rank"] == rank]
        held = 4 * sum(memory.rank_sizes(MODEL, plan, rank).values())
        assert mine["payload_bytes"].sum() == held + (-held) % 8
        assert set(mine["ranks"]) == {((0, 1), (2, 3))[rank // 2]}


# ---- time -----------------------------------------------------------------------------------
@pytest.mark.parametrize("name", NAMES)
def test_with_free_links_a_prediction_is_the_simulated_schedule(name):
    model = MODEL.replace(layers=8, tied=False)
    plan = plan_of(name, pp=4, microbatches=8)
    report = predict(model, plan, cluster(intra=FREE, op_overhead=0.0), steps=1)
    alone = ideal(report)
    assert schedule_of(report) == [list(rank) for rank in plan.actions()]
    # Costs are medians, and the first micro-batch's gradients need not be added to earlier ones.
    assert report.bubble == pytest.approx(alone.bubble_rate, abs=2e-3)


def test_a_slower_link_makes_the_bubble_larger():
    fast, slow = (
        predict(MODEL, plan_of("1f1b"), cluster(intra=pl.Link(alpha=a, bandwidth=1e9))).bubble
        for a in (0.0, 1e-3)
    )
    assert slow > fast + 0.01


def test_the_halves_of_a_backward_cost_what_the_whole_does():
    whole, split = (stage_costs(predict(MODEL, plan_of(n), cluster())) for n in ("1f1b", "zb-h1"))
    for stage in range(2):
        halves = split["backward"][stage] + split["weight_grad"][stage]
        assert halves == pytest.approx(whole["backward"][stage], rel=1e-12)
        assert 0.2 < split["weight_grad"][stage] / whole["backward"][stage] < 0.6
    assert whole["weight_grad"] == [0.0, 0.0]


def test_a_weight_half_is_one_product_of_every_linear_layer():
    halves = formulas.backward_halves(MODEL, 2, accumulate=False)
    x = 2 * MODEL.seq_len * MODEL.hidden
    linear = MODEL.layers * 24 * x * MODEL.hidden + 2 * x * MODEL.vocab  # as in forward
    assert sum(part.weight.flops for part in halves) == linear
    late = {name for part in halves for name in part.weight_names}
    linears = ("attention.qkv", "attention.proj", "mlp.up", "mlp.down")
    assert late == {n for n in MODEL.parameter_shapes() if any(layer in n for layer in linears)}


def test_only_the_first_micro_batchs_gradients_come_without_being_added_up():
    spans = predict(MODEL, plan_of("1f1b"), cluster(), steps=1).spans
    costs = spans[(spans["kind"] == "backward") & (spans["rank"] == 0)].sort_values("microbatch")
    first, second, *others = costs["cost"]
    assert first < second and others == [second, second]


def test_a_step_is_not_over_before_its_last_message_has_left():
    slow = cluster(intra=pl.Link(alpha=0.5, bandwidth=1e9))
    report = predict(MODEL.replace(tied=False), plan_of("1f1b"), slow, steps=1)
    last = report.collectives[report.collectives["rank"] == 1]["end"].max()
    optimizer = report.spans[(report.spans["kind"] == "optimizer") & (report.spans["rank"] == 1)]
    assert optimizer["start"].iloc[0] == pytest.approx(last)


def test_a_schedule_of_ones_own_is_predicted_like_any_other():
    def mine(pp, microbatches):
        return [[str(a) for a in rank] for rank in one_f_one_b(pp, microbatches)]

    own = predict(MODEL, plan_of(mine), cluster())
    known = predict(MODEL, plan_of("1f1b"), cluster())
    assert own.step_time == known.step_time


def test_a_pipeline_longer_than_the_cluster_is_refused_in_its_own_words():
    with pytest.raises(ValueError, match=r"pp=4.*needs 4 devices.*has 2"):
        predict(MODEL, pl.Plan(pp=4, microbatches=4), cluster(devices_per_node=2))


def test_neighbours_on_different_nodes_pay_the_slow_link():
    far = cluster(nodes=2, devices_per_node=2, inter=pl.Link(alpha=1e-2, bandwidth=1e9))
    calls = predict(MODEL, plan_of("1f1b", pp=4), far, steps=1).collectives
    levels = {(r, p): level for r, p, level in zip(calls["rank"], calls["peer"], calls["level"],
                                                   strict=True) if p >= 0}  # fmt: skip
    assert levels[1, 2] == "inter" and levels[0, 1] == levels[2, 3] == "intra"


# ---- memory ---------------------------------------------------------------------------------
def test_stages_together_hold_the_model_once_and_a_tied_embedding_twice():
    for tied in (True, False):
        model, plan = MODEL.replace(tied=tied), plan_of("1f1b", pp=4)
        held = Counter()
        for rank in range(4):
            held.update(memory.rank_sizes(model, plan, rank))
        copy = held.pop("head.output.weight") if tied else 0
        assert held == memory.parameter_sizes(model)
        assert copy == (model.vocab * model.hidden if tied else 0)


@pytest.mark.parametrize(
    ("name", "alive"), [("gpipe", [8, 8, 8, 8]), ("1f1b", [4, 3, 2, 1]), ("naive", [1, 1, 1, 1])]
)
def test_a_rank_keeps_as_many_microbatches_as_its_schedule_says(name, alive):
    model = MODEL.replace(layers=8)
    plan = plan_of(name, pp=4, microbatches=8)
    report = predict(model, plan, cluster(), steps=1)
    kept = report.memory[report.memory["category"] == "activations"].groupby("rank")["bytes"].max()
    parts = partition(model, 4, plan.microbatch_size)
    for rank in range(4):
        one = sum(memory.part_activation_bytes(model, part, 2) for part in parts[rank])
        assert kept[rank] == alive[rank] * one


def test_the_memory_table_names_the_fullest_rank():
    plan = plan_of("1f1b", pp=4, microbatches=8)
    text = memory.table(MODEL, plan)
    totals = {
        rank: max(sum(m.values()) for m in memory.moments(MODEL, plan, rank=rank).values())
        for rank in range(4)
    }
    worst = max(totals, key=totals.get)
    assert f"what rank {worst} needs" in text
    assert f"{totals[worst] / 2**20:,.1f} MiB" in text
