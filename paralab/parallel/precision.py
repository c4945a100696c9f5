"""Mixed precision: compute and communicate in 16 bits, update a copy in 32.

bf16 has 8 bits of precision, fp16 has 11. An update of lr * gradient, a thousandth of the weight or
less, would be rounded away when added to a weight of so few bits. So the optimizer updates master
weights in fp32, and the model computes with their rounded values (Mixed Precision Training,
Micikevicius+ 2018, arXiv:1710.03740, sec. 3.1):

    target.grad (16 bits) -> master.grad (fp32) -> AdamW on the master -> target = rounded master

Memory per parameter, AdamW: 2 + 2 + 12 bytes, the 12 being master and two moments of 4 each (ZeRO,
Rajbhandari+ 2020, arXiv:1910.02054, sec. 3.1), and a step count of 4 for each tensor. Gradients
become fp32 one tensor at a time, so that no more than one such copy exists. Bytes on the wire: half
those of fp32. Where ZeRO shares the states out, the targets are this rank's shards.

fp16 has only 5 bits of exponent: below 2**-24 a gradient is zero. So the loss is multiplied by a
scale, and the gradients are divided by it in the update (sec. 3.2). The scale looks for its own
size: where a gradient overflows, the step is left out and the scale halved; after 2000 steps that
went well it doubles. bf16 has fp32's exponents and needs none of this.

Norm, scale and verdict are tensors on the device from beginning to end: nothing waits for a number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from paralab.comm import Group

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def lower(parameters: Iterable[Tensor], precision: str) -> list[Tensor]:
    """Round ``parameters`` in place; returns the fp32 tensors they were, to be masters.

    Before anything hangs on them: hooks and optimizers would go on with the old tensors.
    """
    parameters = list(parameters)
    before = [p.detach() for p in parameters]
    for p in parameters:
        p.data = p.data.to(DTYPES[precision])
    return before


class Update:
    """From gradients to new weights: unscale, clip, optimizer step, round.

    targets         what is trained: parameters, or ZeRO's flat shards of them. At `step` each has
                    its gradient, in its own dtype, in ``.grad``
    make_optimizer  given the tensors to update, a fused torch optimizer of them
    masters         fp32 values that the targets were rounded from; by default the targets' own. In
                    fp32 the targets are their own masters, and nothing is copied
    groups          those over which the model's targets are dealt out (a pipeline's ranks, ZeRO's
                    shards): the norm is taken and an overflow agreed over all of them
    counted         [(target, elements)]: what of the targets this rank counts in the norm, where
                    others count the rest: a tied embedding's copy, what tp ranks hold the same
    """

    def __init__(
        self, targets: Sequence[Tensor],
        make_optimizer: Callable[[Sequence[Tensor]], torch.optim.Optimizer], *,
        precision: str = "fp32", masters: Sequence[Tensor] | None = None,
        groups: Sequence[Group] = (), counted: Sequence[tuple[Tensor, slice]] | None = None,
    ) -> None:  # fmt: skip
        self.targets = self.masters = list(targets)
        if precision != "fp32":
            if masters is None:
                masters = [target.detach().float() for target in self.targets]
            self.masters = list(masters)
        self.optimizer = make_optimizer(self.masters)
        self.groups = [group for group in groups if group.size > 1]
        whole = [(target, slice(None)) for target in self.targets]
        self.counted = whole if counted is None else list(counted)
        self.loss_scale = LossScale(self.targets[0].device) if precision == "fp16" else None

    @property
    def states(self) -> list[Tensor]:
        """Every tensor kept from step to step beside the targets: masters, optimizer states."""
        kept = [t for state in self.optimizer.state.values() for t in state.values()]
        return kept if self.masters is self.targets else [*self.masters, *kept]

    def scale(self, loss: Tensor) -> Tensor:
        """What to differentiate instead of ``loss``."""
        return loss if self.loss_scale is None else loss * self.loss_scale.value

    def unscaled(self, gradient: Tensor) -> Tensor:
        """The true gradient, in fp32, of one that backward left."""
        gradient = gradient.float()
        return gradient if self.loss_scale is None else gradient / self.loss_scale.value

    @torch.no_grad()
    def step(self, *, clip_norm: float | None = None) -> None:
        """Update every target, its gradient scaled down so that the norm over the whole model is at
        most ``clip_norm``. 16-bit gradients are given back on the way; fp32's stay, for the
        caller to reset.
        """
        divisor, overflow = self.verdict(clip_norm)
        # Fused optimizers divide, and leave an overflowing step out, inside their one kernel.
        self.optimizer.grad_scale, self.optimizer.found_inf = divisor, overflow
        if self.masters is self.targets:
            self.optimizer.step()
        else:
            for target, master in zip(self.targets, self.masters, strict=True):
                gradient, target.grad = target.grad, None
                master.grad = gradient.float()
                del gradient
                self.optimizer.step()  # of this tensor alone: the others have no gradient
                master.grad = None
                target.copy_(master)
        if self.loss_scale is not None:
            self.loss_scale.adapt(overflow)

    def verdict(self, clip_norm: float | None) -> tuple[Tensor | None, Tensor | None]:
        """What to divide the gradients by, and whether one of them is not finite, 1.0 or 0.0."""
        divisor = overflow = None
        if clip_norm is not None or self.loss_scale is not None:
            norm = self.norm()
            if self.loss_scale is not None:
                overflow = 1.0 - torch.isfinite(norm).float()
                divisor = self.loss_scale.value
                norm = norm / divisor
            if clip_norm is not None:
                shrink = ((norm + 1e-6) / clip_norm).clamp(min=1.0)
                divisor = shrink if divisor is None else divisor * shrink
        return divisor, overflow

    def norm(self) -> Tensor:
        """L2 norm of the whole model's gradients as backward left them, added up in fp32, 0-d."""
        parts = [target.grad.reshape(-1)[where] for target, where in self.counted]
        norms = [torch.linalg.vector_norm(part, dtype=torch.float32) for part in parts]
        zero = torch.zeros((), device=self.targets[0].device)  # a rank may have nothing to count
        return self.over_groups(torch.stack([zero, *norms]))

    def over_groups(self, norms: Tensor) -> Tensor:
        """One norm of these and of what the other ranks have, 0-d."""
        squares = norms.square().sum()
        for group in self.groups:
            group.all_reduce(squares, phase="control").wait()
        return squares.sqrt()

    # ---- for checkpoints -------------------------------------------------------------------------
    def tensors_of(self, kept: Tensor) -> dict[str, Tensor]:
        """What is kept from step to step of a target, or of what is not trained: "weight", the
        optimizer's "exp_avg" and "exp_avg_sq", "master" in 16 bits. Filling them changes it.
        """
        master = next((m for t, m in zip(self.targets, self.masters, strict=True) if t is kept),
                      kept)  # fmt: skip
        found = {"weight": kept.detach(), **self.optimizer.state.get(master, {})}
        found.pop("step", None)
        return found if master is kept else {**found, "master": master}

    def counts(self) -> list[Tensor]:
        """Steps done, for each tensor the optimizer updates, 0-d."""
        return [state["step"] for state in self.optimizer.state.values()]

    @torch.no_grad()
    def refresh(self) -> None:
        """The masters were filled from elsewhere: round them."""
        for target, master in zip(self.targets, self.masters, strict=True):
            target.copy_(master)


class LossScale:
    """Dynamic loss scale: ``value``, a 0-d fp32 tensor."""

    START, DOUBLE_AFTER = 2.0**16, 2000

    def __init__(self, device: torch.device) -> None:
        self.value = torch.full((), self.START, device=device)
        self.good_steps = torch.zeros((), device=device)  # since the scale last changed

    def adapt(self, overflow: Tensor) -> None:
        """After a step; overflow: 1.0 if a gradient was not finite, else 0.0."""
        good = (self.good_steps + 1) * (1 - overflow)
        double = good == self.DOUBLE_AFTER
        grown = torch.where(double, self.value * 2, self.value)
        self.value.copy_(torch.where(overflow > 0, self.value / 2, grown))
        self.good_steps.copy_(torch.where(double, torch.zeros_like(good), good))
