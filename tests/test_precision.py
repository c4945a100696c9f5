"""16-bit weights with fp32 masters: what is lost without them, and what a loss scale is for.

That plans in 16 bits train what the reference trains is in test_programs_equal.py and, next to
all other settings, in test_composed.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import paralab as pl
from equality import TOLERANCE, worst
from paralab.instruments.recorder import Recorder
from paralab.interpret.flat import Flat
from paralab.interpret.run import DTYPES
from paralab.interpret.state import State
from paralab.interpret.train import Trainer
from paralab.programs.compile import compiled
from paralab.theory.needs import bytes_per_parameter
from stated import TIERS
from together import Trained, cases, named, reports

# Five blocks: neither two nor three stages divide them.
SPEC = pl.ModelSpec(layers=5, hidden=40, heads=4, seq_len=24, vocab=258)
LR = {"adamw": 1e-3, "sgd": 0.5}
TORCH = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}

Tensors = dict[str, torch.Tensor]


# ---- the states of one rank ----------------------------------------------------------------------
class Update:
    """What a rank keeps, and steps with given gradients."""

    def __init__(self, precision: str, optimizer: str = "sgd", clip_norm: float | None = None):
        plan, clips = pl.Plan(precision=precision), clip_norm is not None
        self.program = compiled(SPEC, plan, optimizer=optimizer, clips=clips)
        self.state = State(
            self.program, 0, lr=LR[optimizer], clip_norm=clip_norm, seed=0,
            recorder=Recorder(rank=0, world_size=1), device="cpu",
        )  # fmt: skip
        self.asks_for_norm = clips or precision == "fp16"

    def views(self, kind: str) -> Tensors:
        """The parameters that the model computes with, "w", or their masters, by name."""
        found: Tensors = {}
        for u, unit in enumerate(self.state.units):
            value = self.state.store[kind, u, 0]
            value = value if isinstance(value, Flat) else Flat(unit, value, self.program.model)
            found |= value.views
        return found

    @property
    def masters(self) -> Tensors:
        return self.views("master" if ("master", 0, 0) in self.state.store else "w")

    def step(self, gradients: Tensors) -> None:
        """One whose gradients, of a loss that is not scaled, are these."""
        state, grads, norm = self.state, {}, None
        for u, unit in enumerate(state.units):
            flat = torch.zeros(unit.numel, dtype=state.dtype)
            grads[u] = Flat(unit, flat, self.program.model)
            for name, view in grads[u].views.items():
                view.copy_(gradients[name] * state.scaled(1.0))
        state.begin()
        if self.asks_for_norm:
            norm = state.squares({u: grad.flat for u, grad in grads.items()})
        for u, grad in grads.items():
            state.update(u, grad, norm)
        if state.loss_scale is not None:
            state.rescale()

    def decided(self, norm: float, times: int) -> float:
        """The loss scale behind so many steps whose gradients have this norm."""
        for _ in range(times):
            self.state.begin()
            self.state.decided(torch.tensor([norm]))
            self.state.rescale()
        return self.state.loss_scale.item()


def drawn(seed: int) -> Tensors:
    """Gradients that neither 16 bits nor a scale of a power of two rounds."""
    draw = torch.Generator().manual_seed(seed)
    return {
        name: (0.01 * torch.randn(shape, generator=draw)).bfloat16().float()
        for name, shape in SPEC.parameter_shapes().items()
    }


@pytest.mark.parametrize("optimizer", LR)
@pytest.mark.parametrize("precision", DTYPES)
def test_masters_are_what_torchs_optimizer_trains_and_the_model_has_them_rounded(
    precision, optimizer
):
    update, plain = Update(precision, optimizer), pl.reference.GPT(SPEC)
    reference = TORCH[optimizer](plain.parameters(), lr=LR[optimizer], fused=True)
    for step in range(4):
        for name, expected in plain.named_parameters():
            assert torch.equal(update.masters[name], expected), (step, name)
            assert torch.equal(update.views("w")[name], expected.to(DTYPES[precision]))
        gradients = drawn(step)
        for name, parameter in plain.named_parameters():
            parameter.grad = gradients[name]
        reference.step()
        update.step(gradients)
    assert (("master", 0, 0) in update.state.store) == (precision != "fp32")


def test_an_update_in_16_bits_goes_through_every_tensor_once(monkeypatch):
    """A call for each unit: one for each tensor that goes through all grows as their square."""
    update, calls, plain = Update("bf16", "adamw"), [], torch._fused_adamw_

    def counted(tensors, *more, **how):
        calls.append(len(tensors))
        plain(tensors, *more, **how)

    monkeypatch.setattr(torch, "_fused_adamw_", counted)
    update.step(drawn(0))
    assert (len(calls), sum(calls)) == (len(update.state.units), len(SPEC.parameter_shapes()))


@pytest.mark.parametrize("precision", DTYPES)
def test_clipping_is_torchs_clipping_of_the_true_gradients(precision):
    update, plain, gradients = Update(precision, clip_norm=0.1), pl.reference.GPT(SPEC), drawn(0)
    for name, parameter in plain.named_parameters():
        parameter.grad = gradients[name].clone()
    assert torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1) > 1.0
    torch.optim.SGD(plain.parameters(), lr=LR["sgd"]).step()
    update.step(gradients)
    for name, expected in plain.named_parameters():
        torch.testing.assert_close(update.masters[name], expected.detach(), rtol=1e-5, atol=1e-7)
    calm, free = Update(precision, clip_norm=1e6), Update(precision)
    for unclipped in (calm, free):  # a norm below the limit changes no bit
        unclipped.step(gradients)
    assert all(torch.equal(master, calm.masters[name]) for name, master in free.masters.items())


# ---- loss scale ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "optimizer, bad, clip_norm",
    [("sgd", float("inf"), None), ("adamw", float("-inf"), 1.0), ("sgd", float("nan"), 1.0)],
)
def test_an_overflow_leaves_out_that_step_alone_and_halves_the_scale(optimizer, bad, clip_norm):
    update = Update("fp16", optimizer, clip_norm)
    store = update.state.store

    def kept() -> list[torch.Tensor]:
        moments = [t for u in range(len(update.state.units))
                   for some in store["opt", u, 0].values() for t in some]  # fmt: skip
        found = [*update.masters.values(), *update.views("w").values(), *moments]
        return [tensor.clone() for tensor in found]

    for step, scale in enumerate([2.0**16, 2.0**16, 2.0**15, 2.0**15]):
        assert update.state.loss_scale == scale
        gradients, before = drawn(step), kept()
        if step == 1:
            gradients["head.norm.weight"][3] = bad
        update.step(gradients)
        same = [torch.equal(a, b) for a, b in zip(before, kept(), strict=True)]
        assert all(same) if step == 1 else not any(same[: len(SPEC.parameter_shapes())])


def test_the_scale_doubles_after_2000_good_steps_in_a_row_up_to_a_ceiling():
    update = Update("fp16")
    for norm, times, value in [(1.0, 1000, 2.0**16), (torch.inf, 1, 2.0**15), (1.0, 1999, 2.0**15),
                               (1.0, 1, 2.0**16), (1.0, 1999, 2.0**16),
                               (1.0, 1, 2.0**17)]:  # fmt: skip
        assert update.decided(norm, times) == value
    update.state.loss_scale.fill_(2.0**24)
    assert update.decided(1.0, 2000) == 2.0**24


def test_the_scale_has_a_floor():
    """At 0 a finite gradient would be divided by 0, and 166 overflows in a row lead there."""
    update = Update("fp16")
    assert update.decided(torch.inf, 20) == 1.0
    update.step(drawn(1))
    assert all(torch.isfinite(master).all() for master in update.masters.values())


def test_steps_that_were_left_out_are_counted_and_said(text):
    plan = pl.Plan(precision="fp16", dp=2)
    overflow = {"steps": 6, "optimizer": "sgd", "lr": 1e30}  # after the first step all overflow
    report, good = reports([(SPEC, plan, overflow), (SPEC, plan, {"steps": 2})], text)
    assert report.meta["skipped_steps"] == 5 and report.meta["loss_scale"] == 2.0**11
    assert report.summary().loc["left out: a gradient overflowed", "value"] == 5
    assert good.meta["skipped_steps"] == 0
    assert "left out: a gradient overflowed" not in good.summary().index


def overflow_on_the_last_rank(group: Any, plan: pl.Plan, data: str) -> dict[str, list]:
    """Three steps; in the second a gradient of the last rank, and of no other, is infinite."""
    trainer = Trainer(group.context, SPEC, plan, optimizer="sgd", lr=0.5, data=data)
    state = trainer.state
    squares, kind = state.squares, "shard" if plan.zero_stage else "w"

    def spoiled(grads: dict[int, torch.Tensor], **how: Any) -> torch.Tensor:
        if step == 1 and group.index == group.size - 1:
            u, slices = list(state.counted.items())[-1]
            grads[u][slices[-1].start] = torch.inf
        return squares(grads, **how)

    def kept() -> list[torch.Tensor]:
        found = [state.store[kind, u, 0] for u in range(len(state.units))]
        return [getattr(value, "flat", value).clone() for value in found]

    state.squares = spoiled
    found: dict[str, list] = {"scales": [], "changed": []}
    for step in range(3):
        before = kept()
        trainer.step(step)
        found["changed"].append(not all(map(torch.equal, before, kept())))
        found["scales"].append(state.loss_scale.item())
    calls = trainer.recorder.tables()["collectives"]
    rows = zip(calls["phase"], calls["step"], calls["op"], calls["payload_bytes"], strict=True)
    return {**found, "calls": [row[1:] for row in rows if row[0] == "control"]}


@pytest.mark.parametrize("plan", [{"dp": 3, "zero_stage": 1}, {"pp": 3, "microbatches": 2},
                                  {"tp": 2}], ids=str)  # fmt: skip
def test_an_overflow_on_one_rank_skips_the_step_on_all_with_one_scalar_sent(text, plan):
    plan = pl.Plan(precision="fp16", **plan)
    found = pl.trace(overflow_on_the_last_rank, plan.world_size, (plan, str(text))).results
    shared = {"scales": [2.0**16, 2.0**15, 2.0**15], "changed": [True, False, True],
              "calls": [(step, "all_reduce", 4) for step in range(3)]}  # fmt: skip
    assert found == [shared] * plan.world_size


# ---- added up ------------------------------------------------------------------------------------
WIDE = cases("""
    dp=4 bucket_bytes=20000
    dp=2 microbatches=2 grad_sync=naive
    dp=2 microbatches=2 zero_stage=2 bucket_bytes=20000
    dp=2 microbatches=2 zero_stage=3 offload=cpu
    dp=4 shard=2 zero_stage=1
    pp=2 dp=2 microbatches=2 zero_stage=1
    pp=2 microbatches=4 schedule=zb-h1
