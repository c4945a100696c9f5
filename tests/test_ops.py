"""Every op, by itself: its forward and its hand-written gradients are those of autograd on its
formula. What it says that it keeps and defers is held against the ledger in
test_interpret_memory.py.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

import paralab as pl
from paralab.instruments.recorder import Recorder
from paralab.interpret.flat import Flat, Into
from paralab.interpret.run import Env
from paralab.model import draws
from paralab.parallel.buckets import Unit
from paralab.programs.compile import compiled
from refusals import refuses

# Largest difference to the formula in float64, relative to the largest entry.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 0.03}
NAMES = {torch.float64: "fp32", torch.float32: "fp32", torch.bfloat16: "bf16"}
SPEC = pl.ModelSpec(layers=1, hidden=12, heads=2, seq_len=6, vocab=10)
SHARE = 0.25  # what a micro-batch's loss counts

SETTINGS = {  # (changes of SPEC, a plan, the rank's index in its tp group)
    "plain": ({}, {}, 0),
    "untied": ({"tied": False}, {}, 0),
    "dropout": ({"dropout": 0.3}, {}, 0),
    "fused": ({"attention": "sdpa"}, {}, 0),
    "fused, dropout": ({"attention": "sdpa", "dropout": 0.3}, {}, 0),
    "tp": ({}, {"tp": 2}, 1),
    "tp, dropout": ({"dropout": 0.3}, {"tp": 2}, 0),
    "sequence parallel": ({"dropout": 0.3}, {"tp": 2, "sequence_parallel": True}, 1),
}


class Own(nn.Module):
    """A block of a user's own: attention by torch, dropout, a buffer, an unused parameter."""

    def __init__(self, spec: pl.ModelSpec) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(spec.hidden)
        self.mix = nn.Linear(spec.hidden, spec.hidden)
        self.drop = nn.Dropout(0.2)
        self.unused = nn.Parameter(torch.zeros(3))
        self.register_buffer("weights", torch.randn(spec.seq_len, 1))

    def forward(self, x):
        h = torch.sigmoid(self.mix(self.norm(x))) * self.weights
        return x + self.drop(h @ self.mix.weight)  # a weight that is used twice


class Squash(nn.Module):
    """A block whose result is saved for backward."""

    def __init__(self, spec: pl.ModelSpec) -> None:
        super().__init__()
        self.mix = nn.Linear(spec.hidden, spec.hidden)

    def forward(self, x):
        return torch.tanh(self.mix(x))


class Turn(Squash):
    """A block that sees a parameter as complex numbers."""

    def __init__(self, spec: pl.ModelSpec) -> None:
        super().__init__(spec)
        self.turns = nn.Parameter(torch.randn(spec.hidden, 2))

    def forward(self, x):
        return (torch.complex(x, super().forward(x)) * torch.view_as_complex(self.turns)).real


class Sharing(Squash):
    """A part with two names, and a weight of it in another part."""

    def __init__(self, spec: pl.ModelSpec) -> None:
        super().__init__(spec)
        self.again, self.other = self.mix, nn.Linear(spec.hidden, spec.hidden)
        self.other.weight = self.mix.weight

    def forward(self, x):
        return x + self.again(F.gelu(self.mix(self.other(x))))


OWN = {"own": Own, "own, saves its result": Squash, "own, shares a part": Sharing}


def made(setting: str, dtype: torch.dtype):
    """(ops, env, program) of a setting."""
    changes, plan, tp = SETTINGS.get(setting) or ({"block": OWN[setting]}, {}, 0)
    spec = SPEC.replace(**changes)
    program = compiled(spec, pl.Plan(precision=NAMES[dtype], **plan))
    recorder = Recorder(rank=0, world_size=1)
    env = Env(SimpleNamespace(program=program, recorder=recorder, seed=3, device="cpu", tp=tp), {})
    env.step, env.sample, env.share, env.dtype = 2, 5, SHARE, dtype
    env.future_mask = torch.ones(spec.seq_len, spec.seq_len, dtype=torch.bool).triu(1)
    return program.model.ops, env, program


