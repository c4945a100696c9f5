"""2D tensor parallelism: every matrix is cut into q x q blocks, on a grid of q x q ranks.

1D cuts the weights and keeps the activations whole on every rank. Here both are cut, and no rank
ever holds a whole row or column of anything: rank (i, j) has block (i, j) of X (samples over i,
features over j), of W and of Y. A product is SUMMA (van de Geijn & Watts 1997, "SUMMA: scalable
universal matrix multiplication algorithm"): in step l everybody gets the blocks it needs from row
and column l and adds one product,

    Y_ij = sum_l X_il W_lj

    Y = X W       X_il to all of row i, W_lj to all of column j, for each l
    X' = Y' W^T   W_lj to all of column j; each row adds up what becomes X'_il on rank (i, l)
    W' = X^T Y'   X_il to all of row i; each column adds up what becomes W'_lj on rank (l, j)

which is Optimus (Xu+ 2021, arXiv:2104.05343, sec. 3.1, algorithms 1-3). Weights are stored as torch
has them, (N, K): the block on rank (i, j) is W[features out j, features in i].

Bytes: a broadcast or a sum of q blocks to or from q-1 others, so per rank on average

    forward 1 (q-1)/q^2 (MK + KN) elements, backward twice that; 1D: 4 (P-1)/P M N for a pair

Bytes per rank fall with sqrt(P), where 1D's do not fall at all. Memory: 1/q^2 of the weights and of
all activations (1D: of the weights and of those between its pairs). Messages: 6 q of them per layer
in place of 2.

Attention needs whole sequences and whole heads, and has both: a/q heads of B/q samples. A norm adds
up over a row: mean and squared deviation of q parts of the features, two numbers per token. The
embedding looks its B s tokens up in V/q entries and h/q features, a reduce-scatter over the column
makes B/q samples of it. Logits are Y = X E^T with E as it lies there, (V over i, h over j): the
second form above, forward. Norms, biases and positions are held by a whole column, whose ranks see
other samples: their gradients are summed over it once per step (shared_gradients.py). Lab 08.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from paralab.comm import Group
from paralab.model import Layers
from paralab.parallel.tensor_parallel import Scatter, TensorLayers, gather


class Grid2D:
    """One layer's rank (i, j) among q x q, and the three products of SUMMA.

    row  the ranks (i, 0) ... (i, q-1); column the ranks (0, j) ... (q-1, j)
    what the layers are: their calls are rows of "<what>_forward" and "<what>_backward"

    Activations are (tokens, features) blocks, weights (features out, features in) as torch's.
    """

    def __init__(self, row: Group, column: Group, what: str) -> None:
        self.row, self.column, self.what = row, column, what
        self.i, self.j, self.q = column.index, row.index, row.size

    def product(self, x: Tensor, w: Tensor, phase: str) -> Tensor:
        """Y = X W^T of blocks x_ij (m, k) and w_ij = W[out j, in i] (n, k): y_ij (m, n)."""
        y = None
        for step in range(self.q):
            x_step, w_step = self.spread(self.row, x, step, phase), None
            w_step = self.spread(self.column, w, step, phase)
            partial = x_step @ w_step.t()
            y = partial if y is None else y.add_(partial)
        return y

    def product_input(self, y: Tensor, w: Tensor, phase: str) -> Tensor:
        """X' = Y' W of blocks y_ij (m, n) and w_ij = W[out j, in i] (n, k): x'_ij (m, k)."""
        mine = None
        for step in range(self.q):
            part = y @ self.spread(self.column, w, step, phase)
            mine = self.collect(self.row, part, step, phase, mine)
        return mine

    def product_weight(self, y: Tensor, x: Tensor, phase: str) -> Tensor:
        """W' = Y'^T X of blocks y_ij (m, n) and x_ij (m, k): w'_ij (n, k), [out j, in i]."""
        mine = None
        for step in range(self.q):
            part = y.t() @ self.spread(self.row, x, step, phase)
            mine = self.collect(self.column, part, step, phase, mine)
        return mine

    def spread(self, group: Group, block: Tensor, step: int, phase: str) -> Tensor:
        """Member ``step``'s block, on every member of the row or column."""
        if group.index == step:
            block = block.contiguous()
        else:
            block = torch.empty(block.shape, dtype=block.dtype, device=block.device)
            group.recorder.owns("buffers", block)
        group.broadcast(block, root=group.ranks[step], phase=phase).wait()
        return block

    def collect(
        self, group: Group, part: Tensor, step: int, phase: str, mine: Tensor | None
    ) -> Tensor | None:
        """Member ``step`` gets the sum of the members' parts; the others keep what they have."""
        part = part.contiguous()
        group.reduce(part, root=group.ranks[step], phase=phase).wait()
        return part if group.index == step else mine


