"""Tensor parallelism: every layer is cut over t ranks, which work on the same tokens.

Two linear layers with anything elementwise between them need only two messages. The first is cut by
columns, the second by rows (Megatron-LM, Shoeybi+ 2019, arXiv:1909.08053, sec. 3):

    Y_r = GELU(X A_r)        A = [A_1 ... A_t]        each rank a t-th of the outputs
    Z   = sum_r Y_r B_r      B = [B_1; ...; B_t]      each rank a t-th of the inputs

What leads into such a pair and out of it are two conjugate operators: what one does in forward, the
other does in backward. With sequence parallelism the residual stream between the pairs lies on the
ranks in parts of the sequence, so that norms, dropout and sums are not done t times over
(Korthikanti+ 2022, arXiv:2205.05198, sec. 4.2.2):

                forward           backward                      forward           backward
    f           nothing           all-reduce        f-bar       all-gather        reduce-scatter
    g           all-reduce        nothing           g-bar       reduce-scatter    all-gather

                x --f--> [ norm -> A_r -> GELU -> B_r ] --g--> + x            without
                x --norm--f-bar--> [ A_r -> GELU -> B_r ] --g-bar--> + x      with it

Attention is such a pair too: qkv by columns, a/t whole heads to a rank, proj by rows. The token
embedding is cut by entries of the vocabulary, and so are the logits: the cross-entropy needs two
numbers per token from each rank, not the logits.

Bytes, x = b s h elements: per block and micro-batch two all-reduces of x forward and two backward,
so 4 * 2 (t-1)/t x sent by each rank. Sequence parallelism sends the same, an all-reduce being a
reduce-scatter and an all-gather, and 2 (t-1)/t x more in backward: what f-bar gathered is not kept
but gathered again, or it would not be a t-th of the memory. Embedding: x once forward (and with
sequence parallelism once backward). Loss: 2 b s per rank, and x backward.

Memory: parameters, gradients and optimizer states a t-th, but for norms and the rows' biases;
activations s b h (10 + 24/t + 5 a s/(h t)) bytes per block, and with sequence parallelism
s b h/t (34 + 5 a s/h) (the paper's table 2; our block's own terms are in theory/activations.py).

Equality: dropout masks are drawn whole, as one device draws them, and every rank keeps the part of
the activations that it has. Gradients of norms are sums over the whole sequence: with sequence
parallelism each rank has a part of these, added up after backward (shared_gradients.py). Lab 07.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paralab.comm import Group
from paralab.model import Layers, dropped
from paralab.parallel.layouts import Box, activation_box, holding
from paralab.parallel.split_backward import WeightHalves
from paralab.pending import Pending
from paralab.spec import ModelSpec, Plan


# ---- the conjugate operators --------------------------------------------------------------------
class Copy:
    """f: every rank has x; in backward each has a part of its gradient."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def forward(self, x: Tensor, phase: str) -> tuple[Tensor, Pending | None]:
        return x, None

    def backward(self, grad: Tensor, phase: str) -> tuple[Tensor, Pending | None]:
        return grad, self.group.all_reduce(grad, phase=phase)


class Reduce(Copy):
    """g: f the other way round. Each rank has a part of a sum; in backward its gradient."""

    forward, backward = Copy.backward, Copy.forward


class Gather:
    """f-bar: each rank has a part of x along dimension ``dim``; in backward all have a part of the
    sum that is the whole's gradient.
    """

    def __init__(self, group: Group, dim: int) -> None:
        self.group, self.dim = group, dim

    def forward(self, x: Tensor, phase: str) -> tuple[Tensor, Pending | None]:
        return gather(self.group, x, self.dim, phase), None

    def backward(self, grad: Tensor, phase: str) -> tuple[Tensor, Pending | None]:
        return reduce_scatter(self.group, grad, self.dim, phase)


class Scatter(Gather):
    """g-bar: f-bar the other way round."""

    forward, backward = Gather.backward, Gather.forward


def gather(group: Group, part: Tensor, dim: int, phase: str) -> Tensor:
    """The members' parts, put together along ``dim``: shape (..., n * size, ...)."""
    flat = part.new_empty(group.size * part.numel())
    group.recorder.owns("buffers", flat)
    group.all_gather(flat, part.contiguous().view(-1), phase=phase).wait()
    parts = flat.view(group.size, *part.shape).movedim(0, dim)  # (..., n, size, ...)
    return parts.flatten(dim, dim + 1)


def reduce_scatter(
    group: Group, whole: Tensor, dim: int, phase: str
) -> tuple[Tensor, Pending | None]:
    """This rank's part along ``dim`` of the members' sum: shape (..., size / n, ...)."""
    parts = whole.unflatten(dim, (group.size, -1)).movedim(dim, 0).contiguous()
    mine = whole.new_empty(parts.shape[1:])
    return mine, group.reduce_scatter(mine.view(-1), parts.view(-1), phase=phase)


