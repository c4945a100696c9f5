"""Gradients of what several ranks hold the same and use apart: the sum over these ranks.

    the token embedding, where the first and the last stage of a pipeline both compute with it: one
    has the look-up's part of the gradient, the other the logits'
    norms, biases and positions under tensor parallelism, where a rank sees a part of the tokens;
    under "2.5d" the weights of all linear layers, which the grids of q x q share

Added over the ranks that hold it, the gradient is the same on all of them, and so is the update.
This comes after data parallelism, which has summed every rank's part over its own group; sums may
be taken in any order (Megatron-LM's is this one too).

Bytes: 2 (n-1)/n of what is shared, once per step; with ZeRO of the N-th that a rank owns. What is
shared over the same ranks leaves in one message, as small messages cost their latency.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paralab.comm import Group

Place = tuple[Tensor, slice]  # what the optimizer updates, and the elements of it that are meant


class SharedGradients:
    """What is shared over one group.

    places    where the shared elements lie in what the rank's optimizer updates, in the same order
              on every rank of ``group``
    phase     of the message in the ledger
    gradient  called with what the optimizer updates: its gradient; by default its ``.grad``
    """

    def __init__(
        self, places: Sequence[Place], *, group: Group, phase: str,
        gradient: Callable[[Tensor], Tensor] = lambda target: target.grad,
    ) -> None:  # fmt: skip
        self.places, self.group, self.phase = list(places), group, phase
        self.gradient = gradient

    def add_up(self) -> None:
        """Every rank's gradient of what is shared becomes the sum of theirs."""
        if len(self.places) == 1 and self.places[0][0].numel() == _count(self.places[0][1]):
            self.group.all_reduce(self.gradient(self.places[0][0]), phase=self.phase).wait()
            return
        recorder, parts = self.group.recorder, []
        for target, where in self.places:
            parts.append(self.gradient(target).view(-1)[where])
        with recorder.span("copy"):
            flat = torch.cat(parts)
        recorder.owns("buffers", flat)
        self.group.all_reduce(flat, phase=self.phase).wait()
        with recorder.span("copy"):
            for part, summed in zip(parts, flat.split([p.numel() for p in parts]), strict=True):
                part.copy_(summed)


def _count(where: slice) -> int:
    return where.stop - where.start
