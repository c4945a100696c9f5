"""Lab 02: gradients averaged over the ranks after each backward.

The answer trains the reference GPT on 3 and 4 ranks with SGD, which hides no wrong factor, and is
compared with one process. `my_ddp` (ddp.py), a wrapper whose hooks average gradients while backward
still runs, is judged by the same trainings.
"""

from __future__ import annotations

import contextlib
import functools
import math
from typing import Any

from paralab.exercises.diagnose import first_wrong_tensor
from paralab.exercises.exercise import Takes, Tries, exercise
from paralab.exercises.lazy import reference, torch, watched
from paralab.exercises.one_process import LR, gradients_of_each, of_one_process, with_divisor
from paralab.exercises.tries import Outcome
from paralab.exercises.verdict import Notes
from paralab.spec import ModelSpec

RANKS = 4
# A small model with several micro-batches; for `my_ddp` two full buckets and one that is not.
MODEL = ModelSpec(layers=2, hidden=32, heads=2, seq_len=16)
BATCH = {"microbatches": 2, "microbatch_size": 2}
PADDING = 1.001  # factor on the bytes
NO_SYNC = "no_sync"  # label of calls before the last micro-batch
REQUIRED = {
    "gradients": f"of one step on {RANKS} ranks: those of one process",
    "weights": "after 2 steps of SGD on 3 ranks: those of one process",
    "bytes per rank": "2(N-1)/N · 4Ψ in a step, within 0.1 % (for padding)",
}
GRADIENTS, WEIGHTS, BYTES = REQUIRED


@exercise(Takes("average_gradients(module)"), required=REQUIRED)
def average_gradients(tries: Tries) -> None:
    look_at_training(tries, averaged)


def look_at_training(
    tries: Tries, work: Any, bucket_bytes: float = math.inf
) -> list[tuple[Notes, str]]:
    """Check the three limits of `REQUIRED`. Returns (notes, "" or the first bucket that is sent
    before it is full, in words) of each answer: the caller notes that last.

    work          what every rank runs: `averaged` or `ddp.trained`
    bucket_bytes  the size at which a bucket is full; infinite if messages may have any size
    """
    early: list[tuple[Notes, str]] = []
    largest = bucket_bytes + max(4 * math.prod(s) for s in MODEL.parameter_shapes().values())
    most = 2 * (RANKS - 1) * 4 * MODEL.num_params / RANKS
    settings = {"memory": False, "unbroken": (GRADIENTS,)}  # wrong gradients make wrong weights
    for notes, outcome in tries.run(work, RANKS, 1, limit=GRADIENTS, **settings):
        quiet, sent = outcome.sent(NO_SYNC), outcome.sent(NO_SYNC, "data")
        if not any(sent):
            wrong = "no gradient was sent to another rank: dist.all_reduce(tensor) sends one"
            if math.isfinite(bucket_bytes):
                wrong += ", and the last backward of a step runs outside no_sync()"
            notes.look(BYTES, wrong, "")
        right = of_one_process(MODEL, ranks=RANKS, **BATCH)[1].gradients
        how = {"known": _mistakes(outcome, right), "terms": _terms(outcome)}
        wrong = first_wrong_tensor(outcome[GRADIENTS], right, **how)
        notes.look(GRADIENTS, wrong, f"{len(right)} tensors, all equal")
        calls = outcome.report.collectives
        size = max(calls["payload_bytes"][calls["phase"] == "data"], default=0)
        wrong = f"one message has {size:,} bytes, required: at most {largest:,}, which is "
        wrong += "bucket_bytes and the largest gradient"
        notes.look(BYTES, wrong if size > largest else "", "")
        early.append((notes, _early_bucket(calls, bucket_bytes)))
        doing = "in a step" + f", {max(quiet):,} of them within no_sync()" * any(quiet)
        notes.bytes(BYTES, sent, int(PADDING * most), doing, least=int(most / PADDING))
    steps, batch = 2, {"ranks": 3, **BATCH}
    for notes, outcome in tries.run(work, 3, steps, limit=WEIGHTS, **settings):
        right = of_one_process(MODEL, **batch)[steps].weights
        if wrong := first_wrong_tensor(outcome[WEIGHTS], right):  # then name a usual mistake, which
            known = with_divisor(RANKS, MODEL, steps=steps, **batch)  # takes another training
            wrong = first_wrong_tensor(outcome[WEIGHTS], right, known=known)
        notes.look(WEIGHTS, wrong, f"{len(right)} tensors, all equal")
    return early


