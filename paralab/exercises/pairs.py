"""The two pairs of layers that lab 07's answers shard, whole, in float64: right results, right
gradients by autograd, each rank's terms, and results of the mistakes that people make.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from paralab.exercises.late import np, torch

BATCH, SEQ, HIDDEN, HEADS, INSIDE = 2, 24, 48, 24, 240  # 2, 3 and 4 divide heads and inside
LATER = SEQ // 3  # "later" is the result of a second forward, of the tokens from this one on
WIDTH = HIDDEN // HEADS
ROOT = f"by the root of h/a, here of {WIDTH}"
Arrays = dict[str, Any]  # {name: NumPy array}


class Pair(NamedTuple):
    """A column-parallel and a row-parallel layer with something between them.

    shapes   of the weights, {name: shape}, as `torch.nn.Linear` stores them
    forward  (tensors of the weights and of "x") -> z
    part     (name, whole array, rank, t) -> what the rank has of it
    """

    shapes: dict[str, tuple[int, ...]]
    forward: Callable[..., Any]
    part: Callable[[str, Any, int, int], Any]


# ---- the whole layers ----------------------------------------------------------------------------
def mlp(w: dict[str, Any], *, gelu: str = "tanh") -> Any:
    """With GELU in its tanh form, as in the reference GPT."""
    inside = torch.nn.functional.gelu(_linear(w, "up", w["x"]), approximate=gelu)
    return _linear(w, "down", inside)


def attention(w: dict[str, Any], *, scale: float = WIDTH, sees: int = 1) -> Any:
    """Causal, of as many heads as qkv has outputs for. sees: tokens from i + ``sees`` are hidden
    from token i; scores are divided by the root of ``scale``.
    """
    tokens = w["x"].shape[1]
    by_head = _linear(w, "qkv", w["x"]).view(BATCH, tokens, 3, -1, WIDTH)
    q, k, v = by_head.permute(2, 0, 3, 1, 4)  # (B, a, s, d)
    hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(sees)
    scores = (q @ k.mT / scale**0.5).masked_fill(hidden, -math.inf)
    mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(BATCH, tokens, -1)
    return _linear(w, "proj", mixed)


def _linear(w: dict[str, Any], name: str, x: Any) -> Any:
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def computed(pair: Pair, w: Arrays, **changed: Any) -> Arrays:
    """The result "z" of these weights and input "x", and all gradients of z times "grad"."""
    leaves = {name: torch.tensor(w[name], requires_grad=True) for name in (*pair.shapes, "x")}
    z = pair.forward(leaves, **changed)
    z.backward(torch.tensor(w["grad"]))
    return {"z": z.detach().numpy(), **{name: one.grad.numpy() for name, one in leaves.items()}}


def part_of(groups: int, name: str, whole: Any, rank: int, t: int) -> Any:
    """Rank's t-th: of the rows of a first layer, each of their ``groups`` on its own; of the
    columns of a second layer's weight; its bias is replicated.
    """
    if name.startswith(("up", "qkv")):
        return np.concatenate([np.split(one, t)[rank] for one in np.split(whole, groups)])
    return np.split(whole, t, axis=1)[rank] if whole.ndim == 2 else whole


def shapes(first: str, second: str, inside: int, groups: int = 1) -> dict[str, tuple[int, ...]]:
    return {
        f"{first}.weight": (groups * inside, HIDDEN),
        f"{first}.bias": (groups * inside,),
        f"{second}.weight": (HIDDEN, inside),
        f"{second}.bias": (HIDDEN,),
    }


PAIRS = {
    "mlp": Pair(shapes("up", "down", INSIDE), mlp, functools.partial(part_of, 1)),
    "attention": Pair(shapes("qkv", "proj", HIDDEN, 3), attention, functools.partial(part_of, 3)),
}


def given(pair: Pair, seed: int) -> dict[str, np.ndarray]:
    """Weights, input "x" and the result's gradient "grad", the same on every rank."""
    draw, stream = np.random.default_rng(seed), (BATCH, SEQ, HIDDEN)
    sizes = {**pair.shapes, "x": stream, "grad": stream}
    made = {name: draw.standard_normal(size, dtype=np.float32) for name, size in sizes.items()}
    return {
        name: one * np.float32(one.shape[-1] ** -0.5 if "weight" in name else 1)
        for name, one in made.items()
    }


