"""The model as a flat list of ops. Each op states what it costs next to the code that computes it.

Between two ops lies a *state*, a tuple of tensors: the residual stream, ``(x,)``, and inside a
branch also what the branch has computed so far, ``(x, h)``. An op transforms the last entry; `Norm`
opens a branch and `Add` closes it. Every tensor is (T, width), T = b * s tokens of a micro-batch.

An op has fields, which predictions read, and three methods, which ranks run:

    params     {local name: shape} of the parameters that one rank holds
    borrows    {local name: full name} of another op's parameter that this op reads and adds a
               gradient to (a tied head)
    reads      {local name: full name} of another op's parameter that this op only reads
    out        elements of the last entry of the state that the op returns
    keeps      bytes that forward saves for backward in addition to the op's input and result
    keeps_input, keeps_result  whether forward saves the op's input, or its result, for backward
    frees_result  bytes by which the peak of ``input_grad`` is lower if it frees that result
    defers_input, defers_grad, defers_made  whether ``input_grad`` holds the op's input, the
               gradient of its result, or the gradient of its input until a later ``weight_grad``
    deferred   further bytes held until then; ``defers_kept`` of them were counted in ``keeps``
    passes_input, passes_grad  whether the result uses the memory of the input, and the gradient of
               the input that of the result's gradient (written in place, or passed on unchanged)
    scratch    (forward, input half, weight half): peak bytes of temporaries, in addition to inputs,
               outputs and what is saved or deferred
    work       (forward, input half, weight half) of one micro-batch, each a `Work`: FLOPs, bytes
               counted as in fp32, kernels ... (theory/work.py)
    constant   bytes in addition to parameters that the op holds from step to step
    calls      {"forward" | "input" | "weight": messages that the op sends inside that method}
    message    the `Message` that this op *is*, its calls in forward and in backward, or None

    forward(weights, state, env)              -> (state, kept)
    input_grad(weights, kept, grads, env)     -> (grads, deferred)     grads: like the state
    weight_grad(deferred, into, env)             adds to the parameters' gradients, by ``into``

``env`` is the `Env` of interpret/run.py: targets, dropout masks, messages. Backward has two halves
(Zero Bubble, Qi+ 2023, arXiv:2401.10241, sec. 2): the stage before waits for the input half,
``input_grad``, and only the optimizer waits for the weight half, ``weight_grad``. The gradients are
written by hand, without autograd. So an op saves for backward exactly what it states, and no hooks
are needed to split backward, to overlap it with messages, or to write gradients into flat buffers.
Torch is imported inside the methods only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from paralab.model.part import Part
from paralab.theory.work import Work, elementwise, linear

State = tuple
METHODS = ("forward", "input", "weight")


class Call(NamedTuple):
    """A message that an op sends inside one of its methods.

    op          the operation as in theory/traffic.py: "all_gather", "broadcast", ...
    axis        the axis of the group: "tp", "tp:row", ...
    payload     bytes of the full buffer
    phase       the name of this traffic in reports: "loss_forward"
    root        of a broadcast or a reduce: the root's position in the group; else -1
    overlapped  whether the op's weight half, if it follows at once, overlaps with the message
    """

    op: str
    axis: str
    payload: int
    phase: str
    root: int = -1
    overlapped: bool = False


class Message(NamedTuple):
    """The operations of a `Collective` in forward and in backward; "" stands for no call."""

    forward: str
    backward: str
    axis: str = "tp"


# f and g of Megatron-LM, and with sequence parallelism f-bar and g-bar, which Korthikanti+ 2022
# call g and g-bar: see parallel/tensor_parallel.py.
F, G = Message("", "all_reduce"), Message("all_reduce", "")
F_BAR, G_BAR = Message("all_gather", "reduce_scatter"), Message("reduce_scatter", "all_gather")


class Op:
    """One operation of the model; the module's docstring explains the fields and methods. Most ops
    define `compute` and `differentiate`, forward and input half of the state's last entry alone.
    """

    params: dict[str, tuple[int, ...]] = {}
    borrows: dict[str, str] = {}
    reads: dict[str, str] = {}
    calls: dict[str, list[Call]] = {}
    message: Message | None = None
    forks = False  # opens a branch
    joins = False  # closes a branch
    keeps_input = True
    keeps_result = passes_input = passes_grad = False
    defers_input = defers_grad = defers_made = False
    out = keeps = frees_result = deferred = defers_kept = constant = 0
    scratch: tuple[int, ...] = (0, 0, 0)
    work: tuple[Work, Work, Work] = (Work(), Work(), Work())

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def owned(self) -> dict[str, str]:
        """{local name: full name} of the parameters that the op itself holds."""
        return {local: f"{self.name}.{local}" for local in self.params}

    def phase(self, method: str) -> str:
        """The name in reports of a method's messages: "linear_forward" in a block, else
        "embedding_forward" or "head_forward"; with "backward" for the two other methods.
        """
        part = self.name.partition(".")[0]
        direction = "forward" if method == "forward" else "backward"
        return f"{'linear' if part == 'blocks' else part}_{direction}"

    def forward(self, weights: dict, state: State, env: Any) -> tuple[State, Any]:
        y, kept = self.compute(weights, state[-1], env)
        return (*(state if self.forks else state[:-1]), y), kept

    def input_grad(self, weights: dict, kept: Any, grads: State, env: Any) -> tuple[State, Any]:
        g, deferred = self.differentiate(weights, kept, grads[-1], env)
        if not self.forks:
            return (*grads[:-1], g), deferred
        g += grads[0]  # the gradient that reaches x along the residual stream
        return (g,), deferred

    def weight_grad(self, deferred: Any, into: Any, env: Any) -> None:
        """An op without parameters has no weight half."""

    def temporaries(
        self, method: str, received: Callable[[Call], int], *, alone: bool = False
    ) -> int:
        """Peak bytes of temporaries within a method, with those of its calls.

        received  the bytes that the backend allocates to receive a call
        alone     whether this is a weight half that does not follow its input half at once
        """
        calls = self.calls.get(method, ())
        return self.scratch[METHODS.index(method)] + max(map(received, calls), default=0)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name})"


class Tokens(Op):
    """Token embedding: (b, s) tokens to (T, width), from the rank's entries of the vocabulary. It
    is 0 for tokens outside these; the next op, a `Collective` or `Scatter`, sums over the ranks.
    """

    keeps_input, defers_grad = False, True

    def __init__(self, name: str, part: Part, shape: tuple[int, int]) -> None:
        super().__init__(name)
        self.params, self.sharded = {"weight": shape}, bool(part.entries_axis)
        self.out = part.lookups * shape[1]
        # Per token its index, int64, and with a sharded vocabulary whether it is elsewhere.
        self.keeps = self.deferred = self.defers_kept = (8 + self.sharded) * part.lookups
        entries = math.prod(shape)  # a dense gradient of the whole table is computed, then added
        self.scratch = (0, 0, part.item * (entries + self.out * self.sharded))
        self.work = (
            Work(0, 8 * self.out * (1 + self.sharded), 2 + 4 * self.sharded),
            Work(),
            Work(0, 4 * ((3 + 2 * part.widens) * entries + 2 * self.out), 2),
        )

    def forward(self, weights, state, env):
        import torch.nn.functional as F

        tokens, weight = state[0].flatten(), weights["weight"]
        if not self.sharded:
            return (F.embedding(tokens, weight),), (tokens, None)
        local = tokens - env.first_token  # positions in this rank's range of the entries
        elsewhere = (local < 0) | (local >= weight.shape[0])
        local.masked_fill_(elsewhere, 0)
        x = F.embedding(local, weight).masked_fill_(elsewhere.unsqueeze(1), 0.0)
        return (x,), (local, elsewhere)

    def input_grad(self, weights, kept, grads, env):
        return (), (*kept, grads[-1])

    def weight_grad(self, deferred, into, env):
        import torch

        tokens, elsewhere, g = deferred
        if elsewhere is not None:
            g = g.masked_fill(elsewhere.unsqueeze(1), 0.0)
        rows = self.params["weight"][0]
        backward = torch.ops.aten.embedding_dense_backward.default
        gradient = backward(g, tokens, rows, -1, False)
        into.add("weight", gradient)


class Dropping(Op):
    """Base of `Positions` and `Add`, which write the residual stream in place, with dropout.
    Forward saves only the mask for backward, a byte per element.
    """

    keeps_input, passes_input = False, True

    def __init__(self, name: str, part: Part) -> None:
        super().__init__(name)
        self.p, self.out, self.dropout = part.p, part.tokens * part.width, name
        self.passes_grad, self.keeps = not part.p, self.out * (part.p > 0)
        self.scratch = (part.cut_mask("residual", self.out), 0, 0)
        drawn = elementwise(draw=part.masks["residual"])
        self.work = (  # a fused dropout kernel moves only the mask in addition to x
            drawn + Work(0, 12 * self.keeps, 3 * (part.p > 0), fused=10 * self.keeps),
            Work(0, 12 * self.keeps, part.p > 0),
            Work(),
        )

    def drop(self, x, env):
        """(x with dropout, in place; the mask, or None without dropout)."""
        mask = env.mask(self.dropout, self.p, "residual") if self.p else None
        return (x if mask is None else drop_(x, mask, self.p)), mask

    def undrop(self, mask, g):
        return g if mask is None else dropped(g, mask, self.p)


class Positions(Dropping):
    """Adds the learned positional embedding to the tokens' embedding, with dropout of the sum."""

    def __init__(self, name: str, part: Part, shape: tuple[int, int]) -> None:
        super().__init__(name, part)
        self.params, self.length = {"weight": shape}, shape[0]
        self.dropout = "embedding"  # of both embeddings' sum, as the reference calls it
        self.defers_grad, self.defers_made = self.passes_grad, not self.passes_grad
        self.scratch = (self.scratch[0], 0, part.item * math.prod(shape))
        forward, backward, _ = self.work
        self.work = (forward + Work(0, 12 * self.out, 2), backward, Work(0, 4 * self.out, 2))

    def compute(self, weights, x, env):
        width = x.shape[1]
        y = x.view(-1, self.length, width).add_(weights["weight"]).view(-1, width)
        return self.drop(y, env)

    def differentiate(self, weights, mask, g, env):
        g = self.undrop(mask, g)
        return g, g

    def weight_grad(self, g, into, env):
        into.add("weight", g.view(-1, self.length, g.shape[1]).sum(0))


