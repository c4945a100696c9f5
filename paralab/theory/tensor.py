"""Tensor parallelism in theory: what a layer's ranks send, and which share of its work they have.

For Y = X W with X (M, K), W (K, N), all ranks of a tp group together, in elements sent:

    mode    layer          forward                          backward
    1d      column         0                                2 (P-1) M K
            row            2 (P-1) M N                      0
    1d, sequence parallel
            column         (P-1) M K                        2 (P-1) M K      gathered a second time
            row            (P-1) M N                        (P-1) M N
    2d      any            (q-1) (M K + K N)                2 (q-1) (M K + K N)
    2.5d    any            (q-1) (M K + d K N)              2 (q-1) (M K + d K N), and once per step
                                                            2 (d-1) K N for the weight's gradient
    3d      any            (q-1) (M K + K N + M N)          (q-1) (M K + K N + M N)

P = tp; 2d: P = q^2, 2.5d: d q^2, 3d: q^3. Per rank they are a P-th of that: `linear_elements`. The
logits of "2d" and "2.5d" come from a weight that lies the other way: there it is M N, not M K. The
sources of the formulas are those of the paradigms' files; 3d's K N is not part of a weight's
gradient alone but of what forward brings together and backward sums.

`linear_calls` and its like are those calls one by one, in the order in which a rank makes them: the
counterpart of parallel/tensor_parallel.py, tensor_2d.py, tensor_25d.py and tensor_3d.py.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import NamedTuple

from paralab.parallel.buckets import cut
from paralab.parallel.layouts import (
    SHARED_PHASE,
    extents,
    groups,
    kind_of,
    mode_of,
    residual_shape,
)
from paralab.spec import ModelSpec, Plan
from paralab.theory.formulas import Cut
from paralab.theory.parameters import rank_units

# (inputs, outputs) of a linear layer, in h; the logits' are (1, V/h)
ROLES = {"qkv": (1, 3), "proj": (1, 1), "up": (1, 4), "down": (4, 1)}
OUTWARD = ("proj", "down")  # they lead back to the residual stream


class Call(NamedTuple):
    """A call of every rank of a group. elements: of the full buffer; root: a member's index."""

    op: str
    elements: int
    axis: str
    phase: str
    root: int = -1


class Calls(NamedTuple):
    """What a layer sends, by when: before and after its product; in backward before the input's
    gradient, ``beside`` the weight's (waited for at the end), and with the weight's.
    """

    before: tuple[Call, ...] = ()
    after: tuple[Call, ...] = ()
    backward: tuple[Call, ...] = ()
    beside: tuple[Call, ...] = ()
    weight: tuple[Call, ...] = ()


def matrix(model: ModelSpec, role: str) -> tuple[int, int]:
    """(K, N) of a linear layer: "qkv", "proj", "up", "down", or "output", the logits."""
    if role == "output":
        return model.hidden, model.vocab
    inputs, outputs = ROLES[role]
    return inputs * model.hidden, outputs * model.hidden


def linear_elements(model: ModelSpec, plan: Plan, role: str) -> tuple[Fraction, Fraction]:
    """(forward, backward) elements that one rank sends for a linear layer and micro-batch, on
    average over the tp group; without what 2.5D sums once per step (`depth_elements`).
    """
    m, (k, n) = plan.microbatch_size * model.seq_len, matrix(model, role)
    q, d = plan.tp_grid
    if plan.tp_mode == "1d":
        p, row = plan.tp, role in OUTWARD
        x = m * (n if row else k)
        if plan.sequence_parallel:
            forward, backward = (p - 1) * x, (p - 1) * x * (1 if row else 2)
        else:
            forward, backward = (2 * (p - 1) * x, 0) if row else (0, 2 * (p - 1) * x)
    elif plan.tp_mode == "3d":
        forward = backward = (q - 1) * (m * k + k * n + m * n)
    else:
        forward = (q - 1) * (m * (n if role == "output" else k) + d * k * n)
        backward = 2 * forward
    return Fraction(forward, plan.tp), Fraction(backward, plan.tp)


def depth_elements(model: ModelSpec, plan: Plan, role: str) -> Fraction:
    """Elements that one rank of 2.5D sends once per step to sum a weight's gradient over depth.

    With ZeRO of its own share of it, after data parallelism; on average over the dp ranks.
    """
    (q, d), (k, n) = plan.tp_grid, matrix(model, role)
    if plan.tp_mode != "2.5d":
        return Fraction(0)
    share = plan.shard_degree if plan.zero_stage else 1
    return Fraction(2 * (d - 1) * k * n, d * q * q * share)


