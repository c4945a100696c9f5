"""16-bit weights with fp32 masters: what is lost without them, and what a loss scale is for."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import paralab as pl
from paralab.grid import Grid
from paralab.launch import launch_program
from paralab.model import GPT
from paralab.observe.recorder import Recorder
from paralab.parallel.precision import DTYPES, LossScale, Update, lower

SPEC = pl.ModelSpec(layers=2, hidden=40, heads=4, seq_len=24, vocab=257)
SIXTEEN = ("bf16", "fp16")
LR = 1e-3
# Largest difference of a loss from fp32's, relative: units in the last place of the precision are
# 2**-8 and 2**-11, and a loss is a mean over many tokens of what rounds independently.
LOSS_TOLERANCE = {"bf16": 3e-3, "fp16": 5e-4}
GRADIENT_TOLERANCE = {"bf16": 0.04, "fp16": 0.005}  # relative to the gradient's norm, per tensor

adamw = functools.partial(torch.optim.AdamW, lr=LR, fused=True)
sgd = functools.partial(torch.optim.SGD, lr=0.5, fused=True)


def batch(spec: pl.ModelSpec, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    text = torch.randint(spec.vocab, (2, spec.seq_len + 1), generator=draw)
    return text[:, :-1], text[:, 1:]


def build(
    precision: str, make: Any = adamw, spec: pl.ModelSpec = SPEC, **settings: Any
) -> tuple[GPT, Update]:
    gpt = GPT(spec)
    parameters = list(gpt.parameters())
    masters = lower(parameters, precision)
    return gpt, Update(parameters, make, precision=precision, masters=masters, **settings)


def train(
    gpt: GPT, update: Update, *, steps: int = 5, spec: pl.ModelSpec = SPEC, **clip: Any
) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = gpt(*batch(spec, seed=0))
        update.scale(loss).backward()
        update.step(**clip)
        gpt.zero_grad()
        losses.append(loss.item())
    return losses


# ---- fp32: nothing is added ----------------------------------------------------------------------
def test_fp32_is_the_plain_optimizer_bit_for_bit():
    gpt, update = build("fp32")
    plain = GPT(SPEC)
    optimizer = adamw(plain.parameters())
    losses = []
    for _ in range(5):
        loss = plain(*batch(SPEC, seed=0))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert train(gpt, update) == losses
    for mine, theirs in zip(gpt.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_fp32_copies_nothing():
    gpt, update = build("fp32")
    assert all(m is p for m, p in zip(update.masters, gpt.parameters(), strict=True))
    loss = gpt(*batch(SPEC, seed=0))
    assert update.scale(loss) is loss
    loss.backward()
    gradient = next(gpt.parameters()).grad
    assert update.unscaled(gradient) is gradient


@pytest.mark.parametrize("precision", DTYPES)
def test_clipping_is_torchs_clipping_of_the_true_gradients(precision):
    gpt, update = build(precision, sgd)
    other = GPT(SPEC)
    update.scale(gpt(*batch(SPEC, seed=0))).backward()
    for p, q in zip(gpt.parameters(), other.parameters(), strict=True):
        q.grad = update.unscaled(p.grad)
    torch.nn.utils.clip_grad_norm_(other.parameters(), 0.1)
    torch.optim.SGD(other.parameters(), lr=0.5).step()
    update.step(clip_norm=0.1)
    for master, expected in zip(update.masters, other.parameters(), strict=True):
        torch.testing.assert_close(master, expected.detach(), rtol=1e-5, atol=1e-7)


def test_a_norm_below_the_limit_changes_no_bit():
    (calm, one), (free, two) = build("fp32"), build("fp32")
    assert train(calm, one, clip_norm=1e6) == train(free, two)


# ---- 16 bits -------------------------------------------------------------------------------------
@pytest.mark.parametrize("change", [{}, {"attention": "sdpa"}, {"dropout": 0.1}, {"tied": False}])
@pytest.mark.parametrize("precision", SIXTEEN)
def test_losses_follow_fp32(precision, change):
    spec = SPEC.replace(**change)
    losses = {}
    for kind in ("fp32", precision):
        torch.manual_seed(3)
        losses[kind] = train(*build(kind, spec=spec), spec=spec)
    assert losses["fp32"][-1] < losses["fp32"][0] - 0.1
    for a, b in zip(losses["fp32"], losses[precision], strict=True):
        assert abs(a - b) <= LOSS_TOLERANCE[precision] * a


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("precision", SIXTEEN)
def test_gradients_are_fp32s_within_rounding(precision, recompute):
    expected = GPT(SPEC)
    expected(*batch(SPEC, seed=0)).backward()
    gpt = GPT(SPEC, recompute=recompute)
    update = Update(list(gpt.parameters()), sgd, precision=precision,
                    masters=lower(gpt.parameters(), precision))  # fmt: skip
    update.scale(gpt(*batch(SPEC, seed=0))).backward()
    for (name, p), q in zip(gpt.named_parameters(), expected.parameters(), strict=True):
        assert p.grad.dtype == p.dtype == DTYPES[precision]
        gap = (update.unscaled(p.grad) - q.grad).norm() / q.grad.norm()
        assert gap <= GRADIENT_TOLERANCE[precision], name


@pytest.mark.parametrize("precision", SIXTEEN)
def test_masters_start_from_the_unrounded_weights_and_the_model_from_the_rounded(precision):
    gpt, update = build(precision)
    for p, master, drawn in zip(
        gpt.parameters(), update.masters, GPT(SPEC).parameters(), strict=True
    ):
        assert torch.equal(master, drawn) and master.dtype == torch.float32
        assert torch.equal(p, drawn.to(DTYPES[precision]))
    train(gpt, update)
    differ = 0
    for p, master in zip(gpt.parameters(), update.masters, strict=True):
        assert torch.equal(p, master.to(p.dtype))
        differ += (p.float() != master).sum().item()
    assert differ > 0.8 * SPEC.num_params


@pytest.mark.parametrize("precision", SIXTEEN)
def test_an_update_below_the_last_place_is_lost_without_masters(precision):
    weight, gradient = torch.ones(8), torch.full((8,), 1e-4)
    alone = weight.to(DTYPES[precision])
    target = alone.clone()
    update = Update([target], sgd, precision=precision)
    for _ in range(100):
        alone -= 0.5 * gradient.to(alone.dtype)
        target.grad = update.scale(gradient).to(target.dtype)
        update.step()
    assert torch.equal(alone, weight.to(alone.dtype))
    torch.testing.assert_close(target.float(), weight - 0.005, rtol=2**-8, atol=0)
    assert not torch.equal(target, alone)
    torch.testing.assert_close(update.masters[0], weight - 0.005, rtol=1e-4, atol=0)


@pytest.mark.parametrize("precision", SIXTEEN)
def test_a_parameter_takes_2_and_2_and_12_bytes(precision):
    gpt, update = build(precision)
    update.scale(gpt(*batch(SPEC, seed=0))).backward()
    parameters = list(gpt.parameters())
    psi = SPEC.num_params
    assert sum(p.nbytes for p in parameters) == 2 * psi
    assert sum(p.grad.nbytes for p in parameters) == 2 * psi
    update.step()
    assert sum(t.nbytes for t in update.states) == 12 * psi + 4 * len(parameters)
    assert all(p.grad is None for p in parameters)


@pytest.mark.parametrize("precision", SIXTEEN)
def test_no_more_than_one_gradient_is_in_fp32_at_a_time(precision):
    gpt, update = build(precision)
    update.scale(gpt(*batch(SPEC, seed=0))).backward()
    seen = []

    def look(*args: object) -> None:
        seen.append(([m.grad is not None for m in update.masters].count(True),
                     [t.grad is not None for t in update.targets].count(True)))  # fmt: skip

    update.optimizer.register_step_pre_hook(look)
    update.step()
    n = len(update.targets)
    assert seen == [(1, n - 1 - i) for i in range(n)]


# ---- loss scale ----------------------------------------------------------------------------------
def test_small_gradients_survive_fp16_only_scaled():
    gradient = torch.full((4,), 1e-8)
    assert not gradient.half().any()
    target = torch.ones(4, dtype=torch.float16)
    update = Update([target], sgd, precision="fp16")
    target.grad = update.scale(gradient).half()
    torch.testing.assert_close(update.unscaled(target.grad), gradient, rtol=1e-3, atol=0)


@pytest.mark.parametrize("clip", [{}, {"clip_norm": 1.0}])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("make", [adamw, sgd])
def test_an_overflow_leaves_out_that_step_alone_and_halves_the_scale(make, bad, clip):
    gpt, update = build("fp16", make)
    steps = [2.0**16, 2.0**16, 2.0**15, 2.0**15]
    for step, scale in enumerate(steps):
        assert update.loss_scale.value.item() == scale
        before = [t.clone() for t in (*update.states, *gpt.parameters())]
        update.scale(gpt(*batch(SPEC, seed=0))).backward()
        if step == 1:
            gpt.head.norm.weight.grad[3] = bad
        update.step(**clip)
        after = [*update.states, *gpt.parameters()]
        same = [torch.equal(a, b) for a, b in zip(before, after, strict=False)]
        if step == 1:
            assert all(same)
        elif step > 0:
            assert sum(same) < 3


def test_the_scale_doubles_after_2000_good_steps_in_a_row():
    scale = LossScale(torch.device("cpu"))
    good, bad = torch.zeros(()), torch.ones(())
    for verdict, times, value in [(good, 1000, 2.0**16), (bad, 1, 2.0**15), (good, 1999, 2.0**15),
                                  (good, 1, 2.0**16), (good, 1999, 2.0**16),
                                  (good, 1, 2.0**17)]:  # fmt: skip
        for _ in range(times):
            scale.adapt(verdict)
        assert scale.value.item() == value


def overflow_on_one_rank(context: Any, precision: str, clip: float | None) -> dict[str, Any]:
    """Every rank updates its own part, as ZeRO has it; in step 1 the last rank's overflows."""
    plan = pl.Plan(dp=3)
    recorder = Recorder(rank=context.rank, world_size=3)
    group = Grid(plan, context, recorder).dp
    target = torch.ones(5, dtype=DTYPES[precision])
    update = Update([target], sgd, precision=precision, groups=[group])
    masters, scales = [], []
    for step in range(3):
        gradient = torch.full((5,), 0.01 * (1 + context.rank))
        target.grad = update.scale(gradient).to(target.dtype)
        if step == 1 and context.rank == 2:
            target.grad[0] = float("inf")
        recorder.begin_step(step)
        update.step(clip_norm=clip)
        recorder.end_step()
        masters.append(update.masters[0].tolist())
        scales.append(update.loss_scale.value.item() if update.loss_scale else 1.0)
    calls = recorder.tables()["collectives"]
    return {"masters": masters, "scales": scales,
            "calls": list(zip(calls["step"], calls["op"], calls["phase"], calls["payload_bytes"],
                              strict=True))}  # fmt: skip


