"""Removing any one division or synchronisation makes the equality check fail.

Each mutant is one edit of the source, applied inside the ranks; the edit must hit exactly one
place.
"""

from __future__ import annotations

import time

import pytest

import paralab as pl
from equality import assert_equal_state, reference
from paralab.launch import launch_program

STEPS, LR = 2, 0.5
DATA_PARALLEL, TRAIN = "paralab.parallel.data_parallel", "paralab.train"
SIGNAL, BATCHES = "paralab.parallel.gradient_signal", "paralab.batches"
ZERO, FLAT = "paralab.parallel.zero", "paralab.parallel.flat"
NAIVE_SYNC = "self.group.all_reduce(parameter.grad).wait()"
FLAT_SYNC = "self.group.all_reduce(flat).wait()"
LAUNCH = "self.pending.append(self.group.all_reduce(self.flat[self.next]))"
RESET = "parameter.grad = None\n        self.missing"
SCALE = "loss / (plan.microbatches * plan.dp * loss_parts(plan))"

MUTANTS = {
    "naive: no all-reduce": ("naive", DATA_PARALLEL, NAIVE_SYNC, "pass"),
    "naive: no wait": ("naive", DATA_PARALLEL, NAIVE_SYNC, NAIVE_SYNC.removesuffix(".wait()")),
    "naive: weight reduced, not gradient": (
        "naive", DATA_PARALLEL, NAIVE_SYNC, "self.group.all_reduce(parameter.data).wait()"),
    "naive: gradients not reset": (
        "naive", DATA_PARALLEL, "parameter.grad = None\n\n\nclass", "pass\n\n\nclass"),
    "bucketed: no all-reduce": ("bucketed", DATA_PARALLEL, FLAT_SYNC, "pass"),
    "bucketed: weights reduced, not gradients": (
        "bucketed", DATA_PARALLEL, FLAT_SYNC,
        "[self.group.all_reduce(p.data).wait() for p in self.parameters]"),
    "bucketed: gradient not in its bucket": (
        "bucketed", DATA_PARALLEL, "parameter.grad = part.view_as(parameter)", "pass"),
    "bucketed: gradients not reset": (
        "bucketed", DATA_PARALLEL, RESET, "pass\n        self.missing"),
    "overlapped: no all-reduce": ("overlapped", DATA_PARALLEL, LAUNCH, "pass"),
    "overlapped: no wait": ("overlapped", DATA_PARALLEL, "pending.wait()", "pass"),
    "overlapped: the last bucket stays": (
        "overlapped", DATA_PARALLEL, LAUNCH, "if self.next + 1 < len(self.flat): " + LAUNCH),
    "overlapped: sent before the last micro-batch": (
        "overlapped", SIGNAL, "== self.expected[parameter]", "== 1"),
    "no division by N": ("overlapped", TRAIN, SCALE, "loss / plan.microbatches"),
    "no division by the micro-batches": ("overlapped", TRAIN, SCALE, "loss / plan.dp"),
    "no division at all": ("naive", TRAIN, SCALE, "loss"),
    "every rank takes the first rank's micro-batches": (
        "overlapped", BATCHES, "first = rank * plan.microbatches", "first = 0"),
    "ZeRO-1: no all-gather": (1, ZERO, "[flat.gather() for flat in self.trained]", "[]"),
    "ZeRO-1: the last reduce-scatters stay": (1, ZERO, "self.settle(keep=0)", "pass"),
    "ZeRO-1: every rank owns the first part": (
        1, FLAT, "self.own = self.full.chunk(group.size)[group.index]",
        "self.own = self.full.chunk(group.size)[0]"),
    "ZeRO-2: the last micro-batch alone": (
        2, ZERO, "flat.own.grad += part", "flat.own.grad = part  #"),
    "ZeRO-3: not gathered for backward": (3, ZERO, "output.register_hook(", "str("),
}  # fmt: skip


def mutate(edit):
    """Replace one line of the source in this process; None: leave it as it is."""
    import importlib
    import inspect
    import sys

    if edit is not None:
        name, old, new = edit
        module = importlib.import_module(name)
        source = inspect.getsource(module)
        assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in {name}"
        exec(compile(source.replace(old, new), module.__file__, "exec"), module.__dict__)
        importlib.import_module(TRAIN)
        for other in [m for n, m in sys.modules.items() if n.startswith("paralab.")]:
            for known in set(vars(other)).intersection(vars(module)) - {"__name__"}:
                if getattr(vars(module)[known], "__module__", None) == name:
                    setattr(other, known, vars(module)[known])  # what it took from there
        importlib.reload(sys.modules["paralab.parallel.modes"])  # has classes in a table
        if name == ZERO:
            importlib.reload(sys.modules["paralab.parallel.offload"])  # has classes made of these


def be_late():
    """Every all-reduce of this rank leaves 20 ms later than it might."""
    import torch.distributed as dist

    prompt = dist.all_reduce

    def late(*args, **settings):
        time.sleep(0.02)
        return prompt(*args, **settings)

    dist.all_reduce = late


def mutated_run(context, edit, model, plan, settings):
    """The rank program with one line of its source replaced."""
    mutate(edit)
    from paralab.train import train

    if edit is not None and ".wait()" in edit[1] and context.rank:  # who does not wait is too early
        be_late()

    return train(context, model, plan, **settings)


@pytest.fixture(scope="module")
def check(model, text):
    settings = {"steps": STEPS, "optimizer": "sgd", "lr": LR, "clip_norm": None, "data": str(text),
                "seed": 0, "keep_state": True}  # fmt: skip
    expected = reference(model, microbatches=4, microbatch_size=2, steps=STEPS, lr=LR, data=text)

    def run(form: str | int, edit: tuple | None) -> None:
        how = {"zero_stage": form} if isinstance(form, int) else {"grad_sync": form}
        plan = pl.Plan(dp=2, microbatches=2, microbatch_size=2, bucket_bytes=60_000, **how)
        args = (edit, model, plan, settings)
        part = launch_program(mutated_run, 2, args, timeout=60, device="cpu")[0]
        assert_equal_state(expected, part)

    return run


@pytest.mark.parametrize("form", ["naive", "bucketed", "overlapped", 1, 2, 3])
def test_the_unchanged_source_passes_the_same_check(check, form):
    check(form, None)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(check, name):
    form, *edit = MUTANTS[name]
    # A rank's own refusal counts as caught, an edit that hit nothing does not.
    with pytest.raises((AssertionError, pl.RankError)) as caught:
        check(form, tuple(edit))
    assert "stands" not in str(caught.value)