# ---- the calls, one by one ----------------------------------------------------------------------
def linear_calls(model: ModelSpec, plan: Plan, role: str) -> Calls:
    """Of a linear layer on one micro-batch."""
    what = "head" if role == "output" else "linear"
    forward, backward = f"{what}_forward", f"{what}_backward"
    m, (k, n) = plan.microbatch_size * model.seq_len, matrix(model, role)
    if plan.tp == 1:
        return Calls()
    if plan.tp_mode == "1d":
        return _linear_1d(m * model.hidden, plan, role, forward, backward)
    q, d = plan.tp_grid
    if plan.tp_mode == "3d":
        rows, terms = ("tp:k", "tp:j") if role in OUTWARD else ("tp:j", "tp:k")
        x, w, y = m * k // q**2, k * n // q**2, m * n // q**2
        return Calls(
            before=(Call("all_gather", x, rows, forward), Call("all_gather", w, "tp:i", forward)),
            after=(Call("reduce_scatter", y, terms, forward),),
            backward=(Call("all_gather", y, terms, backward),),
            beside=(Call("reduce_scatter", x, rows, backward),),
            weight=(Call("reduce_scatter", w, "tp:i", backward),),
        )
    x, w, y = m * k // (d * q * q), k * n // (q * q), m * n // (d * q * q)

    def summa(phase: str, *moves: tuple[str, int, str]) -> tuple[Call, ...]:
        return tuple(
            Call(op, size, axis, phase, step) for step in range(q) for op, size, axis in moves
        )

    spread_w, sum_w = ("broadcast", w, "tp:col"), ("reduce", w, "tp:col")
    spread_x, sum_x = ("broadcast", x, "tp:row"), ("reduce", x, "tp:row")
    if role == "output":
        spread_y, sum_y = ("broadcast", y, "tp:row"), ("reduce", y, "tp:row")
        return Calls(before=summa(forward, spread_w, sum_y),
                     backward=summa(backward, spread_y, spread_w),
                     weight=summa(backward, spread_y, sum_w))  # fmt: skip
    return Calls(before=summa(forward, spread_x, spread_w),
                 backward=summa(backward, spread_w, sum_x),
                 weight=summa(backward, spread_x, sum_w))  # fmt: skip


def _linear_1d(x: int, plan: Plan, role: str, forward: str, backward: str) -> Calls:
    """x: elements of the residual stream."""
    row = role in OUTWARD
    if not plan.sequence_parallel:
        if row:
            return Calls(after=(Call("all_reduce", x, "tp", forward),))
        return Calls(beside=(Call("all_reduce", x, "tp", backward),))
    again = (Call("all_gather", x, "tp", backward),)
    if row:
        return Calls(after=(Call("reduce_scatter", x, "tp", forward),), backward=again)
    return Calls(before=(Call("all_gather", x, "tp", forward),), backward=again,
                 beside=(Call("reduce_scatter", x, "tp", backward),))  # fmt: skip


def norm_calls(model: ModelSpec, plan: Plan) -> Calls:
    """Of a norm whose features lie on several ranks: two numbers per token, forward and back."""
    mode = mode_of(plan)
    features = mode.residual[2]
    p = math.prod(extents(plan)[name] for name in features)
    if plan.tp == 1 or not features:
        return Calls()
    (axis,) = (name for name, varying in mode.axes.items() if varying == features)
    tokens = math.prod(residual_shape(model, plan)[:2])
    return Calls(before=(Call("all_gather", 2 * tokens * p, axis, "norm_forward"),),
                 backward=(Call("all_reduce", 2 * tokens, axis, "norm_backward"),))  # fmt: skip


