"""What a rank keeps from step to step: parameters, optimizer states, loss scale; and the update.

All values that last from step to step are made here, and all of the optimizer's arithmetic is here.
AdamW has torch's defaults; plain SGD, w <- w - lr g, hides no wrong factor in a gradient. bf16 has
8 bits of precision and fp16 has 11, so an update below a 256th, or a 2048th, of the weight may be
rounded away. Therefore the optimizer updates master weights in fp32, and the model computes with
their rounded values (Micikevicius+ 2018, arXiv:1710.03740, sec. 3.1).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from paralab.interpret.flat import DTYPES, Flat, flat_of
from paralab.interpret.host import Host
from paralab.interpret.offloaded import Offloaded
from paralab.model.draws import initialize
from paralab.parallel.layouts import holding
from paralab.programs.instructions import Value
from paralab.programs.program import Program

# The arguments that torch.optim passes to its fused kernels. They are called directly, because
# torch.optim first groups the tensors by device and type: half as long as the update itself takes,
# and all tensors of a unit are alike.
_SGD = {"weight_decay": 0.0, "momentum": 0.0, "dampening": 0.0, "nesterov": False}
_SGD |= {"is_first_step": False, "maximize": False}
_ADAMW = {"beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8}
_ADAMW |= {"amsgrad": False, "maximize": False}
# The loss scale of fp16. At 1 nothing is scaled up, and a training that still overflows has
# diverged; above 2^24 doubling only finds the next overflow.
DOUBLE_AFTER, FIRST_SCALE, FLOOR, CEILING = 2000, 2.0**16, 1.0, 2.0**24

Tensors = list[Tensor]
States = dict[str, Tensors]
# (what to divide the gradients by; 1.0 if one is not finite and the step is skipped, else 0.0).
Verdict = tuple[Tensor | None, Tensor | None]


class Optimizer:
    """AdamW or SGD, as torch's fused kernels, on lists of tensors."""

    def __init__(self, name: str, lr: float) -> None:
        self.name, self.lr = name, lr

    def states(self, tensors: Tensors) -> States:
        """{"exp_avg", "exp_avg_sq", "step"}: for each a tensor per tensor that is updated."""
        if self.name == "sgd":
            return {}
        device = tensors[0].device
        return {
            "exp_avg": [torch.zeros_like(t) for t in tensors],
            "exp_avg_sq": [torch.zeros_like(t) for t in tensors],
            "step": [torch.zeros((), dtype=torch.float32, device=device) for _ in tensors],
        }

    def step(self, tensors: Tensors, grads: Tensors, states: States, verdict: Verdict) -> None:
        """Update in place."""
        divisor, overflow = verdict
        how = {"lr": self.lr, "grad_scale": divisor, "found_inf": overflow}
        if self.name == "sgd":
            torch._fused_sgd_(tensors, grads, [], **_SGD, **how)
            return
        moments, counts = (states["exp_avg"], states["exp_avg_sq"], []), states["step"]
        torch._foreach_add_(counts, 1)
        torch._fused_adamw_(tensors, grads, *moments, counts, **_ADAMW, **how)
        if overflow is not None:
            torch._foreach_sub_(counts, [overflow] * len(counts))


