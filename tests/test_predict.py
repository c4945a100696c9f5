"""Prediction: bytes equal the closed forms, the rows are those of a run, and time behaves."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import paralab as pl
from paralab.parallel.buckets import assign
from paralab.theory import formulas, memory
from paralab.theory.engine import Compute
from paralab.theory.predict import predict
from paralab.theory.predict_rows import RankRows

MODEL = pl.ModelSpec(layers=2, hidden=40, heads=4, seq_len=24, vocab=257)  # 3 divides no size of it
FORMS = ("naive", "bucketed", "overlapped")


def cluster(**changes):
    settings = {
        "name": "stated",
        "devices_per_node": 64,
        "flops": 1e11,
        "memory_bandwidth": 3e10,
        "op_overhead": 5e-6,
        "intra": pl.Link(alpha=3e-4, bandwidth=1e9),
        "inter": pl.Link(alpha=1e-3, bandwidth=1e8),
    }
    return pl.Cluster(**{**settings, **changes})


def payloads(model, plan):
    sizes = list(memory.parameter_sizes(model).values())
    if plan.grad_sync == "naive":
        return [4 * size for size in sizes]
    buckets = assign(sizes, bucket_bytes=plan.bucket_bytes, itemsize=4, multiple=plan.dp)
    return [4 * bucket.numel for bucket in buckets]


# ---- traffic --------------------------------------------------------------------------------
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dp", [1, 2, 3, 4])
def test_predicted_bytes_are_the_closed_form(dp, form):
    plan = pl.Plan(dp=dp, grad_sync=form, bucket_bytes=20_000, microbatches=2)
    calls = predict(MODEL, plan, cluster(), steps=3).collectives
    expected = payloads(MODEL, plan) if dp > 1 else []
    for step in range(3):
        for rank in range(dp):
            mine = calls[(calls["step"] == step) & (calls["rank"] == rank)]
            assert mine["payload_bytes"].tolist() == expected
            assert mine["call"].tolist() == [step * len(expected) + i for i in range(len(expected))]
        total = calls["wire_bytes"][calls["step"] == step].sum()
        assert total == 2 * (dp - 1) * sum(expected)  # N ranks, each 2(N-1)/N of the payload
    assert set(calls["op"]) <= {"all_reduce"} and set(calls["phase"]) <= {"grad_sync"}


def test_buckets_carry_every_gradient_once_and_little_padding():
    plan = pl.Plan(dp=3, grad_sync="bucketed", bucket_bytes=20_000)
    carried = sum(payloads(MODEL, plan))
    buckets = len(payloads(MODEL, plan))
    assert 0 <= carried - 4 * MODEL.num_params <= 4 * (plan.dp - 1) * buckets


def test_one_rank_sends_nothing():
    report = predict(MODEL, pl.Plan(), cluster())
    assert len(report.collectives) == 0
    assert set(report.spans["kind"]) == {"forward", "backward", "optimizer"}


def test_a_group_across_nodes_pays_the_slow_link():
    plan = pl.Plan(dp=4, grad_sync="bucketed")
    near = predict(MODEL, plan, cluster())
    far = predict(MODEL, plan, cluster(nodes=2, devices_per_node=2))
    assert set(near.collectives["level"]) == {"intra"}
    assert set(far.collectives["level"]) == {"inter"}
    assert far.meta["nodes"] == [0, 0, 1, 1]
    assert far.step_time > near.step_time


# ---- rows -----------------------------------------------------------------------------------
def kinds(report, step):
    rows = report.spans[(report.spans["rank"] == 0) & (report.spans["step"] == step)]
    rows = rows.sort_values("id")
    return list(zip(rows["lane"], rows["kind"], rows["microbatch"], strict=True))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tied", [True, False])
def test_predicted_spans_are_the_spans_of_a_run(run, form, tied):
    model = MODEL.replace(tied=tied)
    plan = pl.Plan(dp=2, grad_sync=form, bucket_bytes=20_000, microbatches=2)
    measured, expected = run(model, plan, steps=2), predict(model, plan, cluster(), steps=2)
    assert kinds(expected, 1) == kinds(measured, 1)


@pytest.mark.parametrize("form", FORMS)
def test_predicted_calls_are_the_calls_of_a_run(run, form):
    plan = pl.Plan(dp=3, grad_sync=form, bucket_bytes=20_000)
    columns = ["rank", "step", "op", "axis", "ranks", "peer", "level", "phase", "payload_bytes",
               "wire_bytes"]  # fmt: skip
    measured = run(MODEL, plan, steps=2).collectives
    measured = measured[measured["phase"] == "grad_sync"].sort_values(["rank", "call"])
    expected = predict(MODEL, plan, cluster(), steps=2).collectives.sort_values(["rank", "call"])
    assert expected[columns].values.tolist() == measured[columns].values.tolist()


def test_backward_is_cut_at_every_launch_and_loses_nothing():
    plan = pl.Plan(dp=2, bucket_bytes=20_000)
    whole = predict(MODEL, plan.replace(grad_sync="bucketed"), cluster()).spans
    cut = predict(MODEL, plan, cluster()).spans
    assert len(cut) > len(whole)

    def backward(spans):
        return spans["cost"][spans["kind"].isin(["backward", "copy"])].sum()

    assert math.isclose(backward(cut), backward(whole), rel_tol=1e-12)


def test_a_tied_embedding_is_the_last_gradient_to_be_complete():
    plan = pl.Plan(dp=2, bucket_bytes=4 * MODEL.num_params)  # one bucket
    spans = predict(MODEL, plan, cluster(), steps=1).spans
    comm = spans[(spans["kind"] == "comm") & (spans["rank"] == 0)].iloc[0]
    backward = spans[(spans["kind"] == "backward") & (spans["rank"] == 0)]
    assert comm["start"] == pytest.approx(backward["end"].max(), abs=1e-12)


def test_a_wait_names_the_call_it_waits_for_and_ends_with_it():
    spans = predict(MODEL, pl.Plan(dp=2, bucket_bytes=20_000), cluster(), steps=2).spans
    by_id = spans.set_index("id")
    waits = spans[spans["kind"] == "wait"]
    assert len(waits) == (spans["kind"] == "comm").sum()
    for start, end, after in zip(waits["start"], waits["end"], waits["after"], strict=True):
        awaited = by_id.loc[list(after)]
        assert set(awaited["kind"]) == {"comm"}
        assert end == max(start, awaited["end"].max())


def test_the_memory_table_peaks_where_the_formula_does():
    plan = pl.Plan(dp=2, microbatches=2)
    report = predict(MODEL, plan, cluster())
    moments = memory.moments(MODEL, plan)
    assert report.peak_memory == max(sum(m.values()) for m in moments.values())
    assert set(report.memory["category"]) == {
        "parameters", "gradients", "optimizer", "buffers", "activations"
    }  # fmt: skip


# ---- time -----------------------------------------------------------------------------------
@settings(deadline=None, max_examples=40)
@given(
    dp=st.integers(2, 4),
    microbatches=st.integers(1, 3),
    bucket_bytes=st.integers(1000, 200_000),
    alpha=st.floats(0, 1e-2),
    bandwidth=st.floats(1e6, 1e10),
)
def test_overlap_never_makes_a_step_longer(dp, microbatches, bucket_bytes, alpha, bandwidth):
    plan = pl.Plan(dp=dp, microbatches=microbatches, bucket_bytes=bucket_bytes)
    machine = cluster(intra=pl.Link(alpha=alpha, bandwidth=bandwidth))
    after = predict(MODEL, plan.replace(grad_sync="bucketed"), machine, steps=1)
    beside = predict(MODEL, plan.replace(grad_sync="overlapped"), machine, steps=1)
    assert beside.step_time <= after.step_time * (1 + 1e-12)


def test_steps_without_overlap_cost_compute_plus_alpha_and_bytes():
    machine = cluster()
    link = machine.intra
    for form in ("naive", "bucketed"):
        plan = pl.Plan(dp=2, grad_sync=form, bucket_bytes=20_000)
        report = predict(MODEL, plan, machine)
        mine = report.spans[(report.spans["rank"] == 0) & (report.spans["step"] == 1)]
        compute = mine["cost"].sum()
        wire = sum(link.seconds(p) for p in payloads(MODEL, plan))  # N = 2: wire bytes = payload
        assert math.isclose(report.step_time, compute + wire, rel_tol=1e-9)


def test_a_device_is_three_rates():
    work = formulas.Work(flops=2e9, bytes=3e8, kernels=10)
    machine = cluster(flops=1e9, memory_bandwidth=1e9, op_overhead=1e-2)
    assert math.isclose(work.seconds(machine), 2.0 + 0.3 + 0.1)
    assert 2 * work == work + work


def test_every_kind_of_span_costs_what_the_formulas_say():
    machine = cluster()
    spans = predict(MODEL, pl.Plan(), machine, steps=1).spans.set_index("kind")
    works = {
        "forward": formulas.total(formulas.forward_parts(MODEL, 2).values()),
        "backward": formulas.total(
            work for work, _ in formulas.backward_parts(MODEL, 2, accumulate=False)
        ),
        "optimizer": formulas.optimizer_work(MODEL, optimizer="adamw"),
    }
    for kind, work in works.items():
        assert spans.loc[kind, "cost"] == pytest.approx(work.seconds(machine), rel=1e-12)


def test_products_in_16_bits_take_their_own_rates_and_other_kernels_as_long_as_in_fp32():
    plain = formulas.Work(flops=5e9, bytes=3e8, kernels=10, products=(1e9, 2e9, 1e9))
    rates = {"bf16": (1e10, 2e9, 5e9)}
    slow, machine = cluster(products_16bit=rates), cluster()
    rest = 3e8 / machine.memory_bandwidth + 10 * machine.op_overhead
    assert plain.seconds(slow) == plain.seconds(machine) == pytest.approx(5e9 / 1e11 + rest)
    assert plain.seconds(slow, "bf16") == pytest.approx(0.1 + 1.0 + 0.2 + 1e9 / 1e11 + rest)
    halved = rest - 1.5e8 / machine.memory_bandwidth
    assert plain.seconds(slow, "fp16") == pytest.approx(5e9 / 1e11 + halved)


@pytest.mark.parametrize("attention", ["explicit", "sdpa"])
def test_every_matrix_product_has_its_kind(attention):
    model = MODEL.replace(attention=attention, tied=False)
    forward = formulas.total(formulas.forward_parts(model, 3).values())
    backward = formulas.total(w for w, _ in formulas.backward_parts(model, 3, accumulate=False))
    attended = model.layers * 4 * 3 * model.seq_len**2 * model.hidden
    linear = formulas.forward_flops(model, 3) - attended
    assert forward.products == (linear, attended, 0)
    assert backward.products == (0, linear + 2 * attended, linear)
    half = formulas.forward_parts(model, 3, formulas.Cut(inside=0.5))["blocks.0"]
    whole = formulas.forward_parts(model, 3)["blocks.0"]
    assert half.products == tuple(flops / 2 for flops in whole.products)
    assert half.kernels == whole.kernels


def test_posting_takes_time_unless_it_is_waited_for_and_what_follows_a_wait_takes_longer():
    rank = RankRows(MODEL, pl.Plan(dp=2), cluster(call_overhead=0.25, wait_overhead=0.5), 0)

    def compute():
        rank.computes(Compute(1.0), "forward")
        return rank.rows[-1].item.seconds

    def launch():
        return rank.launch("all_reduce", 8, (0, 1), "dp", "grad_sync")

    assert compute() == 1.0
    calls = [launch(), launch()]
    assert compute() == 1.5 and compute() == 1.0
    rank.wait(*calls)
    assert compute() == 1.5 and compute() == 1.0
    rank.wait(launch())
    rank.wait(launch())  # nothing was computed in between
    assert compute() == 1.5


def test_a_tensor_parallel_step_is_longer_by_what_its_waits_cost():
    model, plan = MODEL.replace(vocab=258), pl.Plan(tp=2, microbatches=2)
    plain, slower = (predict(model, plan, cluster(wait_overhead=s), steps=1) for s in (0.0, 1.0))
    waits = (plain.spans.query("rank == 0")["kind"] == "wait").sum()
    assert waits > 16 and slower.step_time - plain.step_time == pytest.approx(waits)


def test_dropout_draws_each_mask_whole_on_every_tensor_parallel_rank():
    half = formulas.Cut(inside=0.5, outside=0.5)
    plain, dropped = (formulas.forward_parts(MODEL.replace(dropout=p), 3, half) for p in (0, 0.1))
    x, scores = formulas.sizes(MODEL, 3)
    for part, drawn in (("embedding", x), ("blocks.0", 2 * x + scores), ("head", 0)):
        assert dropped[part].flops - plain[part].flops == formulas.DRAW_FLOPS * drawn
    again = [formulas.recompute_work(MODEL.replace(dropout=p), 3, "selective", half)
             for p in (0, 0.1)]  # fmt: skip
    assert again[1].flops - again[0].flops == formulas.DRAW_FLOPS * scores


@pytest.mark.parametrize("rates", [3, {"bf16": 1e9}, {"bf16": (1, 2)}, {"fp32": (1, 2, 3)},
                                   {"bf16": (1e9, 0, 1e9)}])  # fmt: skip
def test_rates_that_are_none_are_refused(rates):
    with pytest.raises(ValueError, match="legal: "):
        cluster(products_16bit=rates)


def test_free_links_leave_only_compute():
    plan = pl.Plan(dp=4, grad_sync="bucketed")
    free = cluster(intra=pl.Link(alpha=0.0, bandwidth=1e30))
    report = predict(MODEL, plan, free)
    mine = report.spans[(report.spans["rank"] == 0) & (report.spans["step"] == 1)]
    assert math.isclose(report.step_time, mine["cost"].sum(), rel_tol=1e-9)


# ---- formulas -------------------------------------------------------------------------------
def matmul_flops(model, batch):
    """Every product of the forward, from the shapes of the parameters and the scores."""
    tokens, flops = batch * model.seq_len, 0
    for name, shape in model.parameter_shapes().items():
        if len(shape) == 2 and "embedding" not in name and "head" not in name:
            flops += 2 * tokens * shape[0] * shape[1]
    head_dim = model.hidden // model.heads
    per_product = 2 * batch * model.heads * model.seq_len**2 * head_dim
    return flops + model.layers * 2 * per_product + 2 * tokens * model.hidden * model.vocab


@given(
    layers=st.integers(1, 5),
    heads=st.integers(1, 8),
    width=st.integers(1, 32),
    seq_len=st.integers(1, 200),
    vocab=st.integers(1, 999),
    batch=st.integers(1, 9),
)
def test_flops_count_every_matrix_product(layers, heads, width, seq_len, vocab, batch):
    model = pl.ModelSpec(
        layers=layers, hidden=heads * width, heads=heads, seq_len=seq_len, vocab=vocab
    )
    assert formulas.forward_flops(model, batch) == matmul_flops(model, batch)


def test_flops_are_ptdp_equation_3_without_its_recomputation():
    # Narayanan+ 2021, arXiv:2104.04473, eq. 3: F = 96 B s l h^2 (1 + s/(6h) + V/(16 l h)).
    model, batch = pl.ModelSpec.preset("gpt3-175b"), 1536
    s, l, h, v = model.seq_len, model.layers, model.hidden, model.vocab  # noqa: E741
    equation = 96 * batch * s * l * h**2 * (1 + s / (6 * h) + v / (16 * l * h))
    forward = formulas.forward_flops(model, batch)
    again = l * formulas.block_flops(model, batch)
    assert math.isclose(3 * forward + again, equation, rel_tol=1e-12)


@pytest.mark.parametrize("attention", ["explicit", "sdpa"])
def test_backward_is_twice_the_forward_in_matrix_products(monkeypatch, attention):
    monkeypatch.setattr(formulas, "GELU_FLOPS", (0, 0))
    monkeypatch.setattr(formulas, "EXP_FLOPS", 0)
    model = MODEL.replace(attention=attention, tied=False)
    forward = formulas.total(formulas.forward_parts(model, 3).values())
    backward = formulas.total(w for w, _ in formulas.backward_parts(model, 3, accumulate=False))
    assert forward.flops == formulas.forward_flops(model, 3)
    assert backward.flops == 2 * forward.flops


@pytest.mark.parametrize("tied", [True, False])
def test_backward_completes_every_parameter_once_the_embedding_last(tied):
    model = MODEL.replace(tied=tied)
    parts = formulas.backward_parts(model, 1, accumulate=True)
    names = [name for _, part in parts for name in part]
    assert sorted(names) == sorted(model.parameter_shapes())
    assert names[-1] == "embedding.token.weight"


# ---- memory ---------------------------------------------------------------------------------
def test_model_states_are_16_bytes_per_parameter_plus_adamws_scalars():
    states = memory.state_bytes(MODEL, pl.Plan(dp=4))
    psi, tensors = MODEL.num_params, len(MODEL.parameter_shapes())
    assert states["parameters"] == states["gradients"] == 4 * psi
    assert states["optimizer"] == 8 * psi + 4 * tensors
    assert 0 <= states["buffers"] < 4 * 4
    assert memory.state_bytes(MODEL, pl.Plan(dp=4), optimizer="sgd")["optimizer"] == 0


def test_adamw_really_keeps_what_the_formula_says():
    import torch

    from paralab.model import GPT

    model = GPT(MODEL)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.zeros(1, MODEL.seq_len, dtype=torch.int64)
    model(tokens, tokens).backward()
    optimizer.step()
    kept = sum(t.nbytes for state in optimizer.state.values() for t in state.values())
    assert kept == memory.state_bytes(MODEL, pl.Plan())["optimizer"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("attention", ["explicit", "sdpa"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("batch", [1, 3])
def test_activation_bytes_are_what_autograd_keeps(batch, dropout, attention, recompute, precision):
    import torch

    from paralab.model import GPT

    if (attention, recompute, dropout) == ("sdpa", "none", 0.1):
        pytest.skip("torch has no fused kernel with dropout on a CPU")
    spec = MODEL.replace(dropout=dropout, attention=attention)
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    model = GPT(spec, recompute=recompute).to(dtype)
    owned = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers()]}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # held: its address stays its own
        return tensor

    tokens = torch.randint(257, (batch, spec.seq_len))
    targets = torch.randint(257, (batch, spec.seq_len))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(tokens, targets)
    measured = sum(size for size, _ in kept.values())
    assert loss.requires_grad
    formula = memory.activation_bytes(spec, batch, recompute=recompute, precision=precision)
    assert measured - formula in range(9)  # the loss's own scalars


def test_sixteen_bit_activations_would_be_korthikantis_formula():
    # Korthikanti+ 2022, arXiv:2205.05198, eq. 1: s b h (34 + 5 a s/h) bytes per block, without the
    # norms' own 4 b s numbers. Ours are 32-bit but for the dropout masks, which are a byte in both.
    spec = pl.ModelSpec.preset("gpt3-175b").replace(dropout=0.1)
    s, h, a, b = spec.seq_len, spec.hidden, spec.heads, 2
    masks = 2 * s * b * h + a * b * s * s
    floats = memory.block_activation_bytes(spec, b, mask_bytes=1) - masks - 4 * 4 * b * s
    assert floats / 2 + masks == s * b * h * (34 + 5 * a * s / h)


def test_the_out_of_memory_table_names_its_categories_and_their_sum():
    text = memory.table(MODEL, pl.Plan(dp=2, microbatches=2, microbatch_size=8))
    for category in ("parameters", "gradients", "optimizer", "activations", "in all"):
        assert category in text


def test_gradients_are_held_across_micro_batches_and_one_bucket_beside_them():
    one, two = (memory.moments(MODEL, pl.Plan(dp=2, microbatches=m)) for m in (1, 2))
    psi = 4 * MODEL.num_params
    assert (one["forward"]["gradients"], two["forward"]["gradients"]) == (0, psi)
    assert one["backward"]["gradients"] == psi and one["backward"]["activations"] == 0
    plan = pl.Plan(dp=3, bucket_bytes=20_000)
    beside = memory.moments(MODEL, plan)["backward"]["buffers"]
    members, size = memory.gradient_buckets(MODEL, plan)[-1]
    padding = memory.state_bytes(MODEL, plan)["buffers"]
    assert padding > 0
    assert size <= beside <= size + 2 * padding


# ---- what cannot be predicted ---------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"model": "gpt2"}, "model='gpt2'"),
        ({"plan": "dp=2"}, "plan='dp=2'"),
        ({"plan": pl.Plan(tp=2)}, "tp=2"),
        ({"cluster": "laptop"}, "cluster='laptop'"),
        ({"steps": 0}, "steps=0"),
        ({"optimizer": "adam"}, "optimizer='adam'"),
        ({"plan": pl.Plan(dp=65)}, "dp=65"),
    ],
)
def test_what_a_run_would_refuse_is_refused(arguments, said):
    given = {"model": MODEL, "plan": pl.Plan(dp=2), "cluster": cluster(), **arguments}
    extra = {k: given.pop(k) for k in ("steps", "optimizer") if k in given}
    with pytest.raises(ValueError) as error:
        predict(given["model"], given["plan"], given["cluster"], **extra)
    assert said in str(error.value) and "legal" in str(error.value)


@pytest.mark.parametrize("degree", ["dp", "tp", "pp"])
def test_too_few_devices_are_said_by_the_largest_degree(degree):
    model = MODEL.replace(layers=4, vocab=256)
    plan = pl.Plan(**{"dp": 2, "tp": 2, "pp": 2, "microbatches": 4, degree: 4})
    with pytest.raises(ValueError, match=f"{degree}=4: the plan needs 16 devices"):
        predict(model, plan, cluster(devices_per_node=8))


def test_a_link_for_a_call_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match="collectives='allreduce'.*legal: .*'all_reduce'"):
        cluster(collectives={"allreduce": pl.Link(alpha=1.0, bandwidth=1.0)})


def test_a_replay_on_something_that_is_no_cluster_is_refused():
    with pytest.raises(ValueError, match="cluster='laptop': not a cluster"):
        predict(MODEL, pl.Plan(), cluster()).replay("laptop")
