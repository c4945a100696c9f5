"""Lab 07's reference: the two pairs of layers that answers shard, as whole layers in float64.

Right results, right gradients by autograd, each rank's terms, and the results of known mistakes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from paralab.exercises.lazy import np, torch

BATCH, SEQ, HIDDEN, HEADS, INSIDE = 2, 24, 48, 24, 240  # 2, 3 and 4 divide HEADS and INSIDE
LATER = SEQ // 3  # the second forward, "later", has the tokens from this one on
WIDTH = HIDDEN // HEADS
Arrays = dict[str, Any]  # {name: NumPy array}


class Pair(NamedTuple):
    """Two layers, of which the first is sharded by columns and the second by rows.

    shapes   {name: shape} of the weights, as `torch.nn.Linear` stores them
    forward  ({name: tensor} of the weights and "x") -> z
    """

    shapes: dict[str, tuple[int, ...]]
    forward: Callable[..., Any]

    def part(self, name: str, whole: Any, rank: int, t: int) -> Any:
        """The rank's part of t of a weight or its gradient: of the first layer a t-th of the rows
        in each group (q, k and v), of the second layer's matrix a t-th of the columns. The second
        bias is replicated.
        """
        first, bias, second, _ = self.shapes
        if name in (first, bias):
            groups = np.split(whole, self.shapes[first][0] // self.shapes[second][1])
            return np.concatenate([np.split(one, t)[rank] for one in groups])
        return np.split(whole, t, axis=1)[rank] if name == second else whole

    def parts(self, w: Arrays, t: int) -> list[Arrays]:
        """Each rank's parts of the weights."""
        return [{n: self.part(n, w[n], rank, t) for n in self.shapes} for rank in range(t)]


# ---- the whole layers ----------------------------------------------------------------------------
def mlp(w: Arrays, *, activation: Callable[[Any], Any] | None = None) -> Any:
    """The MLP, by default with GELU in its tanh form, as in the reference GPT."""
    activation = activation or functools.partial(torch.nn.functional.gelu, approximate="tanh")
    return _linear(w, "down", activation(_linear(w, "up", w["x"])))


def attention(
    w: Arrays,
    *,
    scale: float = WIDTH,
    sees: int = 1,
    later: bool = False,
    order: str = "qkv",
    reshaped: str = "",
    hide: float | None = -math.inf,
    axis: int = -1,
) -> Any:
    """Causal attention, of as many heads as qkv has outputs for. For known mistakes: the square of
    the scores' divisor; how many tokens token i sees from i on, or whether it sees the others alone
    (later); what qkv's output is taken for; where heads are reshaped, not transposed: "before"
    attention, "after" it, or both; the score of hidden tokens, or None if they are hidden after
    softmax alone; the axis of softmax.
    """
    tokens = w["x"].shape[1]
    by_head = _linear(w, "qkv", w["x"]).view(BATCH, tokens, 3, -1, WIDTH).transpose(1, 2)
    right = by_head.transpose(2, 3)  # (B, 3, a, s, d)
    parts = by_head.reshape(right.shape) if "before" in reshaped else right
    q, k, v = (parts[:, order.index(one)] for one in "qkv")
    hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(sees) ^ later
    scores = q @ k.mT / scale**0.5
    share = (scores if hide is None else scores.masked_fill(hidden, hide)).softmax(axis)
    mixed = (share.masked_fill(hidden, 0) if hide is None else share) @ v
    mixed = mixed if "after" in reshaped else mixed.transpose(1, 2)
    return _linear(w, "proj", mixed.reshape(BATCH, tokens, -1))


def _linear(w: dict[str, Any], name: str, x: Any) -> Any:
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def computed(pair: Pair, w: Arrays, **changed: Any) -> Arrays:
    """The result "z", and the gradients of the weights and of "x" if z has the gradient "grad"."""
    leaves = {name: torch.tensor(w[name], requires_grad=True) for name in (*pair.shapes, "x")}
    z = pair.forward(leaves, **changed)
    z.backward(torch.tensor(w["grad"]))
    return {"z": z.detach().numpy(), **{name: one.grad.numpy() for name, one in leaves.items()}}


def shapes(first: str, second: str, inside: int, groups: int = 1) -> dict[str, tuple[int, ...]]:
    return {
        f"{first}.weight": (groups * inside, HIDDEN),
        f"{first}.bias": (groups * inside,),
        f"{second}.weight": (HIDDEN, inside),
        f"{second}.bias": (HIDDEN,),
    }


PAIRS = {
    "mlp": Pair(shapes("up", "down", INSIDE), mlp),
    "attention": Pair(shapes("qkv", "proj", HIDDEN, 3), attention),
}


def drawn(pair: Pair, seed: int) -> dict[str, np.ndarray]:
    """Weights, input "x" and the result's gradient "grad", the same on every rank."""
    draw, stream = np.random.default_rng(seed), (BATCH, SEQ, HIDDEN)
    sizes = {**pair.shapes, "x": stream, "grad": stream}
    made = {name: draw.standard_normal(size, dtype=np.float32) for name, size in sizes.items()}
    return {
        name: one * np.float32(one.shape[-1] ** -0.5 if "weight" in name else 1)
        for name, one in made.items()
    }


def weights_of(pair: Pair, seed: int) -> dict[str, np.ndarray]:
    return {name: one.astype("float64") for name, one in drawn(pair, seed).items()}


def of_one_device(pair: Pair, seed: int) -> Arrays:
    """Both results and all gradients of the whole layer, in float64."""
    w = weights_of(pair, seed)
    later = {name: w[name][:, LATER:] for name in ("x", "grad")}
    return computed(pair, w) | {"later": computed(pair, w | later)["z"]}


