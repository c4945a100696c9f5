"""Lab 02: gradient synchronisation in buckets that leave while backward still runs.

The checker looks three times. One step of the reference GPT on four real ranks, whose gradients
autograd's hooks announce as DDP's do, against one process proves gradients; three steps on three
ranks prove weights, with SGD, which hides no wrong factor. Traced backwards of the laptop model,
gradient by gradient, have their sums compared and their recorded order replayed with stated costs:
12 ms of backward, divided over the parameters by size, a link of 0.25 ms + bytes / 625 MB/s,
packing free. So the simulated time is the same on every machine, and only buckets that overlap
reach the limit (Li+ 2020, arXiv:2006.15704, sec. 3.2).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paralab.exercises.diagnose import first_wrong
from paralab.exercises.exercise import Exercise
from paralab.exercises.tries import Found, Takes, Try, on_ranks
from paralab.exercises.verdict import Notes
from paralab.spec import Cluster, Link, ModelSpec
from paralab.spec.links import messages

if TYPE_CHECKING:
    import numpy as np

    from paralab.report.report import Report

RANKS = 4
# What is trained: small, micro-batches that add up, two full buckets and one that is not.
MODEL = ModelSpec(layers=2, hidden=32, heads=2, seq_len=16)
BATCH = {"microbatches": 2, "microbatch_size": 2}
BUCKET = 48 * 1024
RUNS = {"gradients": (1, RANKS), "weights": (3, 3)}  # limit: steps and ranks
LR = 0.1
# What is timed: backwards of this model, on these links.
TIMED = ModelSpec.preset("laptop")
TIMED_BUCKET = 512 * 1024
BACKWARDS = 5  # what a step leaves behind costs memory, or is summed again, in a later one
BACKWARD_S = 12e-3
CALL_S, LINK = 0.25e-3, Link(alpha=0.25e-3, bandwidth=625e6)  # of a call, whatever its messages
CLUSTER = Cluster(
    name="5 Gbit/s",
    flops=1e12,
    memory_bandwidth=1e11,
    intra=LINK,
    collectives={
        op: LINK.replace(alpha=CALL_S / messages(op, RANKS))
        for op in ("all_reduce", "all_gather", "reduce_scatter")
    },
)
LIMIT_S = 15e-3  # buckets without overlap take 21 ms, overlap without buckets as long
PADDING = 1.001
EXTRA_COPIES = 1.5

GRADIENTS, WEIGHTS, BYTES, TIME, MEMORY = (
    "gradients",
    "weights",
    "bytes per rank",
    "simulated step",
    "extra memory",
)
ASKED = (
    (GRADIENTS, "of one step on 4 ranks: those of one process"),
    (WEIGHTS, "after 3 steps of SGD: those of one process"),
    (BYTES, "at most 2(N-1)/N Ψ (and 0.1 % for padding)"),
    (TIME, f"at most {1e3 * LIMIT_S:.0f} ms, with 12 ms of backward and 8 ms of bytes"),
    (MEMORY, "at most one and a half more copies of the gradients"),
)


def check(tries: Sequence[Try], timeout: float) -> None:
    for limit, (steps, ranks) in RUNS.items():
        for notes, found in on_ranks(
            tries, trained, ranks, (steps, limit), limit=limit, timeout=timeout
        ):
            right = of_one_process(MODEL, steps, ranks=ranks, **BATCH)[limit]
            look_at_tensors(notes, limit, right, found.results)
            if limit == GRADIENTS:
                _look_at_bytes(notes, found)
    sizes = [math.prod(shape) for shape in TIMED.parameter_shapes().values()]
    for notes, found in on_ranks(
        tries, backwards, RANKS, (sizes, TIMED_BUCKET), limit=TIME, timeout=timeout
    ):
        _look_at_backwards(notes, found, sizes)


def look_at_tensors(
    notes: Notes, limit: str, right: dict[str, np.ndarray], found: Sequence[dict[str, Any]]
) -> None:
    """Tensors by name, as every rank has them, against those of one process."""
    wrong = ""
    for name, array in right.items():
        wrong = wrong or first_wrong(name, [one[name] for one in found], [array] * len(found))
    notes.note(limit, wrong or f"{len(right)} tensors, all equal", not wrong, f"{limit}: {wrong}")


def trained(watch: Any, answer: tuple, seed: int, steps: int, what: str) -> dict[str, Any]:
    """What every rank runs: the reference GPT on its samples. A hook says when each gradient is
    complete, which is in the backward of the last micro-batch.

    Returns the "gradients" of the last step or the "weights" after it, as ``what`` says.
    """
    from paralab.exercises.watched import array
    from paralab.model import reference

    gpt, group = reference.GPT(MODEL), watch.group
    named, parameters = dict(gpt.named_parameters()), list(gpt.parameters())
    sync = answer[0](parameters, group=group, bucket_bytes=BUCKET)
    update = reference.optimizer(parameters, "sgd", LR)
    count, last = BATCH["microbatches"], False

    def ready(parameter: Any) -> None:
        if last:
            sync.grad_ready(parameter)

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(ready)
    for step in range(steps):
        sync.reset()
        data = {"step": step, "rank": group.index, "ranks": group.size, "device": "cpu"}
        for k, (tokens, targets) in enumerate(reference.batches(MODEL, **data, **BATCH)):
            loss = gpt(tokens, targets) / (count * group.size)
            last = k == count - 1
            loss.backward()
        sync.finish()
        for name, parameter in named.items():
            if parameter.grad is None:
                raise ValueError(f"after finish() {name} has no gradient")
        gradients = {name: array(parameter.grad) for name, parameter in named.items()}
        update.step()
    return gradients if what == GRADIENTS else {name: array(p) for name, p in named.items()}


@functools.cache  # the same for every answer
def of_one_process(
    model: ModelSpec, steps: int, *, ranks: int, microbatches: int, microbatch_size: int
) -> dict[str, dict[str, np.ndarray]]:
    """Gradients and weights of one process on the samples of all ranks, in the same order.

    microbatches  of each rank
    """
    from paralab.launch import launch

    batch = {"microbatches": ranks * microbatches, "microbatch_size": microbatch_size}
    return launch(_alone, ranks=1, args=(model, steps, batch))[0]


def _alone(model: ModelSpec, steps: int, batch: dict[str, int]) -> dict[str, dict[str, np.ndarray]]:
    from paralab.model import reference

    found = reference.train(model, steps=steps, optimizer="sgd", lr=LR, **batch)
    return {"gradients": found.gradients, "weights": found.weights}


def backwards(
    watch: Any, answer: tuple, seed: int, sizes: Sequence[int], bucket_bytes: int
) -> dict[str, Any]:
    """What every rank runs, some times: gradients become ready one by one, the last one first."""
    import torch

    group, draw = watch.group, torch.Generator().manual_seed(seed)
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
    number, wrong = {p: i for i, p in enumerate(reversed(parameters))}, ""
    with watch.section() as section:
        sync = answer[0](parameters, group=group, bucket_bytes=bucket_bytes)
        for backward in range(BACKWARDS):
            ones = torch.rand(len(sizes), generator=draw).tolist()  # of rank 0
            for parameter in reversed(parameters):
                value = ones[number[parameter]] + group.index
                place = backward * len(sizes) + number[parameter]
                with group.recorder.span("backward", chunk=1 + place):
                    parameter.grad = torch.full_like(parameter, value)
                sync.grad_ready(parameter)
            sync.finish()
            for name, parameter in enumerate(parameters):
                total = group.size * (ones[number[parameter]] + (group.size - 1) / 2)
                gradient = parameter.grad
                if gradient is None or not bool(((gradient - total).abs() <= 1e-5 * total).all()):
                    yours = "None" if gradient is None else f"{gradient.flatten()[0]:.5g}"
                    wrong = wrong or (
                        f"in backward {backward + 1} of the timed model, rank {group.index} has "
                        f"{yours} in the gradient of tensor {name}, required: {total:.5g}"
                    )
            sync.reset()
    gradients = 4 * sum(sizes)  # are made within, one by one
    return {"extra": section.peak - gradients, "wrong": wrong}


def simulated(report: Report, sizes: Sequence[int]) -> Report:
    """The recorded order on `CLUSTER`: every gradient takes its share of 12 ms, nothing else any.

    sizes  elements of each parameter, in order of registration; backward makes the last one first
    """
    spans = report.spans.sort_values(["rank", "id"])
    shares = [BACKWARD_S * size / sum(sizes) for size in reversed(sizes)]
    places = spans["chunk"].where(spans["kind"] == "backward", 0)  # 0 is a span of the answer's own
    cost = places.map(lambda place: shares[(place - 1) % len(sizes)] if place else 0.0)
    return dataclasses.replace(report, spans=spans.assign(cost=cost)).replay(CLUSTER)


def _look_at_bytes(notes: Notes, found: Found) -> None:
    """The worst rank's, and those of all: a sum that all ranks have costs 2(N-1) Ψ."""
    sent, psi = found.sent(), 4 * MODEL.num_params
    limit, worst = 2 * (RANKS - 1) / RANKS * psi, max(sent)
    said = f"{worst / 1e3:,.1f} kB of {limit / 1e3:,.1f} kB"
    long = f"a rank sends {worst / 1e3:,.1f} kB in a step, 2(N-1)/N Ψ is {limit / 1e3:,.1f} kB"
    if not worst:
        said = "nothing sent through the group"
        long = "no gradient passed through the group: group.all_reduce(tensor) sends one"
    kept = worst <= PADDING * limit and sum(sent) >= RANKS * limit / PADDING
    notes.note(BYTES, said, kept, long)