class Linear2D(nn.Linear):
    """Block (i, j) of a linear layer: features in over i, features out over j."""

    def __init__(
        self, inputs: int, outputs: int, *, grid: Grid2D, bias: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(inputs // grid.q, outputs // grid.q, bias=bias)
        self.grid = grid

    def forward(self, x: Tensor) -> Tensor:
        return _Linear2D.apply(x, self.weight, self.bias, self.grid)


class _Linear2D(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, grid: Grid2D) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.grid = grid
        y = grid.product(x.flatten(0, -2), weight, f"{grid.what}_forward")
        y = y if bias is None else y.add_(bias)
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        x, weight = ctx.saved_tensors
        grid, phase = ctx.grid, f"{ctx.grid.what}_backward"
        rows = grad.flatten(0, -2)
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = grid.product_input(rows, weight, phase).view(x.shape)
        if ctx.needs_input_grad[1]:
            grad_weight = grid.product_weight(rows, x.flatten(0, -2), phase)
        if ctx.needs_input_grad[2]:
            grad_bias = rows.sum(0)
        return grad_x, grad_weight, grad_bias, None


class Logits2D(nn.Module):
    """Y = X E^T where E lies as the embedding does: entries of the vocabulary over i, features over
    j. Y's entries are then over j: rank (i, l) gets those of the embedding's row l.
    """

    def __init__(self, grid: Grid2D) -> None:
        super().__init__()
        self.grid = grid

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return _Logits2D.apply(x, weight, self.grid)


class _Logits2D(torch.autograd.Function):
    """The products of `_Linear2D` in other roles, as W = E^T: E_ij = W^T[in j, out i]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, grid: Grid2D) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.grid = grid
        # Y = X E^T is "X' = Y' W" with E_ij^T in W's place: (h/q, V/q), out j and in i.
        y = grid.product_input(x.flatten(0, -2), weight.t(), f"{grid.what}_forward")
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        x, weight = ctx.saved_tensors
        grid, phase = ctx.grid, f"{ctx.grid.what}_backward"
        rows = grad.flatten(0, -2)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = grid.product(rows, weight.t(), phase).view(x.shape)
        if ctx.needs_input_grad[1]:  # (h/q, V/q) transposed back
            grad_weight = grid.product_weight(x.flatten(0, -2), rows, phase).t().contiguous()
        return grad_x, grad_weight, None


class Output2D(Logits2D):
    """Logits from a weight of its own, that lies as the embedding's does."""

    def __init__(self, inputs: int, outputs: int, *, grid: Grid2D) -> None:
        super().__init__(grid)
        self.weight = nn.Parameter(torch.empty(outputs // grid.q, inputs // grid.q))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, self.weight)


class SplitNorm(nn.Module):
    """LayerNorm of features that lie on a group's p ranks in equal parts.

    Forward two numbers per token travel, mean and squared deviation of each part, which add up
    exactly (Chan+ 1979, "Updating formulae and a pairwise algorithm for computing sample
    variances"); backward two sums.
    """

    def __init__(self, features: int, *, group: Group, eps: float = 1e-5) -> None:
        super().__init__()
        self.group, self.eps = group, eps
        self.weight = nn.Parameter(torch.empty(features // group.size))
        self.bias = nn.Parameter(torch.empty(features // group.size))

    def forward(self, x: Tensor) -> Tensor:
        return _SplitNorm.apply(x, self.weight, self.bias, self.group, self.eps)


class _SplitNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, group: Group, eps: float
    ) -> Tensor:
        rows = x.float()
        deviation, mean = torch.var_mean(rows, -1, correction=0)
        own = torch.stack([mean, deviation]).unsqueeze(0)  # (1, 2, ...)
        means, deviations = gather(group, own, 0, "norm_forward").unbind(1)  # (p, ...)
        mean = means.mean(0)
        variance = deviations.mean(0) + (means - mean).square().mean(0)
        mean, scale = mean.unsqueeze(-1), torch.rsqrt(variance + eps).unsqueeze(-1)
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.group = group
        return torch.addcmul(bias.float(), (rows - mean) * scale, weight.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        x, weight, mean, scale = ctx.saved_tensors
        normal = (x.float() - mean) * scale
        grad = grad.float()
        inner = grad * weight.float()
        sums = torch.stack([inner.sum(-1), (inner * normal).sum(-1)])
        ctx.group.all_reduce(sums, phase="norm_backward").wait()
        about, along = (sums / (ctx.group.size * x.shape[-1])).unsqueeze(-1).unbind(0)
        grad_x = (inner - about - normal * along) * scale
        leading = tuple(range(x.dim() - 1))
        grad_weight, grad_bias = (grad * normal).sum(leading), grad.sum(leading)
        kind = weight.dtype
        return grad_x.to(x.dtype), grad_weight.to(kind), grad_bias.to(kind), None, None


class Layers2D(TensorLayers):
    """The sets of layers of Optimus, on one q x q grid or on several (tensor_25d.py)."""

    vocab_axis = "tp:row"

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.row, self.column = self.groups["tp:row"], self.groups["tp:col"]
        self.scatter = Scatter(self.column, 0)
        self.head = Grid2D(self.row, self.column, "head")

    def layers(self) -> Layers:
        return Layers(linear=self.linear, norm=self.norm, embedding=self.embedding,
                      tied=Logits2D(self.head), dropout=self.dropout, loss=self.loss)  # fmt: skip

    def linear(self, inputs: int, outputs: int, *, bias: bool = True, role: str) -> nn.Module:
        if role == "output":
            return Output2D(inputs, outputs, grid=self.head)
        grid = Grid2D(self.row, self.column, "linear")
        return Linear2D(inputs, outputs, grid=grid, bias=bias)

    def norm(self, features: int) -> SplitNorm:
        return SplitNorm(features, group=self.row)
