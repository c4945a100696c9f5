"""16 bits beside a pipeline: stages send what they compute in, and share one loss scale.

The reference is one process of the same precision. Without tied weights each parameter has one
chain of additions, whatever the schedule, and what a stage sends has 16 bits on one device too: bit
for bit. A tied embedding's gradient is two chains, each rounded, whose sum is rounded once more.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import paralab as pl
from equality import worst
from paralab.launch import launch_program
from test_mutants import TRAIN, mutate
from test_precision import GRADIENT_TOLERANCE, LOSS_TOLERANCE
from test_predict import cluster
from test_predict_zero import order

# Five blocks: neither two nor three stages divide them, and the head costs less than one.
MODEL = pl.ModelSpec(layers=5, hidden=40, heads=4, seq_len=24, vocab=258, tied=False)
STEPS = 3
PLANS = {
    "1f1b": pl.Plan(pp=3, microbatches=4),
    "fewer micro-batches than stages": pl.Plan(pp=3, microbatches=2, schedule="gpipe"),
    "interleaved": pl.Plan(pp=2, microbatches=4, virtual_stages=2, schedule="interleaved"),
    "split backward": pl.Plan(pp=2, microbatches=4, schedule="zb-h1"),
}
CASES = [
    *(("bf16", "sgd", name) for name in PLANS), ("bf16", "adamw", "1f1b"),
    ("fp16", "sgd", "split backward"), ("fp16", "adamw", "fewer micro-batches than stages"),
]  # fmt: skip


def optimizers(name):
    return {"optimizer": "sgd", "lr": 0.5} if name == "sgd" else {}


# ---- equality ---------------------------------------------------------------------------------
@pytest.mark.parametrize("precision, optimizer, name", CASES)
def test_untied_models_train_bitwise_as_on_one_device(kept, precision, optimizer, name):
    plan, settings = PLANS[name].replace(precision=precision), optimizers(optimizer)
    alone = kept(
        MODEL, pl.Plan(microbatches=plan.microbatches, precision=precision), **settings
    )  # fmt: skip
    report = kept(MODEL, plan, **settings)
    for what in ("gradients", "weights"):
        gap, where = worst(getattr(alone, what), getattr(report, what))
        assert gap == 0.0, f"{what} of {where} differ by {gap}"
    assert report.losses == alone.losses


@pytest.mark.parametrize(
    "precision, settings",
    [("bf16", {"pp": 3, "microbatches": 4}),
     ("fp16", {"pp": 2, "dp": 2, "zero_stage": 2, "microbatches": 2}),
     ("bf16", {"pp": 2, "dp": 2, "microbatches": 2, "schedule": "zb-h1"}),
     ("fp16", {"pp": 2, "tp": 2, "sequence_parallel": True, "microbatches": 4})],
    ids=str,
)  # fmt: skip
def test_tied_ends_and_other_axes_train_as_one_device_does(kept, precision, settings):
    """Every rank's sum is rounded by itself. Two steps: in the second, weights differ already."""
    tied, sgd = MODEL.replace(tied=True), {"steps": 2, **optimizers("sgd")}
    plan = pl.Plan(precision=precision, **settings)
    alone = kept(tied, pl.Plan(microbatches=4, precision=precision), **sgd)
    report = kept(tied, plan, **sgd)
    for name, weight in alone.weights.items():
        gap = np.linalg.norm(report.weights[name] - weight) / np.linalg.norm(weight)
        assert gap < GRADIENT_TOLERANCE[precision], name
    for name, gradient in alone.gradients.items():
        gap = np.linalg.norm(report.gradients[name] - gradient) / np.linalg.norm(gradient)
        assert gap < 2 * GRADIENT_TOLERANCE[precision], name
    for a, b in zip(alone.losses, report.losses, strict=True):
        assert abs(a - b) <= LOSS_TOLERANCE[precision] * a


def test_clipping_is_of_the_whole_models_norm(kept):
    plan = pl.Plan(pp=2, microbatches=4, schedule="zb-h1", precision="fp16")
    alone = pl.Plan(microbatches=4, precision="fp16")
    alone = kept(MODEL, alone, clip_norm=0.1, **optimizers("sgd"))
    report = kept(MODEL, plan, clip_norm=0.1, **optimizers("sgd"))
    assert worst(alone.weights, report.weights)[0] < 1e-3
    free = kept(MODEL, plan, **optimizers("sgd"))
    assert worst(alone.weights, free.weights)[0] > 1e-2


