"""Lab 07: f and g, and the two pairs of layers that tensor parallelism cuts with them.

An MLP and an attention layer are each a column-parallel layer followed by a row-parallel one: f in
front copies in forward and sums in backward, g behind does the reverse (Shoeybi+ 2019,
arXiv:1909.08053, sec. 3). Three exercises: f and g as autograd functions, which the checker puts
into an MLP of its own; the MLP; the attention, by heads. The answers are modules whose parameters
have the names of the whole model's, so that they can train the reference GPT. All are run on 2, 3
and 4 real ranks; result and gradients are compared with the whole layer in float64, the bytes of
each direction with one all-reduce, and what a rank holds with a t-th of the weights.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from paralab.exercises.diagnose import first_wrong
from paralab.exercises.exercise import exercise
from paralab.exercises.late import np, torch, watched
from paralab.exercises.pairs import BATCH, HIDDEN, PAIRS, SEQ, Pair, given, mistakes, of_one_device
from paralab.exercises.tries import Found, Takes, Try, on_ranks
from paralab.exercises.verdict import Notes, first, look_at_bytes, look_at_memory

RANKS = (2, 3, 4)
ACTIVATION = 4 * BATCH * SEQ * HIDDEN  # bytes; the smallest weight has as many
SCALARS = 2000  # bytes

LIMITS = {
    "result": "t = 2, 3, 4: that of the whole layer, on every rank",
    "gradients": "of the input on every rank, and of the rank's parts of the weights",
    "bytes, forward": "exactly 2(t-1)/t b s h elements: one all-reduce",
    "bytes, backward": "exactly 2(t-1)/t b s h elements: one all-reduce",
    "weights per rank": "at most a t-th of the sharded weights, and the last bias (and 2 kB)",
}
RESULT, GRADIENTS, FORWARD, BACKWARD, WEIGHTS = LIMITS


# ---- on a rank -----------------------------------------------------------------------------------
def forward_and_back(
    watch: Any, answer: tuple, seed: int, kind: str, operators: bool
) -> dict[str, Any]:
    """What every rank runs: one forward, one backward. operators: the answer is f and g.

    Returns {"z", "x" and the parameters' names: result and gradients; "held": bytes of weights}
    """
    from paralab.exercises import tensor_ranks

    pair = PAIRS[kind]
    numbers = {name: torch.from_numpy(one) for name, one in given(pair, seed).items()}
    with watch.section() as section:
        whole = tensor_ranks.linears({name: numbers[name] for name in pair.shapes})
        mine = tensor_ranks.module(kind, answer, whole, operators)
        del whole
        held = section.now()
    x = numbers["x"].clone().requires_grad_()
    watch.label = FORWARD
    z = mine(x)
    found = {"z": watched.array(z)}
    watch.label = BACKWARD
    z.backward(numbers["grad"].clone())
    found |= {"x": watched.array(x.grad), "held": held, "seed": seed}
    named = dict(mine.named_parameters())
    for name in pair.shapes:
        if name not in named:
            raise ValueError(f"it has no parameter {name}; it has {', '.join(named) or 'none'}")
        if named[name].grad is None:
            raise ValueError(f"{name} has no gradient after backward")
        found[name] = watched.array(named[name].grad)
    return found


# ---- the verdict ---------------------------------------------------------------------------------
def check(kind: str, limits: Collection[str], tries: Sequence[Try], timeout: float) -> None:
    pair = PAIRS[kind]
    for t in RANKS:
        args = {"where": f"t={t}", "timeout": timeout}
        for notes, found in on_ranks(
            tries, forward_and_back, t, (kind, WEIGHTS not in limits), **args
        ):
            _look(notes, found, pair, t, limits)


def _look(notes: Notes, found: Found, pair: Pair, t: int, limits: Collection[str]) -> None:
    """One run against every limit."""
    where, right = f"t={t}", of_one_device(pair, found.results[0]["seed"])
    for limit, names in ((RESULT, ["z"]), (GRADIENTS, ["x", *reversed(pair.shapes)])):
        wrong = first(_wrong(found, pair, right, name, t) for name in names)
        notes.look(limit, where, wrong, "right, on every rank")
    for limit in (FORWARD, BACKWARD):
        doing = f"in {limit.split(', ')[1]}"
        required = 2 * (t - 1) * ACTIVATION // t
        look_at_bytes(notes, limit, where, found.sent(limit), required, doing)
    if WEIGHTS in limits:
        part = 4 * sum(
            pair.part(n, one, 0, t).size for n, one in given(pair, 0).items() if "." in n
        )
        words = f"holds {{held}} bytes of weights, its part is {part:,}"
        held = [result["held"] for result in found.results]
        look_at_memory(notes, WEIGHTS, where, held, part + SCALARS, words)


def _wrong(found: Found, pair: Pair, right: dict[str, np.ndarray], name: str, t: int) -> str:
    """What is wrong with a tensor, on the first rank where it is, or ""."""
    seed, whole = found.results[0]["seed"], name in ("z", "x")
    return first_wrong(
        {"z": "the result", "x": "the input's gradient"}.get(name, f"the gradient of {name}"),
        [result[name] for result in found.results],
        [right[name] if whole else pair.part(name, right[name], rank, t) for rank in range(t)],
        known=lambda rank: mistakes(pair, seed, t, rank, name),
    )


OPERATORS = {limit: LIMITS[limit] for limit in LIMITS if limit != WEIGHTS}


@exercise(Takes("a function f", "f(x)"), Takes("a function g", "g(x)"), lab="07", asked=OPERATORS)
def f_and_g(tries: Sequence[Try], timeout: float) -> None:
    check("mlp", OPERATORS, tries, timeout)


@exercise(Takes("a class", "MyMLP(up, down, f=f, g=g)"), lab="07", asked=LIMITS)
def tensor_mlp(tries: Sequence[Try], timeout: float) -> None:
    check("mlp", LIMITS, tries, timeout)


CALL = "MyAttention(qkv, proj, heads=..., f=f, g=g)"


@exercise(Takes("a class", CALL), lab="07", asked=LIMITS)
def tensor_attention(tries: Sequence[Try], timeout: float) -> None:
    check("attention", LIMITS, tries, timeout)
