"""Pipeline parallelism: every rank holds some of the layers, micro-batches flow through the ranks.

The model is cut into stages of consecutive layers (partition.py). A stage's forward needs the
activation of the stage before, its backward the gradient from the stage after:

                 F(s-1, k)  --activation-->  F(s, k)         B(s, k)  <--gradient--  B(s+1, k)

*When* a rank does what is its schedule, a list of actions (schedules.py); which messages that takes
and in which order is worked out by lowering.py. What remains is here: do what the list says. The
same few lines run naive, GPipe, 1F1B, interleaved and zero-bubble schedules, and a learner's own.

Memory: 1/pp of the parameters, gradients and optimizer state, and the activations of the
micro-batches between their F and their B. Bytes: a message of b s h elements, in the precision that
is computed in, per micro-batch, stage boundary and direction, the least of all ways to split a
model. Time: what the schedule says, see
schedules.py. A pipeline of one stage sends nothing: it is gradient accumulation.

GPipe (Huang+ 2019, arXiv:1811.06965), PTD-P (Narayanan+ 2021, arXiv:2104.04473) sec. 2.2. Lab 03.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from paralab.comm import Group
from paralab.model import Layers
from paralab.parallel.layouts import residual_shape
from paralab.parallel.lowering import Transfer, lower
from paralab.parallel.partition import partition
from paralab.parallel.precision import DTYPES
from paralab.parallel.schedules import Schedule
from paralab.parallel.split_backward import WeightHalves
from paralab.pending import Pending, wait_all
from paralab.spec import ModelSpec, Plan

Key = tuple[str, int, int]  # ("F" activation | "B" its gradient, stage, micro-batch)


class Cut(torch.autograd.Function):
    """``x``, where a graph begins: its gradient is put into ``into``.

    A leaf would do the same, and hold x on the device until its backward.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, into: list[Tensor]) -> Tensor:
        ctx.into = into
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        ctx.into.append(grad)
        return None, None, None