# ---- one loss scale -----------------------------------------------------------------------------
def overflow_on_the_last_stage(context: Any, edit: Any, plan: pl.Plan, data: str) -> dict:
    """Three steps; in the second a gradient of the last stage, and no other, is infinite."""
    mutate(edit)
    from paralab.train import Trainer

    trainer = Trainer(context, MODEL, plan, optimizer="sgd", lr=0.5, data=data)
    weight = list(trainer.named.values())[-1]
    spoils, found = context.rank == plan.pp - 1, {"scales": [], "changed": []}
    if spoils:
        weight.register_hook(lambda grad: grad / trainer.spoiled)
    for step in range(3):
        before = [p.detach().clone() for p in trainer.named.values()]
        trainer.spoiled = 0.0 if step == 1 else 1.0
        trainer.step(step)
        found["changed"].append(
            any(bool((a != b).any()) for a, b in zip(before, trainer.named.values(), strict=True))
        )
        found["scales"].append(trainer.update.loss_scale.value.item())
    return found


@pytest.mark.parametrize("edit", [None, (TRAIN, "over = [self.grid.pp, ", "over = [")])
def test_an_overflow_in_one_stage_leaves_the_step_out_in_all(text, edit):
    plan = pl.Plan(pp=3, microbatches=2, precision="fp16")
    args = (edit, plan, str(text))
    found = launch_program(overflow_on_the_last_stage, 3, args, timeout=60, device="cpu")
    shared = {"scales": [2.0**16, 2.0**15, 2.0**15], "changed": [True, False, True]}
    assert (found == [shared] * 3) == (edit is None)


# ---- bytes, rows, memory ------------------------------------------------------------------------
@pytest.mark.parametrize("precision, optimizer, name", CASES)
def test_messages_have_two_bytes_an_element_and_predicted_rows_are_the_runs(
    kept, precision, optimizer, name
):
    plan = PLANS[name].replace(precision=precision)
    report = kept(MODEL, plan, **optimizers(optimizer))
    expected = pl.predict(MODEL, plan, cluster(), steps=STEPS, optimizer=optimizer)
    for found in (report, expected):
        calls = found.collectives[found.collectives["phase"] == "activations"]
        assert set(calls["payload_bytes"]) == {2 * 2 * MODEL.seq_len * MODEL.hidden}
    for rank in range(plan.world_size):
        rows = order(report, rank)
        if precision == "fp16":  # the agreement on a scale, a scalar, cuts the update in pieces
            rows = [r for at, r in enumerate(rows) if r[0] != "optimizer" or at + 1 == len(rows)]
        assert order(expected, rank) == rows
    assert pl.compare(expected, report).bytes_agree


@pytest.mark.parametrize("settings", [{"dp": 2}, {"dp": 2, "zero_stage": 1}], ids=str)
def test_a_tied_embeddings_sum_has_two_bytes_an_element(run, settings):
    model, plan = MODEL.replace(tied=True), pl.Plan(pp=2, precision="bf16", **settings)
    report, expected = run(model, plan, steps=2), pl.predict(model, plan, cluster(), steps=2)
    owners = plan.dp if plan.zero_stage else 1
    for found in (report, expected):
        calls = found.collectives[found.collectives["phase"] == "tied"]
        assert set(calls["payload_bytes"]) == {2 * model.vocab * model.hidden // owners}
    assert pl.compare(expected, report).bytes_agree


@pytest.mark.parametrize("precision, optimizer, name", CASES)
def test_memory_is_the_formulas_by_category(kept, precision, optimizer, name):
    plan = PLANS[name].replace(precision=precision)
    report = kept(MODEL, plan, **optimizers(optimizer))
    message = 2 * 2 * MODEL.seq_len * MODEL.hidden
    for rank in range(plan.world_size):
        table = report.peaks(rank)
        found, formula = table["measured"], table["formula"]
        for category in ("parameters", "gradients", "optimizer"):
            assert found[category] == formula[category]
        kept_back = found["activations"] + found["buffers"]
        assert abs(kept_back - formula["activations"]) <= 3 * plan.virtual_stages * message
        assert found["other"] <= 0.02 * found["total"]


@pytest.mark.parametrize("name", [None, "messages of 32 bits"])
def test_a_receiver_that_expects_another_width_is_caught(text, name):
    from test_mutants import mutated_run

    edit = ("paralab.parallel.pipeline", "torch.empty(self.activation, dtype=self.dtype",
            "torch.empty(self.activation, dtype=torch.float32")  # fmt: skip
    plan = pl.Plan(pp=2, microbatches=2, precision="bf16")
    settings = {"steps": 1, "optimizer": "sgd", "lr": 0.5, "clip_norm": None, "data": str(text),
                "seed": 0, "keep_state": False}  # fmt: skip

    def check():
        args = (edit if name else None, MODEL, plan, settings)
        launch_program(mutated_run, 2, args, timeout=60, device="cpu", strict=True)

    if name is None:
        check()
        return
    with pytest.raises(pl.RankError, match="size and type"):
        check()
