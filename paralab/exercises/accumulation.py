"""Lab 00: one training step over several micro-batches, in plain PyTorch.

The answer gets a small reference GPT, SGD (which hides no wrong factor) and micro-batches, some of
them of unequal size.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from paralab.checks import shown
from paralab.exercises.diagnose import first_wrong_tensor
from paralab.exercises.exercise import Takes, Tries, exercise
from paralab.exercises.lazy import np, reference, torch, watched
from paralab.exercises.questions import is_number, wrong_number
from paralab.exercises.verdict import Notes
from paralab.spec import ModelSpec

# Small, and yet the activations of one sample take more bytes than all gradients.
MODEL = ModelSpec(layers=1, hidden=32, heads=2, seq_len=64, attention="explicit")
CASES = (  # samples of each micro-batch, clip_norm
    ((4, 4, 4), 1e6),
    ((4, 4, 1), 1e6),
    ((2, 3, 1), 0.5),
)
STEPS, TOLERANCE = 2, 1e-4
STALE = 2e-3  # of every element of .grad before the first step; its norm is below any clip_norm
ROOM = 1.2  # factor on the peak of the largest micro-batch
LR, EPSILON = 0.5, 1e-6
MEANS = "that is the mean of the micro-batches' means, but they differ in size"
TWICE = "that is divided by the number of micro-batches twice"
MISSING = "micro-batch {} is missing, counted from 0"
EACH_TIME = "the sum so far is clipped after each micro-batch, not once at the end"
NOT_ADDED = "the gradients of the micro-batches are not added up"
STILL = "the gradient of the step before is still in it"
Arrays = dict[str, Any]  # {name: NumPy array}

REQUIRED = {
    "loss": "the mean over all samples of the step",
    "gradient norm": "of the mean gradient over all parameters, before clipping",
    "weights": "after each of 2 steps of SGD: those of one large batch, clipped to clip_norm",
    "forward passes": "each micro-batch once, one by one",
    "peak memory": f"tensors: at most {ROOM:g} times those of the largest micro-batch with all "
    "gradients",
}
LOSS, NORM, WEIGHTS, PASSES, MEMORY = REQUIRED


@exercise(Takes("accumulate(model, optimizer, microbatches, clip_norm=...)"), required=REQUIRED)
def accumulate(tries: Tries) -> None:
    for notes, found in tries.run(stepped, 1):
        for (sizes, clip), steps in zip(CASES, found.results[0], strict=True):
            for number, step in enumerate(steps, 1):
                notes.where = f"samples {' + '.join(map(str, sizes))}, step {number}"
                _look(notes, np.array(sizes), clip, step)


# ---- on the rank ---------------------------------------------------------------------------------
def stepped(watch: Any, answer: tuple, seed: int) -> list[list[SimpleNamespace]]:
    """What the rank runs. Returns the steps of each case, with

    before, after  the weights before and after the step
    gradients      of each micro-batch, the mean over its own samples: (m, Ψ)
    stale          those of the step before
    losses         of each micro-batch, the mean over its own samples: (m,)
    returned       what the answer returned: loss and norm, if it is right
    passes         samples in each forward pass of the answer
    updates        how often the answer called optimizer.step()
    peak, largest  bytes beyond the weights: the answer's peak, that of the largest micro-batch
    """
    cases, held = [], 4 * MODEL.num_params  # bytes of all gradients
    for sizes, clip in CASES:
        gpt, passes, updates = reference.GPT(MODEL, seed), [], []
        update = reference.optimizer(gpt.parameters(), "sgd", LR)
        gpt.register_forward_pre_hook(lambda _, args, to=passes: to.append(len(args[0])))
        update.register_step_pre_hook(lambda *_, to=updates: to.append(1))
        for parameter in gpt.parameters():  # as if left by an earlier step
            parameter.grad = torch.full_like(parameter, STALE)
        stale, steps = np.full((len(sizes), MODEL.num_params), STALE), []
        for number in range(STEPS):
            shape = {"microbatches": len(sizes), "microbatch_size": max(sizes), "seed": seed}
            full = reference.batches(MODEL, step=number, **shape)
            feed = [(x[:n].clone(), y[:n].clone()) for n, (x, y) in zip(sizes, full, strict=True)]
            step = SimpleNamespace(before=watched.arrays(gpt), stale=stale)
            with watch.unseen():
                step.losses, step.gradients = _alone(gpt, feed)
                step.largest = _peak(max(sizes)) + held
            passes.clear()
            updates.clear()
            with watch.section() as section:
                returned = answer[0](gpt, update, feed, clip_norm=clip)
            parts = returned if isinstance(returned, (tuple, list)) else (returned,)
            step.returned = [float(part) if is_number(part) else shown(part) for part in parts]
            step.peak = section.peak + held  # those of the step before are alive when it begins
            step.after, step.passes, step.updates = watched.arrays(gpt), [*passes], len(updates)
            steps.append(step)
            stale = step.gradients
        cases.append(steps)
    return cases


def _alone(gpt: Any, feed: Sequence[tuple]) -> tuple[list[float], np.ndarray]:
    """(losses, gradients) of the micro-batches, on a copy of the model without hooks."""
    twin, losses, gradients = reference.GPT(MODEL), [], []
    twin.load_state_dict(gpt.state_dict())
    for batch in feed:
        loss = twin(*batch)
        made = torch.autograd.grad(loss, list(twin.parameters()))
        gradients.append(watched.array(torch.cat([one.flatten() for one in made])))
        losses.append(loss.item())
    return losses, np.stack(gradients)


@functools.cache  # the same for every answer
def _peak(samples: int) -> int:
    """Bytes at the peak of a micro-batch of so many samples, beyond weights and gradients."""
    gpt = reference.GPT(MODEL)
    [batch] = reference.batches(MODEL, step=0, microbatch_size=samples)
    gpt(*batch).backward()
    with watched.PeakMemory() as memory:  # all gradients exist by now
        gpt(*batch).backward()
    return memory.peak


# ---- the verdict ---------------------------------------------------------------------------------
def _look(notes: Notes, sizes: np.ndarray, clip: float, step: SimpleNamespace) -> None:
    """sizes: samples of each micro-batch; clip: the norm to which the gradient is to be clipped"""
    count = f"optimizer.step() is called {step.updates} times, required: once"
    if step.updates != 1:  # said first: it explains weights, and what later micro-batches met
        notes.look(WEIGHTS, count, "")

    def tensors(gradient: np.ndarray) -> list[np.ndarray]:
        """A gradient of all weights, (Ψ,), cut into those of the tensors."""
        return np.split(gradient, np.cumsum([w.size for w in step.before.values()])[:-1])

    def updated(gradient: np.ndarray, clip: float) -> Arrays:
        """The weights after an update with a gradient that is clipped first."""
        parts = zip(step.before.items(), tensors(_clipped(gradient, clip)), strict=True)
        return {name: w - LR * part.reshape(w.shape) for (name, w), part in parts}

    norm, m, shares = np.linalg.norm, len(sizes), sizes / sum(sizes)
    mean, loss, parts = shares @ step.gradients, float(shares @ step.losses), shares * step.losses
    right, sums = float(norm(mean)), sum(step.losses)
    mistakes = _mistakes(shares, clip, step, mean, tensors)
    known_losses = [
        ("that is the sum over the micro-batches", sums),
        (MEANS, sums / m),
        ("that is the last micro-batch's loss", step.losses[-1]),
        ("that is the last micro-batch's share", parts[-1]),
        ("that is the norm; required: the pair (loss, norm)", right),
        (TWICE, loss / m),
        *zip(map(MISSING.format, range(m)), loss - parts, strict=True),
    ]
    known_norms = [
        ("that is the norm after clipping", min(right, clip)),
        ("that is its square, the root is missing", right**2),
        ("that is the norm of the sum over the micro-batches", norm(step.gradients.sum(0))),
        (TWICE, right / m),
        ("that is the sum of the tensors' norms", sum(map(norm, tensors(mean)))),
        *((words, norm(gradient)) for words, (gradient, _) in mistakes.items()),
    ]
    yours, show = ", ".join(map(str, step.returned)), "{:.5f}".format
    pair = "" if len(step.returned) == 2 else f"required: the pair (loss, norm), yours is {yours}"
    how = show, ", detached or by .item()", TOLERANCE
    for place, number, known in ((0, loss, known_losses), (1, right, known_norms)):
        wrong = pair or wrong_number(step.returned[place], number, known, *how)
        notes.look((LOSS, NORM)[place], wrong, show(number))

    wrong = first_wrong_tensor(
        [step.after],
        updated(mean, clip),
        tolerance=TOLERANCE,
        start=step.before,
        known={words: updated(*one) for words, one in mistakes.items()},
        ranks=lambda _: "after the step",
    )
    moved = math.hypot(*(norm(step.after[n] - w) for n, w in step.before.items()))
    if wrong and right < clip and math.isclose(moved, LR * clip, rel_tol=1e-3):
        wrong += "; the gradient is scaled to clip_norm, although its norm is smaller"
    notes.look(WEIGHTS, wrong, f"{len(step.before)} tensors, all equal")

    passes = f"the forward passes have {step.passes} samples, required: {sizes.tolist()}"
    notes.look(PASSES, "" if sorted(step.passes) == sorted(sizes) else passes, f"{m} of {m}")
    why = f"; one micro-batch with all gradients has {step.largest:,}"
    how = "has {} bytes at its peak", why, lambda _: "the step"
    notes.memory(MEMORY, [step.peak], int(ROOM * step.largest), *how)


def _mistakes(
    shares: np.ndarray, clip: float, step: SimpleNamespace, mean: np.ndarray, tensors: Callable
) -> dict[str, tuple[np.ndarray, float]]:
    """{known mistake: (the gradient that it gives, the norm to which that is then clipped)}."""
    parts = shares[:, None] * step.gradients
    by_tensor = np.concatenate([_clipped(one, clip) for one in tensors(mean)])
    running = functools.reduce(lambda total, part: _clipped(total, clip) + part, parts)
    return {
        f"{NOT_ADDED}: only the last one is left": (step.gradients[-1], clip),
        f"{NOT_ADDED}: only the last one's share is left": (parts[-1], clip),
        MEANS: (step.gradients.mean(0), clip),
        TWICE: (mean / len(parts), clip),
        "the gradient is not clipped": (mean, math.inf),
        "each tensor is clipped by its own norm": (by_tensor, math.inf),
        EACH_TIME: (running, clip),
        STILL: (_clipped(shares @ step.stale, clip) + mean, clip),
        **{MISSING.format(k): (mean - part, clip) for k, part in enumerate(parts)},
    }


def _clipped(gradient: np.ndarray, clip: float) -> np.ndarray:
    return gradient * min(1.0, clip / (np.linalg.norm(gradient) + EPSILON))
