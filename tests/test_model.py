"""The model is the GPT its description says, and starts from the same weights in every layout."""

from __future__ import annotations

import pytest
import torch

import paralab as pl
from paralab.model import GPT, initialize

SPEC = pl.ModelSpec(layers=2, hidden=32, heads=4, seq_len=16)


def batch(spec: pl.ModelSpec, seed: int = 0):
    draw = torch.Generator().manual_seed(seed)
    text = torch.randint(spec.vocab, (3, spec.seq_len + 1), generator=draw)
    return text[:, :-1], text[:, 1:]


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_the_ones_the_description_lists_in_order(tied):
    spec = SPEC.replace(tied=tied)
    built = {name: tuple(p.shape) for name, p in GPT(spec).named_parameters()}
    assert list(built.items()) == list(spec.parameter_shapes().items())


def test_explicit_and_fused_attention_agree():
    losses = [GPT(SPEC.replace(attention=kind))(*batch(SPEC)) for kind in ("explicit", "sdpa")]
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)


def test_no_token_sees_the_future():
    model, (tokens, _) = GPT(SPEC), batch(SPEC)
    x = model.embedding(tokens)
    changed = tokens.clone()
    changed[:, 9:] = 1
    y = model.embedding(changed)
    for block in model.blocks:
        x, y = block(x), block(y)
    torch.testing.assert_close(x[:, :9], y[:, :9])
    assert not torch.allclose(x[:, 9:], y[:, 9:])


def test_a_fresh_model_knows_nothing():
    assert GPT(SPEC)(*batch(SPEC)).item() == pytest.approx(5.545, abs=0.05)  # ln 256


def test_any_parameter_can_be_drawn_without_the_others():
    whole = dict(GPT(SPEC, seed=7).named_parameters())
    name = "blocks.1.mlp.down.weight"
    alone = torch.empty(whole[name].shape)
    initialize(alone, name=name, spec=SPEC, seed=7)
    assert torch.equal(alone, whole[name])
    other = dict(GPT(SPEC, seed=8).named_parameters())
    assert not torch.equal(other[name], whole[name])
    deviation = 0.02 / (2 * SPEC.layers) ** 0.5
    assert alone.std().item() == pytest.approx(deviation, rel=0.05)
