"""`pl.reference`: the plain GPT that plans are held against, its batches, optimizer and loop."""

from __future__ import annotations

import functools
import math
import re
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import paralab as pl
from equality import worst
from paralab.experiment import DEFAULT_LR
from paralab.model import draws, reference
from paralab.programs.skeleton import stage_parts
from refusals import refuses
from test_programs_equal import Mixer  # draws when it is made and when it runs

SPEC = pl.ModelSpec(layers=2, hidden=32, heads=4, seq_len=16)
DROPPED = SPEC.replace(dropout=0.4)


def batch(spec: pl.ModelSpec = SPEC, samples: int = 3):
    draw = torch.Generator().manual_seed(0)
    text = torch.randint(spec.vocab, (samples, spec.seq_len + 1), generator=draw)
    return text[:, :-1], text[:, 1:]


# ---- the model -----------------------------------------------------------------------------------
def test_parameters_are_the_ones_the_description_lists_in_order():
    for spec in (SPEC, SPEC.replace(tied=False)):
        built = {name: tuple(p.shape) for name, p in pl.reference.GPT(spec).named_parameters()}
        assert list(built.items()) == list(spec.parameter_shapes().items())


def test_initial_weights_follow_gpt2s_rule_and_each_from_its_own_seed():
    gpt = dict(pl.reference.GPT(SPEC.replace(hidden=128), seed=7).named_parameters())
    deep = 0.02 / math.sqrt(2 * SPEC.layers)
    for name, deviation in (("mlp.up", 0.02), ("mlp.down", deep), ("attention.proj", deep)):
        weight = gpt[f"blocks.1.{name}.weight"]
        assert weight.std().item() == pytest.approx(deviation, rel=0.05)
        assert not gpt[f"blocks.1.{name}.bias"].any()
    assert gpt["blocks.0.norm1.weight"].eq(1).all()
    other = dict(pl.reference.GPT(SPEC.replace(hidden=128), seed=8).named_parameters())
    assert not torch.equal(other["embedding.token.weight"], gpt["embedding.token.weight"])


def test_making_a_model_leaves_the_callers_random_numbers_alone():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    pl.reference.GPT(DROPPED.replace(block=Mixer))(*batch())
    assert torch.equal(torch.rand(3), expected)


def test_a_fresh_model_knows_nothing_and_no_token_sees_the_future():
    gpt, (tokens, targets) = pl.reference.GPT(SPEC), batch()
    assert gpt(tokens, targets).item() == pytest.approx(math.log(256), abs=0.05)
    changed = tokens.clone()
    changed[:, 9:] = 1
    x, y = gpt.embedding(tokens), gpt.embedding(changed)
    for block in gpt.blocks:
        x, y = block(x), block(y)
    torch.testing.assert_close(x[:, :9], y[:, :9])
    assert not torch.allclose(x[:, 9:], y[:, 9:])


def test_explicit_and_fused_attention_agree():
    specs = [SPEC.replace(attention=kind) for kind in ("explicit", "sdpa")]
    losses = [pl.reference.GPT(spec)(*batch()) for spec in specs]
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)


def test_the_loss_is_in_fp32_whatever_the_precision():
    for dtype in reference.DTYPES.values():
        assert pl.reference.GPT(SPEC).to(dtype)(*batch()).dtype is torch.float32


# ---- dropout -------------------------------------------------------------------------------------
@pytest.mark.parametrize("attention", ["explicit", "sdpa"])
def test_a_mask_follows_from_step_and_microbatch_and_calls_go_through_them(attention):
    spec = DROPPED.replace(attention=attention)
    gpt, given = pl.reference.GPT(spec), batch()
    first = gpt(*given).item()
    gpt.at(0)
    assert gpt(*given).item() == first
    gpt.at(3)
    row = [gpt(*given).item() for _ in range(3)]
    assert len(set(row)) == 3
    gpt.at(3, microbatch=1)
    assert gpt(*given).item() == row[1]
    gpt.at(4, microbatch=1)
    assert gpt(*given).item() != row[1]
    gpt.eval()
    assert gpt(*given).item() == pl.reference.GPT(spec.replace(dropout=0.0))(*given).item()


def test_a_block_computed_again_in_backward_drops_the_same():
    found = []
    for again in (False, True):
        gpt, given = pl.reference.GPT(DROPPED), batch()
        for block in gpt.blocks if again else ():
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        gpt(*given)
        gpt(*given).backward()  # the second micro-batch
        found.append(gpt.embedding.token.weight.grad)
    assert torch.equal(*found)


