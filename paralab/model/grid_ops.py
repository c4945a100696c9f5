"""The ops of a layer that is cut in two or three dimensions: 2D, 2.5D and 3D tensor parallelism.

1D cuts the weights and keeps the activations whole on every rank. Here both are cut, no rank ever
has a whole row or column of anything, and a product Y = X W first brings together what it needs.
Which block lies where is in the tables of parallel/layouts.py; this file has what travels. X is
(M, K) with M = b s, W is (K, N); bytes are elements that a rank sends, on average.

2D, on q x q ranks. Rank (i, j) has block (i, j) of X, W and Y, and a product is SUMMA (van de Geijn
& Watts 1997, "SUMMA: scalable universal matrix multiplication algorithm"; for transformers Optimus,
Xu+ 2021, arXiv:2104.05343, sec. 3.1, algorithms 1-3). In step l everybody gets what it needs from
row and column l and adds one product:

    Y = X W       X_il to all of row i, W_lj to all of column j
    X' = Y' W^T   W_lj to all of column j; row i adds up what becomes X'_il on rank (i, l)
    W' = X^T Y'   X_il to all of row i; column j adds up what becomes W'_lj on rank (l, j)

    forward (q-1)/q^2 (MK + KN), backward twice that; 1D on P ranks: 4 (P-1)/P M N for a pair

2.5D, on d grids of q x q. Each grid has its own samples and the same weights: data parallelism over
2D grids (Tesseract, Wang+ 2021, arXiv:2105.14500, sec. 3; the 2.5D of Solomonik & Demmel 2011,
after which it is named, deals the terms of the sum out over the grids and adds up Y). Inside a grid
it is 2D, with M/d for M; the weights' gradients are summed over the grids once a step: 2 (d-1)/d
KN/q^2 more (`Program.shared`).

3D, on q x q x q. The M K N multiplications are a cuboid, cut into q^3; a rank brings the faces of
its own together (Agarwal+ 1995, "A three-dimensional approach to parallel matrix multiplication";
for transformers Bian+ 2021, arXiv:2105.14450). On rank (i, j, k), with "(i,j)" for sharded over
i, and each part of it over j:

           lies as                 brought together along     for the product
    X      rows (i,j), columns k   j                          rows i, columns k
    W      rows k, columns (j,i)   i                          rows k, columns j
    Y      rows (i,k), columns j   summed along k             rows i, columns j, one of q terms

    forward (q-1)/q^3 (MK + KN + MN), backward as much

Y lies as X does with j and k having changed places, and the next layer changes them back.

Memory: 2D has 1/q^2 of weights and activations; 2.5D 1/q^2 and 1/(d q^2); 3D 1/q^3, but it keeps
for backward what forward brought together, (MK + KN)/q^2 elements, where SUMMA sends it again.

An op lists its messages in ``calls``, in their order, and makes exactly these. Weights are (N, K),
as torch's. Lab 08.
"""

from __future__ import annotations

from paralab.model.ops import METHODS, Call, Linear, Norm, Op, gather_pair
from paralab.model.part import Part
from paralab.theory.work import Work, linear

# In 3D, the axes that X is brought together along and that Y is summed along: of a layer that leads
# out of the residual stream, and of one that leads back.
INWARD, OUTWARD = ("tp:j", "tp:k"), ("tp:k", "tp:j")


class Linear2D(Linear):
    """y = x W^T + b of blocks: x (T, K/q), weight (N/q, K/q) = W[out j, in i], y (T, N/q)."""

    def __init__(self, name: str, part: Part, weight: tuple, *, bias: bool = True) -> None:
        super().__init__(name, part, weight, bias=bias)
        (outputs, inputs), tokens, item, q = weight, part.tokens, part.item, part.q
        moves = self.moves(item * tokens * inputs, item * inputs * outputs, item * self.out)
        self.calls = {
            method: [Call(*one, self.phase(method), step) for step in range(q) for one in both]
            for method, both in moves.items()
        }
        self.q = q
        added, moved = 4 * self.out * bias, 8 * inputs * outputs * (1 + part.widens)
        x, g, w = linear(tokens, inputs, outputs, q)
        self.work = (
            x + Work(0, added, q + bias),
            g + Work(0, 0, q),
            w + Work(0, added + moved, q + 1 + bias),
        )

    def moves(self, x: int, w: int, y: int) -> dict[str, tuple]:
        """What travels in a step, as (op, axis, bytes); from the bytes of the blocks."""
        return {
            "forward": (("broadcast", "tp:row", x), ("broadcast", "tp:col", w)),
            "input": (("broadcast", "tp:col", w), ("reduce", "tp:row", x)),
            "weight": (("broadcast", "tp:row", x), ("reduce", "tp:col", w)),
        }

    def in_hand(self, method, received, *, alone=False):
        """Two blocks that came in; or one and a product, before that leaves: then what the root
        receives. Its own sum, where that is no result, may be there from a step before.
        """
        block, other = self.calls[method][:2]
        mine = other.payload * (method == "weight")
        return max(block.payload + other.payload + mine, received(other) + mine)

    def compute(self, weights, x, env):
        y = self.added("forward", x, weights["weight"], lambda a, b: (a, b.t()), env)
        if self.bias:
            y += weights["bias"]
        return y, x

    def differentiate(self, weights, x, g, env):
        return self.collected("input", weights["weight"], lambda w: g @ w, env), (x, g)

    def weight_grad(self, deferred, into, env):
        x, g = deferred
        into.add("weight", self.collected("weight", x, lambda x: g.t() @ x, env))
        if self.bias:
            into.add("bias", g.sum(0))

    def added(self, method, a, b, factors, env):
        """In each step two blocks come in, and their product is added."""
        total = None
        for step in range(self.q):
            left, right = factors(
                self.spread(method, 2 * step, a, env), self.spread(method, 2 * step + 1, b, env)
            )
            total = left @ right if total is None else total.addmm_(left, right)
            del left, right
        return total

    def collected(self, method, block, multiply, env):
        """In each step a block comes in, and the sum of its products goes to that step's rank."""
        mine = None
        for step in range(self.q):
            part = multiply(self.spread(method, 2 * step, block, env))
            env.call(self, method, 2 * step + 1, part)
            mine = part if env.roots(self, method, 2 * step + 1) else mine
            del part
        return mine

    def spread(self, method, number, block, env):
        """The root's block, on every rank of its row or column."""
        if not env.roots(self, method, number):
            block = block.new_empty(block.shape)
            env.buffers(block)
        env.call(self, method, number, block)
        return block


