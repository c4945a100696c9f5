"""Tensor parallelism, all four modes: forward, gradients and weights of one process."""

from __future__ import annotations

import numpy as np
import pytest

import paralab as pl
from equality import assert_equal_state, reference, worst

STEPS, LR = 2, 0.5
MODEL = pl.ModelSpec(layers=2, hidden=48, heads=4, seq_len=24, vocab=260)
SHALLOW = MODEL.replace(layers=1)  # for what a second block only repeats
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
    """The reference by number of micro-batches and changes of the model."""

    def of(microbatches: int, **change) -> dict:
        return reference(MODEL.replace(**change), microbatches=microbatches, microbatch_size=4,
                         steps=STEPS, lr=LR, data=text)  # fmt: skip

    return of


@pytest.fixture
def sgd(run):
    def train(plan, model=MODEL, **more):
        settings = {"steps": STEPS, "optimizer": "sgd", "lr": LR, "keep_state": True, **more}
        whole = {"microbatch_size": 4, "bucket_bytes": BUCKET, **plan}
        return run(model, pl.Plan(**whole), **settings)

    return train


@pytest.mark.parametrize(
    ("mode", "tied"),
    [*((mode, True) for mode in ALL), ("1d, 4", False), ("1d sequence, 2", False),
     ("2d, 4", False), ("3d, 8", False)],
)  # fmt: skip
def test_gradients_and_sgd_weights_equal_one_process(sgd, expected, mode, tied):
    report = sgd({**ALL[mode], "microbatches": 2}, MODEL.replace(tied=tied))
    assert_equal_state(expected(2, tied=tied), report)
    losses = expected(2, tied=tied)["losses"]
    assert np.allclose(report.losses, losses, rtol=1e-5)


@pytest.mark.parametrize(
    ("mode", "stage"),
    [("1d, 2", 0), ("1d, 2", 2), ("1d sequence, 2", 1), ("1d sequence, 2", 3), ("2d, 4", 0),
     ("2d, 4", 1), ("2d, 4", 3)],
)  # fmt: skip
def test_beside_data_parallelism_and_zero(sgd, expected, mode, stage):
    report = sgd({**ALL[mode], "dp": 2, "zero_stage": stage, "microbatches": 2})
    assert_equal_state(expected(4), report)


@pytest.mark.parametrize(("mode", "stage"), [("2.5d, 8", 3), ("3d, 8", 1)])
def test_the_large_grids_beside_zero(sgd, expected, mode, stage):
    report = sgd({**ALL[mode], "dp": 2, "zero_stage": stage})
    assert_equal_state(expected(2), report)


@pytest.mark.parametrize(
    ("schedule", "tied"),
    [({"schedule": "1f1b"}, True), ({"schedule": "zb-h1"}, False),
     ({"schedule": "interleaved", "virtual_stages": 2}, True),
     ({"schedule": "gpipe", "zero_stage": 1, "dp": 2}, True)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("mode", ["1d, 2", "1d sequence, 2"])
def test_beside_a_pipeline(sgd, expected, mode, schedule, tied):
    model = MODEL.replace(layers=4, tied=tied)
    m = 4 // schedule.get("dp", 1)
    report = sgd({**ALL[mode], "pp": 2, "microbatches": m, **schedule}, model)
    assert_equal_state(expected(4, layers=4, tied=tied), report)


def test_a_grid_beside_a_pipeline(sgd, expected):
    assert_equal_state(expected(2), sgd({**GRIDS["2d, 4"], "pp": 2, "microbatches": 2}))


@pytest.fixture(scope="module")
def alone(run):
    """What one rank makes of the same settings, computed once."""
    known: dict[str, pl.report.Report] = {}

    def of(model=SHALLOW, dp=1, **more):
        key = f"{model} {dp} {more}"
        if key not in known:
            plan = pl.Plan(
                microbatch_size=4, microbatches=dp, precision=more.pop("precision", "fp32")
            )
            settings = {"steps": STEPS, "optimizer": "sgd", "lr": LR, "keep_state": True, **more}
            known[key] = run(model, plan, **settings)
        return known[key]

    return of


@modes
def test_dropout_drops_the_same_activations(sgd, alone, mode):
    model = SHALLOW.replace(dropout=0.2)
    assert (
        worst(alone(model, steps=1).gradients, sgd(ALL[mode], model, steps=1).gradients)[0] < 1e-5
    )


@pytest.mark.parametrize(
    ("mode", "stage"),
    [*((mode, 0) for mode in ALL), ("1d, 2", 2), ("1d sequence, 2", 1), ("2d, 4", 3)],
)
def test_clipping_counts_what_is_held_twice_once(sgd, alone, mode, stage):
    dp = {"dp": 2, "zero_stage": stage} if stage else {"microbatches": 2}
    report = sgd({**ALL[mode], **dp}, SHALLOW, clip_norm=0.01)
    assert worst(alone(dp=2, clip_norm=0.01).weights, report.weights)[0] < 1e-5
    assert worst(alone(dp=2).weights, report.weights)[0] > 1e-3  # it did clip


@pytest.mark.parametrize(
    ("mode", "recompute"),
    [*((mode, "full") for mode in ALL), ("1d sequence, 2", "selective"), ("3d, 8", "selective")],
)
def test_recomputation_gives_the_same_bits(sgd, mode, recompute):
    model = SHALLOW.replace(dropout=0.1)
    plain, again = (sgd({**ALL[mode], "recompute": how}, model, steps=1)
                    for how in ("none", recompute))  # fmt: skip
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
def test_three_adamw_steps_stay_within_tolerance(run, mode):
    settings = {"steps": 3, "lr": 1e-3, "keep_state": True}
    alone = run(SHALLOW, pl.Plan(microbatch_size=4), **settings)
    report = run(SHALLOW, pl.Plan(microbatch_size=4, **ALL[mode]), **settings)
    for name, array in alone.weights.items():
        assert np.abs(array - report.weights[name]).max() < 2e-4, name


@pytest.mark.parametrize(
    ("mode", "precision"), [*((mode, "bf16") for mode in ALL), ("1d, 2", "fp16"), ("2d, 4", "fp16")]
)
def test_16_bits_stay_near(sgd, alone, mode, precision):
    report = sgd({**ALL[mode], "precision": precision}, SHALLOW, lr=0.05)
    assert worst(alone(precision=precision, lr=0.05).weights, report.weights)[0] < 0.05


@pytest.mark.parametrize("attention", ["explicit", "sdpa"])
def test_one_sample_and_fused_attention(sgd, text, attention):
    model = MODEL.replace(attention=attention)
    report = sgd({"tp": 4, "microbatch_size": 1}, model)
    alone = reference(model, microbatches=1, microbatch_size=1, steps=STEPS, lr=LR, data=text)
    assert_equal_state(alone, report)


# ---- checkpoints ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("before", "after", "stage"),
    [("1d, 2", "2d, 4", 3), ("2d, 4", "3d, 8", 0), ("3d, 8", "1d sequence, 4", 3),
     ("2.5d, 8", "1d, 2", 0)],
)  # fmt: skip
def test_a_training_goes_on_under_another_grid(run, tmp_path, before, after, stage):
    def plan(mode):
        return pl.Plan(microbatch_size=4, zero_stage=stage, bucket_bytes=BUCKET, **ALL[mode])

    whole = run(SHALLOW, pl.Plan(microbatch_size=4), steps=4, keep_state=True)
    run(SHALLOW, plan(before), steps=2, save=tmp_path / "saved")
    rest = run(SHALLOW, plan(after), steps=2, resume=tmp_path / "saved", keep_state=True)
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