def weights_of(pair: Pair, seed: int) -> dict[str, np.ndarray]:
    return {name: one.astype("float64") for name, one in given(pair, seed).items()}


def of_one_device(pair: Pair, seed: int) -> Arrays:
    """Both results and all gradients of the whole layer, in float64."""
    w = weights_of(pair, seed)
    later = {name: w[name][:, LATER:] for name in ("x", "grad")}
    return computed(pair, w) | {"later": computed(pair, w | later)["z"]}


def terms(pair: Pair, seed: int, t: int, name: str, *, times: int = 1) -> list[np.ndarray]:
    """What each rank's part of the weights adds to "z", without the last bias, or to "x"; of an
    input that is ``times`` the right one.
    """
    w, last = weights_of(pair, seed), list(pair.shapes)[-1]
    w |= {"x": times * w["x"], last: 0 * w[last]}
    every = [{n: pair.part(n, w[n], rank, t) for n in pair.shapes} for rank in range(t)]
    return [computed(pair, w | parts)[name] for parts in every]


def mistakes(pair: Pair, seed: int, t: int, rank: int, name: str) -> Iterator[tuple[str, Any]]:
    """(words, what it would be) of results and gradients that are wrong in a known way."""
    w, last = weights_of(pair, seed), list(pair.shapes)[-1]
    if name == "qkv.bias" or name == "qkv.weight":
        right = pair.part(name, of_one_device(pair, seed)[name], rank, t)
        by_head = right.reshape(3, HEADS // t, WIDTH, -1).swapaxes(0, 1).reshape(right.shape)
        yield "its rows are in the order of heads, not queries, keys, values", by_head
    if name not in ("z", "x"):
        return
    own, bias = terms(pair, seed, t, name), w[last] * (name == "z")
    for number, term in enumerate(own):
        who = "the rank's own" if number == rank else f"rank {number}'s"
        for of_bias in (bias, 0):
            said = f"it is {who} term of the sum, to which no other was added"
            yield said, term + of_bias
    parts = [{n: pair.part(n, w[n], r, t) for n in pair.shapes} for r in range(t)]
    if name == "x":  # the gradient of what enters the second layer is summed if f is there
        second = list(pair.shapes)[-2]
        whole = {second: sum(one[second] for one in parts)}
        found = [computed(pair, w | one | whole)["x"] for one in parts]
        words = f"f is applied to the input of {second.partition('.')[0]}"
        yield f"{words}, and it belongs on x", found[rank]
        yield f"{words} as well as to x", sum(found)
        words = (
            "the gradient of another use of x, as in x + mlp(x), is summed too: f has to return "
        )
        words += "a tensor of its own, and not to work on x"
        yield words, sum(own) + (t - 1) * given(pair, seed)["grad"]
        return
    right = sum(own)
    for times in (0, *range(2, t + 1)):
        yield f"{last} is in it {times} times", right + times * bias
    summed = terms(pair, seed, t, name, times=t)
    yield "the input was summed over the ranks before the layer", sum(summed) + bias
    yield "the input was summed over the ranks, and the result was not", summed[rank] + bias
    yield "it is the largest of the ranks' terms", np.max(own, axis=0) + bias
    if pair.forward is mlp:
        yield "GELU is not in its tanh form", computed(pair, w, gelu="none")["z"]
        return
    for words, changed in (
        ("scores are divided by the root of h, required: of h/a", {"scale": HIDDEN}),
        ("scores are divided by the root of h/t, required: of h/a", {"scale": HIDDEN / t}),
        (f"scores are divided by 1, or not at all, required: {ROOT}", {"scale": 1}),
        ("every token sees those after it", {"sees": SEQ}),
        ("every token sees the one after it", {"sees": 2}),
    ):
        yield words, computed(pair, w, **changed)["z"]
    rows = {n: np.split(w[n], t) for n in ("qkv.weight", "qkv.bias")}
    parts = [one | {n: rows[n][r] for n in rows} for r, one in enumerate(parts)]
    found = [computed(pair, w | one | {last: 0 * w[last]})["z"] for one in parts]
    words = "each rank has a contiguous t-th of qkv: queries of some heads and keys of others"
    yield words, sum(found) + bias
