"""Lab 00: one training step over several micro-batches, in plain PyTorch.

The answer gets a small reference GPT, SGD (which hides no wrong factor) and micro-batches, some of
them of unequal size. The limit on its peak memory comes from forward and backward of the largest
micro-batch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from paralab.checks import shown
from paralab.exercises.accumulated import LR, Step
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
    count = f"optimizer.step() is called {step.updates} times, required: once"
    wrong = wrong or count * (step.updates != 1)
    notes.look(WEIGHTS, wrong, f"{len(right_weights)} tensors, all equal")

    passes = f"the forward passes have {step.passes} samples, required: {list(step.sizes)}"
    once_each = sorted(step.passes) == sorted(step.sizes)
    notes.look(PASSES, "" if once_each else passes, f"{len(step.sizes)} of {len(step.sizes)}")
    most = int(ROOM * step.largest)
    words = f"has {{held}} bytes at its peak, required: at most {most:,}; one micro-batch with all "
    words += f"gradients has {step.largest:,}"
    notes.memory(MEMORY, [step.peak], most, words, lambda _: "the step")
