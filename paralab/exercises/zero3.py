"""Lab 05: ZeRO-3 in plain PyTorch: units are gathered before use, freed after it, gathered again.

The answer trains the reference GPT with SGD, which hides no wrong factor. Its weights, gathered
after the steps, are compared with those of one process (Rajbhandari+ 2020, arXiv:1910.02054, sec.
5.3 and 7.2.2; Zhao+ 2023, arXiv:2304.11277, sec. 3.2).
"""

from __future__ import annotations

import functools
import math
from typing import Any

from paralab.exercises.diagnose import first_wrong_tensor
from paralab.exercises.exercise import Takes, Tries, exercise
from paralab.exercises.lazy import reference, watched
from paralab.exercises.one_process import gradients_of_each, of_one_process, with_divisor
from paralab.exercises.sync import BATCH
from paralab.parallel.buckets import units
from paralab.spec import ModelSpec, Plan

# Many small units, so that a model that is never freed shows in the peak.
MODEL = ModelSpec(layers=5, hidden=30, heads=2, seq_len=8, tied=False)
RUNS = {4: 1, 3: 2}  # ranks: steps
RATES = {4: 0.05, 3: 0.2, 2: 0.4}  # the learning rate by ranks; none is the task example's 0.1
SCALARS = 4000  # bytes of counts and the like
UNITS = 4  # whole units at the peak: parameters, gradients, and both again in flat buffers

WEIGHTS, BYTES, KEPT, PEAK = "weights", "bytes per rank", "kept between steps", "peak of a step"
STALE = "the gradient of the step before is still in it"
LAST = "the gradients of the micro-batches are not added up: only the last one's share is left"
SUMMED = "the gradient is the sum over the ranks, required: the mean"
Arrays = dict[str, Any]  # {name: NumPy array}


def room(units: int) -> str:
    """The limit of a step's peak, in words."""
    return f"tensors: at most {units} units in addition to what is kept and what forward saves"


REQUIRED = {
    WEIGHTS: "N = 4, 3: after 1 and 2 steps of SGD those of one process, on every rank",
    BYTES: "at most 3m(N-1)/N · 4Ψ in a step, each unit padded to N equal parts",
    KEPT: "tensors: at most 8Ψ/N bytes, an N-th of parameters and gradients (and 4 kB)",
    PEAK: room(UNITS),
}


@exercise(Takes("MyZero3(units, lr=...)", methods=("step", "gather")), required=REQUIRED)
def my_zero3(tries: Tries) -> None:
    look_at_training(tries, RUNS, UNITS)


def look_at_training(tries: Tries, runs: dict[int, int], most_units: int) -> None:
    """Check the limits of `my_zero3`, of answers that have broken none yet.

    runs        {ranks: steps}
    most_units  the number of whole units that there may be at the peak
    """
    for n, steps in runs.items():
        for notes, outcome in tries.run(train, n, steps, where=f"N={n}"):
            lr = RATES[n]
            trained = of_one_process(MODEL, ranks=n, lr=lr, **BATCH)
            before, last = trained[steps - 1 : steps + 1]
            start, shares = outcome.results[0]["start"], outcome["share"]
            share = {name: sum(one[name] for one in shares) / n for name in start}
            alone = _updated(start, lr, share)
            known = {  # all but the first of one step
                STALE: _updated(last.weights, lr, before.gradients),
                LAST: alone,
                SUMMED: _updated(start, lr * n, last.gradients),
            }
            terms = {
                "of the weights before": start,
                "of the last micro-batch": {name: -lr * g for name, g in share.items()},
                "of the micro-batches before the last": {
                    name: w - alone[name] for name, w in last.weights.items()
                },
            }
            how = {"start": start, "known": known, "terms": terms if steps == 1 else {}}
            wrong = first_wrong_tensor(outcome["weights"], last.weights, **how)
            if wrong and steps > 1:  # only now: this takes another training
                known |= with_divisor(max(RUNS), MODEL, ranks=n, steps=steps, lr=lr, **BATCH)
                wrong = first_wrong_tensor(outcome["weights"], last.weights, **how)
            notes.look(WEIGHTS, wrong, "all equal")

            numels = {name: math.prod(s) for name, s in MODEL.parameter_shapes().items()}
            padded = units(numels, MODEL, Plan(dp=n, zero_stage=3))
            parts = [4 * unit.numel // n for unit in padded]
            most = 3 * BATCH["microbatches"] * (n - 1) * sum(parts)
            for step in range(steps):
                notes.bytes(BYTES, outcome.sent(f"step {step}"), most, "in a step", least=0)

            most = 2 * sum(parts) + SCALARS
            why = f"; an N-th of parameters and gradients has {2 * sum(parts):,}"
            notes.memory(KEPT, outcome["kept"], most, "keeps {} bytes between steps", why)

            peaks = [result["peak"] - result["forward"] for result in outcome.results]
            most = most_units * n * max(parts)
            words = "has {} bytes in addition to what forward saves"
            why = f", which are {most_units} units"
            if any(result["gathered"] - result["forward"] > most for result in outcome.results):
                why += "; more units are still gathered when backward begins"
            else:
                why += "; each copy of a unit, such as cat and pad make, counts until it is freed"
            notes.memory(PEAK, peaks, most, words, why)


def _updated(weights: Arrays, lr: float, gradients: Arrays) -> Arrays:
    return {name: weights[name] - lr * g for name, g in gradients.items()}


def train(watch: Any, answer: tuple, seed: int, steps: int) -> dict[str, Any]:
    """What every rank runs: training with the answer.

    Returns the "weights", gathered after the last step; in bytes, what is "kept" between steps, and
    beyond what a step begins with its "peak", and what is "gathered" when backward first begins;
    and the numbers of a `plain` GPT.
    """
    group, m = watch.group, BATCH["microbatches"]
    shard = {"rank": group.index, "ranks": group.size}
    of_plain, forward = plain(**shard)
    kept = peak = gathered = 0
    with watch.section() as all_of_it:
        gpt = reference.GPT(MODEL)
        zero = answer[0]([gpt.embedding, *gpt.blocks, gpt.head], lr=RATES[group.size])
        for step in range(steps):
            batches = reference.batches(MODEL, step=step, **shard, **BATCH)
            before = all_of_it.now()
            with watch.section() as in_step:
                watch.label = f"step {step}"
                for tokens, targets in batches:
                    loss = gpt(tokens, targets) / m
                    gathered = gathered or watch.live - in_step.before
                    loss.backward()
                    del loss
                zero.step()
                watch.label = "afterwards"
            peak, kept = max(peak, in_step.peak), max(kept, before, all_of_it.now())
            del batches
        zero.gather()
        if (lost := watched.freed(list(gpt.parameters()))) is not None:
            raise RuntimeError(f"after gather() a parameter of {tuple(lost.shape)} has no memory")
        weights = watched.arrays(gpt)
    held = {"kept": kept, "peak": peak, "gathered": gathered, "forward": forward}
    return {**of_plain, "weights": weights, **held}


@functools.cache  # on each rank the same for every answer
def plain(**shard: int) -> tuple[dict[str, Arrays], int]:
    """({"start": weights of a plain GPT, "share": the last micro-batch's part of this rank's first
    gradient}, bytes at the peak of a forward beyond the weights)
    """
    gpt = reference.GPT(MODEL)
    batches = list(reference.batches(MODEL, step=0, **shard, **BATCH))
    with watched.PeakMemory() as memory:
        gpt(*batches[-1]) / BATCH["microbatches"]
    last = gradients_of_each(gpt, batches)[-1]
    return {"start": watched.arrays(gpt), "share": last}, memory.peak
