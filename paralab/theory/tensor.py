"""Tensor parallelism in theory: what a layer's ranks send.

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
logits of "2d" and "2.5d" come from a weight that lies the other way: there it is M N, not M K. In
3d, K N is sent twice: forward gathers the weight, backward reduce-scatters its gradient.
"""

from __future__ import annotations

from fractions import Fraction

from paralab.checks import choice
from paralab.spec import ModelSpec, Plan

# (inputs, outputs) of a linear layer, in h; the logits' are (1, V/h)
ROLES = {"qkv": (1, 3), "proj": (1, 1), "up": (1, 4), "down": (4, 1)}
OUTWARD = ("proj", "down")  # they lead back to the residual stream


def matrix(model: ModelSpec, role: str) -> tuple[int, int]:
    """(K, N) of a linear layer: "qkv", "proj", "up", "down", or "output", the logits."""
    if choice("role", role, (*ROLES, "output")) == "output":
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
