"""The two pairs of layers that lab 07's answers shard, whole, in NumPy and float64: right results,
right gradients, each rank's terms, and results of the mistakes that people make.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from paralab.exercises.late import np

BATCH, SEQ, HIDDEN, HEADS, INSIDE = 2, 24, 48, 12, 240  # 2, 3 and 4 divide heads and inside
WIDTH = HIDDEN // HEADS


class Pair(NamedTuple):
    """A column-parallel and a row-parallel layer with something between them.

    shapes  of the weights, {name: shape}, as `torch.nn.Linear` stores them
    whole   (weights, x, gradient of z) -> {"z", "x" and the names: result and gradients}
    part    (name, whole tensor, rank, t) -> what the rank has of it
    """

    shapes: dict[str, tuple[int, ...]]
    whole: Callable[[dict[str, Any], Any, Any], dict[str, Any]]
    part: Callable[[str, Any, int, int], Any]


# ---- the whole layers, in NumPy ------------------------------------------------------------------
def mlp(w: dict[str, Any], x: Any, grad: Any) -> dict[str, Any]:
    """GELU in its tanh form, as in the reference GPT."""
    u = _inside(w, x)
    th = np.tanh(np.sqrt(2 / np.pi) * (u + 0.044715 * u**3))
    inside = u * (1 + th) / 2
    slope = (1 + th) / 2 + u / 2 * (1 - th**2) * np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * u**2)
    of_u = grad @ w["down.weight"] * slope
    return {
        "z": inside @ w["down.weight"].T + w["down.bias"],
        "x": of_u @ w["up.weight"],
        **_of_linear("up", x, of_u),
        **_of_linear("down", inside, grad),
    }


def _inside(w: dict[str, Any], x: Any) -> Any:
    return x @ w["up.weight"].T + w["up.bias"]


def attention(
    w: dict[str, Any], x: Any, grad: Any, *, scale: float = WIDTH, sees: int = 1
) -> dict[str, Any]:
    """Causal, of as many heads as qkv has outputs for. sees: tokens from i + ``sees`` are hidden
    from token i; scores are divided by the root of ``scale``.
    """

    def by_head(flat: Any) -> Any:  # (B, s, a d) -> (B, a, s, d)
        return flat.reshape(BATCH, SEQ, -1, WIDTH).transpose(0, 2, 1, 3)

    def flat(heads: Any) -> Any:
        return heads.transpose(0, 2, 1, 3).reshape(BATCH, SEQ, -1)

    q, k, v = map(by_head, np.split(x @ w["qkv.weight"].T + w["qkv.bias"], 3, axis=-1))
    scores = q @ k.swapaxes(2, 3) / np.sqrt(scale) + np.triu(np.full((SEQ, SEQ), -np.inf), sees)
    share = np.exp(scores - scores.max(-1, keepdims=True))
    share /= share.sum(-1, keepdims=True)
    mixed, of_mixed = flat(share @ v), by_head(grad @ w["proj.weight"])
    of_share = of_mixed @ v.swapaxes(2, 3)
    of_scores = share * (of_share - (of_share * share).sum(-1, keepdims=True)) / np.sqrt(scale)
    parts = of_scores @ k, of_scores.swapaxes(2, 3) @ q, share.swapaxes(2, 3) @ of_mixed
    of_qkv = np.concatenate([flat(part) for part in parts], axis=-1)
    return {
        "z": mixed @ w["proj.weight"].T + w["proj.bias"],
        "x": of_qkv @ w["qkv.weight"],
        **_of_linear("qkv", x, of_qkv),
        **_of_linear("proj", mixed, grad),
    }


def _of_linear(name: str, x: Any, grad: Any) -> dict[str, Any]:
    x, grad = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
    return {f"{name}.weight": grad.T @ x, f"{name}.bias": grad.sum(0)}


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


def of_one_device(pair: Pair, seed: int) -> dict[str, np.ndarray]:
    """Result and all gradients of the whole layer, in float64."""
    w = weights_of(pair, seed)
    return pair.whole(w, w["x"], w["grad"])


def terms(pair: Pair, seed: int, t: int, name: str, *, times: int = 1) -> list[np.ndarray]:
    """What each rank's part of the weights adds to "z", without the last bias, or to "x"; of an
    input that is ``times`` the right one.
    """
    w, last, found = weights_of(pair, seed), list(pair.shapes)[-1], []
    for rank in range(t):
        parts = {n: pair.part(n, w[n], rank, t) for n in pair.shapes}
        parts[last] = 0 * parts[last]
        found.append(pair.whole(parts, times * w["x"], w["grad"])[name])
    return found


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
    if name == "x":
        return
    right = sum(own)
    for times in (0, *range(2, t + 1)):
        yield f"{last} is in it {times} times", right + times * bias
    summed = terms(pair, seed, t, name, times=t)
    yield "the input was summed over the ranks before the layer", sum(summed) + bias
    yield "the input was summed over the ranks, and the result was not", summed[rank] + bias
    yield "it is the largest of the ranks' terms", np.max(own, axis=0) + bias
    if pair.whole is mlp:
        u = _inside(w, w["x"])
        exact = u * (1 + np.vectorize(math.erf)(u / math.sqrt(2))) / 2
        yield "GELU is not in its tanh form", exact @ w["down.weight"].T + bias
        return
    for words, changed in (
        ("scores are divided by the root of h, required: of h/a", {"scale": HIDDEN}),
        ("scores are divided by the root of h/t, required: of h/a", {"scale": HIDDEN / t}),
        ("every token sees those after it", {"sees": SEQ}),
        ("every token sees the one after it", {"sees": 2}),
    ):
        yield words, attention(w, w["x"], w["grad"], **changed)["z"]
    rows = {n: np.split(w[n], t) for n in ("qkv.weight", "qkv.bias")}
    parts = [
        {n: rows[n][r] if n in rows else pair.part(n, w[n], r, t) for n in pair.shapes}
        for r in range(t)
    ]
    found = [attention({**one, last: 0.0}, w["x"], w["grad"])["z"] for one in parts]
    words = "each rank has a contiguous t-th of qkv: queries of some heads and keys of others"
    yield words, sum(found) + bias