def embedding_calls(model: ModelSpec, plan: Plan) -> Calls:
    """Of the token embedding: the sum of what the ranks found."""
    if plan.tp == 1:
        return Calls()
    x, (q, _) = plan.microbatch_size * model.seq_len * model.hidden, plan.tp_grid
    if plan.tp_mode == "1d" and not plan.sequence_parallel:
        return Calls(after=(Call("all_reduce", x, "tp", "embedding_forward"),))
    axis, parts = {"1d": ("tp", 1), "2d": ("tp:col", q), "2.5d": ("tp:col", q * plan.tp_grid[1]),
                   "3d": ("tp:ij", q)}[plan.tp_mode]  # fmt: skip
    scatter = Call("reduce_scatter", x // parts, axis, "embedding_forward")
    return Calls(after=(scatter,), backward=(scatter._replace(
        op="all_gather", phase="embedding_backward"),))  # fmt: skip


def loss_calls(model: ModelSpec, plan: Plan) -> Calls:
    """Of the cross-entropy: two numbers per token from each rank that has a part of its logits."""
    if plan.tp == 1:
        return Calls()
    sizes, (samples, _, entries) = extents(plan), mode_of(plan).logits
    tokens = plan.microbatch_size * model.seq_len // math.prod(sizes[name] for name in samples)
    axis = {"1d": "tp", "3d": "tp:j"}.get(plan.tp_mode, "tp:row")
    p = math.prod(sizes[name] for name in entries)
    return Calls(after=(Call("all_gather", 2 * tokens * p, axis, "loss_forward"),))


def calls(model: ModelSpec, plan: Plan) -> dict[str, Calls]:
    """{layer: what it sends} for the layers of theory/formulas.py."""
    found = {role: linear_calls(model, plan, role) for role in (*ROLES, "output")}
    found["embedding"], found["loss"] = embedding_calls(model, plan), loss_calls(model, plan)
    return found | {"norm": norm_calls(model, plan)}


def partition_calls(model: ModelSpec, plan: Plan) -> tuple[Call, ...]:
    """What brings a block's input together where each tp rank keeps a part: ZeRO-R's Pa."""
    if not plan.partition_activations:
        return ()
    x = plan.microbatch_size * model.seq_len * model.hidden
    return (Call("all_gather", x, "tp", "recompute"),)


def shared_calls(model: ModelSpec, plan: Plan, rank: int, sizes: dict[str, int]) -> list[Call]:
    """Once per step: sums of the gradients that several tp ranks have a part of each.

    sizes  elements of every parameter of the rank; with ZeRO it is its shards that are summed
    """
    if plan.tp == 1:
        return []
    pieces = [(name, size) for name, size in sizes.items()]
    if plan.zero_stage:
        made, pieces = rank_units(model, plan, rank), []
        index = plan.ranks("shard", rank).index(rank)
        inside = {name for unit in made for name in unit.names}
        pieces += [(name, size) for name, size in sizes.items() if name not in inside]
        for unit in made:
            own = unit.numel // plan.shard_degree
            mine = cut({name: sizes[name] for name in unit.names}, index * own, own)
            pieces += [(name, where.stop - where.start) for name, _, where in mine]
    found: dict[tuple[str, str], int] = {}
    mode = mode_of(plan)
    for name, size in pieces:
        kind = kind_of(name)
        if kind in mode.partial and model.trainable(name):
            key = mode.copies.get(kind, ""), SHARED_PHASE.get(kind, "shared")
            found[key] = found.get(key, 0) + size
    return [Call("all_reduce", size, axis, phase) for (axis, phase), size in found.items()]


def group_size(plan: Plan, axis: str) -> int:
    return len(groups(plan, axis)[0])


# ---- shares -------------------------------------------------------------------------------------
def share_of_work(plan: Plan) -> Cut:
    """What one rank has to compute of a layer."""
    kept = shares(plan)
    return Cut(inside=1 / kept.inside, outside=1 / kept.outside)


class Shares(NamedTuple):
    """By how much a rank's part of a tensor is smaller than the whole: divisors.

    outside  the residual stream: inputs of norms, dropout masks, sums
    entered  what qkv, up and the logits keep of their input
    inside   between a pair of layers: q, k, v, scores, GELU; logits
    left     what proj and down keep of their input
    tokens   numbers per token: a norm's mean and deviation; a loss's indices
    weights  of the linear layers' weights kept gathered (3D); 0: none are
    samples  of a micro-batch's samples, where attention is, and of the heads
    heads
    lookups  of the tokens that a rank looks up in its part of the embedding
    """

    outside: int = 1
    entered: int = 1
    inside: int = 1
    left: int = 1
    tokens: int = 1
    weights: int = 0
    samples: int = 1
    heads: int = 1
    lookups: int = 1


WHOLE = Shares()


def shares(plan: Plan) -> Shares:
    """Of the plan's mode."""
    t, (q, d) = plan.tp, plan.tp_grid
    if t == 1:
        return WHOLE
    if plan.tp_mode == "1d":
        s = t if plan.sequence_parallel else 1
        return Shares(outside=s, entered=s, inside=t, left=t, tokens=s, heads=t)
    if plan.tp_mode == "3d":
        return Shares(t, q * q, t, q * q, q * q, q * q, samples=q * q, heads=q)
    return Shares(t, t, t, t, d * q, samples=d * q, heads=q, lookups=d)