def test_dropout_keeps_the_mean():
    gpt = pl.reference.GPT(DROPPED)
    ones = torch.ones(200, 16, 32)
    dropped = gpt.embedding.dropout(ones)
    assert dropped.unique().tolist() == pytest.approx([0.0, 1 / 0.6])
    assert dropped.mean().item() == pytest.approx(1.0, abs=0.02)
    seed = draws.mask_seed(0, 0, 0, "embedding")
    assert torch.equal(dropped > 0, draws.mask(ones.shape, 0.4, seed=seed, device="cpu"))


def test_a_block_of_ones_own_starts_from_values_drawn_by_name():
    spec = DROPPED.replace(block=Mixer)
    gpt = pl.reference.GPT(spec)
    named = dict(gpt.named_parameters())
    assert {n: tuple(p.shape) for n, p in named.items()} == spec.parameter_shapes()
    assert named["blocks.0.ln.weight"].eq(1).all() and not named["blocks.0.gate.bias"].any()
    assert named["blocks.1.gate.weight"].std().item() == pytest.approx(0.02, rel=0.1)
    assert not torch.equal(gpt.blocks[0].noise, gpt.blocks[1].noise)
    again, given = pl.reference.GPT(spec), batch()
    assert gpt(*given).item() == again(*given).item() != gpt(*given).item()


# ---- batches and the optimizer -------------------------------------------------------------------
def test_one_rank_gets_what_several_get_together(text):
    given = {"step": 3, "microbatch_size": 2, "data": text, "seed": 5}
    whole = pl.reference.batches(SPEC, microbatches=6, **given)
    parts = []
    for rank in range(3):
        parts += pl.reference.batches(SPEC, microbatches=2, rank=rank, ranks=3, **given)
    assert len(whole) == len(parts) == 6
    for (a, b), (c, d) in zip(whole, parts, strict=True):
        assert torch.equal(a, c) and torch.equal(b, d) and a.shape == (2, 16)
        assert torch.equal(a[:, 1:], b[:, :-1])  # each byte's target is the byte after it
    other = pl.reference.batches(SPEC, microbatches=6, **{**given, "step": 4})
    assert not torch.equal(other[0][0], whole[0][0])


def test_a_training_keeps_its_text_whatever_becomes_of_the_path(tmp_path, monkeypatch):
    def trained():
        return pl.reference.train(SPEC, steps=2, data="t.txt")

    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.txt").write_bytes(bytes(range(1, 128)))
    expected, steps = [step.loss for step in trained()], trained()
    found = [next(steps).loss, next(steps).loss]
    (tmp_path / "t.txt").write_bytes(bytes(range(1, 128)) * 9)
    monkeypatch.chdir(tmp_path.parent)
    assert [*found, *(step.loss for step in steps)] == expected


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_the_defaults_are_those_of_a_run(run, optimizer):
    """Steps, micro-batches, text, seed, and the learning rate, on which later losses depend."""
    report = run(SPEC, optimizer=optimizer, data=None)
    found = list(pl.reference.train(SPEC, optimizer=optimizer))
    assert [step.loss for step in found[1:]] == pytest.approx(report.losses, rel=2e-6)
    assert reference.DEFAULT_LR == DEFAULT_LR


def test_what_no_batch_or_optimizer_can_be_is_refused():
    refuses(r"vocab=100.*256 or more", pl.reference.batches, SPEC.replace(vocab=100), step=0)
    refuses(r"rank=2.*0 to 1", pl.reference.batches, SPEC, step=0, rank=2, ranks=2)
    refuses("optimizer='adam'", pl.reference.optimizer, [], "adam")
    refuses("precision='fp8'", pl.reference.train, SPEC, precision="fp8")
    wrong = {"steps": "4", "microbatches": 0, "microbatch_size": 2.0, "seed": -1}
    for name, value in wrong.items():
        refuses(f"{name}={value!r}.*; legal: ", pl.reference.train, SPEC, **{name: value})
    refuses("lr='fast': not a number", pl.reference.train, SPEC, lr="fast")
    refuses("data='nowhere': there is no such file", pl.reference.train, SPEC, data="nowhere")
    for clip_norm, why in ((0, "out of range"), ([1, 2], "2 numbers for 3 steps")):
        words = re.escape(f"clip_norm={clip_norm}: {why}")
        refuses(words, pl.reference.train, SPEC, steps=3, clip_norm=clip_norm)


def test_a_training_of_any_length_keeps_nothing_for_its_steps():
    steps = pl.reference.train(SPEC, steps=2**40, clip_norm=1.0)
    assert next(steps).loss == 0.0 and next(steps).loss > 1.0