class Norm(Op):
    """LayerNorm, which opens a branch: (x,) -> (x, n). The head's does not: (x,) -> (n,)."""

    def __init__(self, name: str, part: Part, *, forks: bool = True) -> None:
        super().__init__(name)
        self.params, self.forks = dict.fromkeys(("weight", "bias"), (part.width,)), forks
        self.out = part.tokens * part.width
        # Mean and reciprocal deviation of each token: on a CPU in the type of x, on a GPU in fp32.
        self.keeps, self.deferred = 2 * part.item * part.tokens, 2 * part.item * part.width
        self.work = (
            Work(0, 8 * self.out, 2),
            Work(0, (20 if forks else 16) * self.out, 2 + forks),
            Work(0, 0, 2),
        )

    def compute(self, weights, x, env):
        import torch

        weight = weights["weight"]
        y, mean, rstd = torch.native_layer_norm(x, weight.shape, weight, weights["bias"], 1e-5)
        return y, (x, mean, rstd)

    def differentiate(self, weights, kept, g, env):
        import torch

        x, mean, rstd = kept
        weight, bias = weights["weight"], weights["bias"]
        backward = torch.ops.aten.native_layer_norm_backward.default
        wanted = True, True, True  # the gradients of x, weight and bias
        gx, gw, gb = backward(g, x, weight.shape, mean, rstd, weight, bias, wanted)
        return gx, (gw, gb)

    def weight_grad(self, deferred, into, env):
        into.add("weight", deferred[0])
        into.add("bias", deferred[1])


