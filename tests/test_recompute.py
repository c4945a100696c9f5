"""Recomputing activations changes what is kept, and no bit of any gradient."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

import paralab as pl
from paralab.launch import launch_program
from paralab.model import GPT
from paralab.observe.anatomy import kept_for_backward
from paralab.parallel.precision import lower
from paralab.records.merge import merge
from paralab.theory import memory
from test_mutants import mutated_run

KINDS = ("full", "selective")
SPEC = pl.ModelSpec(layers=3, hidden=24, heads=3, seq_len=10, vocab=31, dropout=0.2)
B, STEPS, LR = 2, 2, 0.5
SGD = {"steps": STEPS, "optimizer": "sgd", "lr": LR, "keep_state": True}


def batch(spec: pl.ModelSpec, seed: int = 1, size: int = B) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(spec.vocab, (2, size, spec.seq_len), generator=draw))


def gradients(gpt: GPT, *, microbatches: int = 2) -> dict[str, torch.Tensor]:
    """All forwards first, as GPipe has them: another micro-batch draws between the two of one."""
    torch.manual_seed(7)
    losses = [gpt(*batch(SPEC, seed=k)) for k in range(microbatches)]
    for loss in losses:
        torch.rand(3)  # whatever is drawn between
        loss.backward()
    return {name: p.grad for name, p in gpt.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("frozen", [(), ("embedding",), ("embedding", "blocks.0"),
                                    ("blocks.1.attention",)])  # fmt: skip
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("attention", ["explicit", "sdpa"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_bitwise_those_without_recomputation(kind, attention, dropout, frozen):
    spec = SPEC.replace(attention=attention, dropout=dropout, frozen=frozen)
    expected = gradients(GPT(spec))
    got = gradients(GPT(spec, recompute=kind))
    assert list(expected) == list(got) and len(got) >= 16
    for name, gradient in expected.items():
        assert torch.equal(gradient, got[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_random_numbers_go_on_after_a_backward_as_if_nothing_had_been_drawn_again(kind):
    gpt = GPT(SPEC, recompute=kind)
    loss = gpt(*batch(SPEC))
    before = torch.get_rng_state()
    loss.backward()
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_hear_of_each_gradient_once_and_blocks_seem_to_run_once(kind):
    gpt, heard, runs = GPT(SPEC, recompute=kind), Counter(), Counter()
    for name, parameter in gpt.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, n=name: heard.update([n]))
    for name, block in gpt.blocks.named_children():
        block.register_forward_pre_hook(lambda *_, n=name: runs.update([f"before {n}"]))
        block.register_forward_hook(lambda *_, n=name: runs.update([f"after {n}"]))
    gradients(gpt, microbatches=3)
    assert heard == {name: 3 for name, _ in gpt.named_parameters()}
    assert runs == {f"{when} {n}": 3 for n in range(3) for when in ("before", "after")}


def test_the_gradient_reaches_the_blocks_output_before_anything_is_computed_again():
    gpt, order = GPT(SPEC, recompute="full"), []
    block = gpt.blocks.get_submodule("1")

    def watch(module: object, args: object, output: torch.Tensor) -> None:
        output.register_hook(lambda _: order.append("gradient"))

    block.register_forward_hook(watch)
    block.norm1.register_forward_hook(lambda *_: order.append("forward"))
    gradients(gpt, microbatches=1)
    assert order == ["forward", "gradient", "forward"]


def kept(spec: pl.ModelSpec, kind: str, size: int, precision: str = "fp32") -> int:
    """Bytes that autograd keeps between forward and backward, parameters and buffers aside."""
    gpt = GPT(spec, recompute=kind)
    lower(gpt.parameters(), precision)
    owned = {t.untyped_storage().data_ptr() for t in (*gpt.parameters(), *gpt.buffers())}
    with kept_for_backward(owned) as found:
        gpt(*batch(spec, size=size))
    return sum(number for number, _ in found.values())


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("attention", ["explicit", "sdpa"])
def test_a_block_keeps_what_the_formula_says(attention, dropout, size):
    spec = SPEC.replace(attention=attention, dropout=dropout)
    x, tokens = size * spec.seq_len * spec.hidden, size * spec.seq_len
    block = {"full": x, "selective": 16 * x + 4 * tokens + (2 * x if dropout else 0)}
    state = torch.get_rng_state().nbytes if dropout else 0
    for kind, elements in block.items():
        more = kept(spec.replace(layers=5), kind, size) - kept(spec, kind, size)
        assert more == 2 * (4 * elements + state), kind
        assert more - 2 * state < kept(spec.replace(layers=5), "none", size) - kept(
            spec, "none", size
        )


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("attention", ["explicit", "sdpa"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("kind", KINDS)
def test_theory_knows_what_the_whole_model_keeps(kind, precision, attention, dropout, size):
    spec = SPEC.replace(attention=attention, dropout=dropout)
    formula = memory.activation_bytes(spec, size, recompute=kind, precision=precision)
    # the loss keeps the number of its tokens too, one scalar
    assert kept(spec, kind, size, precision) == formula + 4


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("attention", ["explicit", "sdpa"])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_kept_where_nothing_is_trained(kind, attention, size):
    spec = SPEC.replace(attention=attention, frozen=("embedding", "blocks.0", "blocks.1"))
    all_trained = SPEC.replace(attention=attention, layers=1, frozen=("embedding",))
    less = kept(spec, kind, size), kept(all_trained, kind, size)
    assert less[0] == less[1]


# ---- under plans ---------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def noisy() -> pl.ModelSpec:
    return pl.ModelSpec(layers=4, hidden=40, heads=4, seq_len=24, vocab=257, dropout=0.2)


PLANS = [
    pl.Plan(microbatches=3),
    pl.Plan(dp=2, microbatches=2, bucket_bytes=60_000),
    pl.Plan(dp=2, microbatches=2, zero_stage=3),
    pl.Plan(pp=2, microbatches=4, schedule="1f1b"),
    pl.Plan(pp=2, microbatches=2, schedule="gpipe", dp=2),
    pl.Plan(pp=2, microbatches=4, schedule="interleaved", virtual_stages=2),
]


@pytest.mark.parametrize(
    "plan", PLANS, ids=lambda p: f"dp{p.dp}-pp{p.pp}-{p.schedule}-zero{p.zero_stage}"
)
def test_training_under_any_plan_is_bitwise_the_same(run, noisy, plan):
    expected = run(noisy, plan, **SGD)
    for kind in KINDS:
        assert_same_bits(vars(expected), vars(run(noisy, plan.replace(recompute=kind), **SGD)))


def assert_same_bits(expected: dict, got: dict) -> None:
    for what in ("gradients", "weights"):
        assert list(expected[what]) == list(got[what])
        for name, array in expected[what].items():
            np.testing.assert_array_equal(array, got[what][name], err_msg=f"{what} {name}")


def test_the_time_of_recomputing_belongs_to_the_backward(run, noisy):
    report = run(noisy, pl.Plan(microbatches=2, recompute="full"), steps=2)
    spans = report.spans[(report.spans["step"] == 1) & (report.spans["lane"] == "compute")]
    assert Counter(spans["kind"]) == {"forward": 2, "backward": 2, "optimizer": 1}


# ---- mutants -------------------------------------------------------------------------------------
RECOMPUTE, MODEL = "paralab.parallel.recompute", "paralab.model"
MUTANTS = {
    "the generator is not set back": (
        RECOMPUTE, "_set_generator_state(state, device)\n    try", "pass\n    try"),
    "the draws are not remembered": (
        RECOMPUTE, ", _generator_state(x.device) if draws else None", ", None"),
    "the parameters' gradients are left out": (
        RECOMPUTE, "torch.autograd.backward(y, grad)",
        "torch.autograd.backward(y, grad, inputs=[x])"),
    "the input's gradient is left out": (RECOMPUTE, "None, x.grad, None", "None, x.grad * 0, None"),
    "dropout is forgotten by the block": (MODEL, "draws = self.training and self.p > 0",
                                          "draws = False"),
}  # fmt: skip


@pytest.fixture(scope="module")
def check(run, noisy, text):
    plan = pl.Plan(pp=2, microbatches=3, schedule="gpipe", recompute="full")
    settings = {"steps": STEPS, "optimizer": "sgd", "lr": LR, "clip_norm": None, "data": str(text),
                "seed": 0, "keep_state": True}  # fmt: skip
    expected = vars(run(noisy, plan.replace(recompute="none"), **SGD))

    def check(edit: tuple | None) -> None:
        args = (edit, noisy, plan, settings)
        parts = launch_program(mutated_run, 2, args, timeout=60, device="cpu", strict=True)
        assert_same_bits(expected, merge(parts, plan=plan, meta={}))

    return check


def test_the_unchanged_source_passes_the_same_check(check):
    check(None)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(check, name):
    with pytest.raises((AssertionError, pl.RankError)) as caught:
        check(MUTANTS[name])
    assert "stands" not in str(caught.value)
