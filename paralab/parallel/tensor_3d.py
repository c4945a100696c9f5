"""3D tensor parallelism: a cube of q x q x q ranks, each with 1/q^3 of X, of W and of Y.

A product Y = X W has M K N multiplications, a cuboid; a cube of ranks cuts it into q^3 cuboids, one
for each, and the faces of such a cuboid are what its rank has to bring together (Agarwal+ 1995, "A
three-dimensional approach to parallel matrix multiplication"; for transformers Bian+ 2021,
arXiv:2105.14450). Rank (i, j, k), with "(i,j)" for over i, and each part of it over j:

           lies as                 brought together along     for the product
    X      rows (i,j), columns k   j                          rows i, columns k
    W      rows k, columns (j,i)   i                          rows k, columns j
    Y      rows (i,k), columns j   summed along k             rows i, columns j, one of q terms

So Y lies as X does with j and k having changed places; the next layer changes them back. The
residual stream is X's way, what is between qkv and proj, or up and down, is Y's. Weights are stored
as torch has them, (columns, rows).

Bytes, per rank: two all-gathers and a reduce-scatter forward, and backward the conjugate three,

    forward (q-1)/q^3 (MK + KN + MN) elements, backward as much

Bytes per rank fall with P^(2/3): nothing else falls faster. What was brought together for forward
is kept for backward, M K/q^2 + K N/q^2 elements, q times the rank's own: that is its price in
memory. Parameters, gradients, optimizer states and the residual stream are 1/q^3.

Attention has a/q heads of B/q^2 samples. Norms add up along k. The embedding's entries are over
(j,i), its features over k: its lookup is a sum over i and j, a reduce-scatter that leaves B/q^2
samples, and the logits are a product like any other. Norms, biases and positions are the same on
q^2 ranks with other tokens: their gradients are summed over these once per step. Lab 08.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from paralab.comm import Group
from paralab.model import Layers
from paralab.parallel.tensor_2d import SplitNorm
from paralab.parallel.tensor_parallel import Scatter, TensorLayers, done, gather, reduce_scatter


class Cube:
    """What one product goes along: X is brought together along ``rows``, W along ``shares``, Y
    summed along ``terms``. thirds: parts of the features out that are dealt out one by one (qkv: 3)
    """

    def __init__(
        self, rows: Group, shares: Group, terms: Group, *, what: str, thirds: int = 1
    ) -> None:
        self.rows, self.shares, self.terms = rows, shares, terms
        self.what, self.thirds = what, thirds

    def whole_weight(self, weight: Tensor, phase: str) -> Tensor:
        """From the ranks' (N/q^2, K/q) to (N/q, K/q)."""
        parts = gather(self.shares, weight.unflatten(0, (self.thirds, -1)), 1, phase)
        return parts.flatten(0, 1)

    def share_of(self, grad: Tensor, phase: str) -> Tensor:
        """The conjugate: from (N/q, K/q) on q ranks to this rank's part of the sum."""
        parts = grad.unflatten(0, (self.thirds, -1))
        return done(reduce_scatter(self.shares, parts, 1, phase)).flatten(0, 1)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, cube: Cube) -> Tensor:
        phase = f"{cube.what}_forward"
        rows, w = gather(cube.rows, x, 0, phase), cube.whole_weight(weight, phase)
        ctx.save_for_backward(rows, w)
        ctx.cube = cube
        return done(reduce_scatter(cube.terms, rows @ w.t(), 0, phase))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        rows, w = ctx.saved_tensors
        cube, phase = ctx.cube, f"{ctx.cube.what}_backward"
        whole = gather(cube.terms, grad, 0, phase)  # of Y, rows i, columns j
        grad_x = grad_weight = call = None
        if ctx.needs_input_grad[0]:
            grad_x, call = reduce_scatter(cube.rows, whole @ w, 0, phase)
        if ctx.needs_input_grad[1]:
            grad_weight = cube.share_of(whole.flatten(0, -2).t() @ rows.flatten(0, -2), phase)
        if call is not None:
            call.wait()
        return grad_x, grad_weight, None


class Linear3D(nn.Linear):
    """Block (i, j, k) of a linear layer."""

    def __init__(self, inputs: int, outputs: int, *, cube: Cube, bias: bool = True) -> None:
        q = cube.rows.size
        super().__init__(inputs // q, outputs // (q * q), bias=False)
        self.bias = nn.Parameter(torch.empty(outputs // q)) if bias else None
        self.cube = cube

    def forward(self, x: Tensor) -> Tensor:
        y = _Product.apply(x, self.weight, self.cube)
        return y if self.bias is None else y + self.bias


class Logits3D:
    """Logits from the token embedding's weight, which lies as an output layer's does."""

    def __init__(self, cube: Cube) -> None:
        self.cube = cube

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        return _Product.apply(x, weight, self.cube)


class Layers3D(TensorLayers):
    """The sets of layers of the cube."""

    vocab_axis = "tp:j"

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.i, self.j, self.k = (self.groups[f"tp:{axis}"] for axis in "ijk")
        self.scatter = Scatter(self.groups["tp:ij"], 0)

    def layers(self) -> Layers:
        return Layers(linear=self.linear, norm=self.norm, embedding=self.embedding,
                      tied=Logits3D(self.cube("output")), dropout=self.dropout,
                      loss=self.loss)  # fmt: skip

    def cube(self, role: str) -> Cube:
        """Which way a layer goes: out of the residual stream, or back into it."""
        what, thirds = "head" if role == "output" else "linear", 3 if role == "qkv" else 1
        along, across = (self.k, self.j) if role in ("proj", "down") else (self.j, self.k)
        return Cube(along, self.i, across, what=what, thirds=thirds)

    def linear(self, inputs: int, outputs: int, *, bias: bool = True, role: str) -> Linear3D:
        return Linear3D(inputs, outputs, cube=self.cube(role), bias=bias)

    def norm(self, features: int) -> SplitNorm:
        return SplitNorm(features, group=self.k)
