"""The ops of a layer that is sharded in two or three dimensions: 2D, 2.5D, 3D tensor parallelism.

1D shards the weights and replicates the activations. Here both are sharded, so that no rank ever
holds a whole row or column of a matrix, and a product Y = X W begins by gathering the blocks that
it needs. The tables of parallel/layouts.py say which rank holds which block; this file says which
blocks are sent. X is (M, K) with M = b s, and W is (K, N). Traffic is in elements that one rank
sends, on average over the ranks.

2D, on q x q ranks. Rank (i, j) holds block (i, j) of X, W and Y, and a product is SUMMA (van de
Geijn & Watts 1997, "SUMMA: scalable universal matrix multiplication algorithm"; for transformers
Optimus, Xu+ 2021, arXiv:2104.05343, sec. 3.1, algorithms 1-3). It has q steps. In step l every rank
receives blocks of row or column l and adds one product to a sum:

    Y = X W       X_il is broadcast in row i, W_lj in column j
    X' = Y' W^T   W_lj is broadcast in column j; row i reduces the products to X'_il on rank (i, l)
    W' = X^T Y'   X_il is broadcast in row i; column j reduces the products to W'_lj on rank (l, j)

    forward (q-1)/q^2 (MK + KN), backward twice that
    (1D on P ranks sends 4 (P-1)/P M h for a pair of layers, forward and backward)

2.5D, on d grids of q x q ranks. Each grid has its own samples and the same weights: data
parallelism over 2D grids (Tesseract, Wang+ 2021, arXiv:2105.14500, sec. 3). Its namesake, the 2.5D
of Solomonik & Demmel 2011, instead distributes the terms of the sum over the grids and adds up Y.
Inside a grid it is 2D, with M/d for M. Once per step the weights' gradients are summed over the
grids, which sends 2 (d-1)/d KN/q^2 more (`Program.shared`).

3D, on q x q x q ranks. The M K N multiplications form a cuboid, which is cut into q^3 smaller ones;
a rank gathers the two faces of its own that are its operands (Agarwal+ 1995, "A three-dimensional
approach to parallel matrix multiplication"; for transformers Bian+ 2021, arXiv:2105.14450). On rank
(i, j, k), where "(i,j)" means sharded over i, and each shard over j:

           stored as               all-gathered along         operand or result of the product
    X      rows (i,j), columns k   j                          rows i, columns k
    W      rows k, columns (j,i)   i                          rows k, columns j
    Y      rows (i,k), columns j   reduce-scattered along k   rows i, columns j, one of q terms

    forward (q-1)/q^3 (MK + KN + MN), backward as much

Y is stored as X is, but with j and k exchanged; the next layer exchanges them back.

Memory: 2D holds 1/q^2 of weights and activations, 2.5D 1/q^2 and 1/(d q^2), 3D 1/q^3 of both. But
3D saves the gathered operands for backward, (MK + KN)/q^2 elements, where SUMMA sends them again.

An op sends its messages in the order of ``calls``. Weights are (N, K), as in torch. Lab 08.
"""

from __future__ import annotations

from paralab.model.ops import METHODS, Call, Linear, Norm, Op, gather_pair
from paralab.model.part import Part
from paralab.theory.work import Work, linear

# In 3D, (the axis that X is gathered along, the axis that Y is summed along): INWARD of a layer
# that leads from the residual stream into a branch, OUTWARD of one that leads back.
INWARD, OUTWARD = ("tp:j", "tp:k"), ("tp:k", "tp:j")


