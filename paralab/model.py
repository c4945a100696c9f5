"""The GPT that every plan trains, written for one device; it knows nothing of ranks.

Pre-LayerNorm blocks, learned positions, a GELU MLP four times as wide, as GPT-2 and Megatron-LM
have them. A model is a list of parts, ``embedding``, ``blocks.0`` ... and ``head``, addressed by
their global index, so that any paradigm can hold a slice of it; and it takes a set of layers, so
that a paradigm can compute one its own way, or hold a block of its weights.

[Note: initial weights] Every parameter is drawn from a generator of its own, seeded by the run's
seed and the parameter's name. So a rank that holds a part of the model draws exactly what the
one-device model has there, without drawing the rest; of a tensor it holds a slice of, it draws the
whole and keeps its slice.

Shapes: B samples, s tokens, h hidden, a heads, d = h/a, V vocabulary.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paralab.checks import choice
from paralab.parallel.recompute import recomputed
from paralab.spec import ModelSpec

if TYPE_CHECKING:
    from paralab.parallel.layouts import Holding


def dense(inputs: int, outputs: int, *, bias: bool = True, role: str = "") -> nn.Module:
    return nn.Linear(inputs, outputs, bias=bias)


def dropped(x: Tensor, p: float, what: str = "residual") -> Tensor:
    return F.dropout(x, p)


class Embedding(nn.Module):
    """Token plus position embedding."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.token = nn.Embedding(spec.vocab, spec.hidden)
        self.position = nn.Embedding(spec.seq_len, spec.hidden)
        self.p = spec.dropout

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(positions)  # (B, s, h)
        return dropped(x, self.p if self.training else 0.0)


def mean_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    rows = logits.flatten(0, 1).float()  # 16 bits are too few for a sum over V
    return F.cross_entropy(rows, targets.flatten())  # mean over B*s tokens


@dataclass(frozen=True, kw_only=True)
class Layers:
    """What a model is made of. A layer may hold and see a block of its tensors alone: of which
    sizes is its own affair, as long as one layer's result is what the next one takes.

    linear     called as ``linear(inputs, outputs, bias=..., role=...)`` with the whole layer's
               sizes; role is "qkv", "proj", "up", "down" or "output"
    norm       called with h
    embedding  called with the ModelSpec; maps (B, s) tokens to (B, s, h), dropped already
    tied       maps (B, s, h) and the token embedding's weight to logits, (B, s, V)
    dropout    called as ``dropout(x, p, what)``; what is "residual" or "scores"
    loss       maps logits and (B, s) targets to the mean cross-entropy per token
    partition  keeps a part of a block's input: `parallel.recompute.recomputed`
    """

    linear: Callable[..., nn.Module] = dense
    norm: Callable[[int], nn.Module] = nn.LayerNorm
    embedding: Callable[[ModelSpec], nn.Module] = Embedding
    tied: Callable[[Tensor, Tensor], Tensor] = F.linear
    dropout: Callable[[Tensor, float, str], Tensor] = dropped
    loss: Callable[[Tensor, Tensor], Tensor] = mean_cross_entropy
    partition: Any = None


class Attention(nn.Module):
    """Causal self-attention. "explicit" writes the (s, s) scores the papers' formulas count."""

    def __init__(self, spec: ModelSpec, layers: Layers, recompute: str) -> None:
        super().__init__()
        self.width, self.kind, self.p = spec.hidden // spec.heads, spec.attention, spec.dropout
        self.recompute, self.dropout = recompute, layers.dropout
        self.qkv = layers.linear(spec.hidden, 3 * spec.hidden, role="qkv")
        self.proj = layers.linear(spec.hidden, spec.hidden, role="proj")
        hidden_future = torch.ones(spec.seq_len, spec.seq_len, dtype=torch.bool).triu(1)
        self.register_buffer("hidden_future", hidden_future, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        p = self.p if self.training else 0.0
        if self.recompute == "selective":
            mixed = recomputed(self.core, self.qkv(x), draws=p > 0)
        else:
            mixed = self.core(self.qkv(x))
        return self.dropout(self.proj(mixed), p, "residual")  # (B, s, h)

    def core(self, qkv: Tensor) -> Tensor:
        """From queries, keys and values, (B, s, 3h), to what the heads found, (B, s, h): of all
        heads, or of those that are here.
        """
        batch, s, _ = qkv.shape
        q, k, v = qkv.view(batch, s, 3, -1, self.width).permute(2, 0, 3, 1, 4)  # (B, a, s, d)
        p = self.p if self.training else 0.0
        if self.kind == "sdpa":
            mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        else:
            scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1)  # (B, a, s, s)
            scores = scores.masked_fill(self.hidden_future[:s, :s], float("-inf"))
            mixed = self.dropout(F.softmax(scores, dim=-1), p, "scores") @ v  # (B, a, s, d)
        return mixed.transpose(1, 2).reshape(batch, s, -1)


class MLP(nn.Module):
    def __init__(self, spec: ModelSpec, layers: Layers) -> None:
        super().__init__()
        self.up = layers.linear(spec.hidden, 4 * spec.hidden, role="up")
        self.down = layers.linear(4 * spec.hidden, spec.hidden, role="down")
        self.dropout, self.p = layers.dropout, spec.dropout

    def forward(self, x: Tensor) -> Tensor:
        p = self.p if self.training else 0.0
        return self.dropout(self.down(F.gelu(self.up(x), approximate="tanh")), p, "residual")


