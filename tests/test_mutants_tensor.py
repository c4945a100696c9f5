"""Removing any one sum or synchronisation of tensor parallelism makes the equality check fail."""

from __future__ import annotations

import pytest

import paralab as pl
from equality import assert_equal_state, reference
from paralab.launch import launch_program
from paralab.records.merge import whole_model
from test_mutants import LR, SCALE, STEPS, TRAIN, mutated_run
from test_tensor_parallel import ALL, MODEL

ONE, TWO, THREE = (f"paralab.parallel.tensor_{name}" for name in ("parallel", "2d", "3d"))
DEPTH, LAYOUTS = "paralab.parallel.tensor_25d", "paralab.parallel.layouts"
SHARED, PRECISION = "paralab.parallel.shared_gradients", "paralab.parallel.precision"

MUTANTS = {
    "f: gradients of the ranks not added": (
        "1d, 2", ONE, "return grad, self.group.all_reduce(grad, phase=phase)", "return grad, None"),
    "f: read before it is there": ("1d, 2", ONE, "            call.wait()\n        return grad_x", (
        "            pass\n        return grad_x")),
    "f-bar: not gathered again for the weight": (
        "1d sequence, 2", ONE, "x = done(layer.enter.forward(x, phase))\n        grad_x",
        "x = torch.cat([x, x], 1)\n        grad_x"),
    "a row's bias on every rank": ("1d, 2", ONE, "F.linear(entered, weight), phase))",
                                   "F.linear(entered, weight, bias), phase))"),
    "embedding: entries of others found at 0": (
        "1d, 2", ONE, ".masked_fill(elsewhere.unsqueeze(-1), 0.0)", ""),
    "loss: own logits alone": (
        "1d, 2", ONE, "total = torch.logsumexp(sums, 0)", "total = own[0]"),
    "loss: every rank takes the target off": (
        "1d, 2", ONE, "-here.unsqueeze(1).to(grad_logits.dtype)",
        "-torch.ones_like(mine, dtype=grad_logits.dtype)"),
    "norms of a part of the sequence not added": (
        "1d sequence, 2", LAYOUTS, 'partial=frozenset(("norm",) if sequence_parallel else ())',
        "partial=frozenset()"),
    "norms added where every rank has all": (
        "1d, 2", LAYOUTS, 'partial=frozenset(("norm",) if sequence_parallel else ())',
        'partial=frozenset(("norm",))'),
    "2d: a block is not added": ("2d, 4", TWO, "y.add_(partial)", "y"),
    "2d: the wrong column's weights": (
        "2d, 4", TWO, "w_step = self.spread(self.column, w, step, phase)", "w_step = w"),
    "2d: norm of the own features": ("2d, 4", TWO, "mean = means.mean(0)", "mean = means[0]"),
    "2d: norm's gradient of the own features": (
        "2d, 4", TWO, 'ctx.group.all_reduce(sums, phase="norm_backward").wait()', "pass"),
    "2.5d: weights not added over depth": (
        "2.5d, 8", LAYOUTS,
        'copies |= dict.fromkeys(("token", "output", "qkv", "up", "proj", "down"), "tp:depth")',
        "pass"),
    "2.5d: every grid takes all samples": (
        "2.5d, 8", DEPTH, "depth.index * count, (depth.index + 1) * count", "0, count"),
    "3d: the input's gradient not added": (
        "3d, 8", THREE, "grad_x, call = reduce_scatter(cube.rows, whole @ w, 0, phase)",
        "grad_x = (whole @ w).chunk(cube.rows.size)[cube.rows.index]"),
    "3d: the weight's gradient not added": (
        "3d, 8", THREE, "done(reduce_scatter(self.shares, parts, 1, phase))",
        "parts.chunk(self.shares.size, 1)[self.shares.index]"),
    "shared gradients not added": ("2d, 4", SHARED, (
        "self.group.all_reduce(flat, phase=self.phase).wait()"), "pass"),
    "tokens of one rank taken for all": (
        "2d, 4", TRAIN, SCALE, "loss / (plan.microbatches * plan.dp)"),
}  # fmt: skip


@pytest.fixture(scope="module")
def check(text):
    settings = {"steps": STEPS, "optimizer": "sgd", "lr": LR, "clip_norm": None, "data": str(text),
                "seed": 0, "keep_state": True}  # fmt: skip
    expected = reference(MODEL, microbatches=1, microbatch_size=4, steps=STEPS, lr=LR, data=text)

    def run(mode: str, edit: tuple | None) -> None:
        plan = pl.Plan(microbatch_size=4, **ALL[mode])
        args = (edit, MODEL, plan, settings)
        parts = launch_program(mutated_run, plan.tp, args, timeout=60, device="cpu")
        state = {
            what: whole_model({p["rank"]: p[what] for p in parts}, plan, MODEL)
            for what in ("weights", "gradients")
        }
        assert_equal_state(expected, state)

    return run


@pytest.mark.parametrize("mode", ["1d, 2", "1d sequence, 2", "2d, 4", "2.5d, 8", "3d, 8"])
def test_the_unchanged_source_passes_the_same_check(check, mode):
    check(mode, None)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(check, name):
    mode, *edit = MUTANTS[name]
    # A rank's own refusal counts as caught, an edit that hit nothing does not.
    with pytest.raises((AssertionError, pl.RankError)) as caught:
        check(mode, tuple(edit))
    assert "stands" not in str(caught.value)
