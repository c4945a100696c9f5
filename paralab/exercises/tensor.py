"""Lab 07: f and g, and the two pairs of layers that tensor parallelism shards with them.

An MLP and an attention layer are each a column-parallel layer followed by a row-parallel one: f
before the pair copies in forward and sums in backward, g after it does the reverse (Shoeybi+ 2019,
arXiv:1909.08053, sec. 3). An answer's f and g are judged in the library's MLP. The answer's modules
have parameters with the names of the whole layers', so that they can train the reference GPT.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection
from typing import Any

from paralab.exercises import pairs
from paralab.exercises.diagnose import first_wrong
from paralab.exercises.exercise import Takes, Tries, exercise
from paralab.exercises.lazy import np, torch, watched
from paralab.exercises.questions import kind_of
from paralab.exercises.tries import Outcome
from paralab.exercises.verdict import first

RANKS = (2, 3, 4)
ACTIVATION = 4 * pairs.BATCH * pairs.SEQ * pairs.HIDDEN  # bytes, as many as proj.weight has
SCALARS = 2000  # bytes for anything small

LIMITS = {
    "result": "t = 2, 3, 4: that of the whole layer, on every rank",
    "gradients": "of the input on every rank, and of the rank's parts of the weights",
    "bytes, forward": "exactly 2(t-1)/t b s h elements: one all-reduce",
    "bytes, backward": "exactly 2(t-1)/t b s h elements: one all-reduce",
    "weights per rank": "tensors: at most a t-th of the sharded weights, the last bias, and 2 kB",
}
RESULT, GRADIENTS, FORWARD, BACKWARD, WEIGHTS = LIMITS


# ---- on a rank -----------------------------------------------------------------------------------
def forward_and_back(
    watch: Any, answer: tuple, seed: int, kind: str, operators: bool
) -> dict[str, Any]:
    """What every rank runs: forward, backward, and another forward. operators: whether the answer
    is f and g.

    Returns the results "z" and "later", the gradients "x" and those under the parameters' names,
    the parameters as "its ...";
    "held", bytes of weights; "slice", a parameter that is a slice, in words; and for the limits
    `RESULT` and `GRADIENTS` the first tensor that f or g changes, in words.
    """
    from paralab.exercises.answers import f_and_g, tensor_mlp

    pair, call, settings = pairs.PAIRS[kind], answer[0], {"f": f_and_g.f, "g": f_and_g.g}
    lent = {limit: watched.Lent() for limit in (RESULT, GRADIENTS)}
    if operators and len(answer) < 2:
        raise ValueError("g is missing: give both, check(f, g)")
    if operators:
        call = tensor_mlp.MyMLP
        settings = {name: _noting(name, one, lent) for name, one in zip("fg", answer, strict=True)}
    settings |= {"heads": pairs.HEADS} if kind == "attention" else {}
    given = {name: torch.from_numpy(one) for name, one in pairs.drawn(pair, seed).items()}
    with watch.section() as section:
        whole = _linears({name: given[name] for name in pair.shapes})
        module = call(*whole, **settings)
        del whole
        held = section.now()
    x = given["x"].clone().requires_grad_()
    watch.label = FORWARD
    z = module(x)
    result = {"z": watched.array(z)}
    if z.shape != x.shape:
        raise ValueError(f"the result has shape {tuple(z.shape)}, required: {tuple(x.shape)}")
    watch.label = BACKWARD
    residual = given["grad"]  # the gradient of the other use of x in a block, x + mlp(x)
    torch.autograd.backward([z, x.view_as(x)], [residual.clone(), residual.clone()])
    result |= {"x": watched.array(x.grad - residual), "held": held}
    watch.label = "a second forward"
    with torch.no_grad():
        result["later"] = watched.array(module(given["x"][:, pairs.LATER :].clone()))
    result |= {limit: tensors.changed() for limit, tensors in lent.items()}
    named = dict(module.named_parameters())
    result["slice"] = ""
    for name in pair.shapes:
        if name not in named:
            has = ", ".join(named) or "none"
            raise ValueError(f"the module has no parameter {name}; it has {has}")
        if named[name].grad is None:
            raise ValueError(f"{name} has no gradient after backward")
        result[name] = watched.array(named[name].grad)
        result[f"its {name}"] = watched.array(named[name])
        if named[name].untyped_storage().nbytes() > named[name].nbytes:
            result["slice"] = f"; {name} is a slice, which keeps the whole tensor alive"
    return result


def _noting(name: str, operator: Any, lent: dict[str, Any]) -> Any:
    """The operator, with its tensors in forward and backward noted in ``lent``."""

    def note(limit: str, what: str, tensor: Any) -> None:
        words = f"{name} changes {what}, which autograd may still need: work on a clone"
        lent[limit].note(words, tensor)

    def call(x: Any) -> Any:
        note(RESULT, "its argument", x)
        y = operator(x)
        if not isinstance(y, torch.Tensor):
            raise TypeError(f"{name} returns {kind_of(y)}, required: a tensor")
        if getattr(y, "requires_grad", False):
            y.register_hook(functools.partial(note, GRADIENTS, "the gradient that arrives"))
        return y

    return call


def _linears(weights: dict[str, Any]) -> list[Any]:
    """The whole layers, with copies of the weights {"up.weight": ..., "up.bias": ...}."""
    matrices = {name.partition(".")[0]: w for name, w in weights.items() if w.ndim == 2}
    layers = {name: torch.nn.Linear(*reversed(w.shape)) for name, w in matrices.items()}
    torch.nn.ModuleDict(layers).load_state_dict(weights)
    return list(layers.values())


# ---- the verdict ---------------------------------------------------------------------------------
def look_at_layers(kind: str, limits: Collection[str], tries: Tries) -> None:
    pair, operators = pairs.PAIRS[kind], WEIGHTS not in limits
    for t in RANKS:
        for notes, outcome in tries.run(forward_and_back, t, kind, operators, where=f"t={t}"):
            right = pairs.of_one_device(pair, outcome.seed)
            weights = reversed(pair.shapes)
            for limit, names in ((RESULT, ["z", "later"]), (GRADIENTS, ["x", *weights])):
                wrong = first(_wrong(outcome, pair, right, name) for name in names)
                if wrong and "; " not in wrong and not operators:
                    other = first(_not_its_part(outcome, pair, name) for name in pair.shapes)
                    wrong += f"; {other}" * bool(other)
                wrong = wrong or outcome[limit][0]
                notes.look(limit, wrong, "right, on every rank")
            for limit in (FORWARD, BACKWARD):
                required = 2 * (t - 1) * ACTIVATION // t
                notes.bytes(limit, outcome.sent(limit), required, f"in {limit.split(', ')[1]}")
            if not operators:
                parts = {n: w for n, w in pairs.drawn(pair, 0).items() if "." in n}
                part = 4 * sum(pair.part(name, whole, 0, t).size for name, whole in parts.items())
                why = f"; its part is {part:,}{outcome['slice'][0]}"
                held = outcome["held"], part + SCALARS
                notes.memory(WEIGHTS, *held, "holds {} bytes of weights", why)


def _wrong(outcome: Outcome, pair: pairs.Pair, right: dict[str, np.ndarray], name: str) -> str:
    t, whole = len(outcome.results), name in ("z", "later", "x")
    tokens = f"{pairs.SEQ - pairs.LATER} of the {pairs.SEQ} tokens"
    later = f"the result of a second forward, of {tokens}"
    words = {"z": "the result", "later": later, "x": "the input's gradient"}
    return first_wrong(
        words.get(name, f"the gradient of {name}"),
        outcome[name],
        [right[name] if whole else pair.part(name, right[name], rank, t) for rank in range(t)],
        terms=lambda _: pairs.named_terms(pair, outcome.seed, t, name),
        known=lambda rank: pairs.mistakes(pair, outcome.seed, t, rank, name),
    )


def _not_its_part(outcome: Outcome, pair: pairs.Pair, name: str) -> str:
    """The first rank whose parameter is not its part of the whole one, in words, or ""."""
    whole, parameters = pairs.drawn(pair, outcome.seed)[name], outcome[f"its {name}"]
    t, means = len(parameters), [float(one.mean()) for one in parameters]
    if name == list(pair.shapes)[-1] and math.isclose(sum(means), whole.mean(), rel_tol=1e-4):
        return ""  # each rank may add a part of the last bias
    return first_wrong(
        f"its {name}", parameters, [pair.part(name, whole, rank, t) for rank in range(t)]
    )


OPERATORS = {limit: LIMITS[limit] for limit in LIMITS if limit != WEIGHTS}


@exercise(
    Takes("f(x)", kind="a function f"), Takes("g(x)", kind="a function g"), required=OPERATORS
)
def f_and_g(tries: Tries) -> None:
    look_at_layers("mlp", OPERATORS, tries)


@exercise(Takes("MyMLP(up, down, f=f, g=g)"), required=LIMITS)
def tensor_mlp(tries: Tries) -> None:
    look_at_layers("mlp", LIMITS, tries)


@exercise(Takes("MyAttention(qkv, proj, heads=..., f=f, g=g)"), required=LIMITS)
def tensor_attention(tries: Tries) -> None:
    look_at_layers("attention", LIMITS, tries)