def done(result: tuple[Tensor, Pending | None]) -> Tensor:
    """Wait for what is on its way."""
    tensor, call = result
    if call is not None:
        call.wait()
    return tensor


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, operator: Any, what: str) -> Tensor:
        ctx.operator, ctx.what = operator, what
        return done(operator.forward(x, f"{what}_forward"))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        return done(ctx.operator.backward(grad.contiguous(), f"{ctx.what}_backward")), None, None


def through(x: Tensor, operator: Any, what: str) -> Tensor:
    """``x`` through one of the operators. what: "embedding" ...; its calls are rows of the phases
    "embedding_forward" and "embedding_backward".
    """
    return _Through.apply(x, operator, what)


# ---- linear layers ------------------------------------------------------------------------------
class Linear(nn.Linear):
    """A block of a linear layer. Column-parallel: ``enter`` is f or f-bar. Row-parallel: ``leave``
    is g or g-bar.

    inputs, outputs  of the rank's own block
    halves           where a schedule that splits backward puts the weight half (split_backward.py)
    """

    def __init__(
        self, inputs: int, outputs: int, *, bias: bool = True, enter: Any = None,
        leave: Any = None, halves: WeightHalves | None = None, what: str = "linear",
    ) -> None:  # fmt: skip
        super().__init__(inputs, outputs, bias=bias)
        self.enter, self.leave, self.halves, self.what = enter, leave, halves, what

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        if self.halves is not None:  # who runs a half says so; autograd would say it too early
            weight, bias = weight.detach(), bias if bias is None else bias.detach()
        return _Linear.apply(x, weight, bias, self)


class _Linear(torch.autograd.Function):
    """y = leave(enter(x) W^T) + b, with backward's message under way while the weight's gradient is
    computed.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: Any) -> Tensor:
        ctx.save_for_backward(x, weight)  # not what f-bar gathers: see the module's docstring
        ctx.layer, phase = layer, f"{layer.what}_forward"
        entered = x if layer.enter is None else done(layer.enter.forward(x, phase))
        if layer.leave is None:
            return F.linear(entered, weight, bias)
        y = done(layer.leave.forward(F.linear(entered, weight), phase))
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        x, weight = ctx.saved_tensors
        layer, phase, call = ctx.layer, f"{ctx.layer.what}_backward", None
        if layer.leave is not None:
            grad = done(layer.leave.backward(grad.contiguous(), phase))
        if layer.enter is not None:
            x = done(layer.enter.forward(x, phase))
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ weight
            if layer.enter is not None:
                grad_x, call = layer.enter.backward(grad_x, phase)
        grad_weight = grad_bias = None
        if layer.halves is not None:
            layer.halves.put(layer, x, grad)
        else:
            rows = grad.flatten(0, -2)  # (tokens, outputs)
            if ctx.needs_input_grad[1]:
                grad_weight = rows.t() @ x.flatten(0, -2)
            if ctx.needs_input_grad[2]:
                grad_bias = rows.sum(0)
        if call is not None:
            call.wait()
        return grad_x, grad_weight, grad_bias, None


class Tied:
    """A linear layer without parameters of its own: the logits from the token embedding's."""

    def __init__(self, *, enter: Any = None, leave: Any = None, what: str = "head") -> None:
        self.enter, self.leave, self.halves, self.what = enter, leave, None, what

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        return _Linear.apply(x, weight, None, self)


# ---- embedding and loss -------------------------------------------------------------------------
class Embedding(nn.Module):
    """Token plus position embedding, each rank with a range of the vocabulary's entries.

    The whole micro-batch's tokens, (B, s), are known to every rank. Each looks up those it has and
    finds 0 for the others: the sum over the ranks is the embedding, and ``leave`` adds it up.

    token, position  the rank's ranges of the two tables
    samples          whose tokens it looks up
    """

    def __init__(
        self, *, token: Box, position: Box, leave: Any, drop: Callable[..., Tensor], p: float,
        samples: slice = slice(None),
    ) -> None:  # fmt: skip
        super().__init__()
        entries, width = token
        self.first = entries.start
        self.token = nn.Embedding(entries.stop - entries.start, width.stop - width.start)
        self.position = nn.Embedding(position[0].stop - position[0].start,
                                     position[1].stop - position[1].start)  # fmt: skip
        self.leave, self.drop, self.p, self.samples = leave, drop, p, samples

    def forward(self, tokens: Tensor) -> Tensor:
        mine = tokens[self.samples] - self.first
        elsewhere = (mine < 0) | (mine >= self.token.num_embeddings)
        found = self.token(mine.masked_fill(elsewhere, 0)).masked_fill(elsewhere.unsqueeze(-1), 0.0)
        x = through(found, self.leave, "embedding") + self.position.weight
        return self.drop(x, self.p if self.training else 0.0, "residual")


class CrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of logits (n, V/p) that lie on a group's p ranks in parts of V.

    log sum exp over V is that of the p parts' own; the target's logit is on one of the ranks. So
    two numbers per token travel, once: 2 n (p-1) elements sent by each rank, none in backward.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: Group, first: int) -> Tensor:
        mine = targets - first
        here = (mine >= 0) & (mine < logits.shape[1])
        mine = mine.masked_fill(~here, 0).unsqueeze(1)  # (n, 1)
        target = logits.gather(1, mine).squeeze(1).masked_fill(~here, 0.0)
        own = torch.stack([torch.logsumexp(logits, 1), target])  # (2, n)
        sums, found = gather(group, own.unsqueeze(0), 0, "loss_forward").unbind(1)  # (p, n)
        total = torch.logsumexp(sums, 0)
        ctx.save_for_backward(logits - total.unsqueeze(1), mine, here)
        return (total - found.sum(0)).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        log_probabilities, mine, here = ctx.saved_tensors
        grad_logits = log_probabilities.exp()
        grad_logits.scatter_add_(1, mine, -here.unsqueeze(1).to(grad_logits.dtype))
        return grad_logits.mul_(grad / len(mine)), None, None, None


# ---- the layers of a GPT ------------------------------------------------------------------------
class TensorLayers:
    """The rank's block of every layer of a GPT: what the modes share.

    groups   {axis: this rank's group}; "tp" is all of them

    scatter  what makes the embedding of the ranks' parts of it
    samples  of the micro-batch that these are the parts of
    """

    scatter: Any
    samples = slice(None)
    vocab_axis = "tp"  # over which the logits of a token are dealt out

    def __init__(
        self, model: ModelSpec, plan: Plan, groups: Mapping[str, Group],
        halves: WeightHalves | None = None,
    ) -> None:  # fmt: skip
        self.model, self.plan, self.groups, self.halves = model, plan, groups, halves
        self.index = groups["tp"].index

    def local(self, what: str) -> Box:
        return activation_box(self.model, self.plan, what, self.index)

    def embedding(self, model: ModelSpec) -> Embedding:
        token, position = (
            holding(model, self.plan, f"embedding.{name}.weight", self.index).box
            for name in ("token", "position")
        )
        return Embedding(token=token, position=position, leave=self.scatter, drop=self.dropout,
                         p=model.dropout, samples=self.samples)  # fmt: skip

    def dropout(self, x: Tensor, p: float, what: str) -> Tensor:
        """The mask is that of one device, drawn whole; the rank keeps its part of it.

        what  "residual" or "scores". Costs the memory of the whole mask for a moment, and its time
        """
        if p == 0.0:
            return x
        model, batch = self.model, self.plan.microbatch_size
        whole = {"residual": (batch, model.seq_len, model.hidden),
                 "scores": (batch, model.heads, model.seq_len, model.seq_len)}[what]  # fmt: skip
        mask = dropped(x.new_ones(whole), p, what)[self.local(what)]
        return x * mask.clone()  # the whole mask is given back

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        samples, _, entries = self.local("logits")
        group = self.groups[self.vocab_axis]
        rows = logits.flatten(0, 1).float()
        return CrossEntropy.apply(rows, targets[samples].flatten(), group, entries.start)


class Partition:
    """Of a block's input, the same on all ranks, each keeps a part of the sequence."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def part(self, x: Tensor) -> Tensor:
        return x.chunk(self.group.size, dim=1)[self.group.index].clone()

    def whole(self, part: Tensor) -> Tensor:
        return gather(self.group, part, 1, "recompute")


class Layers1D(TensorLayers):
    """The sets of layers of Megatron-LM, with or without sequence parallelism."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        group, along = self.groups["tp"], 1  # the sequence's dimension
        sequence = self.plan.sequence_parallel
        self.enter = Gather(group, along) if sequence else Copy(group)
        self.leave = self.scatter = Scatter(group, along) if sequence else Reduce(group)
        self.partition = Partition(group) if self.plan.partition_activations else None

    def layers(self) -> Layers:
        return Layers(linear=self.linear, norm=nn.LayerNorm, embedding=self.embedding,
                      tied=Tied(enter=self.enter), dropout=self.dropout, loss=self.loss,
                      partition=self.partition)  # fmt: skip

    def linear(self, inputs: int, outputs: int, *, bias: bool = True, role: str) -> Linear:
        """qkv, up and the logits are cut by columns, proj and down by rows."""
        t = self.plan.tp
        if role in ("proj", "down"):
            return Linear(inputs // t, outputs, bias=bias, leave=self.leave, halves=self.halves)
        what = "head" if role == "output" else "linear"
        return Linear(inputs, outputs // t, bias=bias, enter=self.enter, halves=self.halves,
                      what=what)  # fmt: skip