class Linear(Op):
    """y = x W^T + b.

    weight     shape of this rank's block of W, (outputs, inputs)
    late_bias  whether a later op adds the bias, after the sum over the ranks. Its gradient is still
               computed by this op, where the gradient of y covers all tokens of the sequence
    regathers  whether x is gathered a second time for the weight half instead of being saved: with
               sequence parallelism every rank saves only its part of the sequence
    """

    defers_grad = True

    def __init__(
        self,
        name: str,
        part: Part,
        weight: tuple[int, int],
        *,
        bias: bool = True,
        late_bias: bool = False,
        regathers: bool = False,
    ) -> None:
        super().__init__(name)
        outputs, inputs = weight
        self.params = {"weight": weight} | ({"bias": (outputs,)} if bias else {})
        self.bias, self.late_bias = bias, late_bias
        self.keeps_input = self.defers_input = not regathers
        self.out = part.inner * outputs
        # With wider gradients g^T x needs a tensor of its own, which is then added in fp32.
        wide = inputs * outputs * part.widens
        self.scratch = (0, 0, part.item * max(wide, outputs * bias))
        x, g, w = linear(part.inner, inputs, outputs)
        added = 4 * self.out * bias
        self.work = (
            x + Work(0, added, 1, fused=added),
            g + Work(0, 0, 1),
            w + Work(0, added + 20 * wide, 1 + bias + (wide > 0)),
        )

    def compute(self, weights, x, env):
        import torch.nn.functional as F

        bias = weights["bias"] if self.bias and not self.late_bias else None
        return F.linear(x, weights["weight"], bias), x if self.keeps_input else None

    def differentiate(self, weights, x, g, env):
        return g @ weights["weight"], (x, g)

    def weight_grad(self, deferred, into, env):
        x, g = deferred
        into.add_product("weight", g.t(), env.regathered if x is None else x)
        if self.bias:
            into.add("bias", g.sum(0))