class Block(nn.Module):
    def __init__(self, spec: ModelSpec, layers: Layers, recompute: str) -> None:
        super().__init__()
        self.p, self.recompute, self.partition = spec.dropout, recompute, layers.partition
        self.norm1 = layers.norm(spec.hidden)
        self.attention = Attention(spec, layers, recompute)
        self.norm2 = layers.norm(spec.hidden)
        self.mlp = MLP(spec, layers)

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute == "full":  # inside the module: its hooks see one forward, not two
            draws = self.training and self.p > 0
            return recomputed(self.compute, x, parameters=self.parameters(), draws=draws,
                              partition=self.partition)  # fmt: skip
        return self.compute(x)

    def compute(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # (B, s, h)


class Head(nn.Module):
    """Last norm, logits and loss. Where it has no ``output`` of its own, the token embedding's
    weight is passed in at the call.
    """

    def __init__(self, spec: ModelSpec, layers: Layers, *, own_output: bool) -> None:
        super().__init__()
        self.norm, self.tied, self.loss = layers.norm(spec.hidden), layers.tied, layers.loss
        if own_output:
            self.output = layers.linear(spec.hidden, spec.vocab, bias=False, role="output")

    def forward(self, x: Tensor, targets: Tensor, tied_weight: Tensor | None = None) -> Tensor:
        x = self.norm(x)
        logits = self.output(x) if tied_weight is None else self.tied(x, tied_weight)  # (B, s, V)
        return self.loss(logits, targets)


class GPT(nn.Module):
    """The whole model on one device, or some of its consecutive parts.

    ``GPT(spec, seed=0)(tokens, targets)`` returns the mean cross-entropy per token, a scalar; both
    arguments are (B, s) int64. Parameter names and shapes are ``spec.parameter_shapes()``.

    parts      names of the parts to hold, in order. Without "embedding" the input is the residual
               stream, (B, s, h), without "head" the result is. A head that is tied to an embedding
               held elsewhere starts from a copy of it, ``head.output.weight``
    layers     what it is made of; by default whole layers of torch's
    holding    called with a parameter's name: which block of it is held (parallel/layouts.py)
    recompute  what its blocks compute a second time in backward: parallel/recompute.py
    empty      parameters have shapes, and one element each to fill them: whoever asked for that
               gives them memory, and calls `initialize`, one after the other
    before     called with the name of each part just before it runs
    """

    def __init__(
        self, spec: ModelSpec, *, seed: int = 0, parts: Iterable[str] | None = None,
        layers: Layers | None = None, holding: Callable[[str], Holding] | None = None,
        recompute: str = "none", device: str = "cpu", empty: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        choice("recompute", recompute, ("none", "selective", "full"))
        layers = Layers() if layers is None else layers
        whole = ("embedding", *(f"blocks.{i}" for i in range(spec.layers)), "head")
        self.parts = whole if parts is None else tuple(parts)
        self.before: Callable[[str], None] | None = None
        self.tied = spec.tied and "embedding" in self.parts
        with torch.device("meta"):  # no memory and no draw of torch's own initial weights
            if "embedding" in self.parts:
                self.embedding = layers.embedding(spec)
            self.blocks = nn.ModuleList()
            for name in self.parts:
                if name.startswith("blocks."):  # under its own number, whichever comes first here
                    block = Block(spec, layers, recompute)
                    self.blocks.add_module(name.removeprefix("blocks."), block)
            if "head" in self.parts:
                self.head = Head(spec, layers, own_output=not self.tied)
        for module in self.modules():
            for name, meta in module.named_parameters(recurse=False):
                made = torch.empty(1 if empty else meta.shape, device=device)
                setattr(module, name, nn.Parameter(made.expand(meta.shape)))
            if isinstance(module, Attention):
                module.hidden_future = torch.ones_like(module.hidden_future, device=device).triu(1)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(spec.trainable(name))
            if not empty:
                initialize(parameter, name=name, spec=spec, seed=seed, holding=holding)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        for name in self.parts:
            x = self.compute(name, x, targets)
        return x

    def compute(self, name: str, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """One part alone."""
        if self.before is not None:
            self.before(name)
        part = self.get_submodule(name)
        if name == "head":
            return part(x, targets, self.embedding.token.weight if self.tied else None)
        return part(x)


@torch.no_grad()
def initialize(
    parameter: Tensor, *, name: str, spec: ModelSpec, seed: int,
    holding: Callable[[str], Holding] | None = None,
) -> None:  # fmt: skip
    """Fill ``parameter`` in place with what the model called ``name`` starts from, or the block of
    that which ``holding(name)`` says it is.

    GPT-2's rule: normal with deviation 0.02, the two projections into the residual stream divided
    by sqrt(2 l); biases 0, norm weights 1. A tied head's copy starts from what the embedding starts
    from. See [Note: initial weights]. A dry run's tensors have no values to fill.
    """
    if parameter.is_meta:
        return
    if spec.tied and name == "head.output.weight":
        name = "embedding.token.weight"
    if name.endswith("bias"):
        parameter.zero_()
    elif "norm" in name:
        parameter.fill_(1.0)
    else:
        deviation = 0.02
        if name.endswith(("proj.weight", "down.weight")):
            deviation /= math.sqrt(2 * spec.layers)
        # 32 bits: all that torch's CPU generator takes of a seed
        own = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        mine = None if holding is None else holding(name)
        shape = parameter.shape if mine is None else mine.whole
        drawn = torch.empty(shape).normal_(0.0, deviation, generator=own)
        parameter.copy_(drawn if mine is None else drawn[mine.box].reshape(mine.shape))
