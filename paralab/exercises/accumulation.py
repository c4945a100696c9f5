"""Lab 00: one training step over several micro-batches, in plain PyTorch.

The checker gives the answer a small reference GPT, SGD (which hides no wrong factor) and
micro-batches, some of them of unequal size, and looks at two steps of each case: loss, gradient
norm and weights against the mean gradient of all samples, clipped by its global norm; and the peak
of memory against forward and backward of the largest micro-batch, gradients included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from paralab.exercises.diagnose import first_wrong_tensor
from paralab.exercises.exercise import exercise
from paralab.exercises.late import reference, watched
from paralab.exercises.questions import is_number, wrong_number
from paralab.exercises.tries import Takes, Try, on_ranks
from paralab.exercises.verdict import Notes, look_at_memory
from paralab.spec import ModelSpec

Arrays = dict[str, Any]  # {name: NumPy array}

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

    sizes, clip    the case
    before, after  the weights
    gradients      of each micro-batch, the mean over its own samples
    losses         the same
    returned       what the answer returned
    passes         samples in each forward pass that it made
    peak, largest  bytes: beyond the weights, and those of the largest micro-batch
    stale          gradients of the step before
    """

    sizes: Sequence[int]
    clip: float
    before: Arrays
    after: Arrays
    gradients: list[Arrays]
    losses: list[float]
    returned: list[Any]
    passes: list[int]
    peak: int
    largest: int
    stale: list[Arrays]

    @property
    def shares(self) -> list[float]:
        """Of each micro-batch in the mean over all samples."""
        return [n / sum(self.sizes) for n in self.sizes]


@exercise(
    Takes("a function", "accumulate(model, optimizer, microbatches, clip_norm=...)"),
    lab="00",
    asked=ASKED,
)
def accumulate(tries: Sequence[Try], timeout: float) -> None:
    for notes, found in on_ranks(tries, stepped, 1, timeout=timeout):
        for steps in found.results[0]:
            for number, step in enumerate(steps, 1):
                _look(notes, f"samples {' + '.join(map(str, step.sizes))}, step {number}", step)


# ---- on the rank ---------------------------------------------------------------------------------
def stepped(watch: Any, answer: tuple, seed: int) -> list[list[Step]]:
    """What the rank runs: two steps of each case."""
    cases = []
    for sizes, clip in CASES:
        gpt, passes = reference.GPT(MODEL, seed), []
        update = reference.optimizer(gpt.parameters(), "sgd", LR)
        gpt.register_forward_pre_hook(lambda _, args, passes=passes: passes.append(len(args[0])))
        steps = []
        for step in range(STEPS):
            shape = {"microbatches": len(sizes), "microbatch_size": max(sizes), "seed": seed}
            whole = reference.batches(MODEL, step=step, **shape)
            feed = [
                (tokens[:n].clone(), targets[:n].clone())
                for n, (tokens, targets) in zip(sizes, whole, strict=True)
            ]
            losses, gradients, peak = _alone(watch, gpt, feed)
            held = 4 * MODEL.num_params  # gradients
            before = _weights(gpt)
            with watch.section() as section:
                returned = answer[0](gpt, update, feed, clip_norm=clip)
            parts = returned if isinstance(returned, (tuple, list)) else (returned,)
            made = [float(part) if is_number(part) else type(part).__name__ for part in parts]
            own = section.peak + held * (step > 0)  # alive are those of the step before
            after = _weights(gpt)
            of_answer = before, after, gradients, losses, made, [*passes], own, peak + held
            steps.append(Step(sizes, clip, *of_answer, steps[-1].gradients if steps else []))
            passes.clear()
        cases.append(steps)
    return cases


def _weights(gpt: Any) -> Arrays:
    return {name: watched.array(p) for name, p in gpt.named_parameters()}


