"""Lab 02: gradient synchronisation in buckets that leave while backward still runs.

The checker looks three times. One step of the reference GPT on four real ranks, whose gradients
autograd's hooks announce as DDP's do, against one process proves gradients; three steps prove
weights, with SGD, which hides no wrong factor. Two traced backwards of the laptop
model, gradient by gradient, have their recorded order replayed with stated costs: 12 ms of backward
dealt over the parameters by size, a link of 0.25 ms + bytes / 625 MB/s, packing free. So the
simulated time is the same on every machine, and only buckets that overlap reach the limit
(Li+ 2020, arXiv:2006.15704, sec. 3.2).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paralab.checks import illegal, real
from paralab.exercises.exercise import Exercise
from paralab.exercises.verdict import NOT_STARTED, Notes, Verdict, attempt
from paralab.spec import Cluster, Link, ModelSpec
from paralab.theory.traffic import BOOKKEEPING

if TYPE_CHECKING:
    import numpy as np

    from paralab.report.report import Report

RANKS = 4
# What is trained: small, micro-batches that add up, two full buckets and one that is not.
MODEL = ModelSpec(layers=2, hidden=32, heads=2, seq_len=16)
BATCH = {"microbatches": 2, "microbatch_size": 2}
BUCKET = 48 * 1024
STEPS = {"gradients": 1, "weights": 3}  # later steps' gradients differ everywhere if one did
LR = 0.1
MOMENTS = ("grad_ready", "finish", "reset")  # what a form is asked for
TOLERANCE = 1e-5  # of a tensor's largest entry: four numbers added in another order
# What is timed: backwards of this model, on these links.
TIMED = ModelSpec.preset("laptop")
TIMED_BUCKET = 512 * 1024
BACKWARDS = 2  # what a step leaves behind costs memory in the next
BACKWARD_S = 12e-3
CLUSTER = Cluster(
    name="5 Gbit/s", flops=1e12, memory_bandwidth=1e11, intra=Link(alpha=0.25e-3, bandwidth=625e6)
)
LIMIT_S = 15e-3  # buckets without overlap take 21 ms, overlap without buckets as long
PADDING = 1.001
EXTRA_COPIES = 1.5  # one, and what gloo's threads have not let go of yet: about two buckets
TIMEOUT_S = 20.0

GRADIENTS, WEIGHTS, BYTES, TIME, MEMORY = (
    "gradients",
    "weights",
    "bytes per rank",
    "simulated step",
    "extra memory",
)

TASK = """
**Your turn.** Write a class that synchronises gradients, as PyTorch's DDP does: hooks of autograd
drive it. Every rank makes one, `MySync(parameters, group=group, bucket_bytes=...)`, and calls

* `grad_ready(parameter)` when `parameter.grad` is complete on this rank; backward goes on after it,
* `finish()` after backward: when it returns, every `parameter.grad` is the **sum** over the ranks
  (the loss is divided already),
* `reset()` before the next step: gradients are `None` again.

`group.all_reduce(tensor)` returns at once; `.wait()` on what it returns waits. One message costs
0.25 ms however small it is, and backward takes 12 ms: be quick.

