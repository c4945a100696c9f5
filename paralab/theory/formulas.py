"""Work of one micro-batch, counted from the model: FLOPs, bytes of elementwise kernels, calls.

What a device makes of that, in seconds, is in work.py. FLOPs are those of matrix products, 2 per
multiply-add. Forward, b samples of s tokens, width h:

    block   24 b s h^2 (1 + s/(6h))     8 b s h^2 in the attention's two projections, 16 in the MLP,
                                        4 b s^2 h in the scores and in their product with the values
    head    2 b s h V

and backward is twice that (one product for the input's gradient, one for the weight's). PTD-P
(Narayanan+ 2021, arXiv:2104.04473, appendix, and eq. 3 of the text, F = 96 B s l h^2 (1 + s/(6h) +
V/(16 l h))) counts forward twice, because it recomputes activations. Without, the same sum has 72
in place of 96, and V/(12 l h) in place of V/(16 l h): the head is not recomputed there either.

Bytes count every tensor that a kernel other than a matrix product reads or writes, once each:
norms, GELU, softmax and mask of the explicit s x s scores, residual sums, biases and their
gradients, copies that a transposed view forces, the optimizer's passes. Kernels are what a call
costs before it does any work: the calls of modules and tensor functions that paralab/model.py makes
in forward, autograd's nodes in backward.

On a CPU the tanh of GELU, the exp of softmax and the random numbers of dropout cost arithmetic too,
not only bytes. `Work` adds it to the flops, at the rates in GELU_FLOPS, EXP_FLOPS and DRAW_FLOPS
(measured on one core, where leaving it out makes the optimizer look three times too slow); on a GPU
GELU is 55/h of the whole, 1.4 % at h = 4096. Masks are drawn whole on every tensor-parallel rank.
The functions that are called ``*_flops`` leave it out.

A sum of three terms knows nothing of how well a shape fits a cache: for half of 50 small models
tried on a CPU core it was within 5 % of thread CPU time, for all within 17 %.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from typing import Any, NamedTuple

from paralab.spec import ModelSpec
from paralab.theory.work import ITEM, Work, product

GELU_FLOPS = (400, 600)  # per element, forward and backward (tanh form)
EXP_FLOPS = 100  # per element of a softmax
DRAW_FLOPS = 1000  # per element of a dropout mask: 8 to 13 ns where products reach 110 GFLOP/s


def total(works: object) -> Work:
    """Sum of any iterable of Work."""
    return sum(works, Work())  # type: ignore[call-overload]


def block_flops(model: ModelSpec, batch: int) -> int:
    """Forward FLOPs of one block on ``batch`` samples: 24 b s h^2 (1 + s/(6h))."""
    s, h = model.seq_len, model.hidden
    return 24 * batch * s * h * h + 4 * batch * s * s * h


def head_flops(model: ModelSpec, batch: int) -> int:
    """Forward FLOPs of the output projection: 2 b s h V."""
    return 2 * batch * model.seq_len * model.hidden * model.vocab


def forward_flops(model: ModelSpec, batch: int) -> int:
    """Forward FLOPs of the whole model on ``batch`` samples; backward is twice as many."""
    return model.layers * block_flops(model, batch) + head_flops(model, batch)


class Cut(NamedTuple):
    """Which share of a model's work one tensor-parallel rank has.

    inside   of products, attention, GELU and the columns' biases
    outside  of norms, sums, dropout and the rows' biases: what is done on the residual stream
    """

    inside: float = 1.0
    outside: float = 1.0


WHOLE = Cut()


def forward_pieces(
    model: ModelSpec, batch: int, cut: Cut = WHOLE
) -> dict[str, list[tuple[str, Work]]]:
    """Forward of one micro-batch: {part: [(layer, work)]}, in order.

    Layers are the linear ones by their roles, "qkv", "proj", "up", "down" and "output", with what
    follows them, and "norm", "embedding" and "loss".
    """
    x, scores = sizes(model, batch)
    logits = x * model.vocab // model.hidden
    unit = 2 * batch * model.seq_len * model.hidden**2  # FLOPs of an h x h product
    explicit = model.attention == "explicit"
    drop = model.dropout > 0

    def work(inside: Work, outside: float = 0.0, kernels: float = 0.0, drawn: float = 0.0) -> Work:
        """outside, drawn: elements."""
        shared = Work(DRAW_FLOPS * drawn * drop, ITEM * outside * cut.outside, kernels)
        return inside.share(cut.inside) + shared

    def linear(flops: float) -> Work:
        return product(flops, "forward")

    # A bias is written into the result before the product is added to it. Explicit attention scales
    # q (2), makes q, k, v and its result contiguous (4x2), and masks and normalizes the scores.
    attended = product(4 * batch * model.seq_len**2 * model.hidden, "input")
    core = attended + Work(EXP_FLOPS * scores, 0, 5)
    if explicit:
        elements = 10 * x + (7 if drop else 4) * scores
        core += Work(0, ITEM * elements, 7 + drop)
    norm = work(Work(), 2 * x, 3)
    dropped = 3 * x * drop
    block = [
        ("norm", norm),
        ("qkv", work(linear(3 * unit) + Work(0, ITEM * 6 * x, 3) + core, drawn=scores)),
        ("proj", work(linear(unit), 5 * x + dropped, 5 + drop, drawn=x)),
        ("norm", norm),
        ("up", work(linear(4 * unit) + Work(GELU_FLOPS[0] * 4 * x, ITEM * 16 * x, 4))),
        ("down", work(linear(4 * unit), 5 * x + dropped, 3 + drop, drawn=x)),
    ]
    head = [
        ("norm", work(Work(), 2 * x, 2)),
        ("output", work(linear(head_flops(model, batch)), 0, 1)),
        ("loss", work(Work(EXP_FLOPS * logits, ITEM * 3 * logits, 3))),
    ]
    embedding = [("embedding", work(Work(), 6 * x + dropped, 5 + drop, drawn=x))]
    blocks = {f"blocks.{i}": block for i in range(model.layers)}
    return {"embedding": embedding, **blocks, "head": head}


def forward_parts(model: ModelSpec, batch: int, cut: Cut = WHOLE) -> dict[str, Work]:
    """Forward of one micro-batch, by the module prefix that the parameters carry, in order.

    Keys: "embedding", "blocks.0" ..., "head".
    """
    pieces = forward_pieces(model, batch, cut)
    block = total(work for _, work in pieces["blocks.0"])
    return {
        part: block if part.startswith("blocks.") else total(work for _, work in layers)
        for part, layers in pieces.items()
    }


class BackwardPart(NamedTuple):
    """Some of a micro-batch's backward: what it costs, and whose gradients it completes.

    part          "embedding", "blocks.0" ... or "head": what of the model it differentiates
    input, weight work of the two halves; a whole backward does both
    names         parameters whose gradient is complete with the input half, or with the whole
    weight_names  those whose gradient is the weight half: linear layers' weights and biases
    layer         "qkv", "proj", "up", "down", "output", "norm" or "embedding"
    """

    part: str
    input: Work
    weight: Work
    names: tuple[str, ...]
    weight_names: tuple[str, ...]
    layer: str

    @property
    def whole(self) -> Work:
        return self.input + self.weight

    def in_block(self, at: str) -> BackwardPart:
        """The same of another block."""
        names, weight_names = (
            tuple([at + name[len(self.part) :] for name in some])
            for some in (self.names, self.weight_names)
        )
        return BackwardPart(at, self.input, self.weight, names, weight_names, self.layer)


def backward_parts(
    model: ModelSpec, batch: int, *, accumulate: bool
) -> list[tuple[Work, tuple[str, ...]]]:
    """Backward of one micro-batch in the order it runs: (work, parameters whose gradient it
    completes).

    accumulate  whether gradients are added to those of an earlier micro-batch; the first one's are
                kept as they come. The names at each entry are in the order in which they complete.
                A tied embedding is complete at the very end, when both its uses have been
                differentiated.
    """
    return [
        (p.whole, p.names + p.weight_names)
        for p in backward_halves(model, batch, accumulate=accumulate)
    ]


def backward_halves(
    model: ModelSpec, batch: int, *, accumulate: bool, cut: Cut = WHOLE,
    held: Mapping[str, int] | None = None, parts: Container[str] | None = None,
) -> list[BackwardPart]:  # fmt: skip
    """``backward_parts``, each with what belongs to the input and to the weight half.

    cut   the share of a tensor-parallel rank; ``held``: elements of the parameters that it holds
    parts of the model that are asked for; default: all

    A linear layer's two products cost the same: one makes the gradient of its input, which the
    stage before waits for, the other that of its weight, which can wait (Zero Bubble, Qi+ 2023,
    arXiv:2401.10241, sec. 2.3, table 1). Everything else is input half.
    """
    x, scores = sizes(model, batch)
    logits = x * model.vocab // model.hidden
    if held is None:  # asked for only where gradients are added up
        shapes = model.parameter_shapes() if accumulate else {}
        held = {name: math.prod(shape) for name, shape in shapes.items()}
    explicit = model.attention == "explicit"
    unit = 2 * batch * model.seq_len * model.hidden**2  # FLOPs of an h x h product
    attended = product(8 * batch * model.seq_len**2 * model.hidden, "input")
    made: list[BackwardPart] = []

    def handed(*names: str) -> Work:
        """Handing a gradient over to its parameter is a call; adding it up costs three passes."""
        added = 0.0
        for name in names if accumulate else ():
            added += 3 * held.get(name, 0)  # read the old, read the new, write the sum
        return Work(0, ITEM * added, len(names))

    def part(at: str, layer: str, elements: float, kernels: float, *names: str,
             inside: float = 0.0) -> None:  # fmt: skip
        moved = elements * cut.outside + inside * cut.inside
        work = Work(0, ITEM * moved, kernels) + handed(*names)
        made.append(BackwardPart(at, work, Work(), names, (), layer))

    def linear(at: str, layer: str, products: float, more: Work, inside: float, outside: float,
               kernels: float, *names: str, bias: float = 0.0) -> None:  # fmt: skip
        """Two products of ``products`` FLOPs together, ``more`` work inside, and elements read and
        written inside and outside of a pair of layers; ``bias`` elements are read for the bias's
        own gradient.
        """
        late = 2 if bias else 1  # kernels: the product, the bias's sum
        bias *= cut.outside if layer in ("proj", "down") else cut.inside
        elements = inside * cut.inside + outside * cut.outside
        rest = (product(products / 2, "input") + more).share(cut.inside)
        rest += Work(0, ITEM * elements, kernels - late)
        weight = product(products / 2 * cut.inside, "weight") + Work(0, ITEM * bias, late)
        made.append(BackwardPart(at, rest, weight + handed(*names), (), names, layer))

    head = () if model.tied else ("head.output.weight",)
    linear("head", "output", 2 * head_flops(model, batch), Work(), 4 * logits, 0, 5, *head)
    part("head", "norm", 5 * x, 2, "head.norm.bias", "head.norm.weight")
    drop = 3 * x if model.dropout else 0
    wanted = [i for i in reversed(range(model.layers)) if parts is None or f"blocks.{i}" in parts]
    before = len(made)
    for i in wanted[:1]:  # the others are like it, but for their names
        at, b = f"blocks.{i}", f"blocks.{i}."
        linear(at, "down", 8 * unit, Work(), 0, drop, 3, b + "mlp.down.bias", b + "mlp.down.weight",
               bias=x)  # fmt: skip
        linear(at, "up", 8 * unit, Work(GELU_FLOPS[1] * 4 * x), 12 * x, 0, 5,
               b + "mlp.up.bias", b + "mlp.up.weight", bias=4 * x)  # fmt: skip
        part(at, "norm", 8 * x, 3, b + "norm2.bias", b + "norm2.weight")
        linear(at, "proj", 2 * unit, Work(), 0, drop, 3,
               b + "attention.proj.bias", b + "attention.proj.weight", bias=x)  # fmt: skip
        if explicit:  # four products, softmax, mask, scale, contiguous copies
            mixed = 10 * x + (8 if model.dropout else 5) * scores
            kernels = 19
        else:
            mixed, kernels = 0, 9
        linear(at, "qkv", 6 * unit, attended, mixed + 12 * x, 0, kernels,
               b + "attention.qkv.bias", b + "attention.qkv.weight", bias=3 * x)  # fmt: skip
        part(at, "norm", 8 * x, 3, b + "norm1.bias", b + "norm1.weight")
    block = made[before:]
    for i in wanted[1:]:
        made += [p.in_block(f"blocks.{i}") for p in block]
    part("embedding", "embedding", 6 * x + drop, 6,
         "embedding.position.weight", "embedding.token.weight",
         inside=2 * model.vocab * model.hidden)  # fmt: skip
    return made if parts is None else [p for p in made if p.part in parts]


def attention_core_work(model: ModelSpec, batch: int) -> Work:
    """What selective recomputation does again in a block: from the result of qkv to proj's input.

    The two products with the scores, 4 b s^2 h FLOPs, and the kernels between them, without the
    random numbers, which nobody shares.
    """
    x, scores = sizes(model, batch)
    core = product(4 * batch * model.seq_len**2 * model.hidden, "input")
    core += Work(EXP_FLOPS * scores, 0, 5)
    if model.attention != "explicit":
        return core
    dropped = 3 * scores if model.dropout else 0
    return core + Work(0, ITEM * (10 * x + 4 * scores + dropped), 7 + bool(model.dropout))


def recompute_work(model: ModelSpec, batch: int, recompute: str, cut: Cut = WHOLE) -> Work:
    """What the backward of one block computes again first: parallel/recompute.py."""
    if recompute == "none":
        return Work()
    if recompute == "selective":
        drawn = sizes(model, batch)[1] * (model.dropout > 0)
        return attention_core_work(model, batch).share(cut.inside) + Work(DRAW_FLOPS * drawn)
    return forward_parts(model, batch, cut)["blocks.0"]


def optimizer_work(
    model: ModelSpec, *, optimizer: str, parameters: Mapping[Any, int] | None = None,
    mixed: bool = False,
) -> Work:  # fmt: skip
    """One fused optimizer step.

    AdamW reads weight, gradient and two moments and writes all but the gradient: 7 Psi elements;
    SGD 3 Psi. parameters: elements of each tensor that it updates, of a shard those that the rank
    owns; default: the whole model's. mixed: gradients and weights have 16 bits, the optimizer works
    on masters in fp32, one tensor after the other (parallel/precision.py): 12 bytes per element
    more, and a call for each.
    """
    # One call, but Python collects the tensors one by one.
    tensors, psi = len(model.parameter_shapes()), model.num_params
    if parameters is not None:
        tensors, psi = len(parameters), sum(parameters.values())
    more = Work(0, 12 * psi, 8 * tensors) if mixed else Work()
    if optimizer == "adamw":
        return more + Work(0, ITEM * 7 * psi, 5 + tensors)
    return more + Work(0, ITEM * 3 * psi, 5 + tensors / 2)


def bucket_copy_work(elements: int, parameters: int) -> Work:
    """Putting the complete gradients of one bucket together: every element is read and written.

    One call per parameter makes it a view into the bucket.
    """
    return Work(0, ITEM * 2 * elements, 3 + parameters)


def sizes(model: ModelSpec, batch: int) -> tuple[int, int]:
    """Elements of the residual stream, b s h, and of the explicit scores, a b s^2."""
    return (
        batch * model.seq_len * model.hidden,
        batch * model.heads * model.seq_len**2,
    )