class Attention(Op):
    """Causal self-attention of this rank's heads: (T, 3w) queries, keys and values to (T, w).

    This is attention="explicit", which writes the (s, s) scores to memory. As in the formulas of
    Korthikanti+ 2022 (arXiv:2205.05198, sec. 4.1), forward saves the probabilities for backward,
    and with dropout also the mask and the probabilities after dropout.
    """

    def __init__(self, name: str, part: Part) -> None:
        super().__init__(name)
        self.heads, self.width, self.length = part.heads, part.head_width, part.length
        self.p, item = part.p, part.item
        x = self.out = part.inner * part.heads * part.head_width
        scores, drops = part.inner * part.heads * part.length, part.p > 0
        self.keeps = item * scores + (item + 1) * scores * drops
        # Batched products copy operands that are not contiguous. A mask is drawn whole, then cut.
        copied, drawn = self.copies(part), part.cut_mask("scores", scores)
        product = item * (1 + copied) * x
        # What is saved or returned, but does not exist yet at a peak, is subtracted there.
        dropping = max(product - (item + 1) * scores, item * x, drawn - item * (scores + x))
        self.scratch = (
            dropping if drops else max(product, item * (scores - x)),
            item * max(2 * scores, scores + (2 + copied) * x),
            0,
        )
        arithmetic = elementwise(exp=scores, draw=part.masks["scores"])
        # A fused kernel reads and writes the scores once, and once more with dropout.
        forward = Work(
            0, 4 * ((4 + 2 * drops) * scores + 8 * x), 9 + 3 * drops, fused=4 * (2 * scores + 6 * x)
        )
        backward = Work(
            0, 4 * ((5 + 3 * drops) * scores + 10 * x), 14, fused=4 * ((2 + drops) * scores + 2 * x)
        )
        self.work = self.with_products(arithmetic + forward, backward, scores)

    def copies(self, part: Part) -> bool:
        """Whether a batched product must copy its operands: with several heads and several samples
        the matrices of the batch do not lie at equal distances.
        """
        return part.heads > 1 and part.inner > part.length

    def with_products(self, forward: Work, backward: Work, scores: int) -> tuple[Work, Work, Work]:
        """The op's `work`: that of the other kernels and of the matrix products, queries with keys
        and probabilities with values. scores: how many of them go through memory.
        """
        flops = 4 * self.out * self.length
        products = Work(flops, products=(0, flops, 0), operands=8 * (2 * self.out + scores))
        return products + forward, products * 2 + backward, Work()

    def compute(self, weights, qkv, env):
        import torch

        q, k, v = self.split(qkv)
        scores = (q / math.sqrt(self.width)) @ k.transpose(-2, -1)  # (b, a, s, s)
        probabilities = torch.softmax(scores.masked_fill_(env.future_mask, -math.inf), -1)
        del scores
        mask, weighting = None, probabilities
        if self.p:
            mask = env.mask(self.name, self.p, "scores")
            weighting = dropped(probabilities, mask, self.p)
        return self.join(weighting @ v), (qkv, probabilities, mask, weighting)

    def differentiate(self, weights, kept, g, env):
        import torch

        qkv, probabilities, mask, weighting = kept
        q, k, v = self.split(qkv)
        g = self.heads_of(g)
        gqkv = torch.empty_like(qkv)
        gq, gk, gv = self.split(gqkv)
        gv.copy_(weighting.transpose(-2, -1) @ g)
        gp = g @ v.transpose(-2, -1)
        if mask is not None:
            gp = drop_(gp, mask, self.p)
        gs = torch._softmax_backward_data(gp, probabilities, -1, probabilities.dtype)
        del gp
        root = math.sqrt(self.width)
        torch.div(gs @ k, root, out=gq)
        gk.copy_(((q / root).transpose(-2, -1) @ gs).transpose(-2, -1))
        return gqkv, None

    def heads_of(self, x):
        """(T, w) as (b, a, s, d): a view."""
        return x.view(-1, self.length, self.heads, self.width).transpose(1, 2)

    def split(self, qkv):
        """Queries, keys and values, (b, a, s, d) each: views."""
        parts = qkv.view(-1, self.length, 3, self.heads, self.width)
        return parts.permute(2, 0, 3, 1, 4).unbind()

    def join(self, o):
        return o.transpose(1, 2).reshape(-1, self.heads * self.width)


