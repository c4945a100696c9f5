"""The reference that answers on several ranks are compared with: steps of SGD in one process.

SGD, unlike AdamW, hides no wrong constant factor of the gradients. N ranks with m micro-batches
each have to compute what one process does with all N m micro-batches, in the same order.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from paralab.exercises.attempts import launched
from paralab.exercises.diagnose import first_wrong_tensor
from paralab.exercises.lazy import reference, watched
from paralab.exercises.verdict import Notes
from paralab.experiment import run
from paralab.launch import launch
from paralab.model.step import Step
from paralab.report.report import Report
from paralab.spec import ModelSpec, Plan

LR = 0.1


@functools.cache  # the same for every answer
def of_one_process(model: ModelSpec, *, ranks: int, lr: float = LR, **batch: int) -> list[Step]:
    """The steps of `reference.train` in a process of its own, on the samples of all ranks. batch:
    the "microbatches" of each rank, and their "microbatch_size".
    """
    batch["microbatches"] *= ranks
    settings = {"optimizer": "sgd", "lr": lr, "steps": 3}
    return launch(_trained, ranks=1, args=(model, settings | batch))[0]


def with_divisor(
    divisor: int, model: ModelSpec, *, ranks: int, steps: int, lr: float = LR, **batch: int
) -> dict[str, dict[str, Any]]:
    """{words: weights} for an answer that divides gradients by ``divisor`` on any number of ranks:
    with SGD these are the weights of another learning rate.
    """
    trained = of_one_process(model, ranks=ranks, lr=lr * ranks / divisor, **batch)
    return {f"gradients are divided by {divisor}, on {ranks} ranks": trained[steps].weights}


def gradients_of_each(gpt: Any, batches: Sequence[tuple]) -> list[dict[str, Any]]:
    """{name: gradient} of each micro-batch; their sum is the mean gradient."""
    found = []
    for tokens, targets in batches:
        gpt.zero_grad()
        (gpt(tokens, targets) / len(batches)).backward()
        found.append({name: watched.array(p.grad) for name, p in gpt.named_parameters()})
    return found


def _trained(model: ModelSpec, settings: dict[str, Any]) -> list[Step]:
    return list(reference.train(model, **settings))


def look_at_run(
    notes: Notes, limits: Sequence[str], model: ModelSpec, plan: Plan, *, steps: int, timeout: float
) -> Report | None:
    """Run a plan with SGD and compare it with one process. ``limits`` names what is compared:
    "gradients" of the last step, "weights" after it. Returns the report, or None if the run fails,
    which is noted in the first limit.
    """
    settings = {"optimizer": "sgd", "lr": LR, "strict": True, "keep_state": True, "progress": False}
    report, trouble = launched(run, model, plan, steps=steps, timeout=timeout, **settings)
    if trouble:
        notes.end(trouble, limit=limits[0])
        return None
    batch = {"microbatches": plan.microbatches, "microbatch_size": plan.microbatch_size}
    right = of_one_process(model, ranks=plan.dp, **batch)[steps]
    for limit in limits:
        right_tensors = getattr(right, limit)
        wrong = first_wrong_tensor([getattr(report, limit)], right_tensors)
        notes.look(limit, wrong, f"{len(right_tensors)} tensors, all equal")
    return report
