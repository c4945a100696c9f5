"""Backward in two halves gives bitwise the gradients of the whole, and says when each is there."""

from __future__ import annotations

import pytest
import torch

import paralab as pl
from paralab.model import GPT, Layers
from paralab.parallel.split_backward import Linear, WeightHalves

SPEC = pl.ModelSpec(layers=2, hidden=40, heads=4, seq_len=24, vocab=257)


def batch(k: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(k)
    text = torch.randint(257, (2, 25), generator=draw)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def split(spec: pl.ModelSpec, **settings) -> tuple[GPT, WeightHalves]:
    halves = WeightHalves()
    layers = Layers(linear=lambda *sizes, **more: Linear(*sizes, halves=halves, **more))
    return GPT(spec, layers=layers, **settings), halves


@pytest.mark.parametrize("change", [{}, {"tied": False}, {"attention": "sdpa"}])
def test_gradients_are_bitwise_those_of_the_whole_backward(change):
    spec = SPEC.replace(**change)
    whole, (half, halves) = GPT(spec), split(spec)
    for k in range(3):
        whole(*batch(k)).backward()
    for k in range(3):  # all input halves first, the weight halves in order
        halves.collect(k)
        half(*batch(k)).backward()
    for k in range(3):
        halves.run(k, lambda parameter: None)
    for (name, a), b in zip(whole.named_parameters(), half.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name


def test_the_input_half_leaves_every_linear_gradient_to_the_weight_half():
    half, halves = split(SPEC.replace(tied=False))
    linear = {id(p) for m in half.modules() if isinstance(m, Linear) for p in m.parameters()}
    halves.collect(0)
    half(*batch(0)).backward()
    for name, parameter in half.named_parameters():
        assert (parameter.grad is None) == (id(parameter) in linear), name
    told = []
    halves.run(0, told.append)
    assert len(told) == len(linear) and {id(p) for p in told} == linear
    assert all(p.grad is not None for p in half.parameters())


def test_the_gradient_of_the_input_is_complete_after_the_input_half():
    parts = ("blocks.0", "blocks.1")
    whole, (half, halves) = GPT(SPEC, parts=parts), split(SPEC, parts=parts)
    x = torch.randn(2, 24, 40)
    seen = []
    for model in (whole, half):
        halves.collect(0)
        leaf = x.clone().requires_grad_()
        model(leaf).sum().backward()
        seen.append(leaf.grad)
    assert torch.equal(*seen)


def test_micro_batches_are_kept_apart_and_let_go_once_used():
    half, halves = split(SPEC)
    for k in (0, 1):
        halves.collect(k)
        half(*batch(k)).backward()
    halves.run(1, lambda parameter: None)
    only = half.blocks[0].mlp.up.weight.grad.clone()
    alone, others = split(SPEC)
    others.collect(1)
    alone(*batch(1)).backward()
    others.run(1, lambda parameter: None)
    assert torch.equal(only, alone.blocks[0].mlp.up.weight.grad)
    with pytest.raises(KeyError):
        halves.run(1, lambda parameter: None)