class FusedAttention(Attention):
    """attention="sdpa": torch's fused kernel, which writes no scores. Its backward is autograd's.

    Forward saves the input, the result, and the logarithm of each row's sum. With dropout torch's
    CPU kernel is a composite, which saves copies of queries, keys, values and scores in fp32; so
    predictions have them, also for GPUs, whose kernel keeps only the seed of its mask in addition.
    """

    def __init__(self, name: str, part: Part) -> None:
        super().__init__(name, part)
        x, rows, item = self.out, part.inner * part.heads, part.item
        self.keeps_result, self.frees_result = not part.p, 0 if part.p else item * x
        # It frees what it saved before it joins the gradients of queries, keys and values.
        self.keeps, self.scratch = 4 * rows, (0, 3 * item * x - 4 * rows, 0)
        if part.p:
            copied, in_16_bits = self.copies(part), item < 4
            causal_mask, score_bytes = 4 * part.length**2, 4 * rows * part.length
            copies = (5 if copied else 3) if in_16_bits else 1
            self.keeps = 3 * score_bytes + 4 * (3 if copied or in_16_bits else 2) * x
            self.scratch = (
                4 * copies * x + score_bytes // 2 * in_16_bits + causal_mask,
                # Autograd frees what it saved while backward runs.
                max(4 * score_bytes + (14 if in_16_bits else 8 * copied) * x, 12 * x) - self.keeps,
                0,
            )
        scores = rows * part.length
        arithmetic = elementwise(exp=scores, draw=scores * (part.p > 0))
        forward, backward = arithmetic + Work(0, 16 * x, 5), arithmetic + Work(0, 40 * x, 9)
        self.work = self.with_products(forward, backward, 0)
        if item == 4:  # torch's fp32 kernel does not use tf32, where matrix products do
            self.work = tuple(replace(work, products=(0, 0, 0)) for work in self.work)

    def compute(self, weights, qkv, env):
        import torch
        import torch.nn.functional as F
        from torch.autograd.graph import get_gradient_edge

        leaf = qkv.detach().requires_grad_(env.keeping)
        with torch.set_grad_enabled(env.keeping), env.drawing(self.name, self.p):
            q, k, v = self.split(leaf)
            mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.p, is_causal=True)
            y = self.join(mixed)
        return y.detach(), (leaf, get_gradient_edge(y)) if env.keeping else None

    def differentiate(self, weights, kept, g, env):
        import torch

        leaf, edge = kept
        return torch.autograd.grad((edge,), (leaf,), (g,))[0], None


