"""Tensor parallelism, all four modes: forward, gradients and weights of one process."""

from __future__ import annotations

import numpy as np
import pytest

import paralab as pl
from equality import assert_equal_state, reference, worst

STEPS, LR = 3, 0.5
MODEL = pl.ModelSpec(layers=2, hidden=48, heads=4, seq_len=24, vocab=260)
BUCKET = 60_000
ONE_D = {
    "1d, 2": {"tp": 2},
    "1d, 4": {"tp": 4},
    "1d sequence, 2": {"tp": 2, "sequence_parallel": True},
    "1d sequence, 4": {"tp": 4, "sequence_parallel": True},
}
GRIDS = {
    "2d, 4": {"tp": 4, "tp_mode": "2d"},
    "2.5d, 8": {"tp": 8, "tp_mode": "2.5d"},
    "3d, 8": {"tp": 8, "tp_mode": "3d"},
}
ALL = {**ONE_D, **GRIDS}
modes = pytest.mark.parametrize("mode", ALL)


@pytest.fixture(scope="module")
def expected(text):
    """References by batch and model, computed once."""
    known: dict[tuple, dict] = {}

    def of(microbatches: int, **change) -> dict:
        key = (microbatches, tuple(change.items()))
        if key not in known:
            known[key] = reference(MODEL.replace(**change), microbatches=microbatches,
                                   microbatch_size=4, steps=STEPS, lr=LR, data=text)  # fmt: skip
        return known[key]

    return of


@pytest.fixture
def sgd(run):
    def train(plan, model=MODEL, **more):
        settings = {"steps": STEPS, "optimizer": "sgd", "lr": LR, "keep_state": True, **more}
        whole = {"microbatch_size": 4, "bucket_bytes": BUCKET, **plan}
        return run(model, pl.Plan(**whole), **settings)

    return train


@pytest.mark.parametrize("tied", [True, False])
@modes
def test_gradients_and_sgd_weights_equal_one_process(sgd, expected, mode, tied):
    report = sgd({**ALL[mode], "microbatches": 2}, MODEL.replace(tied=tied))
    assert_equal_state(expected(2, tied=tied), report)
    losses = np.reshape(expected(2, tied=tied)["losses"], (STEPS, 2)).mean(1)
    assert np.allclose(report.losses, losses, rtol=1e-5)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("mode", ["1d, 2", "1d sequence, 2", "2d, 4"])
def test_beside_data_parallelism_and_zero(sgd, expected, mode, stage):
    report = sgd({**ALL[mode], "dp": 2, "zero_stage": stage, "microbatches": 2})
    assert_equal_state(expected(4), report)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("mode", ["2.5d, 8", "3d, 8"])
def test_the_large_grids_beside_zero(sgd, expected, mode, stage):
    report = sgd({**ALL[mode], "dp": 2, "zero_stage": stage})
    assert_equal_state(expected(2), report)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "schedule",
    [{"schedule": "1f1b"}, {"schedule": "zb-h1"},
     {"schedule": "interleaved", "virtual_stages": 2}, {"schedule": "gpipe", "zero_stage": 1,
                                                        "dp": 2}],
    ids=lambda s: s["schedule"],
)  # fmt: skip
@pytest.mark.parametrize("mode", ["1d, 2", "1d sequence, 2"])
def test_beside_a_pipeline(sgd, text, mode, schedule, tied):
    model = MODEL.replace(layers=4, tied=tied)
    m = 4 // schedule.get("dp", 1)
    report = sgd({**ALL[mode], "pp": 2, "microbatches": m, **schedule}, model)
    alone = reference(model, microbatches=4, microbatch_size=4, steps=STEPS, lr=LR, data=text)
    assert_equal_state(alone, report)


def test_a_grid_beside_a_pipeline(sgd, expected):
    assert_equal_state(expected(2), sgd({**GRIDS["2d, 4"], "pp": 2, "microbatches": 2}))


@modes
def test_dropout_drops_the_same_activations(sgd, mode):
    model = MODEL.replace(dropout=0.2)
    alone = sgd({}, model)
    assert worst(alone.gradients, sgd(ALL[mode], model).gradients)[0] < 1e-5


@pytest.mark.parametrize("stage", [0, 2])
@modes
def test_clipping_counts_what_is_held_twice_once(sgd, mode, stage):
    alone = sgd({"dp": 2}, clip_norm=0.01)
    if stage and ALL[mode]["tp"] == 8:
        pytest.skip("16 ranks: 8 say the same")
    dp = {"dp": 2, "zero_stage": stage} if stage else {"microbatches": 2}
    report = sgd({**ALL[mode], **dp}, clip_norm=0.01)
    assert worst(alone.weights, report.weights)[0] < 1e-5
    free = sgd({**ALL[mode], **dp})
    assert worst(free.weights, report.weights)[0] > 1e-3  # it did clip


