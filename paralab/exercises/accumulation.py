"""Lab 00: one training step over several micro-batches, in plain PyTorch.

The answer gets a small reference GPT, SGD (which hides no wrong factor) and micro-batches, some of
them of unequal size.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from paralab.checks import shown
from paralab.exercises.diagnose import first_wrong_tensor
from paralab.exercises.exercise import Takes, Tries, exercise
from paralab.exercises.lazy import np, reference, torch, watched
from paralab.exercises.questions import Mistakes, is_number, wrong_number
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
        for steps in found.results[0]:
            for number, step in enumerate(steps, 1):
                notes.where = f"samples {' + '.join(map(str, step.sizes))}, step {number}"
                _look(notes, step)


# ---- on the rank ---------------------------------------------------------------------------------
def stepped(watch: Any, answer: tuple, seed: int) -> list[list[Step]]:
    """What the rank runs: the steps of each case."""
    cases, passes, updates, held = [], [], [], 4 * MODEL.num_params  # bytes of all gradients
    for sizes, clip in CASES:
        gpt = reference.GPT(MODEL, seed)
        update = reference.optimizer(gpt.parameters(), "sgd", LR)
        gpt.register_forward_pre_hook(lambda _, args: passes.append(len(args[0])))
        update.register_step_pre_hook(lambda *_: updates.append(1))
        for parameter in gpt.parameters():  # as if left by an earlier step
            parameter.grad = torch.full_like(parameter, STALE)
        stale, steps = np.full((len(sizes), MODEL.num_params), STALE), []
        for step in range(STEPS):
            shape = {"microbatches": len(sizes), "microbatch_size": max(sizes), "seed": seed}
            full = reference.batches(MODEL, step=step, **shape)
            feed = [(x[:n].clone(), y[:n].clone()) for n, (x, y) in zip(sizes, full, strict=True)]
            with watch.unseen():
                losses, gradients = _alone(gpt, feed)
                peak = _peak(max(sizes))
            passes.clear()
            updates.clear()
            before = watched.arrays(gpt)
            with watch.section() as section:
                returned = answer[0](gpt, update, feed, clip_norm=clip)
            parts = returned if isinstance(returned, (tuple, list)) else (returned,)
            numbers = [float(part) if is_number(part) else shown(part) for part in parts]
            own = section.peak + held  # those of the step before are alive when it begins
            after = watched.arrays(gpt)
            seen = before, after, gradients, losses, numbers, [*passes], own, peak + held
            steps.append(Step(sizes, clip, *seen, stale, len(updates)))
            stale = gradients
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
def _look(notes: Notes, step: Step) -> None:
    yours = ", ".join(map(str, step.returned))
    pair = "" if len(step.returned) == 2 else f"required: the pair (loss, norm), yours is {yours}"
    count = f"optimizer.step() is called {step.updates} times, required: once"
    if step.updates != 1:  # said first: it explains weights, and what later micro-batches met
        notes.look(WEIGHTS, count, "")
    show = "{:.5f}".format
    how = show, ", detached or by .item()", TOLERANCE
    for position, (limit, numbers) in enumerate(((LOSS, step.loss()), (NORM, step.norm()))):
        wrong = pair or wrong_number(step.returned[position], *numbers, *how)
        notes.look(limit, wrong, show(numbers[0]))

    right_weights, mistakes = step.weights()
    wrong = first_wrong_tensor(
        [step.after],
        right_weights,
        tolerance=TOLERANCE,
        start=step.before,
        known=mistakes,
        ranks=lambda _: "after the step",
    )
    moved = math.hypot(*(np.linalg.norm(step.after[n] - w) for n, w in step.before.items()))
    if wrong and step.norm()[0] < step.clip and math.isclose(moved, LR * step.clip, rel_tol=1e-3):
        wrong += "; the gradient is scaled to clip_norm, although its norm is smaller"
    notes.look(WEIGHTS, wrong, f"{len(right_weights)} tensors, all equal")

    passes = f"the forward passes have {step.passes} samples, required: {list(step.sizes)}"
    once_each = sorted(step.passes) == sorted(step.sizes)
    notes.look(PASSES, "" if once_each else passes, f"{len(step.sizes)} of {len(step.sizes)}")
    most = int(ROOM * step.largest)
    why = f"; one micro-batch with all gradients has {step.largest:,}"
    notes.memory(MEMORY, [step.peak], most, "has {} bytes at its peak", why, lambda _: "the step")


# ---- right numbers, and numbers of known mistakes ------------------------------------------------
class Step(NamedTuple):
    """One step of an answer, with what the checker knows of its micro-batches.

    sizes, clip    samples of each micro-batch, and the norm to which the gradient is to be clipped
    before, after  the weights before and after the step
    gradients      of each micro-batch, the mean over its own samples: (m, Ψ)
    losses         of each micro-batch, the mean over its own samples: (m,)
    returned       what the answer returned: loss and norm, if it is right
    passes         samples in each forward pass of the answer
    peak, largest  bytes beyond the weights: the answer's peak, that of the largest micro-batch
    stale          gradients of the step before, (m, Ψ)
    updates        how often the answer called optimizer.step()
    """

    sizes: Sequence[int]
    clip: float
    before: Arrays
    after: Arrays
    gradients: np.ndarray
    losses: list[float]
    returned: list[Any]
    passes: list[int]
    peak: int
    largest: int
    stale: np.ndarray
    updates: int

    @property
    def shares(self) -> np.ndarray:
        """The weight of each micro-batch in the mean over all samples, (m,)."""
        return np.array(self.sizes) / sum(self.sizes)

    @property
    def mean(self) -> np.ndarray:
        """The gradient of the mean over all samples."""
        return self.shares @ self.gradients

    def loss(self) -> tuple[float, Mistakes]:
        """(the mean loss over all samples, what known mistakes give)."""
        loss, m = float(self.shares @ self.losses), len(self.losses)
        return loss, [
            ("that is the sum over the micro-batches", sum(self.losses)),
            (MEANS, sum(self.losses) / m),
            ("that is the last micro-batch's loss", self.losses[-1]),
            ("that is the last micro-batch's share", self.shares[-1] * self.losses[-1]),
            ("that is the norm; required: the pair (loss, norm)", np.linalg.norm(self.mean)),
            (TWICE, loss / m),
            *zip(map(MISSING.format, range(m)), loss - self.shares * self.losses, strict=True),
        ]

    def norm(self) -> tuple[float, Mistakes]:
        """(the norm of the mean gradient, what known mistakes give)."""
        norm = np.linalg.norm
        right = float(norm(self.mean))
        return right, [
            ("that is the norm after clipping", min(right, self.clip)),
            ("that is its square, the root is missing", right**2),
            ("that is the norm of the sum over the micro-batches", norm(self.gradients.sum(0))),
            (TWICE, right / len(self.losses)),
            ("that is the sum of the tensors' norms", sum(map(norm, self._tensors(self.mean)))),
            *((words, norm(gradient)) for words, (gradient, _) in self._known().items()),
        ]

    def weights(self) -> tuple[Arrays, dict[str, Arrays]]:
        """(the right weights after the step, {known mistake: the weights that it gives})."""
        known = {words: self._updated(*one) for words, one in self._known().items()}
        return self._updated(self.mean, self.clip), known

    def _known(self) -> dict[str, tuple[np.ndarray, float]]:
        """{known mistake: (the gradient that it gives, the norm to which that is then clipped)}."""
        clip, inf, parts = self.clip, math.inf, self.shares[:, None] * self.gradients
        mean, means = self.mean, self.gradients.mean(0)
        last, share = self.gradients[-1], parts[-1]
        by_tensor = np.concatenate([_clipped(one, clip) for one in self._tensors(mean)])
        running = functools.reduce(lambda total, part: _clipped(total, clip) + part, parts)
        accumulated = _clipped(self.shares @ self.stale, clip) + mean
        return {
            f"{NOT_ADDED}: only the last one is left": (last, clip),
            f"{NOT_ADDED}: only the last one's share is left": (share, clip),
            MEANS: (means, clip),
            TWICE: (mean / len(self.sizes), clip),
            "the gradient is not clipped": (mean, inf),
            "each tensor is clipped by its own norm": (by_tensor, inf),
            EACH_TIME: (running, clip),
            "the gradient of the step before is still in it": (accumulated, clip),
            **{MISSING.format(k): (mean - part, clip) for k, part in enumerate(parts)},
        }

    def _updated(self, gradient: np.ndarray, clip: float) -> Arrays:
        parts = zip(self.before.items(), self._tensors(_clipped(gradient, clip)), strict=True)
        return {name: w - LR * part.reshape(w.shape) for (name, w), part in parts}

    def _tensors(self, gradient: np.ndarray) -> list[np.ndarray]:
        """A gradient of all weights, (Ψ,), cut into those of the tensors."""
        return np.split(gradient, np.cumsum([w.size for w in self.before.values()])[:-1])


def _clipped(gradient: np.ndarray, clip: float) -> np.ndarray:
    return gradient * min(1.0, clip / (np.linalg.norm(gradient) + EPSILON))
