"""Every op by itself has the gradients of autograd; a block of one's own also its results, and what
a block cannot be. What an op keeps and defers is held against the ledger in
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
from paralab.instruments.memory import PeakMemory
from paralab.instruments.recorder import Recorder
from paralab.interpret.flat import Flat, Into
from paralab.interpret.run import Env
from paralab.model import draws
from paralab.model.ops import Collective, FusedAttention
from paralab.parallel.buckets import Unit
from paralab.programs.compile import compiled
from refusals import refuses

# Largest difference to the block's own forward, relative to the largest entry.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 0.03}
NAMES = {torch.float64: "fp32", torch.float32: "fp32", torch.bfloat16: "bf16"}
SPEC = pl.ModelSpec(layers=1, hidden=12, heads=2, seq_len=6, vocab=10)


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


class Sharing(Squash):
    """A part with two names, and a weight of it in another part."""

    def __init__(self, spec: pl.ModelSpec) -> None:
        super().__init__(spec)
        self.again, self.other = self.mix, nn.Linear(spec.hidden, spec.hidden)
        self.other.weight = self.mix.weight

    def forward(self, x):
        return x + self.again(F.gelu(self.mix(self.other(x))))


class Recurrent(nn.LSTM):
    """oneDNN's kernel would save a workspace, which on tensors without values has no size."""

    def __init__(self, spec: pl.ModelSpec) -> None:
        super().__init__(spec.hidden, spec.hidden, batch_first=True)

    def forward(self, x):
        return super().forward(x)[0]


OWN = (Own, Squash, Sharing)
STANDARD = {  # (changes of SPEC, a plan, the rank's index in its tp group)
    "plain": ({}, {}, 0),
    "untied, dropout": ({"tied": False, "dropout": 0.3}, {}, 0),
    "fused": ({"attention": "sdpa"}, {}, 0),
    "fused, dropout": ({"attention": "sdpa", "dropout": 0.3}, {}, 0),
    "tp": ({}, {"tp": 2}, 1),
    "sequence parallel": ({"dropout": 0.3}, {"tp": 2, "sequence_parallel": True}, 1),
}


def surroundings(program, tp: int) -> Env:
    recorder = Recorder(rank=0, world_size=1)
    env = Env(SimpleNamespace(program=program, recorder=recorder, seed=3, device="cpu", tp=tp), {})
    env.step, env.sample = 2, 5
    return env


def nothing_in(names, program, dtype: torch.dtype) -> Flat:
    """A new gradient of these parameters."""
    shapes = program.model.shapes
    unit = Unit(names=tuple(names), numel=sum(math.prod(shapes[name]) for name in names))
    return Flat(unit, torch.full((unit.numel,), math.nan, dtype=dtype), program.model)


class Case:
    """The op of a block with random weights, input and gradient of its result."""

    def __init__(self, block: type[nn.Module], dtype: torch.dtype) -> None:
        self.program = compiled(SPEC.replace(block=block), pl.Plan(precision=NAMES[dtype]))
        self.block, self.dtype, self.env = block, dtype, surroundings(self.program, 0)
        self.env.dtype = dtype
        self.op = self.program.model.ops[2]  # behind the embedding's two
        self.draw = torch.Generator().manual_seed(0)
        self.names = {local: f"{self.op.name}.{local}" for local in self.op.params}
        shapes = self.program.model.shapes
        self.weights = {local: self.random(shapes[name]) for local, name in self.names.items()}
        self.x, self.upstream = self.random((12, 12)), self.random((12, 12))

    def random(self, shape) -> torch.Tensor:
        return torch.randn(shape, generator=self.draw).to(self.dtype)

    def forward(self):
        """(result, kept); the op gets a copy, so that it may write into what it is given."""
        with torch.no_grad():
            (result,), kept = self.op.forward(self.weights, (self.x.clone(),), self.env)
        return result, kept

    def flat(self) -> Flat:
        """A new gradient of everything that the op adds to."""
        return nothing_in(self.names.values(), self.program, self.dtype)

    def backward(self, kept, into: Flat) -> torch.Tensor:
        """The gradient of the input; the parameters' is added to ``into``."""
        with torch.no_grad():
            given = self.weights, kept, (self.upstream.clone(),), self.env
            (found,), deferred = self.op.input_grad(*given)
            if deferred is not None:
                self.op.weight_grad(deferred, Into(self.names, [into]), self.env)
        return found

    def by_autograd(self):
        """(result, gradient of the input, those of the parameters)."""
        x, *weights = (t.clone().requires_grad_() for t in (self.x, *self.weights.values()))
        with draws.drawing(draws.name_seed(self.env.seed, self.op.name)):
            module = self.block(self.program.spec).to(self.dtype)
        named = dict(zip(self.weights, weights, strict=True))
        with draws.drawing(draws.mask_seed(3, 2, 5, self.op.name)):
            y = torch.func.functional_call(module, named, (x.view(2, 6, 12),)).view(12, 12)
        total = (y * self.upstream).sum()
        found = torch.autograd.grad(total, [x, *weights], allow_unused=True, materialize_grads=True)
        return y, found[0], dict(zip(named, found[1:], strict=True))


