"""The layer relay of L2L: one part of the model on the device, and every micro-batch through it.

Where parameters come up before each forward and each backward, m micro-batches bring the whole
model up 2 m times. L2L (Pudipeddi+ 2020, arXiv:2002.05645) turns the two loops round: a part of the
model comes up, all micro-batches pass through it, it goes; and so back again. Memory for parameters
does not grow with depth, traffic for them not with m. It is the far end of offload's ladder.

Per step, w bytes per element, Psi parameters, l blocks, x = b s h elements of the residual stream:

                       micro-batch by micro-batch     relay
    parameters up      2 w m Psi/N                    2 w Psi/N, the head once
    gradients down     w m Psi/N                      w Psi/N
    on the device      one micro-batch's              m boundaries (w m x) between two parts, and m
                       activations                    gradients of them on the way back
    blocks' inputs     w l x                          w m l x, wherever these lie

The head turns round: it makes each micro-batch's backward right after its forward, so that the
logits of one are alive, and is needed once. A tied embedding stays from the first part to the last
and back. Gradients add up on the device while a part is there, in the order of the micro-batches,
and leave with the last; a tied weight's in another order than in an undivided backward: first what
all heads add, then what all embeddings do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from paralab.parallel import offload_inputs
from paralab.parallel.pipeline import Pipeline, cut
from paralab.parallel.schedules import relay
from paralab.parallel.zero import Stage3


class Relay(Pipeline):
    """A pipeline of one stage, whose parts take turns; its schedule is `schedules.relay`.

    sync    the stage of ZeRO that brings parts up; told when one of them stays
    inputs  what keeps blocks' inputs off the device, if anything does
    """

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.model, self.microbatches = self.stages[0].model, args[2].microbatches
        self.order = relay(len(self.model.parts), self.microbatches)
        self.sync: Stage3 | None = None
        self.inputs: Activations | None = None
        # What the next part takes of each micro-batch, and whether its gradient is wanted.
        self._between: dict[int, tuple[Tensor, bool]] = {}
        self._gradients: dict[int, Tensor] = {}  # of what the part above took
        self._graphs: dict[tuple[int, int], tuple[Any, list[Tensor] | None]] = {}

    def shared(self) -> list[Tensor]:
        """Parameters of two parts, whose gradient every micro-batch adds to twice."""
        weight = self.model.embedding.token.weight
        return [weight] if self.model.tied and weight.requires_grad else []

    def step(
        self, batch: Callable[[int], tuple[Tensor, Tensor]], share: Callable[[Tensor], Tensor], *,
        before: Callable[[int, str], None] | None = None,
    ) -> list[Tensor]:  # fmt: skip
        """As `Pipeline.step`."""
        losses: dict[int, Tensor] = {}
        if self.inputs is not None:
            self.inputs.begin()
        for part, kind, k in self.order:
            if kind == "B":
                self._part_backward(part, k, share)
                continue
            self.model.before = before and partial(before, k)
            if self.inputs is not None and k == 0:
                self.inputs.next_part()
            loss = self._part_forward(part, k, batch)
            if loss is not None:
                losses[k] = loss
        return [losses[k] for k in sorted(losses)]

    def _part_forward(self, part: int, k: int, batch: Callable) -> Tensor | None:
        """Returns the loss, where the part is the last."""
        name, last = self.model.parts[part], part == len(self.model.parts) - 1
        self.sync.stays = last or k < self.microbatches - 1
        tokens, targets = batch(k) if part == 0 or last else (None, None)
        x, flows = (tokens, False) if part == 0 else self._between.pop(k)
        into: list[Tensor] | None = None
        with self._span("forward", 0, k):
            if flows:
                x, into = cut(x)
            y = self.model.compute(name, x, targets if last else None)
        if y.requires_grad:
            self._graphs[part, k] = y if last else get_gradient_edge(y), into
        if last:
            return y.detach()
        self.group.recorder.owns("activations", y)
        self._between[k] = y.detach(), y.requires_grad
        return None

    def _part_backward(self, part: int, k: int, share: Callable[[Tensor], Tensor]) -> None:
        if (part, k) not in self._graphs:
            return  # nothing trains here or below
        root, into = self._graphs.pop((part, k))
        with self._span("backward", 0, k):
            if isinstance(root, Tensor):
                share(root).backward()
            else:
                torch.autograd.backward(root, self._gradients.pop(k))
        if into:
            self._gradients[k] = into.pop()


class Activations(offload_inputs.Activations):
    """Backward needs a part's inputs in the order of the micro-batches, then those of the part
    below: while one computes, the next of these comes up.
    """

    def begin(self, *_: Any) -> None:
        """A step begins."""
        self.first = self.last = self.below = None

    def next_part(self) -> None:
        """What comes now belongs to another part; the one before lies below it."""
        self.below, self.first, self.last = self.first, None, None

    def linked(self, kept: Any) -> Any:
        if self.last is None:
            self.first = kept
        else:
            self.last.below = kept
        self.last = kept
        return kept