def _early_bucket(calls: Any, bucket_bytes: float) -> str:
    """The first message of rank 0 that sends a bucket before it is full, in words, or ""."""
    mine = calls[(calls["phase"] == "data") & (calls["rank"] == 0) & (calls["op"] == "all_reduce")]
    sizes = mine.sort_values("span")["payload_bytes"].tolist()
    early = (size for size in sizes[:-1] if size < bucket_bytes)
    message = "a message that is not the last has {:,} bytes, required: at least bucket_bytes, {:,}"
    return next((message.format(size, bucket_bytes) for size in early), "")


def _terms(outcome: Outcome) -> dict[str, dict[str, Any]]:
    """{words: gradients} of each micro-batch of each rank, whose sum is the mean gradient."""
    return {
        f"of micro-batch {k} of rank {rank}": {n: g / len(outcome["own"]) for n, g in one.items()}
        for rank, own in enumerate(outcome["own"])
        for k, one in enumerate(own)
    }


def _mistakes(outcome: Outcome, right: dict[str, Any]) -> dict[str, dict[str, Any]]:
    n, mistakes = len(outcome.results), {}
    for rank, parts in enumerate(outcome["own"]):
        own = {name: sum(one[name] for one in parts) for name in parts[0]}
        for words, factor in (("", 1), (f" divided by {n}", n)):
            said = f"it is rank {rank}'s own gradient{words}, to which no other was added"
            mistakes[said] = {name: gradient / factor for name, gradient in own.items()}
    unequal = {
        name: sum(one[name] for rank in outcome["unequal"] for one in rank) / n for name in own
    }
    mistakes["the ranks began with unequal weights"] = unequal
    for words, factor in (
        ("it is the sum over the ranks, required: the mean", n),
        ("it is divided by the number of ranks twice", 1 / n),
    ):
        mistakes[words] = {name: factor * gradient for name, gradient in right.items()}
    return mistakes


def averaged(watch: Any, answer: tuple, seed: int, steps: int) -> dict[str, Any]:
    """What every rank runs: training that calls the answer after the last backward of a step."""
    return training(watch, steps, lambda gpt: (gpt, lambda: answer[0](gpt)))


def training(watch: Any, steps: int, wrap: Any, shift: int = 0) -> dict[str, Any]:
    """Train the reference GPT on this rank's samples. Returns the "gradients" of the last step, the
    "weights" after it, and for known mistakes the gradients of this rank's samples alone, with
    right weights and with shifted ones.

    wrap   module -> (model to call with tokens and targets, function to call after backward)
    shift  what is added to every weight of this rank before training
    """
    gpt, group = _shifted(shift), watch.group
    model, finish = wrap(gpt)
    named, count = dict(gpt.named_parameters()), BATCH["microbatches"]
    update = reference.optimizer(named.values(), "sgd", LR)
    quiet = getattr(model, "no_sync", contextlib.nullcontext)
    for step in range(steps):
        update.zero_grad()
        data = {"step": step, "rank": group.index, "ranks": group.size}
        for k, (tokens, targets) in enumerate(reference.batches(MODEL, **data, **BATCH)):
            label, last = watch.label, k == count - 1
            watch.label = label if last else NO_SYNC
            with contextlib.nullcontext() if last else quiet():
                loss = model(tokens, targets) / count
                loss.backward()
            watch.label = label
        finish()
        for name, parameter in named.items():
            if parameter.grad is None:
                raise ValueError(f"at the end of the step {name} has no gradient: .grad is None")
        gradients = {name: watched.array(parameter.grad) for name, parameter in named.items()}
        update.step()
    weights = watched.arrays(gpt)
    with watch.unseen():
        own, unequal = (_own(group.index, group.size, by) for by in (0, shift))
    return {"gradients": gradients, "weights": weights, "own": own, "unequal": unequal}


def _shifted(by: int) -> Any:
    gpt = reference.GPT(MODEL)
    with torch.no_grad():
        for parameter in gpt.parameters():
            parameter.add_(by)
    return gpt


@functools.cache  # the same for every answer
def _own(rank: int, ranks: int, shift: int) -> list[dict[str, Any]]:
    """Gradients of each micro-batch of a rank in the first step; all weights are shifted."""
    batches = reference.batches(MODEL, step=0, rank=rank, ranks=ranks, **BATCH)
    return gradients_of_each(_shifted(shift), batches)