def _look_at_backwards(notes: Notes, found: Found, sizes: Sequence[int]) -> None:
    wrong = next((result["wrong"] for result in found.results if result["wrong"]), "")
    if wrong:
        notes.note(GRADIENTS, wrong, False, f"{GRADIENTS}: {wrong}")
    seconds = simulated(found.report, sizes).step_time / BACKWARDS
    said, most = f"{1e3 * seconds:.1f} ms", f"{1e3 * LIMIT_S:.0f} ms"
    slow = f"a step takes {said}, required: at most {most}{_why_slow(found.report, len(sizes))}"
    notes.note(TIME, said, seconds <= LIMIT_S, slow)
    copies = max(result["extra"] for result in found.results) / (4 * sum(sizes))
    said = "no more than that" if copies <= EXTRA_COPIES else f"{copies:.1f} copies"
    long = f"{said} of the gradients in addition to themselves, required: at most {EXTRA_COPIES:g}"
    notes.note(MEMORY, said, copies <= EXTRA_COPIES, long)


def _why_slow(report: Report, gradients: int) -> str:
    """What cost the time, read off the recorded order of rank 0's first backward."""
    mine = report.spans[report.spans["rank"] == 0].sort_values("id")
    kinds = mine["kind"].tolist()
    ready = [place for place, kind in enumerate(kinds) if kind == "backward"]
    last, following = ready[gradients - 1], ready[gradients]
    calls = kinds[:following].count("comm")
    if "comm" not in kinds[:last]:
        return ": nothing leaves before backward is over"
    if "wait" in kinds[:last]:
        return ": backward is idle while something is waited for"
    return f": {calls} messages, and each pays 0.25 ms"


gradient_sync = Exercise(
    name="gradient_sync",
    lab="02",
    asked=ASKED,
    takes=(
        Takes(
            "a class",
            "MySync(parameters, group=group, bucket_bytes=...)",
            1,
            ("group", "bucket_bytes"),
            ("grad_ready", "finish", "reset"),
        ),
    ),
    checker=check,
)