""", precision="bf16", grad_dtype="fp32", steps=1)  # fmt: skip
WIDE += cases("dp=2 microbatches=2 zero_stage=2", precision="fp16", grad_dtype="fp32", steps=1)


@pytest.fixture(scope="module")
def trained(text) -> Trained:
    return Trained(WIDE, text)


@named(WIDE)
def test_gradients_added_up_in_fp32_are_one_processs_to_fp32s_rounding(trained, one):
    """Where ranks see other samples but compute the same products, only the sum can differ."""
    plan = pl.Plan(microbatches=4, precision=one.plan.precision, grad_dtype="fp32")
    alone = one._replace(name="on one device", plan=plan)
    gap, tensor = worst(trained[alone].gradients, trained[one].gradients)
    assert gap <= TOLERANCE["fp32"], tensor


def test_a_parameter_takes_16_or_18_bytes_by_the_plans_recipe():
    ways = {None: "zero-fp16", "fp32": "megatron-bf16"}
    sent = []
    for way, recipe in ways.items():
        report = pl.predict(SPEC, pl.Plan(dp=2, precision="bf16", grad_dtype=way), TIERS)
        most = report.memory.groupby("category")["bytes"].max()
        states = sum(most[name] for name in ("parameters", "gradients", "optimizer"))
        states -= 4 * len(SPEC.parameter_shapes())  # AdamW's steps
        assert states == bytes_per_parameter(recipe) * SPEC.num_params
        sent.append(report.traffic()["bytes"].sum())
    assert sent[1] == 2 * sent[0]
