"""Lab 05: the heart of ZeRO's first stage, in one class.

An all-reduce is a reduce-scatter and an all-gather, and the optimizer fits between the two: every
rank updates one N-th of the parameters, so it needs the optimizer state of that N-th alone
(Rajbhandari+ 2020, arXiv:1910.02054, sec. 5.1 and 7.2.1: the bytes are those of plain data
parallelism). The checker runs the answer on 2, 3 and 4 real ranks with gradients that it makes up,
and compares parameters after every step with one process, bytes with 2(N-1)/N Psi, what stays
between steps with 4 Psi/N, and the peak in between with copies of Psi. Psi is padded wherever it
stands beside N. Plain data parallelism sends as many bytes, and is refused for what it keeps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from paralab.checks import real
from paralab.exercises.exercise import Exercise
from paralab.exercises.verdict import Notes, Verdict, on_ranks
from paralab.theory.traffic import BOOKKEEPING

if TYPE_CHECKING:
    import numpy as np

    from paralab.report.report import Report

RANKS = (2, 3, 4)
PSI = 50_002  # elements: 2 divides it, 3 and 4 do not
STEPS = 3  # the first has no momentum yet, the second shows whether it was kept
LR, MOMENTUM = 0.1, 0.9
TOLERANCE = 1e-5  # of the largest parameter: N numbers added in another order
SCALARS = 1000  # bytes of step counts and the like
# The padded gradient, the others' parts of it, the padded parameters; gloo's threads may hold the
# first two a little longer than they are needed. And its own N-th of gradient and update.
COPIES, PARTS = 3, 3
LOOKS, PAUSE_S = 30, 0.01  # until those threads have let go of everything
TIMEOUT_S = 10.0

RESULT, BYTES, KEPT, PEAK = "parameters", "bytes per rank", "kept between steps", "extra memory"

TASK = """
**Your turn.** Write ZeRO's first stage as a class. Every rank makes one,
`MyZero1(parameters, group=group, lr=..., momentum=...)`, and calls `step(gradient)`:

* `parameters` is flat, Ψ elements, the same on every rank. Change it in place: after a step it
  holds the new values, on every rank;
* `gradient` is flat too, that of this rank's share of the batch, divided already: the **sum** over
  the ranks is the gradient. It is yours to overwrite;
* the update is SGD with momentum: v = momentum * v + gradient, parameters = parameters - lr * v.

What makes it ZeRO: a rank keeps v for its own N-th of the parameters and nothing else.
`group.reduce_scatter(part, tensor)` leaves in `part` this rank's N-th of the sum, and
`group.all_gather(tensor, part)` puts everybody's parts together; `.wait()` on what they return
waits, `group.size` and `group.index` say who you are. Both want N equal parts, and N does not
always divide Ψ: padding is yours to add and to take off.

`pl.exercises.zero_step.check(MyZero1)`
"""

ASKED = (
    (RESULT, f"N = 2, 3, 4: those of one process after each of {STEPS} steps, on every rank"),
    (BYTES, "exactly 2(N-1)/N Ψ in a step, Ψ padded to N equal parts"),
    (KEPT, "at most 4 Ψ/N bytes (and 1 kB)"),
    (PEAK, f"at most {COPIES} copies of Ψ and {PARTS} N-ths beside what is kept"),
)

HINTS = (
    "which element of v does rank r ever need, if it only updates part r? Three moves: the "
    "gradients' sum comes to you in part, you update your part, everybody gets all parts.",
    "part = -(-numel // N) elements is an N-th rounded up. Put the gradient into N * part zeros "
    "before the reduce-scatter, and the parameters before the all-gather; cut the tail off in the "
    "end.",
    "full.chunk(N)[group.index] is a view: subtract lr * v from it, and group.all_gather(full, "
    "that view).wait() fills in the others' parts. Then "
    "parameters.copy_(full[: parameters.numel()]).",
)


def check(form: Any, *, timeout: float = TIMEOUT_S) -> Verdict:
    """Run ``form`` on 2, 3 and 4 real ranks; about a second when ranks are warm.

    timeout  seconds without a sign of life until a deadlock is called one

    Raises ValueError for a wrong timeout; an answer that is wrong, fails or hangs is a Verdict.
    """
    from paralab.trace import trace

    timeout = real("timeout", timeout, above=0.0)
    return on_ranks(
        Notes("zero_step", ASKED),
        form,
        RANKS,
        lambda n: trace(train, n, (form,), timeout=timeout),
        _look,
        first=RESULT,
        letter="N",
    )


def train(group: Any, form: Callable[..., Any]) -> dict[str, Any]:
    """What every rank runs: some steps with given gradients, watched.

    Returns the parameters after every step, (steps, Psi), the most bytes that are still there after
    one, and the most that there are within; both beyond parameters and gradients.
    """
    import numpy as np
    import torch

    from paralab.instruments.memory import PeakMemory

    device, n = group.context.device, group.size
    parameters = torch.from_numpy(_start()).to(device)
    gradients = [torch.from_numpy(share(n, group.index, t)).to(device) for t in range(STEPS)]
    seen, kept, enough = [], 0, 4 * part_of(n) + SCALARS
    with PeakMemory(device) as memory:
        answer = form(parameters, group=group, lr=LR, momentum=MOMENTUM)
        for gradient in gradients:
            answer.step(gradient)
            seen.append(parameters.detach().cpu().numpy().copy())
            kept = max(kept, at_rest(memory, device, enough=max(kept, enough)))
    return {"parameters": np.stack(seen), "kept": kept, "peak": memory.peak}


def at_rest(memory: Any, device: str, *, enough: int) -> int:
    """Bytes that stay, once the threads that carry messages have let go of theirs."""
    import gc
    import time

    import torch

    found = []
    for _ in range(LOOKS):
        gc.collect()
        torch.empty(0, device=device)  # an operation, before which the dead are counted out
        found.append(memory.live)
        if found[-1] <= enough:
            break
        time.sleep(PAUSE_S)
    return min(found)


def part_of(n: int) -> int:
    """Elements of each of ``n`` equal parts that hold all of Psi."""
    return -(-PSI // n)


def share(n: int, rank: int, step: int) -> np.ndarray:
    """The gradient of one rank's share of the batch, (Psi,), divided by ``n`` already."""
    import numpy as np

    return np.random.default_rng([n, rank, step]).standard_normal(PSI, dtype=np.float32) / n