class Gelu(Op):
    """GELU in its tanh form."""

    def __init__(self, name: str, elements: int) -> None:
        super().__init__(name)
        self.out = elements
        self.work = (
            elementwise(gelu=elements) + Work(0, 8 * elements, 1),
            elementwise(gelu_backward=elements) + Work(0, 12 * elements, 1),
            Work(),
        )

    def compute(self, weights, x, env):
        import torch.nn.functional as F

        return F.gelu(x, approximate="tanh"), x

    def differentiate(self, weights, x, g, env):
        import torch

        return torch.ops.aten.gelu_backward.default(g, x, approximate="tanh"), None


class Add(Dropping):
    """Closes a branch: (x, h) -> (x + dropout(h + b),).

    bias  full name of a row-parallel layer's bias b, added here, after the sum over the ranks; or
          "" where the layer adds its bias itself
    """

    joins = True

    def __init__(self, name: str, part: Part, bias: str = "") -> None:
        super().__init__(name, part)
        self.reads = {"bias": bias} if bias else {}
        forward, *backward = self.work
        biased = 8 * bool(bias) * self.out
        added = Work(0, 12 * self.out + biased, 1 + bool(bias), fused=biased)
        self.work = forward + added, *backward

    def forward(self, weights, state, env):
        x, h = state  # no op saves h, so the sum overwrites it
        if self.reads:
            h += weights["bias"]
        h, mask = self.drop(h, env)
        return (h.add_(x),), mask

    def input_grad(self, weights, mask, grads, env):
        (g,) = grads
        return (g, self.undrop(mask, g)), None