def close(found, expected, tolerance: float, what: str) -> None:
    """Equal but for rounding. A tensor of zeros has no scale of its own: it is held to 1."""
    assert found.shape == expected.shape, what
    scale = expected.abs().max().item() or 1.0
    gap = (found.double() - expected.double()).abs().max().item() / scale
    assert gap <= tolerance, f"{what}: {gap:.1e} of its largest entry"


@pytest.mark.parametrize("setting", STANDARD)
def test_gradients_of_every_standard_op_are_those_of_autograd_on_its_forward(setting):
    changes, plan, tp = STANDARD[setting]
    program, draw = compiled(SPEC.replace(**changes), pl.Plan(**plan)), torch.manual_seed(0)
    env, shapes, state = surroundings(program, tp), program.model.shapes, ()
    env.share, env.targets = 0.25, torch.randint(SPEC.vocab, (12,), generator=draw)

    def gathered(op, method, number, every, own):
        every.copy_(own.detach() + 1)  # what another rank sends
        every[tp] = own

    env.call = gathered
    for op in program.model.ops:
        if isinstance(op, Collective):  # computes nothing, and may change the number of tokens
            width = state[-1].shape[1]
            state = (*state[:-1], torch.randn(op.out // width, width, generator=draw))
            continue
        state = state or (torch.randint(SPEC.vocab, (2, 6), generator=draw),)
        names = op.owned | op.borrows | op.reads
        weights = {k: torch.randn(shapes[n], generator=draw) for k, n in names.items()}
        leaves = [t.requires_grad_() for t in (*state, *weights.values()) if t.is_floating_point()]
        env.regathered = state[-1].detach()  # for layers that do not keep it
        y, _ = op.forward(weights, tuple(t.clone() for t in state), env)
        if isinstance(op, FusedAttention):
            with env.drawing(op.name, op.p):
                how = {"dropout_p": op.p, "is_causal": True}
                x = F.scaled_dot_product_attention(*op.split(state[-1]), **how)
            y = (*state[:-1], op.join(x))
        if getattr(op, "late_bias", False):  # added elsewhere, its gradient is computed here
            y = (*y[:-1], y[-1] + weights["bias"])
        g = tuple(torch.randn(t.shape, generator=draw) for t in y if t.dim())  # the loss has none
        of_y = g or (torch.tensor(env.share),)
        found = torch.autograd.grad(y, leaves, of_y, allow_unused=True, materialize_grads=True)
        into = nothing_in([names[k] for k in names if k not in op.reads], program, torch.float32)
        with torch.no_grad():
            _, kept = op.forward(weights, tuple(t.clone() for t in state), env)
            mine, deferred = op.input_grad(weights, kept, tuple(t.clone() for t in g), env)
            if deferred is not None:
                op.weight_grad(deferred, Into(names, [into]), env)
        mine = (*mine, *(into.views[names[k]] for k in weights if k not in op.reads))
        for a, b in zip(mine, found[: len(found) - len(op.reads)], strict=True):
            close(a, b, TOLERANCE[torch.float32], op)
        assert not into.fresh, op  # every one was written
        state = tuple(torch.randn(t.shape, generator=draw) for t in y)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("block", OWN)
def test_result_and_gradients_are_those_of_autograd(block, dtype):
    case = Case(block, dtype)
    result, kept = case.forward()
    expected, of_x, of_weights = case.by_autograd()
    into = case.flat()
    found = case.backward(kept, into)
    assert result.dtype == found.dtype == dtype
    close(result, expected, TOLERANCE[dtype], "result")
    close(found, of_x, TOLERANCE[dtype], "gradient of the input")
    assert not into.fresh  # every one was written
    for local, gradient in of_weights.items():
        view = into.views[case.names[local]]
        close(view, gradient, TOLERANCE[dtype], f"gradient of {local}")
    once = into.flat.clone()
    case.backward(case.forward()[1], into)  # the next micro-batch: they add up
    torch.testing.assert_close(into.flat, once * 2, rtol=2 * TOLERANCE[dtype], atol=1e-30)
    case.env.keeping = False  # as in a pass that is made again: the same bits
    assert torch.equal(case.forward()[0], result)


@pytest.mark.parametrize("block", [*OWN, Recurrent])
def test_what_is_kept_for_backward_is_what_tensors_without_values_say(block):
    case = Case(block, torch.float32)
    case.forward()  # makes the module
    with PeakMemory() as memory:
        result, kept = case.forward()
        result + 1  # the last operation: what has died until then is subtracted
    assert memory.live == case.x.nbytes + 2 * result.nbytes + case.op.keeps, kept
    case.env.keeping = False  # then not even the weights, which ZeRO-3 gathers again
    case.forward()
    gone = [weakref.ref(w.untyped_storage()) for w in case.weights.values()]
    case.weights.clear()
    assert not any(storage() for storage in gone)


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


def test_what_a_module_saves_of_its_weights_is_their_place():
    """So a unit that ZeRO-3 gathered for forward can go, and backward computes with another one,
    wherever they begin.
    """
    case = Case(Own, torch.float64)
    once, again = case.flat(), case.flat()
    result, kept = case.forward()
    expected = case.backward(kept, once)
    close(expected, case.by_autograd()[1], 1e-12, "gradient of the input")
    case.weights = moved(case.weights, 1)
    found, kept = case.forward()
    assert torch.equal(found, result)
    assert not storages(list(case.weights.values())) & storages(kept)
    before, case.weights = case.weights, moved(case.weights, 2)
    gone = [weakref.ref(w.untyped_storage()) for w in before.values()]
    before.clear()
    assert not any(storage() for storage in gone)
    assert torch.equal(case.backward(kept, again), expected) and torch.equal(again.flat, once.flat)
    case.env.keeping = False
    assert torch.equal(case.forward()[0], result)


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


def turns(self, x):
    weight = torch.view_as_complex(self.mix.weight.view(-1, 2)).view(12, 6)
    return x + (x[..., :6] @ weight.mH.real.view(6, 12)) + (x @ weight).abs().sum(-1, True)


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
    "its shapes do not fit": (computing(lambda self, x: x @ x), "RuntimeError: Expected size"),
    "it depends on values": (computing(lambda self, x: x * bool(x.sum() > 0)), "without values"),
    "it changes a buffer": (lambda spec: nn.BatchNorm1d(spec.seq_len), "changes a buffer"),
    "it replaces a buffer": (computing(replaces, Own), "changes a buffer"),
    "it counts": (computing(counts, calls=0), "changes calls"),
    "it collects": (Collecting, "changes mix.seen"),
    "it draws with Python": (computing(lambda self, x: x * random.random()), "with random, "),
    "it draws with NumPy": (computing(lambda self, x: x * np.random.rand()), "numpy.random"),
    "it keeps a tensor": (computing(keeps), "its attribute last is a tensor"),
    "it changes what backward needs": (computing(adds_in_place), r"in place .* \(2, 6, 12\)"),
    "it views a weight as complex": (computing(turns), "the weight mix.weight in another type"),
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
def test_a_block_that_cannot_be_trained_is_refused(why, caplog):
    block, said = REFUSED[why]
    refuses(f"block=(.|\n)*{said}", lambda: pl.Plan().validate(SPEC.replace(block=block)))
    assert not caplog.records  # torch logs the traceback of an operation on fake tensors


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


def test_buffers_in_one_storage_count_once():
    def viewed(spec):
        block = nn.Linear(spec.hidden, spec.hidden)
        block.register_buffer("all", torch.ones(100))
        block.register_buffer("first", block.all[:50])
        return block

    assert compiled(SPEC.replace(block=viewed), pl.Plan()).model.ops[2].constant == 400


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
