"""Lab 05: the update of ZeRO's first stage, in one class.

An all-reduce is a reduce-scatter and an all-gather, and the optimizer fits between the two: each
rank updates one N-th of the parameters, so it needs the optimizer states of that N-th alone
(Rajbhandari+ 2020, arXiv:1910.02054, sec. 5.1 and 7.2.1). Plain data parallelism sends the same
bytes, and breaks the limit of what is kept between steps.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from paralab.exercises.diagnose import first_wrong, padded, shifted
from paralab.exercises.exercise import Takes, Tries, exercise
from paralab.exercises.lazy import np, torch
from paralab.exercises.tries import Outcome

RANKS = (2, 3, 4)
PSI = 50_002  # elements: 2 divides it, 3 and 4 do not
STEPS = 3  # the first begins without momentum, the second shows whether it was kept
SETTINGS = {2: (0.1, 0.9), 3: (0.05, 0.8), 4: (0.2, 0.5)}  # N: learning rate and momentum
SCALARS = 1000  # bytes of step counts and the like
# Copies of Ψ: padded gradient, parts received from others, padded parameters; and N-ths of a copy.
COPIES, PARTS = 3, 3

RESULT, BYTES, KEPT, PEAK = "parameters", "bytes per rank", "kept between steps", "extra memory"
OWN = "each part is updated with the gradient of its own rank alone, not with the sum"
AGAIN = "the gradient is divided by N, and it is already divided by N when step gets it"
IN_FRONT = "padding is put in front of the parameters, and they are read as if it were behind"
REQUIRED = {
    RESULT: f"N = 2, 3, 4: those of one process after each of {STEPS} steps, on every rank",
    BYTES: "exactly 2(N-1)/N · 4Ψ in a step, Ψ padded to N equal parts",
    KEPT: "tensors: at most 4 Ψ/N bytes (and 1 kB)",
    PEAK: f"tensors: at most {COPIES} copies of Ψ and {PARTS} N-ths in addition to what is kept",
}


@exercise(Takes("MyZero1(parameters, lr=..., momentum=...)", methods=("step",)), required=REQUIRED)
def zero_step(tries: Tries) -> None:
    for n in RANKS:
        part = 4 * -(-PSI // n)  # bytes of each of n equal parts that hold all of Psi
        copy = n * part
        for notes, outcome in tries.run(train, n, where=f"N={n}", unbroken=(RESULT,)):
            notes.look(RESULT, _wrong_step(outcome, n), "all Ψ, on every rank")

            for step in range(STEPS):
                notes.bytes(BYTES, outcome.sent(f"step {step}"), 2 * (n - 1) * part, "in a step")

            how = part + SCALARS, "keeps {} bytes between steps", f"; an N-th of v has {part:,}"
            notes.memory(KEPT, outcome["kept"], *how)
            words = "has {} bytes in a step in addition to what it keeps"
            why = f"; a copy of Ψ has {copy:,}, and what pad or cat makes counts until it is freed"
            notes.memory(PEAK, outcome["passing"], COPIES * copy + PARTS * part, words, why)


def train(watch: Any, answer: tuple, seed: int) -> dict[str, Any]:
    """What every rank runs: some steps with given gradients.

    Returns the parameters after every step, (steps, Ψ); the most bytes that the answer keeps after
    a step, "kept", and the most that it has within a step in addition, "passing".
    """
    n, rank = watch.group.size, watch.group.index
    lr, momentum = SETTINGS[n]
    parameters = torch.from_numpy(drawn(seed))
    gradients = [torch.from_numpy(drawn(seed, n, rank, t)) for t in range(STEPS)]
    after, kept = torch.empty(STEPS, PSI), 0
    with watch.section() as section:
        optimizer = answer[0](parameters, lr=lr, momentum=momentum)
        for step, gradient in enumerate(gradients):
            watch.label = f"step {step}"
            optimizer.step(gradient)
            if parameters.shape != (PSI,):
                raise ValueError(f"the parameters have shape {tuple(parameters.shape)} now")
            after[step] = parameters.detach()
            kept = max(kept, section.now())
    held = getattr(optimizer, "parameters", None)
    copied = isinstance(held, torch.Tensor) and held.data_ptr() != parameters.data_ptr()
    if copied and torch.equal(parameters, torch.from_numpy(drawn(seed))):
        said = "self.parameters is a new tensor, and the one that was given is as it was: "
        raise ValueError(f"{said}change that one in place, as a model would have it")
    return {"parameters": after, "kept": kept, "passing": section.peak - kept}


def drawn(seed: int, n: int = 1, rank: int = 0, step: int = -1) -> np.ndarray:
    """The gradient of one rank's share of the batch in a step, already divided by ``n``, (Ψ,);
    without a step, the parameters before the first one.
    """
    draw = np.random.default_rng([seed, n, rank, 1 + step])
    return draw.standard_normal(PSI, dtype=np.float32) / n


def of_one_process(seed: int, n: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """(parameters before the first step and after each one, gradients summed over the ranks)."""
    (lr, momentum), velocity = SETTINGS[n], np.zeros(PSI)
    parameters, gradients = [drawn(seed).astype(np.float64)], []
    for step in range(STEPS):
        shares = [drawn(seed, n, rank, step) for rank in range(n)]
        gradients.append(np.sum(shares, axis=0, dtype=np.float64))
        velocity = momentum * velocity + gradients[-1]
        parameters.append(parameters[-1] - lr * velocity)
    return parameters, gradients


def _wrong_step(outcome: Outcome, n: int) -> str:
    right, gradients = of_one_process(outcome.seed, n)
    for step, (before, after) in enumerate(pairwise(right)):
        lr, own = SETTINGS[n][0], [drawn(outcome.seed, n, rank, step) for rank in range(n)]
        of_owners = np.concatenate(
            [np.array_split(padded(one, n), n)[rank] for rank, one in enumerate(own)]
        )
        of_gradient = -lr * gradients[step]
        terms = [("parameters", before), ("-lr * gradient", of_gradient)]
        terms += [("-lr * momentum * v", after - before - of_gradient)] if step else []
        mistakes = [
            (OWN, before - lr * of_owners[:PSI]),
            (AGAIN, before + (after - before) / n),
            (IN_FRONT, np.pad(after, (-PSI % n, 0))[:PSI]),
        ]
        wrong = first_wrong(
            f"step {step + 1}",
            [steps[step] for steps in outcome["parameters"]],
            [after] * n,
            start=[before] * n,
            terms=lambda _, terms=terms: terms,
            others=lambda _, terms=terms: shifted(terms, n),
            known=lambda _, mistakes=mistakes: mistakes,
        )
        if wrong:
            return wrong
    return ""
