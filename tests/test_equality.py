"""Data parallelism in all three forms gives the gradients and SGD weights of one process."""

from __future__ import annotations

import numpy as np
import pytest

import paralab as pl
from equality import assert_equal_state, reference

FORMS = ("naive", "bucketed", "overlapped")
STEPS, LR = 3, 0.5


@pytest.fixture(scope="module")
def expected(model, text):
    """The reference by number of micro-batches."""

    def of(microbatches: int) -> dict:
        return reference(
            model, microbatches=microbatches, microbatch_size=2, steps=STEPS, lr=LR, data=text
        )

    return of


@pytest.mark.parametrize("grad_sync", FORMS)
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("dp", [1, 2, 3, 4])
def test_gradients_and_sgd_weights_equal_one_process(
    run, model, expected, dp, microbatches, grad_sync
):
    plan = pl.Plan(dp=dp, microbatches=microbatches, microbatch_size=2, grad_sync=grad_sync,
                   bucket_bytes=60_000)  # fmt: skip
    report = run(model, plan, steps=STEPS, optimizer="sgd", lr=LR, keep_state=True)
    assert_equal_state(expected(dp * microbatches), report)


@pytest.mark.parametrize("bucket_bytes", [1, 30_000, 10**9])
def test_any_bucket_size_gives_the_same_gradients(run, model, expected, bucket_bytes):
    plan = pl.Plan(dp=2, microbatch_size=2, bucket_bytes=bucket_bytes)
    report = run(model, plan, steps=STEPS, optimizer="sgd", lr=LR, keep_state=True)
    assert_equal_state(expected(2), report)


@pytest.mark.parametrize("change", [{"tied": False}, {"attention": "sdpa"}, {"vocab": 300}])
def test_other_models_are_equal_too(run, model, text, change):
    other = model.replace(**change)
    expected = reference(other, microbatches=2, microbatch_size=2, steps=2, lr=LR, data=text)
    report = run(
        other, pl.Plan(dp=2, microbatch_size=2), steps=2, optimizer="sgd", lr=LR, keep_state=True
    )
    assert_equal_state(expected, report)


def test_dropout_drops_the_same_activations_however_the_batch_is_split(run, model):
    noisy, settings = (
        model.replace(dropout=0.2),
        {"steps": 2, "optimizer": "sgd", "keep_state": True},
    )
    alone = run(noisy, pl.Plan(microbatches=4), **settings)
    split = run(noisy, pl.Plan(dp=2, microbatches=2), **settings)
    calm = run(model, pl.Plan(microbatches=4), **settings)
    assert_equal_state(vars(alone), split)
    with pytest.raises(AssertionError):
        assert_equal_state(vars(alone), calm)


def test_losses_are_the_mean_over_the_global_batch(run, model, expected):
    report = run(
        model, pl.Plan(dp=2, microbatches=2, microbatch_size=2), steps=STEPS, optimizer="sgd", lr=LR
    )
    alone = expected(4)["losses"]
    np.testing.assert_allclose(report.losses, alone, rtol=1e-5)


def test_clipping_scales_the_update_by_the_global_norm(run, model, text):
    settings = {"steps": 1, "optimizer": "sgd", "lr": 1.0, "keep_state": True}
    free = run(model, pl.Plan(dp=2), **settings)
    clipped = run(model, pl.Plan(dp=2), clip_norm=0.1, **settings)
    start = pl.launch(_initial_weights, ranks=1, args=(model,))[0]
    norm = np.sqrt(sum(float((g**2).sum()) for g in free.gradients.values()))
    assert norm > 0.1
    for name, gradient in free.gradients.items():
        np.testing.assert_array_equal(gradient, clipped.gradients[name])  # kept before clipping
        step = start[name] - clipped.weights[name]
        np.testing.assert_allclose(step, gradient * 0.1 / norm, rtol=1e-3, atol=1e-6, err_msg=name)


def _initial_weights(model):
    gpt = pl.reference.GPT(model)
    return {name: p.detach().numpy() for name, p in gpt.named_parameters()}


def test_adamw_trains_the_same_weights_within_tolerance(run, model):
    alone = run(model, pl.Plan(microbatches=4), steps=5, keep_state=True)
    split = run(model, pl.Plan(dp=4), steps=5, keep_state=True)
    for name, weight in alone.weights.items():
        # Adam divides by the gradient's size, so rounding in tiny gradients shows; 2 % of one
        # update at lr 1e-3
        np.testing.assert_allclose(weight, split.weights[name], atol=2e-5, rtol=0, err_msg=name)
