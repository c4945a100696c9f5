"""The model, once: a flat list of ops. Each op says, side by side, what it costs and what it does.

Between two ops there is a *state*, a tuple of tensors: the residual stream and, inside a branch,
what the branch has computed so far, ``(x,)`` or ``(x, h)``. An op works on the last entry; `Norm`
opens a branch and `Add` closes it. Every tensor is (T, width), T = b * s tokens of a micro-batch.

An op is data that predictions read, and three methods that ranks run:

    params     {local name: shape} of the parameters that one rank holds
    borrows    {local name: full name} of another op's parameter, whose gradient it adds to (tied)
    reads      {local name: full name} of another op's parameter that it only reads
    out        elements of the last entry of the state that it returns
    keeps      bytes that forward leaves for backward, besides its input and its result
    keeps_input, keeps_result  whether its input, or its result, stays for backward too
    defers_input, defers_grad, defers_made  whether its input, its result's gradient, or the input's
               gradient that it makes is held from ``input_grad`` until a later ``weight_grad``
    deferred   bytes held so in addition; ``defers_kept``: how many of them are of ``keeps``
    passes_input, passes_grad  whether its result takes over its input's memory, and its input's
               gradient that of its result's gradient (written in place, or passed on)
    scratch    (forward, input half, weight half): most bytes at once in each, in addition to what
               comes in, what goes out, and what is kept or deferred
    work       (forward, input half, weight half) of one micro-batch: `Work`, which is FLOPs, bytes
               counted as in fp32, kernels ... (theory/work.py)
    constant   bytes that it holds in addition to parameters, from step to step
    calls      {"forward" | "input" | "weight": messages that the op sends inside that method}
    message    the call that this op *is* in forward and in backward (`Message`), or None

    forward(weights, state, env)              -> (state, kept)
    input_grad(weights, kept, grads, env)     -> (grads, deferred)     grads: like the state
    weight_grad(deferred, into, env)             adds to the parameters' gradients, by ``into``

``env`` is the `Env` of interpret/run.py: targets, dropout masks, messages. The input half,
``input_grad``, is what the stage before waits for; only the optimizer waits for the weight half,
``weight_grad`` (Zero Bubble, Qi+ 2023, arXiv:2401.10241, sec. 2). A whole backward is both.
Gradients are written by hand, no autograd: so what is kept is what an op says, and halves, overlap
and gradients written straight into flat buffers need no hooks. Torch is imported inside the methods
only.
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

    op       as in theory/traffic.py: "all_gather", "broadcast", ...
    axis     of the group: "tp", "tp:row", ...
    payload  bytes of the full buffer
    phase    what the report calls it: "loss_forward"
    root     position in the group of a broadcast's or a reduce's root, else -1
    beside   whether the op's weight half, where it follows at once, is computed meanwhile
    """

    op: str
    axis: str
    payload: int
    phase: str
    root: int = -1
    beside: bool = False


class Message(NamedTuple):
    """What a `Collective` is: its call in forward and in backward ("" is none)."""

    forward: str
    backward: str
    axis: str = "tp"


# Those of Megatron-LM (Shoeybi+ 2019, arXiv:1909.08053, sec. 3), and with sequence parallelism
# (Korthikanti+ 2022, arXiv:2205.05198, sec. 4.2.2).
F, G = Message("", "all_reduce"), Message("all_reduce", "")
F_BAR, G_BAR = Message("all_gather", "reduce_scatter"), Message("reduce_scatter", "all_gather")