class Linear2D(Linear):
    """y = x W^T + b by SUMMA: x (T, K/q), weight (N/q, K/q) = W[out j, in i], y (T, N/q)."""

    def __init__(self, name: str, part: Part, weight: tuple, *, bias: bool = True) -> None:
        super().__init__(name, part, weight, bias=bias)
        (outputs, inputs), tokens, item, q = weight, part.tokens, part.item, part.q
        pairs = self.pairs(item * tokens * inputs, item * inputs * outputs, item * self.out)
        self.calls = {
            method: [Call(*call, self.phase(method), step) for step in range(q) for call in pair]
            for method, pair in pairs.items()
        }
        self.q = q
        added, moved = 4 * self.out * bias, 8 * inputs * outputs * (1 + part.widens)
        x, g, w = linear(tokens, inputs, outputs, q)
        self.work = (
            x + Work(0, added, q + bias),
            g + Work(0, 0, q),
            w + Work(0, added + moved, q + 1 + bias),
        )

    def pairs(self, x: int, w: int, y: int) -> dict[str, tuple]:
        """{method: (operation, axis, bytes) of the two messages in each of SUMMA's steps}.

        x, w, y  bytes of a rank's blocks
        """
        return {
            "forward": (("broadcast", "tp:row", x), ("broadcast", "tp:col", w)),
            "input": (("broadcast", "tp:col", w), ("reduce", "tp:row", x)),
            "weight": (("broadcast", "tp:row", x), ("reduce", "tp:col", w)),
        }

    def temporaries(self, method, received, *, alone=False):
        """Two received blocks, or one and its product; later the root's buffers for a reduce. In
        the weight half the rank's own sum, an output of no method, may exist since an earlier step.
        On a grid of one rank (q = 1) every block is the rank's own, and its product is the sum.
        """
        first, second = self.calls[method][:2]
        own_sum = second.payload * (method == "weight")
        if self.q == 1:
            return own_sum
        return max(first.payload + second.payload + own_sum, received(second) + own_sum)

    def compute(self, weights, x, env):
        y = self.sum_products("forward", x, weights["weight"], lambda a, b: (a, b.t()), env)
        if self.bias:
            y += weights["bias"]
        return y, x

    def differentiate(self, weights, x, g, env):
        return self.reduce_products("input", weights["weight"], lambda w: g @ w, env), (x, g)

    def weight_grad(self, deferred, into, env):
        x, g = deferred
        into.add("weight", self.reduce_products("weight", x, lambda x: g.t() @ x, env))
        if self.bias:
            into.add("bias", g.sum(0))

    def sum_products(self, method, a, b, factors, env):
        """In each step receive a block of a and a block of b, and add their product to a sum."""
        total = None
        for step in range(self.q):
            left, right = factors(
                self.received_block(method, 2 * step, a, env),
                self.received_block(method, 2 * step + 1, b, env),
            )
            total = left @ right if total is None else total.addmm_(left, right)
            del left, right
        return total

    def reduce_products(self, method, block, multiply, env):
        """In each step receive a block and multiply it; the products of all ranks are summed on
        that step's root. Returns the sum of the step whose root this rank is.
        """
        own_sum = None
        for step in range(self.q):
            product = multiply(self.received_block(method, 2 * step, block, env))
            env.call(self, method, 2 * step + 1, product)
            own_sum = product if env.roots(self, method, 2 * step + 1) else own_sum
            del product
        return own_sum

    def received_block(self, method, number, block, env):
        """The root's block, broadcast to every rank of its row or column."""
        if not env.roots(self, method, number):
            block = block.new_empty(block.shape)
            env.buffers(block)
        env.call(self, method, number, block)
        return block


class Logits2D(Linear2D):
    """y = x E^T, where E is sharded as the embedding is, which it may be tied to: V over i, h over
    j. That is how W^T would be sharded, so the three products exchange their roles:

        Y = X E^T     E_lj is broadcast in column j; row i reduces the products to Y_il on (i, l)
        X' = Y' E     Y'_il is broadcast in row i, E_lj in column j
        E' = Y'^T X   Y'_il is broadcast in row i; column j reduces the products to E'_lj on (l, j)
    """

    def pairs(self, x, w, y):
        return {
            "forward": (("broadcast", "tp:col", w), ("reduce", "tp:row", y)),
            "input": (("broadcast", "tp:row", y), ("broadcast", "tp:col", w)),
            "weight": (("broadcast", "tp:row", y), ("reduce", "tp:col", w)),
        }

    def compute(self, weights, x, env):
        return self.reduce_products("forward", weights["weight"], lambda w: x @ w.t(), env), x

    def differentiate(self, weights, x, g, env):
        return self.sum_products("input", g, weights["weight"], lambda a, b: (a, b), env), (x, g)

    def weight_grad(self, deferred, into, env):
        x, g = deferred
        into.add("weight", self.reduce_products("weight", g, lambda g: g.t() @ x, env))