def _alone(watch: Any, gpt: Any, feed: Sequence[tuple]) -> tuple[list[float], list[Arrays], int]:
    """(loss, gradients of each micro-batch, bytes of the largest one beyond all gradients)."""
    from torch.utils._python_dispatch import _disable_current_modes

    twin, losses, gradients = reference.GPT(MODEL), [], []
    with _disable_current_modes():  # nothing of this is the answer's
        twin.load_state_dict(gpt.state_dict())
        for batch in feed:
            twin.zero_grad()
            loss = twin(*batch)
            loss.backward()
            gradients.append({name: watched.array(p.grad) for name, p in twin.named_parameters()})
            losses.append(loss.item())
    with watch.section() as section:  # now all gradients are there
        loss = twin(*max(feed, key=lambda batch: len(batch[0])))
        loss.backward()
    return losses, gradients, section.peak


# ---- the verdict ---------------------------------------------------------------------------------
def _look(notes: Notes, where: str, step: Step) -> None:
    """One step against every limit."""
    m, clip, mean = len(step.sizes), step.clip, _added(step.gradients, step.shares)
    loss = sum(w * one for w, one in zip(step.shares, step.losses, strict=True))
    norm = _norm(mean)
    losses = [
        ("the sum over the micro-batches", sum(step.losses)),
        ("the mean of their means: here they differ in size", sum(step.losses) / m),
        ("that is the last micro-batch's", step.losses[-1]),
        ("divided twice", loss / m),
    ]
    norms = [
        ("that is the norm after clipping", min(norm, clip)),
        ("of a mean of means", _norm(_added(step.gradients, [1 / m] * m))),
        ("of the sum of all micro-batches", _norm(_added(step.gradients, [1.0] * m))),
        ("the norms of the tensors added up", sum(_norm({n: g}) for n, g in mean.items())),
        ("of the last micro-batch alone", _norm(step.gradients[-1])),
    ]
    pair = "" if len(step.returned) == 2 else "required: the pair (loss, norm)"
    what, show = "required: a number", "{:.5f}".format
    for place, (limit, right, known) in enumerate(((LOSS, loss, losses), (NORM, norm, norms))):
        wrong = pair or wrong_number(
            step.returned[place], right, show, known, what=what, tolerance=TOLERANCE
        )
        notes.look(limit, where, wrong, show(right))

    others = _mistakes(step, mean)
    wrong = first_wrong_tensor(
        [step.after],
        _updated(step.before, mean, clip),
        tolerance=TOLERANCE,
        start=step.before,
        known=lambda name: ((said, other[name]) for said, other in others.items()),
        ranks=lambda _: "after the step",
    )
    notes.look(WEIGHTS, where, wrong, f"{len(mean)} tensors, all equal")

    passes = "" if step.passes == list(step.sizes) else f"they had {step.passes} samples"
    notes.look(PASSES, where, passes, f"{m} of {m}")
    words = f"has {{held}} bytes, one micro-batch with all gradients {step.largest:,}"
    look_at_memory(notes, MEMORY, where, [step.peak], int(ROOM * step.largest), words)


def _mistakes(step: Step, mean: Arrays) -> dict[str, Arrays]:
    """{what was done: the weights that it gives}."""
    clip, shares, inf = step.clip, step.shares, math.inf
    means = _added(step.gradients, [1 / len(shares)] * len(shares))
    each = {name: _clipped({name: g}, clip)[name] for name, g in mean.items()}
    clipped = _added([_clipped(g, clip) for g in step.gradients], shares)
    done = {  # the gradient, and to what it is then clipped
        "the micro-batches are not added up: it is the last one alone": (step.gradients[-1], clip),
        "the mean of the micro-batches' means, but they differ in size": (means, clip),
        "the gradient is not clipped": (mean, inf),
        "each tensor is clipped by its own norm": (each, inf),
        "each micro-batch is clipped, not their mean": (clipped, inf),
    }
    if step.stale:
        old = _clipped(_added(step.stale, shares), clip)
        both = _added([old, mean], [1.0, 1.0])
        done["the gradient of the step before is still in it"] = both, clip
    return {words: _updated(step.before, *one) for words, one in done.items()}


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
