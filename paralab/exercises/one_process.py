"""What one process arrives at: the steps of SGD that answers on several ranks are held against.

SGD hides no wrong factor. Several ranks with m micro-batches each equal one process with all of
their micro-batches, in the same order.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from paralab.exercises.attempts import launched
from paralab.exercises.diagnose import first_wrong_tensor
from paralab.exercises.late import np, reference, torch
from paralab.exercises.verdict import Notes
from paralab.spec import ModelSpec, Plan

if TYPE_CHECKING:
    from paralab.report.report import Report

    Arrays = dict[str, np.ndarray]

LR = 0.1


class Step(NamedTuple):
    """loss     mean over the micro-batches
    gradients   mean over the micro-batches, before clipping
    weights     after the update
    """

    loss: float
    gradients: Arrays
    weights: Arrays


def trained(
    model: ModelSpec,
    *,
    clips: Sequence[float] = (math.inf,),
    lr: float = LR,
    seed: int = 0,
    **batch: int,
) -> list[Step]:
    """Every step's `Step`, in this process; first the initial weights, as a step 0.

    clips  to which norm the gradient is clipped in each step
    batch  micro-batches and their size, as `reference.batches` has them
    """
    gpt = reference.GPT(model, seed)
    update = reference.optimizer(gpt.parameters(), "sgd", lr)

    def copied(what: str) -> Arrays:
        return {n: getattr(p, what).detach().numpy().copy() for n, p in gpt.named_parameters()}

    found = [Step(0.0, {}, copied("data"))]
    for step, most in enumerate(clips):
        update.zero_grad()
        micro, loss = reference.batches(model, step=step, seed=seed, **batch), 0.0
        for one in micro:
            share = gpt(*one) / len(micro)
            share.backward()
            loss += share.item()
        gradients = copied("grad")
        torch.nn.utils.clip_grad_norm_(gpt.parameters(), most)
        update.step()
        found.append(Step(loss, gradients, copied("data")))
    return found


@functools.cache  # the same for every answer
def of_one_process(
    model: ModelSpec,
    *,
    ranks: int,
    microbatches: int,
    microbatch_size: int,
    clips: tuple[float, ...] = (math.inf,) * 3,
    lr: float = LR,
) -> list[Step]:
    """`trained` in a process of its own, on the samples of all ranks, ``microbatches`` of each."""
    from paralab.launch import launch

    batch = {"microbatches": ranks * microbatches, "microbatch_size": microbatch_size}
    return launch(_launched, ranks=1, args=(model, {"clips": clips, "lr": lr, **batch}))[0]


def _launched(model: ModelSpec, settings: dict[str, Any]) -> list[Step]:
    return trained(model, **settings)


def look_at_tensors(
    notes: Notes, limit: str, right: Arrays, found: Sequence[Mapping[str, np.ndarray]]
) -> None:
    """Tensors by name, as every rank has them, against those of one process."""
    wrong = first_wrong_tensor(found, right)
    notes.note(limit, wrong or f"{len(right)} tensors, all equal", not wrong, f"{limit}: {wrong}")


def look_at_run(
    notes: Notes, limits: Sequence[str], model: ModelSpec, plan: Plan, *, steps: int, timeout: float
) -> Report | None:
    """`pl.run` of a plan with SGD, whose "gradients" in the last step and "weights" after it, as
    ``limits`` say, are held against those of one process. A run that fails is noted in the first
    of them, and None is returned.
    """
    from paralab.experiment import run

    how = {"optimizer": "sgd", "lr": LR, "strict": True, "keep_state": True, "progress": False}
    report, trouble = launched(run, model, plan, steps=steps, timeout=timeout, **how)
    if trouble:
        notes.end(trouble, limit=limits[0])
        return None
    batch = {"microbatches": plan.microbatches, "microbatch_size": plan.microbatch_size}
    right = of_one_process(model, ranks=plan.dp, **batch)[steps]
    for limit in limits:
        look_at_tensors(notes, limit, getattr(right, limit), [getattr(report, limit)])
    return report
