"""Offload: what a rank keeps of a training, on the host or in files instead of on its device.

AdamW in mixed precision keeps 16 bytes for every parameter, and the device computes with 2 of them.
The rest can lie where memory is cheap, if what has to move is little enough, and moves while the
device computes:

    ZeRO-Offload   (Ren+ 2021, arXiv:2101.06840)   gradients and optimizer states on the host. The
                   gradient of a unit leaves while backward goes on to the next; the host's own
                   processor makes the Adam step; updated parameters come back. With w bytes per
                   element 2w per parameter and step, the least that any such cut moves (sec. 3)
    ZeRO-Infinity  (Rajbhandari+ 2021, arXiv:2104.07857)   parameters too, and files behind the
                   host. What stage 3 gathers comes up from there, ``prefetch`` units ahead
    L2L            (Pudipeddi+ 2020, arXiv:2002.05645)   the far end: all micro-batches pass through
                   one part of the model before the next comes up. Whatever m is, parameters come
                   up twice and gradients leave once (relay.py)
    delayed update (ZeRO-Offload, sec. 5.2)   the host updates while the device is at the next step
                   already, whose gradients are then of weights one update old

Bytes of a rank per step, Psi parameters, N ranks, m micro-batches, K the optimizer's states
(theory/offload.py has them unit by unit):

    gradients      d2h    w m Psi/N    from stage 2 on; from a stage 1, whose sum stays, w Psi/N
    parameters     h2d    w Psi/N      after the update, where they live on the device
                          2 w m Psi/N  where they do not: before each forward and each backward
                          2 w Psi/N    of these with schedule="l2l", and then gradients w Psi/N
    optimizer      disk   K Psi/N read, K Psi/N written
    activations    d2h    w m l b s h, and as much h2d: the input of every block

ZeRO's stages (zero.py) stay what they are; a rank's share of a unit is moved where they ask for it:

    lay_out  its parameters start on the device and go where they live
    keep     the share of a gradient has been summed: it leaves
    summed   so has what other axes of the plan have a part of too, which had to wait for them: a
             tied embedding at the pipeline's ends, what tp ranks share, with replicas everything
    fetch    a unit is about to be needed: its share comes up, then it is gathered

The update is the host's own (host_update.py), unit by unit; activations are offload_inputs.py's.
Nothing of that is seen by the ledger of the device's memory: other threads do it, in the tiers' own
memory, which ``recorder.holds`` counts. Lab 09.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paralab.parallel import zero
from paralab.parallel.buckets import Unit
from paralab.parallel.flat import Flat
from paralab.parallel.host import Host
from paralab.parallel.lanes import Job, wait_all
from paralab.tiers import Offload


class Share:
    """This rank's part of one unit, (numel / N,), wherever its states lie.

    parameters  in the model's dtype, on the host; None: on the device, or in a file
    states      (k, numel / N) fp32 on the host: AdamW's two moments, then the master weights where
                parameters are on the device or of 16 bits; None: in a file, or there are none
    gradient    in the model's dtype, on the host; None: on the device, or in a file
    step, norm  0-d, on the host: steps done, and the norm of the gradient, where somebody clips
    """

    def __init__(self, flat: Flat, host: Host, tiers: Offload, *, moments: int) -> None:
        self.flat, self.host, self.tiers = flat, host, tiers
        self.count, self.dtype = flat.own.numel(), flat.own.dtype
        self.names = {
            kind: f"{kind}-{host.number()}" for kind in ("parameters", "gradient", "states")
        }
        away = tiers.optimizer != "device" and not flat.unit.frozen
        self.own_master = away and (self.dtype != torch.float32 or tiers.parameters == "device")
        self.moments, self.rows = moments, (moments + self.own_master) * away
        self.parameters = self._place("parameters", tiers.parameters, (self.count,), self.dtype)
        self.states = self._place("states", tiers.optimizer, (self.rows, self.count),
                                  torch.float32) if self.rows else None  # fmt: skip
        self.gradient = None
        if away:
            self.gradient = self._place("gradient", tiers.gradients, (self.count,), self.dtype)
            self.step, self.norm = (
                host.empty((), torch.float32, "optimizer").zero_() for _ in "12"
            )
        self.measures = False  # whether somebody will ask for the norm
        self.counted = [slice(None)]  # of these elements
        self.here: Tensor | None = None  # the gradient, where it stays on the device
        self.adding: list[Job] = []  # what the gradient waits for; empty: there is none yet
        self.updating: list[Job] = []  # the last update of it
        self.start()

    def _place(self, kind: str, where: str, shape: tuple, dtype: torch.dtype) -> Tensor | None:
        category = {"states": "optimizer", "gradient": "gradients"}.get(kind, kind)
        if where == "nvme":
            self.host.create(self.names[kind], dtype.itemsize * math.prod(shape), category)
        return self.host.empty(shape, dtype, category) if where == "cpu" else None

    def start(self) -> None:
        """Give everything its first values: those that lie in ``flat.own``, on the device."""
        own, master = self.flat.own, self.flat.master
        copy = self.host.here(own)
        if self.tiers.parameters != "device":
            self.put("parameters", copy)
        if self.rows:
            states = torch.zeros(self.rows, self.count, device=copy.device)
            if self.own_master:
                states[-1] = copy if master is None else self.host.here(master)
            self.put("states", states)
        self.flat.master = None

    # ---- for who looks at the result, and for checkpoints --------------------------------------
    def put(self, kind: str, values: Tensor) -> None:
        held = getattr(self, kind)
        if held is not None:
            held.copy_(values)
        else:
            self.host.files.write(self.names[kind], values)

    def look(self, kind: str) -> Tensor:
        """The values themselves, on the host: filling them changes what is trained."""
        held = getattr(self, kind)
        if held is None:
            dtype = torch.float32 if kind == "states" else self.dtype
            held = self.host.files.mapped(self.names[kind], dtype)
        return held.view(self.rows, self.count) if kind == "states" else held

    # ---- parameters ----------------------------------------------------------------------------
    def fetch(self, into: Tensor) -> Job:
        """The parameters come up into device memory, (numel / N,)."""
        host, size = self.host, into.nbytes
        source, after = self.parameters, self.updating
        if source is None:
            source, slot = host.staging.take(self.count, self.dtype)
            after = [
                host.read(self.names["parameters"], source, "parameters", [*after, *slot.users])
            ]
        job = host.h2d.submit(lambda: into.copy_(source, non_blocking=True), after=after,
                              category="parameters", size=size)  # fmt: skip
        if self.parameters is None:
            slot.users = [job]
        return job

    # ---- gradients -----------------------------------------------------------------------------
    def add(self, part: Tensor) -> Job:
        """``part``, on the device, is added to the gradient. Returns the copy that reads it."""
        host, first = self.host, not self.adding
        after = self.adding or self.updating  # an update may still be reading the last one
        if self.gradient is not None and first:
            down = host.down(part, self.gradient, "gradients", after)
            self.adding, held = [down], self.gradient
        else:
            held, slot = host.staging.take(self.count, self.dtype)
            down = host.down(part, held, "gradients", slot.users)
            slot.users = self.adding = [down]
            if not first:
                sum_, more = self.gradient, None
                if sum_ is None:
                    sum_, more = host.staging.take(self.count, self.dtype)
                    after = [host.read(self.names["gradient"], sum_, "gradients",
                                       [*after, *more.users])]  # fmt: skip
                new = held
                held, self.adding = sum_, [host.do(lambda: sum_.add_(new), after=[down, *after])]
                slot.users = self.adding
                if more is not None:
                    slot = more
        if self.measures:
            self.adding = [host.do(lambda: self.norm.copy_(self.norm_of(held)), after=self.adding)]
        if self.gradient is None:
            self.adding = [host.write(self.names["gradient"], held, "gradients",
                                      [*self.adding, *after])]  # fmt: skip
            slot.users = self.adding
        return down

    def norm_of(self, gradient: Tensor) -> Tensor:
        """Of what this rank counts of it, 0-d."""
        parts = [torch.linalg.vector_norm(gradient[where], dtype=torch.float32)
                 for where in self.counted]  # fmt: skip
        return (
            parts[0]
            if len(parts) == 1
            else torch.linalg.vector_norm(
                torch.stack([gradient.new_zeros((), dtype=torch.float32), *parts])
            )
        )


class _Offloaded:
    """Mixed into a stage of ZeRO: its shares leave the device.

    host, tiers  the rank's other memory, and what lies there
    moments      of the optimizer, per parameter: AdamW has two
    """

    def __init__(
        self, *args: Any, host: Host, tiers: Offload, moments: int, **more: Any
    ) -> None:  # fmt: skip
        self.host, self.tiers, self.moments = host, tiers, moments
        self.shares: dict[Flat, Share] = {}
        self.leaving: list[Job] = []  # copies of gradients on their way down
        super().__init__(*args, **more)
        self.share_of = {flat.own: share for flat, share in self.shares.items()}
        count = max(share.count for share in self.shares.values())
        host.staging.size = count * self.dtype.itemsize

    def lay_out(self, unit: Unit, parameters: list[Tensor]) -> Flat:
        flat = super().lay_out(unit, parameters)
        with self.group.recorder.unwatched():  # the host's side of it
            self.shares[flat] = Share(flat, self.host, self.tiers, moments=self.moments)
            if self.tiers.parameters != "device":
                # How much it is; the values are elsewhere.
                flat.own = torch.empty_like(flat.own, device="meta")
        return flat

    # ---- gradients -----------------------------------------------------------------------------
    def settle(self, *, keep: int) -> None:
        self.left()
        super().settle(keep=keep)

    def left(self) -> None:
        """The gradients on their way down are down: their device memory is free."""
        wait_all(self.leaving)
        self.leaving.clear()

    def keep(self, flat: Flat, part: Tensor) -> None:
        share = self.shares[flat]
        if self.tiers.gradients != "device" and not flat.unit.waits:
            self.leaving.append(share.add(part))
        elif share.here is None:
            share.here = part
            self.group.recorder.owns("gradients", part)
        else:
            share.here += part

    def finish(self) -> None:
        super().finish()
        self.left()

    def summed(self) -> None:
        for flat in self.trained:
            if flat.unit.waits:
                share = self.shares[flat]
                self.leaving.append(share.add(share.here))
                share.here = None
        self.left()

    def gradient(self, target: Tensor) -> Tensor:
        """What is on the device of it."""
        return self.share_of[target].here

    def reset(self) -> None:
        super().reset()
        for share in self.shares.values():
            share.adding, share.here = [], None

    # ---- for who looks at the result -------------------------------------------------------------
    def part(self, flat: Flat, *, gradients: bool) -> Tensor:
        place = self.tiers.gradients if gradients else self.tiers.parameters
        if place == "device":
            return self.shares[flat].here if gradients else flat.own
        self.host.settle()
        found = self.shares[flat].look("gradient" if gradients else "parameters")
        return found.to(self.group.context.device)


class Offloaded1(_Offloaded, zero.Stage1):
    """ZeRO-1 whose optimizer states are off the device."""


class Offloaded2(_Offloaded, zero.Stage2):
    """ZeRO-Offload: gradients too."""


class Offloaded3(_Offloaded, zero.Stage3):
    """ZeRO-Infinity: parameters too, which come up unit by unit.

    One rank alone copies a unit to where it is used. Several copy each its part, one unit further
    ahead than they gather: a gather starts when its copy has had a part's time to arrive, and has
    as much itself. What is ``coming`` is such a part, (numel / N,).
    """

    def __init__(self, *args: Any, **more: Any) -> None:
        self.coming: dict[Flat, tuple[Tensor, Job]] = {}
        super().__init__(*args, **more)
        self.away = self.tiers.parameters != "device"
        self.alone = self.group.size == 1

    def fetch(self, flat: Flat) -> None:
        if not self.away or flat in self.arriving:
            super().fetch(flat)
        elif self.alone:
            self.unfree(flat)
            self.arriving[flat] = self.shares[flat].fetch(flat.full)
        else:
            self.bring(flat)
            part, job = self.coming[flat]
            job.wait()
            self.unfree(flat)
            self.arriving[flat] = flat.gather(part)

    def bring(self, flat: Flat) -> None:
        """Start to copy this rank's part, unless it is there or on its way."""
        if flat not in self.coming and flat not in self.arriving:
            part = torch.empty(flat.own.numel(), dtype=self.dtype, device=flat.full.device)
            self.group.recorder.owns("buffers", part)
            self.coming[flat] = part, self.shares[flat].fetch(part)

    def arrive(self, flat: Flat) -> None:
        super().arrive(flat)
        self.coming.pop(flat, None)

    def enter(self, parts: Sequence[str]) -> None:
        if self.away and not self.alone:
            units = list(dict.fromkeys(flat for part in parts for flat in self.needs[part]))
            for flat in units[: len(self.needs[parts[0]]) + self.prefetch + 1]:
                self.bring(flat)
        super().enter(parts)


STAGES = {1: Offloaded1, 2: Offloaded2, 3: Offloaded3}