class Op:
    """One step of the model; see the module's docstring."""

    params: dict[str, tuple[int, ...]] = {}
    borrows: dict[str, str] = {}
    reads: dict[str, str] = {}
    calls: dict[str, list[Call]] = {}
    message: Message | None = None
    forks = False  # opens a branch
    joins = False  # closes one
    keeps_input = True
    keeps_result = False
    defers_input = defers_grad = defers_made = False
    passes_input = passes_grad = False
    out = keeps = deferred = defers_kept = constant = 0
    scratch: tuple[int, ...] = (0, 0, 0)
    work: tuple[Work, Work, Work] = (Work(), Work(), Work())

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def owned(self) -> dict[str, str]:
        """{local name: full name} of the parameters that are the op's own."""
        return {local: f"{self.name}.{local}" for local in self.params}

    def phase(self, method: str) -> str:
        """What the report calls the messages of a method: "linear_forward" in a block, else
        "embedding_forward" or "head_forward"; backward is both other methods.
        """
        part = self.name.partition(".")[0]
        way = "forward" if method == "forward" else "backward"
        return f"{'linear' if part == 'blocks' else part}_{way}"

    def forward(self, weights: dict, state: State, env: Any) -> tuple[State, Any]:
        y, kept = self.compute(weights, state[-1], env)
        return (*(state if self.forks else state[:-1]), y), kept

    def input_grad(self, weights: dict, kept: Any, grads: State, env: Any) -> tuple[State, Any]:
        g, deferred = self.differentiate(weights, kept, grads[-1], env)
        if not self.forks:
            return (*grads[:-1], g), deferred
        g += grads[0]  # what passes by the branch
        return (g,), deferred

    def weight_grad(self, deferred: Any, into: Any, env: Any) -> None:
        """Without parameters there is nothing to do."""

    def in_hand(self, method: str, received: Callable[[Call], int], *, alone: bool = False) -> int:
        """Bytes at the peak within a method: ``scratch``, and what comes in by its calls.

        received  what a group of ranks needs for a call, until it is waited for
        alone     a weight half that does not follow its input half at once
        """
        calls = self.calls.get(method, ())
        return self.scratch[METHODS.index(method)] + max(map(received, calls), default=0)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name})"


class Tokens(Op):
    """Token embedding of this rank's entries of the vocabulary: (b, s) tokens to (T, width).

    A rank that holds a range of the entries finds 0 for the others; the sum over the ranks that
    share the vocabulary, a `Collective` behind this op, is the embedding.
    """

    keeps_input, defers_grad = False, True

    def __init__(self, name: str, part: Part, shape: tuple[int, int]) -> None:
        super().__init__(name)
        self.params, self.shares = {"token.weight": shape}, bool(part.entries_axis)
        self.out = part.lookups * shape[1]
        self.keeps = self.deferred = self.defers_kept = (8 + self.shares) * part.lookups
        entries = math.prod(shape)  # a gradient of all of them is made, to be added
        self.scratch = (0, 0, part.item * (entries + self.out * self.shares))
        self.work = (
            Work(0, 8 * self.out * (1 + self.shares), 2 + 4 * self.shares),
            Work(),
            Work(0, 4 * ((3 + 2 * part.widens) * entries + 2 * self.out), 2),
        )

    def forward(self, weights, state, env):
        import torch.nn.functional as F

        tokens, weight = state[0].flatten(), weights["token.weight"]
        if not self.shares:
            return (F.embedding(tokens, weight),), (tokens, None)
        mine = tokens - env.first_token
        elsewhere = (mine < 0) | (mine >= weight.shape[0])
        mine.masked_fill_(elsewhere, 0)
        found = F.embedding(mine, weight).masked_fill_(elsewhere.unsqueeze(1), 0.0)
        return (found,), (mine, elsewhere)

    def input_grad(self, weights, kept, grads, env):
        return (), (*kept, grads[-1])

    def weight_grad(self, deferred, into, env):
        import torch

        tokens, elsewhere, g = deferred
        if elsewhere is not None:
            g = g.masked_fill(elsewhere.unsqueeze(1), 0.0)
        rows = self.params["token.weight"][0]
        backward = torch.ops.aten.embedding_dense_backward.default
        gradient = backward(g, tokens, rows, -1, False)
        into.add("token.weight", gradient)