def cut(x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """``x`` as the beginning of a graph, and where its gradient will be."""
    into: list[Tensor] = []
    return Cut.apply(x, x.new_empty(0).requires_grad_(), into), into


class Stage:
    """Consecutive layers, and what they remember between a micro-batch's forward and backward.

    model   maps (B, s) tokens or (B, s, h) activations to activations or, with the targets, to the
            loss
    halves  where its layers put their weight halves aside, or None if they compute them at once
    """

    def __init__(self, model: nn.Module, *, halves: WeightHalves | None = None) -> None:
        self.model, self.halves = model, halves
        # micro-batch -> where its input's gradient will be, root of its graph
        self._alive: dict[int, tuple[list[Tensor], Any]] = {}

    def forward(self, k: int, x: Tensor, targets: Tensor | None) -> Tensor:
        """Forward of micro-batch ``k``. Returns the activation, or the loss if it has targets."""
        into: list[Tensor] = []
        if x.is_floating_point():
            x, into = cut(x)
        y = self.model(x, targets)
        # Of an activation only the graph is kept: the numbers leave with the message.
        self._alive[k] = (into, y if targets is not None else get_gradient_edge(y))
        return y.detach()

    def backward(self, k: int, grad: Tensor | None, share: Callable[[Tensor], Tensor]) -> Any:
        """Backward of micro-batch ``k``, without what the layers put aside.

        grad is that of the activation; None: ``k`` ended in a loss, which ``share`` scales.
        Returns the input's gradient, (B, s, h), or None for tokens.
        """
        into, root = self._alive.pop(k)
        if self.halves is not None:
            self.halves.collect(k)
        if grad is None:
            share(root).backward()
        else:
            torch.autograd.backward(root, grad)
        return into.pop() if into else None

    def weight_grad(self, k: int, accumulated: Callable[[Tensor], None]) -> None:
        """The rest of micro-batch ``k``'s backward."""
        if self.halves is not None:
            self.halves.run(k, accumulated)


class Pipeline:
    """One rank's stages, and the list of steps that it goes through in every optimizer step.

    build     called as build(parts=names, layers=Layers(...)): these parts of the model, with their
              first weights
    layers    called with where weight halves of backward are put aside, or None: the Layers
    schedule  one list of actions per rank of ``group``, the pipeline's ranks

    ``accumulated`` is told of every gradient that autograd's own hooks do not see.
    """

    def __init__(
        self, build: Callable[..., nn.Module], model: ModelSpec, plan: Plan, schedule: Schedule, *,
        group: Group, layers: Callable[[WeightHalves | None], Layers],
    ) -> None:  # fmt: skip
        self.group, self.last = group, plan.stages - 1
        self.activation = residual_shape(model, plan)  # what travels
        self.dtype = DTYPES[plan.precision]
        self.steps = lower(schedule, only=group.index)[group.index]
        self.accumulated: Callable[[Tensor], None] = lambda parameter: None
        self._arriving: dict[Key, tuple[Tensor, Pending]] = {}
        self._leaving: dict[Key, Tensor] = {}
        self._sent: list[Pending] = []
        actions = schedule[group.index]
        parts = partition(model, plan.stages, plan.microbatch_size)
        split = any(action.kind == "W" for action in actions)
        self.stages: dict[int, Stage] = {}
        for s in sorted({action.stage for action in actions}):
            halves = WeightHalves(group.recorder.owns) if split else None
            piece = build(parts=parts[s], layers=layers(halves), device=group.context.device)
            self.stages[s] = Stage(piece, halves=halves)

    def named_parameters(self) -> dict[str, Tensor]:
        """This rank's, by their names in the single-device model; a tied head's copy beside."""
        return {n: p for stage in self.stages.values() for n, p in stage.model.named_parameters()}

    def buffers(self) -> list[Tensor]:
        """What this rank's stages hold besides parameters: masks."""
        return [b for stage in self.stages.values() for b in stage.model.buffers()]

    def step(
        self, batch: Callable[[int], tuple[Tensor, Tensor]], share: Callable[[Tensor], Tensor], *,
        before: Callable[[int, str], None] | None = None,
    ) -> list[Tensor]:  # fmt: skip
        """Forward and backward of all micro-batches; gradients add up in the parameters.

        batch(k)         tokens and targets of micro-batch k, (B, s) each
        share(loss)      its share in the mean over the global batch: what is differentiated
        before(k, part)  called before a part of the model computes on micro-batch k

        Returns the losses in the order of the micro-batches, on the last stage's rank alone.
        """
        losses: dict[int, Tensor] = {}
        for step in self.steps:
            if isinstance(step, Transfer):
                self._transfer(step)
            elif step.kind == "F":
                model = self.stages[step.stage].model
                model.before = before and partial(before, step.microbatch)
                self._forward(step.stage, step.microbatch, batch, losses)
            elif step.kind == "W":
                self._weight_grad(step.stage, step.microbatch)
            else:
                self._backward(step.stage, step.microbatch, share, whole=step.kind == "B")
            self._sent = [call for call in self._sent if not call.test()]  # frees what has left
        wait_all(self._sent)
        self._sent.clear()
        return [losses[k] for k in sorted(losses)]

    # ---- actions -------------------------------------------------------------------------------
    def _forward(self, s: int, k: int, batch: Callable, losses: dict[int, Tensor]) -> None:
        tokens, targets = batch(k) if s in (0, self.last) else (None, None)
        x = tokens if s == 0 else self._arrived("F", s, k)
        with self._span("forward", s, k):
            y = self.stages[s].forward(k, x, targets if s == self.last else None)
        if s == self.last:
            losses[k] = y
        else:
            self._leaving["F", s, k] = y

    def _backward(self, s: int, k: int, share: Callable, *, whole: bool) -> None:
        grad = None if s == self.last else self._arrived("B", s, k)
        with self._span("backward", s, k):
            grad = self.stages[s].backward(k, grad, share)
            if whole:
                self.stages[s].weight_grad(k, self.accumulated)
        if s > 0:
            self._leaving["B", s, k] = grad

    def _weight_grad(self, s: int, k: int) -> None:
        with self._span("weight_grad", s, k):
            self.stages[s].weight_grad(k, self.accumulated)

    def _span(self, kind: str, s: int, k: int) -> Any:
        return self.group.recorder.span(kind, microbatch=k, stage=s, chunk=s // self.group.size)

    # ---- messages ------------------------------------------------------------------------------
    def _transfer(self, transfer: Transfer) -> None:
        """Post it; a receive is waited for where its action needs it, a send at the very end."""
        kind, what, s, k, peer = transfer
        rank = self.group.ranks[peer]
        if kind == "send":
            tensor = self._leaving.pop((what, s, k))
            self.group.recorder.owns("buffers", tensor)
            self._sent.append(self.group.send(tensor, to=rank, phase="activations"))
        else:
            tensor = torch.empty(self.activation, dtype=self.dtype,
                                 device=self.group.context.device)  # fmt: skip
            self.group.recorder.owns("buffers", tensor)
            call = self.group.recv(tensor, source=rank, phase="activations")
            self._arriving[what, s, k] = tensor, call

    def _arrived(self, what: str, s: int, k: int) -> Tensor:
        tensor, call = self._arriving.pop((what, s, k))
        call.wait()
        return tensor