class State:
    """The values of one rank that last from step to step.

    rank    the global rank
    index   of the rank among those that share the states; ``tp``: in its tensor-parallel group
    host    its memory outside the device, if the plan offloads
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        *,
        lr: float,
        clip_norm: float | None,
        seed: int,
        recorder: Any,
        device: str,
        host: Host | None = None,
    ) -> None:
        plan, at = program.plan, program.plan.place(rank)
        self.program, self.pp, self.tp = program, at.pp, at.tp
        self.index = at.dp % program.shards
        self.optimizer = Optimizer(program.optimizer, lr)
        self.clip_norm, self.recorder = clip_norm, recorder
        self.device, self.dtype = device, DTYPES[plan.precision]
        self.units, self.zero = program.units[at.pp], plan.zero_stage
        # The kinds of values that an update reads and writes.
        self.summed, self.updated = ("gshard", "shard") if self.zero else ("grad", "w")
        self.seed, self.host = seed, host
        self.store: dict[Value, Any] = {}
        self.targets: list[list[Tensor]] = []  # by unit the fp32 tensors that the optimizer updates
        self.counted = program.counted(at.pp, self.index, at.tp)  # {unit: slices in the norm}
        self.offloaded: Offloaded | None = None
        if host is not None and plan.tiers.states:
            self.offloaded = Offloaded(program, host, self.store)
        self.shared = program.shared(at.pp, self.index)
        self.loss_scale = self.good_steps = self._share = divisor = overflow = None
        if plan.precision == "fp16":
            self.loss_scale = divisor = torch.full((), FIRST_SCALE, device=device)
            self.good_steps = torch.zeros((), device=device)  # steps since the scale last changed
            self._share, overflow = torch.zeros(2, device=device).unbind()
        if program.clips:
            divisor = torch.ones((), device=device)
        self._verdict, self._decided = (divisor, overflow), False
        scalars = (self.good_steps, self.loss_scale, divisor, overflow)
        recorder.owns("buffers", *(scalar for scalar in scalars if scalar is not None))
        own = functools.partial(holding, program.spec, plan, index=at.tp)
        cut = own if plan.tp > 1 else None
        fill = functools.partial(initialize, spec=program.spec, seed=seed, holding=cut)
        for u in range(len(self.units)):
            self._lay_out(u, fill)

    def _lay_out(self, u: int, fill: Any) -> None:
        """Make the unit's initial weights, this rank's shard, and its optimizer states."""
        unit, model, recorder = self.units[u], self.program.model, self.recorder
        n, size = self.program.shards, self.program.elements(unit)
        low = torch.zeros(size, dtype=self.dtype, device=self.device)
        recorder.owns("parameters", low)
        with recorder.unwatched():  # drawn in fp32 on the host, where a parameter is sliced
            whole = low if self.dtype == torch.float32 else torch.zeros(size)
            for name, view in Flat(unit, whole, model).views.items():
                fill(view, name=name)
            low.copy_(whole)
        mine = whole.chunk(n)[self.index]
        if self.offloaded is not None:
            self.offloaded.lay_out(u, low.chunk(n)[self.index], mine)
        elif low is not whole:
            with recorder.making("optimizer"):
                self.store["master", u, 0] = mine.to(self.device, copy=True)
        if self.zero < 3:
            self.store["w", u, 0] = Flat(unit, low, model)
        if self.zero and not (self.offloaded and self.offloaded.lives("shard")):
            shard = low.chunk(n)[self.index]
            self.store["shard", u, 0] = shard = shard.clone() if self.zero == 3 else shard
            recorder.owns("parameters", shard)
        if self.offloaded is None:
            kind = self.updated if low is whole else "master"
            self.targets.append(self.tensors(u, self.store[kind, u, 0]))
            with recorder.making("optimizer"):
                self.store["opt", u, 0] = self.optimizer.states(self.targets[u])

    def tensors(self, u: int, value: Any) -> list[Tensor]:
        """A unit's value as tensors: its parameters in their shapes; with ZeRO the flat shard."""
        if self.zero:
            return [flat_of(value)]
        if not isinstance(value, Flat):
            value = Flat(self.units[u], value, self.program.model)
        return list(value.views.values())

    def begin(self) -> None:
        """Begin a step: there is no verdict on its gradients yet."""
        self._decided = False

    def scaled(self, share: float) -> Any:
        """The factor of a micro-batch's loss: ``share``, in fp16 times the loss scale."""
        if self.loss_scale is None:
            return share
        return torch.mul(self.loss_scale, share, out=self._share)

    # ---- the update ------------------------------------------------------------------------------
    def update(self, u: int, grad: Any, norm: Tensor | None) -> None:
        """One optimizer step of unit ``u``."""
        verdict = self.decided(norm)
        grads = [g.float() for g in self.tensors(u, grad)]
        states = self.store["opt", u, 0]
        self.optimizer.step(self.targets[u], grads, states, verdict)
        if self.dtype != torch.float32:
            self.refresh(u)

    def refresh(self, u: int) -> None:
        """Round the master weights to the weights that the model computes with."""
        target = flat_of(self.store[self.updated, u, 0])
        target.copy_(self.store["master", u, 0])

    def squares(self, grads: dict[int, Tensor], *, from_host: bool = False) -> Tensor:
        """Sum of the squares of the gradients that this rank counts in the norm, in fp32, (1,).

        from_host  ``grads`` are norms that the host has computed, not gradients
        """
        if from_host:
            norms = [grads[u].to(self.device, non_blocking=True) for u in self.counted]
        else:
            norms = [norm for u in self.counted for norm in self.norms(u, grads[u])]
        zero = torch.zeros((), device=self.device)  # a rank may have nothing to count
        return torch.stack([zero, *norms]).square().sum().view(1)

    def norms(self, u: int, gradient: Tensor) -> list[Tensor]:
        """The norms of the slices of a unit's gradient that this rank counts, in fp32, 0-d each."""
        slices = self.counted.get(u, ())
        return [torch.linalg.vector_norm(gradient[at], dtype=torch.float32) for at in slices]

    def norm_of(self, u: int, gradient: Tensor) -> Tensor:
        """The norm of all these slices together; the host's own thread computes it."""
        norms = self.norms(u, gradient)
        if len(norms) == 1:
            return norms[0]
        zero = gradient.new_zeros((), dtype=torch.float32)  # a rank may have nothing to count
        return torch.linalg.vector_norm(torch.stack([zero, *norms]))

    def decided(self, norm: Tensor | None) -> Verdict:
        """The verdict on this step's gradients, decided once per step from `squares`' sum."""
        if norm is not None and not self._decided:
            self._decided = True
            for kept, new in zip(self._verdict, self.verdict(norm), strict=True):
                if kept is not new:
                    kept.copy_(new)
        return self._verdict

    def verdict(self, squares: Tensor) -> Verdict:
        """squares: the sum of the squares of all gradients, in fp16 of the scaled ones."""
        norm, divisor, overflow = squares.view(()).sqrt(), None, None
        if self.loss_scale is not None:
            overflow = 1.0 - torch.isfinite(norm).float()
            divisor = self.loss_scale
            norm = norm / divisor
        if self.clip_norm is not None:
            shrink = ((norm + 1e-6) / self.clip_norm).clamp(min=1.0)
            divisor = shrink if divisor is None else divisor * shrink
        return divisor, overflow

    def rescale(self) -> None:
        """fp16: halve the scale after an overflow, double it after many steps without."""
        overflow = self._verdict[1]
        good = (self.good_steps + 1) * (1 - overflow)
        double = good == DOUBLE_AFTER
        grown = torch.where(double, self.loss_scale * 2, self.loss_scale)
        scale = torch.where(overflow > 0, self.loss_scale / 2, grown)
        self.loss_scale.copy_(scale.clamp(FLOOR, CEILING))
        self.good_steps.copy_(torch.where(double, torch.zeros_like(good), good))

    def scaling(self) -> list[Tensor]:
        """In fp16 [1.0 if this step was skipped, the loss scale of the next step]; else []."""
        return [] if self.loss_scale is None else [self._verdict[1], self.loss_scale]

    def shared_parts(self, key: tuple[str, str]) -> list[Tensor]:
        """The views of this rank's gradients to be summed for ``key``: (axis, phase)."""
        views = []
        for share in self.shared.get(key, ()):
            flat = flat_of(self.store[self.summed, share.unit, 0])
            views.append(flat[share.start : share.start + share.count])
        return views

    # ---- for checkpoints -------------------------------------------------------------------------
    def kept(self, u: int, name: str, where: slice) -> dict[str, Tensor]:
        """{"weight", "exp_avg", "exp_avg_sq", "master" with 16-bit weights}: views of the part of
        a parameter that this rank keeps. Filling them changes the training.

        where  the elements, in the rank's part of the unit
        """
        views = {"weight": self.look(self.updated, u)}
        if self.offloaded is not None:
            views |= self.offloaded.states(u)
        elif ("master", u, 0) in self.store:
            views["master"] = self.store["master", u, 0]
        views = {kind: flat_of(value)[where] for kind, value in views.items()}
        if self.offloaded is None:
            number = 0 if self.zero else self.units[u].names.index(name)
            for kind, tensors in self.store["opt", u, 0].items():
                if kind != "step":
                    views[kind] = tensors[number].view(-1)[where if self.zero else slice(None)]
        return views

    def counters(self) -> dict[str, float]:
        """The optimizer's counters, which are the same for every parameter and on every rank."""
        counts = {count.item() for count in self._steps()}
        counters = {"optimizer_steps": counts.pop()} if counts else {}
        return counters | {name: kept.item() for name, kept in self._scale().items()}

    def restored(self, counters: Mapping[str, float]) -> None:
        """After the views of `kept` were filled: set the counters, and round the weights again."""
        for count in self._steps():
            count.fill_(counters["optimizer_steps"])
        for name, kept in self._scale().items():
            if name in counters:
                kept.fill_(counters[name])
        for u in range(len(self.units)):
            if self.offloaded is not None and self.offloaded.master:
                self.look("shard", u).copy_(self.offloaded.look("opt", u)[-1])
            elif self.offloaded is None and self.dtype != torch.float32:
                self.refresh(u)

    def _steps(self) -> list[Tensor]:
        """The step counts, 0-d, one for each tensor that the optimizer updates."""
        units = range(len(self.units))
        if self.offloaded is None:
            return [count for u in units for count in self.store["opt", u, 0].get("step", ())]
        return [self.store["host.count", u, 0] for u in units if self.optimizer.name == "adamw"]

    def _scale(self) -> dict[str, Tensor]:
        """{name in a checkpoint: fp16's loss scale, or the steps since it last changed}."""
        if self.loss_scale is None:
            return {}
        return {"loss_scale.value": self.loss_scale, "loss_scale.good_steps": self.good_steps}

    def look(self, kind: str, u: int) -> Any:
        """A state of a unit, on whatever tier; nothing may be in flight."""
        held = self.store.get((kind, u, 0))
        return self.offloaded.look(kind, u) if held is None else held

    def unscaled(self, gradient: Tensor) -> Tensor:
        """The true gradient, in fp32."""
        gradient = gradient.float()
        return gradient if self.loss_scale is None else gradient / self.loss_scale
