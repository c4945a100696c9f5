"""Inputs of recomputed blocks on the host or in files: what offload.py does for activations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paralab.parallel.host import Host
from paralab.parallel.lanes import Job, wait_all


class Activations:
    """Inputs of recomputed blocks, off the device from a block's forward to its backward.

    `recompute.recomputed` calls `part` with the input in forward, and `whole` with what that
    returned in backward. Backward needs them in the opposite order: while one block computes, the
    input of the one below comes up.
    """

    def __init__(self, host: Host, place: str) -> None:
        self.host, self.place = host, place
        self.leaving: list[Job] = []
        self.below: _Kept | None = None  # the input of the block below, in this micro-batch

    def begin(self, *_: Any) -> None:
        """A micro-batch enters the first block here."""
        self.below = None

    def part(self, x: Tensor) -> _Kept:
        self._left()
        x = x.detach()
        self.host.recorder.owns("activations", x)
        kept = self.linked(_Kept(self.host, x, self.place, self.below))
        self.leaving.append(kept.leave(x))
        return kept

    def linked(self, kept: _Kept) -> _Kept:
        """The next to be kept comes after it in forward, so backward needs this one after that."""
        self.below = kept
        return kept

    def whole(self, kept: _Kept) -> Tensor:
        self._left()
        kept.come()
        x, kept.x = kept.x, None
        kept.arriving.wait()
        if kept.below is not None:
            kept.below.come()
        return x

    def _left(self) -> None:
        wait_all(self.leaving)
        self.leaving.clear()


class _Kept:
    """One block's input, somewhere else."""

    def __init__(self, host: Host, x: Tensor, place: str, below: _Kept | None) -> None:
        self.host, self.below, self.place = host, below, place
        self.shape, self.dtype, self.device = x.shape, x.dtype, x.device
        self.size = x.nbytes
        self.x: Tensor | None = None  # on the device again
        self.arriving: Job | None = None
        self.there: list[Job] = []

    def leave(self, x: Tensor) -> Job:
        host = self.host
        if self.place == "cpu":
            self.held = host.borrow(self.shape, self.dtype)
            job = host.down(x, self.held, "activations")
            self.there = [job]
            return job
        self.name = host.borrow_file(self.size)
        buffer, slot = host.inputs.take(x.numel(), x.dtype)
        job = host.down(x, buffer, "activations", slot.users, shape=self.shape)
        slot.users = self.there = [host.write(self.name, buffer, "activations", [job])]
        return job

    def come(self) -> None:
        """Start to come up, unless on the way."""
        if self.arriving is not None:
            return
        host = self.host
        x = self.x = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        host.recorder.owns("activations", x)
        if self.place == "cpu":
            source, after = self.held, self.there
        else:
            source, slot = host.inputs.take(x.numel(), x.dtype)
            after = [host.read(self.name, source, "activations", [*self.there, *slot.users])]
            source = source.view(self.shape)
        self.arriving = host.h2d.submit(lambda: x.copy_(source, non_blocking=True), after=after,
                                        category="activations", size=self.size)  # fmt: skip
        if self.place == "cpu":
            host.give_back(self.held, self.arriving)
        else:
            slot.users = [self.arriving]
            host.give_back_file(self.name, self.size)