class Loss(Op):
    """Mean cross-entropy over the tokens, in fp32: (T, V) logits to a scalar.

    Where the vocabulary is sharded, one all-gather sends two numbers per token and rank: the
    log-sum-exp of the rank's logits and the target's logit, which is 0 on ranks that do not hold
    it. Megatron-LM makes three all-reduces of one number per token: more messages, but from four
    ranks on fewer bytes.
    """

    keeps_input, out = False, 1

    def __init__(self, name: str, part: Part) -> None:
        super().__init__(name)
        self.parts, axis, tokens = part.q, part.logits_axis, part.inner
        logits, self.targets = tokens * part.vocab, 8 * tokens  # the targets' bytes, int64
        # The log-probabilities, and per token its target and whether that is on this rank.
        self.keeps = 4 * logits + (9 if axis else 8) * tokens
        fp32_copy = 4 * logits * (part.item < 4)
        # The loss has 32 bits.
        self.scratch = (fp32_copy + 8 - part.item, max(fp32_copy, 4 * tokens), 0)
        if axis:  # backward turns the saved log-probabilities into the gradient, in place
            freed = 0 if fp32_copy else 8 * tokens - 4 * logits
            early = part.item * bool(fp32_copy)  # in 16 bits the peak comes before the loss exists
            self.scratch = (8 * (3 + part.q) * tokens - early, freed, 0)
            gather = Call("all_gather", axis, 8 * tokens * part.q, "loss_forward")
            self.calls = {"forward": [gather]}
        # 16-bit logits are copied to fp32, and their gradients back.
        moved = (12 + 6 * (fp32_copy > 0)) * logits
        self.work = (
            elementwise(exp=logits) + Work(kernels=4 + 8 * bool(axis), exact=moved),
            elementwise(exp=logits) + Work(kernels=5, exact=moved),
            Work(),
        )

    def forward(self, weights, state, env):
        import torch
        import torch.nn.functional as F

        logits, targets = state[-1].float(), env.targets
        if not self.calls:
            logp = torch.log_softmax(logits, -1)
            return (F.nll_loss(logp, targets),), (logp, targets.unsqueeze(1), None)
        index = targets - env.first_logit  # of the target among this rank's logits
        local = (index >= 0) & (index < logits.shape[1])  # whether this rank has the target
        index = index.masked_fill_(~local, 0).unsqueeze(1)  # (T, 1)
        target = logits.gather(1, index).squeeze(1).masked_fill_(~local, 0.0)
        sums, target_logits = gather_pair(self, torch.logsumexp(logits, 1), target, env)
        total = torch.logsumexp(sums, 0)
        column = total.unsqueeze(1)
        logp = logits - column if logits is state[-1] else logits.sub_(column)
        return ((total - target_logits.sum(0)).mean(),), (logp, index, local)

    def input_grad(self, weights, kept, grads, env):
        import torch

        (logp, index, local), share = kept, env.share / len(kept[1])
        if local is None:
            g = torch.zeros_like(logp)
            g.scatter_(1, index, g.new_ones(index.shape).mul_(-share))
            torch._log_softmax_backward_data(g, logp, -1, g.dtype, out=g)
        else:
            g = logp.exp_()  # in place: this is the last use of logp
            g.scatter_add_(1, index, -local.unsqueeze(1).to(g.dtype)).mul_(share)
        del share  # a tensor in fp16, which would still exist at the peak, the copy below
        return (g.to(env.dtype),), None


class Collective(Op):
    """One of the conjugate operators `F`, `G`, `F_BAR`, `G_BAR` around a tensor-parallel pair. The
    op computes nothing: parallel/tensor_parallel.py makes its calls instructions of the program.
    """

    keeps_input = False

    def __init__(self, name: str, message: Message, out: int) -> None:
        super().__init__(name)
        self.message, self.out = message, out
        self.passes_input = message.forward in ("", "all_reduce")
        self.passes_grad = message.backward in ("", "all_reduce")

    def compute(self, weights, x, env):
        return x, None

    def differentiate(self, weights, kept, g, env):
        return g, None


def gather_pair(op: Op, first: Any, second: Any, env: Any) -> tuple[Any, Any]:
    """Gather two numbers per token, (T,) each, from the ranks of the op's first forward call."""
    import torch

    own = torch.stack([first, second])
    gathered = own.new_empty((op.parts, *own.shape))
    env.buffers(own, gathered)
    env.call(op, "forward", 0, gathered, own)
    return gathered.unbind(1)  # (parts, T) each


def dropped(x: Any, mask: Any, p: float) -> Any:
    """x / (1 - p) where the mask is set, else 0: dropout with an unchanged mean."""
    return (x * mask).mul_(1 / (1 - p))


def drop_(x: Any, mask: Any, p: float) -> Any:
    """`dropped`, in place."""
    return x.mul_(mask).mul_(1 / (1 - p))