CASES = [
    pytest.param(setting, number, id=f"{setting}-{type(op).__name__}-{op.name}")
    for setting in SETTINGS
    for number, op in enumerate(made(setting, torch.float32)[0])
]
# Behind the embedding's two. To compile a block of one's own takes seconds: not while collecting.
CASES += [pytest.param(setting, 2, id=f"{setting}-Custom-blocks.0") for setting in OWN]


class Case:
    """One op with random weights, input state and gradient of its result."""

    def __init__(self, setting: str, number: int, dtype: torch.dtype) -> None:
        ops, self.env, self.program = made(setting, dtype)
        self.op, self.dtype = ops[number], dtype
        self.draw = torch.Generator().manual_seed(number)
        env, op, spec, plan = self.env, self.op, self.program.spec, self.program.plan
        shapes = self.program.model.shapes
        self.names = {local: f"{op.name}.{local}" for local in op.params}
        self.names |= {**op.borrows, **op.reads}
        self.weights = {local: self.random(shapes[name]) for local, name in self.names.items()}
        kind = type(op).__name__
        self.targets = torch.randint(spec.vocab, (12,), generator=self.draw)
        env.targets = self.targets.clone()
        tokens = 6 if plan.sequence_parallel and kind in ("Positions", "Norm", "Add") else 12
        if kind == "Tokens":
            self.state = (torch.randint(spec.vocab, (2, 6), generator=self.draw),)
        elif kind == "Linear":
            self.state = self.branch(self.random((12, self.weights["weight"].shape[1])))
        elif "Attention" in kind:
            self.state = self.branch(self.random((12, 3 * op.heads * op.width)))
        elif kind == "Loss":
            self.logits = self.random((12, spec.vocab), 3.0)
            size = spec.vocab // plan.tp
            self.state = (self.logits[:, env.first_logit :][:, :size].contiguous(),)
        elif kind == "Collective":
            self.state = self.branch(self.random((12, spec.hidden)))
        else:
            shape = (tokens, op.out // tokens)
            x = self.random(shape)
            self.state = (x, self.random(shape)) if kind == "Add" else (x,)
            if kind == "Gelu":
                self.state = self.branch(x)
        env.regathered = self.state[-1].clone()  # for layers that do not keep it
        env.call = self.gathered

    def random(self, shape, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=self.draw) * scale).to(self.dtype)

    def branch(self, x):
        """The state inside a branch: the residual stream, which the op has to leave alone."""
        return self.random((2, 12)), x

    def gathered(self, op, method, number, every, own) -> None:
        """The loss's message: what each rank knows of its part of the vocabulary."""
        parts = self.logits.to(own.dtype).chunk(op.parts, 1)
        size = parts[0].shape[1]
        for rank, part in enumerate(parts):
            mine = self.targets - rank * size
            here = (mine >= 0) & (mine < size)
            found = part.gather(1, mine.clamp(0, size - 1)[:, None])[:, 0].masked_fill(~here, 0)
            every[rank] = torch.stack([part.logsumexp(1), found])
        assert torch.equal(every[self.env.first_logit // size], own)

    def forward(self):
        """(result, kept); the op gets copies, so that it may write into what it is given."""
        given = tuple(t.clone() for t in self.state)
        with torch.no_grad():
            return self.op.forward(self.weights, given, self.env)

    def flat(self) -> Flat:
        """A new gradient of everything that the op adds to."""
        names = [self.names[local] for local in (*self.op.params, *self.op.borrows)]
        shapes = self.program.model.shapes
        size = sum(math.prod(shapes[name]) for name in names)
        unit = Unit(names=tuple(names), numel=size)
        flat = torch.full((size,), math.nan, dtype=self.dtype)
        return Flat(unit, flat, self.program.model)

    def upstream(self, result):
        """A random gradient of every entry of the result; the loss has none."""
        if type(self.op).__name__ == "Loss":
            return ()
        return tuple(self.random(t.shape) for t in result)

    def backward(self, kept, grads, into: Flat):
        """The gradient of the input; the parameters' is added to ``into``."""
        with torch.no_grad():
            found, deferred = self.op.input_grad(
                self.weights, kept, tuple(g.clone() for g in grads), self.env
            )
            if deferred is not None:
                self.op.weight_grad(deferred, Into(self.names, [into]), self.env)
        return found

    # ---- the same by autograd -------------------------------------------------------------------
    def by_autograd(self, grads, dtype):
        """(result, gradients of the state's entries, {local: gradient of a parameter})."""
        weights = {k: w.to(dtype, copy=True).requires_grad_() for k, w in self.weights.items()}
        floats = [t.is_floating_point() for t in self.state]
        state = tuple(
            t.to(dtype, copy=True).requires_grad_() if f else t
            for t, f in zip(self.state, floats, strict=True)
        )
        result = getattr(self, type(self.op).__name__)(weights, state)
        if grads:
            total = sum((r * g.to(dtype)).sum() for r, g in zip(result, grads, strict=True))
        else:
            total = result[0] * SHARE
        leaves = [t for t, f in zip(state, floats, strict=True) if f] + list(weights.values())
        found = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
        entries = sum(floats)
        owned = dict(zip(weights, found[entries:], strict=True))
        return result, found[:entries], {k: g for k, g in owned.items() if k not in self.op.reads}

    def drop(self, x, what: str):
        if not self.op.p:
            return x
        return x * self.env.mask(self.op.name, self.op.p, what) / (1 - self.op.p)

    def Tokens(self, weights, state):
        weight, first = weights["token.weight"], self.env.first_token
        tokens = state[0].flatten() - first
        here = (tokens >= 0) & (tokens < len(weight))
        return (F.embedding(tokens.clamp(0, len(weight) - 1), weight) * here[:, None],)

    def Positions(self, weights, state):
        (x,) = state
        y = x.view(2, -1, x.shape[1]) + weights["position.weight"]
        return (self.drop(y.view(x.shape), "residual"),)

    def Norm(self, weights, state):
        (x,) = state
        y = F.layer_norm(x, x.shape[1:], weights["weight"], weights["bias"], 1e-5)
        return (x, y) if self.op.forks else (y,)

    def Linear(self, weights, state):
        y = state[-1] @ weights["weight"].t()
        if "bias" in weights:  # a late one has its gradient here, and its value elsewhere
            late = weights["bias"] - weights["bias"].detach()
            y = y + (late if self.op.late_bias else weights["bias"])
        return (*state[:-1], y)

    def Attention(self, weights, state):
        q, k, v = state[-1].view(2, 6, 3, self.op.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.op.width)
        future = torch.ones(6, 6, dtype=torch.bool).triu(1)
        p = self.drop(scores.masked_fill(future, -math.inf).softmax(-1), "scores")
        return state[0], (p @ v).transpose(1, 2).reshape(12, -1)

    def FusedAttention(self, weights, state):
        if not self.op.p:
            return self.Attention(weights, state)
        q, k, v = state[-1].view(2, 6, 3, self.op.heads, -1).permute(2, 0, 3, 1, 4)
        with self.env.drawing(self.op.name, self.op.p):
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.op.p, is_causal=True)
        return state[0], y.transpose(1, 2).reshape(12, -1)

    def Gelu(self, weights, state):
        x = state[-1]
        y = x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        return (*state[:-1], y)

    def Add(self, weights, state):
        x, h = state
        if "bias" in weights:
            h = h + weights["bias"]
        return (x + self.drop(h, "residual"),)

    def Loss(self, weights, state):
        whole = self.logits.to(state[0].dtype).clone()
        first = self.env.first_logit
        whole[:, first : first + state[0].shape[1]] = state[0]
        return (F.cross_entropy(whole, self.targets),)

    def Collective(self, weights, state):
        return state

    def Custom(self, weights, state):
        block = self.program.spec.block
        with draws.drawing(draws.name_seed(self.env.seed, self.op.name)):
            module = block(self.program.spec).to(state[0].dtype)
        shaped = state[0].view(2, 6, -1)
        with draws.drawing(draws.mask_seed(3, 2, 5, self.op.name)):
            y = torch.func.functional_call(module, weights, (shaped,))
        return (y.view(state[0].shape),)


def draws_by_type(op) -> bool:
    """Whether torch draws other masks in another precision: then the formula has to be in it."""
    return type(op).__name__ == "Custom" or type(op).__name__ == "FusedAttention" and op.p > 0


def close(found, expected, tolerance: float, what: str) -> None:
    """Equal but for rounding. A tensor of zeros has no scale of its own: it is held to 1."""
    assert found.shape == expected.shape, what
    scale = expected.abs().max().item() or 1.0
    gap = (found.double() - expected.double()).abs().max().item() / scale
    assert gap <= tolerance, f"{what}: {gap:.1e} of its largest entry"


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize(("setting", "number"), CASES)
def test_result_and_gradients_are_those_of_autograd_on_the_formula(setting, number, dtype):
    case = Case(setting, number, dtype)
    result, kept = case.forward()
    grads = case.upstream(result)
    exact = dtype if draws_by_type(case.op) else torch.float64
    expected, of_state, of_weights = case.by_autograd(grads, exact)
    loss = type(case.op).__name__ == "Loss"  # in fp32 whatever the precision
    tolerance = max(TOLERANCE[dtype], TOLERANCE[torch.float32] * loss)
    for at, (a, b) in enumerate(zip(result, expected, strict=True)):
        close(a, b, tolerance, f"result {at}")
        assert a.dtype == (torch.float32 if loss else dtype)
    into = case.flat()
    entries = case.backward(kept, grads, into)
    assert len(entries) == len(of_state)
    for at, (a, b) in enumerate(zip(entries, of_state, strict=True)):
        close(a, b, tolerance, f"gradient of entry {at}")
        assert a.dtype == dtype
    assert not into.fresh  # every one was written
    for local, b in of_weights.items():
        close(into.views[case.names[local]], b, tolerance, f"gradient of {local}")
    once = into.flat.clone()
    case.backward(case.forward()[1], grads, into)  # the next micro-batch: they add up
    torch.testing.assert_close(into.flat, once * 2, rtol=2 * TOLERANCE[dtype], atol=1e-30)
    case.env.keeping = False  # as in a pass that is made again: the same bits
    assert all(map(torch.equal, case.forward()[0], result))


def storages(kept) -> set[int]:
    """The addresses of the storages of all tensors in it."""
    if isinstance(kept, torch.Tensor):
        return {kept.untyped_storage()._cdata}
    return set().union(*map(storages, kept)) if isinstance(kept, (tuple, list)) else set()


def moved(weights, begin: int):
    """Copies, in storages that have ``begin`` other numbers in front of them."""
    copies = {n: w.new_empty(begin + w.numel())[begin:].view(w.shape) for n, w in weights.items()}
    for name, copy in copies.items():
        copy.copy_(weights[name])
    return copies


@pytest.mark.parametrize("setting", ["own", "own, complex"])
@pytest.mark.parametrize("begin", [0, 1])
def test_what_a_module_saves_of_its_weights_is_their_place(setting, begin, monkeypatch):
    """So a unit that ZeRO-3 gathered for forward can go, and backward computes with another one,
    wherever that begins.
    """
    monkeypatch.setitem(OWN, "own, complex", Turn)  # which there is not in 16 bits
    case = Case(setting, 2, torch.float64)
    kept = case.forward()[1]
    assert not storages(list(case.weights.values())) & storages(kept)
    once, again = case.flat(), case.flat()
    grads = case.upstream(case.forward()[0])
    expected = case.backward(case.forward()[1], grads, once)
    before, case.weights = case.weights, moved(case.weights, begin)
    gone = [weakref.ref(w.untyped_storage()) for w in before.values()]
    before.clear()
    assert not any(storage() for storage in gone)
    found = case.backward(kept, grads, again)
    assert torch.equal(found[0], expected[0]) and torch.equal(again.flat, once.flat)


class Retyped(Squash):
    """The same, seen by its dtype."""

    def __init__(self, spec: pl.ModelSpec) -> None:
        super().__init__(spec)
        self.turns = nn.Parameter(torch.randn(2 * spec.hidden))

    def forward(self, x):
        return (torch.complex(x, super().forward(x)) * self.turns.view(x.dtype.to_complex())).real


@pytest.mark.parametrize("block", [Turn, Retyped])
@pytest.mark.parametrize("keeping", [True, False])
def test_a_module_sees_weights_as_complex_numbers_wherever_they_begin(block, keeping, monkeypatch):
    """In a unit's flat buffer: behind an odd count of numbers torch gives no such view."""
    monkeypatch.setitem(OWN, "own, complex", block)
    found = []
    for begin in (0, 1):
        case = Case("own, complex", 2, torch.float64)
        case.weights = moved(case.weights, begin)
        case.env.keeping = keeping
        out, kept = case.forward()
        found.append([out[0]])
        if keeping:
            into = case.flat()
            found[-1] += [*case.backward(kept, case.upstream(out), into), into.flat]
    assert all(map(torch.equal, *found))


def keeps(self, x):
    self.last = torch.tanh(self.mix(x))
    return self.last


def adds_in_place(self, x):
    y = torch.sigmoid(self.mix(x))  # whose backward needs its result
    y += x
    return y


def replaces(self, x):
    self.weights = 0.9 * self.weights
    return Own.forward(self, x)


def counts(self, x):
    self.calls += 1
    return Squash.forward(self, x) * min(1.0, self.calls / 10)


def recomputes(self, x):
    once = functools.partial(Squash.forward, self)
    return torch.utils.checkpoint.checkpoint(once, x, use_reentrant=False)


class Collecting(Squash):
    def __init__(self, spec: pl.ModelSpec) -> None:
        super().__init__(spec)
        self.mix.seen = {"widths": []}

    def forward(self, x):
        self.mix.seen["widths"].append(x.shape[-1])
        return super().forward(x)


def computing(forward, base=Squash, **more):
    """What makes a block with this forward."""
    return lambda spec: type("Mine", (base,), {"forward": forward, **more})(spec)


class Noting(Own):
    """A block whose attributes are set by its calls, to the same at each."""

    def __init__(self, spec: pl.ModelSpec) -> None:
        super().__init__(spec)
        self.turned = nn.utils.parametrizations.weight_norm(nn.Linear(spec.hidden, spec.hidden))
        self.turned.register_forward_hook(lambda module, inputs, result: 2 * result)
        self.again, self.shape, self.largest = self.mix, None, math.nan
        self.chosen = random.Random(0)
        self.functions = np.array([math.sin, lambda x: x])

    def forward(self, x):
        self.shape, self.sizes = x.shape, [x.shape[0], math.nan]
        return self.turned(super().forward(self.again(x)))


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w.t(), x.flatten(0, 1).t() @ g.flatten(0, 1)


class Attribute(Product):
    @staticmethod
    def forward(ctx, x, w):
        ctx.w = w
        return Product.forward(ctx, x, w)

    @staticmethod
    def backward(ctx, g):
        return g @ ctx.w.t(), Product.backward(ctx, g)[1]


class Multiplying(Squash):
    function = Product

    def forward(self, x):
        return self.function.apply(x, self.mix.weight)


def linear(spec, **how):
    return nn.Linear(spec.hidden, spec.hidden, **how)


TURNS = itertools.cycle((Own, Squash))

REFUSED = {
    "it is text": ("mine", "neither a class"),
    "it cannot be made": (nn.Linear, "out_features"),
    "it makes no module": (lambda spec: 3, "returned 3"),
    "its result has another shape": (lambda spec: nn.Linear(spec.hidden, 3), r"\(2, 6, 3\)"),
    "it depends on values": (computing(lambda self, x: x * bool(x.sum() > 0)), "without values"),
    "it changes a buffer": (lambda spec: nn.BatchNorm1d(spec.seq_len), "changes a buffer"),
    "it replaces a buffer": (computing(replaces, Own), "changes a buffer"),
    "it counts": (computing(counts, calls=0), "changes calls"),
    "it collects": (Collecting, "changes mix.seen"),
    "it draws with Python": (computing(lambda self, x: x * random.random()), "with random, "),
    "it draws with NumPy": (computing(lambda self, x: x * np.random.rand()), "numpy.random"),
    "it keeps a tensor": (computing(keeps), "its attribute last is a tensor"),
    "it changes what backward needs": (computing(adds_in_place), r"in place .* \(2, 6, 12\)"),
    "its function keeps a weight itself": (
        lambda spec: type("Kept", (Multiplying,), {"function": Attribute})(spec),
        r"ctx.save_for_backward\(",
    ),
    "it recomputes itself": (computing(recomputes), "recomputes nothing itself"),
    "it is another one each time": (lambda spec: next(TURNS)(spec), r"first time, (.|\n)* second"),
    "it has a lazy layer": (lambda spec: nn.LazyLinear(spec.hidden), "'weight' has no shape"),
    "a parameter is not trained": (
        lambda spec: linear(spec).requires_grad_(False), "'weight' requires no gradient",
    ),
    "a parameter is complex": (
        lambda spec: linear(spec, dtype=torch.complex64), "'weight' is torch.complex64",
    ),
    "its name alone was saved": ("own: Mine", "only the name"),
}  # fmt: skip


@pytest.mark.parametrize("why", REFUSED)
def test_a_block_that_cannot_be_trained_is_refused(why):
    block, said = REFUSED[why]
    refuses(f"block=(.|\n)*{said}", lambda: pl.Plan().validate(SPEC.replace(block=block)))


@pytest.mark.parametrize("block", [Multiplying, Noting])
def test_a_block_may_save_a_weight_in_its_function_and_note_what_never_changes(block):
    pl.Plan().validate(SPEC.replace(block=block))


def test_a_block_of_ones_own_is_refused_where_its_inside_would_have_to_be_known():
    for plan in ({"tp": 2}, {"recompute": "selective"}):
        words = f"{next(iter(plan))}=.*of your own"
        refuses(words, pl.Plan(**plan).validate, SPEC.replace(block=Own))


def test_a_block_of_ones_own_has_its_parameters_counted_and_its_name_saved():
    spec = SPEC.replace(block=Own, layers=3)
    shapes = spec.parameter_shapes()
    assert shapes["blocks.2.mix.weight"] == (12, 12) and "blocks.0.mlp.up.weight" not in shapes
    assert spec.num_params == sum(map(math.prod, shapes.values()))
    again = pl.ModelSpec.from_dict(spec.to_dict())
    assert again.block == "own: Own" and again != spec
    for asked in (again.parameter_shapes, lambda: pl.reference.GPT(again)):
        refuses("only the name.*; legal: ", asked)


def test_a_block_that_reads_what_has_changed_is_refused_and_not_counted_as_it_was():
    width = 2

    class Wide(nn.Module):
        def __init__(self, spec):
            super().__init__()
            # Of which the text of a module says nothing.
            self.weight = nn.Parameter(torch.zeros(width * spec.hidden, spec.hidden))

        def forward(self, x):
            return x + F.linear(F.relu(F.linear(x, self.weight)), self.weight.t())

    spec, plan = SPEC.replace(block=Wide), pl.Plan()
    plan.validate(spec)
    counted = spec.num_params
    width = 4
    for asked in (lambda: plan.validate(spec), lambda: spec.num_params):
        refuses("(?s)block='own: Wide'.*24.*and now makes .*48.*again", asked)
    width = 2
    plan.validate(spec)
    assert spec.num_params == counted


def test_a_module_on_fake_tensors_computes_what_the_standard_ops_say():
    """Products, at least: elementwise work is measured for the ops, and counted for a module."""

    class Mlp(nn.Module):
        def __init__(self, spec):
            super().__init__()
            self.up = nn.Linear(spec.hidden, 4 * spec.hidden)
            self.down = nn.Linear(4 * spec.hidden, spec.hidden)

        def forward(self, x):
            return x + self.down(F.relu(self.up(x)))

    ops = compiled(SPEC, pl.Plan()).model.ops
    mine = compiled(SPEC.replace(block=Mlp), pl.Plan()).model.ops
    theirs = [op for op in ops if op.name.endswith((".mlp.up", ".mlp.down"))]
    (own,) = [op for op in mine if type(op).__name__ == "Custom"]
    for pick in (slice(0, 1), slice(1, 3)):  # forward, and both halves of backward
        expected = np.sum([w.products for op in theirs for w in op.work[pick]], axis=0)
        assert np.sum([w.products for w in own.work[pick]], axis=0) == pytest.approx(expected)