class Logits2D(Linear2D):
    """y = x E^T where E lies as the embedding, which it can be: (V over i, h over j), as W^T lies.
    So the three products change their roles:

        Y = X E^T     E_lj to all of column j; row i adds up what becomes Y_il on rank (i, l)
        X' = Y' E     Y'_il to all of row i, E_lj to all of column j
        E' = Y'^T X   Y'_il to all of row i; column j adds up what becomes E'_lj on rank (l, j)
    """

    def moves(self, x, w, y):
        return {
            "forward": (("broadcast", "tp:col", w), ("reduce", "tp:row", y)),
            "input": (("broadcast", "tp:row", y), ("broadcast", "tp:col", w)),
            "weight": (("broadcast", "tp:row", y), ("reduce", "tp:col", w)),
        }

    def compute(self, weights, x, env):
        return self.collected("forward", weights["weight"], lambda w: x @ w.t(), env), x

    def differentiate(self, weights, x, g, env):
        return self.added("input", g, weights["weight"], lambda a, b: (a, b), env), (x, g)

    def weight_grad(self, deferred, into, env):
        x, g = deferred
        into.add("weight", self.collected("weight", g, lambda g: g.t() @ x, env))


class Linear3D(Linear):
    """y = x W^T + b of blocks: x (T, K/q), weight (N/q^2, K/q), y (T, N/q), with T = b s/q^2.

    along   INWARD or OUTWARD
    thirds  parts of the output features that are sharded one by one (qkv: 3)
    """

    def __init__(
        self,
        name: str,
        part: Part,
        weight: tuple,
        along: tuple[str, str],
        thirds: int = 1,
        bias: bool = True,
    ) -> None:
        q, outputs, inputs = part.q, weight[0] * part.q, weight[1]
        super().__init__(name, part, (outputs, inputs), bias=bias)
        self.params["weight"] = weight
        self.keeps_input = self.defers_input = self.defers_grad = False  # but what they are part of
        self.q, self.terms, self.thirds = q, along[1], thirds
        rows = q * part.tokens
        x, w, y = (part.item * size for size in (rows * inputs, inputs * outputs, rows * outputs))
        forward, backward = self.phase("forward"), self.phase("input")
        self.calls = {
            "forward": [
                Call("all_gather", along[0], x, forward),
                Call("all_gather", "tp:i", w, forward),
                Call("reduce_scatter", along[1], y, forward),
            ],
            "input": [
                Call("all_gather", along[1], y, backward),
                Call("reduce_scatter", along[0], x, backward, beside=True),
            ],
            "weight": [Call("reduce_scatter", "tp:i", w, backward)],
        }
        self.keeps, self.deferred, self.defers_kept = x + w, x + y, x
        mixed = thirds > 1  # the parts of W that arrive have to be put in order
        added, moved = 4 * self.out * bias, 8 * inputs * outputs
        x, g, w = linear(rows, inputs, outputs)
        self.work = (
            x + Work(0, added + moved * mixed, 1 + bias + mixed),
            g + Work(0, 0, 1),
            w + Work(0, added + moved * mixed + moved / q, 2 + bias + mixed),
        )

    def in_hand(self, method, received, *, alone=False):
        """A sum on its way: of Y, of X's gradient, which is that while the weight half runs too,
        and of W's. The parts of W are put in order before.
        """
        (*_, y), (_, x), (w,) = (self.calls[name] for name in METHODS)
        ordered = w.payload * (self.thirds > 1)
        if method == "forward":
            return max(ordered - y.payload // self.q, y.payload + received(y))
        beside = 0 if alone else x.payload + received(x)
        if method == "input":
            return beside
        return beside + w.payload + max(ordered, w.payload // self.q + received(w))

    def compute(self, weights, x, env):
        rows = self.gather("forward", 0, x, env)  # (q T, K/q)
        w = self.gather("forward", 1, weights["weight"], env)  # (N/q, K/q)
        w = w.view(self.q, self.thirds, -1, w.shape[1]).transpose(0, 1).reshape(w.shape)
        y = x.new_empty((x.shape[0], w.shape[0]))
        env.call(self, "forward", 2, y, rows @ w.t())
        if self.bias:
            y += weights["bias"]
        return y, (rows, w)

    def differentiate(self, weights, kept, g, env):
        rows, w = kept
        whole = self.gather("input", 0, g, env)  # (q T, N/q)
        gx = g.new_empty((g.shape[0], w.shape[1]))
        env.beside(self, "input", 1, gx, whole @ w)
        return gx, (rows, whole)

    def weight_grad(self, deferred, into, env):
        rows, whole = deferred
        parts = (whole.t() @ rows).view(self.thirds, self.q, -1, rows.shape[1])  # one of q terms
        parts = parts.transpose(0, 1).contiguous()
        mine = parts.new_empty((parts[0].numel() // rows.shape[1], rows.shape[1]))
        env.call(self, "weight", 0, mine, parts)
        into.add("weight", mine)
        if self.bias:
            into.add("bias", whole.chunk(self.q)[env.groups[self.terms].index].sum(0))

    def gather(self, method, number, part, env):
        """The parts of an axis's ranks, one under the other."""
        whole = part.new_empty((self.q * part.shape[0], part.shape[1]))
        env.buffers(whole)
        env.call(self, method, number, whole, part)
        return whole


class SplitNorm(Norm):
    """LayerNorm of features that ranks have equal parts of.

    Forward two numbers per token travel, mean and variance of each part, which add up exactly
    (Chan+ 1979, "Updating formulae and a pairwise algorithm for computing sample variances");
    backward two sums. The arithmetic is in fp32.
    """

    def __init__(self, name: str, part: Part, *, forks: bool = True) -> None:
        super().__init__(name, part, forks=forks)
        self.parts, axis, item = part.q, part.features_axis, part.item
        self.keeps = two = 8 * part.tokens  # two numbers of each token
        low = item < 4
        self.calls = {
            "forward": [Call("all_gather", axis, two * self.parts, "norm_forward")],
            "input": [Call("all_reduce", axis, two, "norm_backward")],
        }
        self.scratch = (
            4 * self.out * (1 + 2 * low) + two * self.parts,
            self.out * (16 - item if low else 8) + two + 4 * part.width - self.deferred,
            0,
        )
        self.work = (
            Work(0, 28 * self.out, 12),
            Work(0, (52 + 4 * forks) * self.out, 12 + forks),
            Work(0, 0, 2),
        )

    def compute(self, weights, x, env):
        import torch

        rows = x.float()
        variance, mean = torch.var_mean(rows, -1, correction=0)
        means, variances = gather_pair(self, mean, variance, env)
        mean = means.mean(0)
        variance = variances.mean(0) + (means - mean).square_().mean(0)
        mean, scale = mean.unsqueeze(1), variance.add_(1e-5).rsqrt_().unsqueeze(1)
        normal = (rows - mean).mul_(scale)
        y = torch.addcmul(weights["bias"].float(), normal, weights["weight"].float())
        return y.to(x.dtype), (x, mean, scale)

    def differentiate(self, weights, kept, g, env):
        import torch

        x, mean, scale = kept
        normal = (x.float() - mean).mul_(scale)
        g = g.float()
        inner = g * weights["weight"].float()
        sums = torch.stack([inner.sum(1), (inner * normal).sum(1)])
        env.buffers(sums)
        env.call(self, "input", 0, sums)
        about, along = sums.div_(self.parts * x.shape[1]).unsqueeze(2)
        gw, gb = (g * normal).sum(0), g.sum(0)
        gx = inner.sub_(about).sub_(normal.mul_(along)).mul_(scale).to(x.dtype)
        return gx, (gw.to(x.dtype), gb.to(x.dtype))


class Scatter(Op):
    """Behind the look-up of tokens: the sum over the ranks that share the vocabulary, of which each
    rank gets its samples. In backward each of them gets the gradients of all.
    """

    keeps_input = False

    def __init__(self, name: str, part: Part) -> None:
        super().__init__(name)
        self.parts, self.out = part.lookups // part.tokens, part.tokens * part.width
        axis, whole = part.entries_axis, part.item * part.lookups * part.width
        self.calls = {
            "forward": [Call("reduce_scatter", axis, whole, self.phase("forward"))],
            "input": [Call("all_gather", axis, whole, self.phase("input"))],
        }

    def compute(self, weights, x, env):
        mine = x.new_empty((x.shape[0] // self.parts, x.shape[1]))
        env.call(self, "forward", 0, mine, x)
        return mine, None

    def differentiate(self, weights, kept, g, env):
        whole = g.new_empty((g.shape[0] * self.parts, g.shape[1]))
        env.call(self, "input", 0, whole, g)
        return whole, None