`pl.exercises.gradient_sync.check(MySync)`
"""

ASKED = (
    (GRADIENTS, "of one step on 4 ranks: those of one process"),
    (WEIGHTS, "after 3 steps of SGD: those of one process"),
    (BYTES, "at most 2(N-1)/N Ψ (and 0.1 % for padding)"),
    (TIME, f"at most {1e3 * LIMIT_S:.0f} ms, with 12 ms of backward and 8 ms of bytes"),
    (MEMORY, "at most one and a half more copies of the gradients"),
)

HINTS = (
    "collect gradients until they fill bucket_bytes, then send the bucket. What is left over in "
    "the end leaves in finish().",
    "torch.cat makes one flat tensor of several gradients. Call group.all_reduce(flat) in "
    "grad_ready and keep what it returns; wait for it in finish(), never before.",
    "in finish(), for every bucket: pending.wait(), then flat.split([p.numel() for p in bucket]) "
    "and p.grad = part.view_as(p) for each. In reset(), parameter.grad = None for all, and empty "
    "lists.",
)


def check(form: Any, *, timeout: float = TIMEOUT_S) -> Verdict:
    """Train and time ``form`` on four real ranks; about two seconds when ranks are warm.

    timeout  seconds without a sign of life until a deadlock is called one

    Raises ValueError for a wrong timeout; an answer that is wrong, fails or hangs is a Verdict.
    """
    from paralab.trace import trace

    timeout = real("timeout", timeout, above=0.0)
    notes = Notes("gradient_sync", ASKED)

    def train(steps: int) -> Report:
        check_form(form)
        return trace(trained, RANKS, (form, steps), timeout=timeout)

    for limit, steps in STEPS.items():
        report, trouble = attempt(lambda steps=steps: train(steps))
        if trouble == NOT_STARTED:
            return notes.verdict()
        if trouble:
            notes.note(limit, "failed", False, trouble)
            return notes.verdict()
        right = of_one_process(MODEL, steps, **BATCH)[limit]
        found = (first_wrong(right, result[limit]) for result in report.results)
        wrong = next(filter(None, found), "")
        notes.note(
            limit, wrong or f"{len(right)} tensors, all equal", not wrong, f"{limit}: {wrong}"
        )
    _look_at_bytes(notes, report, steps)

    sizes = [math.prod(shape) for shape in TIMED.parameter_shapes().values()]
    traced, trouble = attempt(
        lambda: trace(backwards, RANKS, (form, sizes, TIMED_BUCKET), memory=True, timeout=timeout)
    )
    if trouble:
        notes.note(TIME, "failed", False, f"a backward of the laptop model: {trouble}")
        return notes.verdict()
    seconds = simulated(traced, sizes).step_time / BACKWARDS
    said = f"{1e3 * seconds:.1f} ms"
    notes.note(
        TIME,
        said,
        seconds <= LIMIT_S,
        f"a step takes {said}, asked are at most "
        f"{1e3 * LIMIT_S:.0f} ms{_why_slow(traced, len(sizes))}",
    )
    psi = 4 * sum(sizes)
    extra = max(traced.meta["peak_bytes"]) - 2 * psi  # parameters and gradients are backwards'
    fits = extra <= EXTRA_COPIES * psi
    said = f"{extra / psi:.1f} copies" if not fits else "no more than that"
    notes.note(
        MEMORY,
        said,
        fits,
        f"{said} of the gradients beside themselves, asked are at most {EXTRA_COPIES:g}",
    )
    return notes.verdict()


def check_form(form: Any) -> None:
    """Refuse what could not synchronise gradients, as far as can be known before it is called."""
    legal = "a class with grad_ready, finish, reset"
    if not callable(form):
        raise illegal("grad_sync", form, "cannot be called", legal)
    missing = [m for m in MOMENTS if not callable(getattr(form, m, None))]
    if isinstance(form, type) and missing:
        why = f"the class has no method {' and no '.join(missing)}"
        raise illegal("grad_sync", form.__name__, why, legal)
    try:
        signature = inspect.signature(form)
    except (TypeError, ValueError):  # built in: what it takes shows when it is called
        return
    try:
        signature.bind([], group=None, bucket_bytes=1)
    except TypeError as error:
        legal = "one called as form(parameters, group=group, bucket_bytes=bytes)"
        raise illegal("grad_sync", form, f"cannot be called ({error})", legal) from None


def trained(group: Any, form: Any, steps: int) -> dict[str, dict[str, Any]]:
    """What every rank runs: the reference GPT on its samples. A hook says when each gradient is
    complete, which is in the backward of the last micro-batch.
    """
    import torch

    from paralab.model import reference

    gpt = reference.GPT(MODEL).to(group.context.device)
    parameters = list(gpt.parameters())
    sync = form(parameters, group=group, bucket_bytes=BUCKET)
    update = reference.optimizer(parameters, "sgd", LR)
    count, last = BATCH["microbatches"], False

    def ready(parameter: torch.Tensor) -> None:
        if last:
            sync.grad_ready(parameter)

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(ready)
    for step in range(steps):
        sync.reset()
        some = reference.batches(
            MODEL,
            step=step,
            rank=group.index,
            ranks=group.size,
            device=group.context.device,
            **BATCH,
        )
        for k, (tokens, targets) in enumerate(some):
            with group.recorder.span("forward"):
                loss = gpt(tokens, targets) / (count * group.size)
            last = k == count - 1
            with group.recorder.span("backward"):
                loss.backward()
        sync.finish()
        missing = [name for name, p in gpt.named_parameters() if p.grad is None]
        if missing:
            raise ValueError(f"after finish() {missing[0]} has no gradient")
        gradients = {name: p.grad.clone() for name, p in gpt.named_parameters()}
        update.step()
    weights = {name: p.detach() for name, p in gpt.named_parameters()}
    return {"gradients": gradients, "weights": weights}


@functools.cache  # the same for every answer
def of_one_process(
    model: ModelSpec, steps: int, *, microbatches: int, microbatch_size: int
) -> dict[str, dict[str, np.ndarray]]:
    """Gradients and weights of one process on the samples of all ranks, in the same order.

    microbatches  of each rank
    """
    from paralab.launch import launch

    batch = {"microbatches": RANKS * microbatches, "microbatch_size": microbatch_size}
    return launch(_alone, ranks=1, args=(model, steps, batch))[0]


def _alone(model: ModelSpec, steps: int, batch: dict[str, int]) -> dict[str, dict[str, np.ndarray]]:
    from paralab.model import reference

    found = reference.train(model, steps=steps, optimizer="sgd", lr=LR, **batch)
    return {"gradients": found.gradients, "weights": found.weights}


def backwards(group: Any, form: Any, sizes: Sequence[int], bucket_bytes: int) -> None:
    """What every rank runs, twice: gradients become ready one by one, the last one first."""
    import torch

    device = group.context.device
    parameters = [torch.nn.Parameter(torch.zeros(size, device=device)) for size in sizes]
    sync = form(parameters, group=group, bucket_bytes=bucket_bytes)
    for _ in range(BACKWARDS):
        for parameter in reversed(parameters):
            with group.recorder.span("backward"):
                parameter.grad = torch.full_like(parameter, 1.0 + group.index)
            sync.grad_ready(parameter)
        sync.finish()
        sync.reset()


def simulated(report: Report, sizes: Sequence[int]) -> Report:
    """The recorded order on `CLUSTER`: every gradient takes its share of 12 ms, nothing else any.

    sizes  elements of each parameter, in order of registration; backward makes the last one first
    """
    spans = report.spans.sort_values(["rank", "id"])
    backward = spans["kind"] == "backward"
    shares = [BACKWARD_S * size / sum(sizes) for size in reversed(sizes)]
    cost = spans["cost"] * 0.0
    cost[backward] = shares * BACKWARDS * report.world_size
    return dataclasses.replace(report, spans=spans.assign(cost=cost)).replay(CLUSTER)


def _look_at_bytes(notes: Notes, report: Report, steps: int) -> None:
    """The worst rank's, of one step."""
    limit = 2 * (RANKS - 1) / RANKS * 4 * MODEL.num_params
    calls = report.collectives[~report.collectives["phase"].isin(BOOKKEEPING)]
    sent = calls.groupby("rank")["wire_bytes"].sum()
    worst = int(sent.max()) / steps if len(sent) else 0
    said = f"{worst / 1e3:,.1f} kB of {limit / 1e3:,.1f} kB"
    long = f"a rank sends {worst / 1e3:,.1f} kB in a step, 2(N-1)/N Ψ is {limit / 1e3:,.1f} kB"
    if not worst:
        said = "nothing sent through the group"
        long = "no gradient passed through the group: group.all_reduce(tensor) sends one"
    notes.note(BYTES, said, 0 < worst <= PADDING * limit, long)


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
        return ": backward stands still while something is waited for"
    return f": {calls} messages, and each pays 0.25 ms"


def first_wrong(right: dict[str, np.ndarray], yours: dict[str, np.ndarray]) -> str:
    """The first tensor, in the order of the model, that is not the one of a single process."""
    import numpy as np

    for name, wanted in right.items():
        got = yours[name]
        if got.shape != wanted.shape:
            return f"{name} has shape {got.shape}, asked {wanted.shape}"
        scale = float(np.abs(wanted).max()) or 1.0
        gap = float(np.abs(got - wanted).max()) / scale
        if not gap <= TOLERANCE:  # NaN is no agreement either
            dot = float((wanted * wanted).sum()) or 1.0
            factor = float((got * wanted).sum()) / dot
            if np.abs(got - factor * wanted).max() <= TOLERANCE * scale:
                return f"{name} is {factor:.3g} times what it should be"
            return f"{name} is wrong, by {100 * gap:.2g} % of its largest entry"
    return ""


gradient_sync = Exercise(
    name="gradient_sync", lab="02", task=TASK, asked=ASKED, hints=HINTS, checker=check
)
