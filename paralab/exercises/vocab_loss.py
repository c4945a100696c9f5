"""Lab 07: the cross-entropy of logits that are sharded over the vocabulary, forward and backward.

The logits are the largest activation of a model, and the loss needs only three numbers per token:
the maximum, the sum of exponentials, the target's logit (Shoeybi+ 2019, arXiv:1909.08053, sec. 3).
The checker's logits are so large that exp overflows unless the maximum is subtracted.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from paralab.exercises.diagnose import first_wrong
from paralab.exercises.exercise import Takes, Tries, exercise
from paralab.exercises.lazy import np, torch, watched
from paralab.exercises.tries import Outcome
from paralab.exercises.verdict import first

RANKS = (2, 4)
TOKENS, VOCAB = 96, 512
LARGE = 200.0  # added to every logit of a third of the tokens
ALONE = 100.0  # a lone logit of another third: exp(100 - 9) overflows, exp(9 - 100) is above 0
COPIES, SCALARS = 5, 6 * 8 * TOKENS  # copies of the rank's logits; bytes of a few numbers per token

REQUIRED = {
    "loss": "t = 2, 4: the mean over the tokens, on every rank, also of logits up to 200",
    "gradient": "of the rank's own logits",
    "bytes, forward": "at most 6(t-1)/t n elements: three all-reduces of n numbers",
    "bytes, backward": "none",
    "memory": f"at most {COPIES} tensors of n V/t elements in addition to the logits",
}
LOSS, GRADIENT, FORWARD, BACKWARD, MEMORY = REQUIRED


@exercise(Takes("vocab_parallel_loss(logits, targets)"), required=REQUIRED)
def vocab_parallel_loss(tries: Tries) -> None:
    for t in RANKS:
        own_logits, most = 4 * TOKENS * VOCAB // t, 4 * 6 * (t - 1) * TOKENS // t
        for notes, outcome in tries.run(loss_and_back, t, where=f"t={t}"):
            for limit, changed in ((LOSS, first(outcome["changed"])), (GRADIENT, "")):
                wrong = "; ".join(filter(None, (_wrong(outcome, limit), changed)))
                notes.look(limit, wrong, "right, on every rank")
            for limit, allowed in ((FORWARD, most), (BACKWARD, 0)):
                notes.bytes(limit, outcome.sent(limit), allowed, f"in {limit[7:]}", least=0)
            memory = COPIES * own_logits + SCALARS
            words = "holds {} bytes in addition to its logits"
            why = f", {COPIES} times the logits' {own_logits:,} and a few numbers per token"
            notes.memory(MEMORY, outcome["peak"], memory, words, why)


def loss_and_back(watch: Any, answer: tuple, seed: int) -> dict[str, Any]:
    """What every rank runs. Returns "loss" and "gradient"; "peak", bytes in addition to logits and
    targets; "changed", the first of these that the answer changes, in words.
    """
    logits, targets = drawn(seed)
    own_logits = np.split(logits, watch.group.size, axis=1)[watch.group.index].copy()
    own_logits, targets = torch.from_numpy(own_logits).requires_grad_(), torch.from_numpy(targets)
    watch.label, lent = FORWARD, watched.Lent(logits=own_logits, targets=targets)
    with watch.section() as section:
        loss = answer[0](own_logits, targets)
        if (value := watched.array(loss).reshape(-1)).size != 1:
            raise ValueError(f"the loss has {value.size} elements, required: one, their mean")
        watch.label = BACKWARD
        (loss * 3).backward()
    if own_logits.grad is None:
        raise ValueError("the logits have no gradient after backward")
    rest = {"gradient": watched.array(own_logits.grad) / 3, "changed": lent.changed()}
    return {"loss": value, "peak": section.peak, **rest}


def drawn(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(logits over the whole vocabulary, (n, V); targets, (n,))"""
    draw = np.random.default_rng(seed)
    logits = 3 * draw.standard_normal((TOKENS, VOCAB), dtype=np.float32)
    logits[::3] += np.float32(LARGE)
    alone = np.arange(1, TOKENS, 3), draw.integers(VOCAB, size=TOKENS // 3)
    logits[alone] = ALONE
    targets = draw.integers(VOCAB, size=TOKENS)
    width = VOCAB // max(RANKS)
    edges = [edge for first in range(0, VOCAB, width) for edge in (first, first + width - 1)]
    targets[: len(edges)] = edges  # the first and the last entry of every shard
    return logits, targets


def of_one_device(logits: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(loss, (1,); gradient of the logits, (n, V)) in float64. A target below 0 stands for none."""
    z = logits.astype(np.float64)
    z -= z.max(1, keepdims=True)
    rows, share = np.arange(len(z))[targets >= 0], np.exp(z)
    share /= share.sum(1, keepdims=True)
    loss = -np.log(share)[rows, targets[rows]].sum(keepdims=True) / len(z)
    share[rows, targets[rows]] -= 1
    return loss, share / len(z)


def _wrong(outcome: Outcome, limit: str) -> str:
    t, (logits, targets) = len(outcome.results), drawn(outcome.seed)
    position, width, parts = (LOSS, GRADIENT).index(limit), VOCAB // t, np.split(logits, t, axis=1)
    loss, gradient = of_one_device(logits, targets)
    right = [loss] * t if limit == LOSS else np.split(gradient, t, axis=1)

    def known(rank: int) -> Iterator[tuple[str, np.ndarray]]:
        local = targets - rank * width
        local_softmax = of_one_device(parts[rank], np.where(targets // width == rank, local, -1))
        said = "it is that of a softmax over the rank's own part of the vocabulary, as without an "
        said += "all-reduce, or with one whose result is read before its wait()"
        yield said, local_softmax[position]
        if limit == LOSS:
            yield from _known_losses(logits, targets, rank, t)
            return
        own = np.split(gradient + np.eye(VOCAB)[targets] / TOKENS, t, axis=1)[rank]
        yield "it is the softmax, from which no target is subtracted", own
        yield "1 is added at the target, required: subtracted", 2 * own - right[rank]
        for place in _read_instead(local, width):
            on_all = own.copy()
            on_all[np.arange(TOKENS), place] -= 1 / TOKENS
            yield "1 is subtracted also on ranks that do not have the target", on_all

    if not all(np.isfinite(one).all() for one in outcome[limit]):
        why = "exp overflows unless the maximum is subtracted first"
        if -np.inf in outcome[LOSS]:
            why = "exp(z - m) is 0 for all logits of a token: m has to be this token's maximum, "
            why += "over all ranks"
        elif limit == LOSS and not _wrong(outcome, GRADIENT):
            why = "a rank without the target adds log(0) or -inf, and has to add 0"
        return f"the {limit} is infinite or NaN: {why}"
    return first_wrong(f"the {limit}", outcome[limit], right, known=known)


def _read_instead(local: np.ndarray, width: int) -> tuple[np.ndarray, ...]:
    """Entries of its part that a rank may read for a target which it does not have."""
    return local.clip(0, width - 1), local % width, local * (local // width == 0)


def _known_losses(
    logits: np.ndarray, targets: np.ndarray, rank: int, t: int
) -> Iterator[tuple[str, np.ndarray]]:
    """(words, loss) if one of the three numbers is not computed over all ranks."""
    z, width = logits.astype(np.float64).reshape(TOKENS, t, -1), VOCAB // t  # (n, t, V/t)
    local = targets[:, None] - width * np.arange(t)  # (n, t)
    places = _read_instead(local, width)
    reads = [np.take_along_axis(z, place[:, :, None], axis=2)[:, :, 0] for place in places]

    def taken(low: int, high: int) -> np.ndarray:
        """The sum of the target's logits of the ranks in whose part it is, from low to high."""
        return (reads[0] * ((local >= low) & (local < high))).sum(1)

    maxima, target = z.max(2), taken(0, width)
    largest = maxima.max(1)
    sums = np.exp(z - largest[:, None, None]).sum(2)  # of each rank's part
    own_exp = np.log(np.exp(z - maxima[:, :, None]).sum((1, 2)))
    owners = maxima[np.arange(TOKENS), targets // width]  # the maximum of the target's rank
    own_sums, whole = largest + np.log(sums[:, rank]), largest + np.log(sums.sum(1))
    doubled, own_target = whole + largest - target, target * (targets // width == rank)
    another = "ranks without the target contribute another logit"
    mistakes = [  # the same words twice: a maximum is added back, or the target has it subtracted
        ("the log of the sum of exp is missing", largest + sums.sum(1) - target),
        ("the maximum is subtracted and not added back", whole - largest - target),
        ("the maximum is added twice, or subtracted from the target's logit too", doubled),
        ("the target's logit is added, not subtracted", whole + target),
        ("every rank subtracts the maximum of its own part", maxima[:, rank] + own_exp - target),
        ("every rank subtracts the maximum of its own part", owners + own_exp - target),
        ("the sums of exp were not added over the ranks", own_sums - target),
        *((another, whole - one.sum(1) + n * largest) for one in reads for n in (0, t - 1)),
        ("the target's logit is missing on ranks that do not have it", whole - own_target),
    ]
    for low, high in itertools.product((0, 1), (width - 1, width, width + 1)):
        said = f"each rank takes targets {low} to {high - 1} of its part, required: targets 0 to "
        mistakes.append((f"{said}{width - 1}", whole - taken(low, high)))
    for words, losses in mistakes:
        yield f"it is so if {words}", losses.mean(keepdims=True)