def terms(pair: Pair, w: Arrays, parts: list[Arrays], name: str, **changed: Any) -> list[Any]:
    """Each rank's term of the sum "z", without the second layer's bias, or of "x", with these parts
    of the weights. changed: further arguments of the pair's forward.
    """
    last = list(pair.shapes)[-1]
    return [computed(pair, w | one | {last: 0 * w[last]}, **changed)[name] for one in parts]


def named_terms(pair: Pair, seed: int, t: int, name: str) -> list[tuple[str, np.ndarray]]:
    """(name, array) of each term of "z" or of "x"; the last bias is one of "z"'s."""
    if name not in ("z", "x"):
        return []
    w, last = weights_of(pair, seed), list(pair.shapes)[-1]
    all_terms = terms(pair, w, pair.parts(w, t), name)
    named = [(f"of rank {rank}", one) for rank, one in enumerate(all_terms)]
    return named + [(last, np.broadcast_to(w[last], all_terms[0].shape))] * (name == "z")


def mistakes(pair: Pair, seed: int, t: int, rank: int, name: str) -> Iterator[tuple[str, Any]]:
    """(words, array) of the known mistakes with one result or gradient."""
    w, (*_, second, last) = weights_of(pair, seed), pair.shapes
    if name.startswith("qkv"):
        right = pair.part(name, of_one_device(pair, seed)[name], rank, t)
        by_head = right.reshape(3, HEADS // t, WIDTH, -1).swapaxes(0, 1).reshape(right.shape)
        yield "its rows are in the order of heads, not queries, keys, values", by_head
    if name not in ("z", "x"):
        return
    parts, bias = pair.parts(w, t), w[last] * (name == "z")
    own_terms = terms(pair, w, parts, name)
    for number, term in enumerate(own_terms):
        who = "the rank's own" if number == rank else f"rank {number}'s"
        yield f"it is {who} term of the sum, to which no other was added", term + bias
    for words, own, changed in _wrong_layers(pair, w, parts):
        yield words, sum(terms(pair, w, own, name, **changed)) + bias
    if name == "x":  # f at the second layer sums the gradient of its input
        whole = {second: sum(one[second] for one in parts)}
        results = terms(pair, w, [one | whole for one in parts], name)
        words = f"f is applied to the input of {second.partition('.')[0]}"
        yield f"{words}, but it belongs on x", results[rank]
        yield f"{words} as well as to x", sum(results)
        words = "the gradient of another use of x, as in x + mlp(x), is summed too: f has to "
        words += "return a tensor of its own, and not to work on x"
        yield words, sum(own_terms) + (t - 1) * drawn(pair, seed)["grad"]
        return
    summed = terms(pair, w | {"x": t * w["x"]}, parts, name)
    yield "the input was summed over the ranks before the layer", sum(summed) + bias
    words = "the input was summed over the ranks, and the result was not, as if f were g"
    yield words, summed[rank] + bias
    yield "it is the largest of the ranks' terms", np.max(own_terms, axis=0) + bias


def _wrong_layers(pair: Pair, w: Arrays, parts: list[Arrays]) -> Iterator[tuple[str, list, dict]]:
    """(words, each rank's weights, what is changed in forward) of known mistakes in the layers."""
    t, second = len(parts), list(pair.shapes)[-2]
    strided = [one | {second: w[second][:, r::t]} for r, one in enumerate(parts)]
    yield f"columns r, r + t, ... of {second} are on rank r, required: contiguous", strided, {}
    if pair.forward is mlp:
        yield "GELU is not in its tanh form", parts, {"activation": torch.nn.functional.gelu}
        yield "ReLU is in the place of GELU", parts, {"activation": torch.relu}
        yield "GELU is missing", parts, {"activation": lambda inside: inside}
        return
    for root, scale in (("√h", HIDDEN), ("√(h/t)", HIDDEN / t), ("h/a", WIDTH**2)):
        yield f"scores are divided by {root}, required: √(h/a)", parts, {"scale": scale}
    yield f"scores are not divided, required: by √(h/a), here √{WIDTH}", parts, {"scale": 1}
    yield "every token sees those after it", parts, {"sees": SEQ}
    yield "every token sees the one after it", parts, {"sees": 2}
    yield "no token sees itself, and the first sees none: a softmax of nothing", parts, {"sees": 0}
    words = "each token sees itself and those after it, required: those before it and itself"
    yield words, parts, {"sees": 0, "later": True}
    words = "each token sees those after it alone, and the last sees none: a softmax of nothing"
    yield words, parts, {"later": True}
    yield "tokens are hidden after softmax, required: before it", parts, {"hide": None}
    yield "hidden tokens have the score 0, required: -inf", parts, {"hide": 0}
    for axis, over in ((1, "heads"), (2, "queries")):
        yield f"softmax is over {over}, required: over keys, the last axis", parts, {"axis": axis}
    for order in ("kqv", "qvk", "vqk", "kvq", "vkq"):
        yield f"qkv's output is read as {', '.join(order)}, not q, k, v", parts, {"order": order}
    for when in ("before", "after", "before and after"):
        yield f"heads are reshaped {when} attention, not transposed", parts, {"reshaped": when}
    cut = [p | {n: np.split(w[n], t)[r] for n in p if "qkv" in n} for r, p in enumerate(parts)]
    words = "each rank has a contiguous t-th of qkv: queries of some heads and keys of others"
    yield words, cut, {}
