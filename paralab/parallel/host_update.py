"""The update of offloaded states, made by the host's processor: offload.py's last third of a step.

A share passes through the host, unit by unit: its states are read from their file, if they are in
one, the host makes the AdamW step, the states are written behind it, and new parameters go where
they live. Two units' buffers take turns, so that the disk is at the next unit while the host is at
this one. The kernels are those that the device would have run: the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from paralab.comm import Group
from paralab.parallel import precision
from paralab.parallel.host import Ring
from paralab.parallel.lanes import Job, wait_all
from paralab.parallel.offload import Share


class HostUpdate(precision.Update):
    """The update, made by the host's processor on what lies there: `precision.Update`'s moments.

    sync       the stage of ZeRO whose shares are updated
    optimizer  "adamw" or "sgd", with ``lr``; clips: whether `step` will be given a norm
    counted    [(target, elements)] that this rank counts in the norm; None: all
    """

    def __init__(
        self, sync: Any, *, optimizer: str, lr: float, clips: bool, mixed: str,
        groups: Sequence[Group] = (), counted: Sequence[tuple[Tensor, slice]] | None = None,
    ) -> None:  # fmt: skip
        self.sync, self.host, self.tiers = sync, sync.host, sync.tiers
        self.optimizer_name, self.lr = optimizer, lr
        self.shares = [sync.shares[flat] for flat in sync.trained]
        self.groups = [group for group in groups if group.size > 1]
        device = torch.device(sync.group.context.device)
        self.device = device
        self.loss_scale = precision.LossScale(device) if mixed == "fp16" else None
        if clips or self.loss_scale is not None:
            for share in self.shares:
                share.measures = True
                if counted is not None:
                    share.counted = [where for t, where in counted if t is share.flat.own]
        most = max(share.count for share in self.shares)
        rows = max(share.rows for share in self.shares)
        item = self.shares[0].dtype.itemsize
        self.ring = {
            "states": Ring(self.host, 4 * rows * most * (self.tiers.optimizer == "nvme")),
            "gradient": Ring(self.host, item * most * (self.tiers.gradients != "cpu")),
            "parameters": Ring(self.host, item * most * self._passes()),
        }
        self.delivered: list[Job] = []
        self.late: list[Share] = []  # updated by the host, and not yet on the device

    def _passes(self) -> bool:
        """Whether updated parameters pass through a buffer on their way."""
        mixed = self.shares[0].dtype != torch.float32
        return self.tiers.parameters == "nvme" or (mixed and self.tiers.parameters == "device")

    @property
    def states(self) -> list[Tensor]:
        return []  # on the device

    # ---- for checkpoints -------------------------------------------------------------------------
    def tensors_of(self, kept: Tensor) -> dict[str, Tensor]:
        share = next((s for s in self.sync.shares.values() if s.flat.own is kept), None)
        if share is None:  # in no unit: frozen, and whole
            return {"weight": kept.detach()}
        away = self.tiers.parameters != "device"
        found = {"weight": share.look("parameters") if away else kept.detach()}
        if share.rows:
            kinds = ("exp_avg", "exp_avg_sq")[: share.moments] + ("master",) * share.own_master
            found |= dict(zip(kinds, share.look("states"), strict=True))
        return found

    def counts(self) -> list[Tensor]:
        return [share.step for share in self.shares]

    @torch.no_grad()
    def refresh(self) -> None:
        for share in self.shares:
            if share.own_master:
                away = self.tiers.parameters != "device"
                target = share.look("parameters") if away else share.flat.own
                target.copy_(share.look("states")[-1])

    # ---- a step ----------------------------------------------------------------------------------
    @torch.no_grad()
    def step(self, *, clip_norm: float | None = None) -> None:
        self.complete()
        divisor, overflow = self.verdict(clip_norm)
        how = {"grad_scale": _on_host(divisor), "found_inf": _on_host(overflow)}
        opened = []
        for share in self.shares:  # reads go before the update of the unit before: see host.Ring
            opened.append(self._open(share))
            if len(opened) > 1:
                self._update(*opened.pop(0), how)
        self._update(*opened.pop(0), how)
        if self.loss_scale is not None:
            self.loss_scale.adapt(overflow)
        if self.tiers.delayed:
            self.late = list(self.shares)
        else:
            self.complete()

    def complete(self) -> None:
        """What the host has updated is where the next step looks for it."""
        for share in self.late:
            self._deliver(share, share.states[-1])
        self.late = []
        wait_all(self.delivered)
        self.delivered = []

    def norm(self) -> Tensor:
        if self.tiers.gradients == "device":
            parts = [share.norm_of(share.here) for share in self.shares]
        else:
            wait_all([job for share in self.shares for job in share.adding])
            parts = [share.norm.to(self.device) for share in self.shares]
        return self.over_groups(torch.stack([torch.zeros((), device=self.device), *parts]))

    # ---- one share -------------------------------------------------------------------------------
    def _open(self, share: Share) -> tuple:
        """Start to bring its states together on the host. Returns them, and what they wait for."""
        host, tiers, after = self.host, self.tiers, [*share.adding, *share.updating]
        held: dict[str, Tensor | None] = {"states": share.states, "gradient": share.gradient,
                                          "parameters": share.parameters}  # fmt: skip
        slots = {}

        def take(kind: str, shape: tuple, dtype: torch.dtype) -> tuple[Tensor, list[Job]]:
            held[kind], slots[kind] = self.ring[kind].take(shape, dtype)
            return held[kind], slots[kind].users

        needs = []
        if share.rows and share.states is None:
            into, users = take("states", (share.rows, share.count), torch.float32)
            needs.append(host.read(share.names["states"], into, "optimizer", [*users, *after]))
        if share.gradient is None:
            into, users = take("gradient", (share.count,), share.dtype)
            if tiers.gradients == "nvme":
                job = host.read(share.names["gradient"], into, "gradients", [*users, *after])
            else:
                job = host.down(share.here, into, "gradients", users)
                self.delivered.append(job)  # holds the device's memory until it has left
            needs.append(job)
        if tiers.parameters == "nvme":
            into, users = take("parameters", (share.count,), share.dtype)
            if share.own_master:  # written anew
                needs += users
            else:
                needs.append(host.read(share.names["parameters"], into, "parameters",
                                       [*users, *after]))  # fmt: skip
        return share, held, slots, [*needs, *after]

    def _update(
        self, share: Share, held: dict[str, Tensor], slots: dict[str, Any], after: Sequence[Job],
        how: dict[str, Tensor | None],
    ) -> None:  # fmt: skip
        host, states, gradient = self.host, held["states"], held["gradient"]
        master = states[-1] if share.own_master else held["parameters"]
        rounded = held["parameters"] if share.own_master else None

        def update() -> None:
            self._optimize(share, master, states, gradient, how)
            if rounded is not None:
                rounded.copy_(master)

        done = host.do(update, after=after, op="optimizer")
        behind = [done]
        if share.rows and share.states is None:
            behind.append(host.write(share.names["states"], states, "optimizer", [done]))
        if self.tiers.parameters == "nvme":
            behind.append(host.write(share.names["parameters"], held["parameters"], "parameters",
                                     [done]))  # fmt: skip
        for slot in slots.values():
            slot.users = behind
        share.updating = behind
        self.delivered += behind
        if self.tiers.parameters == "device" and not self.tiers.delayed:
            self._deliver(share, master, *slots.values())

    def _deliver(self, share: Share, master: Tensor, *slots: Any) -> None:
        """Updated parameters go up to where they live on the device."""
        host, own, after = self.host, share.flat.own, share.updating
        source = master
        if share.dtype != torch.float32:
            source, slot = self.ring["parameters"].take((share.count,), share.dtype)
            rounded = source
            after = [host.do(lambda: rounded.copy_(master), after=[*after, *slot.users])]
            slots = (*slots, slot)
        job = host.h2d.submit(lambda: own.copy_(source, non_blocking=True), after=after,
                              category="parameters", size=own.nbytes)  # fmt: skip
        for slot in slots:
            slot.users = [*slot.users, job]
        self.delivered.append(job)

    def _optimize(
        self, share: Share, master: Tensor, states: Tensor | None, gradient: Tensor,
        how: dict[str, Tensor | None],
    ) -> None:  # fmt: skip
        """The same kernels as on the device: the same bits."""
        gradient = gradient.float()  # 16 bits become 32; fp32 stays as it is
        if self.optimizer_name == "sgd":
            sgd([master], [gradient], [None], fused=True, weight_decay=0.0, momentum=0.0,
                lr=self.lr, dampening=0.0, nesterov=False, maximize=False, **how)  # fmt: skip
        else:
            adamw([master], [gradient], [states[0]], [states[1]], [], [share.step], fused=True,
                  amsgrad=False, beta1=0.9, beta2=0.999, lr=self.lr, weight_decay=0.01, eps=1e-8,
                  maximize=False, **how)  # fmt: skip


def _on_host(value: Tensor | None) -> Tensor | None:
    """A copy: the next step changes the loss scale while the host may still be at work."""
    return None if value is None else value.detach().to("cpu", copy=True)