def test_an_overflow_on_one_rank_skips_the_step_on_all_with_one_scalar_sent():
    found = launch_program(overflow_on_one_rank, 3, ("fp16", None), timeout=60, device="cpu")
    for rank, part in enumerate(found):
        assert part["scales"] == [2.0**16, 2.0**15, 2.0**15]
        first, second, third = part["masters"]
        assert first == second != third
        assert third == pytest.approx([1 - 2 * 0.5 * 0.01 * (1 + rank)] * 5, rel=1e-5)
        assert part["calls"] == [(step, "all_reduce", "control", 4) for step in range(3)]


def test_the_norm_is_that_over_all_ranks_parts():
    found = launch_program(overflow_on_one_rank, 3, ("fp16", 0.01), timeout=60, device="cpu")
    norm = (5 * sum((0.01 * (1 + rank)) ** 2 for rank in range(3))) ** 0.5
    for rank, part in enumerate(found):
        update = 0.5 * 0.01 * (1 + rank) * 0.01 / norm
        assert part["masters"][0] == pytest.approx([1 - update] * 5, rel=1e-6)
        assert part["masters"][2] == pytest.approx([1 - 2 * update] * 5, rel=1e-6)
        assert len(part["calls"]) == 3


def sums(context: Any, precision: str) -> list[list[float]]:
    group = Grid(pl.Plan(dp=3), context, Recorder(rank=context.rank, world_size=3)).dp
    mine = torch.arange(6, dtype=DTYPES[precision]) + context.rank
    whole, part, gathered = mine.clone(), mine.new_empty(2), mine.new_empty(6)
    group.all_reduce(whole).wait()
    group.reduce_scatter(part, mine.clone()).wait()
    group.all_gather(gathered, part).wait()
    return [whole.tolist(), gathered.tolist()]


@pytest.mark.parametrize("precision", SIXTEEN)
def test_groups_move_and_add_16_bit_tensors(precision):
    for found in launch_program(sums, 3, (precision,), timeout=60, device="cpu"):
        assert found == [[3.0 * i + 3 for i in range(6)]] * 2