class Linear3D(Linear):
    """y = x W^T + b in 3D: x (T, K/q), weight (N/q^2, K/q), y (T, N/q), with T = b s/q^2.

    along   INWARD or OUTWARD
    thirds  number of parts of the output features that are sharded separately: 3 for qkv, else 1
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
        # The gathered operands are saved and deferred, not this rank's parts of them.
        self.keeps_input = self.defers_input = self.defers_grad = False
        self.q, self.sum_axis, self.thirds = q, along[1], thirds
        rows = q * part.tokens
        x, w, y = (part.item * size for size in (rows * inputs, inputs * outputs, rows * outputs))
        of_forward, of_backward = self.phase("forward"), self.phase("input")
        self.calls = {
            "forward": [
                Call("all_gather", along[0], x, of_forward),
                Call("all_gather", "tp:i", w, of_forward),
                Call("reduce_scatter", along[1], y, of_forward),
            ],
            "input": [
                Call("all_gather", along[1], y, of_backward),
                Call("reduce_scatter", along[0], x, of_backward, overlapped=True),
            ],
            "weight": [Call("reduce_scatter", "tp:i", w, of_backward)],
        }
        self.keeps, self.deferred, self.defers_kept = x + w, x + y, x
        reorders = thirds > 1  # gathered parts of W have to be put in order
        added, moved = 4 * self.out * bias, 8 * inputs * outputs
        forward, input_half, weight_half = linear(rows, inputs, outputs)
        self.work = (
            forward + Work(0, added + moved * reorders, 1 + bias + reorders),
            input_half + Work(0, 0, 1),
            weight_half + Work(0, added + moved * reorders + moved / q, 2 + bias + reorders),
        )

    def temporaries(self, method, received, *, alone=False):
        """The input and the buffers of a reduce-scatter in flight: of Y, of X's gradient, or of W's
        gradient. X's is still in flight in a weight half that follows at once. Before the other two
        W, or its gradient, is copied if its thirds have to be put in order.
        """
        (*_, y), (_, x), (w,) = (self.calls[name] for name in METHODS)
        reordered = w.payload * (self.thirds > 1)
        if method == "forward":
            return max(reordered - y.payload // self.q, y.payload + received(y))
        in_flight = 0 if alone else x.payload + received(x)
        if method == "input":
            return in_flight
        return in_flight + w.payload + max(reordered, w.payload // self.q + received(w))

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
        g_rows = self.gather("input", 0, g, env)  # (q T, N/q)
        gx = g.new_empty((g.shape[0], w.shape[1]))
        env.start_overlapped(self, "input", 1, gx, g_rows @ w)
        return gx, (rows, g_rows)

    def weight_grad(self, deferred, into, env):
        rows, g_rows = deferred
        parts = (g_rows.t() @ rows).view(self.thirds, self.q, -1, rows.shape[1])  # one of q terms
        parts = parts.transpose(0, 1).contiguous()
        shard = parts.new_empty((parts[0].numel() // rows.shape[1], rows.shape[1]))
        env.call(self, "weight", 0, shard, parts)
        into.add("weight", shard)
        if self.bias:
            into.add("bias", g_rows.chunk(self.q)[env.groups[self.sum_axis].index].sum(0))

    def gather(self, method, number, part, env):
        """The parts of all ranks of the message's axis, one below the other."""
        gathered = part.new_empty((self.q * part.shape[0], part.shape[1]))
        env.buffers(gathered)
        env.call(self, method, number, gathered, part)
        return gathered


class SplitNorm(Norm):
    """LayerNorm of features that are sharded over ranks, equally many on each.

    In forward each rank sends two numbers per token, the mean and variance of its features, which
    combine exactly (Chan+ 1979, "Updating formulae and a pairwise algorithm for computing sample
    variances"); in backward two sums per token. The arithmetic is in fp32.
    """

    def __init__(self, name: str, part: Part, *, forks: bool = True) -> None:
        super().__init__(name, part, forks=forks)
        self.parts, axis, item = part.q, part.features_axis, part.item
        self.keeps = pairs = 8 * part.tokens  # bytes of two fp32 numbers for each token
        in_16_bits = item < 4
        self.calls = {
            "forward": [Call("all_gather", axis, pairs * self.parts, "norm_forward")],
            "input": [Call("all_reduce", axis, pairs, "norm_backward")],
        }
        self.scratch = (
            4 * self.out * (1 + 2 * in_16_bits) + pairs * self.parts,
            self.out * (16 - item if in_16_bits else 8) + pairs + 4 * part.width - self.deferred,
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
        mean_inner, mean_product = sums.div_(self.parts * x.shape[1]).unsqueeze(2)
        gw, gb = (g * normal).sum(0), g.sum(0)
        gx = inner.sub_(mean_inner).sub_(normal.mul_(mean_product)).mul_(scale).to(x.dtype)
        return gx, (gw.to(x.dtype), gb.to(x.dtype))


class Scatter(Op):
    """The reduce-scatter behind the token embedding: it sums over the ranks that share the
    vocabulary and leaves each rank the rows of its own samples. Backward gathers their gradients.
    """

    keeps_input = False

    def __init__(self, name: str, part: Part) -> None:
        super().__init__(name)
        self.parts, self.out = part.lookups // part.tokens, part.tokens * part.width
        axis, payload = part.entries_axis, part.item * part.lookups * part.width
        self.calls = {
            "forward": [Call("reduce_scatter", axis, payload, self.phase("forward"))],
            "input": [Call("all_gather", axis, payload, self.phase("input"))],
        }

    def compute(self, weights, x, env):
        own_rows = x.new_empty((x.shape[0] // self.parts, x.shape[1]))
        env.call(self, "forward", 0, own_rows, x)
        return own_rows, None

    def differentiate(self, weights, kept, g, env):
        all_rows = g.new_empty((g.shape[0] * self.parts, g.shape[1]))
        env.call(self, "input", 0, all_rows, g)
        return all_rows, None