# ---- the loop ------------------------------------------------------------------------------------
def test_training_is_the_plain_loop(text):
    gpt = pl.reference.GPT(SPEC)
    update, losses = torch.optim.SGD(gpt.parameters(), lr=0.5), []
    for step in range(3):
        update.zero_grad()
        given = pl.reference.batches(SPEC, step=step, microbatches=2, data=text)
        found = [gpt(*pair) for pair in given]
        (sum(found) / 2).backward()
        losses.append(sum(loss.item() for loss in found) / 2)
        update.step()
    given = {"steps": 3, "microbatches": 2, "optimizer": "sgd", "lr": 0.5, "data": text}
    got = list(pl.reference.train(SPEC, **given))
    assert [step.loss for step in got[1:]] == pytest.approx(losses, rel=1e-6)
    named = dict(gpt.named_parameters())
    assert worst({n: p.detach().numpy() for n, p in named.items()}, got[-1].weights)[0] < 1e-6
    assert worst({n: p.grad.numpy() for n, p in named.items()}, got[-1].gradients)[0] < 1e-5


def test_clipping_shrinks_the_update_and_not_the_gradients(text):
    given = {"steps": 2, "optimizer": "sgd", "lr": 1.0, "data": text}
    free = list(pl.reference.train(SPEC, **given))
    for clip_norm in (0.01, (0.01, 1e9)):
        clipped = list(pl.reference.train(SPEC, clip_norm=clip_norm, **given))
        assert worst(free[1].gradients, clipped[1].gradients)[0] == 0
        assert worst(free[0].weights, clipped[0].weights)[0] == 0
        moved = [
            math.sqrt(sum(np.square(after[n] - before[n]).sum() for n in before))
            for before, after in pairwise(step.weights for step in clipped)
        ]
        assert moved[0] == pytest.approx(0.01, rel=1e-3)
        assert (moved[1] > 0.1) == isinstance(clip_norm, tuple)


@pytest.mark.parametrize(("precision", "lr"), [("bf16", 1e-3), ("fp16", 1e-4)])
def test_in_16_bits_updates_that_rounding_would_lose_add_up(text, precision, lr):
    """The numbers next to 1 are 0.996 in bf16 and 0.9995 in fp16; AdamW's first steps are lr."""
    given = {"lr": lr, "data": text, "precision": precision}
    norm = "head.norm.weight"  # begins at 1
    for steps, moves in ((1, False), (12, True)):
        *_, last = pl.reference.train(SPEC, steps=steps, **given)
        assert (last.weights[norm] != 1).any() == moves


def test_a_step_that_overflows_in_fp16_is_left_out_and_the_scale_halved(text, monkeypatch):
    monkeypatch.setattr(reference, "FIRST_SCALE", 2.0**40)
    given = {"precision": "fp16", "optimizer": "sgd", "data": text}
    start, after, *_, late = pl.reference.train(SPEC, steps=25, lr=0.5, **given)
    assert worst(start.weights, after.weights)[0] == 0
    assert worst(start.weights, late.weights)[0] > 0
    assert all(np.isfinite(g).all() for g in late.gradients.values())


def test_stages_one_after_the_other_are_the_model_cut_as_a_plan_cuts_it():
    spec = SPEC.replace(layers=4, tied=False)
    tokens, targets = batch(spec)
    whole = reference.GPT(spec, seed=3)
    for count in (1, 2, 3):
        stages, x = [reference.Stage(spec, i, count, seed=3) for i in range(count)], tokens
        for parts, stage in zip(stage_parts(spec, pl.Plan(pp=count)), stages, strict=True):
            names = {name for name, _ in stage.named_parameters()}
            assert names == {n for n in spec.parameter_shapes() if n.startswith(parts)}
        for stage in stages[:-1]:
            x = stage(x)
        assert torch.equal(stages[-1](x, targets), whole(tokens, targets))
        found = {name: p for stage in stages for name, p in stage.named_parameters()}
        assert found.keys() == dict(whole.named_parameters()).keys()
        assert all(torch.equal(found[name], p) for name, p in whole.named_parameters())
    for change, words in (({"tied": True}, "tied=False"), ({"dropout": 0.1}, "dropout=0.0")):
        refuses(words, reference.Stage, spec.replace(**change), 0, 2)
    refused = {(2, 2): "index=2.*0 to 1", (0, 5): "count=5.*1 to 4", (0, 0): "count=0.*1 to 4"}
    for (index, count), words in refused.items():
        refuses(words, reference.Stage, spec, index, count)