class Dropping(Op):
    """`Positions` and `Add` write the residual stream in place, with dropout. Backward needs the
    mask, a byte per element.
    """

    keeps_input, passes_input = False, True

    def __init__(self, name: str, part: Part) -> None:
        super().__init__(name)
        self.p, self.out = part.p, part.tokens * part.width
        self.passes_grad, self.keeps = not part.p, self.out * (part.p > 0)
        self.scratch = (part.cut_mask("residual", self.out), 0, 0)
        drawn = elementwise(draw=part.masks["residual"])
        self.work = (  # a fused kernel writes the mask, and moves nothing else for it
            drawn + Work(0, 12 * self.keeps, 3 * (part.p > 0), fused=10 * self.keeps),
            Work(0, 12 * self.keeps, part.p > 0),
            Work(),
        )

    def drop(self, x, env):
        """x with dropout, in place, and the mask."""
        mask = env.mask(self.name, self.p, "residual") if self.p else None
        return (x if mask is None else drop_(x, mask, self.p)), mask

    def undrop(self, mask, g):
        return g if mask is None else dropped(g, mask, self.p)


class Positions(Dropping):
    """Learned positions, added to the tokens' embedding, and dropout of the sum."""

    def __init__(self, name: str, part: Part, shape: tuple[int, int]) -> None:
        super().__init__(name, part)
        self.params, self.length = {"position.weight": shape}, shape[0]
        self.defers_grad, self.defers_made = self.passes_grad, not self.passes_grad
        self.scratch = (self.scratch[0], 0, part.item * math.prod(shape))
        forward, backward, _ = self.work
        self.work = (forward + Work(0, 12 * self.out, 2), backward, Work(0, 4 * self.out, 2))

    def compute(self, weights, x, env):
        width = x.shape[1]
        y = x.view(-1, self.length, width).add_(weights["position.weight"]).view(-1, width)
        return self.drop(y, env)

    def differentiate(self, weights, mask, g, env):
        g = self.undrop(mask, g)
        return g, g

    def weight_grad(self, g, into, env):
        into.add("position.weight", g.view(-1, self.length, g.shape[1]).sum(0))


class Norm(Op):
    """LayerNorm, which opens a branch: (x,) -> (x, n). The head's does not: (x,) -> (n,)."""

    def __init__(self, name: str, part: Part, *, forks: bool = True) -> None:
        super().__init__(name)
        self.params, self.forks = dict.fromkeys(("weight", "bias"), (part.width,)), forks
        self.out = part.tokens * part.width
        # mean and deviation, on a processor in the type of x; a GPU keeps them in fp32
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
        every = True, True, True
        gx, gw, gb = backward(g, x, weight.shape, mean, rstd, weight, bias, every)
        return gx, (gw, gb)

    def weight_grad(self, deferred, into, env):
        into.add("weight", deferred[0])
        into.add("bias", deferred[1])


