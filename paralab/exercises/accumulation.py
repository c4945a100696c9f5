"""Lab 00: one training step over several micro-batches, in plain PyTorch.

The checker gives the answer a small reference GPT, SGD (which hides no wrong factor) and
micro-batches, some of them of unequal size, and looks at two steps of each case: loss, gradient
norm and weights against the mean gradient of all samples, clipped by its global norm; and the peak
of memory against forward and backward of the largest micro-batch, gradients included.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from paralab.exercises.diagnose import first_wrong
from paralab.exercises.exercise import Exercise
from paralab.exercises.questions import is_number, wrong_number
from paralab.exercises.tries import Takes, Try, look_at_memory, on_ranks
from paralab.exercises.verdict import Notes
from paralab.spec import ModelSpec

if TYPE_CHECKING:
    import numpy as np

    Arrays = dict[str, np.ndarray]

# Small, and yet one sample's activations outweigh all gradients.
MODEL = ModelSpec(layers=1, hidden=32, heads=2, seq_len=64, attention="explicit")
CASES = (  # samples of each micro-batch, clip_norm
    ((4, 4, 4), 1e6),
    ((4, 4, 1), 1e6),
    ((2, 3, 1), 0.5),
)
STEPS, LR, TOLERANCE, EPSILON = 2, 0.5, 1e-4, 1e-6
ROOM = 1.2  # times the peak of one micro-batch

ASKED = {
    "loss": "the mean over all samples of the step",
    "gradient norm": "of the mean gradient over all parameters, before clipping",
    "weights": "after each of 2 steps of SGD: those of one large batch, clipped to clip_norm",
    "forward passes": "each micro-batch once, one by one",
    "peak memory": f"at most {ROOM:g} times that of the largest micro-batch with all gradients",
}
LOSS, NORM, WEIGHTS, PASSES, MEMORY = ASKED


class Step(NamedTuple):
    """One step of an answer, and what it started from.

    before, after  the weights
    gradients      of each micro-batch, the mean over its own samples
    losses         the same
    returned       what the answer returned
    passes         samples in each forward pass that it made
    """

    before: Arrays
    after: Arrays
    gradients: list[Arrays]
    losses: list[float]
    returned: Any
    passes: list[int]
    peak: int
    allowed: float


def check(tries: Sequence[Try], timeout: float) -> None:
    for notes, found in on_ranks(tries, stepped, 1, timeout=timeout):
        for (sizes, clip), steps in zip(CASES, found.results[0], strict=True):
            for number, step in enumerate(steps):
                where = f"samples {' + '.join(map(str, sizes))}, step {number + 1}"
                stale = steps[number - 1] if number else None
                _look(notes, where, sizes, clip, step, stale)


def stepped(watch: Any, answer: tuple, seed: int) -> list[list[Step]]:
    """What the rank runs: two steps of each case."""
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    from paralab.exercises.watched import array
    from paralab.model import reference

    def weights(gpt: torch.nn.Module) -> Arrays:
        return {name: array(p) for name, p in gpt.named_parameters()}

    def numbers(value: Any) -> Any:
        parts = value if isinstance(value, (tuple, list)) else (value,)
        return [float(part) if is_number(part) else type(part).__name__ for part in parts]

    cases = []
    for sizes, clip in CASES:
        gpt, twin = reference.GPT(MODEL, seed), reference.GPT(MODEL, seed)
        update, passes = reference.optimizer(gpt.parameters(), "sgd", LR), []
        gpt.register_forward_pre_hook(lambda _, args, passes=passes: passes.append(len(args[0])))
        steps = []
        for step in range(STEPS):
            shape = {"microbatches": len(sizes), "microbatch_size": max(sizes), "seed": seed}
            whole = reference.batches(MODEL, step=step, **shape)
            feed = [
                (tokens[:n].clone(), targets[:n].clone())
                for n, (tokens, targets) in zip(sizes, whole, strict=True)
            ]
            with _disable_current_modes():  # nothing of this is the answer's
                twin.load_state_dict(gpt.state_dict())
                losses, gradients = [], []
                for batch in feed:
                    twin.zero_grad()
                    loss = twin(*batch)
                    loss.backward()
                    gradients.append({n: array(p.grad) for n, p in twin.named_parameters()})
                    losses.append(loss.item())
            with watch.section() as section:  # now all gradients are there
                loss = twin(*max(feed, key=lambda batch: len(batch[0])))
                loss.backward()
            most = section.peak
            held = sum(4 * p.numel() for p in twin.parameters())
            twin.zero_grad()
            del loss
            before = weights(gpt)
            with watch.section() as section:
                returned = answer[0](gpt, update, feed, clip_norm=clip)
            made = numbers(returned)
            already = held * (step > 0)  # gradients of the step before are alive when it begins
            steps.append(
                Step(before, weights(gpt), gradients, losses, made, list(passes),
                     section.peak + already, ROOM * (most + held))
            )  # fmt: skip
            passes.clear()
        cases.append(steps)
    return cases


def _look(
    notes: Notes, where: str, sizes: Sequence[int], clip: float, step: Step, stale: Step | None
) -> None:
    """One step against every limit."""
    shares, m = [n / sum(sizes) for n in sizes], len(sizes)
    loss = sum(w * one for w, one in zip(shares, step.losses, strict=True))
    mean = _added(step.gradients, shares)
    norm = _norm(mean)
    known = [
        ("the sum over the micro-batches", sum(step.losses)),
        ("the mean of their means: here they differ in size", sum(step.losses) / m),
        ("that is the last micro-batch's", step.losses[-1]),
        ("divided twice", loss / m),
    ]
    returned = step.returned if len(step.returned) == 2 else [None, None]
    pair = "" if len(step.returned) == 2 else "required: the pair (loss, norm)"
    wrong = pair or wrong_number(
        returned[0], loss, "{:.5f}".format, known, what="required: a number", tolerance=TOLERANCE
    )
    notes.look(LOSS, where, wrong, f"{loss:.5f}")
    known = [
        ("that is the norm after clipping", min(norm, clip)),
        ("of a mean of means", _norm(_added(step.gradients, [1 / m] * m))),
        ("of the sum of all micro-batches", _norm(_added(step.gradients, [1.0] * m))),
        ("the norms of the tensors added up", sum(_norm({n: g}) for n, g in mean.items())),
        ("of the last micro-batch alone", _norm(step.gradients[-1])),
    ]
    wrong = pair or wrong_number(
        returned[1], norm, "{:.5f}".format, known, what="required: a number", tolerance=TOLERANCE
    )
    notes.look(NORM, where, wrong, f"{norm:.5f}")

    wanted = _updated(step.before, mean, clip)
    others = list(_mistakes(step, sizes, clip, stale))
    wrong = ""
    for name, right in wanted.items():
        wrong = wrong or first_wrong(
            name,
            [step.after[name]],
            [right],
            tolerance=TOLERANCE,
            start=[step.before[name]],
            known=lambda _, name=name: ((said, other[name]) for said, other in others),
            ranks=lambda _: "after the step",
        )
    notes.look(WEIGHTS, where, wrong, f"{len(wanted)} tensors, all equal")

    passes = "" if step.passes == list(sizes) else f"they had {step.passes} samples"
    notes.look(PASSES, where, passes, f"{m} of {m}")
    words = f"has {{held}} bytes, one micro-batch with all gradients {step.allowed / ROOM:,.0f}"
    look_at_memory(notes, MEMORY, where, [step.peak], int(step.allowed), words)


def _mistakes(
    step: Step, sizes: Sequence[int], clip: float, stale: Step | None
) -> Iterator[tuple[str, Arrays]]:
    """(what was done, the weights that it gives)."""
    shares, m = [n / sum(sizes) for n in sizes], len(sizes)
    mean = _added(step.gradients, shares)
    means = _added(step.gradients, [1 / m] * m)
    yield (
        "the micro-batches are not added up: it is the last one alone",
        _updated(step.before, step.gradients[-1], clip),
    )
    yield (
        "the mean of the micro-batches' means, but they differ in size",
        _updated(step.before, means, clip),
    )
    yield "the gradient is not clipped", _updated(step.before, mean, float("inf"))
    each = {name: _clipped({name: g}, clip)[name] for name, g in mean.items()}
    yield "each tensor is clipped by its own norm", _updated(step.before, each, float("inf"))
    clipped = [_clipped(g, clip) for g in step.gradients]
    yield (
        "each micro-batch is clipped, not their mean",
        _updated(step.before, _added(clipped, shares), float("inf")),
    )
    if stale is not None:
        old = _clipped(_added(stale.gradients, shares), clip)
        yield (
            "the gradient of the step before is still in it",
            _updated(step.before, _added([old, mean], [1.0, 1.0]), clip),
        )


def _added(gradients: Sequence[Arrays], weights: Sequence[float]) -> Arrays:
    pairs = list(zip(gradients, weights, strict=True))
    return {name: sum(w * one[name] for one, w in pairs) for name in gradients[0]}


def _norm(gradient: Arrays) -> float:
    return float(sum((g.astype("float64") ** 2).sum() for g in gradient.values()) ** 0.5)


def _clipped(gradient: Arrays, clip: float) -> Arrays:
    shrink = min(1.0, clip / (_norm(gradient) + EPSILON))
    return {name: shrink * g for name, g in gradient.items()}


def _updated(before: Arrays, gradient: Arrays, clip: float) -> Arrays:
    return {name: before[name] - LR * g for name, g in _clipped(gradient, clip).items()}


accumulate = Exercise(
    name="accumulate",
    lab="00",
    asked=ASKED,
    takes=(Takes("a function", "accumulate(model, optimizer, microbatches, clip_norm=...)"),),
    checker=check,
)