@pytest.mark.parametrize("recompute", ["selective", "full"])
@modes
def test_recomputation_gives_the_same_bits(sgd, mode, recompute):
    model = MODEL.replace(dropout=0.1)
    plain, again = (sgd({**ALL[mode], "recompute": how}, model) for how in ("none", recompute))
    for name, array in plain.gradients.items():
        assert np.array_equal(array, again.gradients[name]), name


@pytest.mark.parametrize("tp", [2, 4])
def test_partitioned_activations_cost_one_all_gather_per_block(sgd, tp):
    plan = {"tp": tp, "recompute": "full", "microbatches": 2}
    plain, cut = (sgd({**plan, "partition_activations": part}) for part in (False, True))
    for name, array in plain.gradients.items():
        assert np.array_equal(array, cut.gradients[name]), name
    rows = cut.collectives[(cut.collectives["phase"] == "recompute")
                           & (cut.collectives["step"] == 1)]  # fmt: skip
    assert set(rows["op"]) == {"all_gather"}
    x = 4 * 4 * MODEL.seq_len * MODEL.hidden  # bytes of a block's input
    assert len(rows) == tp * MODEL.layers * 2
    assert rows["wire_bytes"].sum() == 2 * MODEL.layers * (tp - 1) * x


@pytest.mark.parametrize("mode", ["1d sequence, 4", "2d, 4", "2.5d, 8", "3d, 8"])
def test_five_adamw_steps_stay_within_tolerance(run, mode):
    settings = {"steps": 5, "lr": 1e-3, "keep_state": True}
    alone = run(MODEL, pl.Plan(microbatch_size=4), **settings)
    report = run(MODEL, pl.Plan(microbatch_size=4, **ALL[mode]), **settings)
    for name, array in alone.weights.items():
        assert np.abs(array - report.weights[name]).max() < 2e-4, name


@pytest.mark.parametrize("frozen", [("embedding",), ("blocks.0.mlp", "blocks.1.norm1")])
@modes
def test_frozen_parameters_stay_and_the_others_train(sgd, mode, frozen):
    model = MODEL.replace(frozen=frozen, tied=False)
    alone, report = sgd({}, model), sgd(ALL[mode], model)
    assert list(report.gradients) == list(alone.gradients)
    assert worst(alone.gradients, report.gradients)[0] < 1e-5
    assert worst(alone.weights, report.weights)[0] < 1e-5


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@modes
def test_16_bits_stay_near(sgd, mode, precision):
    alone, report = (sgd({**plan, "precision": precision}, lr=0.05) for plan in ({}, ALL[mode]))
    assert worst(alone.weights, report.weights)[0] < 0.05


@pytest.mark.parametrize("attention", ["explicit", "sdpa"])
def test_one_sample_and_fused_attention(sgd, text, attention):
    model = MODEL.replace(attention=attention)
    report = sgd({"tp": 4, "microbatch_size": 1}, model)
    alone = reference(model, microbatches=1, microbatch_size=1, steps=STEPS, lr=LR, data=text)
    assert_equal_state(alone, report)


# ---- checkpoints ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("before", "after"),
    [("1d, 2", "2d, 4"), ("2d, 4", "3d, 8"), ("3d, 8", "1d sequence, 4"), ("2.5d, 8", "1d, 2")],
)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_training_goes_on_under_another_grid(run, tmp_path, before, after, stage):
    def plan(mode):
        return pl.Plan(microbatch_size=4, zero_stage=stage, bucket_bytes=BUCKET, **ALL[mode])

    whole = run(MODEL, pl.Plan(microbatch_size=4), steps=4, keep_state=True)
    run(MODEL, plan(before), steps=2, save=tmp_path / "saved")
    rest = run(MODEL, plan(after), steps=2, resume=tmp_path / "saved", keep_state=True)
    assert np.allclose(whole.losses[2:], rest.losses, rtol=1e-4)
    for name, array in whole.weights.items():
        assert np.abs(array - rest.weights[name]).max() < 2e-4, name


def test_from_a_grid_to_zero_and_back(run, tmp_path):
    whole = run(MODEL, pl.Plan(microbatch_size=4), steps=3, keep_state=True)
    run(MODEL, pl.Plan(microbatch_size=4, tp=2), steps=1, save=tmp_path / "a")
    run(MODEL, pl.Plan(dp=2, microbatch_size=2, zero_stage=3), steps=1, save=tmp_path / "b",
        resume=tmp_path / "a")  # fmt: skip
    rest = run(MODEL, pl.Plan(microbatch_size=4, tp=4, tp_mode="2d"), steps=1, keep_state=True,
               resume=tmp_path / "b")  # fmt: skip
    for name, array in whole.weights.items():
        assert np.abs(array - rest.weights[name]).max() < 2e-4, name