def _start() -> np.ndarray:
    import numpy as np

    return np.random.default_rng(0).standard_normal(PSI, dtype=np.float32)


@functools.cache  # the same for every answer
def _of_one_process(n: int) -> list[np.ndarray]:
    """Parameters before the first step and after each one, on the sum of all shares."""
    import numpy as np

    parameters = [_start().astype(np.float64)]
    velocity = np.zeros(PSI)
    for step in range(STEPS):
        velocity = MOMENTUM * velocity + _gradient(n, step)
        parameters.append(parameters[-1] - LR * velocity)
    return parameters


def _gradient(n: int, step: int) -> np.ndarray:
    import numpy as np

    return np.sum([share(n, rank, step) for rank in range(n)], axis=0, dtype=np.float64)


def _look(notes: Notes, report: Report, n: int) -> None:
    """One traced run against every limit."""
    results, copy, part = report.results, 4 * n * part_of(n), 4 * part_of(n)
    wrong = _first_wrong([found["parameters"] for found in results], n)
    notes.note(
        RESULT,
        f"N={n}: {wrong}" if wrong else f"N={n}: all Ψ, on every rank",
        not wrong,
        f"N={n}, {wrong}",
    )

    calls = report.collectives[~report.collectives["phase"].isin(BOOKKEEPING)]
    sent = calls.groupby("rank")["wire_bytes"].sum()
    per_step = [sent.get(rank, 0) / STEPS for rank in range(n)]
    limit = 2 * (n - 1) * part
    worst = max(range(n), key=lambda r: (abs(per_step[r] - limit), -r))
    yours, exact = per_step[worst], per_step[worst] == limit
    said = f"N={n}: rank {worst} sends {yours:,.0f} bytes in a step, asked are {limit:,}"
    if not yours:
        said = f"N={n}: rank {worst} sends nothing through the group"
    elif not exact:
        said += f", {yours / limit:.3g} times as many"
    notes.note(BYTES, f"N={n}: {limit:,} bytes" if exact else said, exact, said)

    kept = [found["kept"] for found in results]
    worst = max(range(n), key=lambda r: (kept[r], -r))
    fits = kept[worst] <= part + SCALARS
    said = f"N={n}: rank {worst} keeps {kept[worst]:,} bytes, an N-th is {part:,}"
    notes.note(KEPT, f"N={n}: {kept[worst]:,} bytes" if fits else said, fits, said)

    passing = max(found["peak"] - found["kept"] for found in results)
    fits = passing <= COPIES * copy + PARTS * part
    said = "no more than that" if fits else f"N={n}: more than {COPIES + PARTS / n:.1f} copies of Ψ"
    notes.note(PEAK, said, fits, f"{said} at once")


def _first_wrong(found: list[np.ndarray], n: int) -> str:
    """The first element of the first rank after the first step that is wrong, in words, or ""."""
    import numpy as np

    right = _of_one_process(n)
    for step in range(STEPS):
        before, wanted = right[step], right[step + 1]
        allowed = TOLERANCE * np.abs(wanted).max()
        for rank, steps in enumerate(found):
            got = steps[step].astype(np.float64)
            wrong = np.flatnonzero(~(np.abs(got - wanted) <= allowed))  # NaN is wrong too
            if len(wrong):
                why = _why(got - before, wanted - before, -LR * _gradient(n, step), wrong, allowed)
                i = int(wrong[0])
                return (
                    f"step {step + 1}, rank {rank}, element {i:,} (of part {i // part_of(n)}): "
                    f"{got[i]:.5g}, asked {wanted[i]:.5g}{why}"
                )
    return ""


def _why(
    moved: np.ndarray, asked: np.ndarray, plain: np.ndarray, wrong: np.ndarray, allowed: float
) -> str:
    """The mistake that moves the ``wrong`` elements exactly so far, if it is a known one."""
    import numpy as np

    def is_near(other: np.ndarray) -> bool:
        return bool((np.abs(moved - other)[wrong] <= allowed).all())

    if is_near(np.zeros_like(asked)):
        return "; it is as it was before the step"
    if is_near(plain):
        return "; it has moved as in a first step, without what v was before"
    factor = float(moved[wrong] @ asked[wrong]) / float(asked[wrong] @ asked[wrong])
    if is_near(factor * asked):
        return f"; it has moved {factor:.3g} times as far as asked"
    return ""


zero_step = Exercise(name="zero_step", lab="05", task=TASK, asked=ASKED, hints=HINTS, checker=check)