class Linear(Op):
    """y = x W^T + b. weight: (outputs, inputs) of this rank's block.

    late_bias  the bias is added by a later op, behind the sum over the ranks; its gradient is made
               here, because here the result's gradient has all tokens of the sequence
    regathers  the input is not kept: ranks that hold a part of the sequence gather it again, for
               the weight half
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
        wide = inputs * outputs * part.widens  # a product of its own, to be added in fp32
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

    "explicit" writes the (s, s) scores that the papers' formulas count; dropout keeps the
    probabilities, their mask and the dropped ones, as they do (Korthikanti+ 2022, arXiv:2205.05198,
    sec. 4.1).
    """

    def __init__(self, name: str, part: Part) -> None:
        super().__init__(name)
        self.heads, self.width, self.length = part.heads, part.head_width, part.length
        self.p, item = part.p, part.item
        x = self.out = part.inner * part.heads * part.head_width
        scores, drops = part.inner * part.heads * part.length, part.p > 0
        self.keeps = item * scores + (item + 1) * scores * drops
        # Products of several samples' heads copy what is not contiguous; a mask is drawn whole.
        several, drawn = self.copies(part), part.cut_mask("scores", scores)
        first = item * (1 + several) * x
        last = max(first - (item + 1) * scores, item * x, drawn - item * (scores + x))
        self.scratch = (
            last if drops else max(first, item * (scores - x)),
            item * max(2 * scores, scores + (2 + several) * x),
            0,
        )
        made = elementwise(exp=scores, draw=part.masks["scores"])
        # A fused kernel reads and writes the scores once, and once more with dropout.
        forward = Work(
            0, 4 * ((4 + 2 * drops) * scores + 8 * x), 9 + 3 * drops, fused=4 * (2 * scores + 6 * x)
        )
        backward = Work(
            0, 4 * ((5 + 3 * drops) * scores + 10 * x), 14, fused=4 * ((2 + drops) * scores + 2 * x)
        )
        self.work = self.worked(made + forward, backward, scores)

    def copies(self, part: Part) -> bool:
        """Whether it is of several heads of several samples, which lie apart."""
        return part.heads > 1 and part.inner > part.length

    def worked(self, forward: Work, backward: Work, scores: int) -> tuple[Work, Work, Work]:
        """With the products, of queries and keys, and of probabilities and values; of all
        ``scores``, where they are in memory.
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
        mask, used = None, probabilities
        if self.p:
            mask = env.mask(self.name, self.p, "scores")
            used = dropped(probabilities, mask, self.p)
        return self.join(used @ v), (qkv, probabilities, mask, used)

    def differentiate(self, weights, kept, g, env):
        import torch

        qkv, probabilities, mask, used = kept
        q, k, v = self.split(qkv)
        g = self.heads_of(g)
        found = torch.empty_like(qkv)
        parts = self.split(found)
        parts[2].copy_(used.transpose(-2, -1) @ g)
        gp = g @ v.transpose(-2, -1)
        if mask is not None:
            gp = drop_(gp, mask, self.p)
        gs = torch._softmax_backward_data(gp, probabilities, -1, probabilities.dtype)
        del gp
        root = math.sqrt(self.width)
        torch.div(gs @ k, root, out=parts[0])
        parts[1].copy_(((q / root).transpose(-2, -1) @ gs).transpose(-2, -1))
        return found, None

    def heads_of(self, x):
        return x.view(-1, self.length, self.heads, self.width).transpose(1, 2)

    def split(self, qkv):
        """Queries, keys and values, (b, a, s, d) each: views."""
        return qkv.view(-1, self.length, 3, self.heads, self.width).permute(2, 0, 3, 1, 4)

    def join(self, o):
        return o.transpose(1, 2).reshape(-1, self.heads * self.width)


class FusedAttention(Attention):
    """The same by torch's fused kernel, which writes no scores: autograd runs inside.

    It keeps its input, its result, and the logarithm of each row's sum. With dropout a processor's
    kernel is a composite one: it keeps copies of queries, keys and values, and scores, in fp32.
    """

    def __init__(self, name: str, part: Part) -> None:
        super().__init__(name, part)
        x, rows, item = self.out, part.inner * part.heads, part.item
        self.keeps_result, self.keeps, self.scratch = not part.p, 4 * rows, (0, 3 * item * x, 0)
        if part.p:
            several, low = self.copies(part), item < 4
            square, scores = 4 * part.length**2, 4 * rows * part.length
            copied = 5 if several and low else 3 if low else 1
            self.keeps = 3 * scores + 4 * (3 if several or low else 2) * x
            self.scratch = (
                4 * copied * x + scores // 2 * low + square,
                # what was kept is let go on the way
                max(4 * scores + (14 if low else 8 * several) * x, 12 * x) - self.keeps,
                0,
            )
        scores = rows * part.length
        made = elementwise(exp=scores, draw=scores * (part.p > 0))
        self.work = self.worked(made + Work(0, 16 * x, 5), made + Work(0, 40 * x, 9), 0)
        if item == 4:  # torch's kernel for fp32 does not round to tf32 where other products do
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

    bias  the full name of the row-parallel layer's bias, which is added behind the ranks' sum
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
        x, h = state  # no op saves h: the sum is made in its place
        if self.reads:
            h += weights["bias"]
        h, mask = self.drop(h, env)
        return (h.add_(x),), mask

    def input_grad(self, weights, mask, grads, env):
        (g,) = grads
        return (g, self.undrop(mask, g)), None


class Loss(Op):
    """Mean cross-entropy over the tokens, in fp32: (T, V) logits to a scalar.

    Where ranks hold parts of the vocabulary, two numbers per token travel, once: the logarithm of a
    rank's sum and, on the rank that has it, the target's logit. Megatron-LM makes three all-reduces
    of one number: more messages, and from four ranks on fewer bytes.
    """

    keeps_input, out = False, 1

    def __init__(self, name: str, part: Part) -> None:
        super().__init__(name)
        self.parts, axis, tokens = part.q, part.logits_axis, part.inner
        logits = tokens * part.vocab
        self.keeps = 4 * logits + (9 if axis else 8) * tokens
        low = 4 * logits * (part.item < 4)
        self.scratch = (low + 8 - part.item, max(low, 4 * tokens), 0)  # the result has 32 bits
        if axis:  # what was kept becomes the gradient
            freed = 0 if low else 8 * tokens - 4 * logits
            early = part.item * bool(low)  # at the fullest moment the result is not there yet
            self.scratch = (8 * (3 + part.q) * tokens - early, freed, 0)
            gather = Call("all_gather", axis, 8 * tokens * part.q, "loss_forward")
            self.calls = {"forward": [gather]}
        moved = (12 + 6 * (low > 0)) * logits  # logits of 16 bits are copied to fp32, and back
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
        mine = targets - env.first_logit
        here = (mine >= 0) & (mine < logits.shape[1])
        mine = mine.masked_fill_(~here, 0).unsqueeze(1)  # (T, 1)
        target = logits.gather(1, mine).squeeze(1).masked_fill_(~here, 0.0)
        sums, found = gather_pair(self, torch.logsumexp(logits, 1), target, env)
        total = torch.logsumexp(sums, 0)
        column = total.unsqueeze(1)
        logp = logits - column if logits is state[-1] else logits.sub_(column)
        return ((total - found.sum(0)).mean(),), (logp, mine, here)

    def input_grad(self, weights, kept, grads, env):
        import torch

        (logp, index, here), share = kept, env.share / len(kept[1])
        if here is None:
            g = torch.zeros_like(logp)
            g.scatter_(1, index, g.new_ones(index.shape).mul_(-share))
            torch._log_softmax_backward_data(g, logp, -1, g.dtype, out=g)
        else:
            g = logp.exp_()  # the last use of what was kept
            g.scatter_add_(1, index, -here.unsqueeze(1).to(g.dtype)).mul_(share)
        del share  # in fp16 a tensor, and the copy is the fullest moment
        return (g.to(env.dtype),), None


class Collective(Op):
    """One of the conjugate operators `F`, `G`, `F_BAR`, `G_BAR` around a tensor-parallel pair.

    It computes nothing itself: parallel/tensor_parallel.py, which explains them, makes instructions
    of the calls.
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
    every = own.new_empty((op.parts, *own.shape))
    env.buffers(own, every)
    env.call(op, "forward", 0, every, own)
    return every.unbind(1)  # (parts, T) each


def dropped(x: Any, mask: Any, p: float) -> Any:
    """x where the mask is set, scaled up to the same mean; elsewhere 0."""
    return (x * mask).mul_(1 / (1 - p))


def drop_(x: Any, mask: Any, p: float) -> Any:
    """`dropped`, in place."""
    return x.mul_(mask).mul_(1 / (1 - p))
